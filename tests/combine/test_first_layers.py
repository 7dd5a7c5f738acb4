"""A gate that loads the first layers of its base reads what it would read in the whole base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compatibility.families import tiny
from moe_peft import RequestGate
from moe_peft.models.introspection import text_config
from tests.helpers.words import word_tokenizer

TEXTS = {"a": ["w3 w4 w5 w6 w7 w8 w9", "w9 w3"], "b": ["w11 w12 w12 w13", "w20 w21 w22 w23 w24"]}
FULL, LINEAR = "full_attention", "linear_attention"
FIRST, ALL = 2, 8  # layers that are loaded of 8
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", FIRST, {}),
    "sliding windows": ("gemma3_text", FIRST, {"layer_types": ["sliding_attention", FULL] * 4}),
    "no position in some layers": ("smollm3", FIRST, {"no_rope_layers": [1, 0] * 4}),
    "a MoE": ("mixtral", FIRST, {}),
    "a MoE after dense layers": ("qwen3_moe", FIRST, {"mlp_only_layers": [0, 1]}),
    "a MoE in every other layer": ("qwen3_moe", FIRST, {"decoder_sparse_step": 2}),
    "a MoE with shared experts after a dense layer": ("deepseek_v3", FIRST, {"first_k_dense_replace": 1}),
    "FFNs by a list": ("glm4_moe", FIRST, {"first_k_dense_replace": 1}),
    "a MoE by indices": ("llama4_text", FIRST, {"moe_layers": [1, 3, 5, 7], "no_rope_layers": [1, 0] * 4}),
    "linear attention": ("qwen3_next", FIRST, {"layer_types": [LINEAR, FULL] * 4}),
    "Mamba and attention by indices": ("bamba", FIRST, {"attn_layer_indices": [1, 5]}),
    "Mamba beside attention": ("falcon_h1", FIRST, {}),
    "Mamba and attention by period": ("jamba", FIRST, {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "Mamba and attention by a list": ("granitemoehybrid", FIRST, {"layer_types": ["mamba", "attention"] * 4}),
    "convolutions": ("lfm2", FIRST, {"layer_types": ["conv", FULL] * 4}),
    "recurrent blocks": ("recurrent_gemma", FIRST, {"block_types": ["recurrent", "attention"]}),
    "Mamba with a shared block": ("zamba", ALL, {"layer_types": [LINEAR, "hybrid"] * 4}),
    "shared keys and values": (
        "gemma3n_text", ALL,
        {
            "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95] + [0.0] * 7, "layer_types": [FULL] * 8,
            "vocab_size_per_layer_input": 128, "intermediate_size": 64,
        },
    ),
    "embeddings for each layer": ("gemma4_text", ALL, {"hidden_size_per_layer_input": 8}),
    "a scale by the number of layers": ("minicpm3", ALL, {}),
    "decays by the number of layers": ("minimax", ALL, {"layer_types": [LINEAR, FULL] * 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_first_layers_compute_what_they_do_in_the_whole_base(name, tmp_path):
    kind, layers, fields = CASES[name]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    model = tiny(kind, vocab_size=128, **{"num_hidden_layers": 8, **fields})
    model.save_pretrained(tmp_path)
    tokenizer = word_tokenizer(64)
    tokenizer.save_pretrained(tmp_path)
    loaded = RequestGate.fit(str(tmp_path), TEXTS, [])
    whole = RequestGate.fit(model, TEXTS, [], tokenizer=tokenizer)
    assert text_config(loaded.model).num_hidden_layers == layers
    for adapter in TEXTS:
        vectors = whole.texts[adapter].vectors
        assert vectors.shape[1] == 2 and len(vectors.flatten(1).unique(dim=0)) == 2
        assert torch.equal(loaded.texts[adapter].vectors, vectors)
