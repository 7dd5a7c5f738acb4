"""What a training will take: rows, tokens and memory by rules, time and peak memory from a few steps."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch
from accelerate import PartialState
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import SFTConfig

from ..models.introspection import base_model
from ..models.layer import router_parameters
from ..models.model_size import model_size
from ..native.base import Base
from ..utils.loading import chat_template
from ..utils.messages import InputError, choice_error, refused_settings
from .data import drawn
from .preparation import for_one_trainer
from .schedule import schedule_name, steps_and_rows
from .trainable import freeze_for_stage

_SAMPLED_ROWS = 500  # for lengths

# What each strategy shards among the processes; the rest is the same in all of them.
STRATEGIES = {
    "ddp": (),
    "zero2": ("gradients", "optimizer"),
    "zero3": ("weights", "gradients", "optimizer"),
    "fsdp2": ("weights", "gradients", "optimizer"),
}


@dataclass(frozen=True)
class Launch:
    """How a training will be launched: the number of processes, and what shards its state among them."""

    processes: int = 1
    strategy: str = "ddp"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InputError(choice_error("strategy", self.strategy, STRATEGIES))
        if self.processes < 1:
            raise InputError(f"processes={self.processes}: must be 1 or more")


def planned_launch(processes: int | None, strategy: str | None, dry_run: bool, timed: bool = False) -> Launch:
    """
    The launch that a plan is for: what was asked for, or this process's own.

    Args:
        timed: whether the plan is to have times, which are measured in this process.
    """
    if not dry_run and timed:
        raise InputError("time=True: is for --dry-run")
    if not dry_run and (processes, strategy) != (None, None):
        name, value = ("processes", processes) if processes is not None else ("strategy", strategy)
        raise InputError(f"{name}={value!r}: is for --dry-run; a run takes it from its launcher (accelerate launch)")
    if timed and processes not in (None, 1):
        raise InputError(f"processes={processes}: --time measures the steps of this process; leave one of them out")
    return Launch(PartialState().num_processes if processes is None else processes, strategy or "ddp")


@dataclass(frozen=True)
class Memory:
    """
    Bytes of one process on its device, without activations, which come on top: no rule covers every model's code.

    Args:
        weights: all of them, quantized ones at their packed size.
        gradients, optimizer: of the trainable parameters.
        reference: a second model, which DPO compares the first with if all of it is trained.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference

    def __str__(self) -> str:
        return ", ".join(f"{name} {gib(size)}" for name, size in asdict(self).items() if size or name != "reference")


def gib(size: int) -> str:
    """Bytes, as plans show them."""
    return f"{size / 2**30:.2f} GiB"


def memory(
    model: nn.Module,
    args: SFTConfig,
    *,
    quantization: Mapping[str, Any] | None = None,
    launch: Launch = Launch(),
) -> Memory:
    """
    An estimate for one process: the weights, and gradients and Adam's two moments of the trainable ones.

    DDP's buckets hold the gradients once more. Where parameters are sharded, two layers (the one that computes and the
    next) and what is in no layer, such as embeddings, are still full.

    Args:
        model: what is trained, without weights, each parameter with its dtype; see `on_quantized`.
        quantization: fields of a `BitsAndBytesConfig`, of the base.
    """
    weights, largest, outside = _weight_bytes(model, quantization or {})
    trainable = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trainable)
    moments = sum(p.numel() for p in trainable) if "8bit" in getattr(args.optim, "value", args.optim) else gradients
    buckets = 2 if launch.strategy == "ddp" and launch.processes > 1 else 1
    needed = Memory(weights, gradients * buckets, 2 * moments)
    shares = {name: -(-getattr(needed, name) // launch.processes) for name in STRATEGIES[launch.strategy]}
    if "weights" in shares and launch.processes > 1:
        shares["weights"] = min(shares["weights"] + 2 * largest + outside, needed.weights)
    needed = replace(needed, **shares)
    has_reference = not getattr(args, "precompute_ref_log_probs", True) and not isinstance(model, PeftModel)
    return replace(needed, reference=needed.weights if has_reference else 0)


def _weight_bytes(model: nn.Module, quantization: Mapping[str, Any]) -> tuple[int, int, int]:
    """Bytes of all weights, of the largest layer, and of those in no layer. A tied weight counts once."""
    scale = (1 if quantization.get("bnb_4bit_use_double_quant") else 4) / 64  # 64 weights have one in float32
    packed = 0.5 + scale if quantization.get("load_in_4bit") else 1.0 if quantization.get("load_in_8bit") else None
    head = base_model(model).get_output_embeddings()
    head = getattr(head, "original_module", head)  # beneath PEFT's copies and rows

    def size(part: nn.Module) -> float:
        sizes = {}
        for module in part.modules():
            linear = isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad
            for parameter in module.parameters(recurse=False):
                width = packed if linear and packed is not None else parameter.element_size()
                sizes[id(parameter)] = parameter.numel() * width
        return sum(sizes.values())

    # The list of decoder layers is that with the most weights.
    lists = ([size(layer) for layer in module] for module in model.modules() if isinstance(module, nn.ModuleList))
    layers = max(lists, key=sum)
    total = size(model)
    return round(total), round(max(layers)), round(total - sum(layers))


# --- measurements ----------------------------------------------------------------------------------------------------

_TIMED_STEPS = 3


@dataclass(frozen=True)
class Measured:
    """
    What a few optimizer steps took.

    Args:
        seconds: of one step.
        peak: the most bytes that were held at once, of batches as long as theirs; see `memory_line` for where.
    """

    seconds: float
    peak: int


def measured_steps(make_trainer: Callable[[Any, Dataset], Trainer], args: SFTConfig, data: Dataset) -> Measured:
    """
    The median time of three optimizer steps, after one that does not count, and their peak memory. Nothing is saved or
    reported.

    Args:
        make_trainer: arguments and rows → the trainer.
        args: of the training that is planned.
    """
    args = for_one_trainer(args)
    args.max_steps, args.save_strategy, args.eval_strategy = _TIMED_STEPS + 1, SaveStrategy.NO, IntervalStrategy.NO
    args.report_to, args.push_to_hub, args.disable_tqdm = [], False, True
    args.load_best_model_at_end = args.eval_on_start = False
    args.logging_strategy = IntervalStrategy.NO
    rows = args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        args.output_dir = folder
        with refused_settings():
            trainer = make_trainer(args, drawn(data, min(rows * PartialState().num_processes, len(data)), args.seed))
        trainer.add_callback(clock)
        if on_gpu := _counts_bytes(args.device):
            torch.accelerator.reset_peak_memory_stats()
        trainer.train()
    peak = torch.accelerator.max_memory_allocated() if on_gpu else _process_peak()
    return Measured(statistics.median(e - b for b, e in zip(clock.ends, clock.ends[1:], strict=False)), peak)


def _counts_bytes(device: torch.device) -> bool:
    """Whether torch counts the bytes that it allocates on a device."""
    return device.type not in ("cpu", "mps")


def _process_peak() -> int:
    """The most memory that this process has used since it began, in bytes."""
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.ends.append(time.perf_counter())


def duration(seconds: float) -> str:
    """A time in words: `42 s`, `7 min`, `2 h 05 min`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


# --- the plan of a training ------------------------------------------------------------------------------------------

# Columns of a plan's table; the last two are measured.
COLUMNS = ("steps", "tokens", "trainable parameters", "memory per process, about", "peak, measured", "time, about")


def memory_line() -> str:
    """What a plan's memory leaves out, to be said before a model is loaded, and where a peak is measured."""
    python = gib(psutil.Process().memory_info().rss)
    return (
        f"memory: without activations, which are part of the peak that --time measures; on a CPU, add {python} for "
        "Python and its libraries, which such a peak includes"
    )


def print_estimates(
    base: Base,
    model: Any,
    stages: Mapping[str, Any],
    data: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    launch: Launch,
    measured: Mapping[str, Measured],
    memory_said: str,
) -> None:
    """
    Print what each stage of `sft` or `dpo` will take: steps, tokens, parameters, memory and time.

    Args:
        model: what is trained, without weights: the base, or the base with an adapter.
        stages: section → training arguments.
        measured: section → what some steps took; empty: nothing was measured.
        memory_said: `memory_line()`, from before a model was loaded.
    """
    quantization = {} if base.quantization is None else base.quantization.to_dict()
    table = Table("stage", title=f"{base.name_or_path}: {len(data):,} examples")
    for column in COLUMNS if measured else COLUMNS[:-2]:
        table.add_column(column, justify="right")
    lines = []
    for section, args in stages.items():
        rows = count_rows(data, tokenizer, args)
        steps, read = steps_and_rows(args, rows.count, launch.processes)
        freeze_for_stage(model, router_parameters(model), args.training_stage)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        needed = memory(model, args, quantization=quantization, launch=launch)
        numbers = [f"{steps:,}", f"{round(read * rows.length):,}", f"{trainable:,}", gib(needed.total)]
        if took := measured.get(section):
            numbers += [gib(took.peak), duration(steps * took.seconds)]
        table.add_row(args.training_stage, *numbers)
        lines.append(f"{args.training_stage}: {training_line(args)}; {needed}")
    if PartialState().is_main_process:
        console = Console(markup=False, emoji=False)
        console.print(table)
        for line in (*lines, memory_said, f"model: {model_size(model)}"):
            console.print(line, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Rows:
    """How many rows a training has, and their mean number of tokens."""

    count: int
    length: float


def count_rows(data: Dataset, tokenizer: PreTrainedTokenizerBase, args: SFTConfig) -> Rows:
    """Training rows as they are after truncation and packing. Tokens are counted in up to 500 of them."""
    stride = max(1, len(data) // _SAMPLED_ROWS)
    limit = args.max_length or float("inf")
    template = chat_template(getattr(args, "chat_template_path", None), "chat_template_path")
    sampled = [row_tokens(tokenizer, data[i], template) for i in range(0, len(data), stride)]
    lengths, cut = [sum(texts) for texts in sampled], [sum(min(n, limit) for n in texts) for texts in sampled]
    if getattr(args, "packing", False) and args.max_length:
        kept = cut if args.packing_strategy == "bfd" else lengths  # others split what is too long
        tokens = len(data) * statistics.fmean(kept)
        return Rows(max(1, round(tokens / args.max_length)), float(args.max_length))
    return Rows(len(data), statistics.fmean(cut))


def row_tokens(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], template: str | None = None) -> list[int]:
    """
    Tokens of a row's texts, before truncation, in the formats that TRL takes; a preference has two, one of each answer.

    Args:
        template: of chats; None: the tokenizer's.
    """
    if "input_ids" in row:
        return [len(row["input_ids"])]
    if "messages" in row:
        texts = [row["messages"]]
    elif "chosen" in row and "rejected" in row:
        prompt = row.get("prompt", type(row["chosen"])())
        texts = [prompt + row[answer] for answer in ("chosen", "rejected")]
    elif "prompt" in row and "completion" in row:
        texts = [row["prompt"] + row["completion"]]
    else:
        texts = [row["text"]]
    return [_tokens(tokenizer, text, template) for text in texts]


def _tokens(tokenizer: PreTrainedTokenizerBase, content: str | list[dict[str, str]], template: str | None) -> int:
    if isinstance(content, list):
        return len(tokenizer.apply_chat_template(content, chat_template=template, return_dict=True)["input_ids"])
    return len(tokenizer(content)["input_ids"]) + 1  # TRL adds the end


def training_line(args: SFTConfig) -> str:
    """Learning rate, schedule, context and gradient checkpointing in words."""
    checkpointing = "on, which takes a third more time" if args.gradient_checkpointing else "off"
    router_rate = getattr(args, "router_learning_rate", None)
    of_routers = "" if router_rate is None else f" (routers {router_rate:g})"
    return (
        f"learning rate {args.learning_rate:g}{of_routers}, {schedule_name(args)}; "
        f"context {args.max_length or 'unlimited'}; gradient checkpointing {checkpointing}"
    )
