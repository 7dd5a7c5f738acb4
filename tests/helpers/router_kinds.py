"""A setting of every router, and a layer that has it."""

from __future__ import annotations

import torch
from torch import nn

from moe_peft import MoELoraConfig
from moe_peft.adapter.ffn_layout import find_layout
from moe_peft.adapter.layers import MoELoraFFN
from tests.helpers.expert_layers import D, dense_ffn

N = 4
# A setting of each kind, and what is particular about it.
ROUTER_KINDS = {
    "linear": {},
    "mlp": {"router_type": "mlp"},
    "attention-sum": {"router_type": "attention"},
    "attention-max": {"router_type": "attention", "router_mixture": "max", "router_num_heads": 2},
    "attention-keys": {"router_type": "attention", "router_num_heads": 8},
    "switch": {"router_type": "switch", "mixing": "projection"},
    "sigmoid": {"router_type": "sigmoid"},
    "sigmoid-raw": {"router_type": "sigmoid", "normalize_top_k": False},
    "arrow": {"router_type": "arrow"},
    "soft": {"router_type": "soft"},
    "top_p": {"router_type": "top_p", "router_threshold": 0.6, "top_k": 3},
    "top_p-raw": {"router_type": "top_p", "top_k": 4, "normalize_top_k": False},
    "threshold": {"router_type": "threshold", "top_k": 3},
    "threshold-raw": {"router_type": "threshold", "router_threshold": 0.2, "normalize_top_k": False},
    "locmoe": {"router_type": "locmoe"},
    "hash": {"router_type": "hash"},
}


def config(kind: str, **own) -> MoELoraConfig:
    settings = {"num_experts": N, "r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return MoELoraConfig(**{**settings, **ROUTER_KINDS[kind], **own})


def decided(module: nn.Module, std: float = 0.4) -> None:
    """Make routers sure of their choice, so that rounding does not change it."""
    for name, parameter in module.named_parameters():
        if "moe_lora_router" in name:
            nn.init.normal_(parameter, std=std)


def routed_layer(kind: str, **own) -> MoELoraFFN:
    torch.manual_seed(0)
    ffn = dense_ffn("gated")
    made = MoELoraFFN(ffn, find_layout(ffn), "default")
    spec = config(kind, **own).expert_spec("mlp")
    object.__setattr__(spec.router, "attention_size", 4 * D)  # as a model's config would say
    made.update_layer("default", spec)
    decided(made)
    return made.double()
