"""What a training will take, found without loading weights: rows, tokens, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig

from ..models.introspection import router_parameters
from ..models.model_size import model_size
from ..utils.loading import Base, chat_template
from ..utils.messages import choice_error
from .trainable import freeze_for_stage

_SAMPLED_ROWS = 500  # for the mean length
# TRL computes logits and their gradients in tiles of at most so many tokens and words.
_TILE_TOKENS, _TILE_WORDS = 4096, 32768

# What each strategy shards among the processes; the rest is the same in all of them.
STRATEGIES = {
    "ddp": (),
    "zero2": ("gradients", "optimizer"),
    "zero3": ("parameters", "gradients", "optimizer"),
    "fsdp2": ("parameters", "gradients", "optimizer"),
}


@dataclass(frozen=True)
class Launch:
    """
    How a training will be launched: the number of processes, and what shards its state among them.

    Raises:
        ValueError: an unknown strategy, or less than one process.
    """

    processes: int = 1
    strategy: str = "ddp"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(choice_error("strategy", self.strategy, STRATEGIES))
        if self.processes < 1:
            raise ValueError(f"processes={self.processes}: must be 1 or more")


def planned_launch(processes: int | None, strategy: str | None, dry_run: bool) -> Launch:
    """
    The launch that a plan is for: what was asked for, or this process's own.

    Raises:
        ValueError: they are given for a run that is no plan; an unknown strategy.
    """
    if not dry_run and (processes, strategy) != (None, None):
        name, value = ("processes", processes) if processes is not None else ("strategy", strategy)
        raise ValueError(f"{name}={value!r}: is for --dry-run; a run takes it from its launcher (accelerate launch)")
    return Launch(PartialState().num_processes if processes is None else processes, strategy or "ddp")


@dataclass(frozen=True)
class Memory:
    """Bytes of one process."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in asdict(self).items())


def memory(
    model: PreTrainedModel,
    args: SFTConfig,
    length: float,
    held: int,
    trainable: int,
    *,
    half: bool,
    dtype: str = "auto",
    quantization: Mapping[str, Any] | None = None,
    launch: Launch = Launch(),
    trained: torch.dtype = torch.float32,
) -> Memory:
    """
    An estimate for one process: base weights, other parameters that are held, gradients and Adam's two
    moments of the trainable ones, and the activations of one batch (those that gradient checkpointing keeps, or all)
    with one tile of the logits, which TRL's trainers do not hold completely. Without a GPU, a tile takes several times
    as much.

    DDP's buckets hold the gradients once more. Where parameters are sharded, two layers (the one that computes and the
    next) and what is in no layer, such as embeddings, are full all the same.

    Args:
        model: the base, without weights.
        length: mean tokens of a row.
        held, trainable: parameters beside the base's, and those that are trained.
        half: whether it trains in mixed precision.
        dtype: of the base's weights; "auto" is the config's.
        trained: the dtype of the trainable parameters and of those beside the base's.
    """
    base, largest, outside = _base_bytes(model, dtype, quantization or {})
    buckets = 2 if launch.strategy == "ddp" and launch.processes > 1 else 1
    needed = Memory(
        base + trained.itemsize * held,
        trained.itemsize * trainable * buckets,
        2 * (1 if "8bit" in getattr(args.optim, "value", args.optim) else trained.itemsize) * trainable,
        _activation_bytes(model.config, args, length, 2 if half else 4),
    )
    shares = {name: -(-getattr(needed, name) // launch.processes) for name in STRATEGIES[launch.strategy]}
    if "parameters" in shares and launch.processes > 1:
        gathered = 2 * (largest + trained.itemsize * held // model.config.get_text_config().num_hidden_layers) + outside
        shares["parameters"] = min(shares["parameters"] + gathered, needed.parameters)
    return replace(needed, **shares)


def print_estimates(
    base: Base, model: Any, stages: Mapping[str, Any], data: Dataset, tokenizer: PreTrainedTokenizerBase, launch: Launch
) -> None:
    """
    Print what each stage of `sft` or `dpo` will take: steps, tokens, parameters and memory.

    Args:
        model: what is trained, without weights: the base, or the base with an adapter.
        stages: section → training arguments.
    """
    empty, trains_base = base.empty(), not isinstance(model, PeftModel)
    total = sum(p.numel() for p in model.parameters())
    quantization = {} if base.quantization is None else base.quantization.to_dict()
    table = Table("stage", title=f"{base.name_or_path}: {len(data):,} examples")
    for column in ("steps", "tokens", "trainable parameters", "memory per process, about"):
        table.add_column(column, justify="right")
    lines = []
    for args in stages.values():
        rows, length = rows_and_length(data, tokenizer, args)
        steps, read = steps_and_rows(args, rows, launch.processes)
        freeze_for_stage(model, router_parameters(model), args.training_stage)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        needed = memory(
            empty, args, length, total - empty.num_parameters(), trainable, launch=launch,
            trained=base_dtype(empty, base.dtype) if trains_base else torch.float32,
            half=bool(args.bf16 or args.fp16), dtype=base.dtype, quantization=quantization,
        )  # fmt: skip
        numbers = (f"{steps:,}", f"{round(read * length):,}", f"{trainable:,}", f"{needed.total / 2**30:.2f} GiB")
        table.add_row(args.training_stage, *numbers)
        lines.append(f"{args.training_stage}: {training_line(args)}; {needed}")
    if PartialState().is_main_process:
        console = Console(markup=False, emoji=False)
        console.print(table)
        for line in (*lines, f"model: {model_size(model)}"):
            console.print(line, highlight=False, soft_wrap=True)


def rows_and_length(data: Dataset, tokenizer: PreTrainedTokenizerBase, args: SFTConfig) -> tuple[int, float]:
    """Training rows and their mean number of tokens, which comes from up to 500 of them."""
    stride = max(1, len(data) // _SAMPLED_ROWS)
    limit = args.max_length or float("inf")
    template = chat_template(getattr(args, "chat_template_path", None), "chat_template_path")
    lengths = [row_tokens(tokenizer, data[i], template) for i in range(0, len(data), stride)]
    mean = sum(min(length, limit) for length in lengths) / len(lengths)
    if getattr(args, "packing", False) and args.max_length:
        cut = args.packing_strategy == "bfd"  # others split what is too long
        tokens = len(data) * (mean if cut else sum(lengths) / len(lengths))
        return max(1, round(tokens / args.max_length)), float(args.max_length)
    return len(data), mean


def steps_and_rows(args: SFTConfig, rows: int, processes: int) -> tuple[int, float]:
    """The optimizer steps that `Trainer` takes, and the rows that it reads in them."""
    batch, accumulated = args.per_device_train_batch_size * processes, args.gradient_accumulation_steps
    in_epoch, usable = steps_in_epoch(rows, batch, accumulated, args.dataloader_drop_last)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * in_epoch)
    return steps, min(steps * batch * accumulated, steps / in_epoch * usable)


def steps_in_epoch(rows: int, batch: int, accumulated: int, drop_last: bool) -> tuple[int, int]:
    """
    `Trainer`'s optimizer steps in a pass over the data, and the rows that it reads: it begins a step with each pass.

    Args:
        batch: rows of one batch of all processes.
        accumulated: batches of a step.
        drop_last: whether the last batch is left out if it is not full.
    """
    batches = rows // batch if drop_last else -(-rows // batch)
    return max(1, -(-batches // accumulated)), min(rows, batches * batch)


def row_tokens(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], template: str | None = None) -> int:
    """
    Tokens of a row, before truncation, in the formats that TRL takes; of a preference, those of both answers.

    Args:
        template: of chats; None: the tokenizer's.
    """
    if "input_ids" in row:
        return len(row["input_ids"])
    if "messages" in row:
        return _tokens(tokenizer, row["messages"], template)
    if "chosen" in row and "rejected" in row:
        prompt = row.get("prompt", type(row["chosen"])())
        return sum(_tokens(tokenizer, prompt + row[answer], template) for answer in ("chosen", "rejected"))
    if "prompt" in row and "completion" in row:
        return _tokens(tokenizer, row["prompt"] + row["completion"], template)
    return _tokens(tokenizer, row["text"], template)


def _tokens(tokenizer: PreTrainedTokenizerBase, content: str | list[dict[str, str]], template: str | None) -> int:
    if isinstance(content, list):
        return len(tokenizer.apply_chat_template(content, chat_template=template, return_dict=True)["input_ids"])
    return len(tokenizer(content)["input_ids"]) + 1  # TRL adds the end


def training_line(args: SFTConfig) -> str:
    """Learning rate, schedule and context in words."""
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    own = {"three_phase": "in three phases", "step_decay": "with step decay"}
    schedule = own.get(getattr(args, "router_schedule", ""), schedule)
    return f"learning rate {args.learning_rate:g}, {schedule}; context {args.max_length or 'unlimited'}"


def base_dtype(model: PreTrainedModel, dtype: str) -> torch.dtype:
    """Of a base's weights; "auto" is the config's."""
    return getattr(torch, dtype) if dtype != "auto" else getattr(model.config, "dtype", None) or torch.float32


def _base_bytes(model: PreTrainedModel, dtype: str, quantization: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of all weights, of the largest layer, and of those in no layer."""
    kind = base_dtype(model, dtype)
    packed = 0.55 if quantization.get("load_in_4bit") else 1.0 if quantization.get("load_in_8bit") else kind.itemsize
    head = model.get_output_embeddings()

    def size(part: torch.nn.Module) -> float:
        total = 0.0
        for module in part.modules():
            count = sum(p.numel() for p in module.parameters(recurse=False))
            linear = isinstance(module, torch.nn.Linear) and module is not head
            total += count * (packed if linear else kind.itemsize)
        return total

    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    layers = [size(layer) for layer in max(lists, key=size)] if lists else []
    total = size(model)
    return round(total), round(max(layers, default=0.0)), round(total - sum(layers))


def _activation_bytes(config: Any, args: SFTConfig, length: float, width: int) -> int:
    """Of one batch: every layer's input, and what backward needs of one layer (of all without checkpointing)."""
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    per_layer = 10 * hidden + 8 * inner  # attention and norms; two slots of gate, up and their product
    kept = layers * hidden + per_layer if args.gradient_checkpointing else layers * per_layer
    tokens = args.per_device_train_batch_size * length
    tile = min(tokens, _TILE_TOKENS) * min(text.vocab_size, _TILE_WORDS)
    return round((tokens * kept + tile) * width)
