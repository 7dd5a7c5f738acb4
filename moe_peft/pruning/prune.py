"""Pruning: removes experts that the user names from a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..models.model_size import ModelSize, model_size
from ..models.steering import Expert, indices_of
from ..native.folders import MoELoraFolder, NativeFolder, open_folder
from ..utils.io import new_folder, write_json
from ..utils.messages import InputError
from ..utils.model_card import plain, write_model_card
from .routed_folders import Prunable, prunable

REPORT = "pruning.json"
Drop = Mapping[Any, Expert | Sequence[Expert]] | Expert | Sequence[Expert]


@dataclass(frozen=True)
class PrunedLayer:
    """
    Result of pruning one layer.

    Args:
        name: the module with the router.
        num_experts: n, before pruning.
        kept: indices of the kept experts, as before pruning.
        dropped: indices of the dropped experts.
    """

    name: str
    num_experts: int
    kept: list[int]
    dropped: list[int]


@dataclass(frozen=True)
class Pruning:
    """
    Result of pruning a model.

    Args:
        layers: the layers, in the order of the routers in a forward pass.
        size: the model's size, before and after.
    """

    layers: list[PrunedLayer]
    size: dict[str, ModelSize]


def prune_experts(
    model: str | os.PathLike, output_dir: str | os.PathLike, drop: Drop, *, base: str | None = None
) -> Pruning:
    """
    Write a MoE-LoRA adapter or a native MoE without some experts. Kept experts keep their weights and router rows.

    Dropping an expert has the effect of a router logit of minus infinity. With `normalize_top_k`, a layer's output
    stays the same for tokens not routed to the expert. Without it, the gates are probabilities: the gates of the other
    experts grow by the factor 1/(1-p), where p is the dropped expert's probability.

    Args:
        model: folder of an adapter with routers that can lose experts, or of a native MoE of a family supported by
            `export`. All layers of a native MoE keep the same number of experts. Layers of an adapter may keep
            different numbers.
        output_dir: a new or empty folder. A killed run leaves nothing in it.
        drop: experts to drop in every layer, by index or name, or layer (counted from 0, as in `moe-peft inspect`) →
            experts.
        base: base model of an adapter, named in the result's config; None takes the adapter's.

    Returns:
        the changes; they are also written to the folder's `pruning.json`.

    Raises:
        ValueError: the model does not exist or does not fit, a router cannot lose experts, a layer would keep fewer
            than top_k (in an adapter also fewer than two), or no expert would be removed.

    Example:

    ```python
    >>> from moe_peft import prune_experts
    >>> from moe_peft.native import UpcycleConfig, upcycle
    >>> folder = upcycle("Qwen/Qwen3-0.6B", "moe", UpcycleConfig(num_experts=4))
    >>> pruning = prune_experts(folder, "pruned", drop=[3])
    >>> kept = [layer.kept for layer in pruning.layers]
    ```
    """
    with new_folder(output_dir) as partial:
        folder = open_folder(model, "model", MoELoraFolder, NativeFolder, base=base)
        experts = prunable(folder)
        folder.check_tensors()
        folder.companions()  # to raise early; they are copied later
        kept = _kept(experts, drop)
        experts.write(partial, kept)
        written = open_folder(partial, "output_dir", type(folder))
        written.check_tensors()  # raises before an invalid result is published
        layers = [
            PrunedLayer(
                layer.name, layer.num_experts, of_layer, [i for i in range(layer.num_experts) if i not in of_layer]
            )
            for layer, of_layer in zip(experts.layers, kept, strict=True)
        ]
        pruning = Pruning(layers, {"before": model_size(folder.empty), "after": model_size(written.empty)})
        write_json(partial / REPORT, asdict(pruning))
        made = f"`moe-peft prune` of `{plain(Path(model).name)}`; `{REPORT}` says which experts are left"
        write_model_card(partial, base=experts.base or os.fspath(model), made=made)
    return pruning


def _kept(folder: Prunable, drop: Drop) -> list[list[int]]:
    """Return the experts of every layer to keep."""
    kept = []
    for layer, gone in zip(folder.layers, _named(folder, drop), strict=True):
        left = [i for i in range(layer.num_experts) if i not in gone]
        if len(left) < layer.smallest:
            raise InputError(
                f"{layer.name}: drop={gone} leaves {len(left)} of {layer.num_experts} experts; keep at least "
                f"{layer.smallest}"
            )
        kept.append(left)
    if folder.same_size and len(sizes := {len(left) for left in kept}) > 1:
        raise InputError(
            f"drop={drop}: layers would keep {min(sizes)} to {max(sizes)} experts: a native MoE has the same number in "
            "every layer; drop as many in each"
        )
    if all(len(left) == layer.num_experts for layer, left in zip(folder.layers, kept, strict=True)):
        raise InputError(f"drop={drop}: every expert stays; name those to drop")
    return kept


def _named(folder: Prunable, drop: Drop) -> list[list[int]]:
    """Return the experts of every layer to drop."""
    layers = [str(i) for i in range(len(folder.layers))]  # strings, as in JSON
    given = drop if isinstance(drop, Mapping) else dict.fromkeys(layers, drop)
    by_layer = {str(i): sorted({*indices_of(experts, folder.expert_names, "drop")}) for i, experts in given.items()}
    for name, gone in by_layer.items():
        if name not in layers:
            raise InputError(f"drop: layer {name}: the model has layers 0 to {layers[-1]} with routers")
        layer = folder.layers[int(name)]
        if not {*gone} <= {*range(layer.num_experts)}:
            raise InputError(f"drop={gone}: {layer.name} has experts 0 to {layer.num_experts - 1}")
    return [by_layer.get(name, []) for name in layers]
