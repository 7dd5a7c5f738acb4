"""Pure functions on the values of experts: inner products and cosines, means of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .torch_contexts import double


def update_gram(A_NRI: torch.Tensor, B_NRO: torch.Tensor) -> torch.Tensor:
    """
    Inner products of the updates B A of one module's n LoRA experts, float64 [n, n]; no matrix is as large as B A.

    Args:
        A_NRI: [n, r, in].
        B_NRO: [n, r, out], each expert's second matrix transposed.
    """
    n, r = A_NRI.shape[:2]
    products = [double(x.flatten(0, 1)) @ double(x.flatten(0, 1)).T for x in (A_NRI, B_NRO)]
    return (products[0] * products[1]).view(n, r, n, r).sum((1, 3))


def value_gram(values_NM: torch.Tensor, chunk: int = 2**20) -> torch.Tensor:
    """Inner products of n experts' values [n, m], float64 [n, n]; computed in chunks, as float64 takes more memory."""
    return sum(
        (double(part) @ double(part).T for part in values_NM.split(chunk, dim=1)),
        torch.zeros((), dtype=torch.float64),
    )


def similarities(gram_NN: torch.Tensor) -> torch.Tensor:
    """Cosines from inner products, [n, n]. An expert that is zero is similar only to itself."""
    norms_N = gram_NN.diagonal().sqrt()
    cosines_NN = gram_NN / torch.outer(norms_N, norms_N)
    return cosines_NN.nan_to_num(0.0, 0.0, 0.0).fill_diagonal_(1.0)


class Likeness(NamedTuple):
    """How alike two different experts are: the mean, the smallest and the largest cosine."""

    mean: float
    smallest: float
    largest: float


def likeness(cosines_NN: torch.Tensor | Sequence[Sequence[float]] | None) -> Likeness | None:
    """The summary of cosines [n, n]; None if there are no two experts."""
    if cosines_NN is None or len(cosines_NN) < 2:
        return None
    cosines_NN = torch.as_tensor(cosines_NN, dtype=torch.float64)
    pairs = cosines_NN[torch.ones_like(cosines_NN, dtype=torch.bool).tril(-1)]
    return Likeness(float(pairs.mean()), float(pairs.min()), float(pairs.max()))


# --- means of groups of experts: n experts before, m after, g of a group ---------------------------------------------


def mean_rows(rows_N: torch.Tensor, groups: Sequence[Sequence[int]], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """[m, …] of [n, …]: the experts' own rows, bit for bit, or the weighted mean of a group's."""
    return torch.stack([mean_tensor([rows_N[i] for i in group], w) for group, w in zip(groups, weights, strict=True)])


def mean_tensor(tensors: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """The weighted mean, computed in float64; equal tensors are kept bit for bit."""
    if all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
        return tensors[0]
    total = sum(w * tensor.double() for w, tensor in zip(weights.tolist(), tensors, strict=True))
    return torch.as_tensor(total).to(tensors[0].dtype)


def mean_updates(
    A_NRI: torch.Tensor, B_NRO: torch.Tensor, groups: Sequence[Sequence[int]], weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [m, r, in] and B [m, r, out] of [n, …]: the experts' own, or the best of rank r for the mean of the updates."""
    pairs = [_mean_update(A_NRI[list(group)], B_NRO[list(group)], w) for group, w in zip(groups, weights, strict=True)]
    return torch.stack([A for A, _ in pairs]), torch.stack([B for _, B in pairs])


def _mean_update(
    A_GRI: torch.Tensor, B_GRO: torch.Tensor, weights_G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The rank-r matrices whose product is nearest to Σ w_i B_iᵀ A_i (Eckart–Young). Means of the A's and of the B's would
    depend on how each update is factorized.
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
