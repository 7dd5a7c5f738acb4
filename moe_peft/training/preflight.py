"""Checks before training, for `sft`, `dpo` and each stage of UpIT. They find errors that a trainer would raise late."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from datasets import Dataset
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.training_args import ParallelMode
from transformers.utils import is_liger_kernel_available
from trl import SFTConfig

from ..utils.compat import private
from ..utils.distributed import on_main_process
from ..utils.loading import chat_template
from ..utils.messages import InputError, choice_error, one_line, unknown_keys
from .data import check_answers, check_marks


def check_loss(args: SFTConfig, data: Dataset, tokenizer: Any, path: str = "") -> None:
    """Check that the data have all that a stage's loss needs: a chat template, answers, and marks around answers."""
    section = f"{path}." if path else ""
    template = chat_template(getattr(args, "chat_template_path", None), f"{section}chat_template_path")
    check_answers(section, data, args.completion_only_loss, args.assistant_only_loss)
    if args.assistant_only_loss:
        check_marks(section, data, tokenizer, template)


# --- arguments -------------------------------------------------------------------------------------------------------


def check_arguments(args: TrainingArguments, path: str = "", on_this_machine: bool = True) -> None:
    """
    Check training arguments for errors that a trainer would raise only at the start of training, such as a package that
    is not installed or a missing launcher.

    Args:
        args: arguments of one training.
        path: config section of the arguments, for messages.
        on_this_machine: whether the training runs here and now; a plan may be for another machine.
    """
    section = f"{path}." if path else ""
    check_packages(args, section)
    if on_this_machine:
        if args.fsdp and args.parallel_mode != ParallelMode.DISTRIBUTED and not args.fsdp_config.get("xla", False):
            raise InputError(f"{section}fsdp={args.fsdp!r}: this is one process; start the run with accelerate launch")
        if getattr(args, "activation_offloading", False) and not torch.accelerator.is_available():
            raise InputError(
                f"{section}activation_offloading=True: there is no accelerator to offload activations from"
            )
        if args.fp16 and args.device.type == "cpu":  # accelerate would train in float32
            raise InputError(f"{section}fp16=True: a CPU does not train in float16; leave it out, or set bf16=true")
        if "wandb" in args.report_to:
            on_main_process(partial(_check_wandb, section))


def check_packages(args: TrainingArguments, section: str = "") -> None:
    """
    Create the optimizer's class, the schedule and the reporting callbacks from training arguments.

    A trainer does this only at the start of training. It would raise the same errors, but as tracebacks, after weights
    are loaded and, in UpIT, after earlier stages.

    Args:
        section: config section of the arguments, with a dot at its end.
    """
    for name in [args.report_to] if isinstance(args.report_to, str) else args.report_to:
        try:
            for callback in get_reporting_integration_callbacks([name]):
                callback()
        except (ImportError, RuntimeError, ValueError) as error:
            raise InputError(f"{section}report_to={name!r}: {one_line(error)}") from error
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise InputError(f"{section}optim={str(args.optim.value)!r}: {one_line(error)}") from error
    except ValueError as error:  # also raised by optimizers that need the model, absent here
        if args.optim_args:
            raise InputError(f"{section}optim_args={args.optim_args!r}: {one_line(error)}; give key=value,…") from error
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    kwargs = args.lr_scheduler_kwargs or {}
    try:
        get_scheduler(
            args.lr_scheduler_type, optimizer, args.get_warmup_steps(10), 10, scheduler_specific_kwargs=kwargs
        )
    except (TypeError, ValueError) as error:
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        raise InputError(f"{section}lr_scheduler_kwargs={kwargs}: of {kind!r}: {one_line(error)}") from error
    if args.dataloader_persistent_workers and not args.dataloader_num_workers:
        raise InputError(f"{section}dataloader_persistent_workers=True: needs dataloader_num_workers above 0")
    _check_checkpointing(args.gradient_checkpointing_kwargs or {}, isinstance(args, SFTConfig), section)
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise InputError(f"{section}use_liger_kernel=True: liger-kernel is not installed; pip install liger-kernel")
    backend, backends = args.torch_compile_backend, [backend.value.lower() for backend in DynamoBackend]
    if backend is not None and backend.lower() not in backends:
        raise InputError(choice_error(f"{section}torch_compile_backend", backend, backends))
    mode = args.torch_compile_mode
    if mode is not None and mode not in (modes := private("torch._inductor", "list_mode_options")()):
        raise InputError(choice_error(f"{section}torch_compile_mode", mode, modes))


def _check_wandb(section: str) -> None:
    import wandb

    try:
        wandb.login(verify=False)  # asks for a key in a terminal; needs none where WANDB_MODE turns it off
    except wandb.errors.Error as error:
        raise InputError(
            f"{section}report_to='wandb': {one_line(error)} Or set WANDB_MODE=offline, or report_to=none"
        ) from error


def _check_checkpointing(kwargs: Mapping[str, Any], sft: bool, section: str) -> None:
    """Check the keys of `gradient_checkpointing_kwargs`."""
    renamed = getattr(PreTrainedModel, "activation_checkpointing_enable", None)
    enable = renamed or PreTrainedModel.gradient_checkpointing_enable
    names = {name for function in (checkpoint, enable) for name in inspect.signature(function).parameters}
    others = {"function", "args", "kwargs", "self", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"}
    supported = names - others | ({"selective"} if sft else set())
    if wrong := unknown_keys(kwargs, supported, f"{section}gradient_checkpointing_kwargs."):
        raise InputError(wrong)
    if kwargs.get("selective") and renamed is not None:
        raise InputError(
            f"{section}gradient_checkpointing_kwargs.selective=True: TRL sets it in a method that this version of "
            "transformers does not call; leave it out, or install transformers before 5.23"
        )


def refuse_arguments(args: TrainingArguments) -> None:
    counted = "the steps and their rows are counted beforehand"
    reasons = {
        "auto_find_batch_size": counted,
        "load_best_model_at_end": "the last step is the result",
        "save_total_limit": "checkpoints that are not needed are removed anyway",
        "save_only_model": "a stopped training resumes from its optimizer's state",
    }
    for name, reason in reasons.items():
        if value := getattr(args, name):
            raise InputError(f"{name}={value!r}: {reason}; leave it out")
    if args.accelerator_config.split_batches:
        raise InputError(f"accelerator_config.split_batches=True: {counted}; leave it out")
