"""
The sums of `ridge` beside a mixture, by expert: an expert can join, be replaced or leave with only its own texts, and
nothing of the texts of one that left remains in the gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..models.gate_init import RidgeGates, Sums
from ..utils.io import reading
from ..utils.messages import InputError

FILE = "ridge_sums.safetensors"
KEPT = 2**28  # bytes that are kept by default
WAY = RidgeGates(by_expert=True)


def size_of_sums(num_experts: int, widths: Sequence[int]) -> int:
    """About how many bytes the file takes, for routers that read these widths."""
    return sum(8 * num_experts * (d * (d + 1) // 2 + d) for d in widths)


def write_sums(folder: Path, sums: Sequence[Sums]) -> None:
    """Write the sums of each router, XᵀX as its upper triangle. In float32, their rounding would be larger than λ."""
    tensors: dict[str, torch.Tensor] = {}
    for i, of_router in enumerate(sums):
        for name, value in of_router.items():
            value = value.cpu().double()
            tensors[f"{i}.{name}"] = value[_triangle(len(value))] if name.endswith(".xx") else value.contiguous()
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def read_sums(folder: Path, gates: Sequence[torch.Tensor]) -> list[Sums] | None:
    """
    What `write_sums` wrote beside a mixture; None if there is no file.

    Args:
        gates: the weights [n, d] of the mixture's routers, which the sums must give.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    with reading(f"{path}: cannot be read", "remove it, and give texts for all experts"):
        tensors = load_file(path)
    sums: list[Sums] = [{} for _ in gates]
    try:
        for name, value in tensors.items():
            router, _, key = name.partition(".")
            d = gates[int(router)].shape[1]
            if key.endswith(".xx"):
                triangle, value = value, value.new_zeros(d, d)
                rows, columns = _triangle(d)
                value[rows, columns] = value[columns, rows] = triangle
            sums[int(router)][key] = value
        fits = all(
            torch.allclose(WAY.gates(of_router, ()).float(), weight_ND.float().cpu(), rtol=1e-3, atol=1e-3)
            for of_router, weight_ND in zip(sums, gates, strict=True)
        )
    except (IndexError, KeyError, ValueError, RuntimeError):  # other names, other shapes, not invertible
        fits = False
    if not fits:
        raise InputError(f"{path}: does not give this mixture's gates; remove it, and give texts for all experts")
    return sums


def renumbered(sums: Sequence[Sums], experts: Sequence[int | None]) -> list[Sums]:
    """
    The sums of some experts under other numbers.

    Args:
        experts: by new number the old one; None: there are no sums of it yet. Texts that experts are not for stay.
    """
    numbers = [(str(new), str(old)) for new, old in enumerate(experts) if old is not None] + [("-1", "-1")]
    return [
        {f"{new}.{kind}": of[f"{old}.{kind}"] for new, old in numbers for kind in ("xx", "x") if f"{old}.{kind}" in of}
        for of in sums
    ]


def _triangle(d: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = torch.triu_indices(d, d)
    return rows, columns
