"""The base model of a run, and how the run loads it."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..utils.loading import empty_model, quantization_config
from .folders import WholeModel


@dataclass(frozen=True)
class Base:
    """
    The base model that a run names. Its config and its tokenizer are read once.

    Args:
        name_or_path: a folder, whose `~` is expanded, or a name on the hub.
        dtype: of the weights, e.g. "bfloat16"; "auto" is the config's.
        quantization: a `BitsAndBytesConfig`, or its fields.
        field: the field that names it, for messages.
    """

    name_or_path: str
    revision: str | None = None
    dtype: str = "auto"
    attn_implementation: str | None = None
    quantization: Any = None
    field: str = "model_name_or_path"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name_or_path", os.path.expanduser(self.name_or_path))

    def __str__(self) -> str:
        return str(self.model)

    @cached_property
    def model(self) -> WholeModel:
        return WholeModel(self.name_or_path, self.field, self.revision)

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.model.folder

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def tokenizer(self) -> Any:
        """A copy each time, as trainers change theirs (padding, chat template)."""
        return copy.deepcopy(self.model.tokenizer)

    def empty(self) -> PreTrainedModel:
        """A new model without weights, on the meta device."""
        return empty_model(copy.deepcopy(self.config), self, self.dtype)

    def load(self) -> PreTrainedModel:
        """A new model with its weights."""
        quantization = self.quantization
        if isinstance(quantization, Mapping):
            section = self.field.rpartition(".")[0]
            quantization = quantization_config(quantization, f"{section}.quantization".lstrip("."))
        return self.model.from_pretrained(
            dtype=self.dtype, attn_implementation=self.attn_implementation, quantization_config=quantization
        )
