"""Training arguments that serve several trainers."""

from __future__ import annotations

import copy
import dataclasses
from typing import TypeVar

from transformers import Trainer, TrainingArguments

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
