"""Examples that a command passes through a model, and a report's description of a loaded model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from ..models.introspection import base_model
from ..routing.expert_map import label_text
from ..training.data import check_domains, check_learnable, check_rows, load_data
from ..training.preparation import preparation, tokenized
from ..training.scoring import Collator

logger = logging.getLogger("moe_peft")


@dataclass(frozen=True)
class ReportData:
    """Tokenized examples with `input_ids` and `labels`, their domains if any, and the batches' collator and size."""

    data: Dataset
    domains: Sequence[str]
    collator: Collator
    batch_size: int


def load_rows(
    tokenizer: Any,
    data: str,
    label_column: str | None,
    split: str,
    *,
    batch_size: int,
    max_length: int,
    max_examples: int | None,
) -> ReportData:
    """
    Load the examples that a command passes through a model.

    Args:
        data: a file or a dataset's name, in a format that TRL accepts.
        label_column: column with the domains.
        split: the split of the data.
        batch_size: examples per forward pass.
        max_length: tokens per example; longer ones are truncated.
        max_examples: number of examples to use, from the first on; None: all.
    """
    dataset = load_data(data, "--data", label_column, split)
    whole = dataset
    if max_examples is not None:
        dataset = dataset.select(range(min(max_examples, len(dataset))))
    check_rows(dataset, "--data", tokenizer, label_column)
    check_domains(dataset, label_column)
    if label_column and len(dataset) < len(whole):
        used, every = ({label_text(label) for label in rows.unique(label_column)} for rows in (dataset, whole))
        if left := sorted(every - used):
            logger.warning(
                "--max-examples %d: the first rows have none of %s; shuffle the data first",
                max_examples, ", ".join(left[:8]),
            )  # fmt: skip
    args = preparation(max_length)
    rows, collator = tokenized(dataset, tokenizer, args)
    check_learnable(f"--data {data!r}", rows, args)
    if len(rows) < len(dataset):
        logger.warning(
            "--data %r: %d of %d rows are left out: their answers begin after --max-length=%d tokens",
            data, len(dataset) - len(rows), len(dataset), max_length,
        )  # fmt: skip
    domains = [label_text(label) for label in rows[label_column]] if label_column else []
    return ReportData(rows, domains, collator, batch_size)


def describe(model: Any) -> dict[str, Any]:
    """Return the class, dtype and quantization of a loaded model, for a report."""
    base = base_model(model)
    dtype = str(base.dtype).removeprefix("torch.")
    return {"class": type(base).__name__, "dtype": dtype, "quantization": _quantization_of(base.config)}


def _quantization_of(config: Any) -> str | None:
    """Return the quantization, e.g. "bitsandbytes, load_in_4bit"; None for a model that is not quantized."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = getattr(fields.get("quant_method"), "value", fields.get("quant_method"))
    return ", ".join([str(method), *(name for name in ("load_in_4bit", "load_in_8bit") if fields.get(name))])
