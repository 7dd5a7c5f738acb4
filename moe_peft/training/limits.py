"""What training arguments may be, which themselves take values as they are."""

from __future__ import annotations

import difflib
import enum
import math
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..messages import one_of

_FROM_1 = {
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "eval_accumulation_steps", "torch_empty_cache_steps", "dataset_num_proc", "dataloader_prefetch_factor",
    "max_prompt_length", "max_completion_length", "pad_to_multiple_of",
}  # fmt: skip
_ABOVE_0 = {"logging_steps", "save_steps", "eval_steps", "adam_epsilon", "beta"}
_BELOW_1 = {"adam_beta1", "adam_beta2", "label_smoothing_factor", "label_smoothing"}
_OF_ANY_SIGN = {"local_rank"}


def check_settings(kind: type, settings: Mapping[str, Any], path: str = "") -> None:
    """
    Check values of training arguments, which the arguments themselves take as they are.

    Args:
        kind: the arguments' class.
        settings: its fields, by name.
        path: of the section that has them, with a dot at its end.

    Raises:
        ValueError: a value is of another type than its field, or a number is out of range.
    """
    hints = typing.get_type_hints(kind)
    for name, value in settings.items():
        if name == "expert_map":
            continue  # `read_expert_map` takes more than the type that a command line can give
        names = [one.value for part in (hints[name], *typing.get_args(hints[name])) for one in _members(part)]
        if names and isinstance(value, str) and value not in names:
            close = difflib.get_close_matches(value, names, n=3) or names[:8]
            raise ValueError(one_of(f"{path}{name}", value, close if len(close) == len(names) else [*close, "…"]))
        try:
            TypeAdapter(hints[name], config=ConfigDict(strict=True, arbitrary_types_allowed=True)).validate_python(
                value
            )
        except ValidationError as error:
            wanted = dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in error.errors())
            raise ValueError(f"{path}{name}={value!r}: must be {' or '.join(wanted)}") from None
        check_value(name, value, path)


def _members(kind: Any) -> list[enum.Enum]:
    return list(kind) if isinstance(kind, enum.EnumType) else []


def check_value(name: str, value: Any, path: str = "") -> None:
    """
    Raises:
        ValueError: a training argument is a number out of its range, or a text that should be a mapping.
    """
    if isinstance(value, str) and (name.endswith("_kwargs") or name == "liger_kernel_config"):
        good, allowed = value.startswith("{"), 'a mapping, like {"name": 4}'  # which the arguments then read
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or name in _OF_ANY_SIGN:
        good, allowed = True, ""
    elif not math.isfinite(value):
        good, allowed = False, "finite"
    elif name == "max_steps":
        good, allowed = value == -1 or value >= 1, "at least 1, or -1 for num_train_epochs"
    elif name == "num_train_epochs":
        good, allowed = 0 < value <= 1e6, "above 0, up to 1,000,000"
    elif name == "max_length":
        good, allowed = value >= 2, "at least 2: a token is predicted from those before it"
    elif name in _FROM_1:
        good, allowed = value >= 1, "at least 1"
    elif name in _ABOVE_0:
        good, allowed = value > 0, "above 0"
    elif name in _BELOW_1:
        good, allowed = 0 <= value < 1, "from 0 to below 1"
    elif name.endswith("seed"):
        good, allowed = 0 <= value < 2**32, "from 0 to 2**32 - 1"
    else:
        good, allowed = value >= 0, "at least 0"
    if not good:
        raise ValueError(f"{path}{name}={value!r}: must be {allowed}")
