"""Pruning: experts that are nearly idle are dropped, experts that are nearly the same become one."""

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
from ..native.safetensors_io import new_folder
from ..utils.expert_merging import likeness
from ..utils.io import write_json
from ..utils.messages import InputError
from ..utils.model_card import plain, write_model_card
from ..utils.torch_contexts import free_memory
from .expert_groups import Groups, LayerFacts, Rules, plan_layers, weights_of
from .measure import Choices, losses_of
from .routed_folders import Prunable, prunable

REPORT = "pruning.json"
MIN_LOAD = 0.01


@dataclass(frozen=True)
class PrunedLayer:
    """
    What became of a layer's experts.

    Args:
        name: the module with the router.
        num_experts: n, before.
        groups: for each expert after, the experts before that it was made from, [m] lists.
        dropped: the experts that are gone.
        load: each expert's share of the layer's assignments before; None without data.

    Example:

    ```python
    >>> from moe_peft.pruning import PrunedLayer
    >>> layer = PrunedLayer(
    ...     "model.layers.0.mlp",
    ...     num_experts=4,
    ...     groups=[[0], [1, 2]],
    ...     dropped=[3],
    ...     load=None,
    ... )
    >>> merged = layer.merged  # 1 and 2
    ```
    """

    name: str
    num_experts: int
    groups: Groups
    dropped: list[int]
    load: list[float] | None

    @property
    def merged(self) -> list[int]:
        """The experts that have become one with another."""
        return [i for group in self.groups if len(group) > 1 for i in group]


@dataclass(frozen=True)
class Pruning:
    """
    What pruning changed.

    Args:
        layers: in the order of the routers in a forward pass.
        size: before and after.
        loss: before and after, by domain and as `"mean"` over all tokens; None without data. A domain of that name is
            called `"mean (domain)"`.
        lost: the share of tokens served by an expert that is gone, by layer and in any layer; None without data.
        merged: the same of experts that have become one with another.

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
    merged: dict[str, Any] | None


def prune_experts(
    model: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    base: str | None = None,
    data: str | None = None,
    label_column: str | None = None,
    split: str = "train",
    min_load: float | None = None,
    merge_twins: float | None = None,
    experts_per_layer: int | None = None,
    drop: Mapping[Any, Expert | Sequence[Expert]] | Expert | Sequence[Expert] | None = None,
    dtype: str = "auto",
    batch_size: int = 8,
    max_length: int = 1024,
    max_examples: int | None = None,
) -> Pruning:
    """
    Write a MoE-LoRA adapter or a native MoE with fewer experts: the weights and the router rows of those that stay.

    Dropping an expert is as if its router logit were minus infinity: with `normalize_top_k`, a layer's output stays the
    same for tokens that did not choose it; otherwise the gates of the others, which are probabilities, grow by the
    factor 1/(1-p), where p is the one that it had. Merging is approximate: the experts' weights and their router rows
    become a mean, weighted by load, whose gate is that of one twin and not the sum of both (no row of a linear gate
    gives that). LoRA experts become the rank-r update that is nearest to the mean of theirs. `loss` says what all this
    costs.

    Args:
        model: the folder of an adapter with routers that can lose experts, or of a native MoE of a family that
            `export` writes. All layers of a native MoE keep as many experts, those of an adapter what they need.
        output_dir: a new or empty folder. A killed run leaves nothing in it.
        base: an adapter's base, which the result then names; None takes the one that it names.
        data: a file or a dataset's name, in a format that TRL accepts; for loads, and for the loss before and after.
        label_column: the column that holds the domains, for losses by domain.
        split: the split of the data.
        min_load: with data, drop experts with a smaller share of their layer's assignments; None: 0.01.
        merge_twins: merge experts whose cosine is at least this: of their updates B A, or in a native MoE, or with
            bottleneck experts, of their weights. None: do not merge.
        experts_per_layer: how many experts stay in every layer; those used least are dropped until only these are left.
        drop: experts to drop in every layer, by index or name, or layer (counted from 0, as in `moe-peft inspect`) →
            experts.
        dtype, batch_size, max_length, max_examples: of the passes over the data, as `moe-peft inspect` has them.

    Returns:
        what has changed; also in the folder's `pruning.json`.

    Raises:
        ValueError: model or data do not exist or do not fit, a router cannot lose experts, a layer would keep fewer
            than top_k (in an adapter also fewer than two), or no expert would be removed.

    Example:

    ```python
    >>> from moe_peft import prune_experts
    >>> from moe_peft.native import UpcycleConfig, upcycle
    >>> folder = upcycle("Qwen/Qwen3-0.6B", "moe", UpcycleConfig(num_experts=4))
    >>> pruning = prune_experts(folder, "pruned", drop=[3])
    >>> groups = [layer.groups for layer in pruning.layers]
    ```
    """
    if data is None and not (min_load is None and label_column is None):
        raise InputError("min_load and label_column go with data; give data, or leave them out")
    if data is None and merge_twins is None and drop is None:
        raise InputError("data=None: nothing says which experts to remove; give data, merge_twins or drop")
    lowest = 0.0 if data is None else MIN_LOAD if min_load is None else min_load
    rules = Rules(lowest, merge_twins, experts_per_layer)
    with new_folder(output_dir) as partial:
        folder = open_folder(model, "model", MoELoraFolder, NativeFolder, base=base)
        experts = prunable(folder)
        folder.check_tensors()
        folder.companions()  # which will be copied
        choices, loss, rows = Choices([layer.num_experts for layer in experts.layers]), {}, None
        if data is not None:
            rows = load_rows(
                folder.tokenizer, data, label_column, split,
                batch_size=batch_size, max_length=max_length, max_examples=max_examples,
            )  # fmt: skip
            loss["before"] = losses_of(folder.load(dtype), rows, choices)
            free_memory()
        layers = _write(experts, partial, None if rows is None else choices.loads(), drop, rules)
        written = open_folder(partial, "output_dir", type(folder))
        written.check_tensors()  # what would not load is not published
        if rows is not None:
            loss["after"] = losses_of(written.load(dtype), rows)
        pruning = Pruning(
            layers,
            {"before": model_size(folder.empty), "after": model_size(written.empty)},
            loss or None,
            None if rows is None else choices.share_with([layer.dropped for layer in layers]),
            None if rows is None else choices.share_with([layer.merged for layer in layers]),
        )
        write_json(partial / REPORT, asdict(pruning))
        made = f"`moe-peft prune` of `{plain(Path(model).name)}`; `{REPORT}` says which experts are left"
        write_model_card(partial, base=experts.base or os.fspath(model), made=made)
    return pruning


def _write(
    folder: Prunable,
    output: Path,
    loads: Sequence[torch.Tensor] | None,
    drop: Mapping[Any, Expert | Sequence[Expert]] | Expert | Sequence[Expert] | None,
    rules: Rules,
) -> list[PrunedLayer]:
    """Decide which experts stay, and write them."""
    facts = _facts(folder, loads, drop, rules)
    groups = plan_layers(facts, rules, folder.same_size)
    layers, weights = [], []
    for layer, of_layer in zip(facts, groups, strict=True):
        kept = {i for group in of_layer for i in group}
        gone = [i for i in range(layer.num_experts) if i not in kept]
        load = None if layer.load is None else layer.load.tolist()
        layers.append(PrunedLayer(layer.name, layer.num_experts, of_layer, gone, load))
        weights.append([weights_of(group, layer) for group in of_layer])
    _check_changes(layers, facts)
    folder.write(output, groups, weights)
    return layers


def _facts(
    folder: Prunable,
    loads: Sequence[torch.Tensor] | None,
    drop: Mapping[Any, Expert | Sequence[Expert]] | Expert | Sequence[Expert] | None,
    rules: Rules,
) -> list[LayerFacts]:
    names = [str(i) for i in range(len(folder.layers))]  # as JSON has them
    given = drop if isinstance(drop, Mapping) else dict.fromkeys(names, [] if drop is None else drop)
    per_layer = {str(i): indices_of(experts, folder.expert_names, "drop") for i, experts in given.items()}
    for name in per_layer:
        if name not in names:
            raise InputError(f"drop: layer {name}: the model has layers 0 to {names[-1]} with routers")
    facts = []
    for i, layer in enumerate(folder.layers):
        gone = sorted(set(per_layer.get(names[i], [])))
        if not set(gone) <= set(range(layer.num_experts)):
            raise InputError(f"drop={gone}: {layer.name} has experts 0 to {layer.num_experts - 1}")
        similarity = None if rules.merge_twins is None else folder.similarity(i)
        load = None if loads is None else loads[i]
        facts.append(LayerFacts(layer.name, layer.num_experts, layer.smallest, load, similarity, gone))
    return facts


def _check_changes(layers: Sequence[PrunedLayer], facts: Sequence[LayerFacts]) -> None:
    """Raise if every expert stays."""
    if any(layer.dropped or layer.merged for layer in layers):
        return
    loads = [float(layer.load.min()) for layer in facts if layer.load is not None]
    smallest = f"; the smallest load is {min(loads):.1%}" if loads else ""
    cosines = [alike.largest for layer in facts if (alike := likeness(layer.similarity)) is not None]
    twins = f"; the largest cosine of two experts is {max(cosines):.3f}" if cosines else ""
    raise InputError(
        f"every expert stays{smallest}{twins}; raise min_load, lower merge_twins, or give experts_per_layer"
    )
