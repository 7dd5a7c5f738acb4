"""Settings of a command: fields with a description. Its flags, `--help` and YAML file are made from the fields."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from ..utils.io import check_on_hub
from ..utils.messages import InputError, one_line, unknown_keys
from ..utils.validation import Settings, plain_types, read_yaml, validate
from .help import GroupedParser

# --- paths -----------------------------------------------------------------------------------------------------------


def check_models(**sources: str | Sequence[str] | None) -> None:
    """
    Raise if a model or an adapter does not exist. The keys of `sources` are fields. The check runs before torch and
    others are imported, which takes seconds.
    """
    for field, names in sources.items():
        for name in [names] if isinstance(names, str) else names or []:
            if not Path(name).exists():
                check_on_hub(name, f"{field}={name!r}")


def check_files(**sources: str | Sequence[str] | None) -> None:
    """Raise if a data file does not exist. `datasets` checks other names: a folder or a dataset."""
    for field, names in sources.items():
        for name in [names] if isinstance(names, str) else names or []:
            if Path(name).suffix in (".json", ".jsonl", ".csv", ".parquet") and not Path(name).is_file():
                raise InputError(f"{field}={name!r}: no such file")


# --- the parser ------------------------------------------------------------------------------------------------------


class SettingsParser(GroupedParser):
    """
    A parser with a flag for each field of the settings. A YAML file (`--config`) may have the same fields; flags
    override it.

    Args:
        kind: the settings; a field's title is the placeholder of its value in `--help`.
        groups: title → fields; fields without a group come last.
    """

    def __init__(
        self, kind: type[Settings], prog: str, *, groups: Mapping[str, Collection[str]] | None = None, **kwargs: Any
    ) -> None:
        self.kind, fields = kind, kind.model_fields
        names = dict.fromkeys([*chain(*(groups or {}).values()), *fields])
        required = [f"{_flag(name)} {_metavar(fields[name])}" for name in names if fields[name].is_required()]
        usage = " ".join(["%(prog)s", *required, "[options]"])
        super().__init__(prog, groups=groups or {}, allow_abbrev=False, **{"usage": usage, **kwargs})
        if "config" not in fields:
            self.add_argument("--config", metavar="FILE", help="a YAML file with any of these settings")
        for name in names:
            field = fields[name]
            no_default = field.is_required() or field.default is None or field.default == []
            default = "" if no_default else f" (default: {field.default})"
            text = f"{field.description}{default if 'default' not in str(field.description) else ''}"
            self._add(name, field, text.replace("%", "%%"))

    def _add(self, name: str, field: FieldInfo, text: str) -> None:
        flag, kinds = _flag(name), {*plain_types(field.annotation)}
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name}
        if kinds == {bool}:
            self.add_argument(flag, action="store_true", help=field.description, **options)
            if field.default:
                self.add_argument(_flag(f"no_{name}"), action="store_false", **options)
            return
        if bool in kinds:
            options |= {"nargs": "?", "const": True}
        elif list in kinds and dict not in kinds:
            options |= {"nargs": "+", "action": "extend"}
        if kinds & {int, float, dict} or (bool in kinds and str not in kinds):
            options["type"] = _read
        self.add_argument(flag, metavar=_metavar(field), help=text, **options)

    def parse_args(self, arguments: Sequence[str]) -> Settings:  # type: ignore[override]
        """Parse flags and the YAML file into settings."""
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            known = [flag for action in self._actions for flag in action.option_strings]
            raise InputError(
                str(unknown_keys(flags_in(unknown), known, "", f"`{self.prog} --help`", self.kind.foreign))
            )
        flags, fields = vars(options), self.kind.model_fields
        file = {} if "config" in fields else self.settings_in(flags.pop("config"))
        given = {**file, **flags}
        missing = [name for name, field in fields.items() if field.is_required() and name not in given]
        if missing and given.keys() <= fields.keys():  # a misspelled key is reported first
            raise InputError(f"{_flag(missing[0])}: must be given")
        return validate(self.kind, given)


def as_flags(message: str, parser: argparse.ArgumentParser, arguments: Sequence[str]) -> str:
    """Replace an error's names of settings by flags, except settings that the YAML file may have set."""
    names = [name for name in getattr(getattr(parser, "kind", None), "model_fields", ()) if name != "config"]
    typed = {argument.partition("=")[0].lstrip("-").replace("-", "_") for argument in arguments}
    names = [name for name in names if "config" not in typed or name in typed]

    def flagged(part: str) -> str:
        for name in names:
            end = r"(?![\w./(])" if "_" in name else r"(?==)"  # other names may be words
            part = re.sub(rf"(?<![\w.\-/=])(?<!\.json: ){name}{end}", _flag(name), part)
        return part

    # First "adapters, models: …": these names have no value.
    before, colon, after = message.partition(": ")
    if (listed := before.split(", ")) and set(listed) <= set(names):
        return ", ".join(map(_flag, listed)) + colon + flagged(after)
    quoted = re.compile(r"""((?<!\w)'[^']*'|(?<!\w)"[^"]*"|`[^`]*`)""")
    return "".join(part if i % 2 else flagged(part) for i, part in enumerate(quoted.split(message)))


def flags_in(unknown: Sequence[str]) -> dict[str, str]:
    """Return flag → value of the flags that a parser does not know; without flags, only the first argument."""
    flags = [argument.partition("=") for argument in unknown if argument.startswith("--")]
    return {flag: value for flag, _, value in flags} or {unknown[0]: ""}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read(text: str) -> Any:
    """Read a flag's value, written as in YAML or JSON."""
    try:
        value = read_yaml(text, one_line(repr(text), 60))
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r}: is not a value; leave the flag out")
    return value


def _metavar(field: FieldInfo) -> str:
    """Return the placeholder of a value in `--help`."""
    kinds, names = {*plain_types(field.annotation)}, {dict: "JSON", float: "X", int: "N"}
    alternatives = (field.annotation, *get_args(field.annotation))
    choices = [str(choice) for kind in alternatives if get_origin(kind) is Literal for choice in get_args(kind)]
    return field.title or "|".join(choices) or next((name for kind, name in names.items() if kind in kinds), "VALUE")
