"""
The hidden part of mixing "output" (see `dispatch.py` for the legend; f is the FFN's intermediate size).

`y = Σ_i g_i FFN_i(x)` needs each base projection once: gate and up of x are common to all experts, and down is linear,
`Σ g_i (W_d a_i + s B_i A_i a_i) = W_d (Σ g_i a_i) + s Σ g_i B_i A_i a_i`. The part in between works on [P, f] tensors
and determines speed and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .dispatch import Dispatch, Pairs, without_autocast_once
from .ffn_layout import FFNLayout


class PairInputs(NamedTuple):
    """The terms of the pre-activations of a part's pairs, by input projection in the layout's order."""

    pre: Sequence[Any]  # base outputs [T, f']
    h: Sequence[Any]  # scaled low-rank inputs [P, r]; None where a projection has no experts
    B: Sequence[Any]  # second matrices [n, r, f'], or None

    def flat(self) -> tuple[Any, ...]:
        """Return all tensors in one tuple: autograd functions do not accept nested tuples."""
        return (*self.pre, *self.h, *self.B)

    @classmethod
    def of(cls, flat: Sequence[Any]) -> PairInputs:
        """Return the inputs from the tuple of `flat`."""
        m = len(flat) // 3
        return cls(flat[:m], flat[m : 2 * m], flat[2 * m :])

    def activations(self, part: Pairs) -> list[torch.Tensor]:
        """Return, for each input projection, the base's output plus the update of the pair's expert, [P, f']."""
        return [
            part.spread(pre_TF) if h_PR is None or B_NRF is None else part.expand(h_PR, B_NRF, part.spread(pre_TF))
            for pre_TF, h_PR, B_NRF in zip(self.pre, self.h, self.B, strict=True)
        ]


def mixed_hidden(
    dispatch: Dispatch,
    layout: FFNLayout,
    ffn: nn.Module,
    inputs: Sequence[PairInputs],
    A_down: torch.Tensor | None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """
    Compute the mixed hidden activation from the base's pre-activations.

    Args:
        dispatch: the batch's dispatch.
        layout: the block's layout.
        ffn: the block, for its activation.
        inputs: the terms of the pre-activations, for each part of the dispatch.
        A_down: the first matrices of the down projection [n, r, f], or None.
        dropout: the probability of dropout on the input of `A_down`.

    Returns:
        `z = Σ_i g_i a_i` [T, f], and `A_down a` of the pairs of each part [P, r] (not yet weighted), or None.
    """
    act = layout.activation(ffn)
    keep = dispatch.k <= 2  # whether backward gets the pairs' tensors saved, or recomputes them
    totals: list[torch.Tensor] = []
    low: list[torch.Tensor] = []
    for part, of_part in zip(dispatch.parts, inputs, strict=True):
        tensors = (A_down, part.gates, *of_part.flat())
        needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        # With gradients, use the backward below. torch.compile derives its own.
        if needs_grad and not torch.compiler.is_compiling():
            z_TF, low_PR = _MixedHidden.apply(part, layout, act, keep, dropout, *tensors)
        else:
            a_PF = _activate(layout, act, of_part.activations(part))
            low_PR = None if A_down is None else part.shrink(F.dropout(a_PF, dropout) if dropout else a_PF, A_down)
            z_TF = part.collect(a_PF, gated=True)
        # Parts have different slots of the same tokens, so their gated sums add up.
        totals = [totals[0].add_(z_TF) if totals else z_TF]
        low.append(low_PR)
    return totals[0], (None if A_down is None else low)


def _activate(layout: FFNLayout, act: Any, pairs: Sequence[torch.Tensor]) -> torch.Tensor:
    gate_PF, up_PF = layout.split(pairs)
    a_PF = act(gate_PF)
    if up_PF is None:
        return a_PF
    # Overwrite the activation only if it is a new tensor: an identity returns its input.
    in_place = not torch.is_grad_enabled() and a_PF is not gate_PF
    return a_PF.mul_(up_PF) if in_place else a_PF * up_PF


class _MixedHidden(torch.autograd.Function):
    """
    One part's hidden activation, with a backward that saves little and works in place. With `keep` it saves the pairs'
    two [P, f] tensors (for k = 2 as many bytes as plain LoRA saves in an FFN). Otherwise it saves only the [T, f]
    pre-activations and recomputes the pairs from them.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Pairs, layout: FFNLayout, act: Any, keep: bool, dropout: float, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        A_down, gates, *flat = tensors
        inputs = PairInputs.of(flat)
        pairs = inputs.activations(part)
        a_PF = _activate(layout, act, pairs)
        # `A_down a`, after dropout. The mask is saved, not the dropped activation.
        low_PR = mask_PF = None
        if A_down is not None:
            kept_PF = a_PF
            if dropout:
                kept_PF, mask_PF = torch.native_dropout(a_PF, dropout, True)
            low_PR = part.shrink(kept_PF, A_down)
        ctx.part, ctx.layout, ctx.act, ctx.keep, ctx.scale = part, layout, act, keep, 1 / (1 - dropout)
        # For backward: the pairs' pre-activations [P, f'], or the base's [T, f'].
        kept = inputs._replace(pre=pairs) if keep else inputs
        ctx.save_for_backward(mask_PF, A_down, gates, *kept.flat())
        return part.collect(a_PF, gated=True), low_PR

    @staticmethod
    @without_autocast_once
    def backward(ctx: Any, dz_TF: torch.Tensor, d_low_PR: torch.Tensor | None) -> Any:
        part: Pairs = ctx.part
        mask_PF, A_down, _, *flat = ctx.saved_tensors
        kept = PairInputs.of(flat)
        # Forward again: the pairs' pre-activations, if they were not saved, and the activation with its graph.
        gate_PF, up_PF = ctx.layout.split(kept.pre if ctx.keep else kept.activations(part))
        with torch.enable_grad():
            leaf_PF = gate_PF.detach().requires_grad_()
            graph_PF = ctx.act(leaf_PF)
        act_PF = graph_PF.detach()
        a_PF = act_PF if up_PF is None else act_PF * up_PF
        # Backward of the gated sum, to the gates and to each pair's activation.
        da_PF = part.spread(dz_TF)
        d_gates = part.to_slots(torch.linalg.vecdot(a_PF, da_PF))
        da_PF.mul_(part.pair_gates())
        # Backward of `A_down a`, through the dropout if there is one.
        d_A_down = None
        if d_low_PR is not None:
            if mask_PF is None:
                d_A_down = part.outer(d_low_PR, a_PF)
                part.expand(d_low_PR, A_down, da_PF)
            else:
                d_A_down = part.outer(d_low_PR, a_PF * mask_PF * ctx.scale)
                da_PF.add_(part.expand(d_low_PR, A_down).mul_(mask_PF).mul_(ctx.scale))
        # Backward of the activation, to the pairs' pre-activations.
        d_up_PF = None
        if up_PF is not None:
            d_up_PF = torch.mul(da_PF, act_PF, out=a_PF)
            da_PF.mul_(up_PF)
        (d_gate_PF,) = torch.autograd.grad(graph_PF, leaf_PF, da_PF)
        d_pairs = ctx.layout.join(d_gate_PF, d_up_PF)
        # Backward of the pre-activations. In a first layer on a frozen embedding, the base's outputs need no gradient.
        wanted = PairInputs.of(ctx.needs_input_grad[-len(flat) :]).pre
        d_inputs = PairInputs(
            [part.collect(d_PF) if want else None for d_PF, want in zip(d_pairs, wanted, strict=True)],
            [None if B_NRF is None else part.shrink(d_PF, B_NRF) for d_PF, B_NRF in zip(d_pairs, kept.B, strict=True)],
            [None if h_PR is None else part.outer(h_PR, d_PF) for d_PF, h_PR in zip(d_pairs, kept.h, strict=True)],
        )
        return None, None, None, None, None, d_A_down, d_gates, *d_inputs.flat()
