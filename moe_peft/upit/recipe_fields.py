"""The fields of a recipe: a section for each stage and for what all stages share; a section checks its own fields."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from transformers import BitsAndBytesConfig

from ..evaluation.settings import TaskSettings
from ..models.gate_init import GATE_INITS
from ..utils.messages import InputError, choice_error, unknown_key
from ..utils.validation import Count, Flag, Integer, Number, NumExperts, Seed, Settings, Share, Text, Texts
from .buckets import BUCKETS, BucketRule
from .expansion import Expansion, Similarity
from .prepare import SELECTIONS

NONE = "none"  # leaves a stage out
TRAINED = "vectors"  # gates of stage 3 that are trained


def name_in(table: Collection[str], *others: str) -> AfterValidator:
    """A name in a table, as the table is when a recipe is read: with what users added to it."""

    def check(name: str) -> str:
        if name not in table and name not in others:
            raise PydanticCustomError("name", "must be one of {known}", {"known": ", ".join([*table, *others])})
        return name

    return AfterValidator(check)


def require(path: str, value: Any, good: bool, allowed: str) -> None:
    if not good:
        raise InputError(f"{path}={value!r}: must be {allowed}")


class ModelSection(Settings):
    """the base model"""

    name_or_path: Text = Field(description="a folder, or a name on the hub")
    revision: Text | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="or float32, bfloat16, float16; auto is the config's; float32 in mode ffn"
    )
    attn_implementation: Text | None = None
    quantization: dict[str, Any] | None = Field(
        None, description="fields of transformers' BitsAndBytesConfig, e.g. {load_in_4bit: true}"
    )

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        names = inspect.signature(BitsAndBytesConfig).parameters.keys() - {"kwargs"}
        for key in self.quantization or {}:
            if key not in names:
                raise InputError(unknown_key(f"model.quantization.{key}", names))
        return self


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
    adapters: Texts | None = Field(
        None, description="LoRA adapter folders that are the experts; this stage is then skipped"
    )
    checkpoints: Texts | None = Field(None, description="the same in mode ffn: dense model folders")
    experts: Literal["checkpoints", "copies"] = Field(
        "checkpoints", description="or copies: every expert is the last checkpoint"
    )
    seed: Seed | None = None
    sft: dict[str, Any] = Field(default_factory=dict)

    @property
    def folders(self) -> list[str] | None:
        """The folders of experts that exist already."""
        return self.adapters if self.adapters is not None else self.checkpoints

    @model_validator(mode="after")
    def _check(self) -> PrepareSection:
        for name in ("num_experts", "num_checkpoints"):
            value = getattr(self, name)
            require(f"prepare.{name}", value, value is None or not self.folders, "null: experts are given")
        count, copies = self.num_checkpoints, self.experts == "copies"
        require("prepare.num_checkpoints", count, count is None or not copies, "null: all are copies of the last one")
        return self


class ExpandSection(Settings):
    """stage 2: more experts made from the existing ones"""

    method: Expansion = Field("genetic", description="or random, none")
    similarity: Similarity | None = Field(
        None, description="update, values or displacement; null: update for LoRAs, displacement for FFNs"
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
    capacity: Count | None = Field(None, description="the most examples in a bucket; null: shared out evenly")
    expert_map: dict[Text | Integer, list[Flag | Integer]] | None = Field(
        None, description="label → experts, as indices or masks, for buckets: label"
    )
    seed: Seed | None = None
    sft: dict[str, Any] = Field(default_factory=dict)

    @property
    def rule(self) -> BucketRule | None:
        """How examples are assigned to experts; None leaves the stage out."""
        return None if self.buckets == NONE else BUCKETS[self.buckets]

    @model_validator(mode="after")
    def _check(self) -> RouterInitSection:
        linear = [name for name, way in GATE_INITS.items() if way.needs_texts and way.router_type == "linear"]
        if self.gates not in (TRAINED, *linear):
            raise InputError(choice_error("router_init.gates", self.gates, (TRAINED, *linear)))
        if self.rule is not None:  # without one, the recipe may serve several methods
            takes_capacity = self.capacity is None or self.rule.needs_perplexities
            require("router_init.capacity", self.capacity, takes_capacity, "null: it is for buckets by perplexity")
            takes_map = self.expert_map is None or self.rule.needs_labels
            require("router_init.buckets", self.buckets, takes_map, "'label' with router_init.expert_map")
        return self


class PostTrainSection(Settings):
    """stage 4: fine-tuning of the complete MoE"""

    train_experts: Flag = Field(True, description="false trains the routers alone")
    router: dict[str, Any] = Field(
        default_factory=dict,
        description="mode ffn: a router that replaces plain gates, e.g. {type: attention, num_heads: 8}, in fields of "
        "MoELoraConfig without router_; at the end it is folded, if it can be",
    )
    seed: Seed | None = None
    sft: dict[str, Any] = Field(
        default_factory=dict,
        description="fields of MoESFTConfig too: router_z_loss_coef, expert_map, router_schedule, …",
    )


class EvaluateSection(TaskSettings):
    """tasks of lm-evaluation-harness, for the result and its base; see the page Evaluating"""

    tasks: list[Text] = Field(default_factory=list, description="names, groups, tags, patterns or YAML files")

    @model_validator(mode="after")
    def _check(self) -> EvaluateSection:
        for name, field in type(self).model_fields.items() if not self.tasks else ():
            value = getattr(self, name)
            if name != "tasks" and value != field.default:
                raise InputError(f"evaluate.{name}={value!r}: goes with evaluate.tasks, which are missing")
        return self


class RecipeFields(Settings):
    """The fields of a recipe; a description says what one means, and docs/api/upit-fields.md is made of them."""

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
    adapter: dict[str, Any] = Field(
        default_factory=dict,
        description="mode lora: fields of MoELoraConfig that are the same for all FFNs; stage 1's LoRA takes rank, "
        "alpha, dropout and projections from here",
    )
    moe: dict[str, Any] = Field(
        default_factory=dict, description="mode ffn: fields of UpcycleConfig; router_aux_loss_coef is 0.01 here"
    )
    sft: dict[str, Any] = Field(
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
    evaluate: EvaluateSection = EvaluateSection.model_validate({})
