"""
LoRA experts: on every projection, expert i adds `s·B_i A_i`.

Legend: T tokens, n experts, P pairs of (token, expert), r rank, d hidden size, f the FFN's intermediate size (f' the
output size of one input projection: 2f where gate and up are fused).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ...utils.expert_likeness import update_gram
from ...utils.messages import InputError
from ...utils.torch_contexts import is_autocast, without_autocast
from ..dispatch import Dispatch, statically_known
from ..dispatch_choice import BatchRoutes, tokens_at_once
from ..ffn_layout import FFNLayout
from ..moe_ffn_autograd import PairInputs, mixed_hidden
from .base import Experts, FFNHost, LinearHost, Matrices, Shapes

Product = Callable[[str, torch.Tensor], torch.Tensor]  # (name of a linear, its input) → its output


class LoraExperts(Experts):
    """
    `W_i = W + s·B_i A_i` with A_i [r, in] and B_i [out, r]. A is stored as [n, r, in] and B as [n, r, out]. Rows of B
    have size `out`, not r, so products read B in memory order.
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

    def each(self, A: torch.Tensor) -> torch.Tensor:
        """Return the first matrices as products need them: one for each expert, [n, r, in]."""
        return A

    # --- forward ---

    @classmethod
    def ffn_output(
        cls, ffn: FFNHost, adapters: Sequence[str], x_TD: torch.Tensor, h_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        layout, specs = ffn.layout, ffn.moe_lora_spec
        # Updates of several adapters add up, as in LoRA. An adapter that mixes complete outputs comes last, so all its
        # experts include the updates of the other adapters.
        if len(adapters) > 1:
            adapters = sorted(adapters, key=lambda adapter: specs[adapter].mixes_outputs(layout))
        routes = {adapter: ffn.route(adapter, x_TD, specs[adapter].mixes_outputs(layout)) for adapter in adapters}
        adapter, tokens = adapters[-1], x_TD.shape[0]
        last, spec = routes[adapter], specs[adapter]
        if len(routes) == 1 and last is not None and spec._decodes(ffn, adapter, last, x_TD.dtype):
            return spec._decoded(ffn, adapter, last, x_TD)

        # If each pair has its own activation, compute a large batch in slices.
        step = tokens_at_once(x_TD) if last is not None and last.mixes_outputs else tokens
        if tokens <= step:
            return cls._ffn_output(ffn, x_TD, routes)
        parts = [slice(start, start + step) for start in range(0, tokens, step)]
        return torch.cat([
            cls._ffn_output(ffn, x_TD[part], {name: of and of.of(part) for name, of in routes.items()})
            for part in parts
        ])  # fmt: skip

    @classmethod
    def _ffn_output(cls, ffn: FFNHost, x_TD: torch.Tensor, routes: Mapping[str, BatchRoutes | None]) -> torch.Tensor:
        """Return the output of routed tokens. `routes` maps each adapter to its routes; one that mixes outputs last."""
        layout, specs = ffn.layout, ffn.moe_lora_spec
        mixes = [
            (OutputMix if of and of.mixes_outputs else ProjectionMix)(specs[adapter], ffn, adapter, of, x_TD)
            for adapter, of in routes.items()
        ]
        _refuse_two_mixtures(mixes)

        # 1. The base's input projections. They read x, the same for all experts and adapters, so they run once.
        #    Experts only add low-rank updates to their outputs.
        pre = dict(zip(layout.inputs, ffn.input_projections(x_TD), strict=True))
        for mix in mixes:
            pre = mix.before(pre)

        # 2. The activation, once per token unless outputs are mixed, and the base's down projection. Down is linear, so
        #    it is applied to the gated sum of the experts' activations and also runs once.
        z_TF = mixes[-1].hidden(pre)
        down = ffn.projection(layout.down)
        y_TD, in_place = down(z_TF), may_overwrite(down)

        # 3. Each adapter's experts on the down projection.
        for mix in mixes:
            y_TD = mix.after(z_TF, y_TD, in_place)

        # 4. The block's own dropout, if it has one.
        return layout.drop(ffn.base_layer, y_TD)

    def linear_output(
        self, layer: LinearHost, adapter: str, x_TM: torch.Tensor, y_TM: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        routes = layer.route(adapter, x_TM)
        dispatch = None if routes is None else routes.dispatch(y_TM.dtype)
        base = self._with_shared(layer, adapter, x_TM, {"weight": y_TM})
        return self._updated(layer, adapter, dispatch, x_TM, base, in_place)["weight"]

    def mixes_outputs(self, layout: FFNLayout) -> bool:
        """
        Return whether each pair has its own activation. With experts only on the down projection, all activations are
        the base's, so both mixings are the same if gates sum to 1: return False.
        """
        if self.mixing != "output" or self.num_experts == 1:
            return False
        chosen = self.target_projections
        return chosen is None or not chosen.isdisjoint(layout.inputs) or self.sum_of_gates_counts

    def _decodes(self, ffn: FFNHost, adapter: str, routes: BatchRoutes, dtype: torch.dtype) -> bool:
        """
        Return whether `_decoded` applies: one token, by views or copies of its experts, without gradients, dropout or
        autocast.
        """
        if torch.is_grad_enabled() or not statically_known(routes.experts.shape[0] == 1):
            return False
        return routes.method(dtype) == "gather" and not (ffn.dropout_rate(adapter) or is_autocast(routes.gates))

    def _decoded(self, ffn: FFNHost, adapter: str, routes: BatchRoutes, x_1D: torch.Tensor) -> torch.Tensor:
        """
        Return the output of one token, without gradients. The code is straight-line, because Python takes most of the
        time here.
        """
        layout, block, mixes = ffn.layout, ffn.base_layer, routes.mixes_outputs
        outputs = ffn.input_projections(x_1D)
        if self.num_shared_experts:
            base = dict(zip(layout.inputs, outputs, strict=True))
            outputs = [*self._with_shared(ffn, adapter, x_1D, base).values()]
        dtype = outputs[-1].dtype
        one = routes.token(dtype)
        # Read the dicts of parameters: `getattr` of the modules around them is slow.
        A, B = (cast(dict[str, torch.Tensor], matrices._parameters) for matrices in ffn.expert_parameters(adapter))

        # Gate and up: [1, f], or with mixing "output" of every expert, [k, f].
        x_1D, hidden = x_1D.to(dtype), []
        h: Any  # products of A, as `one` needs them
        for name, y_1F in zip(layout.inputs, outputs, strict=True):
            if name in A:
                h = one.shrink_token(x_1D, self.each(A[name]))
                y_1F = one.expand_each(h, B[name], y_1F) if mixes else one.expand_collect(h, B[name], y_1F)
            elif mixes:
                y_1F = y_1F.expand(one.k, -1)
            hidden.append(y_1F)

        # The activation, and down.
        a = layout.hidden(block, hidden)
        z_1F = one.gates @ a if mixes else a
        y_1D = ffn.projection(layout.down)(z_1F)
        if self.num_shared_experts:
            y_1D = self._with_shared(ffn, adapter, z_1F, {layout.down: y_1D})[layout.down]
        if layout.down in A:
            A_down = self.each(A[layout.down])
            h = one.shrink_each(a, A_down) if mixes else one.shrink_token(a, A_down)
            y_1D = one.expand_collect(h, B[layout.down], y_1D)
        if mixes:
            y_1D = self._with_bias(ffn, one.gates, y_1D)
        return layout.drop(block, y_1D)

    # Everything below is computed in the dtype of the base's outputs, also under autocast. There it is autocast's
    # dtype, except for quantized linears, which return the dtype of their input.

    def _with_shared(
        self, layer: LinearHost, adapter: str, x_TM: torch.Tensor, base: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the base's outputs by projection, plus the LoRA of the shared experts."""
        if not self.num_shared_experts:
            return base
        return self._with_lora(layer, adapter, layer.shared_parameters(adapter), x_TM, base)

    def _with_lora(
        self, layer: LinearHost, adapter: str, matrices: Matrices, x_TM: torch.Tensor, base: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the base's outputs by projection, plus `s B A x` of one LoRA with matrices [1, r, …]."""
        A, B = matrices
        names, updated = [name for name in base if name in A], dict(base)
        dtype = next(iter(base.values())).dtype
        inputs = layer.dropped(adapter, x_TM.to(dtype), len(names))
        with without_autocast(x_TM):
            for name, own_TM in zip(names, inputs, strict=True):
                A_RM, B_RM = A[name][0].to(dtype), B[name][0].to(dtype)
                updated[name] = torch.addmm(base[name], (own_TM @ A_RM.T) * self.scaling, B_RM)
        return updated

    def _updated(
        self,
        layer: LinearHost,
        adapter: str,
        dispatch: Dispatch | None,
        x_TM: torch.Tensor,
        base: dict[str, torch.Tensor],
        in_place: bool,
    ) -> dict[str, torch.Tensor]:
        """
        Return the base's outputs by projection, with the experts' updates `s Σ_i g_i B_i A_i x` added, as mixing
        "projection" defines them. With `in_place`, the base's outputs may be overwritten.

        Args:
            dispatch: None for a linear with one LoRA and no router. Its update is added as PEFT adds it.
        """
        A, B = layer.expert_parameters(adapter)
        if dispatch is None:
            return self._with_lora(layer, adapter, (A, B), x_TM, base)
        names = [name for name in base if name in A]
        if not names:
            return base
        outputs = [base[name] for name in names]
        dtype = outputs[0].dtype
        x = layer.dropped(adapter, x_TM.to(dtype), len(names))
        A_of = [dispatch.cast(self.each(A[name]), dtype) for name in names]
        B_of = [dispatch.cast(B[name], dtype) for name in names]
        with without_autocast(x_TM):
            outputs = dispatch.update(x, A_of, B_of, outputs, in_place)
        return {**base, **dict(zip(names, outputs, strict=True))}

    def _with_bias(self, ffn: FFNHost, gates_TK: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
        """
        Return y with the bias of down counted Σ_i g_i times: it belongs to every expert, and the base layer adds it
        once.
        """
        bias = getattr(ffn.projection(ffn.layout.down), "bias", None) if self.sum_of_gates_counts else None
        if bias is None:
            return y_TD
        return y_TD + ((gates_TK.sum(-1, keepdim=True) - 1) * bias).to(y_TD.dtype)

    # --- an expert by itself, and compared with others ---

    def to_lora(self, A: torch.Tensor, B: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return A[expert], B[expert].T

    def from_loras(self, A: Sequence[torch.Tensor], B: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack(list(A)), torch.stack([B_OR.T for B_OR in B])

    def gram(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Return inner products of the updates `s·B_i A_i`."""
        return self.scaling**2 * update_gram(A, B)


class ProjectionMix:
    """
    One adapter in an FFN, with mixing "projection" or with a single expert: each projection of the base plus
    `s Σ_i g_i B_i A_i x`.

    Args:
        spec: the adapter's experts.
        ffn: the FFN.
        adapter: the adapter's name.
        routes: the tokens' experts and gates; None: all tokens have the single expert.
        x_TD: the tokens.
    """

    def __init__(
        self, spec: LoraExperts, ffn: FFNHost, adapter: str, routes: BatchRoutes | None, x_TD: torch.Tensor
    ) -> None:
        self.spec, self.ffn, self.adapter, self.routes, self.x_TD = spec, ffn, adapter, routes, x_TD
        self.dispatch: Dispatch | None = None

    def before(self, pre: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the pre-activations by projection with this adapter's updates."""
        pre = self._dispatched(pre)
        in_place = all(may_overwrite(self.ffn.projection(name)) for name in pre)
        return self.spec._updated(self.ffn, self.adapter, self.dispatch, self.x_TD, pre, in_place)

    def hidden(self, pre: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the input z [T, f] of the base's down projection, from the pre-activations of all adapters."""
        return self.ffn.layout.hidden(self.ffn.base_layer, [*pre.values()])

    def after(self, z_TF: torch.Tensor, y_TD: torch.Tensor, in_place: bool) -> torch.Tensor:
        """
        Return the FFN's output with this adapter's updates, from the down projection's input and output. With
        `in_place`, the output may be overwritten.
        """
        spec, down = self.spec, self.ffn.layout.down
        base = spec._with_shared(self.ffn, self.adapter, z_TF, {down: y_TD})
        return spec._updated(self.ffn, self.adapter, self.dispatch, z_TF, base, in_place)[down]

    def _dispatched(self, pre: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add the shared experts. Make the dispatch of the others, in the dtype of the base's outputs."""
        pre = self.spec._with_shared(self.ffn, self.adapter, self.x_TD, pre)
        if self.routes is not None:
            self.dispatch = self.routes.dispatch(pre[self.ffn.layout.up].dtype)
        return pre


class OutputMix(ProjectionMix):
    """
    One adapter in an FFN, with mixing "output": every pair of token and expert has its own activation a_i, because of
    the non-linearity between the projections.
    """

    dispatch: Dispatch

    def before(self, pre: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._dispatched(pre)

    def hidden(self, pre: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return `z = Σ g_i a_i` [T, f]. Keep `A_down a` of each part's pairs [P, r] for `after`."""
        ffn, dispatch, layout, of_base = self.ffn, self.dispatch, self.ffn.layout, [*pre.values()]
        A, B = ffn.expert_parameters(self.adapter)
        names, dtype = [name for name in pre if name in A], of_base[0].dtype

        # First come the low-rank inputs `s A_i x` [P, r], on all projections with experts …
        x = ffn.dropped(self.adapter, self.x_TD.to(dtype), len(names))
        with without_autocast(self.x_TD):
            each = self.spec.each
            low = dispatch.shrink_tokens(x, [dispatch.cast(each(A[name]), dtype) for name in names])

            # … then `a_i = act(pre + B_i h)`, their gated sum, and `A_down a_i` for the down projection's experts. All
            # three are one step, which saves little for backward.
            B_of = [dispatch.cast(B[name], dtype) if name in A else None for name in pre]
            A_down = dispatch.cast(each(A[layout.down]), dtype) if layout.down in A else None
            inputs = []
            for i, part in enumerate(dispatch.parts):
                h = {name: part.scaled(h_by_part[i]) for name, h_by_part in zip(names, low, strict=True)}
                inputs.append(PairInputs(of_base, [h.get(name) for name in pre], B_of))
            dropout = ffn.dropout_rate(self.adapter)
            z_TF, self.low = mixed_hidden(dispatch, layout, ffn.base_layer, inputs, A_down, dropout)
        return z_TF

    def after(self, z_TF: torch.Tensor, y_TD: torch.Tensor, in_place: bool) -> torch.Tensor:
        """Return the down projection's output for the mix, plus `s Σ_i g_i B_i A_i a_i`."""
        spec, ffn, down = self.spec, self.ffn, self.ffn.layout.down
        y_TD = spec._with_shared(ffn, self.adapter, z_TF, {down: y_TD})[down]
        if self.low is not None:
            B_NRD = self.dispatch.cast(ffn.expert_parameters(self.adapter)[1][down], y_TD.dtype)
            with without_autocast(y_TD):
                y_TD = self.dispatch.expand_collect(self.low, B_NRD, y_TD, in_place)
        return spec._with_bias(ffn, self.dispatch.gates, y_TD)


def _refuse_two_mixtures(mixes: Sequence[ProjectionMix]) -> None:
    """Raise if two adapters mix complete outputs."""
    if len(mixes) > 1 and isinstance(mixes[-2], OutputMix):
        raise InputError(
            f"MoE-LoRA: adapters {mixes[-2].adapter!r} and {mixes[-1].adapter!r} mix complete outputs of their "
            "experts, and those of two cannot be added as updates; activate one of them, or make all but one with "
            "mixing='projection'"
        )


def may_overwrite(projection: nn.Module) -> bool:
    """
    Return whether nothing else uses a base projection's output. The projection must be a plain linear without forward
    hooks or a replaced forward. Gradients must be off: in training, backward hooks and checkpoints may hold the output.
    """
    if torch.is_grad_enabled() or type(projection) is not nn.Linear:
        return False
    return not projection._forward_hooks and "forward" not in vars(projection)


def by_loop(
    x_D: torch.Tensor,
    gates: Mapping[int, torch.Tensor],
    ffn: Callable[[Product, torch.Tensor], torch.Tensor],
    base: Product,
    update: Callable[[str, torch.Tensor, int], torch.Tensor],
    mixes_outputs: bool,
) -> torch.Tensor:
    """
    Compute one token's output by a plain loop over its experts: the definition of the layer. `LoraExperts` computes the
    same for all tokens without the loop. Tests compare both.

    Args:
        x_D: the token.
        gates: its experts and their gates.
        ffn: `ffn(product, x)` returns the block's output, if `product(name, v)` returns the output of the linear `name`
            for v.
        base: the product of the base, `W v`.
        update: `update(name, v, i)` is `s B_i A_i v` of expert i.
        mixes_outputs: mixing "output"; else "projection".
    """
    if not mixes_outputs:  # the updates are mixed on each projection
        return ffn(lambda name, v: base(name, v) + sum(gate * update(name, v, i) for i, gate in gates.items()), x_D)

    y_D = torch.zeros_like(x_D[:1])
    for i, gate in gates.items():

        def ffn_i(x: torch.Tensor, i: int = i) -> torch.Tensor:  # the block with the weights `W + s B_i A_i`
            return ffn(lambda name, v: base(name, v) + update(name, v, i), x)

        y_D = y_D + gate * ffn_i(x_D)
    return y_D
