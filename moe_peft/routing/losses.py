"""
Losses on router logits.

Legend: T tokens, L layers, n experts, k active experts. Where layers differ in n, logits are padded (`pad_logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch


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


def _weights(probabilities_LTN: torch.Tensor, mask_T: torch.Tensor | None) -> torch.Tensor:
    """Each token's share in a mean, [T]."""
    tokens = probabilities_LTN.shape[1]
    if mask_T is None:
        return probabilities_LTN.new_full((tokens,), 1 / tokens)
    mask_T = mask_T.to(probabilities_LTN.dtype)
    return mask_T / mask_T.sum().clamp(min=1)
