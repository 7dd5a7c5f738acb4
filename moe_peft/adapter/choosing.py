"""
How the experts of a batch are computed (see `dispatch.py` for the legend). `choose_method` decides once for each layer
and batch:

    method         products of tokens              products of pairs (hidden part of mixing "output")
    dense          all experts' columns, masked    all experts' columns, masked
    dense-blocks   all experts' columns, masked    blocks of one expert each
    dense-sorted   all experts' columns, masked    torch's grouped products
    blocks         blocks of one expert each       blocks of one expert each
    sorted         torch's grouped products        torch's grouped products
    gather         a copy of each pair's matrices  a copy of each pair's matrices
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch

from .dispatch import Dense, Dispatch, Gather
from .sorting import Blocks, InParts, Sorted

# With at most this many columns n·r, one product of the tokens with all experts is cheaper than products pair by pair.
DENSE_COLUMNS = 128
# With at most this many pairs (decoding), sorting costs more than it saves.
FEW_PAIRS = 32
# With at most this many pairs, copying their experts' matrices is cheaper than even narrow products with all experts.
VERY_FEW_PAIRS = 4

Method = Literal["auto", "dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"]
# A name describes how products of pairs are computed and whether products of tokens use all columns ("dense").
_METHODS: dict[str, Callable[..., Dispatch]] = {
    "dense": partial(Dense, all_columns=True),
    "blocks": partial(InParts, Blocks),
    "sorted": partial(InParts, Sorted),
    "gather": Gather,
    "dense-blocks": partial(InParts, Blocks, all_columns=True),
    "dense-sorted": partial(InParts, Sorted, all_columns=True),
}
_pinned: Method = "auto"


@contextmanager
def pin_dispatch(method: Method) -> Iterator[None]:
    """
    Inside the block, compute the experts by one fixed method, whatever the number of tokens.

    `"dense"`: masked products with all experts' matrices. `"blocks"`: tokens sorted by expert into blocks, batched
    products. `"sorted"`: the same without padding, by torch's grouped product. `"gather"`: a copy of the expert's
    matrices for each pair (few tokens). `"dense-blocks"`, `"dense-sorted"`: dense where a token's input or output is
    multiplied, blocks or sorted for the hidden activations of mixing "output". `"auto"` (the default): chosen by
    measured crossover points. All methods agree up to rounding. Pin one for `torch.compile` with varying lengths, or to
    compare methods.

    Raises:
        ValueError: there is no such method.
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
    tokens: int,
    k: int,
    num_experts: int,
    r: int,
    unit: int,
    dtype: torch.dtype,
    mixes_outputs: bool,
    device: torch.device,
) -> Method:
    """
    The fastest method for a batch, by the crossover points that `benchmarks/dispatch.py` measures. All decisions are
    made here.

    Mixing "projection" never needs the rows of single pairs (`update`), so products with all experts are fastest as
    long as they are narrow. With mixing "output", copies of the experts are fastest for few pairs (decoding), and
    blocks for many. Where an expert gets so few tokens that blocks would be mostly padding, the grouped products of a
    GPU are fastest (on a CPU they loop over the experts).

    Args:
        unit: a common divisor of the rank and all widths.

    Raises:
        ValueError: the method that is pinned cannot compute these sizes: torch has no grouped product for them.
    """
    if _pinned != "auto":
        if _pinned.endswith("sorted") and not _has_grouped_mm(unit, dtype):
            raise ValueError(
                f"pin_dispatch({_pinned!r}): torch has no grouped product for rows of {unit} {dtype}; use 'blocks'"
            )
        return _pinned
    narrow = num_experts * r <= DENSE_COLUMNS
    if narrow and not mixes_outputs:
        return "dense"
    if tokens * k <= (VERY_FEW_PAIRS if narrow else FEW_PAIRS):
        return "gather"
    if tokens * k <= FEW_PAIRS:
        return "dense"
    if tokens < 32 * num_experts and device.type != "cpu" and _has_grouped_mm(unit, dtype):
        return "dense-sorted" if narrow else "sorted"
    return "dense-blocks" if narrow else "blocks"


def _has_grouped_mm(unit: int, dtype: torch.dtype) -> bool:
    """
    Whether torch's grouped product supports these sizes. Rows must be a multiple of 16 bytes and not float64; under
    torch.compile, its shape function requires bfloat16.
    """
    known = dtype in (torch.bfloat16, torch.float16, torch.float32) and (unit * dtype.itemsize) % 16 == 0
    return known and (dtype == torch.bfloat16 or not torch.compiler.is_compiling())


def make_dispatch(
    experts_TK: torch.Tensor,
    gates_TK: torch.Tensor,
    num_experts: int,
    r: int,
    unit: int,
    scaling: float,
    mixes_outputs: bool,
) -> Dispatch:
    """The dispatch of a batch, by the method that suits its size or that `pin_dispatch` sets; dense without tokens."""
    tokens, k = experts_TK.shape
    method = choose_method(tokens, k, num_experts, r, unit, gates_TK.dtype, mixes_outputs, gates_TK.device)
    if not tokens:  # what batched and grouped products do without rows depends on the device
        method = "dense"
    return _METHODS[method](experts_TK, gates_TK, num_experts, scaling)
