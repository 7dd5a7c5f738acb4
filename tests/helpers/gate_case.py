"""A tiny base and requests for three adapters and for none, which a gate can tell apart."""

from __future__ import annotations

import random
from pathlib import Path

from tests.helpers.chat_model import save_chat_model
from tests.helpers.models import tiny_llama

LETTERS = {"math": "0123456789+-", "code": "(){}[];=<>", "prose": "αβγδεζηθικλμ", "neutral": "AEIOU NRSTLM"}


def requests(name: str, count: int, seed: int = 0) -> list[str]:
    """Texts of 9 to 23 characters, others for each name."""
    draw = random.Random(f"{name} {seed}")
    return ["x".join(draw.choices(LETTERS[name], k=draw.randint(5, 12))) for _ in range(count)]


TEXTS = {name: requests(name, count) for name, count in (("math", 24), ("code", 40), ("prose", 16))}
NEUTRAL = requests("neutral", 30)


def save_base(folder: Path) -> Path:
    """A chat model of eight layers, the first two of which decide."""
    save_chat_model(folder)
    tiny_llama(layers=8, vocab=320).save_pretrained(folder)
    return folder
