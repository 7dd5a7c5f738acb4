"""
Wording that error messages share: one line that names the field, its value and what is allowed.

What configs and functions accept, as rules that they share. A value that a rule does not allow is refused before
anything is done, in one line: the field, the value, the remedy.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

# --- messages --------------------------------------------------------------------------------------------------------

_NO_MEMORY = (
    "outofmemory", "out of memory", "allocate memory", "alloc_failed", "bad_alloc", "no executable batch size found"
)  # fmt: skip


def one_line(error: object, limit: int = 200) -> str:
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


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left: Python's, torch's on any device, or accelerate's."""
    if not isinstance(error, (RuntimeError, OSError)):
        return isinstance(error, MemoryError)
    return any(text in f"{type(error).__name__} {error}".lower() for text in _NO_MEMORY)


def choice_error(field: str, value: object, names: Iterable[str]) -> str:
    """The message for a value that is not among the known names."""
    return f"{field}={value!r}: must be one of {', '.join(names)}"


def unknown_key(path: str, known: Iterable[str], documented: str | None = None) -> str:
    """
    The message for a key that is not among the known ones: the closest of them, else where to look them up.

    Args:
        path: the key with its sections, dotted.
        documented: where keys are documented that are too many to list.
    """
    known = sorted(known)
    close = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
    if close:
        return f"{path}: unknown key; did you mean {close[0]!r}?"
    return f"{path}: unknown key; " + (f"see {documented}" if documented else f"known: {', '.join(known)}")


# --- checks ----------------------------------------------------------------------------------------------------------

MOST = 2**16  # experts, ranks, …: more is a slip of the keyboard, which would take all memory


class Rule(NamedTuple):
    """
    What a value may be.

    Args:
        allows: whether it may be this.
        remedy: what to give instead.
    """

    allows: Callable[[Any], bool]
    remedy: str

    def or_none(self) -> Rule:
        """The same, and None."""
        return Rule(lambda value: value is None or self.allows(value), f"{self.remedy}, or None")


def is_whole(value: Any) -> bool:
    """Whether it is a whole number: an int, or one of numpy or torch, but no bool and no float."""
    if isinstance(value, bool):
        return False
    try:
        index(value)
    except (TypeError, ValueError):
        return False
    return str(getattr(value, "dtype", "")) not in ("bool", "torch.bool")


def is_number(value: Any) -> bool:
    """Whether it is a finite number and no bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max  # a whole number may be larger


def are_names(value: Any) -> bool:
    """Whether it is a list, tuple or set of texts."""
    return isinstance(value, (list, tuple, set)) and all(isinstance(name, str) and name for name in value)


def whole(least: int = 1, most: int | None = None) -> Rule:
    """Whole numbers from `least` to `most`."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Rule(
        lambda value: is_whole(value) and value >= least and (most is None or value <= most),
        f"use a whole number {limits}",
    )


def within(low: float, high: float = math.inf, *, above: bool = False, below: bool = False) -> Rule:
    """Finite numbers from `low` to `high`, without `low` if `above`, without `high` if `below`."""
    remedy = f"use a number in {'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
    if high == math.inf:
        remedy = f"use a finite number {'above' if above else 'of at least'} {low:g}"
    return Rule(
        lambda v: is_number(v) and low <= v <= high and not (above and v == low) and not (below and v == high), remedy
    )


def one_of(names: Iterable[Any]) -> Rule:
    """Some of the names; a table may grow after this call."""
    return Rule(lambda v: isinstance(v, str) and v in names, f"use one of {', '.join(map(str, names))}")


def is_a(*classes: type, remedy: str = "") -> Rule:
    """Instances of a class."""
    return Rule(lambda v: isinstance(v, classes), remedy or f"give a {' or '.join(c.__name__ for c in classes)}")


def mapping_of(allows: Callable[[Any], bool], remedy: str) -> Rule:
    """Dictionaries from regexes to what is allowed."""
    return Rule(lambda v: isinstance(v, dict) and all(is_regex(k) and allows(item) for k, item in v.items()), remedy)


def is_regex(value: Any) -> bool:
    """Whether it is a text that compiles."""
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except re.error:
        return False


def existing(path: str | os.PathLike) -> Path:
    """A path, or the nearest folder above it that is there; also a link that leads nowhere."""
    path = Path(path).absolute()
    return next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())


def _can_be_folder(value: Any) -> bool:
    if not isinstance(value, (str, os.PathLike)) or os.fspath(value) == "" or has_tilde(value):
        return False
    return existing(value).is_dir()


def has_tilde(path: str | os.PathLike) -> bool:
    """Whether a path begins with the home folder's sign, which a shell expands only at the begin of a word."""
    return os.fspath(path).startswith("~") and not Path(path).exists()


def refuse_tilde(path: str | os.PathLike, what: object) -> None:
    """
    Raises:
        ValueError: a path, named by `what`, begins with the home folder's sign.
    """
    if has_tilde(path):
        raise ValueError(f"{what}: ~ is not expanded here; write {Path(path).expanduser()}")


COUNT = whole(1)
EXPERTS = whole(1, MOST)
SEED = whole(0, 2**63 - 1)
SHARE = within(0, 1)
FLAG = is_a(bool, remedy="use True or False")
TEXT = Rule(lambda value: isinstance(value, str) and value != "", "give a text")
TEXTS = Rule(
    lambda v: isinstance(v, Iterable) and not isinstance(v, (str, bytes, Mapping)) and all(map(TEXT.allows, v)),
    "give a list of texts",
)
PATH = Rule(lambda v: isinstance(v, (str, os.PathLike)) and os.fspath(v) != "", "give a path")
PATHS = Rule(
    lambda v: isinstance(v, (list, tuple)) and len(v) > 0 and all(map(PATH.allows, v)), "give a list of folders"
)
FOLDER = Rule(_can_be_folder, "give the path of a folder, new or not, that is inside no file and written out without ~")
ADAPTER_NAME = Rule(lambda v: TEXT.allows(v) and "." not in v, "give a text without dots")


def shown(value: Any) -> str:
    """A value in a message, on one line: sets sorted, and what has a long text shortened."""
    if type(value).__repr__ is not object.__repr__ and hasattr(value, "named_modules"):
        return type(value).__name__
    return one_line(repr(sorted(value, key=str) if isinstance(value, set) else value), 80)


def check(caller: str, **given: tuple[Any, Rule]) -> None:
    """
    Check arguments, given by name as value and rule.

    Raises:
        ValueError: a rule does not allow its value; the message begins with `caller`, if it is not empty.
    """
    for name, (value, rule) in given.items():
        if not rule.allows(value):
            raise ValueError(f"{f'{caller}: ' * bool(caller)}{name}={shown(value)}: {rule.remedy}")


def check_fields(caller: str, config: Any, rules: Mapping[str, Rule]) -> None:
    """
    Check the fields of a dataclass. Whole numbers of numpy and torch become ints, so that it can be saved.

    Args:
        caller: begins the message.
        config: the dataclass.
        rules: names of fields, separated by spaces → what they may be.

    Raises:
        ValueError: a rule does not allow its value.
    """
    for names, rule in rules.items():
        for name in names.split():
            value = getattr(config, name)
            check(caller, **{name: (value, rule)})
            if is_whole(value) and type(value) is not int:
                object.__setattr__(config, name, index(value))
