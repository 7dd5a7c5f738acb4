"""What the stages of a run share: the recipe, its data, the budget, and the records of the stages that are done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..training.data import check_domains, check_rows, load_data
from ..utils.io import check_weights
from ..utils.loading import changed_embeddings, chat_template
from . import fingerprint
from .inputs import load_config, load_tokenizer, most_positions
from .recipe import Recipe


@dataclass(frozen=True)
class Budget:
    """Passes over the training data that each training stage gets; 0 where it does not run."""

    prepare: float
    router_init: float
    post_train: float


def budget(recipe: Recipe, rows: int) -> Budget:
    """
    How the recipe's passes over `rows` examples are split. Stage 3's passes stand beside them, or with
    `router_init.within_budget` are taken from stage 4's.

    Raises:
        ValueError: stage 4 would get none.
    """
    total = recipe.num_train_epochs
    if not recipe.facts.assembles:
        return Budget(total, 0, 0)
    first = total * recipe.prepare_share if recipe.prepares else 0.0
    seeds = 0.0
    if recipe.initialises_routers:
        seeds = recipe.bucketed(rows) / rows * recipe.router_init.num_train_epochs
    taken = seeds if recipe.router_init.within_budget else 0.0
    if first + taken >= total:
        raise ValueError(
            f"router_init: {seeds:g} passes over the data, stage 1 {first:g} of {total:g}: stage 4 is left with none; "
            "set router_init.within_budget=false, or a smaller seed_fraction"
        )
    return Budget(first, seeds, total - first - taken)


@dataclass
class RunContext:
    """
    A run, as its stages see it. Inputs are read when they are first needed.

    Args:
        recipe: what to do.
        records: of the stages that are done, by name: identity, metrics, hashes of files.
    """

    recipe: Recipe
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The folder of the run."""
        return Path(self.recipe.output_dir)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A new one for each stage, because trainers change theirs (padding, chat template)."""
        return load_tokenizer(self.recipe.model)

    @cached_property
    def train_data(self) -> Dataset:
        return load_data(self.recipe.data.train, "data.train", self.recipe.data.label_column)

    @cached_property
    def eval_data(self) -> Dataset | None:
        source = self.recipe.data.eval
        return None if source is None else load_data(source, "data.eval", self.recipe.data.label_column)

    @cached_property
    def positions(self) -> int | None:
        """The longest text that the base takes; None for any length."""
        return most_positions(self.recipe.model)

    @cached_property
    def hashes(self) -> dict[str, Any]:
        """Of the inputs."""
        return {
            "model": fingerprint.hash_model(self.recipe.model),
            "train": fingerprint.hash_data(self.train_data),
            "eval": None if self.eval_data is None else fingerprint.hash_data(self.eval_data),
            "adapters": fingerprint.hash_experts(self.recipe.prepare),
            "chat_template": fingerprint.hash_template(self.recipe.sft.get("chat_template_path")),
        }

    def check_data(self, templates: Mapping[str | None, str]) -> None:
        """
        Args:
            templates: what names the stages' chat templates, each with its field.

        Raises:
            ValueError: a row of the data cannot be used, or the base has no tokenizer for it; or a template is one with
                which an adapter would not fit the base.
        """
        tokenizer = self.tokenizer
        for path, field_name in templates.items():
            template = partial(chat_template, path, field_name)
            template()  # the trainer reads it, whatever the data are
            change = changed_embeddings(path, field_name, tokenizer, load_config(self.recipe.model))
            if change is not None and self.recipe.mode == "lora":
                raise ValueError(change)
            for name, data in (("data.train", self.train_data), ("data.eval", self.eval_data)):
                if data is not None:
                    check_rows(data, name, tokenizer, self.recipe.data.label_column, template)
        if self.eval_data is not None:
            check_domains(self.eval_data, self.recipe.data.label_column, "data.eval: ")

    def check_base(self) -> None:
        """
        Raises:
            ValueError: the base's files cannot be read.
        """
        name = self.recipe.model.name_or_path
        fingerprint.check_experts(self.recipe.prepare)
        if Path(name).is_dir():
            check_weights(Path(name), f"model.name_or_path={name!r}")

    @cached_property
    def budget(self) -> Budget:
        return budget(self.recipe, len(self.train_data))
