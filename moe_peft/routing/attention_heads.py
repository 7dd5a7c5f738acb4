"""
Computes an attention router's queries and keys from attention heads (Router Upcycling, sections 3.2 and 5.2.1).

Legend: H query heads of width w, d hidden size, m routers, n experts, d' = H·w/m the width of a router.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn

from ..utils.messages import InputError


def attention_weights(
    weight_HD: torch.Tensor, mean_keys_K: torch.Tensor, mean_input_D: torch.Tensor, head_dim: int, m: int, n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Compute the queries and keys of an attention router (Router Upcycling, equations 4 and 5; section 5.2.1 for m ≠ n).

    Heads are concatenated into m groups. If m does not divide H, each head is first split into as many parts as needed.
    With fewer routers than experts, the heads' keys are repeated n/m times and grouped into n. With more, each expert
    has m/n keys. With grouped-query attention, query heads that share a key head would give several experts the same
    key, and these experts would always get the same logits: see `share_keys`.

    Args:
        weight_HD: the query projection [H·w, d].
        mean_keys_K: mean keys [H'·w] of H' key heads. Each key head serves H/H' query heads.
        mean_input_D: mean input of the attention, [d]. Its queries are the heads' mean queries.

    Returns:
        query [m, d', d] and key [n, max(1, m/n), d'].
    """
    heads, d = weight_HD.shape[0] // head_dim, weight_HD.shape[1]
    check_heads(heads, head_dim, m, n)
    parts = _parts_of_a_head(heads, m)
    key_heads = mean_keys_K.numel() // head_dim
    keys_PW = mean_keys_K.view(key_heads, head_dim).repeat_interleave(heads // key_heads, dim=0)
    keys_PW = keys_PW.reshape(heads * parts, -1)
    mean_queries_PW = (weight_HD @ mean_input_D).view_as(keys_PW)
    groups = group_heads(keys_PW, m)
    query_MWD = weight_HD.view(heads * parts, -1, d)[torch.tensor(groups)].flatten(1, 2)
    if m < n:
        keys_PW, mean_queries_PW = keys_PW.repeat(n // m, 1), mean_queries_PW.repeat(n // m, 1)
        groups = group_heads(keys_PW, n)
    chosen = torch.tensor(groups)
    key_GW = share_keys(keys_PW[chosen].flatten(1), mean_queries_PW[chosen].flatten(1))
    return query_MWD, key_GW.view(n, max(1, m // n), -1)


def check_heads(heads: int, head_dim: int, m: int, n: int) -> None:
    """Raise ValueError if `heads` heads of width `head_dim` do not give m routers of n experts."""
    if head_dim % _parts_of_a_head(heads, m) or max(m, n) % min(m, n):
        raise InputError(
            f"init_attention_routers: num_heads={m}: must divide the attention's size {heads * head_dim}, and divide, "
            f"or be a multiple of, num_experts={n}; try {fitting_heads(heads, head_dim, n)}"
        )


def fitting_heads(heads: int, head_dim: int, n: int) -> int:
    """Return the largest number of routers, at most n, that fits n experts and `heads` heads of width `head_dim`."""
    fits = (m for m in range(n, 0, -1) if n % m == 0 and head_dim % _parts_of_a_head(heads, m) == 0)
    return next(fits)  # 1, if no other


def _parts_of_a_head(heads: int, m: int) -> int:
    """Return the number of parts to split each head into, so m divides the number of all parts."""
    return m // math.gcd(heads, m)


def group_heads(keys_HW: torch.Tensor, groups: int) -> list[list[int]]:
    """
    Group heads by similarity, in groups of equal size. The most similar pair of free heads starts a group. Then the
    free head with the highest mean similarity to the group joins it, until the group is full.

    Args:
        keys_HW: mean keys [H, w].
    """
    heads = range(len(keys_HW))
    size = len(heads) // groups
    if size == 1:
        return [[head] for head in heads]
    unit_HW = nn.functional.normalize(keys_HW.double().cpu(), dim=1)
    similarity = (unit_HW @ unit_HW.T).round(decimals=9).tolist()  # equal heads compare equal, however summed
    pairs = sorted(itertools.combinations(heads, 2), key=lambda pair: -similarity[pair[0]][pair[1]])
    free, result = set(heads), []
    for _ in range(groups):
        group = list(next(pair for pair in pairs if free.issuperset(pair)))
        free -= set(group)
        while len(group) < size:
            candidates = sorted(free)
            nearness = [sum(similarity[head][member] for member in group) for head in candidates]
            group.append(candidates[nearness.index(max(nearness))])
            free.remove(group[-1])
        result.append(group)
    return result


def key_families(keys_GW: torch.Tensor) -> torch.Tensor:
    """Return, for each of the keys [g, d'], the index of the first key equal to it, [g]."""
    exact_GW = keys_GW.double()  # in float32, the distances of many keys are not exact
    near_GG = torch.cdist(exact_GW, exact_GW) <= 1e-6 * exact_GW.norm(dim=1, keepdim=True)
    return near_GG.int().argmax(1)


def share_keys(keys_GW: torch.Tensor, mean_queries_GW: torch.Tensor) -> torch.Tensor:
    """
    Divide a key common to several groups of heads among these groups. Other keys stay unchanged.

    Every entry of the key goes to one group: the group whose mean query gains the most from the entry in its score
    `mean_query·key`, among groups with less than an even share of the entries. All other entries of the group's key are
    zero, and the rest is scaled to the complete key's length. So the keys of a family are orthogonal. Each is a part of
    the mean key in the paper, the part that matters most to the group's own queries. Logits are as large as with
    complete keys.

    Args:
        keys_GW: keys of the groups [g, d'].
        mean_queries_GW: their mean queries [g, d'].
    """
    family_G = key_families(keys_GW)
    result_GW = keys_GW.clone()
    for first in family_G.unique().tolist():
        members = (family_G == first).nonzero().flatten()
        if len(members) == 1:
            continue
        gains_SW = mean_queries_GW[members] * keys_GW[first]
        shares_SW = keys_GW[first] * _even_shares(gains_SW.double()).to(keys_GW)
        length = keys_GW[first].norm() / shares_SW.norm(dim=1, keepdim=True).clamp(min=1e-30)
        result_GW[members] = shares_SW * length
    return result_GW


def _even_shares(gains_SW: torch.Tensor) -> torch.Tensor:
    """
    Assign each column to a row. The largest gain comes first: its column goes to its row, unless the row has an even
    share. Return a mask, bool [s, d'], with each column in one row.
    """
    rows, width = gains_SW.shape
    if width < rows:
        raise InputError(
            f"init_attention_routers: {rows} experts share a key of {width} entries; use fewer routers (num_heads) or "
            "fewer experts"
        )
    owner, free = [-1] * width, [width // rows] * rows
    for index in gains_SW.cpu().flatten().argsort(descending=True, stable=True).tolist():
        row, column = divmod(index, width)
        if owner[column] < 0 and free[row]:
            owner[column] = row
            free[row] -= 1
    for column in (column for column in range(width) if owner[column] < 0):  # fewer columns than rows
        owner[column] = int(gains_SW[:, column].argmax())
    return (torch.tensor(owner) == torch.arange(rows).unsqueeze(1)).to(gains_SW.device)
