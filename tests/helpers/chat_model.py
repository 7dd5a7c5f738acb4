"""A tiny chat model as a folder: a Llama with a byte-level tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .models import tiny_llama

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def slow_down(patch: Callable[[object, str, object], None] = setattr) -> None:
    """Have answers of conversations slow down after 20 tokens until they are stopped, so that none ends before."""
    from moe_peft.chat.conversation import _Run

    put = _Run.put

    def slowly(run: _Run, value: Any) -> None:
        put(run, value)
        if len(run.ids) > 20:
            run._stop.wait(0.5)

    patch(_Run, "put", slowly)


def save_chat_model(folder: Path, seed: int = 0) -> Path:
    """Its weights are random; its vocabulary is the 256 bytes, one merge and the template's marks."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*letters, "in"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("i", "n")]))  # llama.cpp wants at least one merge
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|user|>", "<|assistant|>", "<|im_end|>"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": marks})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    model = tiny_llama(vocab=320, seed=seed)
    model.generation_config.eos_token_id = model.config.eos_token_id = fast.eos_token_id
    model.save_pretrained(folder)
    return folder
