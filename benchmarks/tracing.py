"""
What code does on a GPU, without one: tensors without values (on the meta device) run the same Python and autograd, and
a mode sees every operation.

An operation is one launch, with the bytes of its inputs and outputs; views are none. Real kernels differ a little: a
sort is several. An operation that has to know a tensor's values, or that copies between this device and the CPU, is a
wait: the CPU stands still until the GPU has done all that it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
# Besides views: what makes or renames a tensor without touching its memory.
FREE = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach, aten.alias,
    aten._unsafe_view, aten._reshape_alias, aten.lift_fresh, aten.t, aten.transpose, aten.view, torch.ops.prim.device,
}  # fmt: skip
PRODUCTS = {aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.baddbmm_, aten._grouped_mm}
GATHERS = {aten.index_select, aten.gather, aten.index, aten.embedding}
READS_VALUES = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.is_nonzero, aten.equal}


class Operation(NamedTuple):
    """One launch: its name, the bytes that it reads and writes, a product's multiplications and additions."""

    name: str
    bytes: int
    flops: int
    waits: bool
    dtypes: tuple[torch.dtype, ...]

    def seconds(self, bandwidth: float, rate: float) -> float:
        """Bound by bytes or operations per second, whichever takes longer."""
        return max(self.bytes / bandwidth, self.flops / rate)


class Trace(TorchDispatchMode):
    """A mode that notes each operation on tensors of a device."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device = device
        self.operations: list[Operation] = []
        self._patches = ExitStack()

    def __enter__(self) -> Trace:
        # Numbers of Python's reach a GPU by a copy; on the meta device they are no operation.
        new_tensor, tensor, item = torch.Tensor.new_tensor, torch.tensor, torch.Tensor.__getitem__

        def from_python(make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            if made.device.type == self.device != "cpu":
                self.operations.append(Operation("tensor", made.numel() * made.itemsize, 0, True, (made.dtype,)))
            return made

        def indexed(own: torch.Tensor, index: Any) -> torch.Tensor:
            if own.is_meta and any(isinstance(i, list) for i in (index if isinstance(index, tuple) else (index,))):
                self.operations.append(Operation("tensor", 0, 0, True, ()))
            return item(own, index)

        for owner, name, patch in (
            (torch.Tensor, "new_tensor", lambda own, *args, **kwargs: from_python(new_tensor, own, *args, **kwargs)),
            (torch, "tensor", partial(from_python, tensor)),
            (torch.Tensor, "__getitem__", indexed),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, patch))
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        self._patches.close()
        super().__exit__(*args)

    @property
    def waits(self) -> list[str]:
        return [operation.name for operation in self.operations if operation.waits]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(tensor.device.type == self.device for tensor in inputs) and str(kwargs.get("device")) != self.device:
            return func(*args, **kwargs)
        if packet in READS_VALUES:
            self._note(func, inputs, [], waits=True)
            return func(*tree_map_only(torch.Tensor, _with_values, args), **kwargs)
        leaves_meta = packet is aten._to_copy and self.device == "meta" and str(kwargs.get("device")) == "cpu"
        result = _with_values(inputs[0]) if leaves_meta else func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not (func.is_view or packet in FREE):
            # A number on the CPU is an argument of a kernel, and no copy; so is that of `fill_`.
            places = {tensor.is_meta for tensor in [*inputs, *outputs] if tensor.dim()}
            self._note(func, inputs, outputs, waits=len(places) > 1)
        return result

    def _note(self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], waits: bool) -> None:
        packet, flops = func.overloadpacket, 0
        if packet is aten._grouped_mm:
            # With [n, r, m] as output, each row belongs to one group.
            flops = 2 * outputs[0].numel() * inputs[0].shape[-1] // (len(outputs[0]) if outputs[0].dim() == 3 else 1)
        elif packet in PRODUCTS:
            flops = 2 * outputs[0].numel() * inputs[-2].shape[-1]
        moved = [*inputs, *(output for output in outputs if all(output is not other for other in inputs))]
        size = sum(tensor.numel() * tensor.itemsize for tensor in moved)
        if packet in GATHERS:  # of the first, only the rows that are asked for
            size -= inputs[0].numel() * inputs[0].itemsize - outputs[0].numel() * outputs[0].itemsize
        dtypes = tuple(tensor.dtype for tensor in moved)
        self.operations.append(Operation(str(packet).removeprefix("aten."), size, flops, waits, dtypes))


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    """The same on the CPU; where there are no values, any will do."""
    return torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
