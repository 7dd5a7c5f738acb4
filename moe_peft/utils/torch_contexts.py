"""Contexts for evaluation and for products without autocast, and a function that frees memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


def double(x: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to float64, on its device or, if the device has no float64 (Apple's GPUs), on the CPU."""
    return (x.cpu() if x.device.type == "mps" else x).double()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """
    Set evaluation mode inside the block, but training mode for bitsandbytes' linears. On a CPU, a 4-bit linear in
    evaluation mode repacks its weight for inference, and gradients no longer pass through it.
    """
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = any(kind.__module__.startswith("bitsandbytes.") for kind in type(part).__mro__)
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager:
    """Disable autocast on the tensor's device inside the block, so that products keep the dtypes of their inputs."""
    return torch.autocast(tensor.device.type, enabled=False) if is_autocast(tensor) else nullcontext()


def is_autocast(tensor: torch.Tensor) -> bool:
    """Return whether autocast is on for the tensor's device."""
    device = tensor.device.type
    return device != "meta" and torch.is_autocast_enabled(device)  # torch raises for the meta device


def free_memory() -> None:
    """Free unused memory for the next model. Trainers and models refer to each other, so they are not freed at once."""
    gc.collect()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        getattr(torch, accelerator.type).empty_cache()
