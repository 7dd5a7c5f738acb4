"""Kinds of experts, as the stages use them: `LoraStageKind` and `DenseStageKind`. An expert is a folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel
from trl import SFTConfig

from ..native.base import Base
from .expansion import Descent
from .recipe import Recipe
from .routing_vectors import is_vector

Load = Callable[[Path], PreTrainedModel]
Batches = Iterable[Mapping[str, Any]]
TrainedModel: TypeAlias = PeftModel | PreTrainedModel


class ExpertKind(ABC):
    """
    A kind of experts: operations on their folders and models, in each stage of a recipe.

    Args:
        recipe: the run's recipe. Static methods do not need it.
    """

    output: ClassVar[str]  # name of the result's folder

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @cached_property
    def base(self) -> Base:
        return self.recipe.base

    # --- folders ----------------------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def copy(source: Path, target: Path) -> None:
        """Copy an expert to another folder, without other files in its folder."""

    @staticmethod
    @abstractmethod
    def scored(load: Load, folders: Sequence[Path]) -> Iterator[TrainedModel]:
        """Yield the experts' models, one after the other."""

    @abstractmethod
    def merge(self, experts: Sequence[Path], folder: Path, seed: int) -> list[Descent]:
        """Write to `folder` the experts and further ones merged from them, up to the recipe's number."""

    @abstractmethod
    def mean(self, experts: Sequence[Path], folder: Path) -> None:
        """Write the mean of the experts: one LoRA, or a dense model."""

    # --- stage 1 ----------------------------------------------------------------------------------------------------

    def lora_config(self, model: PreTrainedModel) -> LoraConfig | None:
        """Return the config of the LoRA to train; None trains all weights."""
        return None

    @abstractmethod
    def planned_expert(self, base: PreTrainedModel) -> TrainedModel:
        """Return the model that stage 1 trains."""

    # --- stage 3 ----------------------------------------------------------------------------------------------------

    part: ClassVar[str]  # part of the names of an expert's parameters

    @abstractmethod
    def load(self, folder: Path) -> PreTrainedModel:
        """Load an expert's dense model, or the base of its LoRA."""

    @staticmethod
    @abstractmethod
    def routed_modules(model: PreTrainedModel, folders: Sequence[Path]) -> list[str]:
        """Return the names of the modules that get a router."""

    @staticmethod
    @abstractmethod
    def add_vectors(model: PreTrainedModel, folder: Path, names: Sequence[str], seed: int) -> TrainedModel:
        """Return the model of the expert in a folder, with new routing vectors for the named modules."""

    @classmethod
    def train(cls, model: nn.Module, experts: bool) -> None:
        """Make an expert's routing vectors trainable, with or without the expert's own parameters."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_vector(name) or (experts and cls.part in name))

    @staticmethod
    @abstractmethod
    def vectors(checkpoint: Path, count: int) -> list[torch.Tensor]:
        """Read the routing vectors [d] in a checkpoint, one for each routed module."""

    @staticmethod
    @abstractmethod
    def without_vectors(checkpoint: Path, source: Path, target: Path) -> None:
        """Write a trained expert without its routing vectors, in its original form."""

    @staticmethod
    @abstractmethod
    def gates(load: Load, folders: Sequence[Path], way: str, texts: Batches) -> list[torch.Tensor]:
        """Compute gates [n, d] for each routed module from texts of each expert, without training; see `init_gates`."""

    @abstractmethod
    def planned_with_vectors(self, base: PreTrainedModel) -> TrainedModel:
        """Return the model that stage 3 trains for one expert."""

    # --- stage 4 and later ------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return further settings of this kind, by name, that change the assembled MoE."""
        return {}

    @abstractmethod
    def check_base(self) -> None:
        """Raise a `ValueError` if the base model or given experts cannot become the recipe's MoE."""

    @abstractmethod
    def assemble(
        self, experts: Sequence[Path], routers: Path | None, data: Dataset, args: SFTConfig, seed: int, state: Path
    ) -> TrainedModel:
        """
        Assemble the MoE to train, from the given experts or new ones. Every process calls it.

        Args:
            routers: the file of the routers' weights; None: new routers.
            data: the training data, for gates computed from data. `args` sets their preparation.
            state: a folder for files that a resumed run needs again.
        """

    @abstractmethod
    def planned(self, base: PreTrainedModel) -> TrainedModel:
        """Return the MoE, with new values."""

    def finish(self, folder: Path, model: Any) -> None:  # noqa: B027
        """Complete the trained MoE's folder, in the main process."""

    @abstractmethod
    def load_result(self, folder: Path, seed: int) -> tuple[TrainedModel, PreTrainedModel | None]:
        """Load the trained model, and its base if the model does not contain it."""
