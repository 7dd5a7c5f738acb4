"""Models with routers, an adapter's and native MoEs: what masked, forced and recorded routing is tested on."""

from __future__ import annotations

import torch
from peft import get_peft_model
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_peft import MoELoraConfig
from moe_peft.models.layer import AdapterLayer, native_layers, routed_layers, router_parameters
from tests.helpers.models import tiny_llama

N, K = 6, 2
COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "num_experts_per_tok": K, "pad_token_id": 0,
}  # fmt: skip
NATIVE = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**COMMON, num_local_experts=N)),
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**COMMON, num_experts=N, moe_intermediate_size=16)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, num_experts=N, moe_intermediate_size=16)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**COMMON, num_experts=N)),
}


def gates_of(model):
    """The gates of a native MoE, in its order."""
    return [layer.module for layer in native_layers(model)]


def sizes_of(model):
    """(n, k) of every routed layer."""
    return [(layer.num_experts, layer.top_k) for layer in routed_layers(model)]


def routers_of(model):
    """The active routers of a model, in its order."""
    return [layer.router for layer in routed_layers(model)]


def tuner_layers(model):
    """The layers of a model's active MoE-LoRA adapters that have a router."""
    return list(dict.fromkeys(layer.module for layer in routed_layers(model) if isinstance(layer, AdapterLayer)))


def adapter(**settings):
    base = tiny_llama(vocab=64)
    torch.manual_seed(1)
    config = MoELoraConfig(num_experts=N, top_k=K, r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    return get_peft_model(base, config)


def routed_model(kind):
    torch.manual_seed(0)
    model = (adapter() if kind == "adapter" else NATIVE[kind]()).eval()
    with torch.no_grad():
        for parameter in router_parameters(model).values():
            parameter.normal_(std=0.5)  # decided routers: chosen experts matter
    return model


KINDS = ["adapter", *NATIVE]


def ids(rows=3, length=7):
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(2))


def biased(model, allowed):
    """The same model with every other expert's logits pushed out of reach by hooks of the test's own."""
    routers = gates_of(model)

    def hook(router, args, output):
        logits = output[0].float() + torch.where(
            allowed.repeat_interleave(output[0].shape[0] // len(allowed), 0), 0, -1e9
        )
        probabilities = logits.softmax(-1)
        gates, experts = probabilities.topk(K, -1)
        if getattr(router, "norm_topk_prob", True):
            gates = gates / gates.sum(-1, keepdim=True)
        return output[0], gates.to(output[1].dtype), experts

    return [router.register_forward_hook(hook) for router in routers]
