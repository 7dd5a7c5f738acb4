"""
LoRA experts: on every projection, expert i adds `s·B_i A_i`.

Legend: T tokens, n experts, P pairs of (token, expert), r rank, d hidden size, f the FFN's intermediate size (f' the
output size of one input projection: 2f where gate and up are fused).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ...utils.expert_merging import update_gram
from ...utils.messages import InputError
from ...utils.torch_contexts import without_autocast
from ..dispatch import Dispatch, plus_product
from ..ffn_layout import FFNLayout
from ..moe_ffn_autograd import PairInputs, mixed_hidden
from .base import Experts, FFNHost, LinearHost, Shapes


class LoraExperts(Experts):
    """
    `W_i = W + s·B_i A_i` with A_i [r, in] and B_i [out, r]. A is stored as [n, r, in] and B as [n, r, out] (with rows
    of `out`, not of r, so that products read B in memory order).
    """

    unread = ("bottleneck_size",)
    holds_loras = True

    def for_linear(self) -> Experts:
        return replace(self, target_projections=None)

    def shapes(self, projections: dict[str, tuple[int, int]]) -> dict[str, Shapes]:
        n, r, chosen = self.num_updates, self.rank, self.target_projections
        return {
            name: ((n, r, features_in), (n, r, features_out))
            for name, (features_in, features_out) in projections.items()
            if chosen is None or name in chosen
        }

    # --- forward ---

    @classmethod
    def ffn_output(
        cls, ffn: FFNHost, adapters: Sequence[str], x_TD: torch.Tensor, h_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        layout, done, z_TF = ffn.layout, [], None

        # 1. The base's input projections. They read x, which is the same for all experts and adapters, so they run
        #    once; experts only add low-rank updates to their outputs.
        pre = ffn.input_projections(x_TD)
        in_place = all(may_overwrite(ffn.projection(name)) for name in layout.inputs)

        # 2. Each adapter routes the tokens and adds its updates. As those of LoRAs, updates of several adapters add up:
        #    an adapter that mixes complete outputs comes last, so that all its experts have what others add.
        added = ffn.is_weighted
        mixes = {adapter: not added and ffn.moe_lora_spec[adapter]._mixes_outputs(layout) for adapter in adapters}
        if sum(mixes.values()) > 1:
            names = " and ".join(repr(adapter) for adapter in adapters if mixes[adapter])
            raise InputError(
                f"MoE-LoRA: adapters {names} mix complete outputs of their experts, and those of two cannot be added "
                "as updates; activate one of them, or make all but one with mixing='projection'"
            )
        for adapter in sorted(adapters, key=mixes.__getitem__):
            spec: LoraExperts = ffn.moe_lora_spec[adapter]
            pre = spec._with_shared(ffn, adapter, x_TD, dict(zip(layout.inputs, pre, strict=True)))
            dispatch, low = ffn.route(adapter, x_TD, pre[0].dtype, mixes[adapter]), None
            if dispatch is not None and mixes[adapter]:
                z_TF, low = spec._mixed(ffn, adapter, dispatch, x_TD, pre)
            else:  # mixing "projection": `Wx + s Σ g_i B_i A_i x` on each projection
                inputs = dict(zip(layout.inputs, pre, strict=True))
                pre = spec._updated(ffn, adapter, dispatch, x_TD, inputs, in_place)
            done.append((adapter, dispatch, low))

        # 3. The activation, once per token unless outputs are mixed, and the base's down projection. It is linear, so
        #    it is applied to the gated sum of the experts' activations and also runs once.
        if z_TF is None:
            z_TF = layout.hidden(ffn.base_layer, pre)
        y_TD = ffn.projection(layout.down)(z_TF)

        # 4. Each adapter's experts on the down projection.
        for adapter, dispatch, low in done:
            y_TD = ffn.moe_lora_spec[adapter]._after_down(ffn, adapter, dispatch, low, z_TF, y_TD, mixes[adapter])

        # 5. The block's own dropout, if it has one.
        return layout.drop(ffn.base_layer, y_TD)

    def linear_output(
        self, layer: LinearHost, adapter: str, x_TM: torch.Tensor, y_TM: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        dispatch = layer.route(adapter, x_TM, y_TM.dtype)
        (y_TM,) = self._with_shared(layer, adapter, x_TM, {"weight": y_TM})
        return self._updated(layer, adapter, dispatch, x_TM, {"weight": y_TM}, in_place)[0]

    def _mixes_outputs(self, layout: FFNLayout) -> bool:
        """
        Whether each pair has an activation of its own. With experts on the down projection alone, all are the base's,
        and both mixings the same.
        """
        chosen = self.target_projections
        on_inputs = chosen is None or not chosen.isdisjoint(layout.inputs)
        return self.num_experts > 1 and self.mixing == "output" and (on_inputs or self.sum_of_gates_counts)

    def _mixed(
        self, ffn: FFNHost, adapter: str, dispatch: Dispatch, x_TD: torch.Tensor, pre: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """
        Mixing "output": there is a non-linearity between the projections, so every pair has its own activation a_i.
        Returns `z = Σ g_i a_i` [T, f] and `A_down a` of each part's pairs [P, r], or None.
        """
        layout, dtype = ffn.layout, pre[0].dtype
        A_all, B_all = ffn.expert_parameters(adapter)
        names = [name for name in layout.inputs if name in A_all]

        # First come the low-rank inputs `s A_i x` [P, r], on all projections that have experts …
        x = ffn.dropped(adapter, x_TD.to(dtype), len(names))
        with without_autocast(x_TD):
            low = dispatch.shrink_tokens(x, [dispatch.cast(A_all[name], dtype) for name in names])

            # … then, in one step that saves little for backward, `a_i = act(pre + B_i h)`, their gated sum, and
            # `A_down a_i`, which the down projection's experts need for each pair.
            B = {name: dispatch.cast(B_all[name], dtype) for name in names}
            A_down = dispatch.cast(A_all[layout.down], dtype) if layout.down in A_all else None
            inputs = []
            for part, *low_of_part in zip(dispatch.parts, *low, strict=True):
                h = {name: part.scaled(h_PR) for name, h_PR in zip(names, low_of_part, strict=True)}
                inputs.append(PairInputs(pre, [h.get(p) for p in layout.inputs], [B.get(p) for p in layout.inputs]))
            dropout = ffn.dropout_rate(adapter)
            return mixed_hidden(dispatch, layout, ffn.base_layer, inputs, A_down, dropout)

    def _after_down(
        self,
        ffn: FFNHost,
        adapter: str,
        dispatch: Dispatch | None,
        low: list[torch.Tensor] | None,
        z_TF: torch.Tensor,
        y_TD: torch.Tensor,
        mixes_outputs: bool,
    ) -> torch.Tensor:
        """Step 4: add an adapter's change to the down projection's output."""
        name = ffn.layout.down
        down = ffn.projection(name)
        # The LoRA that serves every token is linear as the base's down projection is, so it runs once on the mix, too.
        (y_TD,) = self._with_shared(ffn, adapter, z_TF, {name: y_TD})
        if dispatch is None or not mixes_outputs:
            return self._updated(ffn, adapter, dispatch, z_TF, {name: y_TD}, may_overwrite(down))[0]
        if low is not None:
            B_NRD = dispatch.cast(ffn.expert_parameters(adapter)[1][name], y_TD.dtype)
            with without_autocast(y_TD):
                y_TD = dispatch.expand_collect(low, B_NRD, y_TD, may_overwrite(down))
        bias = getattr(down, "bias", None)
        if bias is not None and self.sum_of_gates_counts:
            # The bias belongs to every expert, so it counts Σ_i g_i times; the base layer has added it once.
            y_TD = y_TD + ((dispatch.gates.sum(-1, keepdim=True) - 1) * bias).to(y_TD.dtype)
        return y_TD

    def _with_shared(
        self, layer: LinearHost, adapter: str, x_TM: torch.Tensor, base: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """The base's outputs by projection, with the LoRA of the experts that serve every token."""
        if not self.num_shared_experts:
            return [*base.values()]
        return self._updated(layer, adapter, None, x_TM, base, shared=True)

    def _updated(
        self,
        layer: LinearHost,
        adapter: str,
        dispatch: Dispatch | None,
        x_TM: torch.Tensor,
        base: dict[str, torch.Tensor],
        in_place: bool = False,
        shared: bool = False,
    ) -> list[torch.Tensor]:
        """
        The base's outputs by projection, with `s Σ_i g_i B_i A_i x` added where a projection has experts.

        Everything is computed in the dtype of the base's output, also under autocast. There it is autocast's dtype,
        except for quantized linears, which return the dtype they are given. With `in_place` that output may be
        overwritten.
        """
        A_all, B_all = layer.shared_parameters(adapter) if shared else layer.expert_parameters(adapter)
        names = [name for name in base if name in A_all]
        if not names:
            return list(base.values())
        outputs = [base[name] for name in names]
        dtype = outputs[0].dtype
        x = layer.dropped(adapter, x_TM.to(dtype), len(names))
        cast = torch.Tensor.to if dispatch is None else dispatch.cast
        A, B = ([cast(M_all[name], dtype) for name in names] for M_all in (A_all, B_all))
        with without_autocast(x_TM):
            if dispatch is None:
                outputs = [
                    plus_product(y_TM, (x_TM @ A_1RM[0].T) * self.scaling, B_1RM[0], in_place)
                    for y_TM, x_TM, A_1RM, B_1RM in zip(outputs, x, A, B, strict=True)
                ]
            else:
                outputs = dispatch.update(x, A, B, outputs, in_place)
        return list({**base, **dict(zip(names, outputs, strict=True))}.values())

    # --- an expert by itself, and compared with others ---

    def to_lora(self, A: torch.Tensor, B: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return A[expert], B[expert].T

    def from_loras(self, A: Sequence[torch.Tensor], B: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack(list(A)), torch.stack([B_OR.T for B_OR in B])

    def gram(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Inner products of the updates `s·B_i A_i`."""
        return self.scaling**2 * update_gram(A, B)


def may_overwrite(projection: nn.Module) -> bool:
    """
    Whether nothing else uses a base projection's output. The projection must be a plain linear without forward hooks or
    a replaced forward, and gradients must be off: in training, backward hooks and checkpoints may hold the output.
    """
    replaced = projection._forward_hooks or "forward" in vars(projection)
    return type(projection) is nn.Linear and not replaced and not torch.is_grad_enabled()
