"""
Router modules: they map hidden states [..., d] to float32 router logits [T, n] (T tokens), and logits to gates.

`ROUTERS` is the table of routers. A new router is one class and one line there. The rest of the package reads only a
router's traits, the class attributes of `Router`. No other file compares router names.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from ..utils.compat import private
from ..utils.messages import InputError
from ..utils.settings import COUNT, NOT_NEGATIVE, POSITIVE, Range, setting
from ..utils.torch_contexts import double, evaluating, is_autocast, without_autocast
from .gates import sigmoid_gates, switch_gates, threshold_gates, top_k_gates, top_p_gates

Mixture = Literal["sum", "max"]
_top_saved_tensors_hooks = private("torch._C._autograd", "_top_saved_tensors_default_hooks")


@dataclass(frozen=True)
class RouterSettings:
    """
    Settings of a router. Settings with a help text are also fields of `MoELoraConfig`, with the prefix `router_`.

    Args:
        type: a name in `ROUTERS`.
        jitter_noise: ε. In training, the router's input is multiplied by noise from U(1 - ε, 1 + ε).
        threshold: with `"top_p"`, the probability to be reached by the chosen experts together (None: 0.8). With
            `"threshold"`, the smallest probability of a chosen expert (None: 1/n).
        capacity_factor: with `"switch"`, limits the tokens of an expert in training to this multiple of an even share
            of the batch. Padding counts, so pack or pad on the right. Tokens over the limit get no update. None: no
            limit.
        num_heads: with `"attention"`, the number of routers in the mixture. The base's heads are grouped into them.
            None: the number of experts.
        mixture: with `"attention"`, how the routers' scores are combined: `"sum"`, which can be folded into a linear
            gate, or `"max"`.
        bias_update_rate: u, above 0 to balance without a loss (Wang et al., 2024, arXiv 2408.15664; there 0.001). A
            bias of each expert is added to the scores only to choose experts. After each optimizer step, it grows by u
            for experts with fewer tokens than the mean, and shrinks by u for the others. Needs `RouterBiasCallback`,
            added by our trainers themselves. Set `router_aux_loss_coef` to 0 or a small value.
        attention_size: with `"attention"`, the width of the base's queries over all heads; adapters fill it in.
    """

    type: str = "linear"
    jitter_noise: float = setting(0.0, "Training noise on the router's input.", Range(at_least=0, below=1))
    threshold: float | None = setting(None, "Probability for 'top_p' and 'threshold'.", Range(above=0, at_most=1))
    capacity_factor: float | None = setting(None, "Capacity of experts for 'switch'.", POSITIVE)
    num_heads: int | None = setting(None, "Routers in an attention router's mixture.", COUNT)
    mixture: Mixture = setting("sum", "How their scores combine: 'sum' or 'max'.", get_args(Mixture))
    bias_update_rate: float = setting(0.0, "Step of the biases that balance experts.", NOT_NEGATIVE)
    attention_size: int = 0


class Router(nn.Module):
    """
    Base class of routers. Routers compute in float32 (in float64 if their input is), whatever the storage dtype and the
    autocast context.

    Args:
        hidden_size: d, the size of the router's input.
        num_experts: n.
        settings: see `RouterSettings`. With `jitter_noise` ε, the input is multiplied by noise from U(1 - ε, 1 + ε) in
            training (Fedus et al., 2021, section 2.4). With `bias_update_rate` u, experts are chosen by biased scores
            (`expert_bias`), and training moves the biases in steps of u (Wang et al., 2024, arXiv 2408.15664).

    Example:

    ```python
    >>> from moe_peft import MoELoraConfig
    >>> from moe_peft.routing import ROUTERS, Router
    >>> from moe_peft.routing.routers import LinearRouter
    >>> class CosineRouter(LinearRouter):
    ...     no_fold = "its logits are cosines"
    ...
    ...     def logits(self, x_TD):
    ...         return super().logits(x_TD / x_TD.norm(dim=-1, keepdim=True))
    >>> ROUTERS["cosine"] = CosineRouter
    >>> config = MoELoraConfig(router_type="cosine")
    >>> issubclass(config.router_class, Router)
    True
    ```
    """

    # --- traits: read by the rest of the package ---
    no_fold: ClassVar[str] = ""  # why no linear gate with a softmax over the top k equals this router; "": one does
    linear_gate: ClassVar[bool] = False  # whether it is such a gate already (not inherited)
    has_parameters: ClassVar[bool] = True  # whether it has anything to train
    leaves_out: ClassVar[bool] = False  # whether a token may get fewer experts than top_k
    all_experts: ClassVar[bool] = False  # whether each token gets all experts; a balancing loss is then constant
    only_top_k: ClassVar[int | None] = None  # the only supported top_k; gates are then not normalized
    no_output_mixing: ClassVar[str] = ""  # why it cannot be used with mixing="output"
    needs_attention: ClassVar[bool] = False  # whether its size depends on the base's attention
    takes_attention: ClassVar[bool] = False  # whether `set_heads` can initialize it from the base's attention
    needs_token_ids: ClassVar[bool] = False  # whether it computes `token_logits`, from hidden states and token ids
    is_constant: ClassVar[bool] = False  # whether training cannot change its logits, so losses on them are constants
    expert_rows: ClassVar[tuple[str, ...]] = ()  # parameters [n, …] with a row per expert; (): it cannot lose experts
    reads: ClassVar[tuple[str, ...]] = ()  # settings read besides the jitter noise; others raise an error
    sized: ClassVar[dict[str, Callable[[int], Any]]] = {}  # values from n for settings of None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.linear_gate = cls.__dict__.get("linear_gate", False)
        if cls.needs_token_ids and not cls.no_fold:
            cls.no_fold = "it reads token ids, and a linear gate reads hidden states"

    def __init__(self, hidden_size: int, num_experts: int, settings: RouterSettings | None = None) -> None:
        super().__init__()
        self.hidden_size, self.num_experts, self.settings = hidden_size, num_experts, settings or RouterSettings()
        if self.settings.bias_update_rate:
            # In steps of u, as integers: unlike floats they do not change with the dtype of the model.
            self.bias_steps: torch.Tensor
            self.register_buffer("bias_steps", torch.zeros(num_experts, dtype=torch.long))
        self.stands_for: dict[str, int] = {}  # parameter → number of equal-gradient parameters it replaces
        self.make()

    def make(self) -> None:
        """Create and initialize the parameters."""

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return router logits [T, n] of float32 (or float64) inputs [T, d]."""
        raise NotImplementedError

    def token_logits(self, x_TD: torch.Tensor, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return router logits [T, n] of inputs [T, d] and their token ids [T]. Only with `needs_token_ids`."""
        raise NotImplementedError

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gates and experts [T, k] in the form of `top_k_gates`. A gate of 0 leaves an expert out."""
        return top_k_gates(logits_TN, k, normalize, self.expert_bias)

    @property
    def expert_bias(self) -> torch.Tensor | None:
        """Biases b [n], added to the scores only to choose experts; None without `bias_update_rate`."""
        rate = self.settings.bias_update_rate
        return self.bias_steps * rate if rate else None

    def forward(self, hidden_states: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """
        Return router logits, float32 [T, n].

        Args:
            hidden_states: [..., d].
            token_ids: [...], for routers with `needs_token_ids`.
        """
        stored_TD = hidden_states if hidden_states.dim() == 2 else hidden_states.reshape(-1, hidden_states.shape[-1])
        x_TD = stored_TD if stored_TD.dtype in (torch.float32, torch.float64) else stored_TD.float()
        noise = self.settings.jitter_noise
        if self.training and noise:
            stored_TD = x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - noise, 1 + noise)
        if not (torch.is_grad_enabled() or is_autocast(x_TD)):  # decoding: the contexts would take as long as a product
            return self._checked_logits(x_TD, token_ids)
        with without_autocast(x_TD), _saved_as(stored_TD, x_TD):
            return self._checked_logits(x_TD, token_ids)

    def _checked_logits(self, x_TD: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """
        Return the logits, or raise if shape or dtype are wrong. A user's router with another shape would silently leave
        out experts.
        """
        if not self.needs_token_ids:
            logits_TN = self.logits(x_TD)
        elif token_ids is None:
            raise self._error("token_ids=None: call the model with input_ids")
        else:
            logits_TN = self.token_logits(x_TD, token_ids.reshape(-1))
        if logits_TN.dim() != 2 or logits_TN.shape[1] != self.num_experts:
            raise self._error(f"its logits are {list(logits_TN.shape)}, must be [T, {self.num_experts}]")
        if logits_TN.dtype != x_TD.dtype:
            raise self._error(f"its logits are {logits_TN.dtype}, must be {x_TD.dtype}; cast weights to the input's")
        return logits_TN

    def _error(self, text: str) -> InputError:
        return InputError(f"router_type={self.settings.type!r}: {text}")

    @torch.no_grad()
    def fold(self, k: int = 1, normalize: bool = False) -> torch.Tensor:
        """
        Return the weight of the equivalent linear gate, float64 [n, d].

        Args:
            k: top_k, used to compare both on random tokens.
            normalize: normalize_top_k, used in the same way.
        """
        if next(self.parameters(), torch.empty(())).device.type == "mps":  # it has no float64
            return copy.deepcopy(self).cpu().fold(k, normalize)
        if self.no_fold:
            raise InputError(f"router_type={self.settings.type!r} does not fold into a linear gate: {self.no_fold}")
        if (bias_N := self.expert_bias) is not None and bias_N.any():
            raise InputError(
                f"router_bias_update_rate={self.settings.bias_update_rate}: a linear gate has no biases, and those of "
                "this router are not 0; anneal them at the end of the training (router_bias_anneal)"
            )
        weight_ND = self._folded()
        x_TD = torch.randn(32, self.hidden_size, generator=torch.Generator().manual_seed(0)).to(weight_ND)
        with evaluating(self):
            logits_TN, folded_TN = self._checked_logits(x_TD, None), x_TD @ weight_ND.T
            gates_TK = self.choose(logits_TN, k, normalize)[0]
        tolerance = 1e-6 * max(1.0, float(logits_TN.abs().max()))
        if not (torch.allclose(logits_TN, folded_TN, atol=tolerance) and torch.allclose(
            gates_TK, top_k_gates(logits_TN, k, normalize)[0], atol=1e-6
        )):  # fmt: skip
            raise InputError(
                f"router_type={self.settings.type!r} does not fold into a linear gate: the gate routes differently; "
                "say why in the class attribute no_fold"
            )
        return weight_ND

    def _folded(self) -> torch.Tensor:
        """Return the folded weight. This version works for any router with logits linear in its input."""
        like = next(self.parameters(), torch.empty(()))
        unit_DD = torch.eye(self.hidden_size, dtype=torch.float64, device=like.device)
        return self._checked_logits(unit_DD, None).T.contiguous()

    def set_heads(self, query_MWD: torch.Tensor, key_NCW: torch.Tensor) -> None:
        """Initialize from an attention's queries [m, d', d] and mean keys [n, c, d'] (if `takes_attention`)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, num_experts={self.num_experts}"


def _saved_as(stored_TD: torch.Tensor, x_TD: torch.Tensor) -> AbstractContextManager:
    """
    Make autograd keep a router's input as it is stored, inside the block, and not as a float32 copy. The backward pass
    makes the copy again. No effect if a checkpoint, another hook or a compiler decides on saved tensors.
    """
    if stored_TD.dtype == x_TD.dtype or not torch.is_grad_enabled():
        return nullcontext()
    if torch.compiler.is_compiling() or _top_saved_tensors_hooks(False) is not None:
        return nullcontext()
    kept_TD, address = stored_TD.detach(), x_TD.untyped_storage()._cdata

    def pack(saved: torch.Tensor) -> torch.Tensor | None:
        is_whole = (saved.shape, saved.stride()) == (x_TD.shape, x_TD.stride())
        return None if is_whole and saved.untyped_storage()._cdata == address else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: kept_TD.float() if packed is None else packed)


class LinearRouter(Router):
    """`logits = x Wᵀ`, the gate of Mixtral and similar models."""

    linear_gate = True
    takes_attention = True
    expert_rows = ("weight",)
    reads: ClassVar[tuple[str, ...]] = ("bias_update_rate",)
    weight: nn.Parameter

    def make(self) -> None:
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.hidden_size))
        nn.init.normal_(self.weight, std=0.02)  # transformers' `initializer_range`

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TD, self.weight.to(x_TD.dtype))

    @torch.no_grad()
    def set_heads(self, query_MWD: torch.Tensor, key_NCW: torch.Tensor) -> None:
        self.weight.copy_(folded_weight(double(query_MWD).sum(0), double(key_NCW)))


class SwitchRouter(LinearRouter):
    """
    Top-1 with the probability as gate (Fedus et al., 2021, section 2.1).

    In training, an expert takes at most `capacity_factor · T / n` of a batch's T tokens: the first ones, including
    padding. The other tokens get no update. In evaluation no token is dropped, so an output does not depend on the rest
    of the batch. The router is then a linear gate with top_k=1 and normalize_top_k=False.
    """

    only_top_k = 1
    reads = ("capacity_factor",)
    no_output_mixing = "its gate is a probability and would scale complete FFNs down"

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        factor, (tokens, n) = self.settings.capacity_factor, logits_TN.shape
        return switch_gates(logits_TN, math.ceil(factor * tokens / n) if self.training and factor else None)


class SigmoidRouter(LinearRouter):
    """A linear gate with an independent sigmoid score for each expert (DeepSeek-V3, section 2.1.2)."""

    no_fold = "its gates are sigmoids, and a softmax over the chosen logits gives different weights"

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return sigmoid_gates(logits_TN, k, normalize, self.expert_bias)


class ArrowRouter(Router):
    """
    Absolute values of a linear gate's logits: how much of a token lies along each expert's direction, whatever its sign
    (Arrow, Ostapenko et al., 2024, arXiv 2405.11157). `moe_peft.init_gates` takes the directions from the LoRAs.
    """

    no_fold = "its logits are absolute values, which no linear gate gives"
    expert_rows = ("weight",)

    def make(self) -> None:
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TD, self.weight.to(x_TD.dtype)).abs()


class SoftRouter(LinearRouter):
    """A linear gate over all experts at once (LoRAMoE): top-k with k = n."""

    linear_gate = True
    reads = ()
    all_experts = True
    leaves_out = True


class TopPRouter(LinearRouter):
    """The fewest experts, at most top_k, that together reach a probability of `threshold` (Huang et al., 2024)."""

    no_fold = "the number of experts varies from token to token"
    leaves_out = True
    reads = ("threshold",)

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.settings.threshold
        return top_p_gates(logits_TN, k, normalize, 0.8 if p is None else p)


class ThresholdRouter(LinearRouter):
    """The experts, at most top_k, with a probability of at least `threshold` (1/n if None), and always the best one."""

    no_fold = "the number of experts varies from token to token"
    leaves_out = True
    reads = ("threshold",)
    sized: ClassVar = {"threshold": lambda n: 1 / n}

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.settings.threshold
        return threshold_gates(logits_TN, k, normalize, 1 / self.num_experts if p is None else p)


class MLPRouter(Router):
    """Two linear layers, d → d and d → n, without biases and with GELU in between (Router Upcycling, section 4.3)."""

    no_fold = "there is a non-linearity between its two matrices"
    reads = ("bias_update_rate",)
    expert_rows = ("weight",)

    def make(self) -> None:
        self.hidden = nn.Parameter(torch.empty(self.hidden_size, self.hidden_size))
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.hidden_size))
        nn.init.normal_(self.hidden, std=0.02)
        nn.init.normal_(self.weight, std=0.02)

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x_TD, self.hidden.to(x_TD.dtype))), self.weight.to(x_TD.dtype))


class AttentionRouter(Router):
    """
    A mixture of m routers in the form of attention heads, `S_i = mix_j (W^j x)·K_i/√d'`, where d' is the width of the
    base's queries divided by m (Router Upcycling, section 3.3). Its initial values are random. `init_attention_routers`
    takes them from a base's attention.

    `key` is [n, c, d']. Only the best of an expert's c keys counts. With the mixture "max", `query` holds all W^j,
    [m, d', d]. With "sum", all W^j get the same gradient, so their mean, `mean_query` [1, d', d], is enough. It counts
    m times, but has the gradient of one W^j. So the sum of the W^j and the keys take the steps of m matrices under SGD,
    Adam and AdamW, weight decay included, if gradient clipping counts the mean m times (`stands_for`). Adam's L2
    penalty is an exception: it bends each matrix by its own values.
    """

    needs_attention = True
    takes_attention = True
    reads = ("num_heads", "mixture", "bias_update_rate")
    expert_rows = ("key",)
    sized: ClassVar = {"num_heads": lambda n: n}

    def make(self) -> None:
        s = self.settings
        m = s.num_heads or self.num_experts
        keys = max(m, self.num_experts)
        if keys % m or keys % self.num_experts or s.attention_size % m:
            raise InputError(
                f"router_num_heads={m}: must divide the base's attention size {s.attention_size} and divide, or be a "
                f"multiple of, the {self.num_experts} experts"
            )
        self.num_heads, width = m, s.attention_size // m
        # The sum, and each W^j of "max", gives as large logits as a linear gate with standard deviation 0.02.
        if s.mixture == "sum":
            self.mean_query = nn.Parameter(torch.empty(1, width, self.hidden_size))
            self.stands_for = {"mean_query": m}
            nn.init.normal_(self.mean_query, std=0.02 / m)
        else:
            self.query = nn.Parameter(torch.empty(m, width, self.hidden_size))
            nn.init.normal_(self.query, std=0.02)
        self.key = nn.Parameter(torch.empty(self.num_experts, keys // self.num_experts, width))
        nn.init.normal_(self.key)

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        query_QWD = self._queries(x_TD.dtype)
        queries, width, _ = query_QWD.shape
        query_TQW = F.linear(x_TD, query_QWD.flatten(0, 1)).view(-1, queries, width)
        scores_TQK = query_TQW @ (self.key.to(x_TD.dtype).flatten(0, 1).T / math.sqrt(width))
        return scores_TQK.view(-1, queries, *self.key.shape[:2]).amax(dim=(1, 3))

    def _queries(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the queries to take the best of: all [m, d', d], or their sum [1, d', d] with the gradient of one."""
        if self.settings.mixture == "max":
            return self.query.to(dtype)
        mean_1WD = self.mean_query.to(dtype)
        return mean_1WD + (self.num_heads - 1) * mean_1WD.detach()

    @property
    def no_fold(self) -> str:  # type: ignore[override]
        if self.settings.mixture == "max":
            return "with router_mixture='max' the best of several routers counts, which is not linear; only 'sum' folds"
        if (keys := self.key.shape[1]) > 1:
            return f"the best of an expert's {keys} keys counts, which is not linear; use at most num_experts heads"
        return ""

    def _folded(self) -> torch.Tensor:
        return folded_weight(self._queries(torch.float64).squeeze(0), self.key.double())

    @torch.no_grad()
    def set_heads(self, query_MWD: torch.Tensor, key_NCW: torch.Tensor) -> None:
        if self.settings.mixture == "max":
            self.query.copy_(query_MWD)
        else:
            self.mean_query.copy_(query_MWD.mean(0, keepdim=True))
        self.key.copy_(key_NCW)


def folded_weight(query_WD: torch.Tensor, key_N1W: torch.Tensor) -> torch.Tensor:
    """
    Return the linear gate [n, d] of an attention router with one key per expert, from the sum of its queries [d', d].
    """
    return key_N1W.squeeze(1) @ query_WD / math.sqrt(key_N1W.shape[-1])


class PooledRouter(Router):
    """
    A gate without parameters: logit i is the mean of the i-th of n equal parts of the hidden state (LocMoE's grouped
    average pooling). LocMoE's locality loss is not implemented: it is about experts on several devices.
    """

    has_parameters = False
    reads = ("bias_update_rate",)

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        d, n = x_TD.shape[-1], self.num_experts
        if d % n == 0:
            return x_TD.unflatten(-1, (n, d // n)).mean(-1)
        # Parts overlap by one, as in adaptive pooling. The backward of torch's adaptive pooling is not deterministic on
        # CUDA.
        i_N1, j_D = torch.arange(n, device=x_TD.device).unsqueeze(1), torch.arange(d, device=x_TD.device)
        part_ND = ((j_D >= i_N1 * d // n) & (j_D * n < (i_N1 + 1) * d)).to(x_TD.dtype)
        return F.linear(x_TD, part_ND / part_ND.sum(1, keepdim=True))


class HashRouter(Router):
    """
    A fixed map from token ids to experts (Hash Layers, Roller et al., 2021, arXiv 2106.04426, "random hash").

    A token id has the same k random experts in every context, with gates 1/k. Expert i's logit is a hash of the token
    id and of entry i of `salt`, uniform in [0, 1). Each layer draws its own salt. The salt is saved with the adapter.
    """

    needs_token_ids = True
    is_constant = True
    has_parameters = False

    def make(self) -> None:
        self.salt: torch.Tensor
        self.register_buffer("salt", torch.randint(2**62, (self.num_experts,)))

    def token_logits(self, x_TD: torch.Tensor, token_ids_T: torch.Tensor) -> torch.Tensor:
        # splitmix64 without its last step, because it does not reach the bits below. Products of int64 wrap around.
        hash_TN = token_ids_T.to(self.salt.device).unsqueeze(1).long() + self.salt
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            hash_TN = (hash_TN ^ _shifted(hash_TN, shift)) * factor
        # Keep 24 bits: float32 holds them exactly. The lowest of them are the expert's index, so no logits are equal.
        index_bits = (self.num_experts - 1).bit_length()
        index_N = torch.arange(self.num_experts, device=hash_TN.device)
        hash_TN = (_shifted(hash_TN, 40 + index_bits) << index_bits) + index_N
        return hash_TN.to(x_TD.dtype) / 2**24

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        experts_TK = logits_TN.topk(k, dim=-1).indices
        return torch.full_like(experts_TK, 1 / k, dtype=logits_TN.dtype), experts_TK


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift int64 to the right as if it were unsigned."""
    return (bits >> shift) & ((1 << (64 - shift)) - 1)


ROUTERS: dict[str, type[Router]] = {
    "linear": LinearRouter,
    "mlp": MLPRouter,
    "attention": AttentionRouter,
    "switch": SwitchRouter,
    "sigmoid": SigmoidRouter,
    "arrow": ArrowRouter,
    "soft": SoftRouter,
    "top_p": TopPRouter,
    "threshold": ThresholdRouter,
    "locmoe": PooledRouter,
    "hash": HashRouter,
}
"""The routers by their names, which configs take as `router_type`; one of your own takes one more line."""


def make_router(hidden_size: int, num_experts: int, settings: RouterSettings) -> Router:
    """
    Return a new router of the kind named by `settings.type`.

    Args:
        hidden_size: d, the size of the router's input.
        num_experts: n.
        settings: the router's type, and the settings read by this type.

    Returns:
        a module from hidden states [T, d] to logits [T, n].
    """
    return ROUTERS[settings.type](hidden_size, num_experts, settings)
