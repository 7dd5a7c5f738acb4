"""
vLLM's own models with our experts around their FFNs.

Legend: T tokens, n experts, r rank, d hidden size, f the FFN's intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import peft  # noqa: F401  (before this package's modules, see `moe_peft.adapter`)
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.utils.torch_utils import direct_register_custom_op

from ..adapter.config import MoELoraConfig
from ..adapter.dispatch import Dispatch
from ..adapter.dispatch_choice import make_dispatch
from ..adapter.experts import Experts
from ..adapter.experts.base import empty_parameters
from ..adapter.ffn_layout import FFNLayout
from ..routing.routers import Router, make_router
from ..utils.loading import ADAPTER_WEIGHTS, read_adapter_config, read_adapter_weights
from ..utils.messages import InputError
from .vllm import ADAPTER_FIELD

_PREFIX = "base_model.model."  # of the names in an adapter's file
_EXPERTS = ".moe_lora_"  # in the names of the tensors of a module's experts and router
_ADAPTER = "default"
_GATE, _UP, _DOWN = "gate_proj", "up_proj", "down_proj"  # in adapters; vLLM's FFN has one product for the first two
_LAYOUT = FFNLayout(gate=_GATE, up=_UP, down=_DOWN, act="act_fn")


class _DenseFFN:
    """vLLM's FFN as experts read it: without the bias that its linears return, and with an unfused activation."""

    act_fn = staticmethod(F.silu)  # of all the architectures here; vLLM refuses others

    def __init__(self, ffn: MoELoraFFN) -> None:
        self._parts = ffn.gate_up_proj, ffn.act_fn, ffn.down_proj

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_up_proj, act_fn, down_proj = self._parts
        return down_proj(act_fn(gate_up_proj(x_TD)))


class MoELoraFFN(nn.Module):
    """
    vLLM's FFN with experts: it replaces vLLM's own and keeps the names of its parts.

    Its other attributes and methods are those of an `FFNHost`, for a single adapter.

    Args:
        mlp: vLLM's FFN.
        spec: the settings of the experts.
        name: of the FFN in the model.
    """

    layout = _LAYOUT
    gate_up_proj: Any
    down_proj: Any

    def __init__(self, mlp: Any, spec: Experts, name: str) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = mlp.gate_up_proj, mlp.down_proj, mlp.act_fn
        self.gate_up_proj.return_bias = self.down_proj.return_bias = False
        self.base_layer = _DenseFFN(self)
        self.name, self.spec, self.moe_lora_spec = name, spec, {_ADAPTER: spec}
        # Under tensor parallelism, each process has a part of f. The partial outputs are added up once, at the end;
        # only bottlenecks read the FFN's complete output.
        self.features, local = (
            _features(self.gate_up_proj.input_size, f)
            for f in (self.down_proj.input_size, self.down_proj.input_size_per_partition)
        )
        self.reduces = self.down_proj.tp_size > 1 and not spec.needs_ffn
        self.down_proj.reduce_results = not self.reduces
        if self.reduces and self.down_proj.bias is not None:
            raise InputError("tensor_parallel_size: experts on FFNs with biases need 1")
        self.moe_lora_A, self.moe_lora_B = empty_parameters(spec.shapes(local))
        self.moe_lora_shared_A, self.moe_lora_shared_B = empty_parameters(spec.shared_shapes(local))
        self.moe_lora_router: Router | None = None
        if spec.num_experts > 1:
            self.moe_lora_router = make_router(self.gate_up_proj.input_size, spec.num_experts, spec.router).float()
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.vllm.moe_lora_ffn(x, self.name)

    def output(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The FFN's output [T, d]."""
        y_TD = type(self.spec).ffn_output(self, [_ADAPTER], x_TD)
        return tensor_model_parallel_all_reduce(y_TD) if self.reduces else y_TD

    # --- what experts read ---

    def projection(self, name: str) -> nn.Module:
        return self.down_proj if name == _DOWN else self.gate_up_proj

    def input_projections(self, x_TD: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.gate_up_proj(x_TD).chunk(2, dim=-1)

    def base_output(self, x_TD: torch.Tensor, mask_TD: torch.Tensor | None) -> torch.Tensor:
        return self.base_layer(x_TD)

    def expert_parameters(self, adapter: str) -> tuple[nn.ParameterDict, nn.ParameterDict]:
        return self.moe_lora_A, self.moe_lora_B

    def shared_parameters(self, adapter: str) -> tuple[nn.ParameterDict, nn.ParameterDict]:
        return self.moe_lora_shared_A, self.moe_lora_shared_B

    def dropped(self, adapter: str, x_TM: torch.Tensor, count: int) -> list[torch.Tensor]:
        return [x_TM] * count

    def route(
        self, adapter: str, x_TD: torch.Tensor, dtype: torch.dtype, mixes_outputs: bool = False
    ) -> Dispatch | None:
        spec, router = self.spec, self.moe_lora_router
        if router is None:
            return None
        gates_TK, experts_TK = router.choose(router(x_TD), spec.top_k, spec.normalize_top_k)
        unit = math.gcd(spec.rank, x_TD.shape[-1], self.down_proj.input_size_per_partition)
        return make_dispatch(
            experts_TK, gates_TK.to(dtype), spec.num_experts, spec.rank, unit, spec.scaling, mixes_outputs
        )


def _features(d: int, f: int) -> dict[str, tuple[int, int]]:
    """In and out features by projection."""
    return {_GATE: (d, f), _UP: (d, f), _DOWN: (f, d)}


# One operator for the whole FFN: to a compiler it is opaque, so the way its experts are computed (`choose_method`) is
# chosen for each number of tokens, when a CUDA graph is captured or the step runs. vLLM calls its own MoE likewise.


def _moe_lora_ffn(x: torch.Tensor, name: str) -> torch.Tensor:
    return get_forward_context().no_compile_layers[name].output(x)


def _moe_lora_ffn_fake(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)


direct_register_custom_op("moe_lora_ffn", _moe_lora_ffn, fake_impl=_moe_lora_ffn_fake)


class _MoELora(nn.Module):
    """Mixed into a model of vLLM: replaces the FFNs that the adapter has experts for, and loads both."""

    model: Any
    supports_lora = False  # vLLM's LoRA layers would replace the linears inside

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        hf_config = vllm_config.model_config.hf_config
        self.adapter, self.tied = getattr(hf_config, ADAPTER_FIELD), hf_config.tie_word_embeddings
        self.source = f"adapter {self.adapter!r}"
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise InputError("pipeline_parallel_size: a MoE-LoRA adapter needs 1; use tensor_parallel_size")
        config = cast(MoELoraConfig, read_adapter_config(self.adapter, self.source))
        if config.router_class.by_token_id:
            raise InputError(f"{self.source}: router_type={config.router_type!r}: vLLM's FFNs do not see token ids")

        # The modules that the adapter's file has experts for; all are FFNs of layers.
        with safe_open(Path(self.adapter, ADAPTER_WEIGHTS), "pt") as file:
            keys = file.keys()
        modules = {key.removeprefix(_PREFIX).partition(_EXPERTS)[0] for key in keys if _EXPERTS in key}
        for i, layer in enumerate(self.model.layers):
            name = f"model.layers.{i}.mlp"
            if name in modules:
                layer.mlp = MoELoraFFN(layer.mlp, config.expert_spec(name, hf_config), name)
                vllm_config.compilation_config.static_forward_context[name] = layer.mlp
                modules.remove(name)
        if modules:
            raise InputError(f"{self.source}: {min(modules)} has experts, and only FFNs get them in vLLM")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        state = read_adapter_weights(self.adapter, self.source)
        state = {key.removeprefix(_PREFIX): tensor for key, tensor in state.items()}
        trained = {key for key in state if _EXPERTS not in key}
        if self.tied and (key := next((k for k in trained if "embed_tokens" in k or "lm_head" in k), None)):
            raise InputError(f"{self.source}: {key} was trained, and the base ties it to another")
        of_base = ((name, state.pop(name, tensor)) for name, tensor in weights)
        loaded = super().load_weights(of_base)  # type: ignore[misc]
        for ffn in self.modules():
            if isinstance(ffn, MoELoraFFN):
                loaded |= self._load_experts(ffn, state)
        if state:
            raise InputError(f"{self.source}: {min(state)}: the base has no such tensor; is it the adapter's base?")
        return loaded

    def _load_experts(self, ffn: MoELoraFFN, state: dict[str, torch.Tensor]) -> set[str]:
        rank = ffn.down_proj.tp_rank
        names = set()
        for key, value in ffn.state_dict().items():
            if not key.startswith("moe_lora_"):
                continue
            name = f"{ffn.name}.{key}"
            matrix, _, projection = key.removeprefix("moe_lora_").partition(".")
            shape: Sequence[int] = value.shape
            if matrix != "router":
                shapes_of = ffn.spec.shared_shapes if matrix.startswith("shared_") else ffn.spec.shapes
                shape = shapes_of(ffn.features)[projection][matrix.endswith("B")]
            tensor = state.pop(name, None)
            if tensor is None or tensor.shape != shape:
                raise InputError(
                    f"{self.source}: {name} is {tensor if tensor is None else list(tensor.shape)}, its config and the "
                    f"base say {list(shape)}"
                )
            for dim, size in enumerate(value.shape):  # this process's part of f
                tensor = tensor if size == tensor.shape[dim] else tensor.narrow(dim, rank * size, size)
            value.copy_(tensor)
            names.add(name)
        return names


class MoELoraLlamaForCausalLM(_MoELora, LlamaForCausalLM):
    pass


class MoELoraMistralForCausalLM(_MoELora, MistralForCausalLM):
    pass


class MoELoraQwen2ForCausalLM(_MoELora, Qwen2ForCausalLM):
    pass


class MoELoraQwen3ForCausalLM(_MoELora, Qwen3ForCausalLM):
    pass
