"""Loads what a command is pointed at: an adapter on its base, a native MoE with its routers, a dense model; data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import PeftModel
from transformers.utils.peft_utils import find_adapter_config_file

from ..models.introspection import base_model
from ..native.router_files import read_routed_model
from ..routing.expert_map import label_text
from ..training.data import check_domains, check_learnable, check_rows, load_data
from ..training.preparation import preparation, tokenized
from ..training.scoring import Collator
from ..utils.io import reading
from ..utils.loading import (
    ADAPTER_CONFIG,
    adapter_base,
    check_tokenizer,
    quantization_config,
    read_adapter_config,
    read_adapter_weights,
    read_model,
    read_tokenizer,
)
from ..utils.messages import InputError, choice_error

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load(
    path: str,
    dtype: str = "auto",
    quantization: dict[str, Any] | None = None,
    base: str | None = None,
    option: str = "--model",
) -> tuple[Any, Any]:
    """
    A model, in evaluation mode, and its tokenizer. On a machine with an accelerator, the model is on the one of this
    process.

    Args:
        path: the folder of an adapter, a native MoE or a dense model, or a model of the hub.
        dtype: of the weights, as `from_pretrained` takes it.
        quantization: fields of `BitsAndBytesConfig`.
        base: the base of an adapter; None takes the one that the adapter names.
        option: what named the path, for error messages.

    Raises:
        ValueError: there is no model, or a setting is not what `from_pretrained` takes.
    """
    if dtype not in DTYPES:
        raise InputError(choice_error("--dtype", dtype, DTYPES))
    options: dict[str, Any] = {"dtype": dtype}
    if torch.accelerator.is_available():
        options["device_map"] = {"": PartialState().device}
    if quantization is not None:
        options["quantization_config"] = quantization_config(quantization, "--quantization")
    source = f"{option} {path!r}"
    if is_adapter(path) or base is not None:
        model, tokenizer = _load_adapter(path, base, source, options)
    else:
        model, tokenizer = read_routed_model(path, source, **options), read_tokenizer(path, source)
    check_tokenizer(tokenizer, model.config, source)
    return model.eval(), tokenizer


@dataclass(frozen=True)
class Rows:
    """Tokenized examples with `input_ids` and `labels`, their domains if any, and what makes batches of them."""

    data: Dataset
    domains: Sequence[str]
    collator: Collator
    batch_size: int


def load_rows(
    tokenizer: Any,
    data: str,
    label_column: str | None,
    split: str,
    *,
    batch_size: int,
    max_length: int,
    max_examples: int | None,
) -> Rows:
    """
    The examples that a command passes through a model.

    Args:
        data: a file or a dataset's name, in a format that TRL accepts.
        label_column: the column that holds the domains.
        split: the split of the data.
        batch_size: examples per forward pass.
        max_length: tokens per example; longer ones are truncated.
        max_examples: how many examples to use, from the first on; None: all.

    Raises:
        ValueError: the data do not exist, or have no such column, or one of too many values for domains.
    """
    dataset = load_data(data, "--data", label_column, split)
    if max_examples is not None:
        dataset = dataset.select(range(min(max_examples, len(dataset))))
    check_rows(dataset, "--data", tokenizer, label_column)
    check_domains(dataset, label_column)
    args = preparation(max_length)
    rows, collator = tokenized(dataset, tokenizer, args)
    check_learnable(f"--data {data!r}", rows, args)
    domains = [label_text(label) for label in rows[label_column]] if label_column else []
    return Rows(rows, domains, collator, batch_size)


def is_adapter(path: str) -> bool:
    """Whether a folder, or a name on the hub, holds an adapter."""
    if Path(path).exists():
        return (Path(path) / ADAPTER_CONFIG).is_file()
    try:
        return find_adapter_config_file(path) is not None
    except OSError:
        return False


def describe(model: Any) -> dict[str, Any]:
    """For a report: the class of a loaded model, its dtype and its quantization."""
    base = base_model(model)
    dtype = str(base.dtype).removeprefix("torch.")
    return {"class": type(base).__name__, "dtype": dtype, "quantization": _quantization_of(base.config)}


def _quantization_of(config: Any) -> str | None:
    """E.g. "bitsandbytes, load_in_4bit"; None for a model that is not quantized."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = getattr(fields.get("quant_method"), "value", fields.get("quant_method"))
    return ", ".join([str(method), *(name for name in ("load_in_4bit", "load_in_8bit") if fields.get(name))])


def _load_adapter(path: str, base: str | None, source: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """An adapter on its base, and the tokenizer that it was saved with, else the base's."""
    config = read_adapter_config(path, source)
    name, revision = adapter_base(config, source, base)
    base_source = f"{source}: base_model_name_or_path={name!r}" if base is None else f"--base {base!r}"
    model: Any = read_model(name, base_source, revision=revision, **options)
    if (Path(path) / "tokenizer_config.json").is_file():
        tokenizer = read_tokenizer(path, source)
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer))  # as PEFT does, which saves such embeddings with the adapter
    else:
        tokenizer = read_tokenizer(name, base_source, revision)
    read_adapter_weights(path, source)
    with reading(source):
        return PeftModel.from_pretrained(model, path), tokenizer
