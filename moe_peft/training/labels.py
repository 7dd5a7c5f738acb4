"""Labels for label-supervised routing. Each token has a label, so labels survive packing and padding-free batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from datasets import ClassLabel, Dataset, Value
from torch.nn.utils.rnn import pad_sequence

from ..routing.expert_map import label_text
from ..utils.messages import InputError
from .data import IGNORED, check_label_column

COLUMN = "token_labels"
NO_LABEL = -1  # for padding


def check_labels(dataset: Any, column: str, labels: Sequence[str], name: str) -> None:
    """Check the labels of a dataset. Messages call it the `name` dataset."""
    if not isinstance(dataset, Dataset):
        raise InputError(f"label_column={column!r}: the {name} dataset must be a map-style Dataset")
    check_label_column(column)
    if column not in dataset.column_names:
        raise InputError(f"label_column={column!r}: the {name} dataset has {dataset.column_names}")
    if not isinstance(dataset.features[column], (Value, ClassLabel)):
        raise InputError(f"label_column={column!r}: the {name} dataset has lists there; give one label per row")
    unknown = unknown_labels(dataset, column, labels)
    if unknown:
        raise InputError(f"expert_map: no experts for the labels {unknown} of the {name} dataset; add them")


def unknown_labels(dataset: Dataset, column: str, labels: Iterable[str]) -> list[str]:
    """Return the labels of a dataset, as text, that are not among `labels`."""
    return sorted({label_text(label) for label in dataset.unique(column)} - set(labels))


def with_token_labels(
    dataset: Dataset, column: str, labels: Sequence[str], num_proc: int | None, description: str
) -> Dataset:
    """Add a column `token_labels` to a tokenized dataset: the index of the row's label, once per token."""
    index = {label: i for i, label in enumerate(labels)}

    def spread(row: dict[str, Any]) -> dict[str, Any]:
        return {COLUMN: [index[label_text(row[column])]] * len(row["input_ids"])}

    return dataset.map(spread, num_proc=num_proc, desc=description)


class LabelCollator:
    """Wraps a collator and adds `token_labels` to its batches, shaped like `input_ids`, with -1 at padding."""

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(examples)
        if COLUMN not in examples[0]:
            return batch
        labels = [torch.tensor(example[COLUMN]) for example in examples]
        rows, length = batch["input_ids"].shape
        if rows == 1:
            labels = [torch.cat(labels)]  # padding-free
        padded = pad_sequence(labels, batch_first=True, padding_value=NO_LABEL)
        labels_BS = torch.full((rows, length), NO_LABEL)
        labels_BS[:, : padded.shape[1]] = padded
        return {**batch, COLUMN: labels_BS}


def completion_tokens(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return 1 for each token with a language loss (label not -100), otherwise 0, [B, S]. None without labels."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return (labels != IGNORED).long() if isinstance(labels, torch.Tensor) else None


def real_tokens(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """
    Return 1 for each token and 0 for padding, [B, S]. None for a batch without token ids.

    Padding-free batches have no mask; they have padding only at the end, if any.
    """
    for name in ("attention_mask", COLUMN, "input_ids"):
        values = batch.get(name) if isinstance(batch, Mapping) else None
        if isinstance(values, torch.Tensor):
            return values if name == "attention_mask" else (values != NO_LABEL).long()
    return None
