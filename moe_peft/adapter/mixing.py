"""
The hidden part of mixing "output" (see `dispatch.py` for the legend; f is the FFN's intermediate size).

`y = Σ_i g_i FFN_i(x)` needs each base projection once: gate and up of x are common to all experts, and down is linear,
`Σ g_i (W_d a_i + s B_i A_i a_i) = W_d (Σ g_i a_i) + s Σ g_i B_i A_i a_i`. What lies between works on [P, f] tensors
and decides speed and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .dispatch import Dispatch

Tensors = Sequence[torch.Tensor]
OptionalTensors = Sequence[torch.Tensor | None]


def expert_hidden(
    dispatch: Dispatch,
    combine: Callable[[list[torch.Tensor]], torch.Tensor],
    pre: Tensors,
    h: OptionalTensors,
    B: OptionalTensors,
    A_down: torch.Tensor | None,
    dropout: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    From the base's pre-activations to the mixed hidden activation.

    Args:
        combine: the activation, a list of [P, f'] (one per input projection) to [P, f].
        pre: base outputs [T, f'] of the input projections.
        h: per input projection the scaled low-rank inputs [P, r], or None where it has no experts.
        B: per input projection the second matrices [n, r, f'], or None.
        A_down: the first matrices of the down projection [n, r, f], or None.
        dropout: applied to the input of `A_down`.

    Returns:
        `z = Σ_i g_i a_i` [T, f], and `A_down a` of each pair [P, r] (not yet weighted), or None.
    """
    gates_P1 = dispatch.pair_gates()
    tensors = (A_down, gates_P1, *pre, *h, *B)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if needs_grad and dropout is None and not torch.compiler.is_compiling():
        return _ExpertHidden.apply(dispatch, combine, len(pre), *tensors)
    a_PF = combine(_pair_activations(dispatch, pre, h, B))
    hd_PR = None if A_down is None else dispatch.shrink(a_PF if dropout is None else dropout(a_PF), A_down)
    return dispatch.collect(a_PF * gates_P1), hd_PR


def _pair_activations(dispatch: Dispatch, pre: Tensors, h: OptionalTensors, B: OptionalTensors) -> list[torch.Tensor]:
    """Per input projection: the base's output plus the update of the pair's expert, [P, f']."""
    return [
        dispatch.spread(pre_TF) if h_PR is None else dispatch.expand(h_PR, B_NRF) + dispatch.spread(pre_TF)
        for pre_TF, h_PR, B_NRF in zip(pre, h, B, strict=True)
    ]


class _ExpertHidden(torch.autograd.Function):
    """
    `expert_hidden` with a backward that keeps little: two [P, f] tensors per FFN (for k = 2 as many bytes as plain LoRA
    keeps there) or, above two slots, only the [T, f] pre-activations, from which it computes the pairs again.
    """

    @staticmethod
    def forward(ctx: Any, dispatch: Dispatch, combine: Any, inputs: int, *tensors: torch.Tensor | None) -> Any:
        A_down, gates_P1, *rest = tensors
        pre, h, B = rest[:inputs], rest[inputs : 2 * inputs], rest[2 * inputs :]
        pairs = _pair_activations(dispatch, pre, h, B)
        a_PF = combine(pairs)
        hd_PR = None if A_down is None else dispatch.shrink(a_PF, A_down)
        z_TF = dispatch.collect(a_PF * gates_P1)
        ctx.dispatch, ctx.combine, ctx.inputs = dispatch, combine, inputs
        ctx.save_for_backward(A_down, gates_P1, *(pairs if dispatch.k <= 2 else pre), *h, *B)
        return z_TF, hd_PR

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz_TF: torch.Tensor, dhd_PR: torch.Tensor | None) -> Any:
        dispatch: Dispatch = ctx.dispatch
        A_down, gates_P1, *rest = ctx.saved_tensors
        kept, h, B = rest[: ctx.inputs], rest[ctx.inputs : 2 * ctx.inputs], rest[2 * ctx.inputs :]
        pairs = kept if dispatch.k <= 2 else _pair_activations(dispatch, kept, h, B)
        with torch.enable_grad():
            leaves = [pair.detach().requires_grad_() for pair in pairs]
            graph_PF = ctx.combine(leaves)
        a_PF = graph_PF.detach()
        da_PF = dispatch.spread(dz_TF)
        d_gates = torch.linalg.vecdot(a_PF, da_PF).unsqueeze(-1)
        da_PF = da_PF * gates_P1
        d_A_down = None
        if A_down is not None and dhd_PR is not None:
            dhd_PR = dhd_PR.contiguous()
            d_A_down = dispatch.outer(dhd_PR, a_PF)
            da_PF += dispatch.expand(dhd_PR, A_down)
        d_pairs = torch.autograd.grad(graph_PF, leaves, da_PF)
        d_pre = [dispatch.collect(d_PF) for d_PF in d_pairs]
        d_h = [None if B_NRF is None else dispatch.shrink(d_PF, B_NRF) for d_PF, B_NRF in zip(d_pairs, B, strict=True)]
        d_B = [None if h_PR is None else dispatch.outer(h_PR, d_PF) for d_PF, h_PR in zip(d_pairs, h, strict=True)]
        return None, None, None, d_A_down, d_gates, *d_pre, *d_h, *d_B
