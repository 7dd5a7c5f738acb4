"""Prepare datasets as TRL does, without a training, for scores and calibration."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Sequence
from typing import TypeVar

import torch
from datasets import Dataset
from transformers import IntervalStrategy, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, TrainingArguments
from trl import SFTConfig, SFTTrainer

from ..utils.messages import refused_settings
from .data import drawn
from .scoring import Collator

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def for_one_trainer(args: Arguments) -> Arguments:
    """
    Copy training arguments for one trainer, which may change them.

    The arguments hold DeepSpeed's plugin, which works for the first trainer only. With DeepSpeed, they are created
    anew.
    """
    return copy.copy(args) if args.deepspeed_plugin is None else dataclasses.replace(args)


# --- tokenizing ------------------------------------------------------------------------------------------------------

# Arguments that have an effect when a trainer is created: a repository, a tracker, a signal handler. It creates the
# output folder, too.
_OF_TRAINING = {
    "output_dir": tempfile.gettempdir(), "push_to_hub": False, "report_to": [], "enable_jit_checkpoint": False,
    "activation_offloading": False, "use_liger_kernel": False, "fsdp": None, "_n_gpu": 1,
    "eval_strategy": IntervalStrategy.NO, "load_best_model_at_end": False,
    "router_aux_loss_coef": None,  # TRL refuses it for a dense model
}  # fmt: skip


def preparation(max_length: int) -> SFTConfig:
    """
    Return arguments for `tokenized` only: the tokenizer's chat template, and at most `max_length` tokens per example.
    """
    return SFTConfig(
        output_dir=tempfile.gettempdir(), bf16=False, max_length=max_length, report_to="none",
        gradient_checkpointing=False, use_cpu=not torch.accelerator.is_available(),
    )  # fmt: skip


def tokenized(dataset: Dataset, processing_class: PreTrainedTokenizerBase, args: SFTConfig) -> tuple[Dataset, Collator]:
    """
    Return the examples as `SFTTrainer` would train on them, and the collator for their batches. Examples without a
    token to learn are left out.

    TRL's preparation is a method of its trainer, so this creates a trainer with a tiny model. A trainer may change a
    tokenizer's chat template and tokens, so it gets a copy of `processing_class`.
    """
    processing_class = copy.deepcopy(processing_class)
    stand_in = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(processing_class), hidden_size=2, intermediate_size=2, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1,
        )
    )  # fmt: skip
    args = for_one_trainer(args)
    _ = args.device  # counts the GPUs
    for name, value in _OF_TRAINING.items():
        if hasattr(args, name):
            setattr(args, name, value)
    with refused_settings():
        trainer = SFTTrainer(model=stand_in, args=args, train_dataset=dataset, processing_class=processing_class)
    return trainer.train_dataset, trainer.data_collator


# --- calibration -----------------------------------------------------------------------------------------------------


def calibration_batches(
    dataset: Dataset,
    processing_class: PreTrainedTokenizerBase,
    max_examples: int = 256,
    batch_size: int = 8,
    max_length: int = 1024,
    seed: int = 0,
    args: SFTConfig | None = None,
    columns: Sequence[str] = (),
) -> list[dict[str, torch.Tensor]]:
    """
    Return batches of examples: `input_ids` and `attention_mask`, each [B, S]. The dataset has a format of TRL's.
    Examples are drawn at random, since a file may be sorted by domain.

    Args:
        max_examples: number of examples to use.
        batch_size: B.
        max_length: tokens per example; longer examples are truncated.
        seed: seed for drawing examples.
        args: arguments for the preparation of examples: the chat template, the text field, and so on. Packing, the
            length and the restriction of the loss to some tokens are ignored. None: the tokenizer's template.
        columns: further columns for the batches, with a number for each example, such as `expert` for `init_gates`.
    """
    args = preparation(max_length) if args is None else copy.copy(args)
    args.max_length, args.packing, args.padding_free = max_length, False, False
    args.assistant_only_loss, args.completion_only_loss = False, False  # or rows without answers would be dropped
    rows, collator = tokenized(drawn(dataset, max_examples, seed), processing_class, args)
    batches = []
    for start in range(0, len(rows), batch_size):
        of_batch = [rows[i] for i in range(start, min(start + batch_size, len(rows)))]
        batch = collator(of_batch)
        kept = {name: batch[name] for name in ("input_ids", "attention_mask")}
        batches.append(kept | {name: torch.tensor([row[name] for row in of_batch]) for name in columns})
    return batches
