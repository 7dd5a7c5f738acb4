"""Which experts may serve which label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def read_expert_map(expert_map: Mapping[Any, Sequence[int]], num_experts: int, caller: str) -> dict[str, list[int]]:
    """
    Label → experts, with labels as text, because YAML, JSON and data sets may write a label as a number or as text.

    Raises:
        ValueError: a label has no experts, or one out of range; the message begins with `caller`.
    """
    found = {str(label): list(experts) for label, experts in expert_map.items()}
    for label, experts in found.items():
        if not experts or not all(0 <= i < num_experts for i in experts):
            raise ValueError(f"{caller}: {label!r}: {experts}: name experts from 0 to {num_experts - 1}")
    return found


def expert_masks(expert_map: Mapping[str, Sequence[int]], num_experts: int) -> torch.Tensor:
    """The experts of each label, m, bool [labels, n], in the map's order."""
    allowed = torch.zeros(len(expert_map), num_experts, dtype=torch.bool)
    for row, experts in enumerate(expert_map.values()):
        allowed[row, list(experts)] = True
    return allowed
