"""
What training arguments may be, which themselves take values as they are.

Training arguments that serve several trainers.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import enum
import inspect
import math
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from accelerate.utils import DynamoBackend
from datasets import Dataset
from peft import PeftModel
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.training_args import ParallelMode
from transformers.utils import is_liger_kernel_available
from trl import SFTConfig, is_conversational

from ..adapter.config import MoELoraConfig
from ..utils.compat import private
from ..utils.validation import FOLDER, check, choice_error, is_a, one_line, unknown_key

# --- limits ----------------------------------------------------------------------------------------------------------

_FROM_1 = {
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "eval_accumulation_steps", "torch_empty_cache_steps", "dataset_num_proc", "dataloader_prefetch_factor",
    "max_prompt_length", "max_completion_length", "pad_to_multiple_of",
}  # fmt: skip
_ABOVE_0 = {"logging_steps", "save_steps", "eval_steps", "adam_epsilon", "beta"}
_BELOW_1 = {"adam_beta1", "adam_beta2", "label_smoothing_factor", "label_smoothing"}
_OF_ANY_SIGN = {"local_rank"}


def check_settings(kind: type, settings: Mapping[str, Any], path: str = "") -> None:
    """
    Check values of training arguments, which the arguments themselves take as they are.

    Args:
        kind: the arguments' class.
        settings: its fields, by name.
        path: of the section that has them, with a dot at its end.

    Raises:
        ValueError: a value is of another type than its field, or a number is out of range.
    """
    hints = typing.get_type_hints(kind)
    for name, value in settings.items():
        if name == "expert_map":
            continue  # `read_expert_map` takes more than the type that a command line can give
        names = [one.value for part in (hints[name], *typing.get_args(hints[name])) for one in _members(part)]
        if names and isinstance(value, str) and value not in names:
            close = difflib.get_close_matches(value, names, n=3) or names[:8]
            raise ValueError(choice_error(f"{path}{name}", value, close if len(close) == len(names) else [*close, "…"]))
        try:
            TypeAdapter(hints[name], config=ConfigDict(strict=True, arbitrary_types_allowed=True)).validate_python(
                value
            )
        except ValidationError as error:
            wanted = dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in error.errors())
            raise ValueError(f"{path}{name}={value!r}: must be {' or '.join(wanted)}") from None
        check_value(name, value, path)


def _members(kind: Any) -> list[enum.Enum]:
    return list(kind) if isinstance(kind, enum.EnumType) else []


def check_value(name: str, value: Any, path: str = "") -> None:
    """
    Raises:
        ValueError: a training argument is a number out of its range, or a text that should be a mapping.
    """
    if isinstance(value, str) and (name.endswith("_kwargs") or name == "liger_kernel_config"):
        good, allowed = value.startswith("{"), 'a mapping, like {"name": 4}'  # which the arguments then read
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or name in _OF_ANY_SIGN:
        good, allowed = True, ""
    elif not math.isfinite(value):
        good, allowed = False, "finite"
    elif name == "max_steps":
        good, allowed = value == -1 or value >= 1, "at least 1, or -1 for num_train_epochs"
    elif name == "num_train_epochs":
        good, allowed = 0 < value <= 1e6, "above 0, up to 1,000,000"
    elif name == "max_length":
        good, allowed = value >= 2, "at least 2: a token is predicted from those before it"
    elif name in _FROM_1:
        good, allowed = value >= 1, "at least 1"
    elif name in _ABOVE_0:
        good, allowed = value > 0, "above 0"
    elif name in _BELOW_1:
        good, allowed = 0 <= value < 1, "from 0 to below 1"
    elif name.endswith("seed"):
        good, allowed = 0 <= value < 2**32, "from 0 to 2**32 - 1"
    else:
        good, allowed = value >= 0, "at least 0"
    if not good:
        raise ValueError(f"{path}{name}={value!r}: must be {allowed}")


# --- arguments -------------------------------------------------------------------------------------------------------

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


def check_packages(args: TrainingArguments, path: str = "") -> None:
    """
    Make what a trainer will make of its arguments, long after the first stage of a run has begun: an optimizer's class,
    a schedule, and the callbacks that report.

    Args:
        path: of the section that has them, with a dot at its end.

    Raises:
        ValueError: one of them needs a package that is not installed, or other settings.
    """
    for name in [args.report_to] if isinstance(args.report_to, str) else args.report_to:
        try:
            for callback in get_reporting_integration_callbacks([name]):
                callback()
        except (ImportError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path}report_to={name!r}: {one_line(error)}") from error
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise ValueError(f"{path}optim={str(args.optim.value)!r}: {one_line(error)}") from error
    except ValueError as error:  # also of optimizers that look at the model, which is not here
        if args.optim_args:
            raise ValueError(f"{path}optim_args={args.optim_args!r}: {one_line(error)}; give key=value,…") from error
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    own = args.lr_scheduler_kwargs or {}
    try:
        get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(10), 10, scheduler_specific_kwargs=own)
    except (TypeError, ValueError) as error:
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        raise ValueError(f"{path}lr_scheduler_kwargs={own}: of {kind!r}: {one_line(error)}") from error
    if args.dataloader_persistent_workers and not args.dataloader_num_workers:
        raise ValueError(f"{path}dataloader_persistent_workers=True: needs dataloader_num_workers above 0")
    _check_checkpointing(args.gradient_checkpointing_kwargs or {}, isinstance(args, SFTConfig), path)
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ValueError(f"{path}use_liger_kernel=True: is not installed; pip install liger-kernel")
    if getattr(args, "activation_offloading", False) and not torch.accelerator.is_available():
        raise ValueError(f"{path}activation_offloading=True: there is no accelerator to take activations off")
    backend, backends = args.torch_compile_backend, [one.value.lower() for one in DynamoBackend]
    if backend is not None and backend.lower() not in backends:
        raise ValueError(choice_error(f"{path}torch_compile_backend", backend, backends))
    mode = args.torch_compile_mode
    if mode is not None and mode not in (modes := private("torch._inductor", "list_mode_options")()):
        raise ValueError(choice_error(f"{path}torch_compile_mode", mode, modes))


def _check_checkpointing(kwargs: Mapping[str, Any], sft: bool, path: str) -> None:
    """
    Raises:
        ValueError: a key is none of torch's, and none that transformers or, for SFT, TRL take out.
    """
    renamed = getattr(PreTrainedModel, "activation_checkpointing_enable", None)
    enable = renamed or PreTrainedModel.gradient_checkpointing_enable
    names = {name for function in (checkpoint, enable) for name in inspect.signature(function).parameters}
    given = {"function", "args", "kwargs", "self", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"}
    known = names - given | ({"selective"} if sft else set())
    for name in kwargs.keys() - known:
        raise ValueError(unknown_key(f"{path}gradient_checkpointing_kwargs.{name}", known))
    if kwargs.get("selective") and renamed is not None:
        raise ValueError(
            f"{path}gradient_checkpointing_kwargs.selective=True: TRL sets it in a method that this version of "
            "transformers does not call; leave it out, or install transformers before 5.23"
        )


def refuse_arguments(args: TrainingArguments, path: str = "") -> None:
    """
    Args:
        path: of the section that has them, with a dot at its end.

    Raises:
        ValueError: an argument that `training.checkpoints.train` cannot follow.
    """
    counted = "the steps and their rows are counted beforehand"
    reasons = {
        "auto_find_batch_size": counted,
        "load_best_model_at_end": "the last step is the result",
        "save_total_limit": "checkpoints that are not needed are removed anyway",
        "save_only_model": "a stopped training goes on from its optimizer's state",
    }
    for name, reason in reasons.items():
        if value := getattr(args, name):
            raise ValueError(f"{path}{name}={value!r}: {reason}; leave it out")
    if args.accelerator_config.split_batches:
        raise ValueError(f"{path}accelerator_config.split_batches=True: {counted}; leave it out")


def check_launched(args: TrainingArguments, path: str = "") -> None:
    """
    Check that this process was launched as its arguments want.

    Args:
        path: of the section that has them, with a dot at its end.

    Raises:
        ValueError: FSDP without a launcher.
    """
    if args.fsdp and args.parallel_mode != ParallelMode.DISTRIBUTED and not args.fsdp_config.get("xla", False):
        raise ValueError(f"{path}fsdp={args.fsdp!r}: this is one process; start the run with accelerate launch")


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


def check_answers(path: str, dataset: Any, completion_only: bool | None, assistant_only: bool | None) -> None:
    """
    Check that a data set has the answers that the loss is to be restricted to.

    Args:
        path: begins the message.
        completion_only, assistant_only: `SFTConfig`'s `completion_only_loss` and `assistant_only_loss`.

    Raises:
        ValueError: it has none.
    """
    if not isinstance(dataset, Dataset):
        return
    if completion_only and not {"completion", "completion_mask"} & set(dataset.column_names):
        raise ValueError(
            f"{path}completion_only_loss=True: the data have no completions; use columns prompt and completion, or "
            "assistant_only_loss for conversations"
        )
    if assistant_only and "assistant_masks" not in dataset.column_names and not is_conversational(dataset[0]):
        raise ValueError(
            f"{path}assistant_only_loss=True: the data have no conversations; use a column of messages, or "
            "completion_only_loss for prompts and completions"
        )


def check_learnable(caller: str, dataset: Any, args: Any) -> None:
    """
    Raises:
        ValueError: a prepared data set has no rows, as TRL leaves out those without a token to learn.
    """
    if isinstance(dataset, Dataset) and not len(dataset):
        raise ValueError(f"{caller}: max_length={args.max_length}: no example keeps a token to learn from; raise it")


def trains_adapter(given: Iterable[Any]) -> bool:
    """Whether a trainer that is given these trains a MoE-LoRA adapter."""
    configs = [
        config for one in given for config in (one.peft_config.values() if isinstance(one, PeftModel) else [one])
    ]
    return any(isinstance(config, MoELoraConfig) for config in configs)


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
        ValueError: one of it is something else, or the data have no rows, no column that TRL reads, or no answers where
            the loss is to be of these alone.
    """
    check(
        caller,
        model=(model, is_a(nn.Module, remedy="give a model")),
        dataset=(dataset, is_a(Dataset, remedy="give a datasets.Dataset")),
        args=(args, is_a(SFTConfig)),
        processing_class=(processing_class, is_a(PreTrainedTokenizerBase, ProcessorMixin)),
        output_dir=(output_dir, FOLDER),
    )
    refuse_arguments(args, f"{caller}: ")
    check_dataset(caller, dataset, text_columns(args))
    check_answers(f"{caller}: ", dataset, args.completion_only_loss, args.assistant_only_loss)
