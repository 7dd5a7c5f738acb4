"""The tensors of the experts that are left. Legend: n experts before, m after, g of a group, r rank, d, f sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..merging import similarities, update_gram, value_gram
from .plan import Groups


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
    found = [_mean_update(A_NRI[group], B_NRO[group], w) for group, w in zip(groups, weights, strict=True)]
    return torch.stack([A for A, _ in found]), torch.stack([B for _, B in found])


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


def stacked(of_each: Iterable[torch.Tensor]) -> torch.Tensor:
    """The tensors of n experts as one, [n, …]."""
    return torch.stack(list(of_each))


def update_similarity(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Cosines of the experts' updates B A over all projections, [n, n], from each one's A and B."""
    return similarities(sum((update_gram(A, B) for A, B in pairs), torch.zeros(())))


def value_similarity(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Cosines of the experts' values over several tensors [n, …], [n, n]."""
    return similarities(sum((value_gram(tensor_N.flatten(1)) for tensor_N in values), torch.zeros(())))
