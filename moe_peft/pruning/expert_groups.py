"""
Which experts of a layer stay, and their tensors.

A group is a list of experts that become one; an expert in no group is dropped.

Legend: n experts before, m after (groups), g experts of a group, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..utils.expert_merging import similarities, update_gram, value_gram

# --- groups ----------------------------------------------------------------------------------------------------------

Groups = list[list[int]]


@dataclass(frozen=True)
class Rules:
    """What makes experts go, see `prune_experts`."""

    min_load: float = 0.0
    merge_twins: float | None = None
    experts_per_layer: int | None = None


@dataclass(frozen=True)
class LayerFacts:
    """
    What is known of a layer.

    Args:
        name: for messages.
        num_experts: n.
        smallest: as many experts must stay.
        load: each expert's share of the assignments, [n]; None without data.
        similarity: cosines, [n, n]; None if twins are not merged.
        dropped: the experts that are to go in any case.
    """

    name: str
    num_experts: int
    smallest: int
    load: torch.Tensor | None = None
    similarity: torch.Tensor | None = None
    dropped: Sequence[int] = ()

    def share(self, group: Sequence[int]) -> float:
        return 0.0 if self.load is None else float(self.load[list(group)].sum())


def plan_layers(layers: Sequence[LayerFacts], rules: Rules, same_size: bool) -> list[Groups]:
    """
    The groups of every layer.

    The least harmful go first: experts with a load below `min_load`, from the smallest on, then twins, from the most
    alike on, then, with `experts_per_layer`, whatever has the smallest load.

    Args:
        same_size: whether all layers must keep as many. Those that could lose more then lose as many as the others.

    Raises:
        ValueError: too few experts would stay, or layers that must keep as many cannot.
    """
    for layer in layers:
        count = rules.experts_per_layer
        if count is not None and not layer.smallest <= count <= layer.num_experts:
            raise ValueError(
                f"experts_per_layer={count}: {layer.name} has {layer.num_experts} experts and must keep "
                f"{layer.smallest}; use a number from {layer.smallest} to {layer.num_experts}"
            )
        left = layer.num_experts - len(set(layer.dropped))
        wanted = max(layer.smallest, rules.experts_per_layer or 0)
        if left < wanted:
            raise ValueError(
                f"{layer.name}: drop={sorted(set(layer.dropped))} leaves {left} of {layer.num_experts} experts; "
                f"keep at least {wanted}"
            )
    plan = [plan_layer(layer, rules) for layer in layers]
    if not same_size:
        return plan
    most = max(map(len, plan))
    plan = [plan_layer(layer, rules, most) for layer in layers]
    for layer, groups in zip(layers, plan, strict=True):
        if len(groups) != most:
            raise ValueError(
                f"{layer.name} keeps {len(groups)} experts, another layer {most}: a native MoE has as many in "
                f"every layer; drop fewer here or more there, or give experts_per_layer={len(groups)}"
            )
    return plan


def plan_layer(layer: LayerFacts, rules: Rules, least: int = 0) -> Groups:
    """The groups of one layer, at least `least` of them (fewer only where `dropped` leaves fewer)."""
    stop = max(layer.smallest, least, rules.experts_per_layer or 0)
    groups: Groups = [[i] for i in range(layer.num_experts) if i not in layer.dropped]
    idle = [] if layer.load is None else [i for [i] in groups if layer.load[i] < rules.min_load]
    for i in sorted(idle, key=lambda i: layer.share([i])):
        if len(groups) > stop:
            groups.remove([i])
    for a, b in _twins(layer, rules):
        if len(groups) > stop:
            _join(groups, a, b, layer, rules)
    if rules.experts_per_layer is not None:
        if len(groups) > stop and layer.load is None:
            raise ValueError(
                f"{layer.name}: experts_per_layer={rules.experts_per_layer}: {len(groups)} are left, and only "
                "data say which are used least; give data"
            )
        while len(groups) > stop:
            groups.remove(min(groups, key=layer.share))
    return groups


def weights_of(group: Sequence[int], layer: LayerFacts) -> torch.Tensor:
    """What each expert of a group counts in their mean, float64 [len(group)]: its load; all the same without data."""
    load = torch.ones(len(group)) if layer.load is None else layer.load[list(group)]
    load = load.double() if float(load.sum()) else torch.ones(len(group), dtype=torch.float64)
    return load / load.sum()


_ROUNDING = 1e-6  # of a cosine: that of copies is not 1 exactly


def _twins(layer: LayerFacts, rules: Rules) -> list[tuple[int, int]]:
    """The pairs that are alike enough, the most alike first."""
    if layer.similarity is None or rules.merge_twins is None:
        return []
    cosines = layer.similarity.tolist()
    least = rules.merge_twins - _ROUNDING
    pairs = [(i, j) for j in range(layer.num_experts) for i in range(j) if cosines[i][j] >= least]
    return sorted(pairs, key=lambda pair: -cosines[pair[0]][pair[1]])


def _join(groups: Groups, a: int, b: int, layer: LayerFacts, rules: Rules) -> None:
    """Make one group of those of two experts, if any two experts of it are twins."""
    first, second = (next((group for group in groups if i in group), None) for i in (a, b))
    if first is None or second is None or first is second:
        return
    assert layer.similarity is not None and rules.merge_twins is not None
    if all(float(layer.similarity[i, j]) >= rules.merge_twins - _ROUNDING for i in first for j in second):
        groups.remove(second)
        first += second
        first.sort()
        groups.sort()


# --- tensors ---------------------------------------------------------------------------------------------------------


def kept_rows(rows_N: torch.Tensor, groups: Groups, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """[m, …] of [n, …]: the experts' own rows, bit for bit, or the weighted mean of a group's."""
    return torch.stack([mean([rows_N[i] for i in group], w) for group, w in zip(groups, weights, strict=True)])


def mean(tensors: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """The weighted mean, computed in float64; equal tensors are kept bit for bit."""
    if all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
        return tensors[0]
    total = sum(w * tensor.double() for w, tensor in zip(weights.tolist(), tensors, strict=True))
    return torch.as_tensor(total).to(tensors[0].dtype)


def kept_updates(
    A_NRI: torch.Tensor, B_NRO: torch.Tensor, groups: Groups, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [m, r, in] and B [m, r, out] of [n, …]: the experts' own, or the best of rank r for the mean of the updates."""
    updates = [_mean_update(A_NRI[group], B_NRO[group], w) for group, w in zip(groups, weights, strict=True)]
    return torch.stack([A for A, _ in updates]), torch.stack([B for _, B in updates])


def _mean_update(
    A_GRI: torch.Tensor, B_GRO: torch.Tensor, weights_G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The rank-r matrices whose product is nearest to Σ w_i B_iᵀ A_i (Eckart–Young). Means of the A's and of the B's would
    depend on how each update is factorised.
    """
    if all(torch.equal(A, A_GRI[0]) and torch.equal(B, B_GRO[0]) for A, B in zip(A_GRI, B_GRO, strict=True)):
        return A_GRI[0], B_GRO[0]
    r = A_GRI.shape[1]
    left_OK = (B_GRO.double() * weights_G.view(-1, 1, 1)).flatten(0, 1).T  # K = g·r
    right_KI = A_GRI.double().flatten(0, 1)
    q_left, r_left = torch.linalg.qr(left_OK)
    q_right, r_right = torch.linalg.qr(right_KI.T)
    U, S, V = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    root_R = S[:r].sqrt()
    B_OR, A_RI = q_left @ U[:, :r] * root_R, (V[:r] * root_R.unsqueeze(1)) @ q_right.T
    missing = r - len(root_R)  # a layer narrower than r
    A_RI, B_RO = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (A_RI, B_OR.T))
    return A_RI.to(A_GRI.dtype), B_RO.to(B_GRO.dtype)


def update_similarity(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Cosines of the experts' updates B A over all projections, [n, n], from each one's A and B."""
    return similarities(sum((update_gram(A, B) for A, B in pairs), torch.zeros(())))


def value_similarity(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Cosines of the experts' values over several tensors [n, …], [n, n]."""
    return similarities(sum((value_gram(tensor_N.flatten(1)) for tensor_N in values), torch.zeros(())))
