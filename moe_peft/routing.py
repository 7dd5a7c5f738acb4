"""
Pure functions on router logits: gates, losses, statistics.

Legend: T tokens, L layers, n experts, k active experts. Where layers differ in n, logits are padded (`pad_logits`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

# From logits [T, n], k and whether to normalise, to gates and experts, each [T, k].
Choose = Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]


def top_k_gates(logits_TN: torch.Tensor, k: int, normalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The k experts with the largest logits and their gates (as in Mixtral: softmax over all experts, keep k,
    divide by their sum, which equals the softmax over the k logits alone).

    Args:
        logits_TN: router logits, float32 [T, n].
        k: experts per token.
        normalize: whether the k gates sum to 1; otherwise they are the probabilities among all n experts.

    Returns:
        gates [T, k] (differentiable) and expert indices, int64 [T, k], largest gate first.
    """
    top_logits_TK, experts_TK = logits_TN.topk(k, dim=-1)
    if normalize:
        return top_logits_TK.softmax(dim=-1), experts_TK
    return (top_logits_TK - logits_TN.logsumexp(dim=-1, keepdim=True)).exp(), experts_TK


def switch_gates(logits_TN: torch.Tensor, capacity: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The best expert with its probability as gate (Fedus et al., 2021, equations 1 and 2), each [T, 1].

    Args:
        capacity: tokens that an expert takes, in their order; the gate of the others is 0. None: all.
    """
    gates_T1, experts_T1 = logits_TN.softmax(-1).max(dim=-1, keepdim=True)
    if capacity is not None:
        place_TN = F.one_hot(experts_T1.squeeze(1), logits_TN.shape[1]).cumsum(0)
        gates_T1 = gates_T1 * (place_TN.gather(1, experts_T1) <= capacity)
    return gates_T1, experts_T1


def sigmoid_gates(logits_TN: torch.Tensor, k: int, normalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best experts with sigmoids of their logits as gates, divided by their sum if `normalize`, each [T, k]."""
    top_logits_TK, experts_TK = logits_TN.topk(k, dim=-1)
    return (F.logsigmoid(top_logits_TK).softmax(-1) if normalize else top_logits_TK.sigmoid()), experts_TK


def top_p_gates(logits_TN: torch.Tensor, k: int, normalize: bool, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `top_k_gates`, with gate 0 for experts after those whose probabilities sum to `p`."""
    probabilities_TK, experts_TK = logits_TN.softmax(-1).topk(k, dim=-1)
    before_TK = probabilities_TK.detach().cumsum(-1) - probabilities_TK.detach()
    return _kept_gates(probabilities_TK, before_TK < p, normalize), experts_TK


def threshold_gates(logits_TN: torch.Tensor, k: int, normalize: bool, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `top_k_gates`, with gate 0 for experts of a probability below `p`, except for the best one."""
    probabilities_TK, experts_TK = logits_TN.softmax(-1).topk(k, dim=-1)
    kept_TK = probabilities_TK >= p
    kept_TK[:, 0] = True
    return _kept_gates(probabilities_TK, kept_TK, normalize), experts_TK


def _kept_gates(probabilities_TK: torch.Tensor, kept_TK: torch.Tensor, normalize: bool) -> torch.Tensor:
    gates_TK = probabilities_TK * kept_TK
    return gates_TK / gates_TK.sum(-1, keepdim=True) if normalize else gates_TK


@dataclass(frozen=True)
class Steering:
    """
    A choice of experts from outside, for each row of a batch or for each token; one of

    Args:
        experts: the one expert, integers [B].
        allowed: which may be chosen, bool [B, n].
    """

    experts: torch.Tensor | None = None
    allowed: torch.Tensor | None = None

    def route(
        self, logits_TN: torch.Tensor, k: int, normalize: bool, choose: Choose = top_k_gates
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and experts as `choose` has them; with forced experts k is 1 and the gates are 1."""
        if self.experts is not None:
            experts_T1 = _per_token(self.experts, logits_TN).unsqueeze(1)
            # 1, but tied to the logits: reentrant checkpointing brings their gradient back through the layer's output.
            return logits_TN.gather(1, experts_T1) * 0 + 1, experts_T1
        assert self.allowed is not None
        return choose(logits_TN.masked_fill(~_per_token(self.allowed, logits_TN), -torch.inf), k, normalize)


def _per_token(of_rows: torch.Tensor, logits_TN: torch.Tensor) -> torch.Tensor:
    """What is given for each of B rows, for each of their T = B·S tokens."""
    rows, tokens = of_rows.shape[0], logits_TN.shape[0]
    if tokens % rows:
        raise ValueError(f"steered routing: {rows} rows are steered, the batch has {tokens} tokens; give one per row")
    return of_rows.to(logits_TN.device).repeat_interleave(tokens // rows, dim=0)


def pad_logits(logits_TN: torch.Tensor, n: int) -> torch.Tensor:
    """Logits [T, m] padded to [T, n] with the dtype's minimum: the added experts have probability 0."""
    missing = n - logits_TN.shape[-1]
    if missing == 0:
        return logits_TN
    return F.pad(logits_TN, (0, missing), value=torch.finfo(logits_TN.dtype).min)


# --- losses -----------------------------------------------------------------------------------------------------------


def balancing_loss(
    router_logits: Sequence[torch.Tensor],
    k: int,
    mask_T: torch.Tensor | None = None,
    scope: Literal["global", "layer"] = "global",
) -> torch.Tensor:
    """
    `n Σ_i f_i P_i`, f_i the share of assignments times k, P_i the mean probability (Fedus et al., 2021, equation 4,
    summed over the k slots as transformers does): k where loads are even.

    Args:
        router_logits: one [T, n] per layer.
        mask_T: 1 for tokens that count; all if None.
        scope: `"global"` pools the tokens of all layers (as transformers), `"layer"` averages the layers' losses.
    """
    probabilities_LTN = torch.stack(list(router_logits)).float().softmax(-1)
    n = probabilities_LTN.shape[-1]
    chosen_LTN = torch.zeros_like(probabilities_LTN).scatter_(-1, probabilities_LTN.topk(k, dim=-1).indices, 1.0)
    weights_T = _weights(probabilities_LTN, mask_T)
    f_LN = torch.einsum("ltn,t->ln", chosen_LTN, weights_T)
    P_LN = torch.einsum("ltn,t->ln", probabilities_LTN, weights_T)
    if scope == "global":
        return n * (f_LN.mean(0) * P_LN.mean(0)).sum()
    return n * (f_LN * P_LN).sum(-1).mean()


def z_losses(router_logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """`logsumexp(l)²` of each token, averaged over layers, [T] (Zoph et al., 2022, equation 5)."""
    return torch.stack([logits_TN.float().logsumexp(-1) ** 2 for logits_TN in router_logits]).mean(0)


def label_losses(router_logits: Sequence[torch.Tensor], allowed_TN: torch.Tensor) -> torch.Tensor:
    """
    `-log Σ_e m_e p_e` of each token, averaged over layers, [T]: label-supervised routing.

    Args:
        router_logits: one [T, n] per layer.
        allowed_TN: m, bool [T, n], true for the experts of the token's label.
    """
    per_layer = [
        logits_TN.float().logsumexp(-1) - logits_TN.float().masked_fill(~allowed_TN, -torch.inf).logsumexp(-1)
        for logits_TN in router_logits
    ]
    return torch.stack(per_layer).mean(0)


# --- statistics -------------------------------------------------------------------------------------------------------


def compliance(router_logits: Sequence[torch.Tensor], allowed_TN: torch.Tensor) -> torch.Tensor:
    """`Σ_e m_e p_e`, the probability that routers give to the experts of a token's label, [L, T]."""
    return torch.stack([(logits_TN.float().softmax(-1) * allowed_TN).sum(-1) for logits_TN in router_logits])


def entropies(router_logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Entropy in nats of the routers' distributions, [L, T]."""
    return torch.stack([torch.special.entr(logits_TN.float().softmax(-1)).sum(-1) for logits_TN in router_logits])


def expert_counts(logits_TN: torch.Tensor, mask_T: torch.Tensor | None, k: int) -> torch.Tensor:
    """How many (token, slot) assignments each expert gets, float64 [n]; they sum to k times the tokens that count."""
    chosen_TN = torch.zeros_like(logits_TN, dtype=torch.float64).scatter_(1, logits_TN.topk(k, dim=-1).indices, 1.0)
    return chosen_TN.sum(0) if mask_T is None else (chosen_TN * mask_T.unsqueeze(1)).sum(0)


@dataclass(frozen=True)
class LoadHealth:
    """How evenly experts are used, over all layers' experts."""

    coefficient_of_variation: float  # of the loads in a layer, averaged over layers; healthy below 0.3
    smallest: float  # share of a layer's assignments
    largest: float
    dead: int  # experts with less than 1 % of their layer's assignments


def load_health(counts_LN: torch.Tensor, sizes: Sequence[int]) -> LoadHealth:
    """
    Of the assignments per layer and expert.

    Args:
        counts_LN: [L, n], on the CPU.
        sizes: experts of each layer; the rest of a row is padding.
    """
    shares = [counts_N[:n].double() / counts_N.sum().clamp(min=1) for counts_N, n in zip(counts_LN, sizes, strict=True)]
    variations = [float(share_N.std(correction=0) / share_N.mean()) if share_N.any() else 0.0 for share_N in shares]
    return LoadHealth(
        sum(variations) / len(variations),
        min(float(share_N.min()) for share_N in shares),
        max(float(share_N.max()) for share_N in shares),
        sum(int((share_N < 0.01).sum()) for share_N in shares),
    )


def _weights(probabilities_LTN: torch.Tensor, mask_T: torch.Tensor | None) -> torch.Tensor:
    """Each token's share in a mean, [T]."""
    tokens = probabilities_LTN.shape[1]
    if mask_T is None:
        return probabilities_LTN.new_full((tokens,), 1 / tokens)
    mask_T = mask_T.to(probabilities_LTN.dtype)
    return mask_T / mask_T.sum().clamp(min=1)
