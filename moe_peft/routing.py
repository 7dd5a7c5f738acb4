"""Pure functions on router logits. T tokens, n experts, k active experts."""

from __future__ import annotations

import torch


def top_k_gates(logits_TN: torch.Tensor, k: int, normalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The k experts with the largest logits and their gates (METHODS as in Mixtral: softmax over all experts, keep k,
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


def pad_logits(logits_TN: torch.Tensor, n: int) -> torch.Tensor:
    """Logits [T, m] padded to [T, n] with the dtype's minimum: the added experts have probability 0."""
    missing = n - logits_TN.shape[-1]
    if missing == 0:
        return logits_TN
    return torch.nn.functional.pad(logits_TN, (0, missing), value=torch.finfo(logits_TN.dtype).min)
