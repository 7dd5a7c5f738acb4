"""The stages of the mode `lora`, whose experts are LoRA matrices: the result is a MoE-LoRA adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedModel, set_seed

from ..adapter.config import MoELoraConfig
from ..adapter.ffn_layout import find_layout
from ..adapter.lora_conversion import determined_fields, lora_to_moe
from ..adapter.model import find_ffns
from ..models.introspection import router_parameters
from ..training.trainable import train_only
from ..utils.expert_merging import Descent
from ..utils.loading import read_adapter_config
from ..utils.messages import InputError
from .evaluate import Evaluate
from .expand import expand_experts
from .expert_similarity import of_loras
from .recipe import FROM_EXPERTS, Recipe
from .router_init import VECTORS, add_routing_vectors, train_expert
from .stage_cache import Artefacts, Stage
from .stages import Expand, PostTrain, Prepare, RouterInit, moe_experts

_ADAPTER = "adapter"


class _LoraConfig(LoraConfig):
    """A `LoraConfig` that every process saves as the same bytes: PEFT writes sets in an order that hashing decides."""

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        return {name: sorted(value) if isinstance(value, set) else value for name, value in fields.items()}


class _OfLoras(Stage):
    """A stage whose experts are LoRA adapters, or those of a MoE adapter."""

    def similarity(self, folder: Path) -> dict[str, Any]:
        return of_loras(folder)


class LoraPrepare(_OfLoras, Prepare):
    output = _ADAPTER

    @property
    def result(self) -> Artefacts:
        return replace(super().result, initial=self.folder / "initial")

    def lora_config(self, model: PreTrainedModel) -> LoraConfig:
        """What one expert of the MoE adapter is."""
        moe = self.recipe.moe_config()
        return _LoraConfig(
            r=moe.r,
            lora_alpha=moe.lora_alpha,
            lora_dropout=moe.lora_dropout,
            use_rslora=moe.use_rslora,
            init_lora_weights=moe.init_lora_weights,
            target_modules=ffn_projections(model, moe.target_projections),
            task_type="CAUSAL_LM",
            revision=self.recipe.model.revision,
        )

    def planned(self, base: PreTrainedModel) -> PeftModel:
        with base.device:
            return get_peft_model(base, self.lora_config(base))


class LoraExpand(_OfLoras, Expand):
    def expand(self, folder: Path) -> list[Descent]:
        section = self.recipe.expand
        return expand_experts(
            self.given.experts,
            output_dir=folder,
            num_experts=self.recipe.num_experts,
            method=section.method,
            similarity=section.similarity or "update",
            drop_rate=0.2 if section.drop_rate is None else section.drop_rate,
            seed=self.seed,
            initial=self.given.initial,
        )[1]


class LoraRouterInit(_OfLoras, RouterInit):
    def load(self, folder: Path) -> PreTrainedModel:
        return self.context.base.load()

    def planned(self, base: PreTrainedModel) -> PeftModel:
        """One LoRA expert, with a routing vector for each FFN."""
        config = planned_config(self.recipe, base)
        names = routed_ffns(base)
        lora = LoraConfig(
            r=config.r, target_modules=ffn_projections(base, config.target_projections), modules_to_save=[VECTORS],
            task_type="CAUSAL_LM",
        )  # fmt: skip
        add_routing_vectors(base, names, self.seed)
        with base.device:
            model = get_peft_model(base, lora)
        train_expert(model, self.recipe.router_init.train_experts)
        return model


class LoraPostTrain(_OfLoras, PostTrain):
    output = _ADAPTER

    def check_base(self) -> None:
        self.planned(self.context.base.empty())  # raises for an adapter that the base cannot have

    def assemble(self) -> PeftModel:
        """The base with all experts in one MoE adapter; with new experts if stage 1 trains none."""
        r, model = self.recipe, self.context.base.load()
        set_seed(self.seed)
        if not r.facts.prepares:
            return get_peft_model(model, r.moe_config(), revision=r.model.revision)
        settings = {key: value for key, value in r.adapter.items() if key not in FROM_EXPERTS}
        moe = lora_to_moe(model, self.given.experts, task_type="CAUSAL_LM", revision=r.model.revision, **settings)
        if self.given.routers is not None:
            weights = load_file(self.given.routers)
            set_routers(moe, [weights[str(i)] for i in range(len(weights))])
        return moe

    def planned(self, base: PreTrainedModel) -> PeftModel:
        with base.device:
            model = get_peft_model(base, planned_config(self.recipe, base))
        if not self.recipe.trains_experts:
            train_only(model, router_parameters(model))
        return model


class LoraEvaluate(Evaluate):
    def load(self, folder: Path) -> tuple[PeftModel, None]:
        return PeftModel.from_pretrained(self.context.base.load(), folder), None


LORA_STAGES: tuple[type[Stage], ...] = (LoraPrepare, LoraExpand, LoraRouterInit, LoraPostTrain, LoraEvaluate)


def routed_ffns(model: torch.nn.Module) -> list[str]:
    """The modules that get experts and a router: the FFNs, or their linears where these have no module of their own."""
    ffns = find_ffns(model)
    return [name for name, _ in model.named_modules() if name in ffns or name.rsplit(".", 1)[-1] in ffns]


def ffn_projections(model: torch.nn.Module, chosen: list[str] | set[str] | None) -> list[str]:
    """
    The FFN projections that LoRA experts adapt, as names for `LoraConfig.target_modules`: full names where short ones
    would match other modules too.

    Raises:
        ValueError: no FFN has the chosen projections.
    """
    names: list[str] = []
    for name in routed_ffns(model):
        layout = find_layout(model.get_submodule(name))
        of_ffn = [f"{name}.{p}" for p in layout.projections] if layout is not None else [name]  # OPT has linears only
        names += [full for full in of_ffn if chosen is None or full.rsplit(".", 1)[-1] in chosen]
    if not names:
        raise InputError(f"adapter.target_projections={chosen}: no FFN of {type(model).__name__} has these")
    short = {name.rsplit(".", 1)[-1] for name in names}
    matched = [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in short]
    return sorted(short) if sorted(matched) == sorted(names) else names


@torch.no_grad()
def set_routers(moe: PeftModel, routers: Sequence[torch.Tensor]) -> None:
    """Give the linear routers of a MoE adapter these weights [n, d], in the model's order."""
    for parameter, weight in zip(router_parameters(moe).values(), routers, strict=True):
        parameter.copy_(weight)


def _config_of_experts(recipe: Recipe, model: PreTrainedModel) -> MoELoraConfig:
    """
    The MoE adapter's configuration where its experts are given, which determine some of it.

    Raises:
        ValueError: the recipe says otherwise, or the base cannot have them.
    """
    folders = sorted(set(moe_experts(recipe, [Path(folder) for folder in recipe.prepare.folders or []])))
    determined = determined_fields(model, folders)
    configs = [read_adapter_config(folder, f"prepare.adapters: {folder}") for folder in folders]
    values = {name: [getattr(config, name) for config in configs] for name in ("r", "lora_alpha", "use_rslora")}
    values["target_projections"] = [determined["target_projections"]]
    for name, allowed in values.items():
        asked = recipe.adapter.get(name)
        if asked is not None and (sorted(asked) if name == "target_projections" else asked) not in allowed:
            raise InputError(f"adapter.{name}={asked!r}: those of prepare.adapters have {allowed[0]!r}; leave it out")
    return replace(recipe.moe_config(), use_rslora=False, **determined)


def planned_config(recipe: Recipe, model: PreTrainedModel) -> MoELoraConfig:
    """The MoE adapter's configuration, as far as the recipe and the experts that it names determine it."""
    has_experts = recipe.prepare.folders and recipe.facts.prepares
    return _config_of_experts(recipe, model) if has_experts else recipe.moe_config()
