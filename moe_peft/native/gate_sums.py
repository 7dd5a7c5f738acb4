"""
Sums of gates for each expert (`GateInit.with_kept_sums`), saved with a mixture. With them, an expert can be added,
replaced or removed with only its own texts. The gates keep no trace of a removed expert's texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..models.gate_init import GateInit, Sums
from ..utils.io import reading
from ..utils.messages import InputError

KEPT = 2**28  # bytes; larger sums are not kept by default
_ENDING = "_sums.safetensors"


def sums_file(gates: str) -> str:
    """Return the name of the file with the sums of gates, such as "ridge_sums.safetensors"."""
    return f"{gates}{_ENDING}"


def gates_with_sums(folder: Path) -> str | None:
    """Return the name of the gates whose sums a mixture's folder has. None if it has no sums."""
    return next((file.name.removesuffix(_ENDING) for file in sorted(folder.glob(f"*{_ENDING}"))), None)


def size_of_sums(num_experts: int, widths: Sequence[int]) -> int:
    """
    Estimate the bytes of the file, for routers with these input widths: a symmetric matrix and a vector for each
    expert.
    """
    return sum(8 * num_experts * (d * (d + 1) // 2 + d) for d in widths)


def write_sums(path: Path, sums: Sequence[Sums]) -> None:
    """
    Write the sums of each router, XᵀX as its upper triangle. They are float64: in float32, rounding would exceed λ.
    """
    tensors: dict[str, torch.Tensor] = {}
    for i, of_router in enumerate(sums):
        for name, value in of_router.items():
            value = value.cpu().double()
            tensors[f"{i}.{name}"] = value[_triangle(len(value))] if name.endswith(".xx") else value.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def read_sums(path: Path, initializer: GateInit, gates: Sequence[torch.Tensor]) -> list[Sums] | None:
    """
    Read the sums that `write_sums` saved with a mixture. None if there is no file.

    Args:
        initializer: computes gates from the sums.
        gates: weights [n, d] of the mixture's routers; the sums must give the same weights.
    """
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
            torch.allclose(initializer.gates(of_router, ()).float(), weight_ND.float().cpu(), rtol=1e-3, atol=1e-3)
            for of_router, weight_ND in zip(sums, gates, strict=True)
        )
    except (IndexError, KeyError, ValueError, RuntimeError):  # wrong names, wrong shapes, not invertible
        fits = False
    if not fits:
        raise InputError(f"{path}: does not give this mixture's gates; remove it, and give texts for all experts")
    return sums


def renumbered(sums: Sequence[Sums], experts: Sequence[int | None]) -> list[Sums]:
    """
    Renumber the experts of the sums.

    Args:
        experts: for each new number the old number; None: an expert without sums. Sums of texts for no expert stay.
    """
    numbers = {str(old): str(new) for new, old in enumerate(experts) if old is not None} | {"-1": "-1"}
    renamed: list[Sums] = [{} for _ in sums]
    for of_router, new_sums in zip(sums, renamed, strict=True):
        for name, value in of_router.items():
            expert, _, kind = name.partition(".")
            if expert in numbers:
                new_sums[f"{numbers[expert]}.{kind}"] = value
    return renamed


def _triangle(d: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = torch.triu_indices(d, d)
    return rows, columns
