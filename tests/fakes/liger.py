"""
A stand-in for Liger, which imports with Triton alone: it changes a Llama as Liger 0.8 does, by the same functions, and
its kernels refuse to run on a CPU, except the loss's, which has a plain formula.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu
from transformers.modeling_outputs import CausalLMOutputWithPast

from moe_peft.adapter.liger import spare_layers

NAME = "liger_kernel.transformers"


def swiglu_kernel(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a Triton kernel was started on a CPU")


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate) * up


class LigerSwiGLUMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x):
        return self.down_proj(swiglu_kernel(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLP(LigerSwiGLUMLP):
    pass


class LigerPhi3SwiGLUMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.gate_up_proj, self.down_proj = nn.Linear(d, 2 * f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x):
        return self.down_proj(swiglu_kernel(*self.gate_up_proj(x).chunk(2, dim=-1)))


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    pass  # multiplies by two factors, so no layout describes it


@dataclass
class LigerCausalLMOutputWithPast(CausalLMOutputWithPast):
    token_accuracy: torch.Tensor | None = None


def rms_norm(self, x):
    return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def lce_forward(self, input_ids=None, attention_mask=None, labels=None, skip_logits=None, **kwargs):
    """The fused loss: in training the output has a loss and no logits."""
    number = kwargs.pop("num_items_in_batch", None)
    outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
    logits, loss = self.lm_head(outputs[0]), None
    if labels is not None:
        reduction = "mean" if number is None else "sum"
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)
        loss = loss if number is None else loss / number
    hidden = self.training and labels is not None if skip_logits is None else skip_logits
    return LigerCausalLMOutputWithPast(loss=loss, logits=None if hidden else logits)


def _bind_method_to_module(module: nn.Module, method_name: str, new_method: Any) -> None:
    module.__dict__[method_name] = new_method.__get__(module, module.__class__)


def _apply_liger_kernel_to_instance(model: Any, fused_linear_cross_entropy: bool = True) -> None:
    bind = sys.modules[f"{NAME}.monkey_patch"]._bind_method_to_module
    if fused_linear_cross_entropy:
        model.forward = MethodType(lce_forward, model)
    for layer in model.base_model.layers:
        bind(layer.mlp, "forward", LigerSwiGLUMLP.forward)
        bind(layer.mlp, "_get_name", lambda self: "LigerSwiGLUMLP")
        bind(layer.input_layernorm, "forward", rms_norm)


for _thing in (LigerSwiGLUMLP, LigerGEGLUMLP, LigerPhi3SwiGLUMLP, LigerFalconH1SwiGLUMLP, rms_norm):
    _thing.__module__ = f"{NAME}.kernels"
for _thing in (LigerSwiGLUMLP, LigerPhi3SwiGLUMLP):
    _thing.forward.__module__ = f"{NAME}.kernels"


@contextmanager
def installed(with_ffn: bool = False) -> Iterator[Any]:
    """
    Inside this block, it is the installed Liger; yields the function that `Trainer` calls. Its FFN kernel runs only
    `with_ffn`.
    """
    package, patches = ModuleType(NAME), ModuleType(f"{NAME}.monkey_patch")
    patches._bind_method_to_module = _bind_method_to_module
    package._apply_liger_kernel_to_instance = patches._apply_liger_kernel_to_instance = _apply_liger_kernel_to_instance
    package.monkey_patch = patches
    modules = {"liger_kernel": ModuleType("liger_kernel"), NAME: package, patches.__name__: patches}
    with (
        patch.dict(sys.modules, modules),
        patch.dict(globals(), swiglu_kernel=swiglu if with_ffn else swiglu_kernel),
        patch("transformers.integrations.liger.is_liger_kernel_available", lambda: True),
    ):
        spare_layers(patches)  # as importing Liger does
        yield _apply_liger_kernel_to_instance
