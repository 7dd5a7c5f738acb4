"""Batches of calibration data, as `init_attention_routers` and `upcycle` take them."""

from __future__ import annotations

import copy

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from ..checks import COUNT, SEED, check, is_a
from .arguments import check_dataset
from .data import drawn
from .tokenizing import preparation, tokenized


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
    counts = {"max_examples": max_examples, "batch_size": batch_size, "max_length": max_length}
    check(
        "calibration_batches",
        dataset=(dataset, is_a(Dataset)),
        seed=(seed, SEED),
        args=(args, is_a(SFTConfig).or_none()),
        **{name: (value, COUNT) for name, value in counts.items()},
    )
    check_dataset("calibration_batches", dataset)
    args = preparation(max_length) if args is None else copy.copy(args)
    args.max_length, args.packing, args.padding_free = max_length, False, False
    args.assistant_only_loss, args.completion_only_loss = False, False  # or rows without such a token would go
    rows, collator = tokenized(drawn(dataset, max_examples, seed), processing_class, args)
    batches = (
        collator([rows[i] for i in range(start, min(start + batch_size, len(rows)))])
        for start in range(0, len(rows), batch_size)
    )
    return [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in batches]
