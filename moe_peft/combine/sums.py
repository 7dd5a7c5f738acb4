"""The sums of `ridge` beside a mixture, so that an expert can join with only its own texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..models.gate_init import Sums
from ..utils.io import reading
from ..utils.messages import InputError

SUMS = "ridge_sums.safetensors"
KEPT = 2**28  # bytes that are kept by default


def size_of_sums(sums: Sequence[Sums]) -> int:
    """About how many bytes the file of these sums has."""
    return sum(8 * (len(s["xx"]) * (len(s["xx"]) + 1) // 2 + s["xy"].numel()) for s in sums)


def write_sums(folder: Path, sums: Sequence[Sums]) -> None:
    """Write the sums of each layer, XᵀX as its upper triangle. In float32, their rounding would be larger than λ."""
    tensors: dict[str, torch.Tensor] = {}
    for i, of_layer in enumerate(sums):
        xx_DD, xy_DN = of_layer["xx"].cpu().double(), of_layer["xy"].cpu().double()
        rows, columns = torch.triu_indices(len(xx_DD), len(xx_DD))
        tensors |= {f"{i}.xx": xx_DD[rows, columns], f"{i}.xy": xy_DN.contiguous()}
    save_file(tensors, folder / SUMS, metadata={"format": "pt"})


def read_sums(folder: Path, num_experts: int) -> list[Sums] | None:
    """
    What `write_sums` wrote beside a mixture; None if there is no file.

    Args:
        num_experts: of the mixture.
    """
    path = folder / SUMS
    if not path.is_file():
        return None
    with reading(f"{path}: cannot be read", "remove it, and give texts for all experts"):
        tensors = load_file(path)
    sums = []
    for i in range(len(tensors) // 2):
        packed, xy_DN = tensors[f"{i}.xx"], tensors[f"{i}.xy"]
        if xy_DN.shape[1] != num_experts:
            raise InputError(
                f"{path}: is for {xy_DN.shape[1]} experts, the mixture has {num_experts}; remove it, and give all texts"
            )
        d = len(xy_DN)
        rows, columns = torch.triu_indices(d, d)
        xx_DD = packed.new_zeros(d, d)
        xx_DD[rows, columns] = packed
        xx_DD[columns, rows] = packed
        sums.append({"xx": xx_DD, "xy": xy_DN})
    return sums
