"""What experts are, for the stages: folders of one kind. `LoraExperts` and `DenseExperts` are the two kinds."""

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
    A kind of experts: what is done with their folders and models, and what the stages of a recipe make of them.

    Args:
        recipe: of the run. Static methods do not need one.
    """

    output: ClassVar[str]  # the folder of a run's result

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @cached_property
    def base(self) -> Base:
        return self.recipe.base

    # --- folders ----------------------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def copy(source: Path, target: Path) -> None:
        """Copy an expert to another folder, without anything else in its own."""

    @staticmethod
    @abstractmethod
    def scored(load: Load, folders: Sequence[Path]) -> Iterator[TrainedModel]:
        """The experts' models, one after the other."""

    @abstractmethod
    def merge(self, experts: Sequence[Path], folder: Path, seed: int) -> list[Descent]:
        """Write to `folder` the experts and, merged from them, further ones up to the recipe's number."""

    @abstractmethod
    def mean(self, experts: Sequence[Path], folder: Path) -> None:
        """Write the mean of the experts: one LoRA, or a dense model."""

    # --- stage 1 ----------------------------------------------------------------------------------------------------

    def lora_config(self, model: PreTrainedModel) -> LoraConfig | None:
        """What is trained of a base; None trains all weights."""
        return None

    @abstractmethod
    def planned_expert(self, base: PreTrainedModel) -> TrainedModel:
        """What stage 1 trains."""

    # --- stage 3 ----------------------------------------------------------------------------------------------------

    part: ClassVar[str]  # in the names of the parameters that are an expert

    @abstractmethod
    def load(self, folder: Path) -> PreTrainedModel:
        """An expert's dense model, or the base of its LoRA."""

    @staticmethod
    @abstractmethod
    def routed_modules(model: PreTrainedModel, folders: Sequence[Path]) -> list[str]:
        """The modules that get a router."""

    @staticmethod
    @abstractmethod
    def add_vectors(model: PreTrainedModel, folder: Path, names: Sequence[str], seed: int) -> TrainedModel:
        """The model of the expert in a folder, with new routing vectors for these of its modules."""

    @classmethod
    def train(cls, model: nn.Module, experts: bool) -> None:
        """Train an expert's routing vectors alone, or the expert too."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_vector(name) or (experts and cls.part in name))

    @staticmethod
    @abstractmethod
    def vectors(checkpoint: Path, count: int) -> list[torch.Tensor]:
        """The routing vectors [d] in a checkpoint, one for each routed module."""

    @staticmethod
    @abstractmethod
    def without_vectors(checkpoint: Path, source: Path, target: Path) -> None:
        """Write a trained expert without its routing vectors, in its original form."""

    @staticmethod
    @abstractmethod
    def gates(load: Load, folders: Sequence[Path], way: str, texts: Batches) -> list[torch.Tensor]:
        """Gates [n, d] for each routed module, made without training from texts of each expert; see `init_gates`."""

    @abstractmethod
    def planned_with_vectors(self, base: PreTrainedModel) -> TrainedModel:
        """What stage 3 trains of one expert."""

    # --- stage 4 and what follows -----------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """The settings, by name, that decide what is assembled, besides those of all kinds."""
        return {}

    @abstractmethod
    def check_base(self) -> None:
        """Raise a `ValueError` if the base, or given experts, cannot become what the recipe asks for."""

    @abstractmethod
    def assemble(
        self, experts: Sequence[Path], routers: Path | None, data: Dataset, args: SFTConfig, seed: int, state: Path
    ) -> TrainedModel:
        """
        The MoE that is trained: of the experts that there are, or of new ones. Every process calls it.

        Args:
            routers: the file of the routers' weights; None: new ones.
            data: the training data, and `args` how they are prepared, for gates that come from data.
            state: a folder for what a resumed run needs again.
        """

    @abstractmethod
    def planned(self, base: PreTrainedModel) -> TrainedModel:
        """The MoE, with new values."""

    def finish(self, folder: Path, model: Any) -> None:  # noqa: B027
        """Complete the trained MoE's folder, in the main process."""

    @abstractmethod
    def load_result(self, folder: Path, seed: int) -> tuple[TrainedModel, PreTrainedModel | None]:
        """The trained model, and its base if the model does not hold that itself."""
