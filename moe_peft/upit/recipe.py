"""
The recipe of a run is read from one YAML file. `recipe_fields` has what may be in it, `recipe_rules` which values go
together and what follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..utils.messages import InputError
from ..utils.plugins import load_plugins
from ..utils.validation import read_settings, read_yaml, validate
from .recipe_rules import Recipe


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """
    Read a recipe.

    Args:
        path: of the YAML file.
        overrides: `key=value` with a dotted key and a YAML value, e.g. `post_train.sft.learning_rate=1e-4`.

    Returns:
        the recipe, with a method's defaults where the file says nothing.

    Raises:
        ValueError: no such file, an unknown key or a wrong value.

    Example:

    ```python
    >>> from pathlib import Path
    >>> from moe_peft.upit import load_recipe
    >>> model = "model: {name_or_path: Qwen/Qwen3-0.6B}"
    >>> text = f"{{output_dir: upit, {model}, data: {{train: train.jsonl}}}}"
    >>> _ = Path("upit.yaml").write_text(text)
    >>> load_recipe(
    ...     "upit.yaml", ["method=self_moe", "post_train.seed=3"]
    ... ).post_train.seed
    3

    ```
    """
    settings = read_settings(path)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not all(key.split(".")):
            raise InputError(f"{override!r}: an override is key=value, such as post_train.seed=1")
        *parents, last = key.split(".")
        section = settings
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise InputError(f"{override!r}: {parent!r} is not a section")
        section[last] = read_yaml(value, repr(override))
    return recipe_from_dict(settings)


def recipe_from_dict(settings: Mapping[str, Any]) -> Recipe:
    """
    A recipe from nested dictionaries.

    Args:
        settings: as a YAML file has them.

    Returns:
        the recipe, with a method's defaults where the settings say nothing.

    Raises:
        ValueError: an unknown key or a wrong value; the message is one line.

    Example:

    ```python
    >>> from moe_peft.upit import recipe_from_dict
    >>> settings = {
    ...     "output_dir": "upit",
    ...     "model": {"name_or_path": "Qwen/Qwen3-0.6B"},
    ...     "data": {"train": "train.jsonl"},
    ...     "mode": "ffn",
    ...     "num_experts": 4,
    ...     "moe": {"top_k": 2},
    ... }
    >>> recipe_from_dict(settings).upcycle_config().num_experts
    4

    ```
    """
    plugins = settings.get("plugins", [])
    if isinstance(plugins, list):
        load_plugins([name for name in plugins if isinstance(name, str)])  # first: they may add to the tables
    return validate(Recipe, settings)
