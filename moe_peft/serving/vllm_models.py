"""
vLLM's models with our experts on their FFNs and linears, under the names of `vllm.register`.

A model accepts tensors one by one and at any time: a checkpoint's and an adapter's when it is loaded, and later the
tensors of an adapter in training, to compute its rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast

import peft  # noqa: F401  (before this package's modules, see `moe_peft.adapter`)
import torch
from safetensors import safe_open
from torch import nn
from vllm import ModelRegistry
from vllm.config import VllmConfig

from ..adapter.config import TOKEN_ROWS, MoELoraConfig, trained_tokens
from ..native.folders import MoELoraFolder, open_folder
from ..utils.loading import ADAPTER_WEIGHTS, read_adapter_config, read_adapter_weights
from ..utils.messages import InputError
from .vllm import ADAPTER_FIELD, DIGEST_FIELD, PREFIX, adapter_digest, check_served
from .vllm_layers import Host, VllmMoELoraFFN, VllmMoELoraLinears

_PREFIX = "base_model.model."  # prefix of the names in an adapter's file
_EXPERTS = ".moe_lora_"  # part of the names of a module's experts and router


class _MoELora(nn.Module):
    """Mixin for a model of vLLM: adds an adapter's experts, and loads base and adapter."""

    model: Any
    config: Any
    packed_modules_mapping: dict[str, list[str]]
    supports_lora = False  # vLLM's LoRA layers would replace the linears inside

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        hf_config = vllm_config.model_config.hf_config
        self.adapter: str = getattr(hf_config, ADAPTER_FIELD)
        self.source = f"adapter {self.adapter!r}"
        if not hasattr(hf_config, DIGEST_FIELD):  # started with --hf-overrides, without `use_base`
            folder = open_folder(self.adapter, ADAPTER_FIELD, MoELoraFolder, base=vllm_config.model_config.model)
            parallel, lora = vllm_config.parallel_config, vllm_config.lora_config
            check_served(folder, parallel.tensor_parallel_size, parallel.pipeline_parallel_size, lora is not None)
            setattr(hf_config, DIGEST_FIELD, adapter_digest(folder))
        self.moe_lora_config = config = cast(MoELoraConfig, read_adapter_config(self.adapter, self.source))
        with safe_open(Path(self.adapter, ADAPTER_WEIGHTS), "pt") as file:
            keys = file.keys()
        self.adapter_names = {key.removeprefix(_PREFIX) for key in keys}
        specs = {
            module: config.expert_spec(module, hf_config)
            for module in {key.removeprefix(_PREFIX).partition(_EXPERTS)[0] for key in keys if _EXPERTS in key}
        }
        # Names of the parts of vLLM's linears in the base. Some bases have the whole linear, as vLLM does (Phi-3, GLM).
        parts = {
            whole: [whole] if any(whole in key.split(".") for key in keys) else of_whole
            for whole, of_whole in self.packed_modules_mapping.items()
        }
        contexts = vllm_config.compilation_config.static_forward_context
        for i, layer in enumerate(self.model.layers):
            for part in ("self_attn", "mlp"):
                prefix = f"model.layers.{i}.{part}"
                for name, linear in [*getattr(layer, part).named_children()]:
                    projections = [f"{prefix}.{p}" for p in parts.get(name, [name])]
                    if any(projection in specs for projection in projections):
                        routed = VllmMoELoraLinears(linear, f"{prefix}.{name}", specs, projections)
                        contexts[routed.key] = routed
                if prefix in specs:
                    activation = getattr(hf_config, "hidden_activation", None) or hf_config.hidden_act
                    layer.mlp = VllmMoELoraFFN(prefix, specs[prefix], layer.mlp, parts["gate_up_proj"], activation)
                    contexts[prefix] = layer.mlp
        # Name of a tensor in the adapter → its name in vLLM's model, and the tensor.
        hosts = {path: module for path, module in self.named_modules() if isinstance(module, Host)}
        self.expert_tensors = {
            f"{host.name}.{key}": (f"{path}.{key}", tensor)
            for path, host in hosts.items()
            for key, tensor in host.tensors()
        }
        if unserved := specs.keys() - {host.name for host in hosts.values()}:
            raise InputError(f"{self.source}: {min(unserved)} has experts, and vLLM's model has no such module")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """
        Load the base's checkpoint, at the start or again, together with the adapter in the folder. Or load tensors of
        an adapter in training, by their names in its file.
        """
        weights, first = iter(weights), []
        for name, tensor in weights:
            first.append((name, tensor))
            if name not in self.adapter_names:  # a checkpoint of the base
                weights, first = self._overlaid(chain(first, weights)), []
                break
        loaded: set[str] = set()
        weights = self._without_experts(chain(first, weights), loaded)
        return super().load_weights(weights) | loaded  # type: ignore[misc]

    def _without_experts(
        self, weights: Iterable[tuple[str, torch.Tensor]], loaded: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Load the tensors of experts and routers, and yield all others."""
        for name, tensor in weights:
            if _EXPERTS not in name:
                yield name, tensor
                continue
            of_vllm, expert_tensor = self.expert_tensors[name]
            if tensor.shape != expert_tensor.shape:  # a copy could broadcast it
                raise InputError(
                    f"{self.source}: {name} is {list(tensor.shape)}, its config and the base say "
                    f"{list(expert_tensor.shape)}"
                )
            expert_tensor.load(tensor)
            loaded.add(of_vllm)

    def _overlaid(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """
        Yield the base's tensors with the adapter's trained modules and token rows in their place, then the experts.
        """
        state = read_adapter_weights(self.adapter, self.source)
        state = {key.removeprefix(_PREFIX): tensor for key, tensor in state.items()}
        if missing := self.expert_tensors.keys() - state.keys():
            raise InputError(f"{self.source}: no tensor {min(missing)}")
        for name, tensor in weights:
            module = name.removesuffix(".weight")
            if (rows := state.pop(f"{module}{TOKEN_ROWS}", None)) is not None:
                tensor = tensor.clone()
                tensor[trained_tokens(self.moe_lora_config, module)] = rows.to(tensor.dtype)
            yield name, state.pop(name, tensor)
        if self.config.tie_word_embeddings:  # `ensure_weight_tying` saves the head, too
            state.pop("lm_head.weight", None)
        if unknown := [name for name in state if _EXPERTS not in name]:
            raise InputError(f"{self.source}: {min(unknown)}: the base has no such tensor; is it the adapter's base?")
        yield from state.items()


def __getattr__(name: str) -> type:
    """Return a model class of vLLM with experts, by our name."""
    if not name.startswith(PREFIX):
        raise AttributeError(name)
    architecture = name.removeprefix(PREFIX)
    base = ModelRegistry.models[architecture].load_model_cls()
    globals()[name] = made = type(name, (_MoELora, base), {"__module__": __name__})
    return made
