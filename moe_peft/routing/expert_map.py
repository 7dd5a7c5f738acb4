"""Expert maps: the experts of each label, named by index or by a mask with an entry for each expert."""

from __future__ import annotations

import operator
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..utils.messages import InputError


def label_text(label: Any) -> str:
    """
    Return a label as text, the same for all ways to write it. A label may be a number or a text in YAML, JSON and
    datasets, an integer stored as a float by a dataset, or a text with composed or decomposed accents (file systems
    differ).
    """
    text = str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)
    return unicodedata.normalize("NFC", text)


def in_order(labels: Iterable[str], expert_map: Mapping[Any, Any] | None) -> list[str]:
    """Return the different labels: first the map's labels in its order, then the others as they come."""
    labels = dict.fromkeys(labels)
    return [label for label in dict.fromkeys([*map(label_text, expert_map or ()), *labels]) if label in labels]


def read_expert_map(expert_map: Mapping[Any, Sequence[int]], num_experts: int, caller: str) -> dict[str, list[int]]:
    """
    Read a map from labels to experts. Labels are read as text (see `label_text`), experts as indices.

    All lists of a map have one of two forms. A list of indices names each of its experts once, from 0 to n - 1. A mask
    has n entries, 0 or 1 (or false and true), and at least one 1. With two experts, the integers `[0, 1]` and `[1, 0]`
    have both forms. Other lists of the map may decide, else the map raises an error. With more experts, a map of
    several labels raises an error, too, if all its lists are `[0, 1]` or `[1, 0]`: they look like masks of the wrong
    length.

    Args:
        expert_map: label → indices or mask.
        num_experts: n.
        caller: where the map was given; messages begin with it.

    Returns:
        label → indices of its experts.

    Raises:
        ValueError: a list has neither form, lists have different forms, the map can be read in both forms, or it looks
            like masks for two experts while there are more.
    """
    if not isinstance(expert_map, Mapping) or not expert_map:
        raise InputError(f"{caller}: {expert_map!r}: give a map of labels to experts, e.g. {{'math': [0, 1]}}")
    read: dict[str, dict[str, list[int]]] = {}
    for label, entries in expert_map.items():
        if label_text(label) in read:
            raise InputError(f"{caller}: the label {label_text(label)!r} occurs twice, as number and text; keep one")
        read[label_text(label)] = _readings(entries, num_experts, f"{caller}: {label!r}: {_shown(entries)}")
    forms = [form for form in ("indices", "mask") if all(form in readings for readings in read.values())]
    if not forms:
        masked, listed = (next(label for label in read if form not in read[label]) for form in ("indices", "mask"))
        raise InputError(f"{caller}: {masked!r} has a mask, {listed!r} a list of indices; write all in one form")
    if len(forms) == 2:
        raise InputError(
            f"{caller}: {_shown(expert_map)}: with two experts these may be indices or masks; write masks as "
            "[true, false], both experts as [true, true]"
        )
    experts = {label: readings[forms[0]] for label, readings in read.items()}
    looks_masked = len(experts) > 1 and all(sorted(indices) == [0, 1] for indices in experts.values())
    if forms == ["indices"] and num_experts > 2 and looks_masked:
        raise InputError(
            f"{caller}: {_shown(expert_map)}: these look like masks for two experts, but there are {num_experts}; "
            f"write masks of {num_experts} entries"
        )
    return experts


def check_allowed(expert_map: Mapping[str, Sequence[int]], fewest: int, caller: str) -> None:
    """
    Raise if a map allows a label too few experts. The map is a return value of `read_expert_map`, and labels may only
    go to their own experts.

    Args:
        fewest: number of experts needed by a token: top_k, or 1 if routers may leave experts out.
        caller: where the map was given; messages begin with it.
    """
    for label, experts in expert_map.items():
        if len(experts) < fewest:
            raise InputError(
                f"{caller}: {label!r} has {len(experts)} of the experts, a token gets top_k={fewest}; give it at least "
                "as many, or lower top_k"
            )


def expert_masks(expert_map: Mapping[str, Sequence[int]], num_experts: int) -> torch.Tensor:
    """Return the experts of each label, m, bool [labels, n], in the order of a map from `read_expert_map`."""
    allowed = torch.zeros(len(expert_map), num_experts, dtype=torch.bool)
    for row, experts in enumerate(expert_map.values()):
        allowed[row, list(experts)] = True
    return allowed


def _readings(entries: Any, n: int, source: str) -> dict[str, list[int]]:
    """Return the indices meant by a label's list, by the form in which the list can be read: one or both."""
    entries = entries.tolist() if hasattr(entries, "tolist") else entries
    if isinstance(entries, str | bytes) or not isinstance(entries, Sequence):
        raise InputError(f"{source}: give a list of experts from 0 to {n - 1}, or a mask of {n} entries")
    booleans = any(isinstance(entry, bool) for entry in entries)
    if booleans and not all(isinstance(entry, bool) for entry in entries):
        raise InputError(f"{source}: true and false among numbers; write indices, or a mask of 0 and 1")
    try:
        numbers = [operator.index(entry) for entry in entries]
    except TypeError:
        raise InputError(f"{source}: name experts by integers") from None
    readings = {"mask": _as_mask(numbers, n)}
    if not booleans:
        readings["indices"] = _as_indices(numbers, n)
    valid = {form: reading for form, reading in readings.items() if isinstance(reading, list)}
    if not valid:
        form = "mask" if booleans or numbers == [0] * n else "indices"
        raise InputError(f"{source}: {readings[form]}")
    return valid


def _as_indices(entries: list[int], n: int) -> list[int] | str:
    """Return the experts named by a list of indices, or an error message."""
    if not entries or not all(0 <= entry < n for entry in entries):
        return f"name experts from 0 to {n - 1}, or give a mask of {n} entries"
    if len(set(entries)) < len(entries):
        return f"names an expert twice; a mask has {n} entries of 0 and 1, one for each expert"
    return entries


def _as_mask(entries: list[int], n: int) -> list[int] | str:
    """Return the experts allowed by a mask, or an error message."""
    if len(entries) != n or not set(entries) <= {0, 1}:
        return f"a mask has {n} entries, one for each expert, and allows at least one"
    if not any(entries):
        return "the mask allows no expert; set the entries of some to 1"
    return [i for i, entry in enumerate(entries) if entry]


def _shown(value: Any, limit: int = 80) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
