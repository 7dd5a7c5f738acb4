"""
Which `Dispatch` computes a batch: all decisions that depend on sizes, on the dtype and on the device.

`choose_method` decides once for each layer and batch:

    method         products of tokens              products of pairs (hidden part of mixing "output")
    dense          all experts' columns, masked    all experts' columns, masked
    dense-blocks   all experts' columns, masked    blocks of one expert each
    dense-sorted   all experts' columns, masked    torch's grouped products
    blocks         blocks of one expert each       blocks of one expert each
    sorted         torch's grouped products        torch's grouped products
    gather         a copy of each token's experts  a copy of each pair's matrices

Legend: T tokens, n experts, k slots, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch

from .dispatch import Blocks, Dense, Dispatch, Gather, InParts, Sorted, statically_known

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


@dataclass(frozen=True)
class Crossovers:
    """
    Where one method becomes faster than another on a kind of device.

    Args:
        columns: with at most this many columns n·r, one product of the tokens with all experts beats products by pair.
        pair_columns: the same for products of pairs, of mixing "output".
        pairs: with at most this many pairs T·k (decoding), sorting costs more than it saves.
        narrow_pairs: with at most this many, copies of their experts' matrices beat even narrow products with all.
        copied_share: but in mixing "projection", where these are fewer operations, only with at most n times this.
        grouped: the dtypes for which torch has a kernel for grouped products. For others it waits for the device and
            multiplies one expert after the other, and no CUDA graph can be captured.
        narrow_grouped: whether these beat blocks of narrow experts, too.
        tokens: of a larger batch, mixing "output" computes so many at once. The activations of all pairs, k times those
            of the FFN, would not stay in a CPU's cache, and take most of the memory of a pass.
    """

    columns: int
    pair_columns: int
    pairs: int
    narrow_pairs: int
    copied_share: float = 1 / 8
    grouped: tuple[torch.dtype, ...] = ()
    narrow_grouped: bool = True
    tokens: int = 4096


# Measured: the CPU's (`python -m benchmarks.dispatch`), and an H100's columns, of which 512 were the most that were
# tried (`python -m benchmarks.gpu`). There copies were fastest up to 128 pairs, as launches take the time; but in a
# CUDA graph, as vLLM has them, bytes do. So 32, as all values of other GPUs, from a roofline of an H100
# (`python -m benchmarks.launches --methods`).
_GPU = Crossovers(columns=512, pair_columns=256, pairs=32, narrow_pairs=32)
DEVICES = {
    "cpu": Crossovers(
        columns=128,
        pair_columns=0,
        pairs=32,
        narrow_pairs=8,
        copied_share=1,
        grouped=(torch.float32,),
        narrow_grouped=False,
        tokens=1024,
    ),
    "gpu": _GPU,
    "cuda 9": replace(_GPU, pair_columns=512, grouped=(torch.bfloat16,)),  # H100, H200
    "cuda 10": replace(_GPU, grouped=(torch.bfloat16,)),  # B200
}


@torch.compiler.assume_constant_result
def device_kind(device: torch.device) -> str:
    """The device's key in `DEVICES`. NVIDIA's GPUs of one major compute capability are alike."""
    if device.type in ("cpu", "meta"):
        return "cpu"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        kind = f"cuda {torch.cuda.get_device_capability(device)[0]}"
        return kind if kind in DEVICES else "gpu"
    return "gpu"


_pinned: Method = "auto"


@contextmanager
def pin_dispatch(method: Method) -> Iterator[None]:
    """
    A context manager: inside the block, the experts are computed by one fixed method, whatever the number of tokens.

    All methods agree up to rounding. Pin one for `torch.compile` with varying lengths, or to compare methods.

    Args:
        method: `"dense"`: masked products with all experts' matrices. `"blocks"`: tokens sorted by expert into blocks,
            batched products. `"sorted"`: the same without padding, by torch's grouped product. `"gather"`: a copy of
            the expert's matrices for each pair (few tokens). `"dense-blocks"`, `"dense-sorted"`: dense where a token's
            input or output is multiplied, blocks or sorted for the hidden activations of mixing `"output"`. `"auto"`,
            which holds outside the block: chosen by the device's crossovers.

    Example:

    ```python
    >>> from peft import get_peft_model
    >>> from transformers import AutoModelForCausalLM
    >>> from moe_peft import MoELoraConfig, pin_dispatch
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> model = get_peft_model(base, MoELoraConfig(task_type="CAUSAL_LM"))
    >>> with pin_dispatch("blocks"):
    ...     outputs = model(**base.dummy_inputs)
    ```
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
    The fastest method for a batch.

    Copies of the experts are fastest for few pairs (decoding). Mixing "projection" never needs the rows of single pairs
    (`Dispatch.update`), so products with all experts are as fast, as long as they are narrow, or each token has half of
    the experts. Else blocks for many pairs, or grouped products, which need no padding.

    A graph of torch.compile that serves batches of several sizes has the method for many pairs: asking for their number
    would compile it anew for each.

    Args:
        unit: a common divisor of all widths.
    """
    if _pinned != "auto":
        unit = math.gcd(r, unit)
        if _pinned.endswith("sorted") and not _has_grouped_mm(unit, dtype):
            raise ValueError(
                f"pin_dispatch({_pinned!r}): torch has no grouped product for rows of {unit} {dtype}; use 'blocks'"
            )
        return _pinned
    best = DEVICES[device_kind(device)]
    columns = num_experts * r
    narrow = columns <= best.columns
    if not mixes_outputs and (narrow or 2 * k >= num_experts):
        few = min(best.narrow_pairs, int(num_experts * best.copied_share))
        return "gather" if statically_known(tokens * k <= few) else "dense"
    if statically_known(tokens * k <= (best.narrow_pairs if narrow else best.pairs)):
        return "gather"
    if columns <= best.pair_columns or statically_known(tokens * k <= best.pairs):
        return "dense"
    grouped = dtype in best.grouped and (best.narrow_grouped or not narrow)
    if grouped and _has_grouped_mm(math.gcd(r, unit), dtype):
        return "dense-sorted" if narrow else "sorted"
    return "dense-blocks" if narrow else "blocks"


def _has_grouped_mm(unit: int, dtype: torch.dtype) -> bool:
    """
    Whether torch's grouped product supports these sizes. Rows must be a multiple of 16 bytes and not float64; under
    torch.compile, its shape function requires bfloat16.
    """
    supported = dtype in (torch.bfloat16, torch.float16, torch.float32) and (unit * dtype.itemsize) % 16 == 0
    return supported and (dtype == torch.bfloat16 or not torch.compiler.is_compiling())


class Routes(NamedTuple):
    """
    Where a batch's tokens go, and what the experts' products need to know of it.

    Args:
        experts: each token's experts, int64 [T, k].
        gates: their gates, [T, k].
        num_experts: how many experts have matrices.
        r: their rank.
        unit: a common divisor of all widths.
        scaling: the factor of every expert's update.
        mixes_outputs: whether the experts' complete outputs are mixed, not their updates.
        has_base: whether tokens may go to the base as it is: to the expert after these, or to -1.
    """

    experts: torch.Tensor
    gates: torch.Tensor
    num_experts: int
    r: int
    unit: int
    scaling: float
    mixes_outputs: bool
    has_base: bool

    def of(self, tokens: slice) -> Routes:
        """Those of some tokens."""
        return self._replace(experts=self.experts[tokens], gates=self.gates[tokens])

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Whose matrices each slot takes, [T, k], and whether they change the base; None: all do. A slot of the base has
        those of some other expert.
        """
        if not self.has_base:
            return self.experts, None
        updated_TK = (self.experts >= 0) & (self.experts < self.num_experts)
        return self.experts.clamp(0, self.num_experts - 1), updated_TK

    def method(self, dtype: torch.dtype) -> Method:
        """That which suits the batch's size, or that `pin_dispatch` sets; dense without tokens."""
        tokens, k = self.experts.shape
        if statically_known(tokens == 0):  # what batched and grouped products do without rows depends on the device
            return "dense"
        n, r, unit = self.num_experts, self.r, self.unit
        return choose_method(tokens, k, n, r, unit, dtype, self.mixes_outputs, self.gates.device)

    def dispatch(self, dtype: torch.dtype) -> Dispatch:
        """By `method`; products are in this dtype."""
        experts_TK, updated_TK = self.matrices()
        make = _METHODS[self.method(dtype)]
        dispatch = make(experts_TK, self.gates.to(dtype), self.num_experts, self.scaling, updated_TK=updated_TK)
        dispatch.mixes_outputs = self.mixes_outputs
        return dispatch


def tokens_at_once(x_TD: torch.Tensor) -> int:
    """How many tokens of a batch have their experts' activations at the same time, with mixing "output"."""
    if torch.compiler.is_compiling():  # which has no loop over a number that it does not know, and fuses operations
        return x_TD.shape[0]
    return DEVICES[device_kind(x_TD.device)].tokens
