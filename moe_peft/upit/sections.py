"""
The sections of a recipe, one for each stage and for what all share. What a field means is said here, beside it.

Unknown keys and wrong values are refused with the key, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as validated
from pydantic_core import PydanticCustomError

from ..merging import Expansion, Similarity
from .buckets import BUCKETS
from .objectives import OBJECTIVES
from .selection import SELECTIONS
from .values import Count, Experts, Flag, Integer, Number, Seed, Text, Texts

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
