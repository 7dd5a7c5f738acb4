"""Methods that sort pairs by their expert (maps and legend: `dispatch.py`; j is the number of slots in a part)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .dispatch import Dispatch

# Slots per part. Two cover the usual top_k in one part; more would need more memory than plain LoRA of the same rank.
PART_SLOTS = 2


class _Part(Dispatch):
    """Some slots with pairs in another order: `_rows` [T, j] of each token's pairs, `_tokens` [P] of each row."""

    _rows: torch.Tensor
    _tokens: torch.Tensor

    def to_slots(self, values_P: torch.Tensor) -> torch.Tensor:
        return values_P.index_select(0, self._rows.flatten()).view_as(self._rows)

    def pair_tokens(self) -> torch.Tensor:
        return self._tokens

    def spread(self, x_TM: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return _Spread.apply(x_TM, self._tokens, self._rows)
        return x_TM.index_select(0, self._tokens)

    def collect(self, y_PM: torch.Tensor, gated: bool = False) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return _Collect.apply(y_PM, self.gates if gated else None, self.pair_gates(), self._tokens, self._rows)
        # A gather, the gates and the sum in one pass.
        return F.embedding_bag(self._rows, y_PM, mode="sum", per_sample_weights=self.gates if gated else None)


# What a compiler gets to fuse. It would derive indexed sums as their backward, whose writes collide; these are gathers.


class _Spread(torch.autograd.Function):
    """`x[tokens]`; the backward sums the rows of each token, because padding has no gradient."""

    @staticmethod
    def forward(ctx: Any, x_TM: torch.Tensor, tokens_P: torch.Tensor, rows_TJ: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_TJ)
        return x_TM.index_select(0, tokens_P)

    @staticmethod
    def backward(ctx: Any, d_PM: torch.Tensor) -> Any:
        (rows_TJ,) = ctx.saved_tensors
        return _of_slots(d_PM, rows_TJ).sum(1), None, None


class _Collect(torch.autograd.Function):
    """The sum of each token's rows, with gates [T, j] or without; `gates_P1` are the same by row, 0 for padding."""

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
    """The rows of each token's pairs, [P, m] → [T, j, m]."""
    return y_PM.index_select(0, rows_TJ.flatten()).view(*rows_TJ.shape, y_PM.shape[1])


class Blocks(_Part):
    """
    Sorts pairs by their expert and pads them to blocks of one expert each, for batched products.

    The number of blocks depends on the sizes alone, not on the routing, and any dtype and width is supported. Padding
    rows are copies of a pair of their block's expert with gate 0, so they affect neither outputs nor gradients. (With
    another token, the expert could overflow, and 0 times infinity is NaN.)
    """

    def __init__(self, experts_TJ: torch.Tensor, gates_TJ: torch.Tensor, num_experts: int, scaling: float) -> None:
        super().__init__(experts_TJ, gates_TJ, num_experts, scaling)
        pairs, n, device = experts_TJ.numel(), num_experts, experts_TJ.device
        self._size = size = _block_size(pairs, n)
        blocks = (pairs + n * (size - 1)) // size  # enough for the worst routing
        sorted_P, order_P = experts_TJ.flatten().sort(stable=True)
        edges_N = torch.searchsorted(sorted_P, torch.arange(n + 1, device=device))
        blocks_N = (edges_N.diff() + size - 1) // size
        ends_N = blocks_N.cumsum(0)  # after each expert's last block
        self._first_blocks = ends_N - blocks_N
        shift_N = self._first_blocks * size - edges_N[:-1]
        sorted_rows_P = torch.arange(pairs, device=device) + shift_N.index_select(0, sorted_P)
        rows_P = torch.empty_like(order_P).scatter_(0, order_P, sorted_rows_P)
        self._rows = rows_P.view(experts_TJ.shape)
        self._block_range = torch.arange(blocks, device=device)
        block_experts = torch.searchsorted(ends_N, self._block_range, right=True)
        self._block_experts = torch.minimum(block_experts, sorted_P[-1:])  # left over: more of the last expert's
        tokens_P = order_P // self.k
        padding_P = tokens_P.index_select(0, edges_N.index_select(0, self._block_experts)).repeat_interleave(size)
        self._tokens = padding_P.scatter(0, sorted_rows_P, tokens_P)
        self._gates = gates_TJ.new_zeros(blocks * size).scatter(0, rows_P, gates_TJ.flatten())

    def pair_gates(self) -> torch.Tensor:
        return self._gates.unsqueeze(1)

    def pair_experts(self) -> torch.Tensor:
        return self._block_experts.repeat_interleave(self._size)

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        # A yᵀ and not y Aᵀ: a product with few rows is faster than one with few columns.
        h_BRS = torch.bmm(self._own(A), self._blocks(y_PM).transpose(1, 2))
        return h_BRS.transpose(1, 2).flatten(0, 1)

    def expand(self, h_PR: torch.Tensor, B: torch.Tensor, onto_PM: torch.Tensor | None = None) -> torch.Tensor:
        if onto_PM is None:
            return torch.bmm(self._blocks(h_PR), self._own(B)).flatten(0, 1)
        self._blocks(onto_PM).baddbmm_(self._blocks(h_PR), self._own(B))
        return onto_PM

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        products = torch.bmm(self._blocks(h_PR).transpose(1, 2), self._blocks(y_PM))
        # An expert's blocks are contiguous. Unlike `index_add`, this gives the same bits in every run on a GPU.
        sums = F.embedding_bag(self._block_range, products.flatten(1), self._first_blocks, mode="sum")
        return sums.view(self.n, *products.shape[1:])

    def _blocks(self, y_PM: torch.Tensor) -> torch.Tensor:
        return y_PM.view(self._block_experts.shape[0], self._size, y_PM.shape[1])

    def _own(self, A: torch.Tensor) -> torch.Tensor:
        return A.index_select(0, self._block_experts)


def _block_size(pairs: int, num_experts: int) -> int:
    """A power of two from 8 to 128: padding adds about an eighth for many pairs, up to a half for few per expert."""
    size = 8 if pairs < 32 * num_experts else 16
    while size < 128 and 16 * size * num_experts <= pairs:
        size *= 2
    return size


class Sorted(_Part):
    """Sorts pairs by their expert for grouped products: no padding, but not for all sizes (see `choosing.py`)."""

    def __init__(self, experts_TJ: torch.Tensor, gates_TJ: torch.Tensor, num_experts: int, scaling: float) -> None:
        super().__init__(experts_TJ, gates_TJ, num_experts, scaling)
        self._experts, self._order = experts_TJ.flatten().sort(stable=True)
        positions = torch.arange(self._order.numel(), device=experts_TJ.device)
        self._rows = torch.empty_like(self._order).scatter_(0, self._order, positions).view(experts_TJ.shape)
        self._tokens = self._order // self.k
        experts = torch.arange(num_experts, device=experts_TJ.device)
        self._ends = torch.searchsorted(self._experts, experts, right=True).to(torch.int32)

    def pair_gates(self) -> torch.Tensor:
        return self.gates.flatten().index_select(0, self._order).unsqueeze(1)

    def pair_experts(self) -> torch.Tensor:
        return self._experts

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(y_PM, A.transpose(1, 2), offs=self._ends)

    def expand(self, h_PR: torch.Tensor, B: torch.Tensor, onto_PM: torch.Tensor | None = None) -> torch.Tensor:
        y_PM = F.grouped_mm(h_PR, B, offs=self._ends)
        return y_PM if onto_PM is None else onto_PM.add_(y_PM)

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(h_PR.T, y_PM, offs=self._ends)


class InParts(Dispatch):
    """Several parts of `PART_SLOTS` slots each."""

    def __init__(
        self,
        part: type[_Part],
        experts_TK: torch.Tensor,
        gates_TK: torch.Tensor,
        num_experts: int,
        scaling: float,
        all_columns: bool = False,
    ) -> None:
        super().__init__(experts_TK, gates_TK, num_experts, scaling, all_columns)
        slots = zip(experts_TK.split(PART_SLOTS, dim=1), gates_TK.split(PART_SLOTS, dim=1), strict=True)
        self._parts = [part(experts_TJ, gates_TJ, num_experts, scaling) for experts_TJ, gates_TJ in slots]

    @property
    def parts(self) -> Sequence[Dispatch]:
        return self._parts
