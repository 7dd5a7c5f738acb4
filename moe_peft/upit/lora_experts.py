"""Experts that are LoRA adapters of one base model. The result is a MoE-LoRA adapter."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors.torch import load_file
from transformers import PreTrainedModel, set_seed
from trl import SFTConfig

from ..adapter.base_model import find_ffns
from ..adapter.config import MoELoraConfig, usual_alpha
from ..adapter.ffn_layout import find_layout
from ..adapter.lora_conversion import determined_fields, lora_to_moe
from ..adapter.plain_lora import lora_scalings
from ..models.gate_init import init_gates
from ..models.layer import router_parameters
from ..native.folders import LoraFolder, base_named, open_folder
from ..training.scoring import to_device
from ..utils.messages import InputError
from .expand import expand_experts
from .expansion import Descent
from .experts import Batches, ExpertKind, Load
from .files import copy_adapter, write_adapter
from .recipe import FROM_EXPERTS
from .routing_vectors import VECTORS, put_vectors

logger = logging.getLogger("moe_peft")


class _LoraConfig(LoraConfig):
    """A `LoraConfig` saved as the same bytes in every process. PEFT writes sets in the order of their hashes."""

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        return {name: sorted(value) if isinstance(value, set) else value for name, value in fields.items()}


class LoraStageKind(ExpertKind):
    """Experts that are LoRA adapters of one base model."""

    output = "adapter"
    part = "lora_"
    copy = staticmethod(copy_adapter)

    # --- folders ----------------------------------------------------------------------------------------------------

    @staticmethod
    def scored(load: Load, folders: Sequence[Path]) -> Iterator[PeftModel]:
        """Yield the experts' models, all on a single base model."""
        model = PeftModel.from_pretrained(load(folders[0]), folders[0], adapter_name="0")
        for i, folder in enumerate(folders):
            if i:
                model.load_adapter(folder, str(i))
                model.set_adapter(str(i))
            yield model

    def merge(self, experts: Sequence[Path], folder: Path, seed: int) -> list[Descent]:
        section = self.recipe.expand
        return expand_experts(
            experts,
            output_dir=folder,
            num_experts=self.recipe.num_experts,
            method=section.method,
            similarity=section.similarity,
            drop_rate=0.2 if section.drop_rate is None else section.drop_rate,
            seed=seed,
        )[1]

    def mean(self, experts: Sequence[Path], folder: Path) -> None:
        """
        Write one LoRA with exactly the mean of the experts' updates: their A's and B's concatenated, with the sum of
        their ranks. Averaging A's and B's separately would give a different update.
        """
        adapters = [open_folder(expert, "experts", LoraFolder) for expert in experts]
        states = [_scaled(adapter) for adapter in adapters]
        weights, ranks = {}, {}
        for name in sorted({name for state in states for name in state if ".lora_A." in name}):
            name_B = name.replace(".lora_A.", ".lora_B.")
            having = [state for state in states if name in state]  # given LoRAs may adapt different modules
            weights[name] = torch.cat([state[name] for state in having])
            weights[name_B] = torch.cat([state[name_B] for state in having], dim=1) / len(states)
            ranks[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")] = len(weights[name])
        configs = [adapter.config for adapter in adapters]
        targets = [config.target_modules for config in configs]
        rank = max(ranks.values())
        pattern = {name: own for name, own in ranks.items() if own != rank}
        write_adapter(weights, experts[0], folder)
        config = _LoraConfig(
            r=rank,
            lora_alpha=rank,  # the experts' scalings are in their B's
            rank_pattern=pattern,
            alpha_pattern=pattern,
            target_modules=targets[0] if all(own == targets[0] for own in targets) else sorted(ranks),
            task_type="CAUSAL_LM",
            base_model_name_or_path=configs[0].base_model_name_or_path,
            revision=configs[0].revision,
            inference_mode=True,
        )
        config.save_pretrained(folder)

    # --- stage 1 ----------------------------------------------------------------------------------------------------

    def lora_config(self, model: PreTrainedModel) -> LoraConfig:
        """Return the config of a LoRA like one expert of the MoE adapter."""
        moe = self.recipe.moe_config()
        return _LoraConfig(
            r=moe.r,
            lora_alpha=moe.lora_alpha or usual_alpha(moe.r, use_rslora=moe.use_rslora),
            lora_dropout=moe.lora_dropout,
            use_rslora=moe.use_rslora,
            init_lora_weights=moe.init_lora_weights,
            target_modules=ffn_projections(model, moe.target_projections),
            task_type="CAUSAL_LM",
            revision=self.recipe.model.revision,
        )

    def planned_expert(self, base: PreTrainedModel) -> PeftModel:
        with base.device:
            return get_peft_model(base, self.lora_config(base))

    # --- stage 3 ----------------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> PreTrainedModel:
        return self.base.load()

    @staticmethod
    def routed_modules(model: PreTrainedModel, folders: Sequence[Path]) -> list[str]:
        """Return the names of the modules adapted by the LoRAs."""
        adapted = set(determined_fields(model, sorted(set(folders)))["target_modules"])
        return [name for name, _ in model.named_modules() if name in adapted]

    @staticmethod
    def add_vectors(model: PreTrainedModel, folder: Path, names: Sequence[str], seed: int) -> PeftModel:
        """Load a LoRA with new routing vectors. The vectors are saved and resumed with the LoRA."""
        vectors = put_vectors(model, names, seed)
        config = PeftConfig.from_pretrained(folder)
        config.inference_mode, config.modules_to_save = False, [VECTORS]
        weights = load_peft_weights(str(folder), device="cpu")
        weights |= {_saved_name(i): vector.data for i, vector in enumerate(vectors.vectors)}
        adapted = get_peft_model(model, config)
        set_peft_model_state_dict(adapted, weights)
        return adapted

    @staticmethod
    def vectors(checkpoint: Path, count: int) -> list[torch.Tensor]:
        weights = load_peft_weights(str(checkpoint), device="cpu")
        return [weights[_saved_name(i)].float() for i in range(count)]

    @staticmethod
    def without_vectors(checkpoint: Path, source: Path, target: Path) -> None:
        weights = load_peft_weights(str(checkpoint), device="cpu")
        write_adapter({name: weight for name, weight in weights.items() if VECTORS not in name}, source, target)

    @staticmethod
    def gates(load: Load, folders: Sequence[Path], way: str, texts: Batches) -> list[torch.Tensor]:
        """Compute gates by running the texts through the base model."""
        base = load(folders[0])
        to_device(base)
        moe = lora_to_moe(base, folders, task_type="CAUSAL_LM")
        init_gates(moe, way, texts)
        return [weight.detach().float().cpu() for weight in router_parameters(moe).values()]

    def planned_with_vectors(self, base: PreTrainedModel) -> PeftModel:
        config = self._moe_config(base)
        lora = LoraConfig(
            r=config.r, target_modules=ffn_projections(base, config.target_projections), modules_to_save=[VECTORS],
            task_type="CAUSAL_LM",
        )  # fmt: skip
        put_vectors(base, routed_ffns(base), seed=0)
        with base.device:
            return get_peft_model(base, lora)

    # --- stage 4 and later ------------------------------------------------------------------------------------------

    def check_base(self) -> None:
        self.planned(self.base.empty())  # raises for an adapter that does not fit the base
        own = base_named(self.base.name_or_path, self.base.revision)
        for path in self.recipe.prepare.folders or () if self.recipe.facts.prepares else ():
            config = open_folder(path, "prepare.adapters", LoraFolder).config
            theirs = base_named(config.base_model_name_or_path or self.base.name_or_path, config.revision)
            if theirs != own:
                logger.warning("prepare.adapters=%r: was trained on %s, the recipe's model is %s", path, theirs, own)

    def assemble(
        self, experts: Sequence[Path], routers: Path | None, data: Dataset, args: SFTConfig, seed: int, state: Path
    ) -> PeftModel:
        """Load the base with all experts in one MoE adapter; with new experts if stage 1 trains none."""
        r, model = self.recipe, self.base.load()
        set_seed(seed)
        if not r.facts.prepares:
            return get_peft_model(model, r.moe_config(), revision=r.model.revision)
        settings = {key: value for key, value in r.adapter.items() if key not in FROM_EXPERTS}
        moe = lora_to_moe(model, experts, task_type="CAUSAL_LM", revision=r.model.revision, **settings)
        if routers is not None:
            weights = load_file(routers)
            set_routers(moe, [weights[str(i)] for i in range(len(weights))])
        return moe

    def planned(self, base: PreTrainedModel) -> PeftModel:
        with base.device:
            return get_peft_model(base, self._moe_config(base))

    def load_result(self, folder: Path, seed: int) -> tuple[PeftModel, None]:
        return PeftModel.from_pretrained(self.base.load(), folder), None

    def _moe_config(self, model: PreTrainedModel) -> MoELoraConfig:
        """Return the MoE adapter's config, as far as the recipe and its given experts determine it."""
        recipe = self.recipe
        if not (recipe.prepare.folders and recipe.facts.prepares):
            return recipe.moe_config()
        folders = sorted(set(recipe.assembled_from([Path(folder) for folder in recipe.prepare.folders])))
        determined = determined_fields(model, folders)
        configs = [open_folder(folder, "prepare.adapters", LoraFolder).config for folder in folders]
        values = {name: [getattr(config, name) for config in configs] for name in ("r", "lora_alpha", "use_rslora")}
        values["target_projections"] = [determined["target_projections"]]
        for name, allowed in values.items():
            asked = recipe.adapter.get(name)
            if asked is not None and (sorted(asked) if name == "target_projections" else asked) not in allowed:
                raise InputError(
                    f"adapter.{name}={asked!r}: the adapters of prepare.adapters have {allowed[0]!r}; leave it out"
                )
        return replace(recipe.moe_config(), use_rslora=False, **determined)


def _saved_name(index: int) -> str:
    """Return the name of a routing vector in an adapter's file."""
    return f"base_model.model.{VECTORS}.vectors.{index}"


def _scaled(adapter: LoraFolder) -> dict[str, torch.Tensor]:
    """Return a LoRA's tensors, with its scalings multiplied into B."""
    state = dict(adapter.tensors)
    for name, scaling in lora_scalings(adapter.config, sorted(state)).items():
        name_B = name.replace(".lora_A.", ".lora_B.")
        state[name_B] = state[name_B] * scaling
    return state


def routed_ffns(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules with experts and a router: FFNs, or the linears of an FFN without a module."""
    ffns = find_ffns(model)
    return [name for name, _ in model.named_modules() if name in ffns or name.rsplit(".", 1)[-1] in ffns]


def ffn_projections(model: torch.nn.Module, chosen: list[str] | set[str] | None) -> list[str]:
    """
    Return the FFN projections adapted by LoRA experts, as names for `LoraConfig.target_modules`. Names are full if
    short names would match other modules, too.
    """
    names: list[str] = []
    for name in routed_ffns(model):
        layout = find_layout(model.get_submodule(name))
        of_ffn = [f"{name}.{p}" for p in layout.projections] if layout is not None else [name]  # OPT: plain linears
        names += [full for full in of_ffn if chosen is None or full.rsplit(".", 1)[-1] in chosen]
    if not names:
        raise InputError(f"adapter.target_projections={chosen}: no FFN of {type(model).__name__} has these")
    short = {name.rsplit(".", 1)[-1] for name in names}
    matched = [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in short]
    return sorted(short) if sorted(matched) == sorted(names) else names


@torch.no_grad()
def set_routers(moe: PeftModel, routers: Sequence[torch.Tensor]) -> None:
    """Set the weights [n, d] of a MoE adapter's linear routers, in the model's order."""
    for parameter, weight in zip(router_parameters(moe).values(), routers, strict=True):
        parameter.copy_(weight)
