"""
LoRA experts: on every projection, expert i adds `s·B_i A_i`.

Legend: T tokens, n experts, P pairs of (token, expert), r rank, d hidden size, f the FFN's intermediate size (f' the
output size of one input projection: 2f where gate and up are fused).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

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
        """Return the output of routed tokens. `routes` maps each adapter to its routes."""
        layout, specs, done, z_TF = ffn.layout, ffn.moe_lora_spec, [], None

        # 1. The base's input projections. They read x, the same for all experts and adapters, so they run once.
        #    Experts only add low-rank updates to their outputs.
        pre = dict(zip(layout.inputs, ffn.input_projections(x_TD), strict=True))

        # 2. Each adapter adds its updates.
        for adapter, of_adapter in routes.items():
            spec: LoraExperts = specs[adapter]
            pre, low = spec._with_shared(ffn, adapter, x_TD, pre), None
            dispatch = None if of_adapter is None else of_adapter.dispatch(pre[layout.up].dtype)
            if dispatch is None or not dispatch.mixes_outputs:  # `Wx + s Σ g_i B_i A_i x` on each projection
                in_place = all(may_overwrite(ffn.projection(name)) for name in pre)
                pre = spec._updated(ffn, adapter, dispatch, x_TD, pre, in_place)
            elif z_TF is None:
                z_TF, low = spec._mixed(ffn, adapter, dispatch, x_TD, pre)
            else:
                raise InputError(
                    f"MoE-LoRA: adapters {done[-1][0]!r} and {adapter!r} mix complete outputs of their experts, and "
                    "those of two cannot be added as updates; activate one of them, or make all but one with "
                    "mixing='projection'"
                )
            done.append((adapter, dispatch, low))

        # 3. The activation, once per token unless outputs are mixed, and the base's down projection. Down is linear, so
        #    it is applied to the gated sum of the experts' activations and also runs once.
        if z_TF is None:
            z_TF = layout.hidden(ffn.base_layer, [*pre.values()])
        down = ffn.projection(layout.down)
        y_TD, in_place = down(z_TF), may_overwrite(down)

        # 4. Each adapter's experts on the down projection.
        for adapter, dispatch, low in done:
            of_down = specs[adapter]._with_shared(ffn, adapter, z_TF, {layout.down: y_TD})
            if dispatch is None or not dispatch.mixes_outputs:
                (y_TD,) = specs[adapter]._updated(ffn, adapter, dispatch, z_TF, of_down, in_place).values()
            else:
                y_TD = specs[adapter]._after_down(ffn, adapter, dispatch, low, of_down[layout.down], in_place)

        # 5. The block's own dropout, if it has one.
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
        for name, y_1F in zip(layout.inputs, outputs, strict=True):
            if name in A:
                h = one.shrink_token(x_1D, A[name])
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
            h = one.shrink_each(a, A[layout.down]) if mixes else one.shrink_token(a, A[layout.down])
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
        Return the base's outputs by projection, plus `s Σ_i g_i B_i A_i x` on projections with experts (mixing
        "projection"). With `in_place`, the base's outputs may be overwritten.
        """
        matrices = A, _ = layer.expert_parameters(adapter)
        if dispatch is None:
            return self._with_lora(layer, adapter, matrices, x_TM, base)
        names = [name for name in base if name in A]
        if not names:
            return base
        outputs = [base[name] for name in names]
        dtype = outputs[0].dtype
        x = layer.dropped(adapter, x_TM.to(dtype), len(names))
        A_of, B_of = ([dispatch.cast(M[name], dtype) for name in names] for M in matrices)
        with without_autocast(x_TM):
            outputs = dispatch.update(x, A_of, B_of, outputs, in_place)
        return {**base, **dict(zip(names, outputs, strict=True))}

    def _mixed(
        self, ffn: FFNHost, adapter: str, dispatch: Dispatch, x_TD: torch.Tensor, base: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """
        Compute the hidden activation of mixing "output". Every pair has its own activation a_i, because of the
        non-linearity between the projections. Returns `z = Σ g_i a_i` [T, f] and `A_down a` of each part's pairs
        [P, r], or None.
        """
        layout, pre = ffn.layout, [*base.values()]
        A, B = ffn.expert_parameters(adapter)
        names, dtype = [name for name in base if name in A], pre[0].dtype

        # First come the low-rank inputs `s A_i x` [P, r], on all projections with experts …
        x = ffn.dropped(adapter, x_TD.to(dtype), len(names))
        with without_autocast(x_TD):
            low = dispatch.shrink_tokens(x, [dispatch.cast(A[name], dtype) for name in names])

            # … then `a_i = act(pre + B_i h)`, their gated sum, and `A_down a_i` for the down projection's experts. All
            # three are one step, which saves little for backward.
            B_of = [dispatch.cast(B[name], dtype) if name in A else None for name in base]
            A_down = dispatch.cast(A[layout.down], dtype) if layout.down in A else None
            inputs = []
            for i, part in enumerate(dispatch.parts):
                h = {name: part.scaled(h_by_part[i]) for name, h_by_part in zip(names, low, strict=True)}
                inputs.append(PairInputs(pre, [h.get(name) for name in base], B_of))
            return mixed_hidden(dispatch, layout, ffn.base_layer, inputs, A_down, ffn.dropout_rate(adapter))

    def _after_down(
        self,
        ffn: FFNHost,
        adapter: str,
        dispatch: Dispatch,
        low: list[torch.Tensor] | None,
        y_TD: torch.Tensor,
        in_place: bool,
    ) -> torch.Tensor:
        """Return the down projection's output for the mix, plus `s Σ_i g_i B_i A_i a_i` (mixing "output")."""
        down = ffn.layout.down
        if low is not None:
            B_NRD = dispatch.cast(ffn.expert_parameters(adapter)[1][down], y_TD.dtype)
            with without_autocast(y_TD):
                y_TD = dispatch.expand_collect(low, B_NRD, y_TD, in_place)
        return self._with_bias(ffn, dispatch.gates, y_TD)

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
