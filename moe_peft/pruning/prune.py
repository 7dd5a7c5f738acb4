"""Pruning: removes experts from a model that are nearly idle, or that the user names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..analysis.inputs import load_rows
from ..models.model_size import ModelSize, model_size
from ..models.steering import Expert, indices_of
from ..native.folders import MoELoraFolder, NativeFolder, open_folder
from ..utils.io import new_folder, write_json
from ..utils.messages import InputError
from ..utils.model_card import plain, write_model_card
from ..utils.torch_contexts import free_memory
from .measure import Choices, losses_of
from .routed_folders import Prunable, RoutedPart, prunable

REPORT = "pruning.json"
MIN_LOAD = 0.01


@dataclass(frozen=True)
class PrunedLayer:
    """
    Result of pruning one layer.

    Args:
        name: the module with the router.
        num_experts: n, before pruning.
        kept: indices of the kept experts, as before pruning.
        dropped: indices of the dropped experts.
        load: each expert's share of the layer's assignments before pruning; None without data.

    Example:

    ```python
    >>> from moe_peft.pruning import PrunedLayer
    >>> layer = PrunedLayer(
    ...     "model.layers.0.mlp",
    ...     num_experts=4,
    ...     kept=[0, 1, 2],
    ...     dropped=[3],
    ...     load=None,
    ... )
    ```
    """

    name: str
    num_experts: int
    kept: list[int]
    dropped: list[int]
    load: list[float] | None


@dataclass(frozen=True)
class Pruning:
    """
    Result of pruning a model.

    Args:
        layers: the layers, in the order of the routers in a forward pass.
        size: the model's size, before and after.
        loss: loss before and after, by domain and as `"mean"` over all tokens; None without data. A domain called
            `"mean"` becomes `"mean (domain)"`.
        lost: share of tokens served by a dropped expert, by layer and in any layer; None without data.

    Example:

    ```python
    >>> from moe_peft import prune_experts
    >>> from moe_peft.native import UpcycleConfig, upcycle
    >>> pruning = prune_experts(
    ...     upcycle("Qwen/Qwen3-0.6B", "moe", UpcycleConfig(num_experts=4)),
    ...     "pruned",
    ...     drop=[3],
    ... )
    >>> parameters = [pruning.size[when].total for when in ("before", "after")]
    ```
    """

    layers: list[PrunedLayer]
    size: dict[str, ModelSize]
    loss: dict[str, dict[str, float]] | None
    lost: dict[str, Any] | None


def prune_experts(
    model: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    base: str | None = None,
    data: str | None = None,
    label_column: str | None = None,
    split: str = "train",
    min_load: float | None = None,
    experts_per_layer: int | None = None,
    drop: Mapping[Any, Expert | Sequence[Expert]] | Expert | Sequence[Expert] | None = None,
    dtype: str = "auto",
    batch_size: int = 8,
    max_length: int = 1024,
    max_examples: int | None = None,
) -> Pruning:
    """
    Write a MoE-LoRA adapter or a native MoE with fewer experts. Kept experts keep their weights and router rows.

    Dropping an expert has the effect of a router logit of minus infinity. With `normalize_top_k`, a layer's output
    stays the same for tokens not routed to the expert. Without it, the gates are probabilities: the gates of the other
    experts grow by the factor 1/(1-p), where p is the dropped expert's probability. `loss` in the result is the cost.

    Args:
        model: folder of an adapter with routers that can lose experts, or of a native MoE of a family supported by
            `export`. All layers of a native MoE keep the same number of experts. Layers of an adapter may keep
            different numbers.
        output_dir: a new or empty folder. A killed run leaves nothing in it.
        base: base model of an adapter, named in the result's config; None takes the adapter's.
        data: a file or a dataset's name, in a format that TRL accepts; used for loads, and for the loss before and
            after.
        label_column: column with the domains, for losses by domain.
        split: the split of the data.
        min_load: with data, drop experts with a smaller share of their layer's assignments; None: 0.01.
        experts_per_layer: number of experts to keep in every layer. The least used experts are dropped.
        drop: experts to drop in every layer, by index or name, or layer (counted from 0, as in `moe-peft inspect`) →
            experts.
        dtype, batch_size, max_length, max_examples: settings of the passes over the data, as in `moe-peft inspect`.

    Returns:
        the changes; they are also written to the folder's `pruning.json`.

    Raises:
        ValueError: model or data do not exist or do not fit, a router cannot lose experts, a layer would keep fewer
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
    if data is None and not (min_load is None and label_column is None):
        raise InputError("min_load and label_column go with data; give data, or leave them out")
    if data is None and drop is None:
        raise InputError("data=None: nothing says which experts to remove; give data, or drop")
    lowest = 0.0 if data is None else MIN_LOAD if min_load is None else min_load
    with new_folder(output_dir) as partial:
        folder = open_folder(model, "model", MoELoraFolder, NativeFolder, base=base)
        experts = prunable(folder)
        folder.check_tensors()
        folder.companions()  # to raise early; they are copied later
        choices, loss, rows = Choices([layer.num_experts for layer in experts.layers]), {}, None
        if data is not None:
            rows = load_rows(
                folder.tokenizer, data, label_column, split,
                batch_size=batch_size, max_length=max_length, max_examples=max_examples,
            )  # fmt: skip
            loss["before"] = losses_of(folder.load(dtype), rows, choices)
            free_memory()
        loads = [None] * len(experts.layers) if rows is None else choices.loads()
        kept = _choose(experts, loads, _named(experts, drop), lowest, experts_per_layer)
        experts.write(partial, kept)
        written = open_folder(partial, "output_dir", type(folder))
        written.check_tensors()  # raises before an invalid result is published
        if rows is not None:
            loss["after"] = losses_of(written.load(dtype), rows)
        layers = [
            PrunedLayer(
                layer.name, layer.num_experts, of_layer, [i for i in range(layer.num_experts) if i not in of_layer],
                None if load is None else load.tolist(),
            )
            for layer, of_layer, load in zip(experts.layers, kept, loads, strict=True)
        ]  # fmt: skip
        pruning = Pruning(
            layers,
            {"before": model_size(folder.empty), "after": model_size(written.empty)},
            loss or None,
            None if rows is None else choices.share_with([layer.dropped for layer in layers]),
        )
        write_json(partial / REPORT, asdict(pruning))
        made = f"`moe-peft prune` of `{plain(Path(model).name)}`; `{REPORT}` says which experts are left"
        write_model_card(partial, base=experts.base or os.fspath(model), made=made)
    return pruning


def _named(
    folder: Prunable, drop: Mapping[Any, Expert | Sequence[Expert]] | Expert | Sequence[Expert] | None
) -> list[list[int]]:
    """Return the experts of every layer to drop in any case, from `drop`."""
    layers = [str(i) for i in range(len(folder.layers))]  # strings, as in JSON
    given = drop if isinstance(drop, Mapping) else dict.fromkeys(layers, [] if drop is None else drop)
    by_layer = {str(i): sorted({*indices_of(experts, folder.expert_names, "drop")}) for i, experts in given.items()}
    for name, gone in by_layer.items():
        if name not in layers:
            raise InputError(f"drop: layer {name}: the model has layers 0 to {layers[-1]} with routers")
        layer = folder.layers[int(name)]
        if not {*gone} <= {*range(layer.num_experts)}:
            raise InputError(f"drop={gone}: {layer.name} has experts 0 to {layer.num_experts - 1}")
    return [by_layer.get(name, []) for name in layers]


def _choose(
    folder: Prunable,
    loads: Sequence[torch.Tensor | None],
    named: Sequence[list[int]],
    min_load: float,
    experts_per_layer: int | None,
) -> list[list[int]]:
    """Return the experts of every layer to keep."""
    parts = [*zip(folder.layers, loads, named, strict=True)]
    for layer, _, gone in parts:
        count, left = experts_per_layer, layer.num_experts - len(gone)
        if count is not None and not layer.smallest <= count <= layer.num_experts:
            raise InputError(
                f"experts_per_layer={count}: {layer.name} has {layer.num_experts} experts and must keep "
                f"{layer.smallest}; use a number from {layer.smallest} to {layer.num_experts}"
            )
        if left < (wanted := max(layer.smallest, count or 0)):
            raise InputError(
                f"{layer.name}: drop={gone} leaves {left} of {layer.num_experts} experts; keep at least {wanted}"
            )
    kept = [kept_experts(*part, min_load, experts_per_layer) for part in parts]
    if folder.same_size:  # a native MoE has the same number in every layer
        most = max(map(len, kept))
        kept = [kept_experts(*part, min_load, experts_per_layer, most) for part in parts]
        for layer, of_layer in zip(folder.layers, kept, strict=True):
            if len(of_layer) != most:
                raise InputError(
                    f"{layer.name} keeps {len(of_layer)} experts, another layer {most}: a native MoE has the same "
                    f"number in every layer; drop fewer here or more there, or give experts_per_layer={len(of_layer)}"
                )
    if all(len(of_layer) == layer.num_experts for layer, of_layer in zip(folder.layers, kept, strict=True)):
        smallest = [float(load.min()) for load in loads if load is not None]
        said = f"; the smallest load is {min(smallest):.1%}" if smallest else ""
        raise InputError(f"every expert stays{said}; raise min_load, or give experts_per_layer or drop")
    return kept


def kept_experts(
    layer: RoutedPart,
    load_N: torch.Tensor | None,
    gone: Sequence[int],
    min_load: float,
    experts_per_layer: int | None,
    least: int = 0,
) -> list[int]:
    """
    Return the experts of one layer to keep. The least used experts are dropped first.

    Args:
        gone: experts to drop in any case.
        least: minimum number of experts to keep (fewer only if `gone` leaves fewer).
    """
    stop = max(layer.smallest, least, experts_per_layer or 0)
    kept = [i for i in range(layer.num_experts) if i not in gone]
    if load_N is None:
        if experts_per_layer is not None and len(kept) > stop:
            raise InputError(
                f"{layer.name}: experts_per_layer={experts_per_layer}: {len(kept)} are left, and only data say which "
                "are used least; give data"
            )
        return kept
    for i in sorted(kept, key=load_N.tolist().__getitem__):
        if len(kept) > stop and (experts_per_layer is not None or load_N[i] < min_load):
            kept.remove(i)
    return kept
