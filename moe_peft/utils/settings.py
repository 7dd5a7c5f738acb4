"""Ranges of numeric settings, and their description in messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from numbers import Real
from typing import Any

from .messages import InputError, choice_error, one_line


@dataclass(frozen=True)
class Range:
    """An interval of finite numbers, open or closed at either end; if `whole`, of integers only."""

    at_least: float = -inf
    at_most: float = inf
    above: float = -inf
    below: float = inf
    whole: bool = False

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        number: Any = value  # may be a NumPy number
        inside = self.at_least <= number <= self.at_most and self.above < number < self.below
        return bool(inside and (not self.whole or number % 1 == 0))

    def __str__(self) -> str:
        if self.at_least > -inf and self.at_most < inf:
            bounds = [f"from {self.at_least} to {self.at_most}"]
        else:
            names = ("at_least", "above", "at_most", "below")
            ends = {name.replace("_", " "): getattr(self, name) for name in names}
            bounds = [f"{name} {end}" for name, end in ends.items() if abs(end) < inf]
        return ", ".join([*["an integer"] * self.whole, " and ".join(bounds) or "finite"])


COUNT = Range(at_least=1, whole=True)
POSITIVE = Range(above=0)
LARGEST_SIZE = 2**16
ALPHA = Range(at_least=1e-6, at_most=LARGEST_SIZE)  # of a LoRA; keeps its scaling within half precision
FACTOR = Range(at_least=-LARGEST_SIZE, at_most=LARGEST_SIZE)  # of an expert's update
NOT_NEGATIVE = Range(at_least=0)


def setting(default: Any, help: str, allowed: Range | Collection[Any] | None = None) -> Any:
    """
    Return a dataclass field with a help text and its allowed values.

    Args:
        default: its default, or a function that makes it (`dict`).
        help: one sentence, for `--help`.
        allowed: range of the number (or of each value of a dictionary), or a table of choices. None is allowed if it is
            the default.
    """
    metadata = {"help": help, "allowed": allowed}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def same_setting(other: type, name: str) -> Any:
    """Return a dataclass field with the default, help text and allowed values of a field of another dataclass."""
    (own,) = (each for each in fields(other) if each.name == name)
    return field(default=own.default, metadata=own.metadata)


def check_settings(config: Any, source: str = "") -> None:
    """
    Check a dataclass's fields made by `setting`. A dictionary that is None becomes an empty dictionary, and a whole
    number such as 8.0 an integer.

    Args:
        source: begins the message.
    """
    for each in fields(config):
        allowed, value = each.metadata.get("allowed"), getattr(config, each.name)
        if allowed is None or (value is None and each.default is None):
            continue
        if not isinstance(allowed, Range):
            if value not in allowed:
                is_table = isinstance(allowed, Mapping)  # plugins add to it
                remedy = "; import a plugin that has it first (--plugins)" if is_table else ""
                raise InputError(f"{source}{choice_error(each.name, value, map(str, allowed))}{remedy}")
            continue
        is_mapping = each.default_factory is dict
        values = ({} if value is None else value) if is_mapping else {"": value}
        if not isinstance(values, dict) or not all(number in allowed for number in values.values()):
            mapping = "a mapping of names to numbers, each " if is_mapping else ""
            raise InputError(f"{source}{each.name}={value!r}: must be {mapping}{allowed}")
        if allowed.whole:
            values = {name: int(number) for name, number in values.items()}
        object.__setattr__(config, each.name, values if is_mapping else values[""])  # some are frozen


# Settings with names of modules or regexes as keys. Settings with names of modules or one regex as value.
PATTERNS = ("num_experts_pattern", "top_k_pattern", "rank_pattern", "alpha_pattern")
_NAMES = ("target_modules", "exclude_modules", "layers_pattern", "target_projections", "modules_to_save")


def check_patterns(settings: Mapping[str, Any], source: str) -> None:
    """
    Check an adapter's settings for names of modules.

    Args:
        source: begins the message.
    """
    for name in (*_NAMES, *PATTERNS):
        value = settings.get(name)
        patterns = [value] if isinstance(value, str) else () if value is None else value
        if not isinstance(patterns, Collection) or not all(isinstance(pattern, str) for pattern in patterns):
            raise InputError(f"{source}{name}={value!r}: must be names of modules")
        for pattern in patterns:
            field = f"{source}{name}={one_line(pattern, 60)!r}"
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise InputError(f"{field}: is no regular expression: {error}") from error
            if _may_take_for_ever(pattern):
                raise InputError(f"{field}: repeats a repetition, so a match may take forever; write it without that")


def _may_take_for_ever(pattern: str) -> bool:
    """Return whether a regex repeats a group that has a repetition, as in `(.*)*`, or has three wildcards in a row."""
    text = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "_", pattern)  # escapes and classes count as characters
    text = re.sub(r"(?:[*+]|\{\d*,\})[?+]?", "*", text)
    groups = text.count("(")
    while groups and "\0*" not in text:  # from the innermost on; a group with a repetition becomes "\0"
        text, groups = re.subn(r"\([^()]*\)", lambda group: "\0" if re.search(r"[*\0]", group[0][1:-1]) else "_", text)
    return "\0*" in text or ".*.*.*" in pattern
