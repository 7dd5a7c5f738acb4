"""Helpers for the tests of native checkpoints: tiny dense models of every family, saved in float32."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_peft import MoELoraConfig

SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
# Settings by which a family could differ from the plainest are set, so that losing one shows.
DENSE = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
        "max_position_embeddings": 64, "rms_norm_eps": 1e-3, "head_dim": 16,
    },
    "mistral": {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "phi3": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0},
        "sliding_window": 5, "rms_norm_eps": 1e-3,
    },
    "olmo2": {"hidden_act": "silu", "rms_norm_eps": 1e-3},
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 1.7,
    },
}  # fmt: skip
MOE = {
    "llama": "mixtral", "mistral": "mixtral", "phi3": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe",
    "olmo2": "flex_olmo", "granite": "granitemoe",
}  # fmt: skip
IDS = torch.randint(3, 128, (3, 12), generator=torch.Generator().manual_seed(0))


def dense_model(kind: str, seed: int = 0, **options) -> PreTrainedModel:
    """A tiny model whose every weight is random, norms and biases too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZE, **DENSE.get(kind, {}), **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "bias" in name:
                parameter.normal_(std=0.3)
            else:
                parameter.normal_(std=0.2)
    return model.eval()


def adapter(base, folder, name=None, **settings):
    """A saved adapter with random experts and decided routers, and its model."""
    config = {"num_experts": 4, "r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **settings}
    torch.manual_seed(1)
    model = get_peft_model(base, MoELoraConfig(**config)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_router" in parameter_name:
                parameter.normal_(std=0.5)
            elif "modules_to_save" in parameter_name or "trainable_tokens" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter_name.endswith(".lm_head.weight"):
                parameter.requires_grad_(False)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("bias_steps"):
                buffer.random_(-20, 20)
    model.peft_config["default"].base_model_name_or_path = name
    model.save_pretrained(folder)
    return model


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def logits(model: PreTrainedModel | str | Path) -> torch.Tensor:
    if isinstance(model, (str, Path)):
        model, info = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()(input_ids=IDS).logits
