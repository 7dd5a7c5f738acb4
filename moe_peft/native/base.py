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
    The base model of a run. Its config and tokenizer are read once.

    Args:
        name_or_path: a folder (`~` is expanded) or a name on the hub.
        dtype: dtype of the weights, e.g. "bfloat16"; "auto" is the config's.
        quantization: a `BitsAndBytesConfig`, or its fields.
        field: the config field of the base model, for messages.
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
        """Folder with its files."""
        return self.model.folder

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def tokenizer(self) -> Any:
        """Copy of the tokenizer, new at each access: trainers change theirs (padding, chat template)."""
        return copy.deepcopy(self.model.tokenizer)

    def empty(self) -> PreTrainedModel:
        """Create a model without weights, on the meta device."""
        return empty_model(copy.deepcopy(self.config), self, self.dtype)

    def load(self) -> PreTrainedModel:
        """Create a model with its weights."""
        quantization = self.quantization
        if isinstance(quantization, Mapping):
            section = self.field.rpartition(".")[0]
            quantization = quantization_config(quantization, f"{section}.quantization".lstrip("."))
        return self.model.from_pretrained(
            dtype=self.dtype, attn_implementation=self.attn_implementation, quantization_config=quantization
        )
