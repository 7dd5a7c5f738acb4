"""What a run will need, found without loading weights: steps, tokens, trainable parameters, memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState, init_empty_weights
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig

from .inputs import load_config
from .pipeline import UpIT
from .recipe import Recipe
from .shared_stages import TrainingStage

_SAMPLED_ROWS = 500  # for the mean length
_STATE_BYTES = 16  # of a trainable parameter: weight, gradient and Adam's two moments in float32


@dataclass(frozen=True)
class StagePlan:
    """
    One stage. `memory` estimates the bytes on one device, without sharding: base weights, 16 bytes per trainable
    parameter, and the activations of one batch (those that gradient checkpointing keeps, or all). `training` names the
    rate, the schedule and the context.
    """

    name: str
    epochs: float
    steps: int
    tokens: int
    trainable: int
    memory: int
    training: str


def plan(pipeline: UpIT) -> list[StagePlan]:
    """
    The stages of a run that train.

    Steps are exact unless packing or truncation to `max_length` changes the number of rows; tokens come from the mean
    length of up to 500 rows.

    Raises:
        ValueError: the recipe, its base or its data do not fit together.
    """
    r = pipeline.recipe
    # A plan may be made on a machine without the accelerator that the run will have.
    own = {} if torch.accelerator.is_available() else {"bf16": False, "fp16": False, "use_cpu": True}
    pipeline.join_processes(**own)
    data = pipeline.context.train_data
    tokenizer = _with_template(pipeline.context.tokenizer, r.sft.get("chat_template_path"))
    config = load_config(r.model)
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(config)
    base = _base_bytes(r, empty)
    found = []
    for stage in pipeline.stages:
        stage.check()
        if not isinstance(stage, TrainingStage):
            continue
        args = stage.arguments(pipeline.root, **own)
        rows, length = _rows_and_length(data, tokenizer, args)
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * PartialState().num_processes
        steps = stage.steps(rows, batch)
        held, trainable = stage.sizes(empty)
        memory = base + 4 * held + (_STATE_BYTES - 4) * trainable
        memory += _activation_bytes(config, args, length, 2 if _half_precision(stage) else 4)
        tokens = round(stage.epochs * rows * length)
        found.append(StagePlan(stage.name, stage.epochs, steps, tokens, trainable, memory, _training(args)))
    return found


def _training(args: SFTConfig) -> str:
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    return f"learning rate {args.learning_rate:g}, {schedule}; context {args.max_length or 'unlimited'}"


def _half_precision(stage: TrainingStage) -> bool:
    """Whether the stage will train in mixed precision; TRL's default is bf16."""
    return bool(stage.sft.get("bf16", True) or stage.sft.get("fp16"))


def _with_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template that TRL will give it: a file's, or another tokenizer's."""
    if path is not None:
        is_file = Path(path).is_file()
        try:
            own = Path(path).read_text() if is_file else AutoTokenizer.from_pretrained(path).chat_template
        except OSError as error:
            raise ValueError(f"sft.chat_template_path={path!r}: neither a file nor a reachable tokenizer") from error
        tokenizer.chat_template = own
    return tokenizer


def _rows_and_length(data: Dataset, tokenizer: PreTrainedTokenizerBase, args: SFTConfig) -> tuple[int, float]:
    """Training rows and their mean number of tokens."""
    stride = max(1, len(data) // _SAMPLED_ROWS)
    limit = args.max_length or float("inf")
    lengths = [row_tokens(tokenizer, data[i]) for i in range(0, len(data), stride)]
    mean = sum(min(length, limit) for length in lengths) / len(lengths)
    if args.packing and args.max_length:
        whole = len(data) * sum(lengths) / len(lengths)
        return max(1, round(whole / args.max_length)), float(args.max_length)
    return len(data), mean


def row_tokens(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> int:
    """
    Tokens of a row, before truncation, in the formats that TRL takes.

    Raises:
        ValueError: a row of no known format.
    """
    if "input_ids" in row:
        return len(row["input_ids"])
    if "messages" in row:
        return len(tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"])
    if "prompt" in row and "completion" in row:
        whole = row["prompt"] + row["completion"]
        if isinstance(whole, list):
            return len(tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"])
        return len(tokenizer(whole)["input_ids"]) + 1  # TRL adds the end
    if "text" in row:
        return len(tokenizer(row["text"])["input_ids"]) + 1
    raise ValueError(f"data.train: columns {sorted(row)}: needs messages, or prompt and completion, or text")


def _base_bytes(recipe: Recipe, model: PreTrainedModel) -> int:
    dtype = recipe.model.dtype
    kind = getattr(torch, dtype) if dtype != "auto" else getattr(model.config, "dtype", None) or torch.float32
    quantization = recipe.model.quantization or {}
    packed = 0.55 if quantization.get("load_in_4bit") else 1.0 if quantization.get("load_in_8bit") else None
    head = model.get_output_embeddings()
    total = 0.0
    for module in model.modules():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        linear = isinstance(module, torch.nn.Linear) and module is not head and packed is not None
        total += own * (packed if linear and packed is not None else kind.itemsize)
    return round(total)


def _activation_bytes(config: Any, args: SFTConfig, length: float, width: int) -> int:
    """Of one batch: every layer's input, and what backward needs of one layer (of all without checkpointing)."""
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    per_layer = 10 * hidden + 8 * inner  # attention and norms; two slots of gate, up and their product
    kept = layers * hidden + per_layer if args.gradient_checkpointing else layers * per_layer
    return round(args.per_device_train_batch_size * length * kept * width)
