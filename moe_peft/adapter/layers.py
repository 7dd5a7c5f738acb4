"""
The base class of the tuner layers and the layer around a single linear; `ffn_layer.py` has that around an FFN.

The tuner layer around one FFN block. `MoELoraFFN` shows the whole computation of a batch: `_with_loras` step by step
with LoRA experts, `_with_bottlenecks` with PESC's.

Legend: T tokens, n experts, k active experts, P = T·k pairs of (token, expert), r rank, d hidden size, f the FFN's
intermediate size (f' the output size of one input projection: 2f where gate and up are fused), b (in suffixes B) the
size of bottleneck experts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import quantization_extra_repr, resolve_quantization_backend
from torch import nn

from ..routing.gates import Steering
from ..routing.routers import Router, make_router
from ..utils.compat import private
from ..utils.torch_contexts import without_autocast
from .config import ExpertSpec
from .dispatch import Dispatch, make_dispatch
from .ffn_layout import FFNLayout
from .moe_ffn_autograd import PairInputs, mixed_hidden
from .router_recorder import record_choice, recorded, token_ids_for

# --- layer -----------------------------------------------------------------------------------------------------------

_get_in_out_features = private("peft.tuners.tuners_utils", "_get_in_out_features")
_unsafe_view = torch.ops.aten._unsafe_view.default

# The parameters A [n, r, in] and B [n, r, out] of each projection.
Weights = dict[str, tuple[torch.Tensor, torch.Tensor]]

MERGE_REFUSAL = (
    "MoE-LoRA cannot merge: each token has its own experts, so no single weight can replace them. Export the model to "
    "a native MoE checkpoint, or extract one expert with `moe_peft.expert_to_lora` and merge that. With "
    "expert_type='bottleneck' neither is possible: keep the adapter."
)


class MoELoraLayer(BaseTunerLayer):
    """
    State that FFN and linear layers share. For each adapter and projection, A is [n, r, in] and B is [n, r, out] (with
    rows of `out`, not of r, so that products read B in memory order).
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
        linear = self._base_linear()  # PEFT's status reports show how it is quantized
        self.quantization_backend = resolve_quantization_backend(linear, get_apply_tensor_subclass=_refuse_merge)

    def update_layer(self, adapter_name: str, spec: ExpertSpec, inference_mode: bool = False) -> None:
        """Add (or re-create) the experts and the router of `adapter_name`."""
        shapes, n, r = self._expert_shapes(spec), spec.num_experts, spec.r
        self.moe_lora_spec[adapter_name] = spec
        self.moe_lora_A[adapter_name] = nn.ParameterDict({p: torch.empty(n, r, of) for p, (of, _) in shapes.items()})
        self.moe_lora_B[adapter_name] = nn.ParameterDict({p: torch.empty(n, r, to) for p, (_, to) in shapes.items()})
        self.moe_lora_dropout[adapter_name] = nn.Dropout(spec.lora_dropout) if spec.lora_dropout else nn.Identity()
        if n > 1:
            self.put_router(adapter_name)
        self.reset_parameters(adapter_name)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def _expert_shapes(self, spec: ExpertSpec) -> dict[str, tuple[int, int]]:
        """In and out features of each part that gets experts, by name."""
        return self._shapes

    def put_router(self, adapter_name: str) -> None:
        """Give the adapter a new router according to its spec."""
        spec = self.moe_lora_spec[adapter_name]
        router = make_router(self.in_features, spec.num_experts, spec.router)
        for other in self.moe_lora_router.values():  # TRL makes an adapter's reference by a copy of its parameters
            if type(other) is type(router) and other.num_experts == router.num_experts:
                own = dict(router.named_buffers())
                for name, buffer in other.named_buffers():
                    if not (buffer.is_meta or own[name].is_meta):
                        own[name].copy_(buffer)
        self.moe_lora_router[adapter_name] = router.train(self.training)

    def router(self, adapter_name: str) -> Router:
        """The adapter's router, which exists only if it has more than one expert."""
        return cast(Router, self.moe_lora_router[adapter_name])

    def reset_parameters(self, adapter_name: str) -> None:
        """Initialise each expert separately, as `LoraConfig.init_lora_weights` describes."""
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
        """
        The adapter's A [n, r, in] and B [n, r, out] by projection ("weight" in a single linear), or D and Uᵀ
        [n, b, d] as "bottleneck".
        """
        A, B = self.moe_lora_A[adapter_name], self.moe_lora_B[adapter_name]
        return cast(nn.ParameterDict, A), cast(nn.ParameterDict, B)

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device | None, torch.dtype | None]:
        return super()._get_base_layer_device_and_dtype(self._base_linear())

    def _base_linear(self) -> nn.Module:
        """The first of the base's linears."""
        projection = self._projection(next(iter(self._shapes)))
        return projection.get_base_layer() if isinstance(projection, BaseTunerLayer) else projection

    def _projection(self, name: str) -> nn.Module:
        raise NotImplementedError

    def _running_adapters(self) -> list[str]:
        return [] if self.disable_adapters else [a for a in self.active_adapters if a in self.moe_lora_spec]

    def _route(
        self, adapter_name: str, x_TD: torch.Tensor, dtype: torch.dtype, mixes_outputs: bool = False
    ) -> Dispatch | None:
        """
        Route hidden states. Returns the batch's dispatch, which knows each (token, expert) pair and its gate, or None
        if the adapter has a single expert, which every token gets.
        """
        spec = self.moe_lora_spec[adapter_name]
        if spec.num_experts == 1:
            return None
        router = self.router(adapter_name)
        logits_TN = router(x_TD, token_ids_for(router, x_TD)) if router.by_token_id else router(x_TD)
        logits_TN = recorded(router, logits_TN)
        if self.steering is None:
            gates_TK, experts_TK = router.choose(logits_TN, spec.top_k, spec.normalize_top_k)
        else:
            gates_TK, experts_TK = self.steering.route(logits_TN, spec.top_k, spec.normalize_top_k, router.choose)
        record_choice(experts_TK, gates_TK)
        unit = math.gcd(spec.r, self._unit)
        return make_dispatch(
            experts_TK, gates_TK.to(dtype), spec.num_experts, spec.r, unit, spec.scaling, mixes_outputs
        )

    def _weights(self, adapter_name: str) -> Weights:
        """The experts' weights as they are stored, usually in float32."""
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
        `base + s Σ_i g_i B_i A_i x` for each named projection of x; `base` itself if it has no experts.

        Everything is computed in the dtype of the base's output, also under autocast. There it is autocast's dtype,
        except for quantized linears, which return the dtype they are given. With `in_place` that output may be
        overwritten.
        """
        names = [name for name in base if name in weights]
        if not names:
            return list(base.values())
        dtype, of_names = base[names[0]].dtype, [base[name] for name in names]
        x, A, B = self._factors(adapter_name, weights, names, x_TM, dtype)
        with without_autocast(x_TM):
            if dispatch is not None:
                updated = dispatch.update(x, A, B, of_names, in_place)
            else:
                s, of_each = self.moe_lora_spec[adapter_name].scaling, zip(of_names, x, A, B, strict=True)
                updated = [torch.addmm(y_TM, (x_TM @ A_1RM[0].T) * s, B_1RM[0]) for y_TM, x_TM, A_1RM, B_1RM in of_each]
        return list({**base, **dict(zip(names, updated, strict=True))}.values())

    def _factors(
        self, adapter_name: str, weights: Weights, names: list[str], x_TM: torch.Tensor, dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Each named projection's input (with dropout), A and B, in the dtype of the products."""
        x = self._dropped(adapter_name, x_TM.to(dtype), len(names))
        A, B = zip(*(weights[name] for name in names), strict=True) if names else ((), ())
        return x, [M.to(dtype) for M in A], [M.to(dtype) for M in B]

    def _dropped(self, adapter_name: str, x_TM: torch.Tensor, count: int) -> list[torch.Tensor]:
        """An input for each of `count` projections: with dropout, each has its own mask, as in LoRA."""
        if not self.training or not self.moe_lora_spec[adapter_name].lora_dropout:
            return [x_TM] * count
        return [self.moe_lora_dropout[adapter_name](x_TM) for _ in range(count)]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(MERGE_REFUSAL)

    def unmerge(self) -> None:
        raise ValueError(f"There is nothing to unmerge. {MERGE_REFUSAL}")


def _refuse_merge(*args: Any) -> None:
    raise ValueError(MERGE_REFUSAL)


def linear_features(module: nn.Module) -> tuple[int, int]:
    """In and out features of any linear that PEFT knows, including quantized and already adapted ones."""
    return _get_in_out_features(module.get_base_layer() if isinstance(module, BaseTunerLayer) else module)


def may_overwrite(projection: nn.Module) -> bool:
    """
    Whether nothing else uses a base projection's output. The projection must be a plain linear without forward hooks or
    a replaced forward, and gradients must be off: in training, backward hooks and checkpoints may hold the output.
    """
    replaced = projection._forward_hooks or "forward" in vars(projection)
    return type(projection) is nn.Linear and not replaced and not torch.is_grad_enabled()


def in_shape(y_TM: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """
    `y_TM` in another's shape, for a layer's output. It is no view to autograd: FSDP2 has hooks on what a module
    returns, and torch drops those of a view that is changed in place.
    """
    return _unsafe_view(y_TM, like.shape)


class MoELoraLinear(nn.Module, MoELoraLayer):
    """One linear layer with experts: `W x + s Σ_i g_i B_i A_i x`; with one expert, an ordinary LoRA."""

    def __init__(self, base_layer: nn.Module, adapter_name: str) -> None:
        super().__init__()
        self.in_features, self.out_features = linear_features(base_layer)
        self._init_state(base_layer, {"weight": (self.in_features, self.out_features)}, adapter_name)

    def _projection(self, name: str) -> nn.Module:
        return self.base_layer

    def extra_repr(self) -> str:
        return quantization_extra_repr(self)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.base_layer(x, *args, **kwargs)
        adapters = self._running_adapters()
        if not adapters:
            return result
        x_TD = x.reshape(-1, x.shape[-1])
        y_TM = result.reshape(-1, result.shape[-1])
        in_place = may_overwrite(self.base_layer)
        for adapter in adapters:
            dispatch = self._route(adapter, x_TD, y_TM.dtype)
            (y_TM,) = self._updated(adapter, dispatch, self._weights(adapter), x_TD, {"weight": y_TM}, in_place)
        return in_shape(y_TM, result)


# --- ffn layer -------------------------------------------------------------------------------------------------------


class _Branch(NamedTuple):
    """What one adapter has computed before the down projection."""

    z_TF: torch.Tensor  # its hidden activation
    dispatch: Dispatch | None  # None: a single expert
    weights: Weights
    mixes_outputs: bool
    low: list[torch.Tensor] | None = None  # with mixing "output": A_down a of each part's pairs, [P, r]


# The name that bottleneck experts have in an adapter's parameters, where LoRA experts have a projection's.
BOTTLENECK = "bottleneck"


class MoELoraFFN(nn.Module, MoELoraLayer):
    """
    An FFN block with LoRA experts on its projections, or bottleneck experts behind it.

    With several active adapters, the changes that each makes to the block's output add up. Base projections run once
    per token, whatever top_k, the mixing and the number of active adapters (twice with adapters of both types).
    """

    def __init__(self, base_layer: nn.Module, layout: FFNLayout, adapter_name: str) -> None:
        super().__init__()
        self.layout = layout
        shapes = {name: linear_features(getattr(base_layer, name)) for name in layout.projections}
        self.in_features, self.out_features = shapes[layout.up][0], shapes[layout.down][1]
        self._init_state(base_layer, shapes, adapter_name)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The block's output for x [..., d]; layouts with `residual` add that, of the same shape."""
        adapters = self._running_adapters()
        if not adapters:
            return self.base_layer(x) if residual is None else self.base_layer(x, residual)
        y = self._adapted(adapters, x)
        return y if residual is None else residual + y

    def _adapted(self, adapters: list[str], x: torch.Tensor) -> torch.Tensor:
        """The block's output, without a residual."""
        x_TD = x.reshape(-1, x.shape[-1])
        behind = [a for a in adapters if self.moe_lora_spec[a].expert_type == "bottleneck"]
        if not behind:
            return in_shape(self._with_loras(adapters, x_TD), x)

        # Bottleneck experts take the block as it is: they read its output.
        h_TD = self.layout.block(self.base_layer, x).reshape(x_TD.shape)
        outputs = [self._with_bottlenecks(adapter, x_TD, h_TD) for adapter in behind]
        if len(behind) < len(adapters):
            outputs.append(self._with_loras([a for a in adapters if a not in behind], x_TD))
        y_TD = outputs[0]
        for other_TD in outputs[1:]:
            y_TD = y_TD + other_TD - h_TD
        return in_shape(y_TD, x)

    def _with_loras(self, adapters: list[str], x_TD: torch.Tensor) -> torch.Tensor:
        """The block's output with the LoRA experts of `adapters` on its projections, [T, d]."""
        # 1. The base's input projections. They read x, which is the same for all experts and adapters, so they run
        #    once; experts only add low-rank updates to their outputs.
        inputs = [self._projection(name) for name in self.layout.inputs]
        pre = [projection(x_TD) for projection in inputs]

        # 2. Each adapter routes the tokens and computes its own hidden activation. With a single adapter, nothing else
        #    reads the base's outputs, so updates may be added in place.
        in_place = len(adapters) == 1 and all(map(may_overwrite, inputs))
        branches = [self._hidden(adapter, x_TD, pre, in_place) for adapter in adapters]

        # 3. The base's down projection. It is linear, so it is applied to the gated sum of the experts' activations and
        #    also runs once. With several adapters, the changes that each makes to the base's activation add up.
        z_TF = branches[0].z_TF
        for branch in branches[1:]:
            z_TF = z_TF + branch.z_TF - self.layout.hidden(self.base_layer, pre)
        y_TD = self._projection(self.layout.down)(z_TF)

        # 4. Each adapter's experts on the down projection.
        for adapter, branch in zip(adapters, branches, strict=True):
            y_TD = self._after_down(adapter, branch, y_TD)

        # 5. The block's own dropout, if it has one.
        return self.layout.drop(self.base_layer, y_TD)

    def _hidden(self, adapter_name: str, x_TD: torch.Tensor, pre: list[torch.Tensor], in_place: bool) -> _Branch:
        """Step 2: one adapter's hidden activation, from the FFN's input and the base's `pre` [T, f']."""
        layout, weights, dtype = self.layout, self._weights(adapter_name), pre[0].dtype
        mixes_outputs = self._mixes_outputs(adapter_name, weights)

        # 2a. Router logits, gates and experts of each token, and the method by which this batch is computed.
        dispatch = self._route(adapter_name, x_TD, dtype, mixes_outputs)

        # 2b. Mixing "projection" (and a single expert): `Wx + s Σ g_i B_i A_i x` on each projection, then the
        #     activation, once per token.
        names = [name for name in layout.inputs if name in weights]
        if dispatch is None or not mixes_outputs:
            base = dict(zip(layout.inputs, pre, strict=True))
            updated = self._updated(adapter_name, dispatch, weights, x_TD, base, in_place)
            return _Branch(layout.hidden(self.base_layer, updated), dispatch, weights, mixes_outputs)

        # 2c. Mixing "output": there is a non-linearity between the projections, so every pair has its own activation
        #     a_i. First come its low-rank inputs `s A_i x` [P, r], on all projections that have experts …
        x, A, B = self._factors(adapter_name, weights, names, x_TD, dtype)
        with without_autocast(x_TD):
            low = dispatch.shrink_tokens(x, A)

            # 2d. … then, in one step that saves little for backward, `a_i = act(pre + B_i h)`, their gated sum
            #     `z = Σ g_i a_i`, and `A_down a_i`, which the down projection's experts need for each pair (step 4).
            B_of = dict(zip(names, B, strict=True))
            A_down = weights[layout.down][0].to(dtype) if layout.down in weights else None
            inputs = []
            for low_of_part in zip(*low, strict=True) if low else [()] * len(dispatch.parts):
                h = {name: h_PR * dispatch.scaling for name, h_PR in zip(names, low_of_part, strict=True)}
                inputs.append(PairInputs(pre, [h.get(p) for p in layout.inputs], [B_of.get(p) for p in layout.inputs]))
            dropout = self.moe_lora_spec[adapter_name].lora_dropout if self.training else 0.0
            z_TF, low_down = mixed_hidden(dispatch, layout, self.base_layer, inputs, A_down, dropout)
        return _Branch(z_TF, dispatch, weights, mixes_outputs, low_down)

    def _after_down(self, adapter_name: str, branch: _Branch, y_TD: torch.Tensor) -> torch.Tensor:
        """Step 4: add an adapter's change to the down projection's output."""
        name, dispatch = self.layout.down, branch.dispatch
        down = self._projection(name)
        in_place = may_overwrite(down)
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
        """Whether whole outputs are mixed, rather than the updates of single projections."""
        spec = self.moe_lora_spec[adapter_name]
        if spec.num_experts == 1 or spec.mixing == "projection":
            return False
        # With experts on the down projection alone, all hidden activations are the base's: both mixings are the same.
        return not spec.normalize_top_k or any(name in weights for name in self.layout.inputs)

    def _with_bottlenecks(self, adapter_name: str, x_TD: torch.Tensor, h_TD: torch.Tensor) -> torch.Tensor:
        """
        `Σ_i g_i (U_i GELU(D_i h) + h)`, [T, d], for the output h of the block: the whole of PESC's layer (Wu et al.,
        2024). The residual is `(Σ_i g_i) h`, which is h where gates sum to 1.
        """
        dispatch = self._route(adapter_name, x_TD, h_TD.dtype)
        D_NBD, U_NBD = (weights[BOTTLENECK].to(h_TD.dtype) for weights in self.expert_parameters(adapter_name))
        inputs = self._dropped(adapter_name, h_TD, 1)  # one mask for all experts; the residual has none
        with without_autocast(h_TD):
            if dispatch is None:
                return torch.addmm(h_TD, F.gelu(inputs[0] @ D_NBD[0].T), U_NBD[0])
            (low,) = dispatch.shrink_tokens(inputs, [D_NBD])
            if not self.moe_lora_spec[adapter_name].normalize_top_k:
                h_TD = h_TD * dispatch.gates.sum(-1, keepdim=True)
            return dispatch.expand_collect([F.gelu(low_PB) for low_PB in low], U_NBD, h_TD)

    # --- what PEFT needs of a layer ----------------------------------------------------------------------------------

    @property
    def weight(self) -> torch.Tensor:
        """The down projection's weight (some models read their dtype from it)."""
        return cast(torch.Tensor, self._projection(self.layout.down).weight)

    def _projection(self, name: str) -> nn.Module:
        return getattr(self.base_layer, name)

    def extra_repr(self) -> str:
        return quantization_extra_repr(self)

    def update_layer(self, adapter_name: str, spec: ExpertSpec, inference_mode: bool = False) -> None:
        if spec.expert_type == "bottleneck":
            spec = spec.bottleneck()
        super().update_layer(adapter_name, spec, inference_mode)

    def _expert_shapes(self, spec: ExpertSpec) -> dict[str, tuple[int, int]]:
        if spec.expert_type == "bottleneck":
            return {BOTTLENECK: (self.out_features, self.out_features)}
        chosen = spec.target_projections
        return {name: shape for name, shape in self._shapes.items() if chosen is None or name in chosen}

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        if merge:
            self.merge()
        for name in self.layout.projections:  # PEFT does not look inside for layers of earlier adapters
            projection = self._projection(name)
            if isinstance(projection, MoELoraLinear):
                setattr(self.base_layer, name, cast(MoELoraLayer, projection).get_base_layer())
        return self.base_layer
