"""Settings of `moe-peft mix`. This module does not import torch, so `moe-peft mix --help` starts without it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from ..utils.foreign import FOREIGN_TO_MIX
from ..utils.validation import Count, Flag, Integer, Number, Seed, Settings, Text, TextList, check_rules

OURS = "ours"  # value of `neutral` for the built-in list
MOST_ALONE = 8  # up to this number, each expert is measured alone on all rows and has a column in tables


_OF_MIXTURES = {"gates", "prompts", "always", "top_k", "attention", "mixing", "keep_sums"}
_OF_STEPS = {"rank", "learning_rate", "answers"}


class Prompts(Settings):
    """Texts of requests for an expert (positive), and of requests not for it (negative)."""

    positive: TextList
    negative: list[Text] = Field([])


class MixSettings(Settings):
    """Settings of `moe-peft mix`, as flags or in a YAML file."""

    foreign = FOREIGN_TO_MIX
    output: Text = Field(title="FOLDER", description="folder for the mixture; new or empty")
    adapters: TextList | None = Field(None, title="PATH", description="LoRA adapters: folders, or names on the hub")
    models: TextList | None = Field(
        None, title="PATH", description="dense models of one architecture, for a native MoE"
    )
    base: Text | None = Field(
        None, title="PATH", description="the adapters' base; default: the one that the first names"
    )
    into: Literal["moe", "lora"] = Field(
        "moe",
        description="moe (default): a mixture with gates; lora: one ordinary LoRA, their least-squares merge "
        "(RegMean), or with --steps distilled from their answers",
    )
    steps: Count | None = Field(
        None, description="with --into lora: training steps of the one LoRA, on the adapters' own answers to --data"
    )
    rank: Count | None = Field(None, description="with --steps: rank of the one LoRA; default: 16")
    learning_rate: Number | None = Field(None, gt=0, description="with --steps: the highest rate; default: 0.001")
    answers: Text | None = Field(
        None,
        title="FILE",
        description="with --steps: keeps the adapters' answers for another run; default: beside the output",
    )
    gates: Text = Field("ridge", title="NAME", description="ridge, prompts, arrow, or one of a plugin's")
    labels: TextList | None = Field(
        None, title="NAME", description="names of the experts; default: those of their folders"
    )
    data: TextList | None = Field(
        None, title="FILE", description="calibration texts: one file with --label-column, or one per expert"
    )
    label_column: Text | None = Field(None, title="NAME", description="column of --data that holds the experts' names")
    test_data: TextList | None = Field(
        None, title="FILE", description="held-out rows, like --data; default: rows of --data left over"
    )
    prompts: dict[Text, Prompts] | None = Field(
        None, description='in place of calibration texts: {"math": {"positive": ["…"], "negative": ["…"]}}'
    )
    neutral: Text | None = Field(
        None,
        title="FILE",
        description=f"general requests, one a line: the base becomes an expert for them; {OURS!r}: ours",
    )
    always: Text | None = Field(None, title="PATH", description="a LoRA that serves every token, under the routed ones")
    calibration_examples: Count | None = Field(
        None, description="calibration rows of each expert; default: 256, and at most 4096 in all"
    )
    test_examples: Count | None = Field(
        None, description="held-out rows of each expert; default: 64, and at most 512 in all"
    )
    right: Text | None = Field(
        None, title="MODULE:NAME", description="your function: is an answer right, given its row"
    )
    max_new_tokens: Count = Field(64, description="of an answer that --right judges, or --steps learns from")
    top_k: Count | None = Field(
        None, description="experts per token; default: 1, or 2 with gates=prompts and with models"
    )
    attention: Literal["route", "mean"] | None = Field(
        None,
        description="LoRAs on attention: route (default), a router for each linear; or mean, one LoRA, which can be "
        "exported",
    )
    mixing: Literal["output", "projection"] | None = Field(None, description="output (default) or projection")
    add_to: Text | None = Field(
        None, title="PATH", description="a MoE-LoRA adapter that the one in --adapters becomes an expert of"
    )
    replace: Integer | None = Field(None, ge=0, description="with --add-to: the expert, from 0, that it replaces")
    keep_sums: Flag | None = Field(
        None,
        description="keep ridge's sums by expert, so that one can join or leave with its own texts alone; default: up "
        "to 256 MB",
    )
    max_length: Count = Field(1024, description="tokens per example; longer ones are truncated")
    batch_size: Count = Field(8, description="examples per forward pass")
    dtype: Text = Field("auto", title="NAME", description="dtype of the weights: auto, float32, bfloat16 or float16")
    seed: Seed = Field(0, description="seed of the draw of examples")

    @model_validator(mode="after")
    def _check(self) -> MixSettings:
        least = 1 if self.add_to else 2
        rules: list[tuple[Any, str]] = [
            (
                self.steps and self.add_to,
                f"steps={self.steps}: no adapter can join a distilled LoRA; distil all adapters again, without add_to",
            ),
            ((self.adapters is None) == (self.models is None), "adapters, models: give one of the two"),
            (len(self.adapters or self.models or []) < least, "adapters, models: give two or more"),
            (self.replace is not None and not self.add_to, f"replace={self.replace}: goes with add_to"),
            (
                self.add_to and len(self.adapters or []) != 1,
                f"adapters={self.adapters}: only one can join add_to at a time",
            ),
            (
                self.add_to and (self.top_k or self.mixing or self.attention),
                "top_k, mixing, attention: are those of add_to; leave them out",
            ),
            (
                self.models and (self.base or self.mixing or self.attention),
                "base, mixing, attention: are for adapters; leave them out",
            ),
            (
                not self.data and (self.label_column or self.test_data or self.right),
                "label_column, test_data, right: go with data",
            ),
            (
                self.neutral and (self.models or self.add_to),
                "neutral: is for new mixtures of adapters; leave it out",
            ),
            (
                self.steps and self.into != "lora",
                f"steps={self.steps}: of one LoRA, which is trained; give it with into='lora'",
            ),
            (
                not self.steps and self.model_fields_set & _OF_STEPS,
                f"{', '.join(sorted(self.model_fields_set & _OF_STEPS))}: of a LoRA that is trained; give steps, too",
            ),
            (self.always and (self.models or self.add_to), "always: is for new mixtures of adapters; leave it out"),
            (
                self.into == "lora" and (not self.adapters or not self.data or self.add_to),
                "into='lora': give adapters, and data with some rows for each; without add_to",
            ),
            (
                self.into == "lora" and self.model_fields_set & _OF_MIXTURES,
                f"{', '.join(sorted(self.model_fields_set & _OF_MIXTURES))}: of mixtures; leave out with into='lora'",
            ),
            (
                self.neutral and self.attention == "mean",
                "neutral: with attention=mean, the mean of LoRAs on attention serves every token; use attention=route",
            ),
        ]
        for name in ("data", "test_data"):
            files = getattr(self, name) or []
            wrong = bool(files) and (len(files) == 1) == (self.label_column is None)
            wrong = wrong and not (self.add_to and len(files) == 1)  # a file of the new expert
            rules.append((wrong, f"{name}={getattr(self, name)}: give one with label_column, or one for each expert"))
        check_rules(rules)
        return self
