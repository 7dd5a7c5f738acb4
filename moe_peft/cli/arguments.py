"""
Options of the commands that train, as flags and from YAML files: the fields of TRL's dataclasses and of
`MoELoraConfig`, by their own names. Flags override the file.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from peft import PeftConfig
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser, get_quantization_config

from ..adapter.config import MoELoraConfig
from ..models.layer import native_layers
from ..native.base import Base
from ..native.folders import MoELoraFolder, open_folder
from ..training.replay import MAX_NEW_TOKENS
from ..training.resuming import names_checkpoint
from ..training.router_config import RouterLossConfig, TrainedPart
from ..utils.foreign import FOREIGN
from ..utils.loading import check_tokenizer
from ..utils.messages import InputError, arguments_error, choice_error, one_line, refused_settings, unknown_keys
from ..utils.validation import check_fields, check_range, prefixed, read_yaml
from .help import GroupedParser
from .settings import flags_in

logger = logging.getLogger("moe_peft")

# --- options of training ---------------------------------------------------------------------------------------------


@dataclass
class RunOptions:
    """Options of the commands that are in no other dataclass."""

    adapter: str | None = field(
        default=None, metadata={"help": "Train this MoE-LoRA adapter (a folder) further instead of a new one."}
    )
    use_peft: bool | None = field(
        default=None,
        metadata={"help": "Train a MoE-LoRA adapter. By default yes, unless the model is a native MoE."},
    )
    stages: list[str] | None = field(
        default=None,
        metadata={"help": "Train in stages, one by one: routers, rest, joint. In YAML also stage → its settings."},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={"help": "Stop after this many evaluations without improvement, with load_best_model_at_end."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Print the plan and stop."})


@dataclass
class ReplayOptions:
    """Options of `sft` for general rows that the base itself answers."""

    replay: float = field(
        default=0.0, metadata={"help": "Share of rows that are general requests with the base's own answers, e.g. 0.2."}
    )
    replay_file: str | None = field(
        default=None,
        metadata={
            "help": "These requests: a text file with one per line, or a file of rows. Default: a built-in list."
        },
    )
    replay_max_new_tokens: int = field(
        default=MAX_NEW_TOKENS, metadata={"help": "Maximum tokens of an answer; longer ones are left out."}
    )


_REPLAY = {f.name: "moe-peft sft, which has this setting" for f in dataclasses.fields(ReplayOptions)}


def _reduced(kind: type, left_out: set[str], types: Mapping[str, Any]) -> type:
    """Create a dataclass with the fields of `kind` except `left_out`. `types` replaces types that flags cannot have."""
    hints = {**get_type_hints(kind), **types}
    kept: list[Any] = []
    for f in sorted(dataclasses.fields(kind), key=lambda f: f.name.startswith("router_")):  # last in the help
        if f.init and f.name not in left_out:
            metadata = {key: value for key, value in f.metadata.items() if key != "allowed"}  # the rest is for argparse
            default: Any = {"default": f.default, "default_factory": f.default_factory}
            kept.append((f.name, hints[f.name], field(**default, metadata=metadata)))
    return dataclasses.make_dataclass(kind.__name__, kept)


_MAPPINGS = ("num_experts_pattern", "top_k_pattern", "rank_pattern", "alpha_pattern")
_LISTS = ("target_modules", "target_projections", "exclude_modules", "layers_pattern", "modules_to_save")
_LORA = {f.name for f in dataclasses.fields(ModelConfig) if f.name.startswith("lora_")}
ModelOptions = _reduced(ModelConfig, _LORA | {"use_peft", "use_rslora", "use_dora"}, {})
AdapterOptions = _reduced(
    MoELoraConfig,
    {f.name for f in dataclasses.fields(PeftConfig)} | {"router_aux_loss_coef"},  # TRL's configs have it
    {
        **dict.fromkeys(_LISTS, list[str] | None),
        **dict.fromkeys(_MAPPINGS, dict),
        **dict.fromkeys(("layers_to_transform", "trainable_token_indices"), list[int] | None),
        "init_lora_weights": str,
    },
)
# TRL's options without effect here → what to do instead.
_UNREAD = {
    "trust_remote_code": "code that comes with a model or with data is never run; leave it out",
    "model_init_kwargs": "use model_revision, dtype and attn_implementation",
    "ignore_bias_buffers": "leave it out",
}


@dataclass(frozen=True)
class Options:
    """
    The options of a command that trains.

    Args:
        data, training, model: TRL's `ScriptArguments`, the trainer's config and `ModelConfig`.
        adapter: fields of `MoELoraConfig`.
        run: options of the command itself.
        replay: options of general rows; None in `dpo`.
        has_rate: whether the user set a learning rate.
        given: the values of all options, before any class derived further values.
    """

    data: ScriptArguments
    training: Any
    model: ModelConfig
    adapter: dict[str, Any]
    run: RunOptions
    replay: ReplayOptions | None
    has_rate: bool
    given: dict[str, Any]

    @cached_property
    def base(self) -> Base:
        """Model to train, or base model of the adapter to train."""
        name, revision = self.model.model_name_or_path, self.model.model_revision
        if name is None:
            self._adapter.remedy = "name it with model_name_or_path"
            name, revision = self._adapter.base.path, self._adapter.base.revision
        with refused_settings():
            quantization = get_quantization_config(self.model)
        return Base(name, revision, self.model.dtype or "auto", self.model.attn_implementation, quantization)

    @cached_property
    def _adapter(self) -> MoELoraFolder:
        """Adapter to train further."""
        return open_folder(str(self.run.adapter), "adapter", MoELoraFolder)

    @cached_property
    def trained_adapter(self) -> MoELoraConfig | None:
        """
        Config of the adapter to train further, with the new coefficient of the balancing loss if it is set. None if a
        new adapter or the model itself is trained.
        """
        if self.run.adapter is None:
            return None
        self._refuse_adapter_options("a new adapter, but adapter names an existing one")
        config = self._adapter.config
        config.inference_mode = False
        if self.training.router_aux_loss_coef is not None:
            config.router_aux_loss_coef = self.training.router_aux_loss_coef
        return config

    @cached_property
    def trains_adapter(self) -> bool:
        """True if a MoE-LoRA adapter is trained, False if the model itself is trained."""
        if self.run.adapter is not None or self.run.use_peft:
            return True
        if self.run.use_peft is None and not native_layers(self.base.empty()):
            return True
        self._refuse_adapter_options("a MoE-LoRA adapter, but this model itself is trained")
        return False

    def _refuse_adapter_options(self, reason: str) -> None:
        for name, default in vars(AdapterOptions()).items():
            if (value := self.adapter[name]) != default:
                raise InputError(f"{name}={value!r}: is for {reason}; leave it out")

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the adapter to train further, or of the base."""
        if self.run.adapter is None or not self._adapter.has_tokenizer:
            return self.base.tokenizer
        check_tokenizer(self._adapter.tokenizer, self.base.config, self._adapter)
        return self._adapter.tokenizer

    def adapter_config(self) -> MoELoraConfig:
        if self.trained_adapter is not None:
            return copy.deepcopy(self.trained_adapter)
        fields = dict(self.adapter)
        for name in ("target_modules", "exclude_modules"):  # as in TRL, a single word may be a regex or "all-linear"
            if fields[name] is not None and len(fields[name]) == 1 and not re.fullmatch(r"[\w.]+", fields[name][0]):
                fields[name] = fields[name][0]
        if self.training.router_aux_loss_coef is not None:
            fields["router_aux_loss_coef"] = self.training.router_aux_loss_coef
        return MoELoraConfig(task_type="CAUSAL_LM", revision=self.model.model_revision, **fields)


def _read_mapping(text: str) -> dict[Any, Any]:
    with suppress(InputError):
        if isinstance(value := read_yaml(text, "text"), dict):
            return value
    raise argparse.ArgumentTypeError('must be JSON like {"name": 4}')


class TrainingParser(GroupedParser, TrlParser):
    """
    TRL's parser, with checks of a YAML file's keys and values.

    Args:
        config: the trainer's config, e.g. `MoESFTConfig`.
    """

    def __init__(self, config: type, **kwargs: Any) -> None:
        parts = {
            "Model and data": (ScriptArguments, ModelOptions, ReplayOptions),
            "MoE adapter": (AdapterOptions,),
            "Router losses": (RouterLossConfig,),
            "Training": (config,),
        }
        groups = {title: {f.name for kind in kinds for f in dataclasses.fields(kind)} for title, kinds in parts.items()}
        groups["Router losses"] |= {"label_column", "expert_map"}
        # `kinds` are the classes to parse; a file's values must have the types of `self.kinds`.
        supervised = [ReplayOptions] if issubclass(config, SFTConfig) else []
        self.foreign = FOREIGN if supervised else {**FOREIGN, **_REPLAY}
        kinds: list[Any] = [ModelOptions, ScriptArguments, AdapterOptions, config, RunOptions, *supervised]
        self.kinds: list[Any] = [ModelConfig, ScriptArguments, MoELoraConfig, config, RunOptions, *supervised]
        super().__init__(kinds, groups=groups, allow_abbrev=False, usage="%(prog)s [--config FILE] [options]", **kwargs)
        self.actions: dict[str, argparse.Action] = {}  # by key; the flag, not its `--no_…`
        for action in self._actions:
            self.actions.setdefault(action.dest, action)
        for name in {*_MAPPINGS, "expert_map"} & self.actions.keys():
            self.actions[name].type = _read_mapping
        self.actions["init_lora_weights"].type = lambda text: {"true": True, "false": False}.get(text.lower(), text)
        self.add_argument("--config", metavar="FILE", help="a YAML file with any of these settings, and with plugins")

    def parse_args(self, arguments: Sequence[str], config: str | None = None) -> Options:  # type: ignore[override]
        """Parse flags, and the YAML file `config`, which they override, into `Options`."""
        settings = {} if config is None else self._read(config)
        self.set_defaults_with_config(**settings)
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            known = [f"--{name}" for name in self.actions]
            raise InputError(str(unknown_keys(flags_in(unknown), known, "", f"`{self.prog} --help-all`", self.foreign)))
        if options.model_name_or_path is None and options.adapter is None:
            raise InputError(
                "model_name_or_path=None: name a model folder or a model on the hub, or a file with --config"
            )
        if options.dataset_name is None:
            raise InputError("dataset_name=None: name a file, a folder or a dataset")
        names = {self._spelled(argument).partition("=")[0] for argument in arguments}
        if not torch.accelerator.is_available():
            if options.dry_run:
                options.use_cpu = options.use_cpu or "--use_cpu" not in names  # a plan may be for a machine with a GPU
            elif not options.use_cpu and "bf16" not in settings and not names & {"--bf16", "--no_bf16"}:
                options.bf16 = False
                logger.info("bf16=False: there is no GPU here, so this trains in float32")
        values = copy.deepcopy(vars(options))  # training arguments change theirs
        try:
            model, data, adapter, training, run, *more = self.parse_dict(values, allow_extra_keys=True)
        except ValueError as error:
            raise InputError(
                arguments_error(error, "--bf16 false") if "use_cpu" in str(error) else str(error)
            ) from error
        except (TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:  # from a library's checks
            raise InputError(f"{self.prog}: {one_line(error)}") from error
        for part in (data, training, model):
            for name, value in vars(part).items():
                if name in _UNREAD and value:
                    raise InputError(f"{name}={value!r}: is not read here; {_UNREAD[name]}")
        stages = [*run.stages.values()] if isinstance(run.stages, dict) else []
        if stages and all(isinstance(stage, dict) for stage in stages):
            for flag in names:
                if all(flag.lstrip("-") in stage for stage in stages):
                    raise InputError(f"{flag}: each of stages has its own value, in {options.config}; change it there")
        with refused_settings():
            model = ModelConfig(**vars(model))
        for name in _names(training):
            check_range(name, getattr(training, name))
        has_rate = "learning_rate" in settings or "--learning_rate" in names
        replay = next(iter(more), None)
        return Options(data, training, model, vars(adapter), run, replay, has_rate, vars(options))

    def _read(self, path: str) -> dict[str, Any]:
        """Read and check the settings of a YAML file."""
        settings = self.settings_in(path)
        with prefixed(path):
            known = self.actions.keys() - {"help", "config"}
            if wrong := unknown_keys(settings, known, "", f"`{self.prog} --help-all`", self.foreign):
                raise InputError(wrong)
            for key, value in settings.items():
                if self.actions[key].nargs == "+" and isinstance(value, str):
                    settings[key] = [value]
                if str(key).endswith("_strategy") and value is False:  # YAML reads `no` as False
                    settings[key] = "no"
            for kind in self.kinds:
                names = {f.name for f in dataclasses.fields(kind)} & settings.keys() - {"stages"}
                check_fields(kind, {name: settings[name] for name in names})
        return settings


# --- stages of training ----------------------------------------------------------------------------------------------

_STAGES = get_args(TrainedPart)
# Setting of a stage → common setting that it replaces: the other dtype, or the same setting by its other name.
_REPLACES = {
    "bf16": "fp16",
    "fp16": "bf16",
    "gradient_checkpointing": "activation_checkpointing",
    "activation_checkpointing": "gradient_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
_OF_ALL_STAGES = {
    "training_stage": "the stage's name says this",
    "output_dir": "it is the folder of the stage's name in output_dir",
    "dataset_text_field": "all stages read the same rows",
    "push_to_hub": "what the last stage saves is the result",
    "hub_model_id": "what the last stage saves is the result",
}


def training_stages(options: Options) -> dict[str, Any]:
    """
    Return the training arguments of each stage, by their section: "stages.routers", …; "" is a single training. Each
    stage has a separate folder for its checkpoints.

    In "Label-Supervised Routing in Upcycled Mixture of Experts", it did harm to supervise routers by labels together
    with the language loss. With labels, routers are therefore trained first and the rest afterwards by default.
    """
    training, stages = options.training, options.run.stages
    if stages is None and _labels_alone(training):
        stages = ["routers", "rest"]
    if stages is None:
        return {"": training}
    if not isinstance(stages, (list, dict)) or not stages or len(set(stages)) < len(stages):
        raise InputError(f"stages={stages!r}: name some of {', '.join(_STAGES)}, each once")
    if training.training_stage != "joint":
        raise InputError(f"training_stage={training.training_stage!r}: stages already says which; leave it out")
    if len(stages) > 1 and names_checkpoint(training):
        raise InputError(
            f"resume_from_checkpoint={str(training.resume_from_checkpoint)!r}: belongs to one of the stages "
            f"{', '.join(stages)}; use true, or stages.<name>.resume_from_checkpoint"
        )
    repo = training.hub_model_id or Path(training.output_dir).absolute().name
    stage_args = {}
    for name, settings in (stages if isinstance(stages, dict) else dict.fromkeys(stages)).items():
        path, settings = f"stages.{name}", {} if settings is None else settings
        if name not in _STAGES:
            raise InputError(choice_error("stages", name, _STAGES))
        if not isinstance(settings, dict):
            raise InputError(f"{path}={settings!r}: must be a mapping of settings")
        for key in _OF_ALL_STAGES.keys() & settings.keys():
            raise InputError(f"{path}.{key}: {_OF_ALL_STAGES[key]}; leave it out")
        check_fields(type(training), settings, path)
        common = {key: options.given[key] for key in _names(training)} | {"learning_rate": training.learning_rate}
        for key in settings.keys() & _REPLACES.keys():
            common.pop(_REPLACES[key], None)
        fixed: dict[str, Any] = {"output_dir": str(Path(training.output_dir, name)), "training_stage": name}
        if training.push_to_hub:  # only the last stage is pushed, by the result's name
            fixed |= {"push_to_hub": name == [*stages][-1], "hub_model_id": repo}
        with prefixed(path), refused_settings():
            stage_args[path] = type(training)(**{**common, **settings, **fixed})
    return stage_args


def _names(training: Any) -> list[str]:
    """Return the names of the fields that create training arguments."""
    return [f.name for f in dataclasses.fields(training) if f.init]


def _labels_alone(training: Any) -> bool:
    """Return whether labels supervise routers, without a setting for the time or a mask."""
    if getattr(training, "expert_map", None) is None or training.router_label_loss_coef == 0:
        return False
    whenever = training.training_stage == "joint" and training.router_schedule == "constant"
    return whenever and not training.router_label_mask
