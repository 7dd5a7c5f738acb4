"""
Computes an attention router's queries and keys from attention heads (Router Upcycling, sections 3.2 and 5.2.1).

Legend: H query heads of width w, d hidden size, m routers, n experts, d' = H·w/m the width of a router.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from .routers import Mixture


def attention_weights(
    weight_HD: torch.Tensor,
    mean_keys_K: torch.Tensor,
    head_dim: int,
    m: int,
    n: int,
    mixture: Mixture = "sum",
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Queries and keys of an attention router (Router Upcycling, equations 4 and 5; section 5.2.1 for m ≠ n).

    Heads are concatenated into m groups. If m does not divide H, each head is first split into as many parts as needed.
    With fewer routers than experts, the heads' keys are repeated n/m times and grouped into n; with more, each expert
    has m/n keys.

    Args:
        weight_HD: the query projection [H·w, d].
        mean_keys_K: mean keys [H'·w] of H' key heads, each of which serves H/H' query heads.

    Returns:
        query [m, d', d] (with the mixture "sum" their sum, [1, d', d]) and key [n, max(1, m/n), d'].

    Raises:
        ValueError: m does not divide H·w, or neither of m and n divides the other.
    """
    heads, (size, d) = weight_HD.shape[0] // head_dim, weight_HD.shape
    parts = m // math.gcd(heads, m)
    if head_dim % parts or max(m, n) % min(m, n):
        raise ValueError(
            f"init_attention_routers: num_heads={m}: must divide the attention's size {size}, and divide, or be a "
            f"multiple of, the {n} experts"
        )
    key_heads = mean_keys_K.numel() // head_dim
    keys_PW = mean_keys_K.view(key_heads, head_dim).repeat_interleave(heads // key_heads, dim=0)
    keys_PW = keys_PW.reshape(heads * parts, -1)
    groups = group_heads(keys_PW, m)
    query_MWD = weight_HD.view(heads * parts, -1, d)[torch.tensor(groups)].flatten(1, 2)
    if m < n:
        keys_PW = keys_PW.repeat(n // m, 1)
        groups = group_heads(keys_PW, n)
    key_NCW = keys_PW[torch.tensor(groups)].view(n, max(1, m // n), -1)
    key_NCW = key_NCW + _separation(key_NCW.flatten(1), generator).view_as(key_NCW)
    return (query_MWD.sum(0, keepdim=True) if mixture == "sum" else query_MWD), key_NCW


def group_heads(keys_HW: torch.Tensor, groups: int) -> list[list[int]]:
    """
    Group heads by similarity, in groups of equal size. The most similar pair of free heads starts a group; then the
    free head with the highest mean similarity to the group joins it, until the group is full.

    Args:
        keys_HW: mean keys [H, w].
    """
    size = keys_HW.shape[0] // groups
    unit_HW = nn.functional.normalize(keys_HW.double().cpu(), dim=1)
    similarity = (unit_HW @ unit_HW.T).round(decimals=9)  # equal heads compare equal, however summed
    heads = keys_HW.shape[0]
    if size == 1:
        return [[head] for head in range(heads)]
    pairs = np.where(np.triu(np.ones((heads, heads), dtype=bool), 1), similarity.numpy(), -np.inf)
    taken = np.zeros(heads, dtype=bool)
    result = []
    for _ in range(groups):
        group = [int(i) for i in np.unravel_index(pairs.argmax(), pairs.shape)]
        taken[group] = True
        while len(group) < size:
            likeness = np.where(taken, -np.inf, similarity.numpy()[:, group].mean(1))
            group.append(int(likeness.argmax()))
            taken[group[-1]] = True
        pairs[group] = pairs[:, group] = -np.inf
        result.append(group)
    return result


def _separation(keys_NK: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Noise of a hundredth of their size for keys that an earlier expert already has, zero for the rest."""
    near_NN = torch.cdist(keys_NK.double(), keys_NK.double()) <= 1e-6 * keys_NK.double().norm(dim=1, keepdim=True)
    again_N1 = near_NN.tril(-1).any(1, keepdim=True)
    noise_NK = torch.randn(keys_NK.shape, generator=generator).to(keys_NK)
    return again_N1 * noise_NK * 0.01 * keys_NK.pow(2).mean(1, keepdim=True).sqrt()
