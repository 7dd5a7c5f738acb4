"""Wording that error messages share: one line that names the field, its value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


def install(extra: str) -> str:
    """How to install the package with an extra: from a clone, as its name on PyPI is not taken yet."""
    return f"pip install '.[{extra}]' in a clone of moe_peft"


class InputError(ValueError):
    """Something that a user gave (a setting, a file, data, a folder) is wrong; commands print only its line."""


@contextmanager
def refused_settings() -> Iterator[None]:
    """Inside this block a library reads a user's settings: a `ValueError` of its own becomes an `InputError`."""
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
    The text of an error on one line of at most `limit` characters.

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
    """What transformers says about training arguments, on one line; `flag` sets `bf16` to false."""
    if "assign use_cpu" in str(error):
        return (
            f"bf16=True (TRL's default): no GPU here computes in bfloat16; add {flag} to train in float32 on the CPU, "
            "or set use_cpu=true to do so in bfloat16"
        )
    return one_line(error)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's, torch's on any device, or accelerate's."""
    if not isinstance(error, (RuntimeError, OSError)):
        return isinstance(error, MemoryError)
    return any(text in f"{type(error).__name__} {error}".lower() for text in _NO_MEMORY)


def choice_error(field: str, value: object, names: Iterable[str | None]) -> str:
    """The message for a value that is not among `names`."""
    return f"{field}={value!r}: must be one of {', '.join(map(str, names))}"


def unknown_key(path: str, names: Iterable[str], documented: str | None = None) -> str:
    """
    The message for a key that is not among `names`: the closest of them, else where to look them up.

    Args:
        path: the key with its sections, dotted.
        documented: where keys are documented that are too many to list.
    """
    names = sorted(names)
    close = difflib.get_close_matches(path.rpartition(".")[2], names, n=1)
    if close:
        return f"{path}: unknown key; did you mean {close[0]!r}?"
    if documented:
        return f"{path}: unknown key; see {documented}"
    return f"{path}: unknown key; known: {', '.join(names[:20])}" + (", …" if len(names) > 20 else "")
