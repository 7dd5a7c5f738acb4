"""Shared wording of error messages: one line with the field, its value and the allowed values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

REPOSITORY = "https://example.org/moe_peft"  # pages, notebooks and pyproject.toml name it, too


def install(extra: str) -> str:
    """Return the command to install the package with an extra: from a clone, as its name on PyPI is not taken yet."""
    return f"pip install '.[{extra}]' in a clone of moe_peft"


class InputError(ValueError):
    """A user's input is wrong: a setting, a file, data, or a folder. Commands print only the message."""


@contextmanager
def refused_settings() -> Iterator[None]:
    """Convert a library's `ValueError` on a user's settings to an `InputError` inside the block."""
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(one_line(error)) from error


_NO_MEMORY = (
    "outofmemory", "out of memory", "allocate memory", "alloc_failed", "bad_alloc", "no executable batch size found"
)  # fmt: skip


def one_line(error: object, limit: int = 500) -> str:
    """
    Return the text of an error on one line of at most `limit` characters.

    A longer text is cut between words, so never inside a URL, and ends with an ellipsis.
    """
    text = " ".join(str(error).split())
    if len(text) <= limit:
        return text
    end = text.rfind(" ", 0, limit - 1)
    if end > 0:
        return f"{text[:end]} …"
    return "…" if "://" in text.split()[0] else f"{text[: limit - 1]}…"


def arguments_error(error: object, flag: str) -> str:
    """Return transformers' error on training arguments on one line. `flag` is the option that sets `bf16` to false."""
    if "assign use_cpu" in str(error):
        return (
            f"bf16=True (TRL's default): no GPU here computes in bfloat16; add {flag} to train in float32 on the CPU, "
            "or set use_cpu=true to do so in bfloat16"
        )
    return one_line(error)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports exhausted memory: from Python, from torch on any device, or from accelerate."""
    if not isinstance(error, (RuntimeError, OSError)):
        return isinstance(error, MemoryError)
    return any(text in f"{type(error).__name__} {error}".lower() for text in _NO_MEMORY)


def choice_error(field: str, value: object, names: Iterable[str | None]) -> str:
    """Return the message for a value outside `names`."""
    return f"{field}={value!r}: must be one of {', '.join(map(str, names))}"


def unknown_keys(
    given: Mapping[str, Any],
    names: Iterable[str],
    section: str = "",
    documented: str | None = None,
    foreign: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """
    Return a message on all keys outside `names`, and on values known only to another program. It gives the
    equivalent here, or the closest name, or the place to look the keys up. None if all keys are known.

    Args:
        given: values by key.
        section: section of the keys, with its dot.
        documented: where keys are documented that are too many to list.
        foreign: key, or "key: value", of another program → its equivalent here.
    """
    names, lines, others = sorted(names), [], []
    for key, value in given.items():
        name = str(key).lstrip("-").replace("-", "_")
        path, pair = f"{section}{key}", f"{name}: {value}"
        if pair in foreign and not (isinstance(value, str) and Path(value).exists()):  # a folder may have this name
            lines.append(f"{section}{pair}: not a setting here; instead: {foreign[pair]}")
        elif key in names:
            continue
        elif name in foreign:
            lines.append(f"{path}: not a setting here; instead: {foreign[name]}")
        elif close := difflib.get_close_matches(str(key), names, n=1):
            lines.append(f"{path}: unknown key; did you mean {close[0]!r}?")
        else:
            others.append(path)
    if others:
        known = f"known: {', '.join(names[:20])}" + (", …" if len(names) > 20 else "")
        key = "key" if len(others) == 1 else "keys"
        lines.append(f"{', '.join(others)}: unknown {key}; {f'see {documented}' if documented else known}")
    return " | ".join(lines) or None
