"""Stages that make a MoE: their work, inputs and results, and their numbers for a plan. `ExpertKind` does the work."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedModel
from trl import SFTConfig

from ..models.layer import router_parameters
from ..models.model_size import model_size
from ..native.model_folder import copy_companions
from ..training.checkpointing import INCIDENTAL, copy_result
from ..training.data import drawn, source_name
from ..training.labels import unknown_labels
from ..training.resuming import Trained
from ..training.schedule import steps_in_epoch
from ..training.trainable import train_only
from ..training.trainers import MoESFTConfig
from ..utils.distributed import on_main_process
from ..utils.messages import InputError, arguments_error
from ..utils.model_card import write_model_card
from ..utils.validation import prefixed
from .buckets import Seeds
from .context import hash_template
from .files import expert_folders, write_buckets, write_routers
from .methods import TRAINING
from .post_train import post_train
from .prepare import chosen_steps, prepare_experts
from .recipe import FROM_EXPERTS, TRAINED, Recipe
from .router_init import init_routers
from .stage_cache import Artifacts, Stage

_TOKENIZER = "tokenizer"  # in the folder of stage 1, for the mean of its experts
ROUTERS = "routers.safetensors"  # stage 3's routers
_FEW_STEPS = 30  # steps of an expert's routing vectors; with fewer, they stay close to random values


class TrainerStage(Stage):
    """A stage with a trainer."""

    config: ClassVar[type[SFTConfig]] = SFTConfig  # class of its training arguments
    trains_loras: ClassVar[bool] = False  # it trains LoRAs one by one; the MoE's other settings have no effect

    @property
    def sft(self) -> dict[str, Any]:
        """Training arguments: the method's, overridden by the recipe's, overridden by the stage's."""
        method, sft = TRAINING[self.recipe.mode], {**self.recipe.sft, **self.section_sft}
        if "max_length" not in sft and self.context.positions is not None:
            sft["max_length"] = min(method["max_length"], self.context.positions)
        return {**method, **sft}

    @property
    def section_sft(self) -> dict[str, Any]:
        """Training arguments in the stage's section."""
        return getattr(self.section, "sft", {})

    def field(self, name: str) -> str:
        """Return the path in the recipe of a training argument of this stage."""
        return f"{self.name + '.' if name in self.section_sft else ''}sft.{name}"

    def check(self) -> None:
        """Raise if examples may be longer than the base model's position embeddings."""
        length, most = self.sft["max_length"], self.context.positions
        if most is not None and (length is None or (isinstance(length, int) and length > most)):
            raise InputError(f"{self.field('max_length')}={length}: the base takes {most} tokens; use at most {most}")

    def arguments(self, **overrides: Any) -> SFTConfig:
        """Create the training arguments: the recipe's, then the stage's, then the pipeline's."""
        run = self.context.root.resolve().name
        settings = {
            "report_to": "none",
            "run_name": f"{run}-{self.name}",
            **self.sft,
            "output_dir": str(self.state / run),  # the last part of the path becomes the title of the model card
            "save_strategy": "no",
            "seed": self.seed,
            "data_seed": self.seed,
            **overrides,
        }
        try:
            return self.config(**settings)
        except (ValueError, TypeError, ImportError) as error:
            raise InputError(f"{self.name}.sft: {arguments_error(error, '--set sft.bf16=false')}") from error

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            **{f"sft.{name}": value for name, value in self.sft.items() if name not in INCIDENTAL},
            **{
                f"adapter.{name}": value
                for name, value in self.recipe.adapter.items()
                if not self.trains_loras or name in FROM_EXPERTS or name == "lora_dropout"
            },
        }

    def hashes(self) -> dict[str, Any]:
        return {**super().hashes(), "chat_template": hash_template(self.template[1])}

    @property
    def template(self) -> tuple[str, str | None]:
        """Field that sets the chat template, and its value."""
        return self.field("chat_template_path"), self.sft.get("chat_template_path")

    def examples(self) -> Dataset:
        """Return the trainer's examples."""
        return self.context.train_data

    def example_arguments(self, **overrides: Any) -> SFTConfig:
        """Return training arguments with the settings to prepare this stage's examples."""
        return self.arguments(**overrides)


class TrainingStage(TrainerStage):
    """A stage that trains, with a share of the budget."""

    @property
    @abstractmethod
    def epochs(self) -> float:
        """Passes over the training data in this stage."""

    @abstractmethod
    def planned(self, base: PreTrainedModel) -> Any:
        """
        Return the model that the stage will train: a new model, or the base with new parameters. No weights are loaded.

        Args:
            base: the base model, without weights.
        """

    def advice(self, rows: int, processes: int) -> str:
        """Return advice for a plan, besides the stage's numbers."""
        return ""

    def steps(self, rows: int, processes: int) -> int:
        """Return the number of optimizer steps for `rows` training rows."""
        return math.ceil(
            self.epochs * self._steps_in_epoch(rows, processes, bool(self.sft.get("dataloader_drop_last")))
        )

    def _steps_in_epoch(self, rows: int, processes: int, drop_last: bool) -> int:
        batch, accumulated = (
            self.sft.get(name, getattr(SFTConfig, name))
            for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
        )
        with prefixed(f"{self.name}.sft"):
            return steps_in_epoch(rows, batch * processes, accumulated, drop_last)[0]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "epochs": self.epochs}


class Prepare(TrainingStage):
    """Stage 1: fine-tuning. Its checkpoints become experts, or its last checkpoint is the result."""

    name = "prepare"
    trains_loras = True

    @classmethod
    def wanted(cls, recipe: Recipe) -> bool:
        return recipe.prepares

    @property
    def epochs(self) -> float:
        return self.context.budget.prepare

    @property
    def num_experts(self) -> int:
        return self.recipe.given_experts()

    @property
    def result(self) -> Artifacts:
        if not self.recipe.facts.collects:
            return replace(self.given, model=self.folder / self.kind.output)
        experts = self.recipe.assembled_from(expert_folders(self.folder, self._selection()[0]))
        tokenizer = self.folder / _TOKENIZER if self.recipe.facts.averages else None
        return replace(self.given, experts=experts, tokenizer=tokenizer)

    def steps(self, rows: int, processes: int) -> int:
        steps = super().steps(rows, processes)
        chosen_steps(steps, *self._selection())  # raises before the run if there are too few checkpoints
        return steps

    def planned(self, base: PreTrainedModel) -> Any:
        return self.kind.planned_expert(base)

    def run(self, folder: Path) -> dict[str, Any]:
        args = self.arguments(num_train_epochs=self.epochs)  # before the model is loaded, for ZeRO-3 to shard it
        model = self.context.base.load()
        num_experts, num_checkpoints, selection = self._selection()
        prepared = prepare_experts(
            model,
            self.context.train_data,
            args,
            self.kind.lora_config(model),
            self.context.base.tokenizer,
            output_dir=folder,
            num_experts=num_experts,
            num_checkpoints=num_checkpoints,
            selection=selection,
        )
        if not self.recipe.facts.collects:
            on_main_process(lambda: copy_result(prepared.trained.last, folder / self.kind.output))
            on_main_process(lambda: write_card(self, folder / self.kind.output))
        if (tokenizer := self.result.tokenizer) is not None:
            on_main_process(lambda: copy_companions(prepared.trained.last, tokenizer))
        return {"checkpoint_steps": prepared.steps, **metrics(prepared.trained)}

    def _selection(self) -> tuple[int, int | None, str]:
        """Return the number of experts, the number of checkpoints, and the selection."""
        if not self.recipe.facts.collects or self.recipe.facts.copies:
            return 1, 1, "uniform"
        section = self.recipe.prepare
        return self.recipe.given_experts(), section.num_checkpoints, section.selection


class Expand(Stage):
    """Stage 2: merges the experts of stage 1 into further ones."""

    name = "expand"
    seed_offset = 1
    inputs = ("model", "experts")

    @classmethod
    def wanted(cls, recipe: Recipe) -> bool:
        return recipe.expands

    @property
    def result(self) -> Artifacts:
        return replace(self.given, experts=tuple(expert_folders(self.folder, self.recipe.num_experts)))

    def run(self, folder: Path) -> dict[str, Any]:
        descents = on_main_process(lambda: self.kind.merge(self.given.experts, folder, self.seed))
        return {"descents": [asdict(descent) for descent in descents]}


class Mean(Stage):
    """Mean of stage 1's experts, as one LoRA or one dense model: a result, and a baseline for all other methods."""

    name = "mean"
    inputs = ("model", "experts")

    @classmethod
    def wanted(cls, recipe: Recipe) -> bool:
        return recipe.facts.averages

    @property
    def result(self) -> Artifacts:
        return replace(self.given, model=self.folder / self.kind.output)

    def run(self, folder: Path) -> dict[str, Any]:
        on_main_process(lambda: self._write(folder / self.kind.output))
        return {"experts": len(self.given.experts)}

    def _write(self, output: Path) -> None:
        self.kind.mean(self.given.experts, output)
        if self.given.tokenizer is not None:
            copy_companions(self.given.tokenizer, output)
        else:
            self.context.base.tokenizer.save_pretrained(output)
        write_card(self, output)


class RouterInit(TrainingStage):
    """Stage 3: assigns seed examples to experts, and trains each expert and its routing vectors on its examples."""

    name = "router_init"
    trains_loras = True
    seed_offset = 2

    @classmethod
    def wanted(cls, recipe: Recipe) -> bool:
        return recipe.initializes_routers

    @property
    def epochs(self) -> float:
        return self.context.budget.router_init

    @property
    def result(self) -> Artifacts:
        experts = self.given.experts
        if self.recipe.router_init.gates == TRAINED:
            experts = tuple(expert_folders(self.folder, self.recipe.num_experts))
        return replace(self.given, experts=experts, routers=self.folder / ROUTERS)

    def planned(self, base: PreTrainedModel) -> Any:
        model = self.kind.planned_with_vectors(base)
        self.kind.train(model, self.recipe.router_init.train_experts)
        return model

    def check(self) -> None:
        super().check()
        rule, r = self.recipe.router_init.rule, self.recipe
        if rule is not None and rule.needs_labels and not rule.needs_perplexities:
            labels = self.context.train_data[r.data.label_column]
            rule.fill(Seeds(len(labels), r.num_experts, self.seed, labels=labels, expert_map=r.router_init.expert_map))

    def run(self, folder: Path) -> dict[str, Any]:
        section, args = self.recipe.router_init, self.example_arguments()
        routed = init_routers(
            self.kind.load,
            self.given.experts,
            self.seed_data(),
            args,
            self.context.base.tokenizer,
            output_dir=folder,
            buckets=section.buckets,
            gates=section.gates,
            alpha=section.alpha,
            router_learning_rate=section.router_learning_rate,
            train_experts=section.train_experts,
            label_column=self.recipe.data.label_column,
            expert_map=section.expert_map,
        )
        on_main_process(lambda: write_routers(folder / ROUTERS, routed.routers))
        on_main_process(lambda: write_buckets(folder, routed.buckets, routed.perplexity))
        result: dict[str, Any] = {"bucket_sizes": [len(bucket) for bucket in routed.buckets]}
        if routed.trained:  # losses of the last expert, steps of all experts
            result |= {**metrics(routed.trained[-1]), "steps": sum(routed.steps)}
            result |= {"steps_per_expert": routed.steps, "vectors_moved": routed.moved}
        return result

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        del settings["router_init.within_budget"]  # changes only stage 4's share
        return settings

    def seed_data(self) -> Dataset:
        """Return the seed set in random order: a file may be sorted by domain, and buckets are filled in order."""
        data = self.context.train_data
        return drawn(data, self.recipe.seed_count(len(data)), self.seed)

    def examples(self) -> Dataset:
        return self.seed_data()

    def example_arguments(self, **overrides: Any) -> SFTConfig:
        """Return training arguments for passes over the seed set."""
        epochs = self.recipe.router_init.num_train_epochs
        return self.arguments(**{"num_train_epochs": epochs, "packing": False, "padding_free": False, **overrides})

    def steps(self, rows: int, processes: int) -> int:
        """Return the optimizer steps of all experts, each trained on its bucket."""
        return self.recipe.num_experts * self._steps_per_expert(rows, processes)

    def _steps_per_expert(self, rows: int, processes: int) -> int:
        bucket = -(-self.recipe.seed_count(rows) // self.recipe.num_experts)
        return self.recipe.router_init.num_train_epochs * self._steps_in_epoch(bucket, processes, drop_last=False)

    def advice(self, rows: int, processes: int) -> str:
        steps, section = self._steps_per_expert(rows, processes), self.recipe.router_init
        if steps >= _FEW_STEPS:
            return f"{steps} steps per expert"
        passes = math.ceil(_FEW_STEPS * section.num_train_epochs / steps)
        return (
            f"{steps} steps per expert are few: routing vectors and experts hardly learn their buckets; raise "
            f"router_init.seed_fraction={section.seed_fraction:g}, or num_train_epochs={section.num_train_epochs} to "
            f"about {passes}"
        )


class PostTrain(TrainingStage):
    """Stage 4: fine-tunes the assembled MoE."""

    name = "post_train"
    seed_offset = 3
    config = MoESFTConfig

    @classmethod
    def wanted(cls, recipe: Recipe) -> bool:
        return recipe.facts.assembles

    @property
    def epochs(self) -> float:
        return self.context.budget.post_train

    @property
    def result(self) -> Artifacts:
        return replace(self.given, model=self.folder / self.kind.output)

    def arguments(self, **overrides: Any) -> SFTConfig:
        if "expert_map" in self.sft:
            overrides["label_column"] = self.recipe.data.label_column
        if self.sft.get("router_balancing") is None:
            overrides["router_balancing"] = "layer"  # for native MoEs, too
        args, router = super().arguments(**overrides), self.recipe.post_train.router
        if router and args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
            raise InputError(f"post_train.router={router}: ZeRO-3 shards the gates; use FSDP2 or ZeRO-2")
        return args

    def check(self) -> None:
        super().check()
        r = self.recipe
        column, expert_map = r.data.label_column, r.expert_map
        if expert_map is None or column is None:
            return
        # Without a label mask, held-out data may have other domains.
        held_out = self.context.eval_data if r.masks_labels else None
        for name, data in (("data.train", self.context.train_data), ("data.eval", held_out)):
            unknown = unknown_labels(data, column, expert_map) if data is not None else []
            if unknown:
                raise InputError(f"post_train.sft.expert_map: no experts for the labels {unknown} of {name}; add them")

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), **self.kind.settings()}

    def planned(self, base: PreTrainedModel) -> Any:
        model = self.kind.planned(base)
        if not self.recipe.trains_experts:
            train_only(model, router_parameters(model))
        return model

    def run(self, folder: Path) -> dict[str, Any]:
        given, data = self.given, self.context.train_data
        args = self.arguments(num_train_epochs=self.epochs)  # before the model is loaded, for ZeRO-3 to shard it
        model = self.kind.assemble(given.experts, given.routers, data, args, self.seed, self.state)
        size, output = model_size(model), folder / self.kind.output
        trained = post_train(
            model, data, args, self.context.base.tokenizer, output_dir=output, train_experts=self.recipe.trains_experts
        )
        on_main_process(lambda: self.kind.finish(output, model))
        on_main_process(lambda: write_card(self, output))
        return {**metrics(trained), "size": asdict(size)}


def write_card(stage: Stage, folder: Path) -> None:
    """Write the model card of a run's result, made by `stage`."""
    r, records = stage.recipe, stage.context.records
    data = source_name(r.data.train)
    earlier = [
        f"{name} ({count:.0f} steps)" if (count := record["metrics"].get("steps")) else name
        for name, record in records.items()
    ]
    stages = f": {', '.join([*earlier, stage.name])}" if earlier else ""
    made = f"`moe-peft upit`, method `{r.method}`{stages}"
    write_model_card(folder, base=r.model.name_or_path, made=made, datasets=[data] if data else [])


def metrics(trained: Trained) -> dict[str, Any]:
    """Return a training's part of a stage's record."""
    return {**trained.metrics(), "history": trained.history}
