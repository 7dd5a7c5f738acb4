"""Estimates of a training's steps, tokens and memory."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig, extract_prompt, is_conversational

from ..models.introspection import base_model
from ..models.layer import router_parameters
from ..models.model_size import model_size
from ..native.base import Base
from .data import check_learnable
from .preparation import tokenized
from .schedule import schedule_name, steps_and_rows
from .trainable import freeze_for_stage

_SAMPLED_ROWS = 500  # to estimate lengths


@dataclass(frozen=True)
class Memory:
    """
    Bytes on a device, without activations: no rule for these covers every model's code.

    Args:
        weights: all weights, quantized weights at their packed size.
        gradients, optimizer: of the trainable parameters.
        reference: the reference model, which DPO needs if all parameters are trained.
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
    """Format bytes for a plan."""
    return f"{size / 2**30:.2f} GiB"


def memory(model: nn.Module, args: SFTConfig, quantization: Mapping[str, Any] | None = None) -> Memory:
    """
    Estimate the memory of one process without sharding: weights, and for trainable parameters the gradients and Adam's
    two moments.

    Args:
        model: the model to train, without weights, each parameter with its dtype; see `on_quantized`.
        quantization: fields of the base model's `BitsAndBytesConfig`.
    """
    weights = _weight_bytes(model, quantization or {})
    trainable = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trainable)
    moments = sum(p.numel() for p in trainable) if "8bit" in getattr(args.optim, "value", args.optim) else gradients
    has_reference = not getattr(args, "precompute_ref_log_probs", True) and not isinstance(model, PeftModel)
    return Memory(weights, gradients, 2 * moments, weights if has_reference else 0)


def _weight_bytes(model: nn.Module, quantization: Mapping[str, Any]) -> int:
    """Return the bytes of all weights. A tied weight counts once."""
    scale = (1 if quantization.get("bnb_4bit_use_double_quant") else 4) / 64  # one float32 per 64 weights
    packed = 0.5 + scale if quantization.get("load_in_4bit") else 1.0 if quantization.get("load_in_8bit") else None
    head = base_model(model).get_output_embeddings()
    head = getattr(head, "original_module", head)  # inside PEFT's wrappers
    sizes = {}
    for module in model.modules():
        linear = isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad
        for parameter in module.parameters(recurse=False):
            width = packed if linear and packed is not None else parameter.element_size()
            sizes[id(parameter)] = parameter.numel() * width
    return round(sum(sizes.values()))


# --- the plan of a training ------------------------------------------------------------------------------------------

# Columns of a plan's table.
COLUMNS = ("steps", "tokens", "trainable parameters", "memory, about")
MEMORY_LINE = "memory: of weights, gradients and the optimizer; activations come on top"


def print_estimates(
    base: Base,
    model: Any,
    stages: Mapping[str, Any],
    data: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    more: str | None = None,
) -> None:
    """
    Print each stage's steps, tokens, trainable parameters and memory, for `sft` and `dpo`.

    Args:
        model: the model to train, without weights: the base model, or the base model with an adapter.
        stages: section → training arguments.
        more: a further line.
    """
    quantization = {} if base.quantization is None else base.quantization.to_dict()
    table = Table("stage", title=f"{base.name_or_path}: {len(data):,} examples")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    lines = []
    for args in stages.values():
        rows = count_rows(data, tokenizer, args)
        steps, read = steps_and_rows(args, rows.count, PartialState().num_processes)
        freeze_for_stage(model, router_parameters(model), args.training_stage)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        needed = memory(model, args, quantization)
        numbers = (f"{steps:,}", f"{round(read * rows.length):,}", f"{trainable:,}", gib(needed.total))
        table.add_row(args.training_stage, *numbers)
        lines.append(f"{args.training_stage}: {training_line(args)}; {needed}")
    if PartialState().is_main_process:
        console = Console(markup=False, emoji=False)
        console.print(table)
        for line in filter(None, (*lines, more, MEMORY_LINE, f"model: {model_size(model)}")):
            console.print(line, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class RowCount:
    """Number of training rows, and their mean number of tokens."""

    count: int
    length: float


def count_rows(data: Dataset, tokenizer: PreTrainedTokenizerBase, args: SFTConfig) -> RowCount:
    """
    Count the training rows as the trainer prepares them: truncated, packed, and without rows that have no token to
    learn. Large datasets are estimated from about 500 rows.
    """
    looked_at = range(0, len(data), max(1, len(data) // _SAMPLED_ROWS))
    sample = data.select(looked_at)
    if isinstance(args, SFTConfig):
        sample, _ = tokenized(sample, tokenizer, args)
        lengths = list(map(len, sample["input_ids"]))
    else:
        lengths = [_pair_tokens(tokenizer, row, args) for row in sample]
        sample = sample.select([i for i, length in enumerate(lengths) if length])
        lengths = list(filter(None, lengths))
    check_learnable("", sample, args)
    return RowCount(max(1, round(len(lengths) * len(data) / len(looked_at))), statistics.fmean(lengths))


def _pair_tokens(tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], args: Any) -> int:
    """
    Return the number of tokens of a preference's two answers, each with its prompt. Return 0 if TRL leaves the row out.
    """
    row, limit = row if "prompt" in row else extract_prompt(row), args.max_length or sys.maxsize
    prompt = row["prompt"]
    if args.truncation_mode == "keep_start" and _tokens(tokenizer, prompt, add_generation_prompt=True) >= limit:
        return 0
    ends = 0 if is_conversational(row) else 1  # TRL adds an EOS token
    return sum(min(_tokens(tokenizer, prompt + row[answer]) + ends, limit) for answer in ("chosen", "rejected"))


def _tokens(tokenizer: PreTrainedTokenizerBase, content: str | list[dict[str, str]], **options: Any) -> int:
    if isinstance(content, list):
        return len(tokenizer.apply_chat_template(content, return_dict=True, **options)["input_ids"])
    return len(tokenizer(content)["input_ids"])


def training_line(args: SFTConfig) -> str:
    """Describe the learning rate, schedule, context and gradient checkpointing in words."""
    checkpointing = "on, which takes a third more time" if args.gradient_checkpointing else "off"
    router_rate = getattr(args, "router_learning_rate", None)
    of_routers = "" if router_rate is None else f" (routers {router_rate:g})"
    return (
        f"learning rate {args.learning_rate:g}{of_routers}, {schedule_name(args)}; "
        f"context {args.max_length or 'unlimited'}; gradient checkpointing {checkpointing}"
    )
