"""The folders that can be pruned: a MoE-LoRA adapter, or a native MoE."""

from __future__ import annotations

import copy
import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from ..adapter.config import MoELoraConfig, by_pattern
from ..adapter.layers import MoELoraLayer
from ..models.model_size import ModelSize, model_size
from ..models.native_routers import CONFIG_FIELD
from ..native.export import read_adapter_config
from ..native.families import FAMILIES
from ..native.model_folder import HEAD, NOT_WEIGHTS, companions, copy_companions
from ..native.moe_config import backbone_shapes
from ..native.safetensors_io import Checkpoint, ShardedWriter
from ..routing.routers import make_router
from ..utils.expert_merging import mean_rows, mean_tensor, similarities, value_gram
from ..utils.io import read_json
from ..utils.loading import adapter_base, empty_model, read_adapter_weights, read_config
from ..utils.messages import InputError, one_line
from .expert_groups import Groups

_PREFIX, _ROUTER = "base_model.model.", "moe_lora_router."
_SHARD = 5 * 10**9  # bytes


class RoutedLayer(NamedTuple):
    """A layer with a router: its name, n, k, and how many experts must stay."""

    name: str
    num_experts: int
    top_k: int
    smallest: int


class Folder(ABC):
    """
    What is pruned.

    Args:
        path: its folder.
    """

    same_size = False  # whether all layers must keep as many experts
    layers: list[RoutedLayer]  # in the order of the routers in a forward pass
    size: ModelSize
    made_from: str | None  # the base, for the model card

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def similarity(self, layer: int) -> torch.Tensor:
        """The cosines of a layer's experts, [n, n]."""

    @abstractmethod
    def check(self) -> None:
        """
        Compare the tensors on disk with those that the config asks for.

        Raises:
            ValueError: one is missing, is too many, or has another shape.
        """

    @abstractmethod
    def write(self, folder: Path, groups: Sequence[Groups], weights: Sequence[Sequence[torch.Tensor]]) -> None:
        """
        Write what is left to a folder.

        Args:
            groups: the groups of every layer.
            weights: what the experts of each group count in their mean.

        Raises:
            ValueError: a router cannot lose experts.
        """


def open_folder(path: str | os.PathLike, base: str | None = None) -> Folder:
    """
    Args:
        base: an adapter's base; None: the one that it names.

    Raises:
        ValueError: it is neither a MoE-LoRA adapter nor a native MoE of `FAMILIES`; or its base cannot be found.
    """
    path = Path(path)
    companions(path)  # which will be copied
    if (path / "adapter_config.json").is_file():
        return AdapterFolder(path, base)
    if base is not None:
        raise InputError(f"base={base!r}: is of an adapter, and {path} holds none; leave it out")
    if (path / "config.json").is_file():
        return NativeFolder(path)
    raise InputError(f"model={str(path)!r}: no adapter_config.json and no config.json; name a model's folder")


class AdapterFolder(Folder):
    """A MoE-LoRA adapter. Its layers may keep different numbers of experts."""

    def __init__(self, path: Path, base: str | None) -> None:
        super().__init__(path)
        self.config = read_adapter_config(path)
        self.made_from, self.config.revision = adapter_base(self.config, path, base)
        self.config.base_model_name_or_path = self.made_from
        named = f"{path}: base {self.made_from!r}"
        base_config = read_config(self.made_from, named, self.config.revision)
        empty = empty_model(base_config, named)
        with torch.device("meta"):
            model = get_peft_model(empty, copy.deepcopy(self.config))
        self.size, self.text_config = model_size(model), base_config.get_text_config()
        self.expected = {
            key: tensor.shape for key, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
        }
        adapted = {
            name.replace(".base_layer", ""): layer
            for name, layer in model.get_base_model().named_modules()
            if isinstance(layer, MoELoraLayer)
        }
        routed = {name: layer for name, layer in adapted.items() if layer.moe_lora_router}
        self.single = [name for name in adapted if name not in routed]
        self.specs = {name: next(iter(layer.moe_lora_spec.values())) for name, layer in routed.items()}
        self.widths = {name: layer.in_features for name, layer in routed.items()}
        takes_all = self.config.router_class.all_experts  # and so has no k that must stay
        self.layers = [
            RoutedLayer(name, spec.num_experts, spec.top_k, 2 if takes_all else max(2, spec.top_k))
            for name, spec in self.specs.items()
        ]
        if not self.layers:
            raise InputError(f"model={str(path)!r}: the adapter has no routers; there is nothing to prune")
        if not self.config.router_class.expert_rows:
            raise InputError(
                f"router_type={self.config.router_type!r}: such a router has no parameters of single experts "
                "that could go (expert_rows of its class)"
            )
        self.state = read_adapter_weights(path, f"adapter {str(path)!r}")
        self.check()
        for key, tensor in self.state.items():
            if not tensor.isfinite().all():
                raise InputError(f"{path}: {key} holds NaN or infinity; save the adapter again")

    def similarity(self, layer: int) -> torch.Tensor:
        name = self.layers[layer].name
        pairs = [(self.state[key], self.state[_other(key)]) for key in self._keys(name, "moe_lora_A.")]
        return similarities(torch.stack([self.specs[name].gram(A, B) for A, B in pairs]).sum(0))

    def write(self, folder: Path, groups: Sequence[Groups], weights: Sequence[Sequence[torch.Tensor]]) -> None:
        sizes = {layer.name: len(of_layer) for layer, of_layer in zip(self.layers, groups, strict=True)}
        config = self._pruned_config(sizes)
        state = dict(self.state)
        for layer, of_layer, w in zip(self.layers, groups, weights, strict=True):
            for key in self._keys(layer.name, "moe_lora_A."):
                A, B = state[key], state[_other(key)]
                state[key], state[_other(key)] = self.specs[layer.name].mean(A, B, of_layer, w)
            biases = ["bias_steps"] if self.config.router_bias_update_rate else []
            for name in (*self.config.router_class.expert_rows, *biases):
                key = f"{_PREFIX}{layer.name}.{_ROUTER}{name}"
                state[key] = mean_rows(state[key], of_layer, w)
            self._check_router(layer.name, config, state)
        copy_companions(self.path, folder)
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / "adapter_model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
        config.save_pretrained(str(folder))

    def check(self) -> None:
        shapes = {key: w.shape for key, w in self.state.items() if ".moe_lora_" in key or key in self.expected}
        _check_shapes(self.path, shapes, self.expected)

    def _keys(self, name: str, part: str) -> list[str]:
        return [key for key in self.state if key.startswith(f"{_PREFIX}{name}.{part}")]

    def _pruned_config(self, sizes: dict[str, int]) -> MoELoraConfig:
        """The config with these numbers of experts."""
        config = copy.deepcopy(self.config)
        if config.num_experts > 1:
            config.num_experts = Counter(sizes.values()).most_common(1)[0][0]
        config.num_experts_pattern = {key: n for key, n in config.num_experts_pattern.items() if n == 1}
        for name, of_size in config.router_class.sized.items():
            fixed = {getattr(spec.router, name) or of_size(spec.num_experts) for spec in self.specs.values()}
            if len(fixed) > 1:
                raise InputError(
                    f"router_{name}=None: it follows from the number of experts, in which layers differ; set it "
                    "in adapter_config.json first"
                )
            setattr(config, f"router_{name}", fixed.pop())
        config.__post_init__()
        sizes = {**sizes, **dict.fromkeys(self.single, 1)}
        fixed_sizes, most = config.num_experts_pattern, config.num_experts
        pattern = {re.escape(name): n for name, n in sizes.items() if by_pattern(fixed_sizes, name, most) != n}
        config.num_experts_pattern = {**pattern, **config.num_experts_pattern}
        config.__post_init__()
        return config

    def _check_router(self, name: str, config: MoELoraConfig, state: dict[str, torch.Tensor]) -> None:
        """Raise if the router of that many experts has other parameters."""
        spec = config.expert_spec(name, self.text_config)
        try:
            with torch.device("meta"):
                router = make_router(self.widths[name], spec.num_experts, spec.router)
            start = f"{_PREFIX}{name}.{_ROUTER}"
            wrong = [key for key, p in router.state_dict().items() if state[start + key].shape != p.shape]
        except (ValueError, KeyError) as error:
            wrong = [one_line(error)]
        if wrong:
            raise InputError(
                f"{name}: router_type={config.router_type!r} cannot have {spec.num_experts} experts instead of "
                f"{self.specs[name].num_experts} ({wrong[0]}); keep another number, or fold it first (fold_routers)"
            )


class NativeFolder(Folder):
    """A native MoE of `FAMILIES`. All its layers keep as many experts."""

    same_size = True
    made_from = None

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.values: dict[str, Any] = read_json(path / "config.json")
        kind = self.values.get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise InputError(f"model={str(path)!r}: a {kind!r} model; native MoEs of {', '.join(FAMILIES)} can be")
        if CONFIG_FIELD in self.values:
            raise InputError(f"model={str(path)!r}: other routers have replaced its gates; fold them first")
        self.family, self.config = FAMILIES[kind], read_config(path, f"model={str(path)!r}")
        self.tensors = Checkpoint(path)
        if getattr(self.config, self.family.count) < 1:
            raise InputError(f"model={str(path)!r}: {self.family.count}: the config says there are no experts")
        self.size = model_size(empty_model(self.config, f"model={str(path)!r}"))
        n, k = getattr(self.config, self.family.count), self.config.num_experts_per_tok
        self.indices = [i for i in range(self.config.num_hidden_layers) if self.family.has_experts(self.config, i)]
        self.layers = [RoutedLayer(f"model.layers.{i}.{self.family.block}", n, k, k) for i in self.indices]
        self.check()
        if not self.layers:
            raise InputError(f"model={str(path)!r}: no layer has experts; there is nothing to prune")

    def similarity(self, layer: int) -> torch.Tensor:
        parts = range(len(self._names(layer, 0)))
        return similarities(sum((value_gram(self._stacked(layer, part).flatten(1)) for part in parts), torch.zeros(())))

    def write(self, folder: Path, groups: Sequence[Groups], weights: Sequence[Sequence[torch.Tensor]]) -> None:
        make: dict[str, Callable[[], torch.Tensor]] = {
            name: partial(self.tensors.tensor, name) for name in self.tensors
        }
        m = len(groups[0])
        rows: set[str] = set()
        for layer, (of_layer, w) in enumerate(zip(groups, weights, strict=True)):
            names = self._names(layer, 0) if self.family.stacked else ()
            for name in (self.family.router_name(self.indices[layer]), *names):
                make[name] = partial(self._rows, name, of_layer, w)
                rows.add(name)
            if not self.family.stacked:
                for i, (group, of_each) in enumerate(zip(of_layer, w, strict=True)):
                    for part, name in enumerate(self._names(layer, i)):
                        make[name] = partial(self._mean, layer, part, group, of_each)
                for expert in range(m, self.layers[layer].num_experts):
                    for name in self._names(layer, expert):
                        del make[name]
        shapes = {name: self.tensors.shape(name) for name in make}
        shapes |= {name: torch.Size((m, *shapes[name][1:])) for name in rows}
        plan = {name: (self.tensors.dtype(name), shapes[name]) for name in make}
        with ShardedWriter(folder, plan, _SHARD) as writer:
            for name, tensor in make.items():
                writer.write(name, tensor())
        counts = {key: m for key in ("num_experts", "num_local_experts") if key in self.values}
        (folder / "config.json").write_text(json.dumps({**self.values, **counts}, indent=2, sort_keys=True) + "\n")
        copy_companions(self.path, folder)

    def check(self) -> None:
        expected = self.family.plan(self.config, backbone_shapes(self.config))
        if self.config.tie_word_embeddings:
            expected.pop(HEAD)
        shapes = {name: self.tensors.shape(name) for name in self.tensors if not name.endswith(NOT_WEIGHTS)}
        if self.config.tie_word_embeddings:
            shapes.pop(HEAD, None)
        _check_shapes(self.path, shapes, expected)

    def _rows(self, name: str, groups: Groups, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        return mean_rows(self.tensors.tensor(name), groups, weights)

    def _mean(self, layer: int, part: int, group: Sequence[int], weights: torch.Tensor) -> torch.Tensor:
        return mean_tensor([self.tensors.tensor(self._names(layer, expert)[part]) for expert in group], weights)

    def _names(self, layer: int, expert: int) -> tuple[str, ...]:
        return self.family.expert_names(self.indices[layer], expert)

    def _stacked(self, layer: int, part: int) -> torch.Tensor:
        """One of the tensors of all experts, [n, …]."""
        if self.family.stacked:
            return self.tensors.tensor(self._names(layer, 0)[part])
        n = self.layers[layer].num_experts
        return torch.stack([self.tensors.tensor(self._names(layer, expert)[part]) for expert in range(n)])


def _check_shapes(path: Path, shapes: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    for name in {**expected, **shapes}:
        if shapes.get(name) != expected.get(name):
            has, wants = (list(of[name]) if name in of else "nothing" for of in (shapes, expected))
            raise InputError(
                f"{path}: {name} does not fit the config: it is {has}, the config says {wants}; use the config "
                "it was saved with"
            )


def _other(key: str) -> str:
    return key.replace(".moe_lora_A.", ".moe_lora_B.")
