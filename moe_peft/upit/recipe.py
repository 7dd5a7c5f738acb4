"""
The recipe of a run, read from one YAML file. It has a section for each stage and fields for all stages. A section
checks its own fields; `Recipe` checks that the sections fit together.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from peft import PeftConfig
from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from transformers import BitsAndBytesConfig
from trl import SFTConfig

from ..adapter.config import EXPERT_FIELDS, MoELoraConfig
from ..adapter.experts import EXPERTS
from ..models.gate_init import GATE_INITS
from ..models.native_routers import check_router
from ..native.base import Base
from ..native.upcycle import UpcycleConfig
from ..routing.expert_map import read_expert_map
from ..routing.routers import ROUTERS, LinearRouter, Router, RouterSettings
from ..training.trainers import MoESFTConfig
from ..utils.foreign import FOREIGN_TO_RECIPES
from ..utils.messages import InputError, choice_error, unknown_keys
from ..utils.plugins import load_plugins
from ..utils.validation import (
    Count,
    Flag,
    Integer,
    Number,
    NumExperts,
    Seed,
    Settings,
    Share,
    Text,
    TextList,
    check_fields,
    prefixed,
    read_settings,
    read_yaml,
    validate,
)  # fmt: skip
from .buckets import BUCKETS, BucketRule
from .expansion import Expansion, Similarity
from .methods import METHODS, Method
from .prepare import SELECTIONS

NONE = "none"  # leaves a stage out
TRAINED = "vectors"  # gates of stage 3 that are trained
FROM_EXPERTS = frozenset(EXPERT_FIELDS)  # fields that `lora_to_moe` takes from the stacked LoRA adapters

# --- fields of other configurations ----------------------------------------------------------------------------------

# Field → advice, for fields that the recipe sets itself.
_ADAPTER = {
    **{field.name: "PEFT sets this" for field in fields(PeftConfig)},
    "num_experts": "set the recipe's num_experts",
    "base_expert": "a recipe's experts are all trained; `moe-peft mix --neutral` makes the base one of them",
    **dict.fromkeys(
        (
            "target_modules",
            "exclude_modules",
            "layers_to_transform",
            "layers_pattern",
            "num_experts_pattern",
            "top_k_pattern",
            "rank_pattern",
            "alpha_pattern",
            "modules_to_save",
            "trainable_token_indices",
            "ensure_weight_tying",
        ),
        "a recipe adapts the FFNs of all layers alike, and nothing else; choose projections with target_projections",
    ),
}
_MOE = {
    "num_experts": "set the recipe's num_experts",
    "router_weights": "stage 3 makes the routers; `router_init` says how",
    "seed": "set post_train.seed",
}
_ROUTER = {"attention_size": "it follows from the model"}
_SFT = {
    **dict.fromkeys(
        (
            "output_dir", "max_steps", "num_train_epochs", "save_strategy", "save_total_limit", "save_only_model",
            "seed", "data_seed", "resume_from_checkpoint", "load_best_model_at_end", "remove_unused_columns",
            "train_sampling_strategy", "auto_find_batch_size",
        ),
        "the recipe's budget and resuming decide this; use num_train_epochs, prepare_share and seed",
    ),
    **dict.fromkeys(
        ("eval_strategy", "eval_on_start", "eval_steps", "eval_delay", "do_eval"),
        "stages have no evaluation data; data.eval is measured at the end",
    ),
    **dict.fromkeys(
        (
            "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push",
            "hub_revision",
        ),
        "push the result's folder when the run is done",
    ),
    "router_aux_loss_coef": (
        "set adapter.router_aux_loss_coef in the mode 'lora', moe.router_aux_loss_coef in the mode 'ffn'"
    ),
    "model_init_kwargs": "set the fields of the section `model`",
    "trust_remote_code": "code that comes with a model or with data is never run; leave it out",
    "dataset_text_field": "call the column text",
}  # fmt: skip
_POST_TRAIN_SFT = {
    **_SFT,
    "label_column": "set data.label_column",
    "training_stage": "set post_train.train_experts",
}


def name_in(table: Collection[str], *others: str) -> AfterValidator:
    """Accept a name in a table. The table is read when a recipe is read, so it has the users' additions."""

    def check(name: str) -> str:
        if name not in table and name not in others:
            raise PydanticCustomError("name", "must be one of {known}", {"known": ", ".join([*table, *others])})
        return name

    return AfterValidator(check)


def fields_of(path: str, kind: type, decided: Mapping[str, str], documented: str | None = None) -> AfterValidator:
    """Accept fields of another config, except the fields `decided` by the recipe."""

    def check(settings: dict[str, Any]) -> dict[str, Any]:
        if wrong := [f"{path}.{key}: {decided[key]}" for key in settings if key in decided]:
            raise InputError(" | ".join(wrong))
        check_fields(kind, settings, path, documented)
        if (steps := settings.get("save_steps", 1)) % 1:
            raise InputError(f"{path}.save_steps={steps!r}: must be a whole number of at least 1")
        return settings

    return AfterValidator(check)


def _check_quantization(settings: dict[str, Any]) -> dict[str, Any]:
    """Raise for unknown fields, for which transformers only warns."""
    names = inspect.signature(BitsAndBytesConfig).parameters.keys() - {"kwargs"}
    if wrong := unknown_keys(settings, names, "model.quantization."):
        raise InputError(wrong)
    return settings


def sft_of(path: str) -> AfterValidator:
    return fields_of(path, SFTConfig, _SFT, "TRL's SFTConfig")


_AdapterFields = Annotated[dict[str, Any], fields_of("adapter", MoELoraConfig, _ADAPTER)]
_MoEFields = Annotated[dict[str, Any], fields_of("moe", UpcycleConfig, _MOE)]
_RouterFields = Annotated[dict[str, Any], fields_of("post_train.router", RouterSettings, _ROUTER)]
_PostTrainFields = Annotated[
    dict[str, Any],
    fields_of("post_train.sft", MoESFTConfig, _POST_TRAIN_SFT, "TRL's SFTConfig and moe_peft's MoESFTConfig"),
]

# Mode → field of the other mode → the field to use instead.
_OF_THE_OTHER_MODE = {
    "lora": {
        "moe": "use the section adapter",
        "post_train.router": "use adapter.router_type",
        "prepare.checkpoints": "use prepare.adapters",
    },
    "ffn": {
        "adapter": "use the section moe",
        "prepare.adapters": "use prepare.checkpoints",
        "model.quantization": "all weights are trained",
    },
}

# --- sections --------------------------------------------------------------------------------------------------------


class ModelSection(Settings):
    """the base model"""

    name_or_path: Text = Field(description="a folder, or a name on the hub")
    revision: Text | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="or float32, bfloat16, float16; auto is the config's; float32 in mode ffn"
    )
    attn_implementation: Text | None = None
    quantization: Annotated[dict[str, Any], AfterValidator(_check_quantization)] | None = Field(
        None, description="fields of transformers' BitsAndBytesConfig, e.g. {load_in_4bit: true}"
    )


class DataSection(Settings):
    """a .json, .jsonl, .csv or .parquet file, or arguments of datasets.load_dataset"""

    train: Text | dict[str, Any]
    eval: Text | dict[str, Any] | None = Field(None, description="held-out data")
    label_column: Text | None = Field(
        None, description="the examples' domains: for results by domain, and label buckets"
    )
    calibration_examples: Count = Field(
        256, description="rows of the training data, drawn at random, for moe.router_init: attention"
    )
    calibration_length: Count = Field(1024, description="tokens used of each")


class PrepareSection(Settings):
    """stage 1: ordinary fine-tuning, of LoRAs or all weights, whose checkpoints become experts"""

    num_experts: NumExperts | None = Field(None, description="experts to take from checkpoints; null: num_experts")
    num_checkpoints: NumExperts | None = Field(
        None, description="at equal intervals; null: as many as experts for uniform, else twice as many"
    )
    selection: Annotated[Text, name_in(SELECTIONS)] = Field("back_half", description="or uniform, front_half")
    adapters: TextList | None = Field(
        None, description="LoRA adapter folders that are the experts; this stage is then skipped"
    )
    checkpoints: TextList | None = Field(None, description="the same in mode ffn: dense model folders")
    seed: Seed | None = None
    sft: Annotated[dict[str, Any], sft_of("prepare.sft")] = Field(default_factory=dict)

    @property
    def folders(self) -> list[str] | None:
        """Folders of the given experts; None if stage 1 trains the experts."""
        return self.adapters if self.adapters is not None else self.checkpoints

    @model_validator(mode="after")
    def _check(self) -> PrepareSection:
        for name in ("num_experts", "num_checkpoints"):
            if self.folders and (value := getattr(self, name)) is not None:
                raise InputError(f"prepare.{name}={value!r}: must be null: experts are given")
        return self


class ExpandSection(Settings):
    """stage 2: more experts made from the existing ones"""

    method: Expansion = Field("genetic", description="or random, none")
    similarity: Similarity = Field(
        "update", description="mode lora: of the updates B A, or of the values; FFNs' is that of their displacements"
    )
    drop_rate: Annotated[Number, Field(ge=0, lt=1)] | None = Field(
        None, description="null: 0.2 for LoRAs' values, 0.9 for FFNs' displacements"
    )
    seed: Seed | None = None


class RouterInitSection(Settings):
    """stage 3: each expert and its routing vector learn from the seed examples they were given"""

    buckets: Annotated[Text, name_in(BUCKETS, NONE)] = Field(
        "perplexity", description="or label, random; none leaves the stage out"
    )
    gates: Text = Field(
        TRAINED, description="trained routing vectors, as in the paper; or ridge, prompts: from the buckets in seconds"
    )
    alpha: Share = Field(0.5, description="weight of the language-modeling loss; the routing loss has 1 - alpha")
    router_learning_rate: Annotated[Number, Field(gt=0)] | None = Field(
        0.01, description="of the routing vectors, constant; null: the experts' rate and schedule, in sft"
    )
    train_experts: Flag = Field(True, description="false trains the routing vectors alone")
    seed_fraction: Annotated[Number, Field(gt=0, le=1)] = Field(
        0.01, description="share of the data that is the seed set, drawn at random"
    )
    num_train_epochs: Count = Field(4, description="passes of each expert over its bucket")
    within_budget: Flag = Field(
        False, description="true takes these examples from stage 4's: equal data for comparisons"
    )
    expert_map: dict[Text | Integer, list[Flag | Integer]] | None = Field(
        None, description="label → experts, as indices or masks, for buckets: label"
    )
    seed: Seed | None = None
    sft: Annotated[dict[str, Any], sft_of("router_init.sft")] = Field(default_factory=dict)

    @property
    def rule(self) -> BucketRule | None:
        """Rule to assign examples to experts; None leaves the stage out."""
        return None if self.buckets == NONE else BUCKETS[self.buckets]

    @model_validator(mode="after")
    def _check(self) -> RouterInitSection:
        linear = [name for name, way in GATE_INITS.items() if way.needs_texts and way.router_type == "linear"]
        if self.gates not in (TRAINED, *linear):
            raise InputError(choice_error("router_init.gates", self.gates, (TRAINED, *linear)))
        # With buckets: none, an expert map is allowed: the recipe may serve several methods.
        if self.rule is not None and self.expert_map is not None and not self.rule.needs_labels:
            raise InputError(f"router_init.buckets={self.buckets!r}: must be 'label' with router_init.expert_map")
        return self


class PostTrainSection(Settings):
    """stage 4: fine-tuning of the complete MoE"""

    train_experts: Flag = Field(True, description="false trains the routers alone")
    router: _RouterFields = Field(
        default_factory=dict,
        description="mode ffn: a router that replaces plain gates, e.g. {type: attention, num_heads: 8}, in fields of "
        "MoELoraConfig without router_; at the end it is folded, if it can be",
    )
    seed: Seed | None = None
    sft: _PostTrainFields = Field(
        default_factory=dict,
        description="fields of MoESFTConfig too: router_z_loss_coef, expert_map, router_schedule, …",
    )


# --- recipe -----------------------------------------------------------------------------------------------------------


class Recipe(Settings):
    """
    A complete run, as written in a YAML file; see `load_recipe`. By default, stage 1 has the seed `seed`, stage 2
    `seed + 1`, and so on.
    """

    foreign = FOREIGN_TO_RECIPES
    output_dir: Text
    plugins: list[Text] = Field(
        default_factory=list,
        description="your modules that are imported first, e.g. to register a router or a bucket rule",
    )
    mode: Literal["lora", "ffn"] = Field(
        "lora",
        description="an expert is a LoRA and the result an adapter; or ffn: a whole FFN, and the result is a native "
        "MoE",
    )
    method: Text = Field("upit", description="a preset: which stages run and how the budget is split")
    num_experts: NumExperts = 8
    num_train_epochs: Annotated[Number, Field(gt=0, le=1e6)] = Field(
        4.0, description="the budget of stages 1 and 4 together, in passes over the data"
    )
    prepare_share: Annotated[Number, Field(gt=0, lt=1)] = Field(0.5, description="stage 1's share of it")
    seed: Seed = 0
    adapter: _AdapterFields = Field(
        default_factory=dict,
        description="mode lora: fields of MoELoraConfig that are the same for all FFNs; stage 1's LoRA takes rank, "
        "alpha, dropout and projections from here",
    )
    moe: _MoEFields = Field(
        default_factory=dict, description="mode ffn: fields of UpcycleConfig; router_aux_loss_coef is 0.01 here"
    )
    sft: Annotated[dict[str, Any], sft_of("sft")] = Field(
        default_factory=dict,
        description="fields of TRL's SFTConfig for all stages, over the method's defaults; a stage's own sft overrides "
        "them",
    )
    model: ModelSection
    data: DataSection
    prepare: PrepareSection = PrepareSection.model_validate({})
    expand: ExpandSection = ExpandSection.model_validate({})
    router_init: RouterInitSection = RouterInitSection.model_validate({})
    post_train: PostTrainSection = PostTrainSection.model_validate({})

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.method not in METHODS[self.mode]:
            raise InputError(choice_error("method", self.method, METHODS[self.mode]))
        for path, instead in _OF_THE_OTHER_MODE[self.mode].items():
            self._forbid(path, bool(self._value(path)), f"left out in the mode {self.mode!r}: {instead}")
        with prefixed("adapter" if self.mode == "lora" else "moe"):
            _ = self.routed
        self._check_stage_3()
        self._check_stage_4()
        self._check_number_of_experts()
        return self

    def _value(self, path: str) -> Any:
        value: Any = self
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name)
        return value

    def _forbid(self, path: str, forbidden: bool, allowed: str) -> None:
        """Raise for the value at a dotted path if it is forbidden."""
        if forbidden:
            raise InputError(f"{path}={self._value(path)!r}: must be {allowed}")

    def _check_stage_3(self) -> None:
        """Raise if stage 3 would differ from the recipe, or could not use the results of earlier stages."""
        if not self.initializes_routers:
            return
        sft = {**self.sft, **self.router_init.sft}
        for name, usual in (("loss_type", ("nll", "chunked_nll")), ("label_smoothing_factor", (0.0,))):
            if (value := sft.get(name, usual[0])) not in usual:
                field = f"router_init.sft.{name}"
                raise InputError(f"{field}={value!r}: stage 3 has the paper's loss; set {field}={usual[0]}")
        needs_labels = self.router_init.rule is not None and self.router_init.rule.needs_labels
        buckets = f"a column of labels with router_init.buckets={self.router_init.buckets!r}"
        self._forbid("data.label_column", self.data.label_column is None and needs_labels, buckets)
        if self.router_init.expert_map is not None:
            read_expert_map(self.router_init.expert_map, self.num_experts, "router_init.expert_map")
        gates = "left out: stage 3 makes the gates, one for each of num_experts; or set router_init.buckets=none"
        if self.mode == "lora":
            self._forbid("adapter.router_type", not issubclass(self._router, LinearRouter), gates)
        else:
            self._forbid("post_train.router", bool(self.post_train.router), gates)
            self._forbid("moe.router_init", self.moe.get("router_init") == "attention", gates)
            split = self.moe.get("granularity", 1) != 1 and self.moe.get("fine_grained_split") == "independent"
            self._forbid("moe.fine_grained_split", split, gates)

    def _check_stage_4(self) -> None:
        """Raise early if stage 4 would differ from the recipe, or would fail without a clear message."""
        if not self.facts.assembles:
            return
        if self.mode == "lora":
            stacked = self.facts.prepares and not EXPERTS[self.moe_config().expert_type].holds_loras
            self._forbid("adapter.expert_type", stacked, f"'lora' with the method {self.method!r}, which stacks LoRAs")
        elif self.post_train.router:
            for key in ("router_init", "router_init_std"):  # for the replaced gates; attention's weights are used
                usual = getattr(UpcycleConfig, key)
                given = self.moe.get(key, usual) not in (usual, "attention")
                self._forbid(f"moe.{key}", given, "left out beside post_train.router")
            with prefixed("post_train.router"):
                check_router(RouterSettings(**self.post_train.router), *self.routed)
        if not self._router.has_parameters and not self.trains_experts:
            raise InputError("post_train: these routers have no parameters; use others: stage 4 trains nothing else")
        sft = {**self.sft, **self.post_train.sft}
        has_labels = float(sft.get("expert_map") is not None)
        for name, usual in (("router_z_loss_coef", 0.0), ("router_label_loss_coef", has_labels)):
            if self._router.is_constant and (value := sft.get(name, usual)):
                raise InputError(f"post_train.sft.{name}={value!r}: must be 0 for routers that cannot be trained")
        if self._router.needs_token_ids and sft.get("gradient_checkpointing", True):
            raise InputError(
                "post_train.sft.gradient_checkpointing=True: must be false for routers that read token ids, as layers "
                "that run again have none"
            )
        unlabeled = self.expert_map is not None and self.data.label_column is None
        self._forbid("data.label_column", unlabeled, "set for post_train.sft.expert_map")

    def _check_number_of_experts(self) -> None:
        n, m, method = self.num_experts, self.given_experts(), self.expand.method
        self._forbid("num_experts", n < 2 and self.facts.assembles, "at least 2")
        if not self.facts.specializes:
            return
        given = {"lora": "prepare.adapters", "ffn": "prepare.checkpoints"}[self.mode]
        source = "stage 1" if self.prepare.folders is None else given
        if m > n:
            raise InputError(f"num_experts={n}: {source} gives {m}; ask for that many or more")
        if m < n and (method == NONE or m < 2):
            why = f"expand.method={method!r} adds none" if method == NONE else "expansion needs two"
            raise InputError(f"num_experts={n}: {source} gives {m}, {why}")

    # --- derived values ---------------------------------------------------------------------------------------------

    @property
    def facts(self) -> Method:
        """Properties of the recipe's method."""
        return METHODS[self.mode][self.method]

    @property
    def dtype(self) -> str:
        """
        Dtype of the base's weights. Mode ffn trains in float32: in bfloat16, a step of 2e-5 is too small for most
        weights.
        """
        return "float32" if self.mode == "ffn" and self.model.dtype == "auto" else self.model.dtype

    @property
    def base(self) -> Base:
        """Base model. Its files are not read yet."""
        return Base(**{**self.model.model_dump(), "dtype": self.dtype}, field="model.name_or_path")

    @property
    def prepares(self) -> bool:
        """True if stage 1 runs. A MoE or a mean of given experts does not need it."""
        return self.facts.prepares and (self.prepare.folders is None or not self.facts.collects)

    @property
    def expands(self) -> bool:
        """True if stage 2 runs."""
        return self.facts.specializes and self.given_experts() < self.num_experts

    @property
    def initializes_routers(self) -> bool:
        """True if stage 3 runs."""
        return self.facts.initializes_routers and self.router_init.rule is not None

    @property
    def trains_experts(self) -> bool:
        """True if stage 4 trains more than the routers."""
        return self.post_train.train_experts and self.facts.trains_experts

    @property
    def expert_map(self) -> dict[str, list[int]] | None:
        """Label → routed experts that stage 4 trains on it; None if the recipe has no expert map."""
        expert_map = self.post_train.sft.get("expert_map")
        return None if expert_map is None else read_expert_map(expert_map, self.routed[0], "post_train.sft.expert_map")

    @property
    def masks_labels(self) -> bool:
        """True if tokens may only go to the experts of their label, in stage 4 and in evaluation."""
        return self.facts.assembles and bool(self.post_train.sft.get("router_label_mask"))

    @property
    def _router(self) -> type[Router]:
        """Class of the routers that stage 4 trains."""
        if self.mode == "lora":
            return self.moe_config().router_class
        return ROUTERS[self.post_train.router.get("type", "linear")]

    def given_experts(self) -> int:
        """Return m, the number of experts after stage 1."""
        if self.prepare.folders is not None:
            return len(self.prepare.folders)
        return self.prepare.num_experts or self.num_experts

    def assembled_from(self, experts: Sequence[Path]) -> tuple[Path, ...]:
        """Return the experts to assemble the MoE from, given stage 1's: all of them, or copies of the last."""
        return (experts[-1],) * self.num_experts if self.facts.copies and experts else tuple(experts)

    def seed_count(self, rows: int) -> int:
        """Return the number of examples in the seed set: a share of the data, but at least one example per expert."""
        return min(rows, max(self.num_experts, round(self.router_init.seed_fraction * rows)))

    def moe_config(self) -> MoELoraConfig:
        """Return the MoE adapter's config."""
        kind = self.facts.expert_type or self.adapter.get("expert_type", "lora")
        # The section may serve several methods. Leave out fields without effect on this type of expert.
        unread = EXPERTS[kind].unread if kind in EXPERTS else ()
        settings = {key: value for key, value in self.adapter.items() if key not in unread}
        settings |= {"num_experts": max(self.num_experts, 2), "task_type": "CAUSAL_LM", "expert_type": kind}
        return MoELoraConfig(**settings)

    @property
    def routed(self) -> tuple[int, int]:
        """Number of the MoE's routed experts, and how many of them serve a token."""
        if self.mode == "lora":
            return self.num_experts, self.moe_config().top_k
        c = self.upcycle_config()
        return c.num_experts * c.granularity - c.num_shared_experts, c.top_k * c.granularity - c.num_shared_experts

    def upcycle_config(self, **overrides: Any) -> UpcycleConfig:
        """Return the native MoE's config."""
        settings = {"num_experts": max(self.num_experts, 2), "seed": self.seed, "dtype": self.dtype}
        settings["router_aux_loss_coef"] = 0.01  # UpIT's load-balancing loss is Switch Transformers', as the adapter's
        return UpcycleConfig(**{**settings, **self.moe, **overrides})


# --- reading ----------------------------------------------------------------------------------------------------------


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """
    Read a recipe.

    Args:
        path: the YAML file.
        overrides: `key=value` with a dotted key and a YAML value, e.g. `post_train.sft.learning_rate=1e-4`.

    Returns:
        the recipe. Missing fields have the method's defaults.

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
    Create a recipe from nested dictionaries.

    Args:
        settings: the contents of a YAML file.

    Returns:
        the recipe. Missing fields have the method's defaults.

    Raises:
        ValueError: an unknown key or a wrong value; the message is one line.
    """
    plugins = settings.get("plugins", [])
    if isinstance(plugins, list):
        load_plugins([name for name in plugins if isinstance(name, str)])  # first: plugins may add to the tables
    return validate(Recipe, settings)
