"""How similar the experts are that a stage leaves: similarities as expansion sees them, read from the stage's files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig
from peft.utils import load_peft_weights
from transformers import AutoConfig

from ..adapter.config import MoELoraConfig
from ..adapter.lora_conversion import lora_scalings
from ..native.expert_init import FFN
from ..native.families import FAMILIES, DenseFamily, find_families
from ..native.safetensors_io import Checkpoint
from ..utils.expert_merging import likeness, similarities, update_inner, value_gram
from .files import ADAPTER_FILES


def _summary(gram_NN: torch.Tensor | None) -> dict[str, Any]:
    """For a stage's record: the cosines, and the mean, smallest and largest of two different experts."""
    cosines_NN = None if gram_NN is None else similarities(gram_NN)
    summary = likeness(cosines_NN)
    if cosines_NN is None or summary is None:
        return {}
    return {"similarity": {**summary._asdict(), "matrix": cosines_NN.tolist()}}


def of_loras(folder: Path) -> dict[str, Any]:
    """Cosines of the updates s B A of a stage's LoRA adapters, or of the experts of its MoE adapter."""
    experts = _experts(folder)
    if experts:
        updates = [_scaled(expert) for expert in experts]
        # Given LoRAs may differ in rank and modules.
        gram = [[update_inner({name: a[name] for name in a if name in b}, b) for b in updates] for a in updates]
        return _summary(torch.tensor(gram, dtype=torch.float64))
    if not (folder / "adapter" / ADAPTER_FILES[0]).exists():
        return {}
    state = load_peft_weights(str(folder / "adapter"), device="cpu")
    kind = cast(MoELoraConfig, PeftConfig.from_pretrained(folder / "adapter")).expert_spec("")
    names = [name for name in sorted(state) if ".moe_lora_A" in name]
    grams = [kind.gram(state[name], state[name.replace(".moe_lora_A", ".moe_lora_B")]) for name in names]
    return _summary(sum(grams) if grams and len({len(gram) for gram in grams}) == 1 else None)  # type: ignore[arg-type]


def _scaled(adapter: Path) -> dict[str, torch.Tensor]:
    """A LoRA's tensors, with its scalings in B."""
    state = load_peft_weights(str(adapter), device="cpu")
    for name, scaling in lora_scalings(PeftConfig.from_pretrained(adapter), sorted(state)).items():
        state[name.replace(".lora_A.", ".lora_B.")] *= scaling
    return state


def of_ffns(folder: Path, base: Path) -> dict[str, Any]:
    """Cosines of the displacements from the base's FFNs, of a stage's dense models or of the experts of its MoE."""
    config = AutoConfig.from_pretrained(base)
    dense = find_families(config.model_type)[0]
    experts, moe = _experts(folder), folder / "model"
    if experts:
        models = [Checkpoint(expert) for expert in experts]
        return _summary(
            _gram(
                base,
                dense,
                range(config.num_hidden_layers),
                lambda layer: (dense.ffn(layer).split(model.tensor) for model in models),
            )
        )
    moe_config = AutoConfig.from_pretrained(moe) if moe.is_dir() else None
    if moe_config is None or moe_config.model_type not in FAMILIES:
        return {}
    family, checkpoint = FAMILIES[moe_config.model_type], Checkpoint(moe)
    layers = [layer for layer in range(moe_config.num_hidden_layers) if family.has_experts(moe_config, layer)]
    count = range(getattr(moe_config, family.count))
    return _summary(
        _gram(base, dense, layers, lambda layer: (family.read_expert(layer, i, checkpoint.tensor) for i in count))
    )


def _experts(folder: Path) -> list[Path]:
    return sorted(folder.glob("experts/*"), key=lambda path: int(path.name))


def _gram(
    base: Path, dense: DenseFamily, layers: Sequence[int], experts: Callable[[int], Iterable[FFN]]
) -> torch.Tensor | None:
    """Inner products of the experts' displacements over all layers; None if they are narrower than the base's FFN."""
    origin, total = Checkpoint(base), None
    for layer in layers:
        before, ffns = dense.ffn(layer).split(origin.tensor), list(experts(layer))
        for name in FFN._fields:
            start = getattr(before, name).float()
            weights = [getattr(ffn, name).float() for ffn in ffns]
            if any(weight.shape != start.shape for weight in weights):
                return None
            gram = value_gram(torch.stack([(weight - start).flatten() for weight in weights]))
            total = gram if total is None else total + gram
    return total
