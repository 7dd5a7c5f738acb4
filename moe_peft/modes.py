"""Evaluation that leaves a model trainable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
