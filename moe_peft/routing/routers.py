"""
Router modules: hidden states [..., d] to float32 router logits [T, n], T the number of tokens, and logits to gates.

`ROUTERS` is the table of them; a new router is one class and one line there. What the rest of the package has to know
of a router are its traits, the class attributes of `Router`: no other file compares names of routers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ..contexts import evaluating, without_autocast
from .gates import sigmoid_gates, switch_gates, threshold_gates, top_k_gates, top_p_gates

Mixture = Literal["sum", "max"]


@dataclass(frozen=True)
class RouterSettings:
    """What a router is made of; the fields are `MoELoraConfig`'s, without their prefix."""

    type: str = "linear"
    jitter_noise: float = 0.0
    threshold: float | None = None
    capacity_factor: float | None = None
    num_heads: int | None = None
    mixture: Mixture = "sum"
    attention_size: int = 0  # width of the base's queries, all heads together


class Router(nn.Module):
    """
    What routers share. They compute in float32 (float64, if their input is) whatever the storage type or the autocast
    context.

    Args:
        hidden_size: d, the size of the router's input.
        num_experts: n.
        settings: see [`RouterSettings`]. With `jitter_noise` ε the input is multiplied by U(1 - ε, 1 + ε) in training
            (Fedus et al., 2021, section 2.4).
    """

    # --- traits: what the rest of the package asks for ---
    no_fold: ClassVar[str] = ""  # why no linear gate with a softmax over the top k equals this router; "": one does
    linear_gate: ClassVar[bool] = False  # whether it is such a gate already (each class says so for itself)
    leaves_out: ClassVar[bool] = False  # whether a token may get fewer experts than top_k
    all_experts: ClassVar[bool] = False  # whether each token gets all experts; a balancing loss is a constant then
    only_top_k: ClassVar[int | None] = None  # the one top_k that it knows; its gates are not normalised then
    no_output_mixing: ClassVar[str] = ""  # why it cannot be used with mixing="output"
    needs_attention: ClassVar[bool] = False  # whether its size follows from the base's attention
    takes_attention: ClassVar[bool] = False  # whether `set_heads` can give it initial values from the base's attention

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.linear_gate = cls.__dict__.get("linear_gate", False)

    def __init__(self, hidden_size: int, num_experts: int, settings: RouterSettings | None = None) -> None:
        super().__init__()
        self.hidden_size, self.num_experts = hidden_size, num_experts
        self.settings = settings or RouterSettings()
        self.make()

    def make(self) -> None:
        """Create the parameters, at their initial values."""

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Router logits [T, n] of float32 (or float64) inputs [T, d]."""
        raise NotImplementedError

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and experts [T, k] as `top_k_gates` has them. A gate of 0 leaves an expert out."""
        return top_k_gates(logits_TN, k, normalize)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Router logits of hidden states [..., d]: float32 [T, n]."""
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        x_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
        noise = self.settings.jitter_noise
        if self.training and noise:
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - noise, 1 + noise)
        with without_autocast(x_TD):
            return self.logits(x_TD)

    @torch.no_grad()
    def fold(self, k: int = 1, normalize: bool = False) -> torch.Tensor:
        """
        The weight of the linear gate that routes in the same way, float64 [n, d].

        Args:
            k, normalize: top_k and normalize_top_k, with which both are compared on random tokens.

        Raises:
            ValueError: no linear gate with a softmax over the top k does the same; the message says why.
        """
        if self.no_fold:
            raise ValueError(f"router_type={self.settings.type!r} does not fold into a linear gate: {self.no_fold}")
        weight_ND = self._folded()
        x_TD = torch.randn(32, self.hidden_size, generator=torch.Generator().manual_seed(0)).to(weight_ND)
        with evaluating(self):
            own_TN, folded_TN = self.logits(x_TD), x_TD @ weight_ND.T
            own_TK = self.choose(own_TN, k, normalize)[0]
        tolerance = 1e-6 * max(1.0, float(own_TN.abs().max()))
        if not (torch.allclose(own_TN, folded_TN, atol=tolerance) and torch.allclose(
            own_TK, top_k_gates(own_TN, k, normalize)[0], atol=1e-6
        )):  # fmt: skip
            raise ValueError(
                f"router_type={self.settings.type!r} does not fold into a linear gate: the gate routes differently; "
                "say why in the class attribute no_fold"
            )
        return weight_ND

    def _folded(self) -> torch.Tensor:
        """The folded weight; here that of any router whose logits are linear in its input."""
        like = next(self.parameters(), torch.empty(()))
        unit_DD = torch.eye(self.hidden_size, dtype=torch.float64, device=like.device)
        return self.logits(unit_DD).T.contiguous()

    def set_heads(self, query_MWD: torch.Tensor, key_NCW: torch.Tensor) -> None:
        """Take initial values from an attention's queries [m, d', d] and mean keys [n, c, d'] (`takes_attention`)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, num_experts={self.num_experts}"


class LinearRouter(Router):
    """`logits = x Wᵀ`, the gate of Mixtral and similar models."""

    linear_gate = True
    takes_attention = True
    weight: nn.Parameter

    def make(self) -> None:
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.hidden_size))
        nn.init.normal_(self.weight, std=0.02)  # transformers' `initializer_range`

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TD, self.weight.to(x_TD.dtype))

    @torch.no_grad()
    def set_heads(self, query_MWD: torch.Tensor, key_NCW: torch.Tensor) -> None:
        self.weight.copy_(folded_weight(query_MWD.double(), key_NCW.double()))


class SwitchRouter(LinearRouter):
    """
    Top-1 with the probability as gate (Fedus et al., 2021, section 2.1).

    In training an expert takes at most `capacity_factor · T / n` of a batch's T tokens, the first ones, padding among
    them; the others pass the layer by. In evaluation no token is dropped, so that an output does not depend on the
    batch it is in; in evaluation it is therefore a linear gate with top_k=1 and normalize_top_k=False.
    """

    only_top_k = 1
    no_output_mixing = "its gate is a probability and would scale whole FFNs down"

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        factor, (tokens, n) = self.settings.capacity_factor, logits_TN.shape
        return switch_gates(logits_TN, math.ceil(factor * tokens / n) if self.training and factor else None)


class SigmoidRouter(LinearRouter):
    """A linear gate whose scores are sigmoids, each expert's for itself (DeepSeek-V3, section 2.1.2)."""

    no_fold = "its gates are sigmoids, and a softmax over the chosen logits gives other weights"

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return sigmoid_gates(logits_TN, k, normalize)


class SoftRouter(LinearRouter):
    """A linear gate over all experts at once (LoRAMoE): top-k with k = n."""

    linear_gate = True
    all_experts = True
    leaves_out = True


class TopPRouter(LinearRouter):
    """As many experts, at most top_k, as it takes to reach a probability of `threshold` (Huang et al., 2024)."""

    no_fold = "the number of experts varies from token to token"
    leaves_out = True

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.settings.threshold
        return top_p_gates(logits_TN, k, normalize, 0.8 if p is None else p)


class ThresholdRouter(LinearRouter):
    """The experts, at most top_k, whose probability is at least `threshold` (1/n if None); the best one always."""

    no_fold = "the number of experts varies from token to token"
    leaves_out = True

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.settings.threshold
        return threshold_gates(logits_TN, k, normalize, 1 / self.num_experts if p is None else p)


class MLPRouter(Router):
    """d → d, GELU, → n, without biases (Router Upcycling, section 4.3)."""

    no_fold = "a non-linearity stands between its two matrices"

    def make(self) -> None:
        self.hidden = nn.Parameter(torch.empty(self.hidden_size, self.hidden_size))
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.hidden_size))
        nn.init.normal_(self.hidden, std=0.02)
        nn.init.normal_(self.weight, std=0.02)

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x_TD, self.hidden.to(x_TD.dtype))), self.weight.to(x_TD.dtype))


class AttentionRouter(Router):
    """
    A mixture of m routers in the form of attention heads, `S_i = mix_j (W^j x)·K_i/√d'`, d' the width of the base's
    queries divided by m (Router Upcycling, section 3.3). Initial values from a base's attention:
    `init_attention_routers`; until then they are random.

    `query` is [m, d', d], and with the mixture "sum" [1, d', d], the routers' sum: `Σ_j (W^j x)·K_i` is
    `((Σ_j W^j) x)·K_i`, so m matrices would learn what their sum learns, m times as fast. `key` is [n, c, d']; of an
    expert's c keys the best one counts.
    """

    needs_attention = True
    takes_attention = True

    def make(self) -> None:
        s = self.settings
        m = s.num_heads or self.num_experts
        keys = max(m, self.num_experts)
        if keys % m or keys % self.num_experts or s.attention_size % m:
            raise ValueError(
                f"router_num_heads={m}: must divide the base's attention size {s.attention_size} and divide, or be a "
                f"multiple of, the {self.num_experts} experts"
            )
        width = s.attention_size // m
        queries = 1 if s.mixture == "sum" else m
        self.query = nn.Parameter(torch.empty(queries, width, self.hidden_size))
        self.key = nn.Parameter(torch.empty(self.num_experts, keys // self.num_experts, width))
        nn.init.normal_(self.query, std=0.02)  # logits as large as a linear gate's with that deviation
        nn.init.normal_(self.key)

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        m, width, _ = self.query.shape
        query_TMW = F.linear(x_TD, self.query.to(x_TD.dtype).flatten(0, 1)).view(-1, m, width)
        scores_TMK = query_TMW @ (self.key.to(x_TD.dtype).flatten(0, 1).T / math.sqrt(width))
        return scores_TMK.view(-1, m, *self.key.shape[:2]).amax(dim=(1, 3))

    @property
    def no_fold(self) -> str:  # type: ignore[override]
        if self.settings.mixture == "max":
            return "with router_mixture='max' the best of several routers counts, which is not linear; only 'sum' folds"
        if self.key.shape[1] > 1:
            keys = self.key.shape[1]
            return f"the best of an expert's {keys} keys counts, which is not linear; use at most num_experts heads"
        return ""

    def _folded(self) -> torch.Tensor:
        return folded_weight(self.query.double(), self.key.double())

    @torch.no_grad()
    def set_heads(self, query_MWD: torch.Tensor, key_NCW: torch.Tensor) -> None:
        self.query.copy_(query_MWD)
        self.key.copy_(key_NCW)


def folded_weight(query_1WD: torch.Tensor, key_N1W: torch.Tensor) -> torch.Tensor:
    """The linear gate [n, d] of an attention router with one key per expert and the mixture "sum"."""
    return key_N1W.squeeze(1) @ query_1WD.squeeze(0) / math.sqrt(key_N1W.shape[-1])


class PooledRouter(Router):
    """
    A gate without parameters: logit i is the mean of the i-th of n equal parts of the hidden state (LocMoE's grouped
    average pooling). LocMoE's locality loss is about experts on several devices and has no place here.
    """

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool1d(x_TD, self.num_experts)


ROUTERS: dict[str, type[Router]] = {
    "linear": LinearRouter,
    "mlp": MLPRouter,
    "attention": AttentionRouter,
    "switch": SwitchRouter,
    "sigmoid": SigmoidRouter,
    "soft": SoftRouter,
    "top_p": TopPRouter,
    "threshold": ThresholdRouter,
    "locmoe": PooledRouter,
}


def make_router(hidden_size: int, num_experts: int, settings: RouterSettings) -> Router:
    """The router that `settings.type` names."""
    return ROUTERS[settings.type](hidden_size, num_experts, settings)
