"""
Statistics of router logits: compliance, entropy, load.

Legend: T tokens, L layers, n experts, k active experts. Where layers differ in n, logits are padded (`pad_logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def compliance(router_logits: Sequence[torch.Tensor], allowed_TN: torch.Tensor) -> torch.Tensor:
    """`Σ_e m_e p_e`, the probability that routers give to the experts of a token's label, [L, T]."""
    return torch.stack([(logits_TN.float().softmax(-1) * allowed_TN).sum(-1) for logits_TN in router_logits])


def entropies(router_logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Entropy in nats of the routers' distributions, [L, T]."""
    return torch.stack([torch.special.entr(logits_TN.float().softmax(-1)).sum(-1) for logits_TN in router_logits])


def expert_counts(logits_TN: torch.Tensor, mask_T: torch.Tensor | None, k: int) -> torch.Tensor:
    """Number of (token, slot) assignments per expert, float64 [n]; they sum to k times the number of real tokens."""
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
    How evenly the assignments are spread over experts.

    Args:
        counts_LN: assignments per layer and expert, [L, n], on the CPU.
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
