"""A tiny model built from a config, and how close two results must be."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


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


def assert_close_to_scale(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """
    Equal up to `tolerance` times the largest expected value, or times 1 if that is larger. Rounding errors of a model's
    logits grow with the largest of them, and not every processor sums in the same order.
    """
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)
