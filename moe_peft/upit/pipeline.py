"""The run of a recipe: UpIT and the methods it is compared with, all made of the same stages."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import trl
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from ..training.checkpoints import link_folder
from ..training.data import load_data
from . import inputs
from .buckets import label_buckets
from .config import Recipe, as_dict
from .ffn_mode import FFNMode
from .lora_mode import LoraMode
from .mode import Mode
from .stages import STATE, Stage, run_stage, write_json


@dataclass(frozen=True)
class Budget:
    """Passes over the training data that each training stage gets; 0 where it does not run."""

    prepare: float
    router_init: float
    post_train: float


def budget(recipe: Recipe, rows: int) -> Budget:
    """How the recipe's passes over `rows` examples are split. The seed set's passes are taken from stage 4's."""
    total = recipe.num_train_epochs
    if recipe.kind == "dense":
        return Budget(total, 0, 0)
    if recipe.kind == "fresh":
        return Budget(0, 0, total)
    first = 0.0 if recipe.prepare.given is not None else total * recipe.prepare_share
    seeds = 0.0
    if recipe.method == "upit" and recipe.router_init.buckets != "none":
        seeds = inputs.seed_count(recipe, rows) / rows * recipe.router_init.num_train_epochs
    if first + seeds >= total:
        raise ValueError(
            f"router_init: {seeds:g} passes over the data, stage 1 {first:g} of {total:g}: stage 4 is left with none"
        )
    return Budget(first, seeds, total - first - seeds)


@dataclass
class UpIT:
    """
    A recipe and its run.

    Args:
        recipe: what to do; see `load_recipe`.
    """

    recipe: Recipe
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    # --- inputs, read when first needed -----------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A new one for each stage: trainers change theirs (padding, chat template)."""
        return inputs.load_tokenizer(self.recipe.model)

    @cached_property
    def train_data(self) -> Dataset:
        data = load_data(self.recipe.data.train, "data.train", self.recipe.data.label_column)
        section = self.recipe.router_init
        if self.recipe.method == "upit" and section.buckets == "label":  # its errors should come before any training
            label_buckets(data[self.recipe.data.label_column], self.recipe.num_experts, section.expert_map)
        return data

    @cached_property
    def eval_data(self) -> Dataset | None:
        source = self.recipe.data.eval
        return None if source is None else load_data(source, "data.eval", self.recipe.data.label_column)

    @cached_property
    def hashes(self) -> dict[str, Any]:
        """Of the inputs."""
        return {
            "model": inputs.hash_model(self.recipe.model),
            "train": inputs.hash_data(self.train_data),
            "eval": None if self.eval_data is None else inputs.hash_data(self.eval_data),
            "adapters": inputs.hash_experts(self.recipe.prepare),
            "chat_template": inputs.hash_template(self.recipe.sft.get("chat_template_path")),
        }

    @cached_property
    def budget(self) -> Budget:
        return budget(self.recipe, len(self.train_data))

    @cached_property
    def mode(self) -> Mode:
        """The stages of the recipe's mode."""
        return (FFNMode if self.recipe.mode == "ffn" else LoraMode)(self)

    @property
    def root(self) -> Path:
        return Path(self.recipe.output_dir)

    # --- the run ----------------------------------------------------------------------------------------------------

    def stage_names(self) -> list[str]:
        """The stages that this recipe goes through, in order."""
        r = self.recipe
        if r.kind == "dense":
            names = ["prepare"]
        elif r.kind == "fresh":
            names = ["post_train"]
        else:
            upit = r.method == "upit"
            names = [
                *(["prepare"] if r.prepare.given is None else []),
                *(["expand"] if r.given_experts() < r.num_experts and not r.copies else []),
                *(["router_init"] if upit and r.router_init.buckets != "none" else []),
                "post_train",
            ]
        return [*names, "evaluate"] if r.data.eval is not None else names

    def run(self) -> Path:
        """
        Do every stage that is missing.

        Returns:
            the result, with the tokenizer: `<output_dir>/adapter`, an adapter folder; in the mode "ffn"
            `<output_dir>/model`, a native MoE.
        """
        self.join_processes()
        self.mode.check()
        self.root.mkdir(parents=True, exist_ok=True)
        self.records = {}
        for name in self.stage_names():
            self.records[name] = run_stage(self.root, Stage(name, self._identity(name), getattr(self.mode, name)))
            gc.collect()  # trainers and models refer to each other; the next stage's base needs the room
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if PartialState().is_main_process:
            self._write_result()
        PartialState().wait_for_everyone()
        return self.result

    @property
    def result(self) -> Path:
        """Where the result is, or will be."""
        return self.root / self.mode.result

    def join_processes(self, **own: Any) -> None:
        """
        Meet the other processes of a launcher, on the devices that the training arguments ask for. They set up
        accelerate's state anew, so whoever asks it before would believe to be alone.
        """
        for stage in [
            name for name in self.stage_names() if name != "expand"
        ]:  # all of them, so that a wrong value ends a run before it begins
            _ = self.sft_config(stage, self.root, **own).device

    def half_precision(self, stage: str) -> bool:
        """Whether a stage trains in mixed precision, as the recipe says (TRL's default is bf16)."""
        settings = {**self.recipe.sft, **getattr(self.recipe, stage).sft}
        return bool(settings.get("bf16", True) or settings.get("fp16"))

    def _identity(self, name: str) -> dict[str, Any]:
        """What decides a stage's result. Earlier stages' files are inputs, so a change is passed on."""
        r = self.recipe
        settings: dict[str, Any] = as_dict(getattr(r, name)) if hasattr(r, name) else {}
        if name != "expand":
            settings["sft"] = {**r.sft, **settings.get("sft", {})}
            settings["adapter"] = r.adapter
            settings["experts"] = "copies" if r.copies else "checkpoints"
            if r.mode == "ffn" and name == "post_train":
                settings["moe"] = r.moe
        if name in ("prepare", "router_init", "post_train"):
            settings["seed"] = inputs.stage_seed(r, name)
            settings["epochs"] = getattr(self.budget, name)
        elif name == "expand":
            settings["seed"] = inputs.stage_seed(r, name)
        settings["mode"], settings["method"] = r.mode, r.method
        settings["num_experts"] = r.given_experts() if name == "prepare" else r.num_experts
        settings["label_column"] = r.data.label_column
        before = {stage: self.records[stage]["files"] for stage in self.records}
        needs = {"expand": ("model", "adapters"), "evaluate": ("model", "eval", "chat_template")}.get(
            name, ("model", "train", "adapters", "chat_template")
        )
        return json.loads(
            json.dumps(
                {
                    "settings": settings,
                    "processes": PartialState().num_processes,
                    "model": as_dict(r.model),
                    "inputs": {key: self.hashes[key] for key in needs},
                    "earlier_stages": {stage: inputs.hash_json(files) for stage, files in before.items()},
                },
                default=str,
            )
        )

    def _write_result(self) -> None:
        """The result under its final name, and the manifest."""
        source = self.root / ("prepare" if self.recipe.kind == "dense" else "post_train") / self.mode.result
        result, partial = self.result, self.root / f"{self.mode.result}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        link_folder(source, partial)
        shutil.rmtree(result, ignore_errors=True)
        partial.rename(result)
        packages = {"torch": torch, "transformers": transformers, "peft": peft, "trl": trl}
        versions = {name: module.__version__ for name, module in packages.items()}
        manifest = {
            "recipe": as_dict(self.recipe),
            "versions": {**versions, "moe-peft-hf": version("moe-peft-hf")},
            "stages": self.records,
        }
        write_json(self.root / "manifest.json", manifest)

    def sft_config(self, stage: str, folder: Path, **own: Any) -> SFTConfig:
        """A stage's training arguments: the recipe's, then the stage's, then what the pipeline decides."""
        section = getattr(self.recipe, stage, None)
        settings = {"report_to": "none", **self.recipe.sft, **(section.sft if section is not None else {}), **own}
        settings.setdefault("run_name", f"{self.root.name}-{stage}")
        seed = inputs.stage_seed(self.recipe, stage) if section is not None else self.recipe.seed
        # The last part of the path becomes the title of the model card.
        output_dir = str(folder / STATE / self.root.name)
        try:
            return SFTConfig(output_dir=output_dir, save_strategy="no", seed=seed, data_seed=seed, **settings)
        except (ValueError, TypeError, ImportError) as error:
            raise ValueError(f"{stage}.sft: {' '.join(str(error).split())}") from error
