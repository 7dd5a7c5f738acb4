"""Loads what a command is pointed at: an adapter on its base, a native MoE with its routers, or a dense model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from ..messages import one_line, one_of, unknown_key
from ..models.native_routers import CONFIG_FIELD
from ..models.view import text_config
from ..native import load_routers

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


def is_adapter(path: str) -> bool:
    """Whether a folder holds an adapter."""
    return (Path(path) / "adapter_config.json").is_file()


def quantization_of(config: Any) -> str | None:
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
