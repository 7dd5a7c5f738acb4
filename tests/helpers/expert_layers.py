"""Layers of experts without a model: FFNs of every layout, adapters on them, their inputs, and dropout that is seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config
from transformers.activations import ACT2FN
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from moe_peft import MoELoraConfig
from moe_peft.adapter.ffn_layout import find_layout
from moe_peft.adapter.layers import MoELoraFFN, MoELoraLayer, MoELoraLinear

D, F = 16, 24
FFNS = ["gated", "gated_bias", "fused", "plain", "conv1d"]
mixings = pytest.mark.parametrize("mixing", ["output", "projection"])
normalized = pytest.mark.parametrize("normalize_top_k", [True, False], ids=["normalized", "probabilities"])


class GatedFFN(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, F, bias), nn.Linear(D, F, bias)
        self.down_proj = nn.Linear(F, D, bias)
        self.act_fn = ACT2FN["silu"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class FusedFFN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(D, 2 * F, False), nn.Linear(F, D, False)
        self.activation_fn = ACT2FN["gelu_pytorch_tanh"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation_fn(gate) * up)


class PlainFFN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, F), nn.Linear(F, D)
        self.activation_fn = ACT2FN["relu2"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


def dense_ffn(kind: str) -> nn.Module:
    if kind == "conv1d":
        ffn: nn.Module = GPT2MLP(F, GPT2Config(n_embd=D, n_head=2, resid_pdrop=0.0))
    else:
        ffn = {"gated": lambda: GatedFFN(False), "gated_bias": lambda: GatedFFN(True)}.get(
            kind, FusedFFN if kind == "fused" else PlainFFN
        )()
    for parameter in ffn.parameters():
        nn.init.normal_(parameter, std=0.3)
    return ffn


def add_adapter(layer: MoELoraLayer, name: str = "default", **settings) -> None:
    """Random experts, and a router that is sure enough of its choice for float32 and float64 to agree on it."""
    config = MoELoraConfig(**{"num_experts": 4, "top_k": 2, "r": 4, "init_lora_weights": False, **settings})
    layer.update_layer(name, config.expert_spec("mlp"))
    if name in layer.moe_lora_router:
        nn.init.normal_(layer.moe_lora_router[name].weight, std=0.5)


def ffn_layer(kind: str = "gated", dtype: torch.dtype = torch.float32, seed: int = 0, **settings) -> MoELoraFFN:
    torch.manual_seed(seed)
    ffn = dense_ffn(kind)
    layer = MoELoraFFN(ffn, find_layout(ffn), "default")
    add_adapter(layer, **settings)
    layer.to(dtype)
    return layer


def linear_layer(out: int = D, seed: int = 0, **settings) -> MoELoraLinear:
    torch.manual_seed(seed)
    layer = MoELoraLinear(nn.Linear(D, out), "default")
    add_adapter(layer, **settings)
    return layer


def tensors(
    *shape: int, out: int = D, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's input [*shape, d] and the gradient of its output [*shape, out]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, D, generator=generator).to(dtype)
    return x, torch.randn(*shape, out, generator=generator).to(dtype)


class RecordedDropout(TorchDispatchMode):
    """Keeps the mask (scaled, in float64) of every dropout inside the block, in the order of the draws."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_dropout.default:
            self.masks.append(result[1].double() / (1 - args[1]))
        elif func is torch.ops.aten.bernoulli_.float:
            self.masks.append(result.double() / args[1])
        return result
