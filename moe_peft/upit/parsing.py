"""Recipes from YAML files and dictionaries; what is wrong with them, in one line."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..checks import PATH, TEXTS, check, is_a
from ..messages import unknown_key
from ..reading import read_text, read_yaml
from .recipe import Recipe

# Path of a section → its class.
_SECTIONS: dict[str, Any] = {
    "": Recipe,
    **{name: kind for name, kind in typing.get_type_hints(Recipe).items() if dataclasses.is_dataclass(kind)},
}
_KEYS = {f.name for section in _SECTIONS.values() for f in dataclasses.fields(section)}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """
    Read a recipe.

    Args:
        overrides: `key=value` with a dotted key and a YAML value, e.g. `post_train.sft.learning_rate=1e-4`.

    Raises:
        ValueError: no such file, an unknown key or a wrong value.
    """
    check("load_recipe", path=(path, PATH), overrides=(overrides, TEXTS))
    settings = read_yaml(read_text(path), path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: a recipe is a mapping of keys to values")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r}: an override is key=value")
        *parents, last = key.split(".")
        section = settings
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ValueError(f"{override!r}: {parent!r} is not a section")
        section[last] = read_yaml(value, repr(override))
    return recipe_from_dict(settings)


def recipe_from_dict(settings: Mapping[str, Any]) -> Recipe:
    """
    A recipe from nested dictionaries.

    Raises:
        ValueError: an unknown key or a wrong value; the message is one line.
    """
    check("recipe_from_dict", settings=(settings, is_a(Mapping, remedy="give a dictionary of keys to values")))
    try:
        return TypeAdapter(Recipe).validate_python(dict(settings))
    except ValidationError as error:
        raise ValueError(_explain(error.errors()[0])) from None


def _explain(error: Any) -> str:
    """One error of pydantic's as field, value and what is allowed."""
    if error["type"] == "value_error":  # of a check of ours, which names the field itself
        return error["msg"].removeprefix("Value error, ")
    if error["type"] == "unexpected_keyword_argument":
        *parents, key = map(str, error["loc"])
        known = {f.name for f in dataclasses.fields(_SECTIONS[".".join(parents)])}
        return unknown_key(".".join((*parents, key)), known)
    path = ".".join(str(part) for part in error["loc"] if part in _KEYS) or "recipe"
    if error["type"] == "missing":
        return f"{path}: {error['msg']}"
    allowed = error["msg"].replace("Input should be", "must be").replace("List should have", "must have")
    return f"{path}={error['input']!r}: {allowed}"
