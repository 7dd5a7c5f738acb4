"""
Check values that enter as text, from a YAML file or a command line, once and only here.

Sections of recipes and options of commands are pydantic models. Arguments of other classes (TRL's configs,
`MoELoraConfig`, …) are checked by the types of their fields. Every error becomes one `ValueError` with one line.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from .foreign import FOREIGN
from .io import read_text
from .messages import InputError, choice_error, one_line, unknown_keys
from .settings import Range

# --- yaml -------------------------------------------------------------------------------------------------------------


_MOST_VALUES = 100_000  # with aliases of aliases, a file of a kilobyte can stand for more than any memory holds


class _YamlLoader(yaml.SafeLoader):
    """
    Refuses keys that occur twice (plain YAML takes the last), and aliases that expand to very many values. Reads
    numbers as YAML 1.2 does: `1e-4` is a number, `010` is ten and `1:30` a text.
    """

    yaml_implicit_resolvers: typing.ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.sizes: dict[int, int] = {}  # node id → number of values it stands for

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
        node: Any = super().compose_node(parent, index)
        if is_alias and id(node) not in self.sizes:
            raise yaml.composer.ComposerError(None, None, "an alias that contains itself", mark)
        if not is_alias:
            inner = [] if isinstance(node, yaml.ScalarNode) else node.value
            parts = [part for each in inner for part in (each if isinstance(each, tuple) else [each])]
            self.sizes[id(node)] = 1 + sum(self.sizes[id(part)] for part in parts)
        if self.sizes[id(node)] > _MOST_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {_MOST_VALUES} values", mark)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _string(loader: _YamlLoader, node: Any) -> str:
    text = loader.construct_scalar(node)
    return os.path.expanduser(text) if text.startswith("~/") else text


def _integer(loader: _YamlLoader, node: Any) -> int:
    text = loader.construct_scalar(node)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_YamlLoader.add_constructor("tag:yaml.org,2002:str", _string)
_YamlLoader.add_constructor("tag:yaml.org,2002:int", _integer)
for _tag, _pattern in {
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    _YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), list("-+.0123456789"))


def read_yaml(text: str, source: object) -> Any:
    """
    Return the value of a YAML text, which may be JSON. `~/` at the beginning of a string is the home folder.

    Args:
        source: origin of the text, for messages.
    """
    try:
        return yaml.load(text, _YamlLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        _refuse_missing_space(text, source)
        raise InputError(f"{source}: cannot be read as YAML: {one_line(error, 160)}") from error


_NO_SPACE = re.compile(r"^[ \t]*(?:- )?(\w+:)(?=[^\s:/])", re.MULTILINE)


def _refuse_missing_space(text: str, source: object) -> None:
    """Raise if a key runs into its value, in a YAML text that is unreadable or not a mapping."""
    if found := _NO_SPACE.search(text):
        line = text.count("\n", 0, found.start(1)) + 1
        raise InputError(f"{source}: line {line}: a space is missing after {found[1]}")


def read_settings(path: str | os.PathLike) -> dict[str, Any]:
    """Read the mapping in a YAML file."""
    text = read_text(path)
    settings = read_yaml(text, path)
    if not isinstance(settings, dict):
        _refuse_missing_space(text, path)
        raise InputError(f"{path}: must be a mapping of keys to values")
    return settings


# --- types of fields -------------------------------------------------------------------------------------------------


def _printable(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise PydanticCustomError("text", "must be a string of printable characters")
    return text


Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), AfterValidator(_printable)]
TextList = Annotated[list[Text], Field(min_length=1)]
Count = Annotated[Integer, Field(ge=1, le=2**31 - 1)]
NumExperts = Annotated[Integer, Field(ge=1, le=4096)]
Share = Annotated[Number, Field(ge=0, le=1)]
Seed = Annotated[Integer, Field(ge=0, le=2**31 - 1)]


class Settings(BaseModel):
    """
    A section of a recipe, or the options of a command. Unknown keys are errors, and `"1"` is not a number.

    A subclass lists keys of other programs in `foreign`: key → its equivalent here.
    """

    foreign: typing.ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)


class WeightSettings(Settings):
    """How the weights are held in memory."""

    dtype: Text = Field("auto", title="NAME", description="dtype of the weights: auto, float32, bfloat16 or float16")
    quantization: dict[str, Any] | None = Field(
        None, description='fields of BitsAndBytesConfig, e.g. {"load_in_4bit": true}'
    )


class DataSettings(Settings):
    """The examples that run through a model, and their batches."""

    split: Text = Field("train", title="NAME", description="split of the data, e.g. train[:100]; a file has only train")
    batch_size: Count = Field(8, description="examples per forward pass")
    max_length: Count = Field(1024, description="maximum tokens per example; longer ones are truncated")
    max_examples: Count | None = Field(None, description="use only the first N; shuffle a sorted file first")


# --- validation ------------------------------------------------------------------------------------------------------

Model = TypeVar("Model", bound=Settings)


def validate(kind: type[Model], values: Mapping[str, Any]) -> Model:
    """Check values that came as text, and return them as settings."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        errors = error.errors()
        sections: dict[str, tuple[dict[str, Any], Any]] = {}  # name → its unknown keys, and its fields
        for one in errors:
            if one["type"] == "extra_forbidden":
                names, fields = _place(kind, one["loc"][:-1])
                given, _ = sections.setdefault("".join(f"{name}." for name in names), ({}, fields))
                given[str(one["loc"][-1])] = one["input"]
        # Report all misspelled keys and errors of this package's checks, or else the first wrong value.
        lines = [
            unknown_keys(given, fields, section, foreign={} if section else kind.foreign)
            for section, (given, fields) in sections.items()
        ]
        lines += [_explain(kind, one) for one in errors if one["type"] == "value_error"]
        raise InputError(" | ".join(filter(None, lines)) or _explain(kind, errors[0])) from None


# Types that a field accepts in addition to its declared type. `read_expert_map` checks the first. The second is
# declared as text, for command lines; in a file it may also be true or false.
_ALSO: dict[str, Any] = {"expert_map": Any, "resume_from_checkpoint": bool}


def check_rules(rules: Iterable[tuple[Any, str]]) -> None:
    """
    Check how settings go together.

    Args:
        rules: pairs of a condition and the message to raise if it holds. The first one counts.
    """
    for is_wrong, message in rules:
        if is_wrong:
            raise InputError(message)


def check_fields(kind: type, values: Mapping[str, Any], path: str = "", documented: str | None = None) -> None:
    """
    Check text values for some fields of a dataclass.

    Args:
        path: the section of the values, dotted; it begins the message.
        documented: where the fields are documented, if they are too many to list.
    """
    hints, section = typing.get_type_hints(kind), f"{path}." if path else ""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    # Keys of other programs with an equivalent among these fields, or with none at all.
    foreign = {key: here for key, here in FOREIGN.items() if re.split(r"\W", here)[0] in {*fields, "leave"}}
    if wrong := unknown_keys(values, fields, section, documented, foreign):
        raise InputError(wrong)
    for name, value in values.items():
        _check_type(f"{section}{name}", value, hints[name] | _ALSO.get(name, hints[name]))
        if choices := fields[name].metadata.get("choices"):  # transformers looks at those of flags alone
            for each in value if isinstance(value, list) else [value]:
                if each is not None and each not in [*choices]:
                    raise InputError(choice_error(f"{section}{name}", each, choices))
        if "learning_rate" in fields:
            check_range(name, value, section)


@contextmanager
def prefixed(path: str) -> Iterator[None]:
    """Begin the message of an `InputError` with the section of the values, inside the block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


# Pydantic's words → this package's.
_WORDS = {
    "Input should be": "must be", "List should have": "must have", " after validation, not": ", not",
    "greater than or equal to": "at least", "less than or equal to": "at most", "greater than": "above",
    "less than": "below",
}  # fmt: skip


def _place(kind: Any, loc: Any) -> tuple[list[str], Any]:
    """Return the place of a pydantic error: the names of sections and keys, and the fields of the innermost section."""
    names, fields, of_keys = [], kind.model_fields, False
    for part in loc:  # field names and keys; all else is a type's alternative
        if part in fields:
            names.append(str(part))
            kinds = list(plain_types(fields[part].annotation))
            models = [one for one in kinds if issubclass(one, BaseModel)]
            fields, of_keys = (models[0].model_fields, dict in kinds) if models else ({}, False)
        elif of_keys:
            names.append(str(part))
            of_keys = False
    return names, fields


def _explain(kind: Any, error: Any) -> str:
    """Return a pydantic error as field, value and allowed values."""
    if error["type"] == "value_error":  # from this package's checks; names the field
        return error["msg"].removeprefix("Value error, ")
    field = ".".join(_place(kind, error["loc"])[0]) or "recipe"
    if error["type"] == "missing":
        return f"{field}: must be given"
    allowed = error["msg"]
    for theirs, ours in _WORDS.items():
        allowed = allowed.replace(theirs, ours)
    if error["type"] in ("model_type", "dict_type"):
        allowed = "must be a mapping"
    return f"{field}={one_line(repr(error['input']), 80)}: {allowed}"


def plain_types(annotation: Any) -> Iterator[type]:
    """Yield the classes in a field's type, such as list and str."""
    for kind in (annotation, typing.get_origin(annotation)):
        if isinstance(kind, type):
            yield kind
    for part in typing.get_args(annotation):
        yield from plain_types(part)


def _check_type(path: str, value: Any, hint: Any) -> None:
    enums: list[Any] = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, enum.EnumType)]
    names = [str(member.value) for kind in enums for member in kind]
    if names and isinstance(value, str) and value not in names:
        close = difflib.get_close_matches(value, names, n=3) or names[:8]
        raise InputError(choice_error(path, value, close if len(close) == len(names) else [*close, "…"]))
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
        adapter.validate_python(value)
    except ValidationError as error:
        wanted = dict.fromkeys(
            one["msg"].removeprefix("Input should be ") for one in error.errors() if "instance" not in one["msg"]
        )
        raise InputError(f"{path}={one_line(repr(value), 80)}: must be {' or '.join(wanted)}") from None


# --- ranges of training arguments ------------------------------------------------------------------------------------

# Training argument → its allowed numbers; all others must be at least 0.
_NUMBERS = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
            "eval_accumulation_steps", "torch_empty_cache_steps", "dataset_num_proc", "dataloader_prefetch_factor",
            "pad_to_multiple_of",
        ),
        Range(at_least=1),
    ),
    **dict.fromkeys(("logging_steps", "save_steps", "eval_steps", "adam_epsilon", "beta"), Range(above=0)),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "label_smoothing_factor", "label_smoothing"), Range(at_least=0, below=1)
    ),
    **dict.fromkeys(("seed", "data_seed"), Range(0, 2**32 - 1)),
    "num_train_epochs": Range(above=0, at_most=10**6),
    "local_rank": Range(),
}  # fmt: skip


def check_range(name: str, value: Any, section: str = "") -> None:
    """Check values that training arguments let through: numbers out of range, and strings for mappings."""
    allowed: object
    if isinstance(value, str) and (name.endswith("_kwargs") or name == "liger_kernel_config"):
        good, allowed = value.startswith("{"), 'a mapping, like {"name": 4}'  # the arguments then read it
    elif isinstance(value, str):
        good, allowed = "\0" not in value, "text without NUL"
    elif name == "loss_type" and isinstance(value, list):
        good, allowed = bool(value), "at least one"
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    elif not math.isfinite(value):
        good, allowed = False, "finite"
    elif name == "max_steps":
        good, allowed = value == -1 or 1 <= value <= 1e9, "from 1 to 1,000,000,000, or -1 for num_train_epochs"
    elif name == "max_length":
        good, allowed = value >= 2, "at least 2: a token is predicted from those before it"
    else:
        allowed = _NUMBERS.get(name, Range(at_least=0))
        good = value in allowed
    if not good:
        raise InputError(f"{section}{name}={value!r}: must be {allowed}")
