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
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedTokenizerBase, set_seed
from trl import SFTConfig

from ..adapter.convert import lora_to_moe
from ..report import plot_shares
from . import inputs
from .buckets import label_buckets
from .config import Recipe, as_dict
from .evaluate import evaluate
from .expand import expand_experts
from .post_train import post_train
from .prepare import Selection, chosen_steps, prepare_experts
from .router_init import init_router
from .stages import STATE, Stage, run_stage, write_json
from .training import Trained, copy_adapter

# MoELoraConfig fields that follow from the experts when LoRA adapters are stacked.
_FROM_EXPERTS = ("r", "lora_alpha", "use_rslora", "target_projections", "init_lora_weights")


@dataclass(frozen=True)
class Budget:
    """Passes over the training data that each training stage gets; 0 where it does not run."""

    prepare: float
    router_init: float
    post_train: float


def budget(recipe: Recipe, rows: int) -> Budget:
    """How the recipe's passes over `rows` examples are split. The seed set's passes are taken from stage 4's."""
    total = recipe.num_train_epochs
    if recipe.method == "lora":
        return Budget(total, 0, 0)
    if recipe.method == "loramoe_pt":
        return Budget(0, 0, total)
    first = 0.0 if recipe.prepare.adapters is not None else total * recipe.prepare_share
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
        data = inputs.load_data(self.recipe.data.train, "data.train", self.recipe.data.label_column)
        section = self.recipe.router_init
        if self.recipe.method == "upit" and section.buckets == "label":  # its errors should come before any training
            label_buckets(data[self.recipe.data.label_column], self.recipe.num_experts, section.expert_map)
        return data

    @cached_property
    def eval_data(self) -> Dataset | None:
        source = self.recipe.data.eval
        return None if source is None else inputs.load_data(source, "data.eval", self.recipe.data.label_column)

    @cached_property
    def hashes(self) -> dict[str, Any]:
        """Of the inputs."""
        return {
            "model": inputs.hash_model(self.recipe.model),
            "train": inputs.hash_data(self.train_data),
            "eval": None if self.eval_data is None else inputs.hash_data(self.eval_data),
            "adapters": inputs.hash_adapters(self.recipe.prepare),
            "chat_template": inputs.hash_template(self.recipe.sft.get("chat_template_path")),
        }

    @cached_property
    def budget(self) -> Budget:
        return budget(self.recipe, len(self.train_data))

    @property
    def root(self) -> Path:
        return Path(self.recipe.output_dir)

    # --- the run ----------------------------------------------------------------------------------------------------

    def stage_names(self) -> list[str]:
        """The stages that this recipe goes through, in order."""
        r = self.recipe
        if r.method == "lora":
            names = ["prepare"]
        elif r.method == "loramoe_pt":
            names = ["post_train"]
        else:
            upit = r.method == "upit"
            names = [
                *(["prepare"] if r.prepare.adapters is None else []),
                *(["expand"] if r.given_experts() < r.num_experts and not self._copies else []),
                *(["router_init"] if upit and r.router_init.buckets != "none" else []),
                "post_train",
            ]
        return [*names, "evaluate"] if r.data.eval is not None else names

    def run(self) -> Path:
        """
        Do every stage that is missing.

        Returns:
            the result, an adapter folder with the tokenizer: `<output_dir>/adapter`.
        """
        self.join_processes()
        self.root.mkdir(parents=True, exist_ok=True)
        self.records = {}
        runners = {
            "prepare": self._prepare,
            "expand": self._expand,
            "router_init": self._router_init,
            "post_train": self._post_train,
            "evaluate": self._evaluate,
        }
        for name in self.stage_names():
            self.records[name] = run_stage(self.root, Stage(name, self._identity(name), runners[name]))
            gc.collect()  # trainers and models refer to each other; the next stage's base needs the room
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if PartialState().is_main_process:
            self._write_result()
        PartialState().wait_for_everyone()
        return self.root / "adapter"

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
            settings["experts"] = "copies" if self._copies else "checkpoints"
        if name in ("prepare", "router_init", "post_train"):
            settings["seed"] = inputs.stage_seed(r, name)
            settings["epochs"] = getattr(self.budget, name)
        elif name == "expand":
            settings["seed"] = inputs.stage_seed(r, name)
        settings["method"] = r.method
        settings["num_experts"] = r.given_experts() if name == "prepare" else r.num_experts
        settings["label_column"] = r.data.label_column
        before = {stage: self.records[stage]["files"] for stage in self.records}
        needs = {"expand": ("adapters",), "evaluate": ("model", "eval", "chat_template")}.get(
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
        """The adapter under its final name, and the manifest."""
        source = self.root / ("prepare" if self.recipe.method == "lora" else "post_train") / "adapter"
        result, partial = self.root / "adapter", self.root / "adapter.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
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

    # --- the stages -------------------------------------------------------------------------------------------------

    def _prepare(self, folder: Path) -> dict[str, Any]:
        r, section = self.recipe, self.recipe.prepare
        data, epochs, extra = self.train_data, self.budget.prepare, {}
        if section.order == "blocks":
            data = inputs.in_blocks(data, str(r.data.label_column), epochs, inputs.stage_seed(r, "prepare"))
            epochs, extra = 1.0, {"train_sampling_strategy": "sequential"}
        model = inputs.load_model(r.model)
        num_experts, num_checkpoints, selection = self._selection()
        prepared = prepare_experts(
            model,
            data,
            self.sft_config("prepare", folder, num_train_epochs=epochs, **extra),
            self.lora_config(model),
            self.tokenizer,
            output_dir=folder,
            num_experts=num_experts,
            num_checkpoints=num_checkpoints,
            selection=selection,
        )
        if r.method == "lora" and PartialState().is_main_process:  # this stage's adapter is the result
            copy_adapter(prepared.trained.checkpoints[max(prepared.trained.checkpoints)], folder / "adapter")
        PartialState().wait_for_everyone()
        return {"checkpoint_steps": prepared.steps, **_metrics(prepared.trained)}

    def _expand(self, folder: Path) -> dict[str, Any]:
        section = self.recipe.expand
        descents = []
        if PartialState().is_main_process:
            initial = self.root / "prepare" / "initial"
            descents = expand_experts(
                self._experts(),
                output_dir=folder,
                num_experts=self.recipe.num_experts,
                method=section.method,
                similarity=section.similarity,
                drop_rate=section.drop_rate,
                seed=inputs.stage_seed(self.recipe, "expand"),
                initial=initial if "prepare" in self.records else None,
            )[1]
        PartialState().wait_for_everyone()
        return {"descents": [descent.as_dict() for descent in descents]}

    def _router_init(self, folder: Path) -> dict[str, Any]:
        r, section = self.recipe, self.recipe.router_init
        model = self._assemble("router_init")
        count = inputs.seed_count(r, len(self.train_data))
        data = inputs.seed_set(self.train_data, count, inputs.stage_seed(r, "router_init"))
        args = self.sft_config(
            "router_init", folder, num_train_epochs=section.num_train_epochs, packing=False, padding_free=False
        )
        result = init_router(
            model,
            data,
            args,
            self.tokenizer,
            buckets=section.buckets,
            objective=section.objective,
            alpha=section.alpha,
            train_experts=section.train_experts,
            capacity=section.capacity,
            label_column=r.data.label_column,
            expert_map=section.expert_map,
        )
        if args.should_save:
            shutil.copytree(
                result.trained.checkpoints[max(result.trained.checkpoints)],
                folder / "adapter",
                ignore=lambda _, names: [name for name in names if not name.startswith("adapter_")],
            )
            perplexity = None if result.perplexity is None else result.perplexity.tolist()
            write_json(folder / "buckets.json", {"buckets": result.buckets, "perplexity": perplexity})
        PartialState().wait_for_everyone()
        return {"bucket_sizes": [len(bucket) for bucket in result.buckets], **_metrics(result.trained)}

    def _post_train(self, folder: Path) -> dict[str, Any]:
        r = self.recipe
        if "router_init" in self.records:
            base = inputs.load_model(r.model)
            model = PeftModel.from_pretrained(base, self.root / "router_init" / "adapter", is_trainable=True)
        else:
            model = self._assemble("post_train")
        trained = post_train(
            model,
            self.train_data,
            self.sft_config("post_train", folder, num_train_epochs=self.budget.post_train),
            self.tokenizer,
            output_dir=folder / "adapter",
            train_experts=r.post_train.train_experts and r.method != "self_moe",
        )
        return _metrics(trained)

    def _evaluate(self, folder: Path) -> dict[str, Any]:
        last = self.root / ("prepare" if self.recipe.method == "lora" else "post_train") / "adapter"
        model = PeftModel.from_pretrained(inputs.load_model(self.recipe.model), last)
        assert self.eval_data is not None
        args = self.sft_config("evaluate", folder)
        losses, shares = evaluate(model, self.eval_data, args, self.tokenizer, self.recipe.data.label_column)
        if args.should_save and shares:
            plot_shares(shares, folder / "routing.png", f"{self.recipe.method}: where each domain's tokens go")
        return {"loss": losses, "shares": {domain: share.tolist() for domain, share in shares.items()}}

    # --- parts ------------------------------------------------------------------------------------------------------

    def _selection(self) -> tuple[int, int | None, Selection]:
        """How many of how many checkpoints become experts, and which."""
        section = self.recipe.prepare
        if self.recipe.method == "lora" or self._copies:
            return 1, 1, "uniform"
        return self.recipe.given_experts(), section.num_checkpoints, section.selection

    def checkpoints(self, steps: int) -> list[int]:
        """The steps of stage 1's training whose checkpoints become experts."""
        return chosen_steps(steps, *self._selection())

    @property
    def _copies(self) -> bool:
        return self.recipe.method == "loramoe_sft" or self.recipe.prepare.experts == "copies"

    def _experts(self) -> list[Path]:
        """The experts that there are so far, as LoRA adapter folders."""
        r = self.recipe
        if "expand" in self.records:
            return [self.root / "expand" / "experts" / str(i) for i in range(r.num_experts)]
        if self._copies:
            last = (
                self.root / "prepare" / "experts" / "0" if r.prepare.adapters is None else Path(r.prepare.adapters[-1])
            )
            return [last] * r.num_experts
        if r.prepare.adapters is not None:
            return [Path(folder) for folder in r.prepare.adapters]
        return [self.root / "prepare" / "experts" / str(i) for i in range(r.given_experts())]

    def _assemble(self, stage: str) -> PeftModel:
        """The base with all experts in one MoE adapter and random routers; with fresh experts where there are none."""
        r = self.recipe
        model = inputs.load_model(r.model)
        set_seed(inputs.stage_seed(r, stage))
        if r.method == "loramoe_pt":
            return get_peft_model(model, r.moe_config())
        settings = {key: value for key, value in r.adapter.items() if key not in _FROM_EXPERTS}
        return lora_to_moe(model, self._experts(), task_type="CAUSAL_LM", **settings)

    def lora_config(self, model: torch.nn.Module) -> LoraConfig:
        """Stage 1's LoRA: what one expert of the MoE adapter is."""
        moe = self.recipe.moe_config()
        return LoraConfig(
            r=moe.r,
            lora_alpha=moe.lora_alpha,
            lora_dropout=moe.lora_dropout,
            use_rslora=moe.use_rslora,
            init_lora_weights=moe.init_lora_weights,
            target_modules=inputs.ffn_projections(model, moe.target_projections),
            task_type="CAUSAL_LM",
        )

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


def _metrics(trained: Trained) -> dict[str, Any]:
    return {**trained.metrics(), "history": trained.history}
