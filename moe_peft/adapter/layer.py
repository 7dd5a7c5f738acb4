"""The tuner layers: experts and a router around one FFN block (`MoELoraFFN`) or one linear (`MoELoraLinear`)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..compat import get_in_out_features
from ..contexts import without_autocast
from ..routing.gates import Steering
from ..routing.routers import Router, make_router
from .choosing import make_dispatch
from .config import ExpertSpec
from .dispatch import Dispatch
from .ffn import FFNLayout
from .mixing import expert_hidden
from .recording import record_router_logits

# The parameters A [n, r, in] and B [n, r, out] of each projection.
Weights = dict[str, tuple[torch.Tensor, torch.Tensor]]

MERGE_REFUSAL = (
    "MoE-LoRA cannot merge: which experts are added depends on the token, so no single weight equals them. Export the "
    "model to a native MoE checkpoint, or take one expert out with `moe_peft.expert_to_lora` and merge that."
)


class MoELoraLayer(BaseTunerLayer):
    """
    State that FFN and linear layers share. Per adapter and projection, A is [n, r, in] and B is [n, r, out] (rows of
    `out`, not of r: the products read it as it lies).
    """

    adapter_layer_names = ("moe_lora_A", "moe_lora_B", "moe_lora_router", "moe_lora_dropout")
    other_param_names = ("moe_lora_spec",)

    base_layer: nn.Module
    in_features: int
    steering: Steering | None = None  # set while `force_experts` or `allow_experts` is on

    def _init_state(self, base_layer: nn.Module, shapes: dict[str, tuple[int, int]], adapter_name: str) -> None:
        self.base_layer = base_layer
        self._shapes = shapes
        self._unit = math.gcd(*(size for shape in shapes.values() for size in shape))
        self._active_adapter = adapter_name
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.moe_lora_A = nn.ModuleDict()
        self.moe_lora_B = nn.ModuleDict()
        self.moe_lora_router = nn.ModuleDict()
        self.moe_lora_dropout = nn.ModuleDict()
        self.moe_lora_spec: dict[str, ExpertSpec] = {}

    def update_layer(self, adapter_name: str, spec: ExpertSpec, inference_mode: bool = False) -> None:
        """Add (or make anew) the experts and the router of `adapter_name`."""
        chosen = spec.target_projections
        names = [p for p in self._shapes if chosen is None or p in chosen or isinstance(self, MoELoraLinear)]
        n, r = spec.num_experts, spec.r
        self.moe_lora_spec[adapter_name] = spec
        self.moe_lora_A[adapter_name] = nn.ParameterDict({p: torch.empty(n, r, self._shapes[p][0]) for p in names})
        self.moe_lora_B[adapter_name] = nn.ParameterDict({p: torch.empty(n, r, self._shapes[p][1]) for p in names})
        self.moe_lora_dropout[adapter_name] = nn.Dropout(spec.lora_dropout) if spec.lora_dropout else nn.Identity()
        if n > 1:
            self.put_router(adapter_name)
        self.reset_parameters(adapter_name)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def put_router(self, adapter_name: str) -> None:
        """Give the adapter a new router, as its spec says."""
        spec = self.moe_lora_spec[adapter_name]
        router = make_router(self.in_features, spec.num_experts, spec.router)
        router.register_forward_hook(record_router_logits)
        self.moe_lora_router[adapter_name] = router

    def router(self, adapter_name: str) -> Router:
        """The adapter's router; only where it has more than one expert."""
        return cast(Router, self.moe_lora_router[adapter_name])

    def reset_parameters(self, adapter_name: str) -> None:
        """Initial values of the experts as `LoraConfig.init_lora_weights` has them, each expert by itself."""
        spec = self.moe_lora_spec[adapter_name]
        A_all, B_all = self.expert_parameters(adapter_name)
        for A in A_all.values():
            if spec.init_lora_weights == "gaussian":
                nn.init.normal_(A, std=1 / spec.r)
            else:  # Kaiming uniform with a = √5, whose bound is 1/√fan_in
                nn.init.uniform_(A, -(A.shape[-1] ** -0.5), A.shape[-1] ** -0.5)
        for B in B_all.values():
            if spec.init_lora_weights is False:
                nn.init.uniform_(B, -(spec.r**-0.5), spec.r**-0.5)
            else:
                nn.init.zeros_(B)

    def expert_parameters(self, adapter_name: str) -> tuple[nn.ParameterDict, nn.ParameterDict]:
        """The adapter's A [n, r, in] and B [n, r, out] by projection ("weight" in a single linear)."""
        A, B = self.moe_lora_A[adapter_name], self.moe_lora_B[adapter_name]
        return cast(nn.ParameterDict, A), cast(nn.ParameterDict, B)

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device | None, torch.dtype | None]:
        projection = self._projection(next(iter(self._shapes)))
        if isinstance(projection, BaseTunerLayer):
            projection = projection.get_base_layer()
        return super()._get_base_layer_device_and_dtype(projection)

    def _projection(self, name: str) -> nn.Module:
        raise NotImplementedError

    def _running_adapters(self) -> list[str]:
        return [] if self.disable_adapters else [a for a in self.active_adapters if a in self.moe_lora_spec]

    def _route(
        self, adapter_name: str, x_TD: torch.Tensor, dtype: torch.dtype, mixes_outputs: bool = False
    ) -> Dispatch | None:
        """The batch's dispatch, for mixing whole outputs or single updates; None where the adapter has one expert."""
        spec = self.moe_lora_spec[adapter_name]
        if spec.num_experts == 1:
            return None
        router = self.router(adapter_name)
        logits_TN = router(x_TD)
        if self.steering is None:
            gates_TK, experts_TK = router.choose(logits_TN, spec.top_k, spec.normalize_top_k)
        else:
            gates_TK, experts_TK = self.steering.route(logits_TN, spec.top_k, spec.normalize_top_k, router.choose)
        return make_dispatch(
            experts_TK,
            gates_TK.to(dtype),
            spec.num_experts,
            spec.r,
            math.gcd(spec.r, self._unit),
            spec.scaling,
            mixes_outputs,
        )

    def _weights(self, adapter_name: str) -> Weights:
        """As they are stored, in float32 as a rule."""
        A_all, B_all = self.expert_parameters(adapter_name)
        return {name: (A, B_all[name]) for name, A in A_all.items()}

    def _updated(
        self,
        adapter_name: str,
        dispatch: Dispatch | None,
        weights: Weights,
        x_TM: torch.Tensor,
        base: dict[str, torch.Tensor],
        in_place: bool,
    ) -> list[torch.Tensor]:
        """
        `base + s Σ_i g_i B_i A_i x` for projections of x by name; base itself where one has no experts.

        Everything happens in the dtype of the base's output, also under autocast (whose dtype that is, but for
        quantized linears, which give back what they get); with `in_place` that output may be overwritten.
        """
        names = [name for name in base if name in weights]
        if not names:
            return list(base.values())
        dtype, of_names = base[names[0]].dtype, [base[name] for name in names]
        x = self._dropped(adapter_name, x_TM.to(dtype), len(names))
        A = [weights[name][0].to(dtype) for name in names]
        B = [weights[name][1].to(dtype) for name in names]
        with without_autocast(x_TM):
            if dispatch is not None:
                updated = dispatch.update(x, A, B, of_names, in_place)
            else:
                s, of_each = self.moe_lora_spec[adapter_name].scaling, zip(of_names, x, A, B, strict=True)
                updated = [torch.addmm(y_TM, (x_TM @ A_1RM[0].T) * s, B_1RM[0]) for y_TM, x_TM, A_1RM, B_1RM in of_each]
        return list({**base, **dict(zip(names, updated, strict=True))}.values())

    def _dropped(self, adapter_name: str, x_TM: torch.Tensor, count: int) -> list[torch.Tensor]:
        """An input for each of some projections: with dropout each has a mask of its own, as with LoRA."""
        if not self.training or not self.moe_lora_spec[adapter_name].lora_dropout:
            return [x_TM] * count
        return [self.moe_lora_dropout[adapter_name](x_TM) for _ in range(count)]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(MERGE_REFUSAL)

    def unmerge(self) -> None:
        raise ValueError(f"There is nothing to unmerge. {MERGE_REFUSAL}")

    def __repr__(self) -> str:
        return "moe_lora." + super().__repr__()


def linear_features(module: nn.Module) -> tuple[int, int]:
    """In and out features of any linear that PEFT knows, quantized ones and ones already adapted included."""
    return get_in_out_features(module.get_base_layer() if isinstance(module, BaseTunerLayer) else module)


def _may_overwrite(projection: nn.Module) -> bool:
    """
    Whether a base projection's output is ours alone: a plain linear's that no hook has seen, nor a forward put in its
    place; and outside training, where hooks of backward and checkpoints may hold it.
    """
    replaced = projection._forward_hooks or "forward" in vars(projection)
    return type(projection) is nn.Linear and not replaced and not torch.is_grad_enabled()


class MoELoraLinear(nn.Module, MoELoraLayer):
    """One linear layer with experts: `W x + s Σ_i g_i B_i A_i x`; with one expert, an ordinary LoRA."""

    def __init__(self, base_layer: nn.Module, adapter_name: str) -> None:
        super().__init__()
        self.in_features, self.out_features = linear_features(base_layer)
        self._init_state(base_layer, {"weight": (self.in_features, self.out_features)}, adapter_name)

    def _projection(self, name: str) -> nn.Module:
        return self.base_layer

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.base_layer(x, *args, **kwargs)
        adapters = self._running_adapters()
        if not adapters:
            return result
        x_TD = x.reshape(-1, x.shape[-1])
        y_TM = result.reshape(-1, result.shape[-1])
        in_place = _may_overwrite(self.base_layer)
        for adapter in adapters:
            dispatch = self._route(adapter, x_TD, y_TM.dtype)
            (y_TM,) = self._updated(adapter, dispatch, self._weights(adapter), x_TD, {"weight": y_TM}, in_place)
        return y_TM.view(result.shape)


class _Branch(NamedTuple):
    """One adapter's part of an FFN's forward."""

    z_TF: torch.Tensor  # its hidden activation
    dispatch: Dispatch | None  # None: one expert
    weights: Weights
    mixes_outputs: bool
    low: list[torch.Tensor] | None = None  # where outputs are mixed: A_down a of each pair


class MoELoraFFN(nn.Module, MoELoraLayer):
    """
    An FFN block with LoRA experts.

    Several active adapters add their displacements of the block's output. Base projections run once per token,
    whatever top_k, the mixing and the number of active adapters.
    """

    def __init__(self, base_layer: nn.Module, layout: FFNLayout, adapter_name: str) -> None:
        super().__init__()
        self.layout = layout
        shapes = {name: linear_features(getattr(base_layer, name)) for name in layout.projections}
        self.in_features, self.out_features = shapes[layout.up][0], shapes[layout.down][1]
        self._init_state(base_layer, shapes, adapter_name)

    @property
    def weight(self) -> torch.Tensor:
        """The down projection's weight (some models read the dtype there)."""
        return cast(torch.Tensor, self._projection(self.layout.down).weight)

    def _projection(self, name: str) -> nn.Module:
        return getattr(self.base_layer, name)

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        if merge:
            self.merge()
        for name in self.layout.projections:  # PEFT does not look inside for layers of adapters that came first
            projection = self._projection(name)
            if isinstance(projection, MoELoraLinear):
                setattr(self.base_layer, name, cast(MoELoraLayer, projection).get_base_layer())
        return self.base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapters = self._running_adapters()
        if not adapters:
            return self.base_layer(x)
        x_TD = x.reshape(-1, x.shape[-1])
        inputs = [self._projection(name) for name in self.layout.inputs]
        pre = [projection(x_TD) for projection in inputs]
        in_place = len(adapters) == 1 and all(map(_may_overwrite, inputs))
        branches = [self._branch(adapter, x_TD, pre, in_place) for adapter in adapters]
        z_TF = branches[0].z_TF
        for branch in branches[1:]:
            z_TF = z_TF + branch.z_TF - self.layout.hidden(self.base_layer, pre)
        y_TD = self._projection(self.layout.down)(z_TF)
        for adapter, branch in zip(adapters, branches, strict=True):
            y_TD = self._after_down(adapter, branch, y_TD)
        return self.layout.drop(self.base_layer, y_TD).view(x.shape)

    def _branch(self, adapter_name: str, x_TD: torch.Tensor, pre: list[torch.Tensor], in_place: bool) -> _Branch:
        """One adapter's work from the FFN's input to its hidden activation."""
        layout, weights, dtype = self.layout, self._weights(adapter_name), pre[0].dtype
        mixes_outputs = self._mixes_outputs(adapter_name, weights)
        dispatch = self._route(adapter_name, x_TD, dtype, mixes_outputs)
        if dispatch is None or not mixes_outputs:
            base = dict(zip(layout.inputs, pre, strict=True))
            updated = self._updated(adapter_name, dispatch, weights, x_TD, base, in_place)
            return _Branch(layout.hidden(self.base_layer, updated), dispatch, weights, mixes_outputs)
        names = [name for name in layout.inputs if name in weights]
        B = [weights[name][1].to(dtype) if name in weights else None for name in layout.inputs]
        A_down = weights[layout.down][0].to(dtype) if layout.down in weights else None
        p = self.moe_lora_spec[adapter_name].lora_dropout if self.training else 0.0
        x = self._dropped(adapter_name, x_TD.to(dtype), len(names))
        with without_autocast(x_TD):
            low = dispatch.shrink_tokens(x, [weights[name][0].to(dtype) for name in names])
            low_of = {name: [h_PR * dispatch.scaling for h_PR in h] for name, h in zip(names, low, strict=True)}
            h = [low_of.get(name) for name in layout.inputs]
            z_TF, low_down = expert_hidden(dispatch, layout, self.base_layer, pre, h, B, A_down, p)
        return _Branch(z_TF, dispatch, weights, mixes_outputs, low_down)

    def _after_down(self, adapter_name: str, branch: _Branch, y_TD: torch.Tensor) -> torch.Tensor:
        """Add what an adapter changes about the down projection's output."""
        name, dispatch = self.layout.down, branch.dispatch
        down = self._projection(name)
        in_place = _may_overwrite(down)
        if dispatch is None or not branch.mixes_outputs:
            return self._updated(adapter_name, dispatch, branch.weights, branch.z_TF, {name: y_TD}, in_place)[0]
        if branch.low is not None:
            with without_autocast(y_TD):
                y_TD = dispatch.expand_collect(branch.low, branch.weights[name][1].to(y_TD.dtype), y_TD, in_place)
        bias = getattr(down, "bias", None)
        if bias is not None and not self.moe_lora_spec[adapter_name].normalize_top_k:
            # The bias belongs to every expert, so it counts Σ_i g_i times; the base layer has added it once.
            y_TD = y_TD + ((dispatch.gates.sum(-1, keepdim=True) - 1) * bias).to(y_TD.dtype)
        return y_TD

    def _mixes_outputs(self, adapter_name: str, weights: Weights) -> bool:
        """Whether whole outputs are mixed, and not the updates of single projections."""
        spec = self.moe_lora_spec[adapter_name]
        if spec.num_experts == 1 or spec.mixing == "projection":
            return False
        # With experts on the down projection alone, all hidden activations are the base's: both mixings are one.
        return not spec.normalize_top_k or any(name in weights for name in self.layout.inputs)
