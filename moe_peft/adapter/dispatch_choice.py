"""
Chooses the `Dispatch` that computes a batch. All decisions by sizes, dtype and device are here.

`choose_method` decides once per layer and batch:

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .dispatch import Blocks, Dense, Dispatch, Gather, Pairs, Sorted, Views, statically_known

DispatchMethod = Literal["auto", "dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"]
# Each method's pairs, and whether products of tokens use the columns of all experts.
_METHODS: dict[str, tuple[type[Pairs], bool]] = {
    "dense": (Dense, True),
    "blocks": (Blocks, False),
    "sorted": (Sorted, False),
    "gather": (Gather, False),
    "dense-blocks": (Blocks, True),
    "dense-sorted": (Sorted, True),
}


@dataclass(frozen=True)
class Crossovers:
    """
    Sizes at which one method becomes faster than another on a kind of device.

    Args:
        columns: with at most this many columns n·r, one product of the tokens with all experts beats products by pair.
        pair_columns: the same for products of pairs in mixing "output".
        pairs: with at most this many pairs T·k (decoding), sorting costs more than it saves.
        narrow_pairs: with at most this many pairs, copies of the experts' matrices beat even narrow products with all
            experts.
        copied_share: in mixing "projection", where products with all experts take fewer operations, copies are used
            only with at most n times this many pairs.
        grouped: the dtypes for which torch has a kernel for grouped products. For other dtypes, torch waits for the
            device and multiplies one expert after the other, so no CUDA graph can be captured.
        narrow_grouped: whether grouped products beat blocks for narrow experts, too.
        tokens: mixing "output" splits a larger batch and computes this many tokens at once. The activations of all
            pairs are k times the activations of the FFN. They would not stay in a CPU's cache, and take most of the
            memory of a pass.
    """

    columns: int
    pair_columns: int
    pairs: int
    narrow_pairs: int
    copied_share: float = 1 / 8
    grouped: tuple[torch.dtype, ...] = ()
    narrow_grouped: bool = True
    tokens: int = 4096


# Measured: all values of the CPU (`python -m benchmarks.dispatch`), and `columns` of an H100, where 512 was the largest
# value tried (`python -m benchmarks.gpu`). On the H100, copies were fastest up to 128 pairs, because launches take the
# time. In a CUDA graph, as in vLLM, bytes take the time. So both numbers of pairs are 32. They and all values of other
# GPUs come from a roofline of an H100 (`python -m benchmarks.launches --methods`).
_GPU = Crossovers(columns=512, pair_columns=256, pairs=32, narrow_pairs=32)
_CPU = Crossovers(
    columns=128,
    pair_columns=0,
    pairs=32,
    narrow_pairs=8,
    copied_share=1,
    grouped=(torch.float32,),
    narrow_grouped=False,
    tokens=1024,
)
DEVICES = {
    "cpu": _CPU,
    # Grouped products start and join all threads once for each expert. With two threads beside other programs, blocks
    # take .65 to .9 of their time (32 and 64 experts); with one thread, 1.05.
    "cpu, several threads": replace(_CPU, grouped=()),
    "gpu": _GPU,
    "cuda 9": replace(_GPU, pair_columns=512, grouped=(torch.bfloat16,)),  # H100, H200
    "cuda 10": replace(_GPU, grouped=(torch.bfloat16,)),  # B200
}


@torch.compiler.assume_constant_result
def device_kind(device: torch.device) -> str:
    """Return the device's key in `DEVICES`. NVIDIA GPUs of one major compute capability are alike."""
    if device.type in ("cpu", "meta"):
        return "cpu" if torch.get_num_threads() == 1 else "cpu, several threads"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        kind = f"cuda {torch.cuda.get_device_capability(device)[0]}"
        return kind if kind in DEVICES else "gpu"
    return "gpu"


_pinned: DispatchMethod = "auto"


@contextmanager
def pin_dispatch(method: DispatchMethod) -> Iterator[None]:
    """
    Compute the experts inside the `with` block by one fixed method, whatever the number of tokens.

    All methods agree up to rounding. Pin one for `torch.compile` with varying lengths, or to compare methods.

    Args:
        method: `"dense"`: masked products with all experts' matrices. `"blocks"`: tokens sorted by expert into blocks,
            batched products. `"sorted"`: the same without padding, by torch's grouped product. `"gather"`: a copy of
            the expert's matrices for each pair (few tokens). `"dense-blocks"`, `"dense-sorted"`: dense for products
            with a token's input or output, blocks or sorted for the hidden activations of mixing `"output"`. `"auto"`,
            the method outside the block: chosen by the device's crossovers.

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
) -> DispatchMethod:
    """
    Return the fastest method for a batch.

    For few pairs (decoding), copies of the experts are fastest. Mixing "projection" never needs the rows of single
    pairs (`Dispatch.update`), so products with all experts are as fast, if they are narrow or each token has half of
    the experts. Otherwise, use blocks for many pairs, or grouped products, which need no padding.

    A torch.compile graph for batches of several sizes uses the method for many pairs. A check of their number would
    compile a new graph for each.

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
    Return whether torch's grouped product supports these sizes. Rows must be a multiple of 16 bytes and not float64.
    Under torch.compile, its shape function requires bfloat16.
    """
    supported = dtype in (torch.bfloat16, torch.float16, torch.float32) and (unit * dtype.itemsize) % 16 == 0
    return supported and (dtype == torch.bfloat16 or not torch.compiler.is_compiling())


class BatchRoutes(NamedTuple):
    """
    Experts and gates of a batch's tokens, and the sizes needed for the experts' products.

    Args:
        experts: each token's experts, int64 [T, k].
        gates: their gates, [T, k].
        num_experts: number of experts with matrices.
        r: their rank.
        unit: a common divisor of all widths.
        scaling: the factor of every expert's update.
        mixes_outputs: whether to mix the experts' complete outputs, not their updates.
        has_base: whether tokens may go to the unchanged base: to expert `num_experts` or to -1.
    """

    experts: torch.Tensor
    gates: torch.Tensor
    num_experts: int
    r: int
    unit: int
    scaling: float
    mixes_outputs: bool
    has_base: bool

    def of(self, tokens: slice) -> BatchRoutes:
        """Return the routes of some tokens."""
        return self._replace(experts=self.experts[tokens], gates=self.gates[tokens])

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Return the expert index of each slot's matrices, [T, k], and whether the slot updates the base (None: all do). A
        slot of the base gets an arbitrary index.
        """
        if not self.has_base:
            return self.experts, None
        updated_TK = (self.experts >= 0) & (self.experts < self.num_experts)
        return self.experts.clamp(0, self.num_experts - 1), updated_TK

    def method(self, dtype: torch.dtype) -> DispatchMethod:
        """Return the method set by `pin_dispatch`, or the fastest for the batch's size. Return dense for no tokens."""
        tokens, k = self.experts.shape
        if statically_known(tokens == 0):  # batched and grouped products without rows depend on the device
            return "dense"
        n, r, unit = self.num_experts, self.r, self.unit
        return choose_method(tokens, k, n, r, unit, dtype, self.mixes_outputs, self.gates.device)

    def dispatch(self, dtype: torch.dtype) -> Dispatch:
        """Return the batch's dispatch by `method`, with products in this dtype."""
        experts_TK, updated_TK = self.matrices()
        pairs, columns = _METHODS[self.method(dtype)]
        gates_TK = self.gates.to(dtype)
        return Dispatch(pairs, columns, experts_TK, gates_TK, self.num_experts, self.scaling, updated_TK)

    def token(self, dtype: torch.dtype) -> Gather | Views:
        """
        Return the experts of a single token, for products in this dtype: views of their matrices where reading the
        experts' numbers is free, else copies.
        """
        if _may_read(self.experts):
            return Views(self.experts, self.gates.to(dtype), self.num_experts, self.scaling)
        experts_1K, updated_1K = self.matrices()
        return Gather(experts_1K, self.gates.to(dtype), self.num_experts, self.scaling, updated_1K)


def _may_read(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's numbers can be read without waiting for a device, and no trace would keep them."""
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return False
    return get_proxy_mode() is None and not torch.jit.is_tracing()


def tokens_at_once(x_TD: torch.Tensor) -> int:
    """
    Return how many tokens of a batch are computed at once in mixing "output", each with the activations of all its
    experts.
    """
    if torch.compiler.is_compiling():  # it cannot loop over an unknown number of slices, and fuses operations
        return x_TD.shape[0]
    return DEVICES[device_kind(x_TD.device)].tokens
