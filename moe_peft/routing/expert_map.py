"""
Which experts may serve which label. A map names a label's experts by index, or by a mask with an entry for each expert.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def label_text(label: Any) -> str:
    """
    A label as text. YAML, JSON and data sets may write the same label as a number or as text; whole numbers that a data
    set stores as floats are written without a decimal point.
    """
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def read_expert_map(expert_map: Mapping[Any, Sequence[int]], num_experts: int, caller: str) -> dict[str, list[int]]:
    """
    Label → indices of its experts, with labels as text (see `label_text`).

    All lists of a map have one of two forms. A list of indices names each expert once, from 0 to n - 1. A mask has n
    entries, 0 or 1 (or false and true), and at least one 1. With whole numbers and two experts, `[0, 1]` and `[1, 0]`
    are both; other lists of the map may decide, else the map is refused.

    Args:
        expert_map: label → indices or mask.
        num_experts: n.
        caller: where the map was given; messages begin with it.

    Raises:
        ValueError: a list has neither form, lists have different forms, or the map can be read in both.
    """
    if not isinstance(expert_map, Mapping) or not expert_map:
        raise ValueError(f"{caller}: {expert_map!r}: give a map of labels to experts, e.g. {{'math': [0, 1]}}")
    read: dict[str, dict[str, list[int]]] = {}
    for label, given in expert_map.items():
        if label_text(label) in read:
            raise ValueError(f"{caller}: the label {label_text(label)!r} occurs twice, as number and text; keep one")
        read[label_text(label)] = _readings(given, num_experts, f"{caller}: {label!r}: {_shown(given)}")
    forms = [form for form in ("indices", "mask") if all(form in readings for readings in read.values())]
    if not forms:
        one, other = (next(label for label, found in read.items() if form not in found) for form in ("indices", "mask"))
        raise ValueError(f"{caller}: {one!r} has a mask, {other!r} a list of indices; write all in one form")
    if len(forms) == 2:
        raise ValueError(
            f"{caller}: {_shown(expert_map)}: with two experts these may be indices or masks; write masks as "
            "[true, false], both experts as [true, true]"
        )
    return {label: readings[forms[0]] for label, readings in read.items()}


def expert_masks(expert_map: Mapping[str, Sequence[int]], num_experts: int) -> torch.Tensor:
    """The experts of each label, m, bool [labels, n], in the order of a map that `read_expert_map` returned."""
    allowed = torch.zeros(len(expert_map), num_experts, dtype=torch.bool)
    for row, experts in enumerate(expert_map.values()):
        allowed[row, list(experts)] = True
    return allowed


def _readings(given: Any, n: int, what: str) -> dict[str, list[int]]:
    """The indices that a label's list means, by the form in which it can be read: one or both."""
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise ValueError(f"{what}: give a list of experts from 0 to {n - 1}, or a mask of {n} entries")
    booleans = [isinstance(entry, bool) for entry in given]
    if any(booleans) and not all(booleans):
        raise ValueError(f"{what}: true and false among numbers; write indices, or a mask of 0 and 1")
    try:
        entries = [operator.index(entry) for entry in given]
    except TypeError:
        raise ValueError(f"{what}: name experts by whole numbers") from None
    is_mask = len(entries) == n and set(entries) <= {0, 1} and any(entries)
    if any(booleans) and not is_mask:
        raise ValueError(f"{what}: a mask has {n} entries, one for each expert, and allows at least one")
    if not is_mask and not (entries and all(0 <= i < n for i in entries)):
        raise ValueError(f"{what}: name experts from 0 to {n - 1}, or give a mask of {n} entries")
    if not any(entries) and len(entries) == n > 1:
        raise ValueError(f"{what}: the mask allows no expert; set the entries of some to 1")
    repeated = len(set(entries)) < len(entries)
    if not is_mask and repeated:
        raise ValueError(f"{what}: names an expert twice; a mask has {n} entries of 0 and 1, one for each expert")
    readings = {}
    if not repeated and not any(booleans) and max(entries) < n:
        readings["indices"] = entries
    if is_mask:
        readings["mask"] = [i for i, entry in enumerate(entries) if entry]
    return readings


def _shown(value: Any, limit: int = 80) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
