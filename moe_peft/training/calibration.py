"""Batches of calibration data, as `init_attention_routers` and `upcycle` take them."""

from __future__ import annotations

import copy
import tempfile

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from ..checks import COUNT, SEED, check, is_a
from .arguments import check_dataset
from .data import drawn
from .tokenizing import tokenized


def calibration_batches(
    dataset: Dataset,
    processing_class: PreTrainedTokenizerBase,
    max_examples: int = 256,
    batch_size: int = 8,
    max_length: int = 1024,
    seed: int = 0,
    args: SFTConfig | None = None,
) -> list[dict[str, torch.Tensor]]:
    """
    Examples of a data set in a format that TRL accepts: `input_ids` and `attention_mask`, each [B, S]. They are drawn
    at random, since a file may be sorted by domain.

    Args:
        max_examples: how many examples to use.
        batch_size: B.
        max_length: tokens per example; longer ones are truncated.
        seed: of the draw.
        args: how the examples are prepared: the chat template, the text field, and so on, but for packing, the length
            and which tokens have a loss. None: with the tokenizer's template.
    """
    check("calibration_batches", dataset=(dataset, is_a(Dataset)), seed=(seed, SEED))
    counts = {"max_examples": max_examples, "batch_size": batch_size, "max_length": max_length}
    check("calibration_batches", args=(args, is_a(SFTConfig).or_none()))
    check("calibration_batches", **{name: (value, COUNT) for name, value in counts.items()})
    check_dataset("calibration_batches", dataset)
    with tempfile.TemporaryDirectory() as folder:  # the trainer that prepares the data creates one
        own = copy.copy(args) or SFTConfig(
            output_dir=folder, bf16=False, report_to="none", gradient_checkpointing=False,
            use_cpu=not torch.accelerator.is_available(),
        )  # fmt: skip
        own.max_length, own.packing, own.padding_free = max_length, False, False
        own.assistant_only_loss, own.completion_only_loss = False, False  # or rows without such a token would go
        rows, collator = tokenized(drawn(dataset, max_examples, seed), copy.deepcopy(processing_class), own)
    batches = (
        collator([rows[i] for i in range(start, min(start + batch_size, len(rows)))])
        for start in range(0, len(rows), batch_size)
    )
    return [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in batches]
