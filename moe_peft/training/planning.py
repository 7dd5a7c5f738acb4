"""What a training will take, found without loading weights: rows, tokens, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig

_SAMPLED_ROWS = 500  # for the mean length
_STATE_BYTES = 16  # of a trainable parameter: weight, gradient and Adam's two moments in float32


def memory_bytes(
    model: PreTrainedModel,
    args: SFTConfig,
    length: float,
    held: int,
    trainable: int,
    *,
    half: bool,
    dtype: str = "auto",
    quantization: Mapping[str, Any] | None = None,
) -> int:
    """
    An estimate for one device, without sharding: base weights, 4 bytes per other parameter that is held, 16 per
    trainable one, and the activations of one batch (those that gradient checkpointing keeps, or all).

    Args:
        model: the base, without weights.
        length: mean tokens of a row.
        held, trainable: parameters beside the base's, and those that are trained.
        half: whether it trains in mixed precision.
        dtype: of the base's weights; "auto" is the config's.
    """
    weights = _base_bytes(model, dtype, quantization or {}) + 4 * held + (_STATE_BYTES - 4) * trainable
    return weights + _activation_bytes(model.config, args, length, 2 if half else 4)


def rows_and_length(data: Dataset, tokenizer: PreTrainedTokenizerBase, args: SFTConfig) -> tuple[int, float]:
    """Training rows and their mean number of tokens, which comes from up to 500 of them."""
    stride = max(1, len(data) // _SAMPLED_ROWS)
    limit = args.max_length or float("inf")
    lengths = [row_tokens(tokenizer, data[i]) for i in range(0, len(data), stride)]
    mean = sum(min(length, limit) for length in lengths) / len(lengths)
    if getattr(args, "packing", False) and args.max_length:
        whole = len(data) * sum(lengths) / len(lengths)
        return max(1, round(whole / args.max_length)), float(args.max_length)
    return len(data), mean


def row_tokens(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> int:
    """
    Tokens of a row, before truncation, in the formats that TRL takes; of a preference, those of both answers.

    Raises:
        ValueError: a row of no known format.
    """
    if "input_ids" in row:
        return len(row["input_ids"])
    if "messages" in row:
        return _tokens(tokenizer, row["messages"])
    if "chosen" in row and "rejected" in row:
        prompt = row.get("prompt", type(row["chosen"])())
        return _tokens(tokenizer, prompt + row["chosen"]) + _tokens(tokenizer, prompt + row["rejected"])
    if "prompt" in row and "completion" in row:
        return _tokens(tokenizer, row["prompt"] + row["completion"])
    if "text" in row:
        return _tokens(tokenizer, row["text"])
    raise ValueError(f"data.train: columns {sorted(row)}: needs messages, or prompt and completion, or text")


def _tokens(tokenizer: PreTrainedTokenizerBase, whole: str | list[dict[str, str]]) -> int:
    if isinstance(whole, list):
        return len(tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"])
    return len(tokenizer(whole)["input_ids"]) + 1  # TRL adds the end


def training_line(args: SFTConfig) -> str:
    """Rate, schedule and context in words."""
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    return f"learning rate {args.learning_rate:g}, {schedule}; context {args.max_length or 'unlimited'}"


def _base_bytes(model: PreTrainedModel, dtype: str, quantization: Mapping[str, Any]) -> int:
    kind = getattr(torch, dtype) if dtype != "auto" else getattr(model.config, "dtype", None) or torch.float32
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
