"""
Tuner layers: around an FFN block (`MoELoraFFN`) and around a single linear (`MoELoraLinear`).

They hold the adapters' parameters, route tokens and follow PEFT's contract. `experts` computes the experts
(`experts.lora.by_loop` is the definition). An FFN with LoRA experts i, from `MoELoraFFN.forward` on:

    x [T, d] ──┬── router: logits [T, n]
               │     └── gates g and experts i             [T, k]   MoELoraLayer.route; BatchRoutes.dispatch
               └── base: gate = W_g x, up = W_u x          [T, f]   MoELoraFFN.input_projections
    mixing "projection":
        gate, up += s Σ_i g_i B_i A_i x, B and A of each   [T, f]   ProjectionMix.before, Dispatch.update
        z = act(gate) · up                                 [T, f]   ProjectionMix.hidden, FFNLayout.hidden
        y = W_d z                                          [T, d]   base
        y += s Σ_i g_i B_i A_i z                           [T, d]   ProjectionMix.after, Dispatch.update
    mixing "output":
        h_i = s A_i x for gate and for up                  [P, r]   OutputMix.hidden, Dispatch.shrink_tokens
        a_i = act(gate + B_i h_i) · (up + B_i h_i)         [P, f]   OutputMix.hidden, moe_ffn_autograd.mixed_hidden
        z = Σ_i g_i a_i                                    [T, f]   OutputMix.hidden, moe_ffn_autograd.mixed_hidden
        y = W_d z                                          [T, d]   base
        y += s Σ_i g_i B_i A_i a_i                         [T, d]   OutputMix.after, Dispatch.expand_collect

For one token without gradients, `LoraExperts._decoded` computes everything after the router. With mixing "output", a
large batch is computed in slices of `tokens_at_once` tokens, from W_g x to y.

Legend: T tokens, n experts, k active experts, P = T·k pairs of token and expert, r rank, d hidden size, f the FFN's
intermediate size, s the updates' scaling.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import quantization_extra_repr, resolve_quantization_backend
from torch import nn

from ..routing.routers import Router, make_router
from ..utils.compat import private
from ..utils.messages import InputError
from .dispatch_choice import BatchRoutes
from .experts import Experts
from .experts.base import empty_parameters
from .experts.lora import may_overwrite
from .ffn_layout import FFNLayout
from .router_recorder import record_choice, recorded, steering_of, token_ids_for

_get_in_out_features = private("peft.tuners.tuners_utils", "_get_in_out_features")
_unsafe_view = torch.ops.aten._unsafe_view.default

MERGE_REFUSAL = (
    "MoE-LoRA cannot merge: each token has its own experts, so no single weight can replace them. Export the model to "
    "a native MoE checkpoint, or extract one expert with `moe_peft.expert_to_lora` and merge that."
)


class MoELoraLayer(BaseTunerLayer):
    """Base class of the tuner layers for FFNs and linears: their state and routing."""

    adapter_layer_names = (
        "moe_lora_A", "moe_lora_B", "moe_lora_shared_A", "moe_lora_shared_B", "moe_lora_router", "moe_lora_dropout",
    )  # fmt: skip
    other_param_names = ("moe_lora_spec",)

    base_layer: nn.Module
    in_features: int

    def _init_state(self, base_layer: nn.Module, projections: dict[str, tuple[int, int]], adapter_name: str) -> None:
        self.base_layer = base_layer
        self._projections = projections  # in and out features by name
        self._unit = math.gcd(*(size for features in projections.values() for size in features))
        self._active_adapter = adapter_name
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.moe_lora_A = nn.ModuleDict()
        self.moe_lora_B = nn.ModuleDict()
        self.moe_lora_shared_A = nn.ModuleDict()
        self.moe_lora_shared_B = nn.ModuleDict()
        self.moe_lora_router = nn.ModuleDict()
        self.moe_lora_dropout = nn.ModuleDict()
        self.moe_lora_spec: dict[str, Experts] = {}
        linear = self._base_linear()  # PEFT's status reports show how it is quantized
        self.quantization_backend = resolve_quantization_backend(linear, get_apply_tensor_subclass=_refuse_merge)

    def update_layer(self, adapter_name: str, spec: Experts, inference_mode: bool = False) -> None:
        """Add (or re-create) the experts and the router of `adapter_name`."""
        self.moe_lora_spec[adapter_name] = spec
        self.moe_lora_A[adapter_name], self.moe_lora_B[adapter_name] = empty_parameters(spec.shapes(self._projections))
        if shared := spec.shared_shapes(self._projections):
            self.moe_lora_shared_A[adapter_name], self.moe_lora_shared_B[adapter_name] = empty_parameters(shared)
        dropout = nn.Dropout(spec.lora_dropout) if spec.lora_dropout else nn.Identity()
        self.moe_lora_dropout[adapter_name] = dropout.train(self.training)
        if spec.num_experts > 1:
            self.put_router(adapter_name)
        self.reset_parameters(adapter_name)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def put_router(self, adapter_name: str) -> None:
        """Create a new router for the adapter, according to its spec."""
        spec = self.moe_lora_spec[adapter_name]
        router = make_router(self.in_features, spec.num_experts, spec.router)
        self.moe_lora_router[adapter_name] = router.train(self.training)

    def copy_buffers(self, adapter_name: str, other_name: str) -> None:
        """Copy the buffers of this adapter's router to the router of another adapter with the same spec."""
        if adapter_name in self.moe_lora_router:
            buffers = dict(self.router(other_name).named_buffers())
            for key, buffer in self.router(adapter_name).named_buffers():
                if not (buffer.is_meta or buffers[key].is_meta):
                    buffers[key].copy_(buffer)

    def router(self, adapter_name: str) -> Router:
        """Return the adapter's router. It exists only if the adapter has more than one expert."""
        return cast(Router, self.moe_lora_router[adapter_name])

    def reset_parameters(self, adapter_name: str) -> None:
        """Initialize the experts, as `MoELoraConfig.init_lora_weights` describes."""
        spec = self.moe_lora_spec[adapter_name]
        spec.reset(*self.expert_parameters(adapter_name))
        if spec.num_shared_experts:
            spec.reset(*self.shared_parameters(adapter_name))

    def expert_parameters(self, adapter_name: str) -> tuple[nn.ParameterDict, nn.ParameterDict]:
        """
        Return the adapter's A and B by projection ("weight" in a single linear). Their shapes depend on the kind of
        experts.
        """
        A, B = self.moe_lora_A[adapter_name], self.moe_lora_B[adapter_name]
        return cast(nn.ParameterDict, A), cast(nn.ParameterDict, B)

    def shared_parameters(self, adapter_name: str) -> tuple[nn.ParameterDict, nn.ParameterDict]:
        """Return A and B of the m shared experts by projection, [1, m·r, …] each. They exist only if m > 0."""
        A, B = self.moe_lora_shared_A[adapter_name], self.moe_lora_shared_B[adapter_name]
        return cast(nn.ParameterDict, A), cast(nn.ParameterDict, B)

    def projection(self, name: str) -> nn.Module:
        """Return a linear of the base by name."""
        raise NotImplementedError

    def running_adapters(self, x: torch.Tensor) -> list[str]:
        """Return the active adapters of this layer, or none if the layer is disabled."""
        running = [] if self.disable_adapters else [a for a in self.active_adapters if a in self.moe_lora_spec]
        for adapter in running:
            A = cast(nn.ParameterDict, self.moe_lora_A[adapter])
            if A[next(iter(A))].is_meta and not x.is_meta:  # products with meta tensors give arbitrary numbers
                raise InputError(
                    f"MoE-LoRA: adapter {adapter!r}: its experts are offloaded, and nothing brings them back; load the "
                    "adapter with a device_map of GPUs only"
                )
        return running

    def route(self, adapter_name: str, x_TD: torch.Tensor, mixes_outputs: bool = False) -> BatchRoutes | None:
        """
        Route hidden states. Returns each token's experts and gates, or None if the adapter has a single expert, used by
        every token.

        Args:
            mixes_outputs: whether the experts' complete outputs are mixed. Ignored under `weigh_experts`, where updates
                are summed as in LoRA.
        """
        spec = self.moe_lora_spec[adapter_name]
        if spec.num_experts == 1:
            return None
        router = self.router(adapter_name)
        logits_TN = recorded(router, router(x_TD, token_ids_for(router, x_TD)))
        steering, has_base = steering_of(self), spec.base_expert
        if steering is None:
            gates_TK, experts_TK = router.choose(logits_TN, spec.top_k, spec.normalize_top_k)
            record_choice(experts_TK, gates_TK)
        else:
            gates_TK, experts_TK = steering.route(logits_TN, spec.top_k, spec.normalize_top_k, router.choose)
            has_base, mixes_outputs = has_base or steering.has_base, mixes_outputs and steering.mixes_outputs
            # Expert -1 is the base: record it with gate 0.
            record_choice(experts_TK.clamp(min=0), gates_TK * (experts_TK >= 0) if steering.has_base else gates_TK)
        return BatchRoutes(
            experts_TK, gates_TK, spec.num_updates, spec.rank, self._unit, spec.scaling, mixes_outputs, has_base
        )

    def dropped(self, adapter_name: str, x_TM: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return one input for each of `count` projections. With dropout, each has its own mask, as in LoRA."""
        if not self.dropout_rate(adapter_name):
            return [x_TM] * count
        return [self.moe_lora_dropout[adapter_name](x_TM) for _ in range(count)]

    def dropout_rate(self, adapter_name: str) -> float:
        """
        Return the dropout rate of the module, not of the config: trainers set the module's rate to 0 to compare two
        passes.
        """
        dropout = self.moe_lora_dropout[adapter_name]
        return dropout.p if dropout.training and isinstance(dropout, nn.Dropout) else 0.0

    # --- PEFT's interface of a layer ---------------------------------------------------------------------------------

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device | None, torch.dtype | None]:
        return super()._get_base_layer_device_and_dtype(self._base_linear())

    def _base_linear(self) -> nn.Module:
        """Return the first of the base's linears."""
        return without_adapters(self.projection(next(iter(self._projections))))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(MERGE_REFUSAL)

    def unmerge(self) -> None:
        raise ValueError(f"There is nothing to unmerge. {MERGE_REFUSAL}")


def _refuse_merge(*args: Any) -> None:
    raise ValueError(MERGE_REFUSAL)


def without_adapters(module: nn.Module) -> nn.Module:
    """Return the base's module inside tuner layers."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def linear_features(module: nn.Module) -> tuple[int, int]:
    """Return the in and out features of any linear known to PEFT, including quantized and already adapted ones."""
    return _get_in_out_features(without_adapters(module))


def in_shape(y_TM: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """
    Return `y_TM` in the shape of `like`, for a layer's output. To autograd it is not a view: FSDP2 puts hooks on a
    module's output, and torch drops the hooks of a view changed in place.
    """
    return _unsafe_view(y_TM, like.shape) if torch.is_grad_enabled() else y_TM.view_as(like)


class MoELoraLinear(nn.Module, MoELoraLayer):
    """One linear layer with experts: `W x + s Σ_i g_i B_i A_i x`. With one expert, it is an ordinary LoRA."""

    def __init__(self, base_layer: nn.Module, adapter_name: str) -> None:
        super().__init__()
        self.in_features, self.out_features = linear_features(base_layer)
        self._init_state(base_layer, {"weight": (self.in_features, self.out_features)}, adapter_name)

    def update_layer(self, adapter_name: str, spec: Experts, inference_mode: bool = False) -> None:
        super().update_layer(adapter_name, spec.for_linear(), inference_mode)

    def projection(self, name: str) -> nn.Module:
        return self.base_layer

    def extra_repr(self) -> str:
        return quantization_extra_repr(self)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.base_layer(x, *args, **kwargs)
        adapters = self.running_adapters(x)
        if not adapters:
            return result
        x_TM = x.reshape(-1, x.shape[-1])
        y_TM = result.reshape(-1, result.shape[-1])
        in_place = may_overwrite(self.base_layer)
        for adapter in adapters:
            y_TM = self.moe_lora_spec[adapter].linear_output(self, adapter, x_TM, y_TM, in_place)
        return in_shape(y_TM, result)


class MoELoraFFN(nn.Module, MoELoraLayer):
    """
    An FFN block with experts. Updates of several active adapters add up, as in LoRA. Base projections run once per
    token, whatever top_k, the mixing and the number of adapters.
    """

    def __init__(self, base_layer: nn.Module, layout: FFNLayout, adapter_name: str) -> None:
        super().__init__()
        self.layout = layout
        projections = {name: linear_features(getattr(base_layer, name)) for name in layout.projections}
        self.in_features, self.out_features = projections[layout.up][0], projections[layout.down][1]
        self._init_state(base_layer, projections, adapter_name)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the block's output for x [..., d], plus `residual` [..., d] in layouts with a residual."""
        adapters = self.running_adapters(x)
        if not adapters:
            return self.base_layer(x) if residual is None else self.base_layer(x, residual)
        x_TD, y_TD, specs = x.reshape(-1, x.shape[-1]), None, self.moe_lora_spec
        # First the experts inside the FFN, then the experts after it.
        for needs_ffn in (False, True):
            if kind := [adapter for adapter in adapters if specs[adapter].needs_ffn == needs_ffn]:
                y_TD = specs[kind[0]].ffn_output(self, kind, x_TD, y_TD)
        assert y_TD is not None
        y = in_shape(y_TD, x)
        return y if residual is None else residual + y

    @property
    def weight(self) -> torch.Tensor:
        """Weight of the down projection (some models read their dtype from it)."""
        return cast(torch.Tensor, self.projection(self.layout.down).weight)

    def projection(self, name: str) -> nn.Module:
        return getattr(self.base_layer, name)

    def input_projections(self, x_TD: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs [T, f'] of the base's projections of the block's input."""
        block = self.base_layer
        return [getattr(block, name)(x_TD) for name in self.layout.inputs]

    def base_output(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the output [T, d] without adapters."""
        return self.layout.block(self.base_layer, x_TD)

    def extra_repr(self) -> str:
        return quantization_extra_repr(self)

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        if merge:
            self.merge()
        for name in self.layout.projections:  # PEFT does not look inside for layers of earlier adapters
            projection = self.projection(name)
            if isinstance(projection, MoELoraLinear):
                setattr(self.base_layer, name, without_adapters(projection))
        return self.base_layer
