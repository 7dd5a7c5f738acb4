"""Tiny models built from configs."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

# Weights of one layer of `tiny_llama`: d = 64, f = 128, 4 heads of 16, 2 of them for keys and values.
ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64
FFN = 3 * 64 * 128


def tiny_llama(layers: int = 2, hidden: int = 64, vocab: int = 128, seed: int = 0, **kwargs) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab,
        pad_token_id=0,
        **kwargs,
    )
    return LlamaForCausalLM(config)


def tiny_opt() -> OPTForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    return OPTForCausalLM(OPTConfig(word_embed_proj_dim=32, max_position_embeddings=64, **sizes)).eval()
