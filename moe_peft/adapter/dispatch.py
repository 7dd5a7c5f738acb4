"""
Computes the experts' outputs for a batch without a loop over experts. `experts.lora.by_loop` is the definition.
Several methods implement the same five linear maps.

A *pair* is a (token, slot): token t with the j-th of its k experts. `Pairs` hold the expert and the gate of each pair.
They provide

    spread   [T, m] → [P, m]             copies each token's row to its pairs (a new tensor)
    collect  [P, m] → [T, m]             sums a token's pairs, gated on request (the transpose of spread)
    shrink   [P, m], [n, r, m] → [P, r]  y A_iᵀ, where i is the pair's expert
    expand   [P, r], [n, r, m] → [P, m]  h B_i, on request added in place to another [P, m] (the transpose of shrink)
    outer    [P, r], [P, m] → [n, r, m]  Σ h yᵀ over each expert's pairs (the weights' gradient)

`Dense` and `Gather` keep pairs in the order of (token, slot). `Blocks` and `Sorted` sort pairs by expert.

A `Dispatch` has the operations called by experts: `shrink_tokens`, `expand_collect` and `update` (both, with the gates
in between). It makes two choices: the kind of its pairs, and whether products of tokens use the columns of all experts
at once instead of pairs. Sorted pairs are in parts of `PART_SLOTS` slots, computed one after another: temporary memory
is one part's, whatever k is.

No method loops over experts or tokens, or waits for the device. All shapes are static. Only `Views` loops over the k
experts of its one token.

The factor `s·g` of an update multiplies `A x`, where tensors are smallest:

    products of tokens with all experts   [T, n·r]  `weighted_columns`; 0 for experts not chosen
    products of pairs                     [P, r]    `expand_collect`

Mixing "output" also multiplies g onto each pair's hidden activation: `collect(…, gated=True)`, [P, f] → [T, f].

For one token without gradients, `Views` has `Gather`'s products without copies. `LoraExperts._decoded` uses either.

Legend: T tokens, n experts, k slots, j slots of a part, P = T·k pairs, r rank, m a width (in or out features),
C = n·r columns of all experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..utils.torch_contexts import without_autocast

# --- a batch ---------------------------------------------------------------------------------------------------------

# Slots of a part of sorted pairs. Two cover the usual top_k in one part. More would need more memory than plain LoRA of
# the same rank.
PART_SLOTS = 2


class Dispatch:
    """
    A batch's experts and gates, and the products of its tokens.

    Args:
        pairs: the kind of pairs.
        columns: whether products of tokens use all experts' matrices at once.
        experts_TK: each token's experts, int64 [T, k].
        gates_TK: their gates [T, k], in the dtype of the products.
        num_experts: n.
        scaling: s, the factor of every expert's update.
        updated_TK: whether a pair's expert changes the base, bool [T, k]; None: all do. A pair without an update uses
            the matrices of another expert, with factor 0.

    Attributes:
        parts: the pairs of all slots, or of some slots each.
    """

    def __init__(
        self,
        pairs: type[Pairs],
        columns: bool,
        experts_TK: torch.Tensor,
        gates_TK: torch.Tensor,
        num_experts: int,
        scaling: float,
        updated_TK: torch.Tensor | None = None,
    ) -> None:
        self.columns, self._casts = columns, pairs.casts
        self.experts, self.gates, self.updated = experts_TK, gates_TK, updated_TK
        self.n, self.scaling = num_experts, scaling
        self.tokens, self.k = experts_TK.shape
        self.parts = [
            pairs(experts_TJ, gates_TJ, num_experts, scaling, updated_TJ)
            for experts_TJ, gates_TJ, updated_TJ in _split(pairs.slots or self.k, experts_TK, gates_TK, updated_TK)
        ]
        # Computed on first use (torch.compile does not trace `functools.cached_property`).
        self._gate_columns: dict[int, torch.Tensor] = {}

    def cast(self, A: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return experts' matrices [n, r, m], ready for products in this dtype."""
        return A.to(dtype) if self._casts and A.dtype != dtype else A

    def gate_columns(self, r: int) -> torch.Tensor:
        """
        Return `s·g` for each column of all experts' matrices, [T, n·r], with 0 for experts not chosen by a token.
        Computed once for all projections.
        """
        if r not in self._gate_columns:
            factors_TK = _factors(self.gates, self.scaling, self.updated)
            empty_TN = factors_TK.new_zeros(self.tokens, self.n)
            # Add, do not overwrite: a slot without an update may have the same expert as another slot.
            write = empty_TN.scatter if self.updated is None else empty_TN.scatter_add
            self._gate_columns[r] = write(1, self.experts, factors_TK).repeat_interleave(r, dim=1)
        return self._gate_columns[r]

    def shrink_tokens(self, x: Sequence[torch.Tensor], A: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """
        Return `shrink(spread(x), A)` [P, r] for each x [T, m] and its A, as a list by part. A shared x is spread once.
        """
        if not A:
            return []
        # One product of the tokens with all experts. Each pair then picks the row of its (token, expert).
        if self.columns:
            rows = [part.pair_rows() for part in self.parts]
            tables = [(x_TM @ A_NRM.flatten(0, 1).T).view(-1, A_NRM.shape[1]) for x_TM, A_NRM in zip(x, A, strict=True)]
            lengths = [row.shape[0] for row in rows]
            return [list(table.index_select(0, torch.cat(rows)).split(lengths)) for table in tables]
        # Different inputs (dropout gives each projection its own mask): one projection at a time.
        if any(x_TM is not x[0] for x_TM in x):
            return [self.shrink_tokens([x_TM], [A_NRM])[0] for x_TM, A_NRM in zip(x, A, strict=True)]
        # Products by pair, part by part. `zip` turns [part][projection] into [projection][part].
        by_part = [part.shrink_token_rows(x[0], A) for part in self.parts]
        return [list(h) for h in zip(*by_part, strict=True)]

    def expand_collect(
        self, h: Sequence[torch.Tensor], B: torch.Tensor, base_TM: torch.Tensor, in_place: bool = False
    ) -> torch.Tensor:
        """Return `base + s Σ g B h`, [T, m], from h [P, r] of each part. With `in_place`, base may be overwritten."""
        weighted = [(h_PR * part.scaled_gates()).to(base_TM.dtype) for h_PR, part in zip(h, self.parts, strict=True)]
        if self.columns:
            # A token's experts are distinct, so its pairs share one row [n·r], and one product gives their sum.
            table = base_TM.new_zeros(self.tokens * self.n, B.shape[1])
            for h_PR, part in zip(weighted, self.parts, strict=True):
                table.index_add_(0, part.pair_rows(), h_PR)  # add, do not copy: padding adds zeros
            return plus_product(base_TM, table.view(self.tokens, self.n * B.shape[1]), B.flatten(0, 1), in_place)
        for h_PR, part in zip(weighted, self.parts, strict=True):
            base_TM = part.expand_collected(h_PR, B, base_TM, in_place)
        return base_TM

    def update(
        self,
        x: Sequence[torch.Tensor],
        A: Sequence[torch.Tensor],
        B: Sequence[torch.Tensor],
        base: Sequence[torch.Tensor],
        in_place: bool = False,
    ) -> list[torch.Tensor]:
        """
        Return `base + s Σ_i g_i B_i A_i x`, [T, out], of each projection. With `in_place`, bases may be overwritten.
        """
        if not self.columns:
            h = self.shrink_tokens(x, A)
            return [self.expand_collect(*of_one, in_place) for of_one in zip(h, B, base, strict=True)]
        updated = []
        for x_TM, A_NRM, B_NRM, base_TM in zip(x, A, B, base, strict=True):
            h_TC = self.weighted_columns(x_TM, A_NRM).to(base_TM.dtype)
            updated.append(plus_product(base_TM, h_TC, B_NRM.flatten(0, 1), in_place))
        return updated

    def weighted_columns(self, x_TM: torch.Tensor, A_NRM: torch.Tensor) -> torch.Tensor:
        """Return `s g_i A_i x` for all experts, [T, n·r], with zeros for experts not chosen by a token."""
        gates_TC = self.gate_columns(A_NRM.shape[1])
        h_TC = F.linear(x_TM, A_NRM.flatten(0, 1))
        if h_TC.dtype == torch.float16:  # an expert not chosen may overflow, and 0 times infinity is NaN
            h_TC = h_TC.masked_fill(gates_TC == 0, 0)
        return h_TC * gates_TC


def _split(
    slots: int, experts_TK: torch.Tensor, gates_TK: torch.Tensor, updated_TK: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield experts, gates and updates of so many slots at a time."""
    if slots >= experts_TK.shape[1]:
        yield experts_TK, gates_TK, updated_TK
        return
    experts, gates = experts_TK.split(slots, dim=1), gates_TK.split(slots, dim=1)
    yield from zip(
        experts, gates, [None] * len(experts) if updated_TK is None else updated_TK.split(slots, dim=1), strict=True
    )


def _factors(gates_TJ: torch.Tensor, scaling: float, updated_TJ: torch.Tensor | None) -> torch.Tensor:
    """Return each slot's factor of the update, `s·g`, or 0 for a slot without an update, [T, j]."""
    factors_TJ = gates_TJ * scaling
    return factors_TJ if updated_TJ is None else factors_TJ.masked_fill(~updated_TJ, 0)


def plus_product(base_TM: torch.Tensor, h_TC: torch.Tensor, B_CM: torch.Tensor, in_place: bool) -> torch.Tensor:
    """Return `base + h B`, [T, m]. With `in_place`, base may be overwritten."""
    return base_TM.addmm_(h_TC, B_CM) if in_place else torch.addmm(base_TM, h_TC, B_CM)


# --- pairs in the order of (token, slot) ------------------------------------------------------------------------------


class Pairs:
    """
    Base class of all pairs of j slots.

    Args:
        experts_TJ, gates_TJ, num_experts, scaling, updated_TJ: as in `Dispatch`.
    """

    slots: int | None = None  # of a part; None: all
    casts = True  # whether products need matrices in their dtype

    def __init__(
        self,
        experts_TJ: torch.Tensor,
        gates_TJ: torch.Tensor,
        num_experts: int,
        scaling: float,
        updated_TJ: torch.Tensor | None = None,
    ) -> None:
        self.experts, self.gates, self.updated = experts_TJ, gates_TJ, updated_TJ
        self.n, self.scaling = num_experts, scaling
        self.tokens, self.k = experts_TJ.shape
        # Computed on first use (torch.compile does not trace `functools.cached_property`).
        self._scaled_gates: torch.Tensor | None = None
        self._pair_rows: torch.Tensor | None = None
        self._pair_experts: torch.Tensor | None = None

    # --- values of pairs ---

    def to_pairs(self, values_TJ: torch.Tensor) -> torch.Tensor:
        """Return one value per slot as a column [P, 1] in the pairs' order; 0 for padding."""
        return values_TJ.reshape(-1, 1)

    def to_slots(self, values_P: torch.Tensor) -> torch.Tensor:
        """Return one value per pair by slot, [P] → [T, j] (the transpose of `to_pairs`)."""
        return values_P.view(-1, self.k)

    def pair_gates(self) -> torch.Tensor:
        """Return the gates as a column [P, 1] in the pairs' order."""
        return self.to_pairs(self.gates)

    def scaled_gates(self) -> torch.Tensor:
        """Return `s·g`, or 0 for a pair without an update, [P, 1]. Computed once for all projections."""
        if self._scaled_gates is None:
            if self.updated is None:
                self._scaled_gates = self.pair_gates() * self.scaling
            else:
                self._scaled_gates = self.to_pairs(_factors(self.gates, self.scaling, self.updated))
        return self._scaled_gates

    def updating(self, h_PR: torch.Tensor) -> torch.Tensor:
        """Return h [P, r], with 0 for pairs without an update."""
        return h_PR if self.updated is None else h_PR.masked_fill(self.to_pairs(~self.updated), 0)

    def scaled(self, h_PR: torch.Tensor) -> torch.Tensor:
        """Return `s·h` [P, r], with 0 for pairs without an update."""
        return self.updating(h_PR * self.scaling)

    def pair_experts(self) -> torch.Tensor:
        """Return each pair's expert, [P], computed once for all projections."""
        if self._pair_experts is None:
            self._pair_experts = self.experts.reshape(-1)
        return self._pair_experts

    def pair_tokens(self) -> torch.Tensor:
        """Return each pair's token, [P]."""
        return torch.arange(self.tokens, device=self.experts.device).repeat_interleave(self.k)

    def pair_rows(self) -> torch.Tensor:
        """Return each pair's row in a table of (token, expert) [T·n, …], [P], computed once for all projections."""
        if self._pair_rows is None:
            self._pair_rows = self.pair_tokens() * self.n + self.pair_experts()
        return self._pair_rows

    # --- the five maps ---

    def spread(self, x_TM: torch.Tensor) -> torch.Tensor:
        return x_TM.repeat_interleave(self.k, dim=0)

    def collect(self, y_PM: torch.Tensor, gated: bool = False) -> torch.Tensor:
        y_TJM = y_PM.view(self.tokens, self.k, y_PM.shape[1])
        return torch.bmm(self.gates.unsqueeze(1), y_TJM).squeeze(1) if gated else y_TJM.sum(1)

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def expand(self, h_PR: torch.Tensor, B: torch.Tensor, onto_PM: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    # --- from tokens and to tokens ---

    def shrink_token_rows(self, x_TM: torch.Tensor, A: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return `shrink(spread(x), A)` [P, r] for each A."""
        return _apply(_ShrinkTokens, self, x_TM, *A)

    def expand_collected(
        self, h_PR: torch.Tensor, B: torch.Tensor, base_TM: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        """Return `base + collect(expand(h, B))` [T, m]. With `in_place`, base may be overwritten."""
        return _apply(_ExpandCollect, self, base_TM, h_PR, B)


class Dense(Pairs):
    """Pairs by masks: products use the matrices of all experts at once. Columns of other experts are masked."""

    def _mask(self, h_PR: torch.Tensor) -> torch.Tensor:
        """Return h [P, r] as [P, n·r], zero outside the pair's expert."""
        one_hot_PN = F.one_hot(self.pair_experts(), self.n).to(h_PR.dtype)
        return (one_hot_PN.unsqueeze(2) * h_PR.unsqueeze(1)).flatten(1)

    def _own_columns(self, h_PC: torch.Tensor) -> torch.Tensor:
        """Return the columns of each pair's expert, [P, n·r] → [P, r] (the transpose of `_mask`)."""
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


class Gather(Pairs):
    """Pairs by copies, for few tokens. The copied matrices of a token's experts form one LoRA of rank k·r."""

    casts = False  # only the chosen experts' matrices are cast

    def shrink_token_rows(self, x_TM: torch.Tensor, A: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [self._shrink_tokens(x_TM, A_NRM) for A_NRM in A]

    def _shrink_tokens(self, x_TM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        r, A_PRM = A.shape[1], self._of_pairs(A, x_TM.dtype)
        if statically_known(self.tokens == 1):  # on a CPU, a batched product would wake all threads
            return F.linear(x_TM, A_PRM.flatten(0, 1)).view(-1, r)
        # A row times a matrix: the product of a matrix with one column takes several times as long on a CPU.
        return torch.bmm(x_TM.unsqueeze(1), self._by_token(A_PRM).transpose(1, 2)).view(-1, r)

    def expand_collected(
        self, h_PR: torch.Tensor, B: torch.Tensor, base_TM: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        B_PRM = self._of_pairs(B, base_TM.dtype)
        if statically_known(self.tokens == 1):
            return plus_product(base_TM, h_PR.view(1, -1), B_PRM.flatten(0, 1), in_place)
        # One batched product: a token's h [1, k·r] with the rows of its experts [k·r, m].
        h_T1C, B_TCM = h_PR.view(self.tokens, 1, -1), self._by_token(B_PRM)
        if not in_place:
            return torch.baddbmm(base_TM.unsqueeze(1), h_T1C, B_TCM).squeeze(1)
        base_TM.unsqueeze(1).baddbmm_(h_T1C, B_TCM)
        return base_TM

    def _by_token(self, A_PRM: torch.Tensor) -> torch.Tensor:
        """Return the rows of each token's experts, [P, r, m] → [T, k·r, m]."""
        return A_PRM.view(self.tokens, -1, A_PRM.shape[2])

    def _of_pairs(self, A: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrices of each pair's expert, [P, r, m]."""
        A_PRM = A.index_select(0, self.pair_experts())
        return A_PRM if A_PRM.dtype == dtype else A_PRM.to(dtype)

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return torch.bmm(y_PM.unsqueeze(1), self._of_pairs(A, y_PM.dtype).transpose(1, 2)).squeeze(1)

    def expand(self, h_PR: torch.Tensor, B: torch.Tensor, onto_PM: torch.Tensor | None = None) -> torch.Tensor:
        B_PRM, h_P1R = self._of_pairs(B, h_PR.dtype), h_PR.unsqueeze(1)
        if onto_PM is None:
            return torch.bmm(h_P1R, B_PRM).squeeze(1)
        onto_PM.unsqueeze(1).baddbmm_(h_P1R, B_PRM)
        return onto_PM

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        products = h_PR.unsqueeze(2) * y_PM.unsqueeze(1)
        return products.new_zeros(self.n, *products.shape[1:]).index_add(0, self.pair_experts(), products)

    # --- of one token, as `Views` ---

    def shrink_token(self, x_1M: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return self._shrink_tokens(x_1M, A)

    def shrink_each(self, y_KM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return self.shrink(y_KM, A)

    def expand_collect(self, h_KR: torch.Tensor, B: torch.Tensor, base_1M: torch.Tensor) -> torch.Tensor:
        return self.expand_collected((h_KR * self.scaled_gates()).to(base_1M.dtype), B, base_1M, in_place=False)

    def expand_each(self, h_KR: torch.Tensor, B: torch.Tensor, base_1M: torch.Tensor) -> torch.Tensor:
        h_K1R = self.updating(h_KR).unsqueeze(1)
        return torch.baddbmm(base_1M, h_K1R, self._of_pairs(B, base_1M.dtype), alpha=self.scaling).squeeze(1)


class Views:
    """
    One token's experts on a CPU: products of one row with views of their matrices. A batched product would wake all
    threads, which takes longer than the product, and a scheduler's time slice where other programs run.

    Args:
        experts_1K: the token's experts, int64 [1, k]; an expert without matrices does not change the base.
        gates_1K: their gates [1, k], in the dtype of the products.
        num_experts: n.
        scaling: s, the factor of every expert's update.
    """

    def __init__(self, experts_1K: torch.Tensor, gates_1K: torch.Tensor, num_experts: int, scaling: float) -> None:
        self.gates, self.n, self.scaling = gates_1K, num_experts, scaling
        (experts,), (gates,) = experts_1K.tolist(), gates_1K.tolist()
        self.k = len(experts)
        self.updated = [0 <= i < num_experts for i in experts]
        # Each slot's expert and factor of the update. A slot without an update has an arbitrary expert and factor 0.
        slots = zip(experts, gates, self.updated, strict=True)
        self.slots = [(i, scaling * gate) if updated else (0, 0.0) for i, gate, updated in slots]

    def shrink_token(self, x_1M: torch.Tensor, A: torch.Tensor) -> list[torch.Tensor]:
        """Return `A_i x` of each slot, k times [1, r]."""
        return [F.linear(x_1M, _as(A[i], x_1M.dtype)) for i, _ in self.slots]

    def shrink_each(self, y_KM: torch.Tensor, A: torch.Tensor) -> list[torch.Tensor]:
        """Return `A_i y_i` of each slot, k times [1, r]."""
        return [F.linear(y_KM[j : j + 1], _as(A[i], y_KM.dtype)) for j, (i, _) in enumerate(self.slots)]

    def expand_collect(self, h: Sequence[torch.Tensor], B: torch.Tensor, base_1M: torch.Tensor) -> torch.Tensor:
        """Return `base + s Σ_i g_i B_i h_i`, [1, m]."""
        y_1M = base_1M
        for h_1R, (i, factor) in zip(h, self.slots, strict=True):
            if factor:
                y_1M = torch.addmm(y_1M, h_1R, _as(B[i], y_1M.dtype), alpha=factor)
        return y_1M

    def expand_each(self, h: Sequence[torch.Tensor], B: torch.Tensor, base_1M: torch.Tensor) -> torch.Tensor:
        """Return `base + s B_i h_i` of each slot, [k, m]."""
        s, dtype = self.scaling, base_1M.dtype
        slots = zip(h, self.slots, self.updated, strict=True)
        return torch.cat([
            torch.addmm(base_1M, h_1R, _as(B[i], dtype), alpha=s) if updated else base_1M
            for h_1R, (i, _), updated in slots
        ])  # fmt: skip


def _as(A: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return A if A.dtype == dtype else A.to(dtype)  # `to` takes a microsecond even if there is nothing to do


# --- backward passes by hand: for spread, autograd would derive an indexed sum instead of collect ---------------------


def without_autocast_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward that is differentiable once. Its products keep their dtypes, like the products of forward."""

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: torch.Tensor) -> Any:
        with without_autocast(gradients[0]):
            return backward(ctx, *gradients)

    return once_differentiable(run)


def _apply(function: Any, part: Pairs, *tensors: torch.Tensor) -> Any:
    """Apply the function with its backward. Without gradients, or if torch.compile derives them, only compute it."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function.compute(part, *tensors)
    return function.apply(part, *tensors)


class _ShrinkTokens(torch.autograd.Function):
    """`shrink(spread(x), A)` of one part for each A. Backward spreads the tokens again instead of keeping the pairs."""

    @staticmethod
    def compute(part: Pairs, x_TM: torch.Tensor, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x_PM = part.spread(x_TM)
        return tuple(part.shrink(x_PM, A) for A in matrices)

    @staticmethod
    def forward(ctx: Any, part: Pairs, x_TM: torch.Tensor, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.part = part
        ctx.save_for_backward(x_TM, *matrices)
        return _ShrinkTokens.compute(part, x_TM, *matrices)

    @staticmethod
    @without_autocast_once
    def backward(ctx: Any, *d_h: torch.Tensor) -> Any:
        part: Pairs = ctx.part
        x_TM, *matrices = ctx.saved_tensors
        # Backward to x: expand each gradient onto the pairs, add up, and collect by token.
        d_x_TM = None
        if ctx.needs_input_grad[1]:
            d_x_PM = part.expand(d_h[0], matrices[0])
            for d_h_PR, A in zip(d_h[1:], matrices[1:], strict=True):
                d_x_PM = part.expand(d_h_PR, A, onto_PM=d_x_PM)
            d_x_TM = part.collect(d_x_PM)
            del d_x_PM  # before the next tensor of its size is allocated
        # Backward to each A, with the tokens spread again.
        if not any(ctx.needs_input_grad[2:]):
            return None, d_x_TM, *(None for _ in matrices)
        x_PM = part.spread(x_TM)
        return None, d_x_TM, *(part.outer(d_h_PR, x_PM) for d_h_PR in d_h)


class _ExpandCollect(torch.autograd.Function):
    """`base + collect(expand(h, B))` of one part."""

    @staticmethod
    def compute(part: Pairs, base_TM: torch.Tensor, h_PR: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return part.collect(part.expand(h_PR, B)).add_(base_TM)

    @staticmethod
    def forward(ctx: Any, part: Pairs, base_TM: torch.Tensor, h_PR: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        ctx.part = part
        ctx.save_for_backward(h_PR, B)
        return _ExpandCollect.compute(part, base_TM, h_PR, B)

    @staticmethod
    @without_autocast_once
    def backward(ctx: Any, d_TM: torch.Tensor) -> Any:
        part: Pairs = ctx.part
        h_PR, B = ctx.saved_tensors
        # The transposes: spread for collect, shrink for expand, outer for B.
        d_PM = part.spread(d_TM)
        return None, d_TM, part.shrink(d_PM, B), (part.outer(h_PR, d_PM) if ctx.needs_input_grad[3] else None)


# --- pairs sorted by their expert ------------------------------------------------------------------------------------


class _SortedPairs(Pairs):
    """
    Pairs in another order. `_rows` [T, j] are the rows of each token's pairs, `_tokens` [P] is
    the token of each row.
    """

    slots = PART_SLOTS
    _rows: torch.Tensor
    _tokens: torch.Tensor

    def to_slots(self, values_P: torch.Tensor) -> torch.Tensor:
        return values_P.index_select(0, self._rows.flatten()).view_as(self._rows)

    def pair_tokens(self) -> torch.Tensor:
        return self._tokens

    def spread(self, x_TM: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return _Spread.apply(x_TM, self._tokens, self._rows)
        return x_TM.index_select(0, self._tokens)

    def collect(self, y_PM: torch.Tensor, gated: bool = False) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return _Collect.apply(y_PM, self.gates if gated else None, self.pair_gates(), self._tokens, self._rows)
        # A gather, the gates and the sum in one pass.
        return F.embedding_bag(self._rows, y_PM, mode="sum", per_sample_weights=self.gates if gated else None)


# For torch.compile to fuse. Its own backward would be indexed sums with colliding writes. These are gathers.


class _Spread(torch.autograd.Function):
    """`x[tokens]`. Backward sums the rows of each token, because padding has no gradient."""

    @staticmethod
    def forward(ctx: Any, x_TM: torch.Tensor, tokens_P: torch.Tensor, rows_TJ: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_TJ)
        return x_TM.index_select(0, tokens_P)

    @staticmethod
    def backward(ctx: Any, d_PM: torch.Tensor) -> Any:
        (rows_TJ,) = ctx.saved_tensors
        return _of_slots(d_PM, rows_TJ).sum(1), None, None


class _Collect(torch.autograd.Function):
    """Sum of each token's rows, with gates [T, j] or without. `gates_P1` has the same gates by row, 0 for padding."""

    @staticmethod
    def forward(
        ctx: Any,
        y_PM: torch.Tensor,
        gates_TJ: torch.Tensor | None,
        gates_P1: torch.Tensor,
        tokens_P: torch.Tensor,
        rows_TJ: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gated = gates_TJ is not None
        ctx.save_for_backward(y_PM, gates_P1, tokens_P, rows_TJ)
        y_TJM = _of_slots(y_PM, rows_TJ)
        return (y_TJM if gates_TJ is None else y_TJM * gates_TJ.unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx: Any, d_TM: torch.Tensor) -> Any:
        y_PM, gates_P1, tokens_P, rows_TJ = ctx.saved_tensors
        d_PM = d_TM.index_select(0, tokens_P)
        if not ctx.gated:
            return d_PM, None, None, None, None
        d_gates_TJ = (_of_slots(y_PM, rows_TJ) * d_TM.unsqueeze(1)).sum(-1)
        return d_PM * gates_P1, d_gates_TJ, None, None, None


def _of_slots(y_PM: torch.Tensor, rows_TJ: torch.Tensor) -> torch.Tensor:
    """Return the rows of each token's pairs, [P, m] → [T, j, m]."""
    return y_PM.index_select(0, rows_TJ.flatten()).view(*rows_TJ.shape, y_PM.shape[1])


class Blocks(_SortedPairs):
    """
    Sorts pairs by expert and pads them to blocks of one expert each, for batched products.

    The number of blocks depends only on the sizes, not on the routing. Any dtype and width is supported. A padding row
    is a copy of a pair of its block's expert with gate 0, so it affects neither outputs nor gradients. (With another
    token, the expert could overflow, and 0 times infinity is NaN.)
    """

    def __init__(self, experts_TJ: torch.Tensor, gates_TJ: torch.Tensor, num_experts: int, *args: Any) -> None:
        super().__init__(experts_TJ, gates_TJ, num_experts, *args)
        pairs, n, device = experts_TJ.numel(), num_experts, experts_TJ.device
        self._size = size = _block_size(pairs, n)
        blocks = (pairs + n * (size - 1)) // size  # enough for the worst routing
        # Sort pairs by expert. The sorted pairs of expert i begin at edges[i].
        sorted_P, order_P = experts_TJ.flatten().sort(stable=True)
        edges_N = torch.searchsorted(sorted_P, torch.arange(n + 1, device=device))
        # Give each expert as many blocks as its pairs need, one expert after the other.
        blocks_N = (edges_N.diff() + size - 1) // size
        ends_N = blocks_N.cumsum(0)  # after each expert's last block
        self._first_blocks = ends_N - blocks_N
        # Row of each pair: its place among the sorted pairs, plus the padding of the experts before its own.
        shift_N = self._first_blocks * size - edges_N[:-1]
        sorted_rows_P = torch.arange(pairs, device=device) + shift_N.index_select(0, sorted_P)
        rows_P = torch.empty_like(order_P).scatter_(0, order_P, sorted_rows_P)
        self._rows = rows_P.view(experts_TJ.shape)
        # Expert of each block.
        self._block_range = torch.arange(blocks, device=device)
        block_experts = torch.searchsorted(ends_N, self._block_range, right=True)
        self._block_experts = torch.minimum(block_experts, sorted_P[-1:])  # blocks left over: the last expert
        # Token of each row. A padding row has the first token of its block's expert.
        tokens_P = order_P // self.k
        padding_P = tokens_P.index_select(0, edges_N.index_select(0, self._block_experts)).repeat_interleave(size)
        self._tokens = padding_P.scatter(0, sorted_rows_P, tokens_P)
        self._gates = self.to_pairs(gates_TJ)

    def to_pairs(self, values_TK: torch.Tensor) -> torch.Tensor:
        empty_P = values_TK.new_zeros(self._block_range.shape[0] * self._size)
        return empty_P.scatter(0, self._rows.flatten(), values_TK.flatten()).unsqueeze(1)

    def pair_gates(self) -> torch.Tensor:
        return self._gates

    def pair_experts(self) -> torch.Tensor:
        return self._block_experts.repeat_interleave(self._size)

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        # A yᵀ and not y Aᵀ: a product with few rows is faster than one with few columns.
        h_BRS = torch.bmm(self._of_blocks(A), self._blocks(y_PM).transpose(1, 2))
        return h_BRS.transpose(1, 2).flatten(0, 1)

    def expand(self, h_PR: torch.Tensor, B: torch.Tensor, onto_PM: torch.Tensor | None = None) -> torch.Tensor:
        if onto_PM is None:
            return torch.bmm(self._blocks(h_PR), self._of_blocks(B)).flatten(0, 1)
        self._blocks(onto_PM).baddbmm_(self._blocks(h_PR), self._of_blocks(B))
        return onto_PM

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        products = torch.bmm(self._blocks(h_PR).transpose(1, 2), self._blocks(y_PM))
        # An expert's blocks are contiguous. Unlike `index_add`, this gives the same bits in every run on a GPU.
        sums = F.embedding_bag(self._block_range, products.flatten(1), self._first_blocks, mode="sum")
        return sums.view(self.n, *products.shape[1:])

    def _blocks(self, y_PM: torch.Tensor) -> torch.Tensor:
        return y_PM.view(self._block_experts.shape[0], self._size, y_PM.shape[1])

    def _of_blocks(self, A: torch.Tensor) -> torch.Tensor:
        return A.index_select(0, self._block_experts)


def _block_size(pairs: int, num_experts: int) -> int:
    """
    Return the rows of a block, a power of two from 8 to 128. Padding adds about an eighth for many pairs, and up to a
    half for few pairs per expert. A compiled graph for any number of pairs gets 16.
    """
    size = 8 if statically_known(pairs < 32 * num_experts) else 16
    while size < 128 and statically_known(16 * size * num_experts <= pairs):
        size *= 2
    return size


def statically_known(condition: bool) -> bool:
    """Return a condition on sizes, or False if torch.compile would have to make a graph for each answer."""
    return statically_known_true(condition) if torch.compiler.is_compiling() else condition


class Sorted(_SortedPairs):
    """Sorts pairs by expert for grouped products: no padding, but only where torch has a kernel."""

    def __init__(self, experts_TJ: torch.Tensor, gates_TJ: torch.Tensor, num_experts: int, *args: Any) -> None:
        super().__init__(experts_TJ, gates_TJ, num_experts, *args)
        # Sort pairs by expert. `_order` maps rows to pairs, `_rows` pairs to rows.
        self._experts, self._order = experts_TJ.flatten().sort(stable=True)
        positions = torch.arange(self._order.numel(), device=experts_TJ.device)
        self._rows = torch.empty_like(self._order).scatter_(0, self._order, positions).view(experts_TJ.shape)
        self._tokens = self._order // self.k
        # Where each expert's rows end, as the kernel expects it.
        experts = torch.arange(num_experts, device=experts_TJ.device)
        self._ends = torch.searchsorted(self._experts, experts, right=True).to(torch.int32)
        self._idle: torch.Tensor | None = None

    def to_pairs(self, values_TK: torch.Tensor) -> torch.Tensor:
        return values_TK.flatten().index_select(0, self._order).unsqueeze(1)

    def pair_experts(self) -> torch.Tensor:
        return self._experts

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(y_PM, A.transpose(1, 2), offs=self._ends)

    def expand(self, h_PR: torch.Tensor, B: torch.Tensor, onto_PM: torch.Tensor | None = None) -> torch.Tensor:
        y_PM = F.grouped_mm(h_PR, B, offs=self._ends)
        return y_PM if onto_PM is None else onto_PM.add_(y_PM)

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        if self._idle is None:
            self._idle = (self._ends.diff(prepend=self._ends.new_zeros(1)) == 0).view(-1, 1, 1)
        # The kernel of some GPUs leaves the sum of a group without rows undefined (pytorch/pytorch#172439).
        return F.grouped_mm(h_PR.T, y_PM, offs=self._ends).masked_fill(self._idle, 0)
