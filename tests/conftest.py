"""Fixtures shared by the tests: tiny models built from configs, nothing from a hub."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the imports: names that are no folders are not looked for

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def pytest_collection_finish() -> None:
    """Trainers collect garbage many times; without this, all modules would be looked through each time."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words "w3" … "w127"; 0 pads, 1 ends, 2 is unknown."""
    from benchmarks.words import word_tokenizer  # here: some scripts that import this file do not have it

    return word_tokenizer(model_max_length=256)


@pytest.fixture
def loud() -> Iterator[None]:
    """Puts back what `--quiet` changes for the whole process."""
    import datasets

    verbosity = transformers.logging.get_verbosity()
    yield
    datasets.enable_progress_bars()
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(verbosity)
    logging.getLogger("moe_peft").setLevel(logging.NOTSET)
