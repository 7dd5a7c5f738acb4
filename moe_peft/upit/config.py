"""
The recipe of a run: one YAML file, one section per stage. What it means is said once, here, at each field.

Unknown keys and wrong values are refused with the key, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from transformers import BitsAndBytesConfig
from trl import SFTConfig

from ..adapter.config import MoELoraConfig
from ..merging import Expansion, Similarity
from ..native.upcycle import UpcycleConfig
from .buckets import BucketKind
from .prepare import Selection
from .router_init import Objective

Method = Literal["upit", "self_moe", "lora", "loramoe_pt", "loramoe_sft", "sft", "upcycle_pt", "upcycle_sft"]
# What the methods of both modes have in common: "dense" makes no MoE, "fresh" begins with new experts (LoRAs, or copies
# of the base's FFN), "copies" with copies of what stage 1 has trained.
Kind = Literal["upit", "self_moe", "dense", "fresh", "copies"]
_KINDS: dict[str, dict[str, Kind]] = {
    "lora": {"lora": "dense", "loramoe_pt": "fresh", "loramoe_sft": "copies", "upit": "upit", "self_moe": "self_moe"},
    "ffn": {"sft": "dense", "upcycle_pt": "fresh", "upcycle_sft": "copies", "upit": "upit", "self_moe": "self_moe"},
}

# The pipeline decides these, from the budget and for resuming.
_OWN_SFT_FIELDS = {
    "output_dir", "max_steps", "num_train_epochs", "save_strategy", "save_total_limit", "save_only_model", "seed",
    "data_seed", "resume_from_checkpoint", "load_best_model_at_end", "remove_unused_columns", "router_aux_loss_coef",
    "train_sampling_strategy", "model_init_kwargs", "push_to_hub",
}  # fmt: skip
_SFT_FIELDS = {f.name for f in dataclasses.fields(SFTConfig)} - _OWN_SFT_FIELDS
_ADAPTER_FIELDS = {
    "r", "lora_alpha", "lora_dropout", "use_rslora", "top_k", "normalize_top_k", "mixing", "target_projections",
    "router_type", "router_threshold", "router_capacity_factor", "router_num_heads", "router_mixture",
    "router_jitter_noise", "router_aux_loss_coef", "init_lora_weights",
}  # fmt: skip
_MOE_FIELDS = {f.name for f in dataclasses.fields(UpcycleConfig)} - {"num_experts", "router_weights", "seed"}
_MOE_FIELDS |= {"router_aux_loss_coef"}

_QUANTIZATION_FIELDS = set(inspect.signature(BitsAndBytesConfig).parameters) - {"kwargs"}
_DTYPES = ("auto", "float32", "bfloat16", "float16")

_strict = ConfigDict(extra="forbid", frozen=True)


@validated(config=_strict)
class ModelSection:
    """The base model."""

    name_or_path: str
    revision: str | None = None
    dtype: str = "auto"
    attn_implementation: str | None = None
    # Fields of transformers' BitsAndBytesConfig, e.g. {load_in_4bit: true}.
    quantization: dict[str, Any] | None = None


@validated(config=_strict)
class DataSection:
    """Training and held-out data: a .json, .jsonl, .csv or .parquet file, or arguments of `datasets.load_dataset`."""

    train: str | dict[str, Any]
    eval: str | dict[str, Any] | None = None
    # A column whose values are the examples' domains: for results by domain, label buckets, `order: blocks`.
    label_column: str | None = None


@validated(config=_strict)
class PrepareSection:
    """Stage 1: ordinary LoRA fine-tuning, whose checkpoints become experts."""

    # Experts to take from checkpoints; `num_experts` of the recipe if null.
    num_experts: int | None = None
    # Checkpoints at equal intervals; as many as experts for `uniform`, else twice as many, if null.
    num_checkpoints: int | None = None
    selection: Selection = "back_half"
    # Experts that exist already, as LoRA adapter folders, or in the mode `ffn` as `checkpoints`, dense model folders:
    # this stage is then skipped and the budget is all stage 4's.
    adapters: list[str] | None = None
    checkpoints: list[str] | None = None
    # `checkpoints`: different ones; `copies`: every expert is the last one (LoRAMoE-SFT, Upcycle-SFT).
    experts: Literal["checkpoints", "copies"] = "checkpoints"
    # `blocks`: the domains of `data.label_column` one after the other.
    order: Literal["shuffled", "blocks"] = "shuffled"
    seed: int | None = None
    sft: dict[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> list[str] | None:
        """The folders of experts that exist already."""
        return self.adapters if self.adapters is not None else self.checkpoints


@validated(config=_strict)
class ExpandSection:
    """Stage 2: more experts out of those there are."""

    method: Expansion = "genetic"
    # Null: `update` of LoRA experts; whole FFNs are compared by their `displacement` from the base model's.
    similarity: Similarity | None = None
    # Null: 0.2 of LoRA's values, 0.9 of whole FFNs' displacements.
    drop_rate: float | None = None
    seed: int | None = None


@validated(config=_strict)
class RouterInitSection:
    """Stage 3: seed examples to experts, then experts and routing vectors learn from their buckets."""

    buckets: BucketKind = "perplexity"
    objective: Objective = "positive"
    # Weight of the language-modelling loss; the routing loss has 1 - alpha.
    alpha: float = 0.5
    train_experts: bool = True
    # Share of the data that is the seed set, drawn at random.
    seed_fraction: float = 0.01
    # Passes over the seed set. They count towards the budget.
    num_train_epochs: int = 4
    capacity: int | None = None
    # Label → experts, for `buckets: label`.
    expert_map: dict[str, list[int]] | None = None
    seed: int | None = None
    sft: dict[str, Any] = field(default_factory=dict)


@validated(config=_strict)
class PostTrainSection:
    """Stage 4: fine-tuning of the assembled MoE adapter."""

    # False trains the routers alone (Self-MoE).
    train_experts: bool = True
    seed: int | None = None
    sft: dict[str, Any] = field(default_factory=dict)


@validated(config=_strict)
class Recipe:
    """A whole run. A stage without a seed of its own has `seed` (stage 1), `seed + 1` (stage 2), and so on."""

    output_dir: str
    model: ModelSection
    data: DataSection
    # What an expert is: `lora` (the result is an adapter) or `ffn`, a whole FFN (the result is a native MoE).
    mode: Literal["lora", "ffn"] = "lora"
    # A preset: which stages run and how the budget is split.
    method: Method = "upit"
    num_experts: int = 8
    # The whole budget, in passes over the data.
    num_train_epochs: float = 4.0
    # Stage 1's share of it.
    prepare_share: float = 0.5
    seed: int = 0
    # Fields of MoELoraConfig; stage 1's LoRA takes its rank, alpha, dropout and projections from here.
    adapter: dict[str, Any] = field(default_factory=dict)
    # Mode `ffn`: fields of UpcycleConfig for the native MoE, and `router_aux_loss_coef`.
    moe: dict[str, Any] = field(default_factory=dict)
    # Fields of TRL's SFTConfig for all stages; a stage's own `sft` overrides them.
    sft: dict[str, Any] = field(default_factory=dict)
    prepare: PrepareSection = field(default_factory=PrepareSection)
    expand: ExpandSection = field(default_factory=ExpandSection)
    router_init: RouterInitSection = field(default_factory=RouterInitSection)
    post_train: PostTrainSection = field(default_factory=PostTrainSection)

    def __post_init__(self) -> None:
        for path, keys, allowed in (
            ("adapter", self.adapter, _ADAPTER_FIELDS if self.mode == "lora" else set()),
            ("moe", self.moe, _MOE_FIELDS if self.mode == "ffn" else set()),
            ("sft", self.sft, _SFT_FIELDS),
            *((f"{s}.sft", getattr(self, s).sft, _SFT_FIELDS) for s in ("prepare", "router_init", "post_train")),
            ("model.quantization", self.model.quantization or {}, _QUANTIZATION_FIELDS),
        ):
            for key in keys:
                if key not in allowed:
                    raise ValueError(_unknown(f"{path}.{key}", key, allowed))
        init = self.router_init
        given = self.given_experts()
        steps = [("save_steps", {**self.sft, **getattr(self, s).sft}) for s in ("prepare", "router_init", "post_train")]
        for name, value, good, range_ in (
            ("num_experts", self.num_experts, self.num_experts >= 2 or self.method in ("lora", "sft"), "at least 2"),
            ("num_train_epochs", self.num_train_epochs, self.num_train_epochs > 0, "above 0"),
            ("prepare_share", self.prepare_share, 0 < self.prepare_share < 1, "above 0 and below 1"),
            ("router_init.seed_fraction", init.seed_fraction, 0 < init.seed_fraction <= 1, "above 0, at most 1"),
            ("router_init.alpha", init.alpha, 0 <= init.alpha <= 1, "from 0 to 1"),
            ("router_init.num_train_epochs", init.num_train_epochs, init.num_train_epochs >= 1, "at least 1"),
            ("router_init.capacity", init.capacity, init.capacity is None or init.capacity >= 1, "at least 1, or null"),
            ("expand.drop_rate", self.expand.drop_rate, 0 <= (self.expand.drop_rate or 0) < 1, "at least 0, below 1"),
            ("prepare.adapters", self.prepare.adapters, self.prepare.adapters != [], "one folder at least, or null"),
            ("prepare.checkpoints", self.prepare.checkpoints, self.prepare.checkpoints != [], "one folder, or null"),
            ("method", self.method, self.method in _KINDS[self.mode], f"one of {', '.join(_KINDS[self.mode])}"),
            *self._by_mode(),
            ("model.dtype", self.model.dtype, self.model.dtype in _DTYPES, f"one of {', '.join(_DTYPES)}"),
            *(
                (f"sft.{name}", sft[name], type(sft[name]) is int and sft[name] >= 1, "a whole number of at least 1")
                for name, sft in steps
                if name in sft
            ),
        ):
            if not good:
                raise ValueError(f"{name}={value!r}: must be {range_}")
        needs_label = init.buckets == "label" or self.prepare.order == "blocks"
        if needs_label and self.data.label_column is None:
            raise ValueError("data.label_column=None: `buckets: label` and `order: blocks` need a column of labels")
        if self.method in ("upit", "self_moe") and self.prepare.experts == "checkpoints":
            if given > self.num_experts:
                raise ValueError(f"num_experts={self.num_experts}: stage 1 gives {given}; ask for that many or more")
            if given < self.num_experts and (self.expand.method == "none" or given < 2):
                why = "expand.method='none' makes none" if self.expand.method == "none" else "expansion needs two"
                raise ValueError(f"num_experts={self.num_experts}: stage 1 gives {given}, {why}")
        if self.mode == "lora":
            self.moe_config()
        else:
            self.upcycle_config()

    def _by_mode(self) -> list[tuple[str, Any, bool, str]]:
        """What a mode does not know."""
        if self.mode == "lora":
            unset = self.prepare.checkpoints is None
            return [("prepare.checkpoints", self.prepare.checkpoints, unset, "null, or mode 'ffn'")]
        init, similarity = self.router_init, self.expand.similarity
        coef = self.moe.get("router_aux_loss_coef", 0.01)
        several = self.moe.get("init") != "checkpoints" or self.kind in ("upit", "self_moe")
        return [
            ("moe.router_aux_loss_coef", coef, type(coef) in (int, float) and coef >= 0, "0 or a positive number"),
            ("moe.init", self.moe.get("init"), several, "another: this method has one checkpoint"),
            ("prepare.adapters", self.prepare.adapters, self.prepare.adapters is None, "null, or mode 'lora'"),
            ("model.quantization", self.model.quantization, not self.model.quantization, "null: all weights train"),
            ("router_init.objective", init.objective, init.objective == "positive", "'positive': experts train apart"),
            ("expand.similarity", similarity, similarity in (None, "displacement"), "'displacement', or null"),
        ]

    @property
    def kind(self) -> Kind:
        """What the method does, whatever the mode."""
        return _KINDS[self.mode][self.method]

    @property
    def copies(self) -> bool:
        """Whether all experts are the last one that stage 1 gives."""
        return self.kind == "copies" or self.prepare.experts == "copies"

    @property
    def trains_experts(self) -> bool:
        """Whether stage 4 trains more than the routers."""
        return self.post_train.train_experts and self.method != "self_moe"

    def given_experts(self) -> int:
        """m, the number of experts that stage 1 gives."""
        if self.prepare.given is not None:
            return len(self.prepare.given)
        return self.prepare.num_experts or self.num_experts

    def moe_config(self) -> MoELoraConfig:
        """The MoE adapter's configuration."""
        return MoELoraConfig(num_experts=max(self.num_experts, 2), task_type="CAUSAL_LM", **self.adapter)

    def upcycle_config(self, **own: Any) -> UpcycleConfig:
        """The native MoE's configuration."""
        settings = {key: value for key, value in self.moe.items() if key != "router_aux_loss_coef"}
        if self.model.dtype != "auto":
            settings.setdefault("dtype", self.model.dtype)
        return UpcycleConfig(**{"num_experts": max(self.num_experts, 2), "seed": self.seed, **settings, **own})


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """
    Read a recipe.

    Args:
        overrides: `key=value` with a dotted key and a YAML value, e.g. `post_train.sft.learning_rate=1e-4`.

    Raises:
        ValueError: an unknown key, a wrong value; FileNotFoundError.
    """
    try:
        settings = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
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
                raise ValueError(f"{override!r}: {parent!r} is no section")
        section[last] = yaml.load(value, _Loader)
    return recipe_from_dict(settings)


def recipe_from_dict(settings: Mapping[str, Any]) -> Recipe:
    """
    A recipe from nested dictionaries.

    Raises:
        ValueError: an unknown key, a wrong value; the message is one line.
    """
    try:
        return TypeAdapter(Recipe).validate_python(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part in _KEYS) or "recipe"
        if first["type"] == "unexpected_keyword_argument":
            *parents, key = map(str, first["loc"])
            section = _SECTIONS[".".join(parents)]
            allowed = {f.name for f in dataclasses.fields(section)}
            raise ValueError(_unknown(".".join((*parents, key)), key, allowed)) from None
        message = first["msg"].removeprefix("Value error, ")
        shown = "" if first["type"] in ("value_error", "missing") else f"={first['input']!r}"
        raise ValueError(message if first["type"] == "value_error" else f"{where}{shown}: {message}") from None


def as_dict(settings: Any) -> dict[str, Any]:
    """A section or recipe as plain dictionaries."""
    return dataclasses.asdict(settings)


def _unknown(path: str, key: str, allowed: set[str]) -> str:
    if key in _OWN_SFT_FIELDS and ".sft" in f".{path}":
        return f"{path}: the recipe's budget and resuming decide this; use num_train_epochs, prepare_share and seed"
    close = difflib.get_close_matches(key, sorted(allowed), n=1)
    return f"{path}: unknown key" + (
        f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(allowed))}"
    )


_SECTIONS: dict[str, Any] = {
    "": Recipe,
    "model": ModelSection,
    "data": DataSection,
    "prepare": PrepareSection,
    "expand": ExpandSection,
    "router_init": RouterInitSection,
    "post_train": PostTrainSection,
}
_KEYS = {f.name for section in _SECTIONS.values() for f in dataclasses.fields(section)}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: `1e-4` is one, too."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)

__all__ = [
    "DataSection",
    "ExpandSection",
    "ModelSection",
    "PostTrainSection",
    "PrepareSection",
    "Recipe",
    "RouterInitSection",
    "as_dict",
    "load_recipe",
    "recipe_from_dict",
]
