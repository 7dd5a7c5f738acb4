"""
How tokens meet their experts: the same five linear maps in several ways of computing.

A *pair* is a (token, slot): token t with the j-th of its k experts, P pairs in all. A dispatch knows, for one batch,
which expert and which gate each pair has. It offers

    spread   [T, m] → [P, m]            each token's row to its pairs (a new tensor)
    collect  [P, m] → [T, m]            sum of a token's pairs, gated if asked (the transpose of spread)
    shrink   [P, m], [n, r, m] → [P, r]  y A_iᵀ, i the pair's expert
    expand_onto  adds h B_i to a [P, m] in place, h [P, r], B [n, r, m]  (expanding: the transpose of shrink)
    outer    [P, r], [P, m] → [n, r, m]  Σ h yᵀ over each expert's pairs (the weights' gradient)

and what layers use: `shrink_tokens`, `expand_collect` and, with the gates between, `update`. A dispatch may consist of
`parts`, one per slot, which are worked off one after the other: temporary memory is then that of one slot, whatever k.
No way of computing loops over experts or tokens, or waits for the device; all shapes are static.

Legend: T tokens, n experts, k slots, P = T·k pairs, r rank, m a width (in or out features).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F

# Up to this many columns n·r, one product with all experts costs less than finding each pair's own.
DENSE_COLUMNS = 128
# Up to this many pairs (decoding), sorting costs more than it saves …
FEW_PAIRS = 32
# … and up to this many, copying even a few experts' matrices costs less than products with all.
VERY_FEW_PAIRS = 4

Method = Literal["auto", "dense", "blocks", "sorted", "gather"]
_pinned: Method = "auto"


@contextmanager
def pin_dispatch(method: Method) -> Iterator[None]:
    """
    Compute the experts by one fixed method inside the block, whatever the number of tokens.

    `"dense"`: masked products with all experts' matrices. `"blocks"`: tokens sorted by expert into blocks, batched
    products. `"sorted"`: the same without padding, by torch's grouped product. `"gather"`: each pair's own copy of its
    expert's matrices (few tokens). `"auto"`: by measured crossover (the default). All agree up to rounding. Pin one for
    `torch.compile` with changing lengths, or to compare them.
    """
    global _pinned
    if method not in ("auto", *_METHODS):
        raise ValueError(f"pin_dispatch: method={method!r}: use one of {['auto', *_METHODS]}")
    before, _pinned = _pinned, method
    try:
        yield
    finally:
        _pinned = before


def choose_method(
    tokens: int, k: int, num_experts: int, r: int, unit: int, dtype: torch.dtype, mixes_outputs: bool
) -> Method:
    """
    The fastest way for a batch, by the crossovers of `benchmarks/dispatch.py`.

    With mixing "projection" a pair's own rows are never needed (`update`), so products with all experts win as long as
    they are narrow. With "output", few pairs (decoding) are best served by copies of their experts; many by blocks or,
    where an expert gets so few tokens that blocks would be mostly padding, by grouped products.

    Args:
        unit: a common divisor of the rank and all widths.
    """
    if _pinned != "auto":
        if _pinned == "sorted" and not _has_grouped_mm(unit, dtype):
            raise ValueError(
                f"pin_dispatch('sorted'): torch has no grouped product for rows of {unit} {dtype}; use 'blocks'"
            )
        return _pinned
    narrow = num_experts * r <= DENSE_COLUMNS
    if narrow and not mixes_outputs:
        return "dense"
    if tokens * k <= (VERY_FEW_PAIRS if narrow else FEW_PAIRS):
        return "gather"
    if tokens * k <= FEW_PAIRS:
        return "dense"
    return "sorted" if tokens < 32 * num_experts and _has_grouped_mm(unit, dtype) else "blocks"


def _has_grouped_mm(unit: int, dtype: torch.dtype) -> bool:
    """It wants rows of a multiple of 16 bytes and no float64; its shape function, for torch.compile, bfloat16."""
    known = dtype in (torch.bfloat16, torch.float16, torch.float32) and (unit * dtype.itemsize) % 16 == 0
    return known and (dtype == torch.bfloat16 or not torch.compiler.is_compiling())


class Dispatch:
    """
    The part all methods share: pairs in the order of (token, slot), and products with all experts at once.

    Args:
        experts_TK: each token's experts, int64 [T, k].
        gates_TK: their gates [T, k], in the dtype of the products.
        num_experts: n.
        scaling: s, the factor of every expert's update.
    """

    def __init__(self, experts_TK: torch.Tensor, gates_TK: torch.Tensor, num_experts: int, scaling: float) -> None:
        self.experts, self.gates = experts_TK, gates_TK
        self.scaling = scaling
        self.tokens, self.k = experts_TK.shape
        self.n = num_experts
        self._gate_table: torch.Tensor | None = None

    def pair_gates(self) -> torch.Tensor:
        """Gates as a column [P, 1] in the pairs' order."""
        return self.gates.reshape(-1, 1)

    def to_slots(self, values_P: torch.Tensor) -> torch.Tensor:
        """One value per pair, [P] → [T, k] (the transpose of `pair_gates`)."""
        return values_P.view(-1, self.k)

    def pair_experts(self) -> torch.Tensor:
        """Each pair's expert, [P]."""
        return self.experts.reshape(-1)

    def pair_rows(self) -> torch.Tensor:
        """[P]: the row of each pair in a table of (token, expert), [T·n, …]."""
        tokens_T1 = torch.arange(self.tokens, device=self.experts.device).unsqueeze(1)
        return (tokens_T1 * self.n + self.experts).flatten()

    def gate_table(self) -> torch.Tensor:
        """`s·g` of every expert, zero for those a token does not have, [T, n, 1]; made once for all projections."""
        if self._gate_table is None:
            gates_TK = self.gates * self.scaling
            empty = gates_TK.new_zeros(self.tokens, self.n)
            self._gate_table = empty.scatter(1, self.experts, gates_TK).unsqueeze(-1)
        return self._gate_table

    def spread(self, x_TM: torch.Tensor) -> torch.Tensor:
        return x_TM.repeat_interleave(self.k, dim=0)

    def collect(self, y_PM: torch.Tensor, gated: bool = False) -> torch.Tensor:
        y_TKM = y_PM.view(self.tokens, self.k, y_PM.shape[1])
        return (y_TKM * self.gates.unsqueeze(-1) if gated else y_TKM).sum(1)

    @property
    def parts(self) -> list[Dispatch]:
        """Dispatches that together have all pairs."""
        return [self]

    def shrink_tokens(self, x_TM: torch.Tensor, A: torch.Tensor) -> list[torch.Tensor]:
        """`shrink(spread(x))` [P, r] of each part."""
        if self.few_columns(A):
            table = (x_TM @ A.flatten(0, 1).T).view(-1, A.shape[1])
            rows = [part.pair_rows() for part in self.parts]
            return list(table.index_select(0, torch.cat(rows)).split([len(r) for r in rows]))  # one backward for all
        return [part.shrink(part.spread(x_TM), A) for part in self.parts]

    def expand_collect(self, h: list[torch.Tensor], B: torch.Tensor, base_TM: torch.Tensor) -> torch.Tensor:
        """`base + s Σ g B h`, [T, m], from h [P, r] of each part."""
        weighted = [h_PR * (part.pair_gates() * self.scaling) for h_PR, part in zip(h, self.parts, strict=True)]
        if self.few_columns(B):
            # A token's experts differ, so its pairs share one row [n·r], and one product gives their sum.
            table = base_TM.new_zeros(self.tokens * self.n, B.shape[1])
            for h_PR, part in zip(weighted, self.parts, strict=True):
                table.index_add_(0, part.pair_rows(), h_PR)  # not a copy: padding adds its zeros
            return torch.addmm(base_TM, table.view(self.tokens, self.n * B.shape[1]), B.flatten(0, 1))
        for h_PR, part in zip(weighted, self.parts, strict=True):
            base_TM = base_TM + part.collect(part.expand(h_PR, B))
        return base_TM

    def update(self, x_TM: torch.Tensor, A: torch.Tensor, B: torch.Tensor, base_TM: torch.Tensor) -> torch.Tensor:
        """`base + s Σ_i g_i B_i A_i x`, [T, out]: the experts' mixed low-rank update of one projection."""
        if self.few_columns(A):
            h_TNR = (x_TM @ A.flatten(0, 1).T).view(self.tokens, self.n, A.shape[1]) * self.gate_table()
            return torch.addmm(base_TM, h_TNR.flatten(1), B.flatten(0, 1))
        return self.expand_collect(self.shrink_tokens(x_TM, A), B, base_TM)

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def expand_onto(self, y_PM: torch.Tensor, h_PR: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def expand(self, h_PR: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """`h B_i`, [P, m]."""
        return self.expand_onto(h_PR.new_zeros(h_PR.shape[0], B.shape[2]), h_PR, B)

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def few_columns(self, A: torch.Tensor) -> bool:
        """Whether a product with all experts' matrices at once is the cheaper way."""
        return A.shape[0] * A.shape[1] <= DENSE_COLUMNS


class Dense(Dispatch):
    """Products with the matrices of all experts at once; the columns of other experts are masked."""

    def few_columns(self, A: torch.Tensor) -> bool:
        return True

    def _mask(self, h_PR: torch.Tensor) -> torch.Tensor:
        """[P, r] → [P, n·r], zero outside the pair's expert."""
        one_hot_PN = F.one_hot(self.pair_experts(), self.n).to(h_PR.dtype)
        return (one_hot_PN.unsqueeze(2) * h_PR.unsqueeze(1)).flatten(1)

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        h_PNR = (y_PM @ A.flatten(0, 1).T).view(-1, self.n, A.shape[1])
        index = self.pair_experts().view(-1, 1, 1).expand(-1, 1, A.shape[1])
        return h_PNR.gather(1, index).squeeze(1)

    def expand_onto(self, y_PM: torch.Tensor, h_PR: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return y_PM.addmm_(self._mask(h_PR), B.flatten(0, 1))

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        return (self._mask(h_PR).T @ y_PM).view(self.n, h_PR.shape[1], -1)


class Gather(Dispatch):
    """Each pair takes a copy of its expert's matrices: for few tokens and many experts."""

    def few_columns(self, A: torch.Tensor) -> bool:
        return False

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return torch.bmm(A.index_select(0, self.pair_experts()), y_PM.unsqueeze(-1)).squeeze(-1)

    def expand_onto(self, y_PM: torch.Tensor, h_PR: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        y_PM.unsqueeze(1).baddbmm_(h_PR.unsqueeze(1), B.index_select(0, self.pair_experts()))
        return y_PM

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        products = h_PR.unsqueeze(2) * y_PM.unsqueeze(1)
        return products.new_zeros(self.n, *products.shape[1:]).index_add(0, self.pair_experts(), products)


class _Slot(Dispatch):
    """A part with one slot whose rows are in an order of their own: the tokens' `rows` [T], the rows' `tokens` [P]."""

    def __init__(
        self,
        experts_T1: torch.Tensor,
        gates_T1: torch.Tensor,
        num_experts: int,
        scaling: float,
        rows_T: torch.Tensor,
        tokens_P: torch.Tensor,
    ) -> None:
        super().__init__(experts_T1, gates_T1, num_experts, scaling)
        self._rows, self._tokens = rows_T, tokens_P

    def to_slots(self, values_P: torch.Tensor) -> torch.Tensor:
        return values_P.index_select(0, self._rows).unsqueeze(1)

    def pair_rows(self) -> torch.Tensor:
        return self._tokens * self.n + self.pair_experts()

    def spread(self, x_TM: torch.Tensor) -> torch.Tensor:
        return x_TM.index_select(0, self._tokens)

    def collect(self, y_PM: torch.Tensor, gated: bool = False) -> torch.Tensor:
        y_TM = y_PM.index_select(0, self._rows)
        if not gated:
            return y_TM
        return y_TM * self.gates if torch.is_grad_enabled() else y_TM.mul_(self.gates)


class Blocks(Dispatch):
    """
    Slot by slot, tokens sorted by their expert and padded to blocks of one expert each: batched products of blocks.

    The number of blocks depends on the sizes alone, whatever the routing, and every dtype and width will do. A part has
    one slot; its rows are tokens in the order of their experts and, in between, padding: copies of some token with gate
    0, so that they neither reach an output nor a gradient.
    """

    def __init__(self, experts_TK: torch.Tensor, gates_TK: torch.Tensor, num_experts: int, scaling: float) -> None:
        super().__init__(experts_TK, gates_TK, num_experts, scaling)
        n, size, device = num_experts, _block_size(self.tokens, num_experts), experts_TK.device
        blocks = (self.tokens + n * (size - 1)) // size if self.tokens else 0  # of the worst routing
        experts_KT = experts_TK.T.contiguous()
        sorted_KT, order_KT = experts_KT.sort(dim=1, stable=True)
        edges_KN = torch.searchsorted(sorted_KT, torch.arange(n + 1, device=device).expand(self.k, -1).contiguous())
        ends_KN = ((edges_KN.diff(dim=1) + size - 1) // size).cumsum(1)  # after each expert's last block
        starts_KN = torch.cat([ends_KN.new_zeros(self.k, 1), ends_KN[:, :-1]], dim=1) * size
        index_T = torch.arange(self.tokens, device=device).expand(self.k, -1)
        sorted_rows_KT = index_T + (starts_KN - edges_KN[:, :-1]).gather(1, sorted_KT)
        rows_KT = torch.empty_like(order_KT).scatter_(1, order_KT, sorted_rows_KT)
        tokens_KP = rows_KT.new_zeros(self.k, blocks * size).scatter_(1, rows_KT, index_T)
        gates_KP = gates_TK.new_zeros(self.k, blocks * size).scatter(1, rows_KT, gates_TK.T)
        block_KB = torch.arange(blocks, device=device).expand(self.k, -1).contiguous()
        block_experts_KB = torch.searchsorted(ends_KN, block_KB, right=True).clamp_(max=n - 1)
        self._parts: list[Dispatch] = [
            _BlockSlot(self, slot, size, rows_KT[slot], tokens_KP[slot], gates_KP[slot], block_experts_KB[slot])
            for slot in range(self.k)
        ]

    @property
    def parts(self) -> list[Dispatch]:
        return self._parts


class _BlockSlot(_Slot):
    def __init__(
        self,
        whole: Dispatch,
        slot: int,
        size: int,
        rows_T: torch.Tensor,
        tokens_P: torch.Tensor,
        gates_P: torch.Tensor,
        block_experts_B: torch.Tensor,
    ) -> None:
        experts_T1, gates_T1 = whole.experts[:, slot : slot + 1], whole.gates[:, slot : slot + 1]
        super().__init__(experts_T1, gates_T1, whole.n, whole.scaling, rows_T, tokens_P)
        self._size, self._gates, self._block_experts = size, gates_P, block_experts_B

    def pair_gates(self) -> torch.Tensor:
        return self._gates.unsqueeze(1)

    def pair_experts(self) -> torch.Tensor:
        return self._block_experts.repeat_interleave(self._size)

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return torch.bmm(self._blocks(y_PM), self._own(A).transpose(1, 2)).flatten(0, 1)

    def expand_onto(self, y_PM: torch.Tensor, h_PR: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        self._blocks(y_PM).baddbmm_(self._blocks(h_PR), self._own(B))
        return y_PM

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        products = torch.bmm(self._blocks(h_PR).transpose(1, 2), self._blocks(y_PM))
        # Sums of blocks as a product: unlike `index_add`, the same to the bit on every run on a GPU, too.
        owner_NB = torch.arange(self.n, device=products.device).unsqueeze(1) == self._block_experts
        return (owner_NB.to(products.dtype) @ products.flatten(1)).view(self.n, *products.shape[1:])

    def _blocks(self, y_PM: torch.Tensor) -> torch.Tensor:
        return y_PM.view(self._block_experts.shape[0], self._size, y_PM.shape[1])

    def _own(self, A: torch.Tensor) -> torch.Tensor:
        return A.index_select(0, self._block_experts)


def _block_size(tokens: int, num_experts: int) -> int:
    """A power of two from 8 to 128, such that padding adds about an eighth of the tokens."""
    size = 8
    while size < 128 and 16 * size * num_experts <= tokens:
        size *= 2
    return size


class Sorted(Dispatch):
    """Slot by slot, tokens sorted by their expert: grouped products, without padding but with demands (see above)."""

    def __init__(self, experts_TK: torch.Tensor, gates_TK: torch.Tensor, num_experts: int, scaling: float) -> None:
        super().__init__(experts_TK, gates_TK, num_experts, scaling)
        columns = zip(experts_TK.split(1, dim=1), gates_TK.split(1, dim=1), strict=True)
        self._parts: list[Dispatch] = [_SortedSlot(e, g, num_experts, scaling) for e, g in columns]

    @property
    def parts(self) -> list[Dispatch]:
        return self._parts


class _SortedSlot(_Slot):
    def __init__(self, experts_T1: torch.Tensor, gates_T1: torch.Tensor, num_experts: int, scaling: float) -> None:
        self._experts, order = experts_T1.flatten().sort(stable=True)
        positions = torch.arange(order.numel(), device=order.device)
        rows = torch.empty_like(order).scatter_(0, order, positions)
        super().__init__(experts_T1, gates_T1, num_experts, scaling, rows, order)
        experts = torch.arange(num_experts, device=order.device)
        self._ends = torch.searchsorted(self._experts, experts, right=True).to(torch.int32)

    def pair_gates(self) -> torch.Tensor:
        return self.gates.index_select(0, self._tokens)

    def pair_experts(self) -> torch.Tensor:
        return self._experts

    def shrink(self, y_PM: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(y_PM, A.transpose(1, 2), offs=self._ends)

    def expand_onto(self, y_PM: torch.Tensor, h_PR: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return y_PM.add_(F.grouped_mm(h_PR, B, offs=self._ends))

    def outer(self, h_PR: torch.Tensor, y_PM: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(h_PR.T, y_PM, offs=self._ends)


_METHODS: dict[str, type[Dispatch]] = {"dense": Dense, "blocks": Blocks, "sorted": Sorted, "gather": Gather}


def make_dispatch(
    experts_TK: torch.Tensor,
    gates_TK: torch.Tensor,
    num_experts: int,
    r: int,
    unit: int,
    scaling: float,
    mixes_outputs: bool,
) -> Dispatch:
    """The dispatch of a batch, computing in the way that suits its size (or that `pin_dispatch` asks for)."""
    tokens, k = experts_TK.shape
    method = choose_method(tokens, k, num_experts, r, unit, gates_TK.dtype, mixes_outputs)
    return _METHODS[method](experts_TK, gates_TK, num_experts, scaling)
