"""Folders in pruning: their layers that can lose experts, and the writing of a folder with the kept experts."""

from __future__ import annotations

import copy
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from ..adapter.config import MoELoraConfig, by_pattern
from ..adapter.layers import MoELoraLayer
from ..adapter.lora_conversion import averaged_linears
from ..combine.request_gate import copy_without
from ..models.gate_init import find_gate_init
from ..models.introspection import NAMES_FIELD
from ..native.folders import ModelFolder, MoELoraFolder, NativeFolder, expect
from ..native.gate_sums import gates_with_sums, read_sums, renumbered, sums_file, write_sums
from ..native.model_folder import copy_companions
from ..native.safetensors_io import ShardedWriter
from ..routing.routers import make_router
from ..utils.io import read_json
from ..utils.loading import ADAPTER_WEIGHTS, CONFIG
from ..utils.messages import InputError, one_line
from ..utils.validation import prefixed

_PREFIX, _ROUTER = "base_model.model.", "moe_lora_router."
_SHARD = 5 * 10**9  # bytes


class RoutedPart(NamedTuple):
    """A layer with a router: its name, n, k, and the minimum number of experts to keep."""

    name: str
    num_experts: int
    top_k: int
    smallest: int


class Prunable(ABC):
    """Experts of a folder."""

    same_size = False  # whether all layers must keep the same number of experts
    layers: list[RoutedPart]  # in the order of the routers in a forward pass
    base: str | None  # base of an adapter, for the model card
    expert_names: Sequence[str] = ()

    @abstractmethod
    def write(self, folder: Path, kept: Sequence[Sequence[int]]) -> None:
        """Write the model with only the kept experts of every layer."""


def prunable(folder: ModelFolder) -> Prunable:
    """Return the experts of a folder. Raise if its routers cannot lose experts."""
    if isinstance(folder, MoELoraFolder):
        return PrunableAdapter(folder)
    return PrunableMoE(expect(folder, NativeFolder))


class PrunableAdapter(Prunable):
    """A MoE-LoRA adapter. Its layers may keep different numbers of experts."""

    def __init__(self, folder: MoELoraFolder) -> None:
        self.folder, self.config, self.base = folder, copy.deepcopy(folder.config), folder.base.path
        self.config.base_model_name_or_path, self.config.revision = folder.base.path, folder.base.revision
        self.expert_names = self.config.expert_names or ()
        self.text_config = folder.base.config.get_text_config()
        adapted = {
            name.replace(".base_layer", ""): layer
            for name, layer in folder.empty.get_base_model().named_modules()
            if isinstance(layer, MoELoraLayer)
        }
        routed = {name: layer for name, layer in adapted.items() if layer.moe_lora_router}
        self.single = [name for name in adapted if name not in routed]
        self.averaged = [*averaged_linears(folder.empty, "default")]
        self.specs = {name: next(iter(layer.moe_lora_spec.values())) for name, layer in routed.items()}
        self.routers: dict[str, Any] = {n: next(iter(layer.moe_lora_router.values())) for n, layer in routed.items()}
        takes_all = self.config.router_class.all_experts  # then k is no minimum
        self.layers = [
            RoutedPart(name, spec.num_experts, spec.top_k, 2 if takes_all else max(2, spec.top_k))
            for name, spec in self.specs.items()
        ]
        if not self.layers:
            raise InputError(f"{folder}: the adapter has no routers; there is nothing to prune")
        if not self.config.router_class.expert_rows:
            raise InputError(
                f"router_type={self.config.router_type!r}: such a router has no parameters of single experts "
                "that could be removed (expert_rows of its class)"
            )
        self.state = folder.tensors

    def write(self, folder: Path, kept: Sequence[Sequence[int]]) -> None:
        sizes = {layer.name: len(of_layer) for layer, of_layer in zip(self.layers, kept, strict=True)}
        config = self._pruned_config(sizes, _names(self.config.expert_names, kept), self._has_base(kept))
        state = dict(self.state)
        rows = [*self.config.router_class.expert_rows, *(["bias_steps"] if self.config.router_bias_update_rate else [])]
        for layer, of_layer in zip(self.layers, kept, strict=True):
            updates = [i for i in of_layer if i < self.specs[layer.name].num_updates]  # the base has no update
            for key in (*self._keys(layer.name, "moe_lora_A."), *self._keys(layer.name, "moe_lora_B.")):
                if len(state[key]) > 1:  # a single matrix is shared by all experts
                    state[key] = state[key][updates]
            for name in rows:
                key = f"{_PREFIX}{layer.name}.{_ROUTER}{name}"
                state[key] = state[key][list(of_layer)]
            self._check_router(layer.name, config, state)
        left = _common(kept)
        config.mean_loras = config.mean_loras and left is not None
        if left is not None:
            self._cut_means(left, config, state)
            self._without_texts(folder, left, state)
        copy_companions(self.folder.folder, folder)
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / ADAPTER_WEIGHTS,
                  metadata={"format": "pt"})  # fmt: skip
        config.save_pretrained(str(folder))

    def _has_base(self, kept: Sequence[Sequence[int]]) -> bool:
        """Return whether the base is still one of the experts. Raise if layers differ."""
        found = {
            self.specs[layer.name].num_updates in of_layer for layer, of_layer in zip(self.layers, kept, strict=True)
        }
        if len(found) > 1:
            raise InputError("the base would be left in some layers alone; keep it in all, or drop it in all")
        return found.pop()

    def _cut_means(self, left: list[int], config: MoELoraConfig, state: dict[str, torch.Tensor]) -> None:
        """
        Remove the ranks of dropped experts from averaged LoRAs; alpha / rank then averages the kept experts' updates.
        """
        r = self.config.r
        rows = [row for i in left if i < self.config.num_updates for row in range(i * r, (i + 1) * r)]
        for name in self.averaged:
            for key in (*self._keys(name, "moe_lora_A."), *self._keys(name, "moe_lora_B.")):
                state[key] = state[key][:, rows]
        if self.averaged:  # the pattern has only their keys
            config.rank_pattern = dict.fromkeys(config.rank_pattern, len(rows))

    def _without_texts(self, folder: Path, left: list[int], state: dict[str, torch.Tensor]) -> None:
        """Remove the dropped experts' texts from the gates, if the mixture has sums, and from the gate for requests."""
        source = self.folder.folder
        names = self.config.expert_names
        if names is not None:
            copy_without(source, folder, [name for i, name in enumerate(names) if i not in left])
        gates = gates_with_sums(source)
        with prefixed(f"{source}: its gates need a plugin (--plugins)"):
            initializer = find_gate_init(gates).with_kept_sums() if gates else None
        if gates is None or initializer is None:
            return
        try:
            sums = read_sums(source / sums_file(gates), initializer, self.folder.gates)
        except InputError:  # trained since: the gates no longer follow from the texts
            return
        if sums is not None:
            sums = renumbered(sums, left)
            write_sums(folder / sums_file(gates), sums)
            for layer, of_layer in zip(self.layers, sums, strict=True):
                key = f"{_PREFIX}{layer.name}.{_ROUTER}weight"
                state[key] = initializer.gates(of_layer, ()).to(state[key])

    def _keys(self, name: str, part: str) -> list[str]:
        return [key for key in self.state if key.startswith(f"{_PREFIX}{name}.{part}")]

    def _pruned_config(self, sizes: dict[str, int], names: list[str] | None, has_base: bool) -> MoELoraConfig:
        """Return the config with the given numbers of experts and their names."""
        config = copy.deepcopy(self.config)
        config.expert_names = None  # until all sizes are known
        config.base_expert = self.config.base_expert and has_base
        if config.num_experts > 1:
            config.num_experts = Counter(sizes.values()).most_common(1)[0][0]
        config.num_experts_pattern = {key: n for key, n in config.num_experts_pattern.items() if n == 1}
        for name, value in self.folder.sized_settings(self.routers.values()).items():
            setattr(config, name, value)
        config.__post_init__()
        sizes = {**sizes, **dict.fromkeys(self.single, 1)}
        fixed_sizes, most = config.num_experts_pattern, config.num_experts
        pattern = {re.escape(name): n for name, n in sizes.items() if by_pattern(fixed_sizes, name, most) != n}
        config.num_experts_pattern = {**pattern, **config.num_experts_pattern}
        config.expert_names = names
        config.__post_init__()
        return config

    def _check_router(self, name: str, config: MoELoraConfig, state: dict[str, torch.Tensor]) -> None:
        """Raise if a router with the new number of experts has other parameters."""
        spec = config.expert_spec(name, self.text_config)
        try:
            with torch.device("meta"):
                router = make_router(self.routers[name].hidden_size, spec.num_experts, spec.router)
            start = f"{_PREFIX}{name}.{_ROUTER}"
            wrong = [key for key, p in router.state_dict().items() if state[start + key].shape != p.shape]
        except (ValueError, KeyError) as error:
            wrong = [one_line(error)]
        if wrong:
            raise InputError(
                f"{name}: router_type={config.router_type!r} cannot have {spec.num_experts} experts instead of "
                f"{self.specs[name].num_experts} ({wrong[0]}); keep another number, or fold it first (fold_routers)"
            )


def _common(kept: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the experts kept in every layer; None if layers keep different experts."""
    left = list(kept[0])
    return left if all(list(of_layer) == left for of_layer in kept) else None


def _names(names: Sequence[str] | None, kept: Sequence[Sequence[int]]) -> list[str] | None:
    """Return the names of the kept experts; None if layers keep different experts."""
    left = _common(kept)
    return None if names is None or left is None else [names[expert] for expert in left]


class PrunableMoE(Prunable):
    """A native MoE of `FAMILIES`. All its layers keep the same number of experts."""

    same_size = True
    base = None

    def __init__(self, folder: NativeFolder) -> None:
        self.folder, self.family, self.config, self.tensors = folder, folder.family, folder.config, folder.tensors
        self.expert_names = getattr(folder.config.get_text_config(), NAMES_FIELD, None) or ()
        n, k = folder.num_experts, folder.config.num_experts_per_tok
        if n < 1:
            raise InputError(f"{folder}: {self.family.count}: the config says there are no experts")
        self.indices = [i for i in range(self.config.num_hidden_layers) if self.family.has_experts(self.config, i)]
        self.layers = [RoutedPart(f"model.layers.{i}.{self.family.block}", n, k, k) for i in self.indices]
        if not self.layers:
            raise InputError(f"{folder}: no layer has experts; there is nothing to prune")

    def write(self, folder: Path, kept: Sequence[Sequence[int]]) -> None:
        read = self.tensors.tensor
        make: dict[str, Callable[[], torch.Tensor]] = {name: partial(read, name) for name in self.tensors}
        m, rows = len(kept[0]), set()
        for index, layer, of_layer in zip(self.indices, self.layers, kept, strict=True):
            stacked = self.family.expert_names(index, 0) if self.family.stacked else ()
            for name in (self.family.router_name(index), *stacked):
                make[name] = partial(self._rows, name, of_layer)
                rows.add(name)
            if not self.family.stacked:
                names = [self.family.expert_names(index, expert) for expert in range(layer.num_experts)]
                for new, old in enumerate(of_layer):
                    make |= {name: partial(read, source) for name, source in zip(names[new], names[old], strict=True)}
                for name in chain(*names[m:]):
                    del make[name]
        shapes = {name: self.tensors.shape(name) for name in make}
        shapes |= {name: torch.Size((m, *shapes[name][1:])) for name in rows}
        plan = {name: (self.tensors.dtype(name), shapes[name]) for name in make}
        with ShardedWriter(folder, plan, _SHARD) as writer:
            for name, tensor in make.items():
                writer.write(name, tensor())
        values = read_json(self.folder.folder / CONFIG)
        counts: dict[str, Any] = {key: m for key in ("num_experts", "num_local_experts") if key in values}
        if (left := _names(values.pop(NAMES_FIELD, None), kept)) is not None:
            counts[NAMES_FIELD] = left
        (folder / CONFIG).write_text(
            json.dumps({**values, **counts}, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        copy_companions(self.folder.folder, folder)

    def _rows(self, name: str, experts: Sequence[int]) -> torch.Tensor:
        return self.tensors.tensor(name)[list(experts)]
