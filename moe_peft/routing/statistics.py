"""
Statistics of routing: compliance, entropy, load and how healthy it is.

Legend: T tokens, L layers, n experts, k active experts. Where layers differ in n, logits are padded (`pad_logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..utils.torch_contexts import double
from .gates import check_top_k, stacked


def compliance(router_logits: Sequence[torch.Tensor] | torch.Tensor, allowed_TN: torch.Tensor) -> torch.Tensor:
    """
    Return `Σ_e m_e p_e`, the probability given by routers to the experts of a token's label.

    Args:
        router_logits: one [T, n] per layer, or [L, T, n].
        allowed_TN: m, bool [T, n], true for the experts of the token's label.

    Returns:
        probabilities [L, T], of each layer and token.
    """
    if {logits_TN.shape for logits_TN in router_logits} != {allowed_TN.shape}:
        raise ValueError(f"compliance: allowed_TN has shape {list(allowed_TN.shape)}; give that of each layer's logits")
    return (stacked(router_logits).softmax(-1) * allowed_TN).sum(-1)


def entropies(router_logits: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """
    Return the entropy of the routers' distributions.

    Args:
        router_logits: one [T, n] per layer, or [L, T, n].

    Returns:
        nats [L, T], of each layer and token: 0 to log n.
    """
    return torch.special.entr(stacked(router_logits).softmax(-1)).sum(-1)


def expert_counts(logits_TN: torch.Tensor, mask_T: torch.Tensor | None, k: int) -> torch.Tensor:
    """
    Count the (token, slot) assignments per expert of a top-k choice without steering. `chosen_experts` counts the
    actual choice of a router.

    Args:
        logits_TN: router logits [T, n].
        mask_T: 1 for tokens that count; all if None.
        k: experts per token.

    Returns:
        float64 [n]. The sum is k times the number of tokens that count.
    """
    check_top_k(logits_TN, k)
    if mask_T is not None and mask_T.shape != logits_TN.shape[:1]:
        raise ValueError(f"expert_counts: mask_T has shape {list(mask_T.shape)}; give one entry per token")
    chosen_TN = torch.zeros_like(logits_TN, dtype=torch.float32).scatter_(1, logits_TN.topk(k, dim=-1).indices, 1.0)
    count_N = chosen_TN.sum(0) if mask_T is None else (chosen_TN * mask_T.unsqueeze(1)).sum(0)  # exact below 2²⁴
    return double(count_N)


def chosen_experts(experts_TK: torch.Tensor, gates_TK: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """
    Return the experts that serve each token, chosen with a gate other than 0.

    Args:
        experts_TK: the chosen experts, int64 [T, k], or [L, T, k] of several layers.
        gates_TK: their gates; None: none is 0.
        num_experts: n.

    Returns:
        bool [T, n], or [L, T, n].
    """
    chosen_TN = torch.zeros(*experts_TK.shape[:-1], num_experts, dtype=torch.bool, device=experts_TK.device)
    kept_TK = torch.ones_like(experts_TK, dtype=torch.bool) if gates_TK is None else gates_TK != 0
    return chosen_TN.scatter_(-1, experts_TK, kept_TK)


def effective_experts(gates_TK: torch.Tensor) -> torch.Tensor:
    """
    Return the effective number of experts in a token's gates, `(Σg)² / Σg²`: k if they are equal, near 1 if one has
    almost all.

    Args:
        gates_TK: gates or probabilities [T, k]; a common factor does not matter.

    Returns:
        float [T]; 0 for a token without experts.
    """
    share_TK = gates_TK.float() / gates_TK.float().sum(-1, keepdim=True)
    return share_TK.square().sum(-1).reciprocal().nan_to_num(0)


def counted_experts(
    routers: Sequence[Any], router_logits: Sequence[torch.Tensor] | torch.Tensor, ks: Sequence[int]
) -> list[torch.Tensor] | None:
    """
    Return the experts counted by the balancing loss, bool [T, n] per layer. They are chosen by a router's own rule,
    such as "top_p", and with its biases, but before the capacity of "switch". Return None if all routers choose the k
    best of one k.

    Args:
        routers: one per layer, of this package or a native MoE's gate.
        router_logits: the routers' logits, [T, n] per layer.
        ks: active experts per token, per layer.
    """
    if len(set(ks)) == 1 and not any(map(_has_rule, routers)):
        return None
    counted = []
    for router, logits_TN, k in zip(routers, router_logits, ks, strict=True):
        if _has_rule(router):
            own_TN = logits_TN.detach()
            if router.num_experts < own_TN.shape[-1]:  # padded to the largest layer's n
                own_TN = own_TN[:, : router.num_experts]
            gates_TK, experts_TK = router.choose(own_TN, k, True)
        else:
            gates_TK, experts_TK = None, logits_TN.topk(k, dim=-1).indices
        counted.append(chosen_experts(experts_TK, gates_TK, logits_TN.shape[-1]))
    return counted


def _has_rule(router: Any) -> bool:
    """Return whether a router may choose other experts than the k largest logits do."""
    return getattr(router, "leaves_out", False) or getattr(router, "expert_bias", None) is not None


# Measured with linear gates with random weights on the FFN inputs of a pretrained model (SmolLM2-135M-Instruct, 30
# layers, 4 to 64 experts, 1 to 8 of them active). The load varies by 0.27 to 0.39 of the maximum, √(n/k - 1), and in
# nine of ten layers by less than 0.55. About n of 100 experts get next to nothing. Up to 3 layers are monopolies.
_UNTRAINED, _UNEVEN, _MONOPOLY = 0.35, 0.5, 0.7
_DEAD_PER_EXPERT, _MOST_DEAD, _MOST_MONOPOLIES = 0.015, 0.5, 0.1  # shares of experts, and of layers
_DEAD, _DEAD_OF_EVEN = 0.01, 0.25
# A load is judged only if its variation, or the variation of untrained gates, is more than this many times the
# variation of even routing by chance.
_CLEARLY = 3.0
REMEDY = "raise `router_aux_loss_coef` to 0.1, with `router_balancing='layer'`"


@dataclass(frozen=True)
class LoadHealth:
    """
    How evenly a model's experts are used.

    Args:
        variation: the coefficient of variation of the loads in a layer, averaged over layers.
        untrained: about the variation of gates with random weights.
        by_chance: the variation of as many random assignments.
        dead: experts with less than 1 % of their layer's assignments (a quarter of the even load, if that is less).
        experts: number of experts in all layers.
        monopolies: layers with a load that varies by more than 0.7 of the maximum: as many experts as serve each token
            serve nearly all tokens.
        layers: number of layers with experts.
    """

    variation: float
    untrained: float
    by_chance: float
    dead: int
    experts: int
    monopolies: int
    layers: int

    @property
    def status(self) -> Literal["even", "uneven", "collapsed", "unknown"]:
        """
        "collapsed": more layers are monopolies, or more experts dead, than with untrained gates. "uneven": the load
        varies clearly more than with untrained gates. "unknown": there are too few assignments to tell the load from
        even routing.
        """
        if self.by_chance == 0 or self.untrained <= _CLEARLY * self.by_chance >= self.variation:
            return "unknown"
        dead = min(_DEAD_PER_EXPERT * self.experts / self.layers, _MOST_DEAD)
        if self.monopolies > _MOST_MONOPOLIES * self.layers or self.dead > dead * self.experts:
            return "collapsed"
        return "uneven" if self.variation > _UNEVEN / _UNTRAINED * self.untrained else "even"

    @property
    def warning(self) -> str:
        """Status, numbers and a remedy in one line; empty if nothing is wrong."""
        return f"{self}. Try this: {REMEDY}" if self.status in ("uneven", "collapsed") else ""

    def __str__(self) -> str:
        return (
            f"{self.status}, CV {self.variation:.2f} (untrained gates: {self.untrained:.2f}), monopolies: "
            f"{self.monopolies} of {self.layers} layers, dead: {self.dead} of {self.experts} experts"
        )


def load_health(counts_LN: torch.Tensor, sizes: Sequence[int], tokens: float) -> LoadHealth:
    """
    Measure how evenly the assignments are spread over experts.

    Args:
        counts_LN: assignments per layer and expert, [L, n], on the CPU.
        sizes: experts of each layer; the rest of a row is padding.
        tokens: number of tokens with these assignments.

    Returns:
        the layers' variations, with a verdict in a word or a sentence.
    """
    size_L, assigned_L = torch.tensor(sizes).double(), counts_LN.sum(1).double()
    loads = [counts_N[:n] for counts_N, n in zip(counts_LN, sizes, strict=True)]
    variation_L = torch.tensor([variation(load_N) for load_N in loads], dtype=torch.float64)
    k_L = (assigned_L / max(tokens, 1)).clamp(min=1)
    most_L = (size_L / k_L - 1).clamp(min=0).sqrt()
    chance_L = torch.where(assigned_L > 0, (size_L - 1) / assigned_L, 0).sqrt()
    share_LN = counts_LN.double() / assigned_L.unsqueeze(1)  # NaN without assignments, so no expert is dead
    idle_LN = share_LN < (_DEAD_OF_EVEN / size_L).clamp(max=_DEAD).unsqueeze(1)
    return LoadHealth(
        variation=float(variation_L.mean()),
        untrained=float(_UNTRAINED * most_L.mean()),
        by_chance=float(chance_L.mean()),
        dead=sum(int(idle_N[:n].sum()) for idle_N, n in zip(idle_LN, sizes, strict=True)),
        experts=sum(sizes),
        monopolies=int(((variation_L > _CLEARLY * chance_L) & (variation_L > _MONOPOLY * most_L)).sum()),
        layers=len(sizes),
    )


def variation(load_N: torch.Tensor) -> float:
    """
    Return the coefficient of variation of a layer's load: the standard deviation divided by the mean.

    Args:
        load_N: the experts' assignments, or shares of them, [n].

    Returns:
        0 if the load is even; at most `√(n/k - 1)`, if k experts serve every token.
    """
    load_N = load_N.double()
    return float(load_N.std(correction=0) / load_N.mean()) if load_N.any() else 0.0
