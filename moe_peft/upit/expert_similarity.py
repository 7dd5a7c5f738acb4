"""How alike the experts are that a stage leaves: similarities as expansion sees them, read from the stage's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft.utils import load_peft_weights
from transformers import AutoConfig

from ..adapter.config import MoELoraConfig
from ..adapter.lora_conversion import lora_scalings
from ..native.expert_init import FFN
from ..native.families import FAMILIES, DenseFamily, find_families
from ..native.safetensors_io import Checkpoint
from ..utils.expert_merging import likeness, similarities, update_gram, value_gram
from ..utils.loading import read_adapter_config
from .files import ADAPTER_FILES

_CALLER = "upit"


def summarised(gram_NN: torch.Tensor | None) -> dict[str, Any]:
    """For a stage's record: the cosines, and the mean, smallest and largest of two different experts."""
    cosines_NN = None if gram_NN is None else similarities(gram_NN)
    found = likeness(cosines_NN)
    if cosines_NN is None or found is None:
        return {}
    return {"similarity": {**found._asdict(), "matrix": cosines_NN.tolist()}}


def of_loras(folder: Path) -> dict[str, Any]:
    """Cosines of the updates s B A of a stage's LoRA adapters, or of the experts of its MoE adapter."""
    experts = _experts(folder)
    if experts:
        states = [load_peft_weights(str(expert), device="cpu") for expert in experts]
        scalings = lora_scalings(read_adapter_config(experts[0], _CALLER), sorted(states[0]))
        grams = [
            s**2
            * update_gram(
                torch.stack([state[name] for state in states]),
                torch.stack([state[name.replace(".lora_A.", ".lora_B.")].T for state in states]),
            )
            for name, s in scalings.items()
        ]
        return summarised(sum(grams))  # type: ignore[arg-type]
    if not (folder / "adapter" / ADAPTER_FILES[0]).exists():
        return {}
    state = load_peft_weights(str(folder / "adapter"), device="cpu")
    kind = cast(MoELoraConfig, read_adapter_config(folder / "adapter", _CALLER)).expert_spec("")
    names = [name for name in sorted(state) if ".moe_lora_A" in name]
    grams = [kind.gram(state[name], state[name.replace(".moe_lora_A", ".moe_lora_B")]) for name in names]
    return summarised(sum(grams) if grams and len({len(gram) for gram in grams}) == 1 else None)  # type: ignore[arg-type]


def of_ffns(folder: Path, base: Path) -> dict[str, Any]:
    """Cosines of the displacements from the base's FFNs, of a stage's dense models or of the experts of its MoE."""
    config = AutoConfig.from_pretrained(base)
    dense = find_families(config.model_type)[0]
    experts, moe = _experts(folder), folder / "model"
    if experts:
        return summarised(_gram(base, dense, range(config.num_hidden_layers), _of_models(experts, dense)))
    found = AutoConfig.from_pretrained(moe) if moe.is_dir() else None
    if found is None or found.model_type not in FAMILIES:
        return {}
    family, checkpoint = FAMILIES[found.model_type], Checkpoint(moe)
    layers = [layer for layer in range(found.num_hidden_layers) if family.has_experts(found, layer)]
    count = range(getattr(found, family.count))
    return summarised(
        _gram(base, dense, layers, lambda layer: (family.read_expert(layer, i, checkpoint.tensor) for i in count))
    )


def _experts(folder: Path) -> list[Path]:
    return sorted(folder.glob("experts/*"), key=lambda path: int(path.name))


def _of_models(folders: Sequence[Path], dense: DenseFamily) -> Callable[[int], Iterator[FFN]]:
    checkpoints = [Checkpoint(folder) for folder in folders]
    return lambda layer: (dense.ffn(layer).split(checkpoint.tensor) for checkpoint in checkpoints)


def _gram(
    base: Path, dense: DenseFamily, layers: Sequence[int], experts: Callable[[int], Iterator[FFN]]
) -> torch.Tensor | None:
    """Inner products of the experts' displacements over all layers; None if they are narrower than the base's FFN."""
    origin, total = Checkpoint(base), None
    for layer in layers:
        before, found = dense.ffn(layer).split(origin.tensor), list(experts(layer))
        for name in FFN._fields:
            start = getattr(before, name).float()
            own = [getattr(ffn, name).float() for ffn in found]
            if any(weight.shape != start.shape for weight in own):
                return None
            gram = value_gram(torch.stack([(weight - start).flatten() for weight in own]))
            total = gram if total is None else total + gram
    return total
