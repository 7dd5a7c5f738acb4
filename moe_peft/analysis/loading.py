"""Loads what a command is pointed at: an adapter on its base, a native MoE with its routers, a dense model; data."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig

from ..messages import one_line, one_of, unknown_key
from ..models.native_routers import CONFIG_FIELD
from ..models.view import base_model, text_config
from ..native import load_routers
from ..routing.expert_map import label_text
from ..training.data import load_data
from ..training.scoring import Collator
from ..training.tokenizing import tokenized

DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_limits(caller: str, batch_size: int, max_length: int, max_examples: int | None) -> None:
    """
    Check what limits passes over data.

    Raises:
        ValueError: a number is below 1.
    """
    for name, value in (("batch_size", batch_size), ("max_length", max_length), ("max_examples", max_examples)):
        if value is not None and value < 1:
            raise ValueError(f"{caller}: {name}={value}: use a whole number of at least 1")


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
        raise ValueError(one_of("--dtype", dtype, DTYPES))
    own: dict[str, Any] = {"dtype": dtype}
    if torch.accelerator.is_available():
        own["device_map"] = {"": PartialState().device}
    if quantization is not None:
        own["quantization_config"] = _quantization(quantization)
    with _named("--base", base):
        inner = None if base is None else AutoModelForCausalLM.from_pretrained(base, **own)
    with _named(option, path):
        model = _load_model(path, own) if inner is None else PeftModel.from_pretrained(inner, path)
        source = path if (Path(path) / "tokenizer_config.json").is_file() else model.config._name_or_path
        return model.eval(), AutoTokenizer.from_pretrained(source)


def _quantization(fields: dict[str, Any]) -> BitsAndBytesConfig:
    """The config, which itself takes unknown fields and no number of bits, and then does nothing."""
    known = inspect.signature(BitsAndBytesConfig).parameters.keys() - {"kwargs"}
    for name in fields:
        if name not in known:
            raise ValueError(unknown_key(f"--quantization.{name}", known, "transformers' BitsAndBytesConfig"))
    if not (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        raise ValueError(f"--quantization {fields}: give load_in_4bit or load_in_8bit: true")
    try:
        return BitsAndBytesConfig(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--quantization {fields}: {one_line(error)}") from error


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
        data: a file or a data set's name, in a format that TRL accepts.
        label_column: the column that holds the domains.
        split: the split of the data.
        batch_size: examples per forward pass.
        max_length: tokens per example; longer ones are truncated.
        max_examples: how many examples to use, from the first on; None: all.

    Raises:
        ValueError: the data do not exist, or have no such column.
    """
    dataset = load_data(data, "--data", label_column, split)
    if max_examples is not None:
        dataset = dataset.select(range(min(max_examples, len(dataset))))
    with tempfile.TemporaryDirectory() as folder:  # the trainer that prepares the data creates one
        args = SFTConfig(
            output_dir=folder, bf16=False, max_length=max_length, report_to="none", gradient_checkpointing=False,
            use_cpu=not torch.accelerator.is_available(),
        )  # fmt: skip
        rows, collator = tokenized(dataset, tokenizer, args)
    domains = [label_text(label) for label in rows[label_column]] if label_column else []
    return Rows(rows, domains, collator, batch_size)


def is_adapter(path: str) -> bool:
    """Whether a folder holds an adapter."""
    return (Path(path) / "adapter_config.json").is_file()


def describe(model: Any) -> dict[str, Any]:
    """For a report: the class of a loaded model, its dtype and its quantization."""
    base = base_model(model)
    dtype = str(base.dtype).removeprefix("torch.")
    return {"class": type(base).__name__, "dtype": dtype, "quantization": _quantization_of(base.config)}


def _quantization_of(config: Any) -> str | None:
    """E.g. "bitsandbytes, load_in_4bit"; None for a model that is not quantized."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    fields = found if isinstance(found, dict) else found.to_dict()
    method = getattr(fields.get("quant_method"), "value", fields.get("quant_method"))
    return ", ".join([str(method), *(name for name in ("load_in_4bit", "load_in_8bit") if fields.get(name))])


@contextmanager
def _named(option: str, path: str | None) -> Iterator[None]:
    """Name the option and its value in what is raised."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {path!r}: {one_line(error)}") from error


def _load_model(path: str, own: dict[str, Any]) -> Any:
    if is_adapter(path):
        return AutoPeftModelForCausalLM.from_pretrained(path, **own)
    model = AutoModelForCausalLM.from_pretrained(path, **own)
    if hasattr(text_config(model), CONFIG_FIELD):
        load_routers(model, path)
    return model
