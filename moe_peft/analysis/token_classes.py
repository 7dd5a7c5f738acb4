"""Classes of tokens by their text: digits, operators, brackets, words, words with a capital letter, …"""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedTokenizerBase

TOKEN_CLASSES = ("words", "capitalized", "digits", "operators", "brackets", "punctuation", "space", "other")
"""The classes that `classify_tokens` knows."""
_PATTERNS = (
    ("space", r"\s+"), ("digits", r"\d+"), ("brackets", r"[()\[\]{}<>]+"), ("operators", r"[-+*/=%^&|~!@]+"),
    ("punctuation", r"[.,;:?'\"`_#$\\]+"), ("words", r"\w+"),
)  # fmt: skip


def classify_tokens(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> torch.Tensor:
    """
    Return the class of every token, by its text without surrounding spaces.

    Args:
        tokenizer: the tokenizer.
        size: V, if the model's vocabulary is larger than the tokenizer's; the additional tokens are "other".

    Returns:
        int64 [V], indices into `TOKEN_CLASSES`.
    """
    size = len(tokenizer) if size is None else size
    classes = torch.full((size,), TOKEN_CLASSES.index("other"))
    tokens = {token for token in tokenizer.get_vocab().values() if token < size}  # ids may have gaps
    for token in tokens - set(tokenizer.all_special_ids):
        text = tokenizer.decode([token]) or tokenizer.convert_ids_to_tokens(token).replace("▁", " ")
        text = text.strip() or text
        name = next((name for name, pattern in _PATTERNS if re.fullmatch(pattern, text)), "other")
        if name == "words" and any(letter.isupper() for letter in text):
            name = "capitalized"
        classes[token] = TOKEN_CLASSES.index(name)
    return classes
