"""Evaluation that leaves a model trainable, products in the dtypes they are given, and memory made free."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """
    Evaluation mode inside the block, but for quantized linears: one of bitsandbytes, run in evaluation mode on a CPU,
    repacks its 4-bit weight for inference, and no gradient passes it any more.
    """
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = isinstance(part, nn.Linear) and type(part) is not nn.Linear
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager:
    """Inside the block, autocast leaves the dtypes of products on the tensor's device alone."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def free_memory() -> None:
    """Let go of what is no longer used: trainers and models refer to each other, and the next model needs the room."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
