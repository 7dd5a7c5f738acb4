"""
What routers learn in stage 3, on logits alone.

Legend: L layers, B rows, S positions, n experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..routing.gates import own_experts


@dataclass(frozen=True)
class Objective:
    """
    A routing objective.

    Args:
        loss: router logits [L, B, S, n] and the index of each row's own expert [L, B, S, 1] → loss [L, B, S].
        own_logit_only: the loss reads the logit of a row's own expert alone, so experts can be trained apart, as in
            the mode `ffn`.
    """

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    own_logit_only: bool = False


def _positive(logits_LBSN: torch.Tensor, own_LBS1: torch.Tensor) -> torch.Tensor:
    """`BCE(sigmoid(x·r_i), 1)` of the row's own expert i (the paper's Equation 2)."""
    return F.softplus(-logits_LBSN.gather(-1, own_LBS1).squeeze(-1))


def _one_vs_rest(logits_LBSN: torch.Tensor, own_LBS1: torch.Tensor) -> torch.Tensor:
    """The binary cross-entropy of all experts, averaged: target 1 for the own expert, 0 for the others."""
    target = torch.zeros_like(logits_LBSN).scatter_(-1, own_LBS1, 1.0)
    own = own_experts(logits_LBSN)
    losses = F.binary_cross_entropy_with_logits(logits_LBSN, target, reduction="none")
    return (losses * own).sum(-1) / own.sum(-1)


def _softmax(logits_LBSN: torch.Tensor, own_LBS1: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of the softmax over experts: label-supervised routing with the bucket as the label."""
    return -logits_LBSN.log_softmax(-1).gather(-1, own_LBS1).squeeze(-1)


OBJECTIVES: dict[str, Objective] = {
    "positive": Objective(_positive, own_logit_only=True),
    "one_vs_rest": Objective(_one_vs_rest),
    "softmax": Objective(_softmax),
}


def routing_loss(
    router_logits: Sequence[torch.Tensor], experts_B: torch.Tensor, mask_BS: torch.Tensor, objective: str
) -> torch.Tensor:
    """
    The routing loss of each row, summed over its real tokens and averaged over the layers, [B].

    Args:
        router_logits: one [B·S, n] per layer.
        experts_B: the expert of each row.
        mask_BS: 1 for real tokens, 0 for padding.
        objective: a name in `OBJECTIVES`.
    """
    rows, length = mask_BS.shape
    logits_LBSN = torch.stack([logits.view(rows, length, -1) for logits in router_logits])
    own_LBS1 = experts_B.view(1, rows, 1, 1).expand(*logits_LBSN.shape[:3], 1)
    loss_LBS = OBJECTIVES[objective].loss(logits_LBSN, own_LBS1)
    return (loss_LBS.mean(0) * mask_BS.to(loss_LBS.dtype)).sum(-1)
