"""A device without float64, as Apple's GPUs are, played by the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _NoFloat64(TorchDispatchMode):
    """
    Fails where an operation on a tensor of the device makes float64. `Tensor.cpu()` leads off the device, `Tensor.to`
    onto it, and `torch.tensor` makes tensors beside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.beside: dict[int, weakref.ref] = {}
        to, tensor = torch.Tensor.to, torch.tensor

        def moved(own: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = to(own, *args, **kwargs)
            if any(isinstance(value, torch.device) for value in (*args, *kwargs.values())):
                self.beside.pop(id(result), None)
            return result

        self.patches = (
            mock.patch.object(torch.Tensor, "cpu", lambda own: self.put_beside(own.detach().clone())),
            mock.patch.object(torch.Tensor, "to", moved),
            mock.patch.object(torch, "tensor", lambda *args, **kwargs: self.put_beside(tensor(*args, **kwargs))),
        )

    def put_beside(self, tensor: torch.Tensor) -> torch.Tensor:
        self.beside[id(tensor)] = weakref.ref(tensor)
        return tensor

    def is_beside(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.beside and self.beside[id(tensor)]() is tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        beside = func is torch.ops.aten.lift_fresh.default or all(
            map(self.is_beside, inputs)
        )  # the one of torch.tensor
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                assert beside or tensor.dtype != torch.float64, f"{func} makes float64 on the device"
                if beside:
                    self.put_beside(tensor)
        return result


@contextmanager
def no_float64() -> Iterator[None]:
    with ExitStack() as stack:
        for part in ((mode := _NoFloat64()), *mode.patches):
            stack.enter_context(part)
        yield
