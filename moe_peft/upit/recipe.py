"""
What single values of a recipe may be. YAML has truth values, numbers and texts: none is taken for another.

The methods that a recipe can run: UpIT and what it is compared with, as facts that the stages ask for.

The tasks of lm-evaluation-harness that a recipe names for its last stage.

Sections of a recipe whose keys are fields of other configurations: which ones it may set, and why not the others.

The sections of a recipe, one for each stage and for what all share. What a field means is said here, beside it.

Unknown keys and wrong values are refused with the key, the value and what is allowed.

The recipe of a run: one YAML file, one section per stage (`sections`). What a field means is said here, beside it.

Unknown keys and wrong values are refused with the key, the value and what is allowed.

Recipes from YAML files and dictionaries; what is wrong with them, in one line.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from peft import PeftConfig, PeftModel
from pydantic import AfterValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from pydantic_core import PydanticCustomError
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig

from ..adapter.config import EXPERT_FIELDS, MoELoraConfig
from ..adapter.experts import EXPERTS
from ..evaluation.harness import Harness, TaskSettings
from ..evaluation.results import Score, Scores, read_scores
from ..models.native_routers import check_router
from ..native.upcycle import UpcycleConfig
from ..routing.expert_map import check_allowed, read_expert_map
from ..routing.routers import ROUTERS, Router, RouterSettings
from ..training.preflight import check_settings
from ..training.scoring import make_scorable
from ..training.trainers import MoESFTConfig
from ..utils.expert_merging import Expansion, Similarity
from ..utils.io import read_text, read_yaml
from ..utils.validation import PATH, TEXTS, check, choice_error, is_a, unknown_key
from .buckets import BUCKETS, BucketRule
from .prepare import SELECTIONS
from .router_init import OBJECTIVES

# --- values ----------------------------------------------------------------------------------------------------------


def _printable(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise PydanticCustomError("text", "must be a text of printable characters")
    return text


Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), AfterValidator(_printable)]
Texts = Annotated[list[Text], Field(min_length=1)]
Count = Annotated[Integer, Field(ge=1, le=2**31 - 1)]
Experts = Annotated[Integer, Field(ge=1, le=4096)]
Seed = Annotated[Integer, Field(ge=0, le=2**31 - 1)]


# --- methods ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """
    What a method does.

    Args:
        prepares: stage 1 trains what the experts are made of. Otherwise they are new LoRAs or copies of the base's
            FFNs, and the whole budget is stage 4's.
        assembles: the result is a MoE. Otherwise it is what stage 1 trained, with the whole budget.
        copies: every expert is a copy of stage 1's last checkpoint. Otherwise several checkpoints become experts.
        initialises_routers: stage 3 runs.
        trains_experts: stage 4 trains more than the routers.
        expert_type: what the experts of the mode `lora` are, as `MoELoraConfig.expert_type`; None: the recipe's choice.
    """

    prepares: bool = True
    assembles: bool = True
    copies: bool = False
    initialises_routers: bool = False
    trains_experts: bool = True
    expert_type: str | None = None

    @property
    def specialises(self) -> bool:
        """Whether the experts differ: they come from several checkpoints, and expansion adds those that are missing."""
        return self.prepares and self.assembles and not self.copies


_DENSE = Method(assembles=False)
_FRESH = Method(prepares=False)
_COPIES = Method(copies=True)
_UPIT = Method(initialises_routers=True)
_SELF_MOE = Method(trains_experts=False)
_PESC = Method(prepares=False, expert_type="bottleneck")

# Mode → name → method. A mode says what an expert is: LoRA matrices, or a whole FFN.
METHODS: dict[str, dict[str, Method]] = {
    "lora": {
        "lora": _DENSE,
        "loramoe_pt": _FRESH,
        "loramoe_sft": _COPIES,
        "upit": _UPIT,
        "self_moe": _SELF_MOE,
        "pesc": _PESC,
    },
    "ffn": {"sft": _DENSE, "upcycle_pt": _FRESH, "upcycle_sft": _COPIES, "upit": _UPIT, "self_moe": _SELF_MOE},
}

# Mode → training arguments that the method rests on, for all stages; a recipe's `sft` overrides them. Rates and context
# are the paper's (section 3.1), and so is the constant rate: checkpoints of a rate that falls to zero hardly differ.
TRAINING: dict[str, dict[str, Any]] = {
    mode: {"learning_rate": rate, "lr_scheduler_type": "constant", "max_length": 2048}
    for mode, rate in (("lora", 2e-4), ("ffn", 2e-5))
}


# --- tasks -----------------------------------------------------------------------------------------------------------


@validated(config=ConfigDict(extra="forbid", frozen=True))
class EvaluateSection:
    """Tasks for the result and for its base, beside the held-out losses on `data.eval`."""

    # Tasks, groups or tags of the harness, patterns, or YAML files.
    tasks: list[Text] = field(default_factory=list)
    # A folder with further tasks, and their data.
    include_path: Text | None = None
    # Examples in the context; null: as each task says.
    num_fewshot: Annotated[Integer, Field(ge=0)] | None = None
    # Requests per forward pass, or auto.
    batch_size: Integer | Text = 8
    # Examples per task, or below 1 their share; null: all.
    limit: Annotated[Number, Field(gt=0)] | None = None
    # True puts prompts into the tokenizer's chat template; a name chooses one of several.
    apply_chat_template: Flag | Text = False

    @property
    def settings(self) -> TaskSettings | None:
        """
        None without tasks.

        Raises:
            ValueError: a wrong value.
        """
        if not self.tasks:
            for f in fields(self):
                value = getattr(self, f.name)
                if f.name != "tasks" and value != f.default:
                    raise ValueError(f"evaluate.{f.name}={value!r}: is of evaluate.tasks, which are none; leave it out")
            return None
        try:
            return TaskSettings(**{**asdict(self), "tasks": tuple(self.tasks)})
        except ValueError as error:
            raise ValueError(f"evaluate.{error}") from error


def load_harness(settings: TaskSettings) -> Harness:
    """
    Raises:
        ValueError: a task is unknown or cannot be loaded.
    """
    try:
        return Harness(settings)
    except ValueError as error:
        raise ValueError(f"evaluate.{error}") from error


def task_files(section: EvaluateSection, apart_from: Path) -> list[Path]:
    """
    The files that say what the tasks are, as far as the recipe names them: YAML files, and all in `include_path`.

    Args:
        apart_from: a folder that does not count, the run's own.
    """
    named = [Path(task) for task in section.tasks if Path(task).is_file()]
    inside = sorted(Path(section.include_path).rglob("*")) if section.include_path else []
    inside = [path for path in inside if path.is_file() and "__pycache__" not in path.parts]
    return [*named, *(path for path in inside if not path.resolve().is_relative_to(apart_from.resolve()))]


def evaluate_tasks(
    harness: Harness,
    model: PeftModel | PreTrainedModel,
    processing_class: PreTrainedTokenizerBase,
    base: PreTrainedModel | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """
    The scores of the base and of the adapted model, for the record; empty in all processes but the main one.

    Args:
        base: the model to compare with; None takes the model without its adapter.
    """
    make_scorable(model)
    found = {"adapted": harness.run(model, processing_class)}
    if base is None:
        with model.disable_adapter():
            found["base"] = harness.run(model, processing_class)
    else:
        make_scorable(base)
        found["base"] = harness.run(base, processing_class)
    scores = {name: read_scores(found[name]) if found[name] else {} for name in ("base", "adapted")}
    return {name: [score._asdict() for score in of.values()] for name, of in scores.items()}


def recorded_scores(recorded: dict[str, list[dict[str, Any]]]) -> dict[str, Scores]:
    """What `evaluate_tasks` found, from the record."""
    every = {name: [Score(**values) for values in of] for name, of in recorded.items()}
    return {name: {(score.task, score.metric): score for score in of} for name, of in every.items()}


# --- passthrough -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passthrough:
    """
    The keys of one section.

    Args:
        fields: all fields of the configuration that gets them.
        decided: field → what to do instead, for fields that the recipe decides.
        documented: where the fields are documented, if they are too many to list.
        arguments: the class of training arguments that the fields are of; other configurations check their values.
    """

    fields: frozenset[str]
    decided: Mapping[str, str]
    documented: str | None = None
    arguments: type | None = None

    def check(self, path: str, settings: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: a key is no field, or the recipe decides it; or a value cannot be.
        """
        for key in settings:
            if key in self.decided:
                raise ValueError(f"{path}.{key}: {self.decided[key]}")
            if key not in self.fields:
                raise ValueError(unknown_key(f"{path}.{key}", self.fields - self.decided.keys(), self.documented))
        if self.arguments is not None:
            check_settings(self.arguments, settings, f"{path}.")


def _names(configuration: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(configuration))


def _for_each(fields: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(fields.split(), reason)


ADAPTER = Passthrough(
    _names(MoELoraConfig),
    {
        **dict.fromkeys(_names(PeftConfig), "PEFT sets this"),
        "num_experts": "set the recipe's num_experts",
        **_for_each(
            "target_modules exclude_modules layers_to_transform layers_pattern",
            "a recipe adapts the FFNs of all layers; choose their projections with target_projections",
        ),
        **_for_each(
            "num_experts_pattern rank_pattern alpha_pattern", "the experts of a recipe are alike in all layers"
        ),
        "modules_to_save": "an expert cannot hold whole modules; leave it out",
    },
)
# What `lora_to_moe` reads off the LoRA adapters that it stacks; their values are given, so they need no initial ones.
FROM_EXPERTS = frozenset(EXPERT_FIELDS)

ROUTER = Passthrough(_names(RouterSettings), {"attention_size": "it follows from the model"})
MOE = Passthrough(
    _names(UpcycleConfig),
    {
        "num_experts": "set the recipe's num_experts",
        "router_weights": "stage 3 makes the routers; `router_init` says how",
        "seed": "set post_train.seed",
    },
)

_BUDGET = "the recipe's budget and resuming decide this; use num_train_epochs, prepare_share and seed"
SFT = Passthrough(
    _names(SFTConfig),
    {
        **_for_each(
            "output_dir max_steps num_train_epochs save_strategy save_total_limit save_only_model seed data_seed "
            "resume_from_checkpoint load_best_model_at_end remove_unused_columns train_sampling_strategy "
            "auto_find_batch_size",
            _BUDGET,
        ),
        "router_aux_loss_coef": (
            "set adapter.router_aux_loss_coef in the mode 'lora', moe.router_aux_loss_coef in the mode 'ffn'"
        ),
        "model_init_kwargs": "set the fields of the section `model`",
        **_for_each(
            "eval_strategy eval_on_start eval_steps eval_delay do_eval",
            "stages have no evaluation data; the section `evaluate` says what is measured",
        ),
        **_for_each(
            "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision",
            "push the result's folder when the run is done",
        ),
        "trust_remote_code": "code that comes with a model or with data is never run; leave it out",
    },
    documented="TRL's SFTConfig",
    arguments=SFTConfig,
)

# Stage 4 also takes the routers' losses.
POST_TRAIN = Passthrough(
    SFT.fields | _names(MoESFTConfig),
    {
        **SFT.decided,
        "label_column": "set data.label_column",
        "training_stage": "set post_train.train_experts",
    },
    documented="TRL's SFTConfig and moe_peft's MoESFTConfig",
    arguments=MoESFTConfig,
)

QUANTIZATION = Passthrough(frozenset(inspect.signature(BitsAndBytesConfig).parameters) - {"kwargs"}, {})


# --- sections --------------------------------------------------------------------------------------------------------

NONE = "none"  # leaves a stage out
_DTYPES = ("auto", "float32", "bfloat16", "float16")

STRICT = ConfigDict(extra="forbid", frozen=True)


def name_in(table: Collection[str], *others: str) -> AfterValidator:
    """A name in a table, as the table is when a recipe is read: what users add to it is known at once."""

    def check(name: str) -> str:
        if name not in table and name not in others:
            raise PydanticCustomError("name", "must be one of {known}", {"known": ", ".join([*table, *others])})
        return name

    return AfterValidator(check)


@validated(config=STRICT)
class ModelSection:
    """The base model."""

    name_or_path: Text
    revision: Text | None = None
    dtype: Annotated[Text, name_in(_DTYPES)] = "auto"  # the config's; in the mode `ffn` float32
    attn_implementation: Text | None = None
    # Fields of transformers' BitsAndBytesConfig, e.g. {load_in_4bit: true}.
    quantization: dict[str, Any] | None = None


@validated(config=STRICT)
class DataSection:
    """Training and held-out data: a .json, .jsonl, .csv or .parquet file, or arguments of `datasets.load_dataset`."""

    train: Text | dict[str, Any]
    eval: Text | dict[str, Any] | None = None
    # A column whose values are the examples' domains: for results by domain, label buckets, `order: blocks`.
    label_column: Text | None = None


@validated(config=STRICT)
class PrepareSection:
    """Stage 1: ordinary fine-tuning, of LoRAs or all weights, whose checkpoints become experts."""

    # Experts to take from checkpoints; `num_experts` of the recipe if null.
    num_experts: Experts | None = None
    # Checkpoints at equal intervals. If null: as many as experts for `uniform`, else twice as many.
    num_checkpoints: Experts | None = None
    # Which checkpoints become experts: a name in `SELECTIONS`.
    selection: Annotated[Text, name_in(SELECTIONS)] = "back_half"
    # Experts that exist already: LoRA adapter folders, or in the mode `ffn` dense model folders, as `checkpoints`.
    # This stage is then skipped and stage 4 gets the whole budget.
    adapters: Texts | None = None
    checkpoints: Texts | None = None
    # `checkpoints`: different ones; `copies`: every expert is the last one (LoRAMoE-SFT, Upcycle-SFT).
    experts: Literal["checkpoints", "copies"] = "checkpoints"
    # `blocks`: the domains of `data.label_column` one after the other.
    order: Literal["shuffled", "blocks"] = "shuffled"
    seed: Seed | None = None
    sft: dict[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> list[str] | None:
        """The folders of experts that exist already."""
        return self.adapters if self.adapters is not None else self.checkpoints


@validated(config=STRICT)
class ExpandSection:
    """Stage 2: makes further experts from those of stage 1."""

    method: Expansion = "genetic"
    # Null: `update` of LoRA experts; whole FFNs are compared by their `displacement` from the base model's.
    similarity: Similarity | None = None
    # Null: 0.2 for the values of LoRAs, 0.9 for the displacements of whole FFNs.
    drop_rate: Annotated[Number, Field(ge=0, lt=1)] | None = None
    seed: Seed | None = None


@validated(config=STRICT)
class RouterInitSection:
    """Stage 3: seed examples are given to experts; experts and routing vectors then learn from their buckets."""

    # How seed examples are given to experts: a name in `BUCKETS`, or `none` to leave this stage out.
    buckets: Annotated[Text, name_in(BUCKETS, NONE)] = "perplexity"
    # What routing vectors learn: a name in `OBJECTIVES`.
    objective: Annotated[Text, name_in(OBJECTIVES)] = "positive"
    # Weight of the language-modelling loss; the routing loss has 1 - alpha.
    alpha: Annotated[Number, Field(ge=0, le=1)] = 0.5
    train_experts: Flag = True
    # Share of the data in the seed set, which is drawn at random.
    seed_fraction: Annotated[Number, Field(gt=0, le=1)] = 0.01
    # Passes of each expert over its bucket.
    num_train_epochs: Count = 4
    # True takes these examples from stage 4's, so that all methods see equal data; False adds them to the budget, as in
    # the paper.
    within_budget: Flag = False
    # The most examples in a bucket, for the perplexity rules; null shares the seed set out evenly.
    capacity: Count | None = None
    # Label → experts (indices, or masks of 0 and 1), for `buckets: label`.
    expert_map: dict[Text | Integer, list[Flag | Integer]] | None = None
    seed: Seed | None = None
    sft: dict[str, Any] = field(default_factory=dict)


@validated(config=STRICT)
class PostTrainSection:
    """Stage 4: fine-tuning of the assembled MoE."""

    # False trains the routers alone (Self-MoE).
    train_experts: Flag = True
    # Mode `ffn`: a router that is trained in the place of plain gates, such as {type: attention, num_heads: 8}: fields
    # of MoELoraConfig without the prefix `router_`. The result has plain gates again, if it folds into such.
    router: dict[str, Any] = field(default_factory=dict)
    seed: Seed | None = None
    sft: dict[str, Any] = field(default_factory=dict)


# --- recipe ----------------------------------------------------------------------------------------------------------


@validated(config=STRICT)
class Recipe:
    """A whole run. A stage without a seed of its own uses `seed` (stage 1), `seed + 1` (stage 2), and so on."""

    output_dir: Text
    model: ModelSection
    data: DataSection
    # What an expert is: `lora` (the result is an adapter) or `ffn`, a whole FFN (the result is a native MoE).
    mode: Annotated[Text, name_in(METHODS)] = "lora"
    # A name in the table `METHODS` of the mode: which stages run and how the budget is split.
    method: Text = "upit"
    num_experts: Experts = 8
    # The budget of stages 1 and 4 together, in passes over the data.
    num_train_epochs: Annotated[Number, Field(gt=0, le=1e6)] = 4.0
    # Stage 1's share of it.
    prepare_share: Annotated[Number, Field(gt=0, lt=1)] = 0.5
    seed: Seed = 0
    # Mode `lora`: fields of MoELoraConfig. Stage 1's LoRA takes its rank, alpha, dropout and projections from them.
    adapter: dict[str, Any] = field(default_factory=dict)
    # Mode `ffn`: fields of UpcycleConfig for the native MoE; its `router_aux_loss_coef` is 0.01 here.
    moe: dict[str, Any] = field(default_factory=dict)
    # Fields of TRL's SFTConfig for all stages; a stage's own `sft` overrides them. What is left out has the method's
    # value: a constant rate of 2e-4 (mode `ffn`: 2e-5) and a context of 2048 tokens, or of as many as the base has
    # positions for.
    sft: dict[str, Any] = field(default_factory=dict)
    prepare: PrepareSection = field(default_factory=PrepareSection)
    expand: ExpandSection = field(default_factory=ExpandSection)
    router_init: RouterInitSection = field(default_factory=RouterInitSection)
    post_train: PostTrainSection = field(default_factory=PostTrainSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)

    def __post_init__(self) -> None:
        if self.method not in METHODS[self.mode]:
            raise ValueError(choice_error("method", self.method, METHODS[self.mode]))
        self._check_passed_on()
        {"lora": self._check_lora, "ffn": self._check_ffn}[self.mode]()
        self._check_labels()
        self._check_expert_maps()
        self._check_number_of_experts()
        _ = self.evaluate.settings

    def _check_passed_on(self) -> None:
        """Keys that are fields of other configurations."""
        SFT.check("sft", self.sft)
        QUANTIZATION.check("model.quantization", self.model.quantization or {})
        steps = {"sft.save_steps": self.sft.get("save_steps", 1)}
        for section in dataclasses.fields(self):
            own = getattr(getattr(self, section.name), "sft", {})
            known = POST_TRAIN if section.name == "post_train" else SFT
            known.check(f"{section.name}.sft", own)
            steps[f"{section.name}.sft.save_steps"] = own.get("save_steps", 1)
        for path, value in steps.items():
            _require(path, value, type(value) is int and value >= 1, "a whole number of at least 1")

    def _check_lora(self) -> None:
        _require_no_keys("moe", self.moe, "lora", "adapter")
        _require_no_keys("post_train.router", self.post_train.router, "lora", "adapter")
        ADAPTER.check("adapter", self.adapter)
        given = self.prepare.checkpoints
        _require("prepare.checkpoints", given, given is None, "null in the mode 'lora'; use prepare.adapters")
        config = self.moe_config()
        stacks = self.facts.prepares and self.facts.assembles
        _require(
            "adapter.expert_type",
            config.expert_type,
            EXPERTS[config.expert_type].holds_loras or not stacks,
            f"'lora' with the method {self.method!r}, which stacks LoRAs; or use the method loramoe_pt",
        )
        if not config.router_class.has_parameters and self.facts.assembles:
            remedy = "these routers have no parameters; use another router_type"
            if self.initialises_routers:
                raise ValueError(f"adapter.router_type={config.router_type!r}: {remedy}, or router_init.buckets=none")
            if not self.trains_experts:
                raise ValueError(f"adapter.router_type={config.router_type!r}: {remedy}: stage 4 trains nothing else")
        if config.router_class.by_token_id and self.facts.assembles:
            sft = self.post_train.sft
            labels = float(sft.get("expert_map") is not None)
            for name, default in (("router_z_loss_coef", 0.0), ("router_label_loss_coef", labels)):
                value = sft.get(name, default)
                _require(f"post_train.sft.{name}", value, not value, "0: these routers go by token ids alone")

    def _check_ffn(self) -> None:
        if self.model.dtype == "auto":  # a step of 2e-5 is too small to change most weights in bfloat16
            object.__setattr__(self, "model", dataclasses.replace(self.model, dtype="float32"))
        attention, exact = self.model.attn_implementation, self.model.dtype == "float32"
        half = f"another with model.dtype={self.model.dtype!r}, as it computes in half precision alone"
        _require("model.attn_implementation", attention, not (exact and "flash" in (attention or "")), half)
        _require_no_keys("adapter", self.adapter, "ffn", "moe")
        MOE.check("moe", self.moe)
        init, given = self.moe.get("init"), self.prepare.adapters
        objective, similarity = self.router_init.objective, self.expand.similarity
        apart = [name for name, other in OBJECTIVES.items() if other.own_logit_only]
        several = init != "checkpoints" or self.facts.specialises
        unquantized = not self.model.quantization
        split = self.moe.get("fine_grained_split")
        gates, one_model = self.moe.get("router_init"), not self.facts.prepares or self.copies
        for path, value, good, allowed in (
            ("moe.init", init, several, "another: this method has one checkpoint"),
            (
                "moe.router_init",
                gates,
                gates != "attention" or (one_model and not self.initialises_routers),
                "another: attention gates are those of one dense model, and stage 3 would replace them",
            ),
            (
                "moe.fine_grained_split",
                split,
                split != "independent" or self.moe.get("granularity", 1) == 1 or not self.initialises_routers,
                "'partition': stage 3 makes a gate for each of num_experts, not for their parts",
            ),
            ("prepare.adapters", given, given is None, "null in the mode 'ffn'; use prepare.checkpoints"),
            ("model.quantization", self.model.quantization, unquantized, "null: all weights are trained"),
            (
                "router_init.objective",
                objective,
                objective in apart,
                f"{' or '.join(map(repr, apart))}: experts are trained apart",
            ),
            ("expand.similarity", similarity, similarity in (None, "displacement"), "'displacement', or null"),
        ):
            _require(path, value, good, allowed)
        self.upcycle_config()
        self._check_router()

    def _check_router(self) -> None:
        """The router that stage 4 trains in the place of plain gates."""
        given = self.post_train.router
        if not given:
            return
        ROUTER.check("post_train.router", given)
        _require("post_train.router", given, self.facts.assembles, f"left out: the method {self.method!r} has no gates")
        plain = "left out: stage 3 trains plain gates; or set router_init.buckets=none"
        _require("post_train.router", given, not self.initialises_routers, plain)
        try:
            check_router(RouterSettings(**given), *self.routed)
        except ValueError as error:
            raise ValueError(f"post_train.router: {error}") from error
        router, moe = self._router, self.upcycle_config()
        init, std, heads = moe.router_init, moe.router_init_std, moe.router_num_heads
        own = "left out: post_train.router, in the place of the gates, has its own initial values"
        other = "left out: attention does not initialise that post_train.router" if init == "attention" else own
        by_attention = init == "attention" and router.takes_attention
        one = heads is None or not router.needs_attention
        for path, value, good, allowed in (
            ("moe.router_init", init, init == UpcycleConfig.router_init or by_attention, other),
            ("moe.router_init_std", std, std == UpcycleConfig.router_init_std, own),
            ("moe.router_num_heads", heads, one, "left out: set post_train.router.num_heads"),
        ):
            _require(path, value, good, allowed)

    def _check_labels(self) -> None:
        rule = self.bucket_rule
        needed = self.prepare.order == "blocks" or (rule is not None and rule.needs_labels)
        if needed and self.data.label_column is None:
            raise ValueError(
                f"data.label_column=None: prepare.order={self.prepare.order!r} with "
                f"router_init.buckets={self.router_init.buckets!r} needs a column of labels"
            )

    def _check_expert_maps(self) -> None:
        if self.router_init.expert_map is not None:
            read_expert_map(self.router_init.expert_map, self.num_experts, "router_init.expert_map")
            fits = self.bucket_rule is None or self.bucket_rule.needs_labels  # None: a recipe for several methods
            _require("router_init.buckets", self.router_init.buckets, fits, "'label' beside router_init.expert_map")
        known = self.expert_map
        if known is None:
            return
        _require("data.label_column", None, self.data.label_column is not None, "set for post_train.sft.expert_map")
        if self.masks_labels:
            check_allowed(known, self._fewest_allowed(), "post_train.sft.router_label_mask=True")

    def _check_number_of_experts(self) -> None:
        n, given, method = self.num_experts, self.given_experts(), self.expand.method
        for name in ("num_experts", "num_checkpoints"):
            value = getattr(self.prepare, name)
            _require(f"prepare.{name}", value, value is None or not self.prepare.given, "null: experts are given")
        taken, copies = self.prepare.num_checkpoints, self.prepare.experts == "copies"
        _require("prepare.num_checkpoints", taken, taken is None or not copies, "null: all are copies of the last one")
        capacity, rule = self.router_init.capacity, self.bucket_rule
        takes = rule is None or rule.needs_perplexities  # None: a recipe for several methods
        _require("router_init.capacity", capacity, capacity is None or takes, "null: it is for perplexity rules")
        _require("num_experts", n, n >= 2 or not self.facts.assembles, "at least 2")
        if not self.facts.specialises or self.copies:
            return
        fields = [f"prepare.{name}" for name in ("adapters", "checkpoints") if getattr(self.prepare, name)]
        named = fields[0] if fields else "stage 1"
        if given > n:
            raise ValueError(f"num_experts={n}: {named} gives {given}; ask for that many or more")
        if given < n and (method == NONE or given < 2):
            why = f"expand.method={method!r} adds none" if method == NONE else "expansion needs two"
            raise ValueError(f"num_experts={n}: {named} gives {given}, {why}")

    # --- what follows from the fields -------------------------------------------------------------------------------

    @property
    def facts(self) -> Method:
        """What the method does."""
        return METHODS[self.mode][self.method]

    @property
    def bucket_rule(self) -> BucketRule | None:
        """How stage 3 gives examples to experts; None leaves the stage out."""
        return None if self.router_init.buckets == NONE else BUCKETS[self.router_init.buckets]

    @property
    def copies(self) -> bool:
        """Whether all experts are copies of the last one that stage 1 gives."""
        return self.facts.copies or self.prepare.experts == "copies"

    @property
    def prepares(self) -> bool:
        """Whether stage 1 runs: it is not needed for a MoE whose experts are given."""
        return self.facts.prepares and (self.prepare.given is None or not self.facts.assembles)

    @property
    def expands(self) -> bool:
        """Whether stage 2 runs."""
        return self.facts.specialises and not self.copies and self.given_experts() < self.num_experts

    @property
    def initialises_routers(self) -> bool:
        """Whether stage 3 runs."""
        return self.facts.initialises_routers and self.bucket_rule is not None

    @property
    def trains_experts(self) -> bool:
        """Whether stage 4 trains more than the routers."""
        return self.post_train.train_experts and self.facts.trains_experts

    @property
    def expert_map(self) -> dict[str, list[int]] | None:
        """Label → the routed experts that stage 4 trains it with; None if the recipe names none."""
        given = self.post_train.sft.get("expert_map")
        return None if given is None else read_expert_map(given, self.routed[0], "post_train.sft.expert_map")

    @property
    def masks_labels(self) -> bool:
        """Whether tokens may only go to the experts of their label, in stage 4 and in evaluation."""
        return self.facts.assembles and bool(self.post_train.sft.get("router_label_mask"))

    @property
    def _router(self) -> type[Router]:
        """Mode `ffn`: the kind of router that stage 4 trains."""
        return ROUTERS[self.post_train.router.get("type", "linear")]

    def given_experts(self) -> int:
        """m, the number of experts that stage 1 gives."""
        if self.prepare.given is not None:
            return len(self.prepare.given)
        return self.prepare.num_experts or self.num_experts

    def seed_count(self, rows: int) -> int:
        """Examples in the seed set: its share of the data, and at least one per expert."""
        return min(rows, max(self.num_experts, round(self.router_init.seed_fraction * rows)))

    def bucketed(self, rows: int) -> int:
        """Examples of the seed set that the buckets take."""
        capacity = self.router_init.capacity
        return self.seed_count(rows) if capacity is None else min(self.seed_count(rows), self.num_experts * capacity)

    def moe_config(self) -> MoELoraConfig:
        """The MoE adapter's configuration."""
        kind = self.facts.expert_type or self.adapter.get("expert_type", "lora")
        # The section may serve several methods: what the kind of experts has no use for is left out.
        unread = EXPERTS[kind].unread if kind in EXPERTS else ()
        settings = {key: value for key, value in self.adapter.items() if key not in unread}
        settings |= {"num_experts": max(self.num_experts, 2), "task_type": "CAUSAL_LM", "expert_type": kind}
        return MoELoraConfig(**settings)

    @property
    def routed(self) -> tuple[int, int]:
        """The MoE's routed experts, and those of them that serve a token."""
        if self.mode == "lora":
            return self.num_experts, self.moe_config().top_k
        c = self.upcycle_config()
        return c.num_experts * c.granularity - c.num_shared_experts, c.top_k * c.granularity - c.num_shared_experts

    def _fewest_allowed(self) -> int:
        """How many experts a label needs: those of a token, or one if routers may leave experts out."""
        n, k = self.routed
        router = self.moe_config().router_class if self.mode == "lora" else self._router
        k = router.only_top_k or k
        return 1 if router.leaves_out or k == n else k

    def upcycle_config(self, **own: Any) -> UpcycleConfig:
        """The native MoE's configuration."""
        settings = {"num_experts": max(self.num_experts, 2), "seed": self.seed, "dtype": self.model.dtype}
        settings["router_aux_loss_coef"] = 0.01  # UpIT's load-balancing loss is Switch Transformers', as the adapter's
        return UpcycleConfig(**{**settings, **self.moe, **own})


def as_dict(settings: Any) -> dict[str, Any]:
    """A section or recipe as plain dictionaries."""
    return dataclasses.asdict(settings)


def _require(path: str, value: Any, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{path}={value!r}: must be {allowed}")


def _require_no_keys(section: str, keys: dict[str, Any], mode: str, other: str) -> None:
    for key in keys:
        raise ValueError(f"{section}.{key}: unknown key in the mode {mode!r}, which has the section `{other}` instead")


# --- parsing ---------------------------------------------------------------------------------------------------------

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
