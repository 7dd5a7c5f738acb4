"""What several commands parse alike."""

from __future__ import annotations

import json
from typing import Any


def parse_json(option: str, text: str | None, example: str) -> dict[str, Any] | None:
    """
    An option that is a JSON object.

    Raises:
        ValueError: it is none.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{option} {text!r}: give JSON like {example}")
    return value
