"""
Our experts on vLLM's FFNs and linears.

vLLM computes q, k and v in one linear, and gate and up in one linear. Here, as in the adapter, each projection has
separate experts, and each single linear has a separate router. Under tensor parallelism, a process has a part of the
FFN's intermediate features and of the heads.

Legend: T tokens, n experts, r rank, d hidden size, f the FFN's intermediate size, m a width (in or out features).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.utils.torch_utils import direct_register_custom_op

from ..adapter.dispatch_choice import BatchRoutes
from ..adapter.experts import Experts
from ..adapter.experts.base import empty_parameters
from ..adapter.ffn_layout import FFNLayout
from ..routing.routers import Router, make_router

_ADAPTER = "default"


class Segment(NamedTuple):
    """Consecutive features, and the part of them on this process."""

    full: int
    start: int
    size: int


Axis = Sequence[Segment]  # features of a projection's input or output


class ExpertTensor(NamedTuple):
    """
    A tensor of experts or of a router.

    Args:
        own: this process's part of the tensor.
        shape: shape of the whole tensor, as in the adapter's file.
        axis: features of the dimension that is split among processes.
    """

    own: torch.Tensor
    shape: Sequence[int]
    axis: Axis = ()

    @torch.no_grad()
    def load(self, tensor: torch.Tensor) -> None:
        """Copy this process's part of a whole tensor."""
        for dim, size in enumerate(self.own.shape):
            if size != self.shape[dim]:
                pieces = tensor.split([segment.full for segment in self.axis], dim)
                own = [p.narrow(dim, s.start, s.size) for p, s in zip(pieces, self.axis, strict=True)]
                tensor = torch.cat(own, dim)
        self.own.copy_(tensor)


def full_size(axis: Axis) -> int:
    return sum(segment.full for segment in axis)


def own_size(axis: Axis) -> int:
    return sum(segment.size for segment in axis)


def axes_of(linear: Any, names: Sequence[str]) -> dict[str, tuple[Axis, Axis]]:
    """
    Return the in and out features of each projection of one of vLLM's linears.

    Args:
        names: names of the projections in the adapter: one for each of the linear's outputs, or one for all.
    """
    if isinstance(linear, RowParallelLinear):
        size = linear.input_size_per_partition
        of_input = [Segment(linear.input_size, linear.tp_rank * size, size)]
        return dict.fromkeys(names, (of_input, [Segment(linear.output_size, 0, linear.output_size)]))
    of_input = [Segment(linear.input_size, 0, linear.input_size)]
    if isinstance(linear, QKVParallelLinear):
        kv_rank, widths = linear.tp_rank // linear.num_kv_head_replicas, (linear.head_size, linear.v_head_size)
        outputs = [_heads(linear.total_num_heads, linear.num_heads, linear.head_size, linear.tp_rank)] + [
            _heads(linear.total_num_kv_heads, linear.num_kv_heads, width, kv_rank) for width in widths
        ]
    else:
        sizes = linear.output_partition_sizes
        outputs = [Segment(size * linear.tp_size, linear.tp_rank * size, size) for size in sizes]
    of_names = [outputs] if len(names) == 1 else [[segment] for segment in outputs]
    return {name: (of_input, axis) for name, axis in zip(names, of_names, strict=True)}


def _heads(total: int, own: int, width: int, rank: int) -> Segment:
    return Segment(total * width, rank * own * width, own * width)


class Host(nn.Module):
    """
    Experts and router of one module, as a `LinearHost` or an `FFNHost` with a single adapter.

    Args:
        name: the module's name in the adapter.
        spec: the settings of the experts.
        axes: in and out features by projection ("weight" for a single linear).
        router_input: d, the width of the router's input.
    """

    def __init__(self, name: str, spec: Experts, axes: dict[str, tuple[Axis, Axis]], router_input: int) -> None:
        super().__init__()
        self.name, self.spec, self.moe_lora_spec, self.axes = name, spec, {_ADAPTER: spec}, axes
        full, own = ({p: (size(a), size(b)) for p, (a, b) in axes.items()} for size in (full_size, own_size))
        self._shapes = spec.shapes(full), spec.shared_shapes(full)
        self._unit = math.gcd(*(size for sizes in own.values() for size in sizes))
        self.moe_lora_A, self.moe_lora_B = empty_parameters(spec.shapes(own))
        self.moe_lora_shared_A, self.moe_lora_shared_B = empty_parameters(spec.shared_shapes(own))
        self.moe_lora_router: Router | None = None
        if spec.num_experts > 1:
            self.moe_lora_router = make_router(router_input, spec.num_experts, spec.router).float()
        self.requires_grad_(False)

    def tensors(self) -> Iterator[tuple[str, ExpertTensor]]:
        """Yield all tensors by their names in this module."""
        for key, own in self.state_dict(keep_vars=True).items():
            matrix, _, projection = key.removeprefix("moe_lora_").partition(".")
            if matrix == "router":
                yield key, ExpertTensor(own, own.shape)
            elif matrix in ("A", "B", "shared_A", "shared_B"):
                is_B, is_shared = matrix.endswith("B"), matrix.startswith("shared_")
                axes = self.axes.get(projection, ((), ()))  # bottlenecks are not split
                yield key, ExpertTensor(own, self._shapes[is_shared][projection][is_B], axes[is_B])

    # --- interface for experts ---

    def expert_parameters(self, adapter: str) -> tuple[nn.ParameterDict, nn.ParameterDict]:
        return self.moe_lora_A, self.moe_lora_B

    def shared_parameters(self, adapter: str) -> tuple[nn.ParameterDict, nn.ParameterDict]:
        return self.moe_lora_shared_A, self.moe_lora_shared_B

    def dropped(self, adapter: str, x_TM: torch.Tensor, count: int) -> list[torch.Tensor]:
        return [x_TM] * count

    def dropout_rate(self, adapter: str) -> float:
        return 0.0

    def router_input(self, x_TM: torch.Tensor) -> torch.Tensor:
        return x_TM

    def route(self, adapter: str, x_TM: torch.Tensor, mixes_outputs: bool = False) -> BatchRoutes | None:
        spec, router = self.spec, self.moe_lora_router
        if router is None:
            return None
        gates_TK, experts_TK = router.choose(router(self.router_input(x_TM)), spec.top_k, spec.normalize_top_k)
        return BatchRoutes(
            experts_TK, gates_TK, spec.num_updates, spec.rank, self._unit, spec.scaling, mixes_outputs, spec.base_expert
        )


# --- FFNs ---


class _DenseFFN:
    """vLLM's FFN as experts call it. Its linears return no bias, and its activation is not fused."""

    def __init__(self, ffn: VllmMoELoraFFN, activation: str) -> None:
        self._parts = ffn.gate_up_proj, ffn.act_fn, ffn.down_proj
        self.act_fn = ACT2FN[activation]

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_up_proj, act_fn, down_proj = self._parts
        return down_proj(act_fn(gate_up_proj(x_TD)))


class VllmMoELoraFFN(Host):
    """
    vLLM's FFN with experts. It replaces vLLM's module and keeps the names of its parts.

    Args:
        mlp: vLLM's FFN.
        inputs: names of the input projections in the adapter: gate and up, or one name for both.
        activation: transformers' name of the activation.
    """

    gate_up_proj: Any
    down_proj: Any

    def __init__(self, name: str, spec: Experts, mlp: Any, inputs: Sequence[str], activation: str) -> None:
        axes = {**axes_of(mlp.gate_up_proj, inputs), **axes_of(mlp.down_proj, ["down_proj"])}
        super().__init__(name, spec, axes, mlp.gate_up_proj.input_size)
        self.gate_up_proj, self.down_proj, self.act_fn = mlp.gate_up_proj, mlp.down_proj, mlp.act_fn
        self.gate_up_proj.return_bias = self.down_proj.return_bias = False
        self.fused = len(inputs) == 1
        gate, up = (None, inputs[0]) if self.fused else inputs
        self.layout = FFNLayout(gate=gate, up=up, down="down_proj", act="act_fn", fused=self.fused)
        self.base_layer = _DenseFFN(self, activation)
        # Under tensor parallelism, the processes' partial outputs are added up once, at the end. Cohere's layers do it
        # themselves, together with the attention's. Only bottlenecks read the FFN's complete output.
        tp_size, layer_reduces = self.down_proj.tp_size, not self.down_proj.reduce_results
        self.reduces = tp_size > 1 and not spec.needs_ffn and not layer_reduces
        self.copies = tp_size if spec.needs_ffn and layer_reduces else 1  # complete outputs that the layer adds up
        self.down_proj.reduce_results = spec.needs_ffn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.vllm.moe_lora_ffn(x, self.name)

    def output(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the FFN's output [T, d]."""
        y_TD = type(self.spec).ffn_output(self, [_ADAPTER], x_TD)
        if self.copies > 1:
            return y_TD / self.copies
        return tensor_model_parallel_all_reduce(y_TD) if self.reduces else y_TD

    def projection(self, name: str) -> nn.Module:
        return self.down_proj if name == self.layout.down else self.gate_up_proj

    def input_projections(self, x_TD: torch.Tensor) -> Sequence[torch.Tensor]:
        pre = self.gate_up_proj(x_TD)
        return [pre] if self.fused else pre.chunk(2, dim=-1)

    def base_output(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x_TD)


# --- single linears ---


class _LinearHost(Host):
    """Host of one projection of a linear."""

    def __init__(self, name: str, spec: Experts, axes: tuple[Axis, Axis], gathers: bool) -> None:
        super().__init__(name, spec.for_linear(), {"weight": axes}, full_size(axes[0]))
        self.gathers = gathers

    def router_input(self, x_TM: torch.Tensor) -> torch.Tensor:
        return tensor_model_parallel_all_gather(x_TM) if self.gathers else x_TM


class VllmMoELoraLinears(nn.Module):
    """
    Experts of one of vLLM's linears. A hook adds their updates to the linear's output, so the linear's weights keep
    their names.

    Args:
        linear: vLLM's linear; this module becomes its part `moe_lora`.
        name: the linear's name in vLLM's model.
        specs: the settings of the experts by the module's name in the adapter; modules without experts are left out.
        projections: the adapter's names of the linear's projections, in order.
    """

    def __init__(self, linear: Any, name: str, specs: dict[str, Experts], projections: Sequence[str]) -> None:
        super().__init__()
        axes = axes_of(linear, projections)
        in_parts = isinstance(linear, RowParallelLinear) and linear.tp_size > 1
        self.widths = [own_size(of_output) for _, of_output in axes.values()]
        self.hosts = nn.ModuleList()
        self.key, self.columns = f"{name}.moe_lora", []
        for column, projection in enumerate(projections):
            if projection in specs:
                self.hosts.append(_LinearHost(projection, specs[projection], axes[projection], in_parts))
                self.columns.append(column)
        # The processes' partial outputs are added up after the experts' updates.
        self.reduces = in_parts and linear.reduce_results
        if self.reduces:
            linear.reduce_results = False
        linear.moe_lora = self
        linear.register_forward_hook(_add_experts)

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the experts' updates for x [T, in] to the linear's output y [T, out]."""
        parts = y.split(self.widths, dim=-1)
        for host, column in zip(self.hosts, self.columns, strict=True):
            part_TM = parts[column]
            updated_TM = host.spec.linear_output(host, _ADAPTER, x, part_TM, True)  # type: ignore[operator,union-attr]
            if updated_TM is not part_TM:
                part_TM.copy_(updated_TM)


def _add_experts(linear: Any, args: tuple[torch.Tensor, ...], output: Any) -> Any:
    y, *bias = output if isinstance(output, tuple) else (output,)
    torch.ops.vllm.moe_lora_linears(y, args[0], linear.moe_lora.key)
    if linear.moe_lora.reduces:
        y = tensor_model_parallel_all_reduce(y)
    return (y, *bias) if isinstance(output, tuple) else y


# --- operators ---
#
# One operator for each module. It is opaque to a compiler, so the dispatch of its experts (`choose_method`) is chosen
# for each number of tokens, when a CUDA graph is captured or the step runs. vLLM calls its own MoE in the same way.


def _moe_lora_ffn(x: torch.Tensor, name: str) -> torch.Tensor:
    return get_forward_context().no_compile_layers[name].output(x)


def _moe_lora_ffn_fake(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)


def _moe_lora_linears(y: torch.Tensor, x: torch.Tensor, name: str) -> None:
    get_forward_context().no_compile_layers[name].add_to(y, x)


def _moe_lora_linears_fake(y: torch.Tensor, x: torch.Tensor, name: str) -> None:
    return None


direct_register_custom_op("moe_lora_ffn", _moe_lora_ffn, fake_impl=_moe_lora_ffn_fake)
direct_register_custom_op("moe_lora_linears", _moe_lora_linears, mutates_args=["y"], fake_impl=_moe_lora_linears_fake)
