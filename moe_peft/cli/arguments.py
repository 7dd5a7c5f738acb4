"""
What several commands parse alike.

The options of the commands that train: TRL's dataclasses and the fields of `MoELoraConfig`, all under their own names,
as flags and as keys of a YAML file. Flags go first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

import torch
from peft import PeftConfig
from trl import ModelConfig, ScriptArguments, TrlParser

from ..adapter.config import MoELoraConfig
from ..analysis.figures import FORMATS
from ..utils.io import read_text, read_yaml
from ..utils.validation import one_line, unknown_key

# --- parsing ---------------------------------------------------------------------------------------------------------

_QUANTIZATION = '{"load_in_4bit": true}'


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Which examples run through a model, and how."""
    add = parser.add_argument
    add("--split", default="train", help="split of the data; a file has only train, also train[:100]")
    add("--batch-size", type=int, default=8)
    add("--max-length", type=int, default=1024, help="maximum tokens per example")
    add("--max-examples", type=int, help="maximum number of examples")


def add_weights_options(parser: argparse.ArgumentParser) -> None:
    """How the weights are held in memory; `quantization` reads the second."""
    add = parser.add_argument
    add("--dtype", default="auto", help="of the weights: auto, float32, bfloat16 or float16")
    add("--quantization", metavar="JSON", help=f"fields of BitsAndBytesConfig, e.g. {_QUANTIZATION}")


def add_figures_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figures", default="png", choices=FORMATS, help="format of the figures")


def quantization(options: argparse.Namespace) -> dict[str, Any] | None:
    """
    The option `--quantization`.

    Raises:
        ValueError: it is not a JSON object.
    """
    return parse_json("--quantization", options.quantization, _QUANTIZATION)


def parse_json(option: str, text: str | None, example: str) -> dict[str, Any] | None:
    """
    An option that is a JSON object.

    Raises:
        ValueError: it is none.
    """
    if text is None:
        return None
    try:
        value = read_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{option} {one_line(repr(text))}: give JSON like {example}")
    return value


def read_json(text: str) -> Any:
    """
    Raises:
        ValueError: it is no JSON, or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_with_keys_once)
    except RecursionError as error:
        raise ValueError("is too deep") from error


def _with_keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("has a key twice")
    return found


# --- options ---------------------------------------------------------------------------------------------------------


@dataclass
class RunOptions:
    """What no other dataclass has."""

    use_peft: bool | None = field(
        default=None,
        metadata={"help": "Train a MoE-LoRA adapter. By default yes, unless the model is a native MoE."},
    )
    stages: list[str] | None = field(
        default=None,
        metadata={"help": "Train one stage after the other: routers, rest, joint. In YAML also stage → its settings."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Print the plan and stop."})
    processes: int | None = field(default=None, metadata={"help": "With dry_run: plan for this many processes."})
    strategy: str | None = field(
        default=None, metadata={"help": "With dry_run: what divides the state among them: ddp, fsdp2, zero2 or zero3."}
    )


def _reduced(kind: type, left_out: set[str], types: Mapping[str, Any]) -> type:
    """A dataclass with the fields of another, of types that a command line can give."""
    hints = {**get_type_hints(kind), **types}
    own: list[Any] = [
        (f.name, hints[f.name], field(default=f.default, default_factory=f.default_factory, metadata=f.metadata))  # type: ignore[call-overload]
        for f in dataclasses.fields(kind)
        if f.init and f.name not in left_out
    ]
    return dataclasses.make_dataclass(kind.__name__, own)


_WORDS = ("target_modules", "target_projections", "exclude_modules", "layers_pattern", "modules_to_save")
_MAPPINGS = ("num_experts_pattern", "rank_pattern", "alpha_pattern")
_LORA = {f.name for f in dataclasses.fields(ModelConfig) if f.name.startswith("lora_")}
_LORA |= {"use_peft", "use_rslora", "use_dora"}
ModelOptions = _reduced(ModelConfig, _LORA, {})
AdapterOptions = _reduced(
    MoELoraConfig,
    {f.name for f in dataclasses.fields(PeftConfig)} | {"router_aux_loss_coef"},  # TRL's configs have it
    {
        **dict.fromkeys(_WORDS, list[str] | None),
        **dict.fromkeys(_MAPPINGS, dict),
        "layers_to_transform": list[int] | None,
        "init_lora_weights": str,
    },
)
# Options of TRL's that nothing here reads, and what to do instead.
_UNREAD = {
    "trust_remote_code": "code that comes with a model or with data is never run; leave it out",
    "model_init_kwargs": "use model_revision, dtype and attn_implementation",
    "ignore_bias_buffers": "leave it out",
}


@dataclass(frozen=True)
class Options:
    """
    What a training command was told.

    Args:
        data, training, model: TRL's `ScriptArguments`, the trainer's config and `ModelConfig`.
        adapter: fields of `MoELoraConfig`.
        run: the command's own.
    """

    data: ScriptArguments
    training: Any
    model: ModelConfig
    adapter: dict[str, Any]
    run: RunOptions

    def changed_adapter_fields(self) -> list[tuple[str, Any]]:
        """The fields of `adapter` that are not left as they are."""
        usual = vars(AdapterOptions())
        return [(name, value) for name, value in self.adapter.items() if value != usual[name]]

    def adapter_config(self) -> MoELoraConfig:
        own = dict(self.adapter)
        for name in ("target_modules", "exclude_modules"):  # like TRL: a single word may be a regex or "all-linear"
            if own[name] is not None and len(own[name]) == 1 and not re.fullmatch(r"[\w.]+", own[name][0]):
                own[name] = own[name][0]
        if self.training.router_aux_loss_coef is not None:
            own["router_aux_loss_coef"] = self.training.router_aux_loss_coef
        return MoELoraConfig(task_type="CAUSAL_LM", **own)


class TrainingParser(TrlParser):
    """
    TRL's parser, whose errors are one line that names the key, the value and the remedy.

    Args:
        config: the trainer's config, e.g. `MoESFTConfig`.
    """

    def __init__(self, config: type, **own: Any) -> None:
        self.actions: dict[str, argparse.Action] = {}  # by key; of a flag and its `--no_…`, the flag
        kinds: list[Any] = [ScriptArguments, config, ModelOptions, AdapterOptions, RunOptions]
        super().__init__(kinds, allow_abbrev=False, **own)
        self.hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
        for name in (*_MAPPINGS, "expert_map"):
            if name in self.actions:
                self.actions[name].type = _mapping
        self.actions["init_lora_weights"].type = _truth_or_word
        self.add_argument("--config", metavar="FILE", help="a YAML file with any of these settings")

    def add_argument(self, *names: Any, **own: Any) -> Any:
        action = super().add_argument(*names, **own)
        self.actions.setdefault(action.dest, action)
        return action

    def error(self, message: str) -> Any:
        raise ValueError(message)

    def parse_args(self, arguments: Sequence[str]) -> Options:  # type: ignore[override]
        """
        Raises:
            ValueError: no such file, an unknown key or flag, or a wrong value.
        """
        files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        files.add_argument("--config")
        found, flags = files.parse_known_args(arguments)
        if found.config is not None:
            self._take(_read(found.config), found.config)
        known, rest = self.parse_known_args(flags)
        for flag in rest:
            raise ValueError(unknown_key(flag, [f"--{name}" for name in self.actions], f"`{self.prog} --help`"))
        if known.dry_run and not torch.accelerator.is_available():
            self.actions["use_cpu"].default = True  # a plan may be for a machine that has what this one lacks
        try:
            data, training, model, adapter, run, _ = self.parse_args_into_dataclasses(flags)
        except (TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:  # of a library's own checks
            raise ValueError(f"{self.prog}: {one_line(error)}") from error
        for part in (data, training, model):
            for name in _UNREAD.keys() & vars(part).keys():
                if value := getattr(part, name):
                    raise ValueError(f"{name}={value!r}: is not read here; {_UNREAD[name]}")
        values = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
        return Options(data, training, ModelConfig(**values), vars(adapter), run)

    def _take(self, settings: Mapping[str, Any], path: str) -> None:
        """Make the settings of a file the defaults."""
        for key, value in settings.items():
            if key not in self.actions:
                raise ValueError(f"{path}: {unknown_key(str(key), self.actions, f'`{self.prog} --help`')}")
            self.actions[key].default = self._value(key, value)
            self.actions[key].required = False

    def _value(self, key: str, value: Any) -> Any:
        """A value of a file, of the type that the flag has."""
        action, hint = self.actions[key], self.hints.get(key, Any)
        kinds = [get_origin(kind) or kind for kind in (get_args(hint) or (hint,))]
        if value is None and action.default is not None and not {Any, type(None)} & set(kinds):
            raise ValueError(f"{key}=null: must have a value; leave it out for {action.default!r}")
        if isinstance(value, dict) and not {Any, dict} & set(kinds) and key not in ("stages", "expert_map"):
            raise ValueError(f"{key}={one_line(repr(value), 60)}: must not be a mapping")
        if value is None or isinstance(value, dict):
            return value
        listed = action.nargs in ("+", "*")
        if isinstance(value, list) and not listed:
            raise ValueError(f"{key}={value!r}: must be a single value")
        values = value if isinstance(value, list) else [value]
        try:
            found = [action.type(str(one)) if callable(action.type) else one for one in values]
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            kind = getattr(action.type, "__name__", "")
            must = f"must be {kind}" if kind in ("int", "float", "str") else one_line(error)
            raise ValueError(f"{key}={one_line(repr(value), 60)}: {must}") from error
        return found if listed else found[0]


def _read(path: str) -> Mapping[str, Any]:
    settings = read_yaml(read_text(path), path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: must be a mapping of keys to values")
    return settings


def _mapping(text: str) -> dict[str, Any]:
    try:
        found = read_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{one_line(repr(text), 60)}: must be JSON like {{"name": 4}}')
    return found


def _truth_or_word(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)
