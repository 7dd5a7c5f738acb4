"""
How the experts of tokens are computed: the same five linear maps by several methods.

A *pair* is a (token, slot): token t with the j-th of its k experts; there are P pairs. For one batch, a dispatch knows
the expert and the gate of each pair. It provides

    spread   [T, m] → [P, m]             copies each token's row to its pairs (a new tensor)
    collect  [P, m] → [T, m]             sums a token's pairs, gated on request (the transpose of spread)
    shrink   [P, m], [n, r, m] → [P, r]  y A_iᵀ, where i is the pair's expert
    expand   [P, r], [n, r, m] → [P, m]  h B_i, on request added in place to another [P, m] (the transpose of shrink)
    outer    [P, r], [P, m] → [n, r, m]  Σ h yᵀ over each expert's pairs (the weights' gradient)

and the operations that layers call: `shrink_tokens`, `expand_collect` and `update`, which is both with the gates in
between. A dispatch may consist of several `parts` with some of the slots each, which are computed one after another:
temporary memory is then that of one part, whatever k is. No method loops over experts or tokens or waits for the
device; all shapes are static.

Products of tokens (`shrink_tokens`, `expand_collect`, `update`) either use the matrices of all experts at once, n·r
columns, and mask those of other experts, or go pair by pair. Products of pairs are up to the class. The classes here
keep pairs in the order of (token, slot); those in `sorting.py` sort them, and `choosing.py` chooses.

Legend: T tokens, n experts, k slots, P = T·k pairs, r rank, m a width (in or out features).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..contexts import without_autocast


class Dispatch:
    """
    What all methods share: pairs in the order of (token, slot), and products with all experts at once.

    Args:
        experts_TK: each token's experts, int64 [T, k].
        gates_TK: their gates [T, k], in the dtype of the products.
        num_experts: n.
        scaling: s, the factor of every expert's update.
        all_columns: whether products of tokens use all experts' matrices at once.
    """

    def __init__(
        self,
        experts_TK: torch.Tensor,
        gates_TK: torch.Tensor,
        num_experts: int,
        scaling: float,
        all_columns: bool = False,
    ) -> None:
        self.experts, self.gates = experts_TK, gates_TK
        self.scaling, self.all_columns = scaling, all_columns
        self.tokens, self.k = experts_TK.shape
        self.n = num_experts
        # Computed on first use (torch.compile does not trace `functools.cached_property`).
        self._scaled_gates: torch.Tensor | None = None
        self._gate_columns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pair_rows: torch.Tensor | None = None

    @property
    def parts(self) -> Sequence[Dispatch]:
        """Dispatches that together cover all pairs."""
        return [self]

    def pair_gates(self) -> torch.Tensor:
        """Gates as a column [P, 1] in the pairs' order."""
        return self.gates.reshape(-1, 1)

    def scaled_gates(self) -> torch.Tensor:
        """`s·g` as a column [P, 1]; computed once for all projections."""
        if self._scaled_gates is None:
            self._scaled_gates = self.pair_gates() * self.scaling
        return self._scaled_gates

    def to_slots(self, values_P: torch.Tensor) -> torch.Tensor:
        """One value per pair, [P] → [T, k] (the transpose of `pair_gates`)."""
        return values_P.view(-1, self.k)

    def pair_experts(self) -> torch.Tensor:
        """Each pair's expert, [P]."""
        return self.experts.reshape(-1)

    def pair_tokens(self) -> torch.Tensor:
        """Each pair's token, [P]."""
        return torch.arange(self.tokens, device=self.experts.device).repeat_interleave(self.k)

    def pair_rows(self) -> torch.Tensor:
        """The row of each pair in a table of (token, expert) [T·n, …], [P]; computed once for all projections."""
        if self._pair_rows is None:
            self._pair_rows = self.pair_tokens() * self.n + self.pair_experts()
        return self._pair_rows

    def gate_columns(self, r: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        For each column of all experts' matrices, `s·g` of its expert, zero if a token did not choose it, and whether
        that is zero: [T, n·r] both; computed once for all projections.
        """
        if r not in self._gate_columns:
            gates_TK = self.gates * self.scaling
            empty_TN = gates_TK.new_zeros(self.tokens, self.n)
            gates_TC = empty_TN.scatter(1, self.experts, gates_TK).repeat_interleave(r, dim=1)
            self._gate_columns[r] = gates_TC, gates_TC == 0
        return self._gate_columns[r]

    # --- on pairs -----------------------------------------------------------------------------------------------------

    def spread(self, x_TM: torch.Tensor) -> torch.Tensor:
        return x_TM.repeat_interleave(self.k, dim=0)

    def collect(self, y_PM: torch.Tensor, gated: bool = False) -> torch.Tensor:
        y_TKM = y_PM.view(self.tokens, self.k, y_PM.shape[1])
        return (y_TKM * self.gates.unsqueeze(-1) if gated else y_TKM).sum(1)

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def expand(self, h_PR: torch.Tensor, B: torch.Tensor, onto_PM: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    # --- on tokens ----------------------------------------------------------------------------------------------------

    def shrink_tokens(self, x: Sequence[torch.Tensor], A: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """`shrink(spread(x), A)` [P, r] of each part, for each x [T, m] and its A. A shared x is spread once."""
        if not A:
            return []
        if self.all_columns:
            rows = [part.pair_rows() for part in self.parts]
            tables = [(x_TM @ A_NRM.flatten(0, 1).T).view(-1, A_NRM.shape[1]) for x_TM, A_NRM in zip(x, A, strict=True)]
            lengths = [len(row) for row in rows]
            return [list(table.index_select(0, torch.cat(rows)).split(lengths)) for table in tables]
        if any(x_TM is not x[0] for x_TM in x):
            return [self.shrink_tokens([x_TM], [A_NRM])[0] for x_TM, A_NRM in zip(x, A, strict=True)]
        by_part = [_apply(_ShrinkTokens, part, x[0], *A) for part in self.parts]
        return [list(h) for h in zip(*by_part, strict=True)]

    def expand_collect(
        self, h: Sequence[torch.Tensor], B: torch.Tensor, base_TM: torch.Tensor, in_place: bool = False
    ) -> torch.Tensor:
        """`base + s Σ g B h`, [T, m], from h [P, r] of each part; with `in_place`, base may be overwritten."""
        weighted = [(h_PR * part.scaled_gates()).to(B.dtype) for h_PR, part in zip(h, self.parts, strict=True)]
        if self.all_columns:
            # A token's experts are distinct, so its pairs share one row [n·r], and one product gives their sum.
            table = base_TM.new_zeros(self.tokens * self.n, B.shape[1])
            for h_PR, part in zip(weighted, self.parts, strict=True):
                table.index_add_(0, part.pair_rows(), h_PR)  # not a copy, as padding adds zeros
            return _plus_product(base_TM, table.view(self.tokens, self.n * B.shape[1]), B.flatten(0, 1), in_place)
        for h_PR, part in zip(weighted, self.parts, strict=True):
            base_TM = _apply(_ExpandCollect, part, base_TM, h_PR, B)
        return base_TM

    def update(
        self,
        x: Sequence[torch.Tensor],
        A: Sequence[torch.Tensor],
        B: Sequence[torch.Tensor],
        base: Sequence[torch.Tensor],
        in_place: bool = False,
    ) -> list[torch.Tensor]:
        """`base + s Σ_i g_i B_i A_i x`, [T, out], of each projection; with `in_place`, bases may be overwritten."""
        if not self.all_columns:
            h = self.shrink_tokens(x, A)
            return [self.expand_collect(*of_one, in_place) for of_one in zip(h, B, base, strict=True)]
        updated = []
        for x_TM, A_NRM, B_NRM, base_TM in zip(x, A, B, base, strict=True):
            h_TC = self.weighted_columns(x_TM, A_NRM).to(B_NRM.dtype)
            updated.append(_plus_product(base_TM, h_TC, B_NRM.flatten(0, 1), in_place))
        return updated

    def weighted_columns(self, x_TM: torch.Tensor, A_NRM: torch.Tensor) -> torch.Tensor:
        """`s g_i A_i x` for all experts, [T, n·r]; zero for those that a token did not choose."""
        gates_TC, unchosen_TC = self.gate_columns(A_NRM.shape[1])
        # Masked and not only multiplied by 0: an expert that was not chosen may overflow.
        return F.linear(x_TM, A_NRM.flatten(0, 1)).masked_fill(unchosen_TC, 0) * gates_TC


def _plus_product(base_TM: torch.Tensor, h_TC: torch.Tensor, B_CM: torch.Tensor, in_place: bool) -> torch.Tensor:
    return base_TM.addmm_(h_TC, B_CM) if in_place else torch.addmm(base_TM, h_TC, B_CM)


class Dense(Dispatch):
    """Products of pairs also use the matrices of all experts at once; the columns of other experts are masked."""

    def _mask(self, h_PR: torch.Tensor) -> torch.Tensor:
        """[P, r] → [P, n·r], zero outside the pair's expert."""
        one_hot_PN = F.one_hot(self.pair_experts(), self.n).to(h_PR.dtype)
        return (one_hot_PN.unsqueeze(2) * h_PR.unsqueeze(1)).flatten(1)

    def _own_columns(self, h_PC: torch.Tensor) -> torch.Tensor:
        """[P, n·r] → [P, r], those of the pair's expert (the transpose of `_mask`)."""
        r = h_PC.shape[1] // self.n
        index = self.pair_experts().view(-1, 1, 1).expand(-1, 1, r)
        return h_PC.view(-1, self.n, r).gather(1, index).squeeze(1)

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return self._own_columns(y_PM @ A.flatten(0, 1).T)

    def expand(self, h_PR: torch.Tensor, B: torch.Tensor, onto_PM: torch.Tensor | None = None) -> torch.Tensor:
        masked, matrix = self._mask(h_PR), B.flatten(0, 1)
        return masked @ matrix if onto_PM is None else onto_PM.addmm_(masked, matrix)

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        return (self._mask(h_PR).T @ y_PM).view(self.n, h_PR.shape[1], -1)


class Gather(Dispatch):
    """Copies the expert's matrices for each pair: for few tokens and many experts."""

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return torch.bmm(A.index_select(0, self.pair_experts()), y_PM.unsqueeze(-1)).squeeze(-1)

    def expand(self, h_PR: torch.Tensor, B: torch.Tensor, onto_PM: torch.Tensor | None = None) -> torch.Tensor:
        own, h_P1R = B.index_select(0, self.pair_experts()), h_PR.unsqueeze(1)
        if onto_PM is None:
            return torch.bmm(h_P1R, own).squeeze(1)
        onto_PM.unsqueeze(1).baddbmm_(h_P1R, own)
        return onto_PM

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        products = h_PR.unsqueeze(2) * y_PM.unsqueeze(1)
        return products.new_zeros(self.n, *products.shape[1:]).index_add(0, self.pair_experts(), products)


# --- backward passes that autograd would not derive: that of spread is collect, not an indexed sum --------------------


def without_autocast_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a backward that is differentiable once and whose products keep their dtypes, as those of forward do."""

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: torch.Tensor) -> Any:
        with without_autocast(gradients[0]):
            return backward(ctx, *gradients)

    return once_differentiable(run)


def _apply(function: Any, part: Dispatch, *tensors: torch.Tensor) -> Any:
    """Apply the function with its backward; without gradients, or if torch.compile derives them, only compute it."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function.compute(part, *tensors)
    return function.apply(part, *tensors)


class _ShrinkTokens(torch.autograd.Function):
    """`shrink(spread(x), A)` of one part for each A; backward spreads the tokens again instead of keeping them."""

    @staticmethod
    def compute(part: Dispatch, x_TM: torch.Tensor, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x_PM = part.spread(x_TM)
        return tuple(part.shrink(x_PM, A) for A in matrices)

    @staticmethod
    def forward(ctx: Any, part: Dispatch, x_TM: torch.Tensor, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.part = part
        ctx.save_for_backward(x_TM, *matrices)
        return _ShrinkTokens.compute(part, x_TM, *matrices)

    @staticmethod
    @without_autocast_once
    def backward(ctx: Any, *d_h: torch.Tensor) -> Any:
        part: Dispatch = ctx.part
        x_TM, *matrices = ctx.saved_tensors
        d_x_TM = None
        if ctx.needs_input_grad[1]:
            d_x_PM = part.expand(d_h[0], matrices[0])
            for d_h_PR, A in zip(d_h[1:], matrices[1:], strict=True):
                d_x_PM = part.expand(d_h_PR, A, onto_PM=d_x_PM)
            d_x_TM = part.collect(d_x_PM)
            del d_x_PM  # before the next tensor of its size is allocated
        if not any(ctx.needs_input_grad[2:]):
            return None, d_x_TM, *(None for _ in matrices)
        x_PM = part.spread(x_TM)
        return None, d_x_TM, *(part.outer(d_h_PR, x_PM) for d_h_PR in d_h)


class _ExpandCollect(torch.autograd.Function):
    """`base + collect(expand(h, B))` of one part."""

    @staticmethod
    def compute(part: Dispatch, base_TM: torch.Tensor, h_PR: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return part.collect(part.expand(h_PR, B)).add_(base_TM)

    @staticmethod
    def forward(ctx: Any, part: Dispatch, base_TM: torch.Tensor, h_PR: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        ctx.part = part
        ctx.save_for_backward(h_PR, B)
        return _ExpandCollect.compute(part, base_TM, h_PR, B)

    @staticmethod
    @without_autocast_once
    def backward(ctx: Any, d_TM: torch.Tensor) -> Any:
        part: Dispatch = ctx.part
        h_PR, B = ctx.saved_tensors
        d_PM = part.spread(d_TM)
        return None, d_TM, part.shrink(d_PM, B), (part.outer(h_PR, d_PM) if ctx.needs_input_grad[3] else None)
