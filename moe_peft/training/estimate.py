"""What a training will take: steps, tokens and memory, by rules."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from ..models.introspection import base_model
from ..models.layer import router_parameters
from ..models.model_size import model_size
from ..native.base import Base
from ..utils.loading import chat_template
from ..utils.messages import InputError, choice_error
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


def planned_launch(processes: int | None, strategy: str | None, dry_run: bool) -> Launch:
    """The launch that a plan is for: what was asked for, or this process's own."""
    if not dry_run and (processes, strategy) != (None, None):
        name, value = ("processes", processes) if processes is not None else ("strategy", strategy)
        raise InputError(f"{name}={value!r}: is for --dry-run; a run takes it from its launcher (accelerate launch)")
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


# --- the plan of a training ------------------------------------------------------------------------------------------

# Columns of a plan's table.
COLUMNS = ("steps", "tokens", "trainable parameters", "memory per process, about")
MEMORY_LINE = "memory: of weights, gradients and the optimizer; activations come on top"


def print_estimates(
    base: Base,
    model: Any,
    stages: Mapping[str, Any],
    data: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    launch: Launch,
) -> None:
    """
    Print what each stage of `sft` or `dpo` will take: steps, tokens, parameters and memory.

    Args:
        model: what is trained, without weights: the base, or the base with an adapter.
        stages: section → training arguments.
    """
    quantization = {} if base.quantization is None else base.quantization.to_dict()
    table = Table("stage", title=f"{base.name_or_path}: {len(data):,} examples")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    lines = []
    for args in stages.values():
        rows = count_rows(data, tokenizer, args)
        steps, read = steps_and_rows(args, rows.count, launch.processes)
        freeze_for_stage(model, router_parameters(model), args.training_stage)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        needed = memory(model, args, quantization=quantization, launch=launch)
        numbers = (f"{steps:,}", f"{round(read * rows.length):,}", f"{trainable:,}", gib(needed.total))
        table.add_row(args.training_stage, *numbers)
        lines.append(f"{args.training_stage}: {training_line(args)}; {needed}")
    if PartialState().is_main_process:
        console = Console(markup=False, emoji=False)
        console.print(table)
        for line in (*lines, MEMORY_LINE, f"model: {model_size(model)}"):
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
