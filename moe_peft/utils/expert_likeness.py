"""Likeness of experts: inner products and cosines of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .torch_contexts import double


def update_gram(A_NRI: torch.Tensor, B_NRO: torch.Tensor) -> torch.Tensor:
    """
    Return the inner products of the updates B A of one module's n LoRA experts, float64 [n, n]. No temporary matrix is
    as large as B A.

    Args:
        A_NRI: [n, r, in].
        B_NRO: [n, r, out], each expert's second matrix transposed.
    """
    n, r = A_NRI.shape[:2]
    products = [double(x.flatten(0, 1)) @ double(x.flatten(0, 1)).T for x in (A_NRI, B_NRO)]
    return (products[0] * products[1]).view(n, r, n, r).sum((1, 3))


def value_gram(values_NM: torch.Tensor, chunk: int = 2**20) -> torch.Tensor:
    """
    Return the inner products of n experts' values [n, m], float64 [n, n]. Chunks limit the memory for float64 copies.
    """
    return sum(
        (double(part) @ double(part).T for part in values_NM.split(chunk, dim=1)),
        torch.zeros((), dtype=torch.float64),
    )


def similarities(gram_NN: torch.Tensor) -> torch.Tensor:
    """Return cosines from inner products, [n, n]. An expert with all values zero is similar only to itself."""
    norms_N = gram_NN.diagonal().sqrt()
    cosines_NN = gram_NN / torch.outer(norms_N, norms_N)
    return cosines_NN.nan_to_num(0.0, 0.0, 0.0).fill_diagonal_(1.0)


class Likeness(NamedTuple):
    """Likeness of two different experts: mean, smallest and largest cosine."""

    mean: float
    smallest: float
    largest: float


def likeness(cosines_NN: torch.Tensor | Sequence[Sequence[float]] | None) -> Likeness | None:
    """Summarize cosines [n, n]. None if there are fewer than two experts."""
    if cosines_NN is None or len(cosines_NN) < 2:
        return None
    cosines_NN = torch.as_tensor(cosines_NN, dtype=torch.float64)
    pairs = cosines_NN[torch.ones_like(cosines_NN, dtype=torch.bool).tril(-1)]
    return Likeness(float(pairs.mean()), float(pairs.min()), float(pairs.max()))
