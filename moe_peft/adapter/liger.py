"""
Liger kernels on an adapted model: the norm, rope and loss kernels stay, `MoELoraFFN` replaces the FFN kernel.

Liger patches models in three ways. It replaces classes before a model is built. Or it binds other forwards to the
modules of an existing model, before or after an adapter is added (`Trainer` does, with `use_liger_kernel=True`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.activations import ACT2FN

from ..utils.compat import private
from ..utils.lazy_imports import when_imported

_BINDERS = "liger_kernel.transformers.monkey_patch"

# Liger's FFN classes have no activation, because their kernels compute it: the name expected by an `FFNLayout`, and the
# function.
_BLOCKS = {
    "LigerSwiGLUMLP": ("act_fn", "silu"),
    "LigerQwen3MoeSwiGLUMLP": ("act_fn", "silu"),
    "LigerHunyuanV1SwiGLUMLP": ("act_fn", "silu"),
    "LigerGEGLUMLP": ("act_fn", "gelu_pytorch_tanh"),
    "LigerGEGLUMLPForGemma4": ("act_fn", "gelu_pytorch_tanh"),
    "LigerPhi3SwiGLUMLP": ("activation_fn", "silu"),
}


def name_activations(model: nn.Module) -> None:
    """Add the activation as a module to the FFN blocks of Liger's classes, so a layout describes them."""
    for module in model.modules():
        if _is_ligers(type(module)) and type(module).__name__ in _BLOCKS:
            name, activation = _BLOCKS[type(module).__name__]
            setattr(module, name, ACT2FN[activation])


def plain_forward(ffn: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """
    Return the forward of a block without Liger's kernels, which do not run on a CPU, or None if its class is Liger's.
    """
    if _is_ligers(type(ffn)):
        return None
    return type(ffn).forward.__get__(ffn) if _is_ligers(ffn.__dict__.get("forward")) else ffn


def _is_ligers(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("liger_kernel.")


def spare_layers(binders: Any) -> None:
    """Keep Liger from binding its FFN forward to a tuner layer."""
    bind = private(_BINDERS, "_bind_method_to_module")

    def bind_elsewhere(module: nn.Module, method_name: str, new_method: Any) -> None:
        if not isinstance(module, BaseTunerLayer):
            bind(module, method_name, new_method)

    binders._bind_method_to_module = bind_elsewhere


when_imported(_BINDERS, spare_layers)
