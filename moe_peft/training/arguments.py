"""Training arguments that serve several trainers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer, TrainingArguments
from trl import SFTConfig

from ..checks import FOLDER, check, is_a

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def save_whole(trainer: Trainer) -> None:
    """Have FSDP write whole weights, as any other trainer does; of sharded ones `save_model` writes nothing."""
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")


def for_one_trainer(args: Arguments) -> Arguments:
    """
    A copy of training arguments, which the trainer that gets it may change. DeepSpeed's plugin, which they hold, serves
    the first trainer only, so under DeepSpeed they are made anew.
    """
    return copy.copy(args) if args.deepspeed_plugin is None else dataclasses.replace(args)


def check_dataset(caller: str, dataset: Any, columns: Collection[str] = ()) -> None:
    """
    Check a data set, on whose faults TRL stops with a StopIteration or a KeyError.

    Args:
        columns: it must have one of these; none: any will do.

    Raises:
        ValueError: it has no rows, or none of the columns.
    """
    if not isinstance(dataset, Dataset):
        return
    if not len(dataset):
        raise ValueError(f"{caller}: train_dataset: no examples; give at least one")
    if columns and not set(columns) & set(dataset.column_names):
        raise ValueError(f"{caller}: train_dataset: columns {dataset.column_names}: needs {', '.join(sorted(columns))}")


def text_columns(args: SFTConfig | None) -> set[str]:
    """The columns of which TRL's SFTTrainer reads one or two."""
    own = "text" if args is None else args.dataset_text_field
    return {own, "messages", "conversations", "prompt", "input_ids"}


def check_training(
    caller: str, model: Any, dataset: Any, args: Any, processing_class: Any, output_dir: Any = "."
) -> None:
    """
    Check what a stage of training is given.

    Raises:
        ValueError: one of it is something else, or the data have no rows, or no column that TRL reads.
    """
    check(
        caller,
        model=(model, is_a(nn.Module, remedy="give a model")),
        dataset=(dataset, is_a(Dataset, remedy="give a datasets.Dataset")),
        args=(args, is_a(SFTConfig)),
        processing_class=(processing_class, is_a(PreTrainedTokenizerBase, ProcessorMixin)),
        output_dir=(output_dir, FOLDER),
    )
    check_dataset(caller, dataset, text_columns(args))
