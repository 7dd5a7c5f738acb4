"""State shared by a run's stages: the recipe, the base model, the data, the budget, and the records of done stages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from ..adapter.plain_lora import check_only_linears
from ..native.base import Base
from ..native.folders import DenseFolder, LoraFolder, check_same_tokens, open_folder
from ..native.upcycle import check_same_architecture
from ..training.data import check_domains, check_rows, load_data
from ..utils.io import check_weights, hash_file
from ..utils.loading import changed_embeddings, chat_template
from ..utils.messages import InputError
from .experts import ExpertKind
from .recipe import TRAINED, Recipe


@dataclass(frozen=True)
class Budget:
    """Passes over the training data in each training stage; 0 for a stage that does not run."""

    prepare: float
    router_init: float
    post_train: float


def budget(recipe: Recipe, rows: int) -> Budget:
    """
    Split the recipe's passes over `rows` examples among the stages. Stage 3's passes are added to the recipe's, or with
    `router_init.within_budget` taken from stage 4's.
    """
    total = recipe.num_train_epochs
    first = total * recipe.prepare_share if recipe.prepares else 0.0
    if not recipe.facts.assembles:
        return Budget(first if recipe.facts.averages else total, 0, 0)
    seeds = 0.0
    if recipe.initializes_routers and recipe.router_init.gates == TRAINED:
        seeds = recipe.seed_count(rows) / rows * recipe.router_init.num_train_epochs
    taken = seeds if recipe.router_init.within_budget else 0.0
    if first + taken >= total:
        raise InputError(
            f"router_init: {seeds:g} passes over the data, stage 1 {first:g} of {total:g}: no passes are left "
            "for stage 4; set router_init.within_budget=false, or a smaller seed_fraction"
        )
    return Budget(first, seeds, total - first - taken)


@dataclass
class RunContext:
    """
    State of a run. Inputs are read when they are first needed.

    Args:
        recipe: the run's recipe.
        kind: the kind of its experts.
        records: records of the done stages, by name: fingerprint, metrics, sizes and hashes of files.
    """

    recipe: Recipe
    kind: ExpertKind
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def root(self) -> Path:
        """Folder of the run."""
        return Path(self.recipe.output_dir).expanduser()

    @property
    def base(self) -> Base:
        return self.kind.base

    @cached_property
    def train_data(self) -> Dataset:
        return load_data(self.recipe.data.train, "data.train", self.recipe.data.label_column)

    @cached_property
    def eval_data(self) -> Dataset | None:
        source = self.recipe.data.eval
        return None if source is None else load_data(source, "data.eval", self.recipe.data.label_column)

    @cached_property
    def budget(self) -> Budget:
        return budget(self.recipe, len(self.train_data))

    @cached_property
    def positions(self) -> int | None:
        """Maximum text length of the base model if it has position embeddings; None for any length."""
        return most_positions(self.base)

    @cached_property
    def hashes(self) -> dict[str, Any]:
        """Hashes of the inputs."""
        name = Path(self.base.name_or_path)
        commit = getattr(self.base.config, "_commit_hash", None)
        return {
            "model": _hash_folder(name) if name.is_dir() else f"{name} {commit or self.base.revision}",
            "train": _hash_rows(self.train_data),
            "eval": None if self.eval_data is None else _hash_rows(self.eval_data),
            "experts": [_hash_folder(Path(folder)) for folder in self.recipe.prepare.folders or []],
            "chat_template": hash_template(self.recipe.sft.get("chat_template_path")),
        }

    def check_data(self, templates: Mapping[str | None, str]) -> None:
        """
        Raise if the data do not fit the chat templates, or a template in the mode "lora" changes the embeddings.

        Args:
            templates: the stages' chat templates, each with its field.
        """
        tokenizer = self.base.tokenizer
        for path, field_name in templates.items():
            template = chat_template(path, field_name)
            change = changed_embeddings(path, field_name, tokenizer, self.base.config)
            if change is not None and self.recipe.mode == "lora":
                raise InputError(change)
            for name, data in (("data.train", self.train_data), ("data.eval", self.eval_data)):
                if data is not None:
                    check_rows(data, name, tokenizer, self.recipe.data.label_column, template)
        if self.eval_data is not None:
            check_domains(self.eval_data, self.recipe.data.label_column, "data.eval: ")

    def check_base(self) -> None:
        """Raise an `InputError` if the base's or given experts' files cannot be read or cannot become the MoE."""
        section = self.recipe.prepare
        adapters = [open_folder(path, "prepare.adapters", LoraFolder) for path in section.adapters or []]
        checkpoints = [open_folder(path, "prepare.checkpoints", DenseFolder) for path in section.checkpoints or []]
        if Path(self.base.name_or_path).is_dir():
            check_weights(Path(self.base.name_or_path), self.base)
        for adapter in adapters:
            check_only_linears(adapter.config, adapter.tensors, str(adapter))
            if adapter.has_tokenizer:
                check_same_tokens(adapter, self.base.model)
        if self.recipe.facts.assembles:
            return self.kind.check_base()
        for checkpoint in checkpoints[1:]:
            check_same_architecture(checkpoint, checkpoints[0])


def most_positions(base: Base) -> int | None:
    """Return the maximum text length of a base model with position embeddings; None for any length."""
    config = base.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if most is None or hasattr(config, "rope_parameters"):
        return None
    model = base.empty()
    words = model.get_input_embeddings()
    tables = (module for module in model.modules() if isinstance(module, torch.nn.Embedding) and module is not words)
    return most if any(most <= table.num_embeddings <= most + 2 for table in tables) else None  # OPT has 2 more


# --- hashes of inputs ------------------------------------------------------------------------------------------------


def _hash_folder(folder: Path) -> str:
    """Return the hash of a model's or an adapter's files, except hidden files and the model card."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    names = {path.name: hash_file(path) for path in files if path.name != "README.md"}
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def _hash_rows(dataset: Dataset) -> str:
    digest = hashlib.sha256(json.dumps(dataset.column_names).encode())
    for row in dataset:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def hash_template(path: str | None) -> str | None:
    """
    Return the hash of a chat template, from its file or a tokenizer's folder. A name on the hub is returned as it is.
    """
    if path is None or not Path(path).exists():
        return path
    template = chat_template(path, "chat_template_path") or ""
    return hashlib.sha256(template.encode()).hexdigest()
