"""Shapes of published models, for recipes that several commands run on them."""

from __future__ import annotations

from transformers import LlamaConfig, Qwen3Config

LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, dtype="bfloat16",
)  # fmt: skip
QWEN_8B = Qwen3Config(
    hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, dtype="bfloat16",
)  # fmt: skip
