"""
The tuner layer around one FFN block. `MoELoraFFN` shows the whole computation of a batch: `_with_loras` step by step
with LoRA experts, `_with_bottlenecks` with PESC's.

Legend: T tokens, n experts, k active experts, P = T·k pairs of (token, expert), r rank, d hidden size, f the FFN's
intermediate size (f' the output size of one input projection: 2f where gate and up are fused), b (in suffixes B) the
size of bottleneck experts.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from peft.utils import quantization_extra_repr
from torch import nn

from ..contexts import without_autocast
from .config import ExpertSpec
from .dispatch import Dispatch
from .ffn import FFNLayout
from .layer import MoELoraLayer, MoELoraLinear, Weights, in_shape, linear_features, may_overwrite
from .mixing import PairInputs, mixed_hidden


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
