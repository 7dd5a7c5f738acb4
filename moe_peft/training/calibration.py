"""Batches of calibration data, as `init_attention_routers` and `upcycle` take them."""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from .tokenizing import tokenized


def calibration_batches(
    dataset: Dataset,
    processing_class: PreTrainedTokenizerBase,
    max_examples: int = 256,
    batch_size: int = 8,
    max_length: int = 1024,
) -> list[dict[str, torch.Tensor]]:
    """
    The first examples of a data set in a format that TRL accepts: `input_ids` and `attention_mask`, each [B, S].

    Args:
        max_examples: how many examples to use.
        batch_size: B.
        max_length: tokens per example; longer ones are truncated.
    """
    with tempfile.TemporaryDirectory() as folder:  # the trainer that prepares the data creates one
        args = SFTConfig(
            output_dir=folder, bf16=False, max_length=max_length, report_to="none", gradient_checkpointing=False,
            use_cpu=not torch.accelerator.is_available(),
        )  # fmt: skip
        rows, collator = tokenized(dataset.select(range(min(max_examples, len(dataset)))), processing_class, args)
    batches = (
        collator([rows[i] for i in range(start, min(start + batch_size, len(rows)))])
        for start in range(0, len(rows), batch_size)
    )
    return [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in batches]
