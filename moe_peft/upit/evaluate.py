"""Last stage: held-out losses by domain and the routing of each domain's tokens, for the result and its base."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig

from ..analysis.recorder import RoutingStatistics, record_routing
from ..models.layer import routed_layers
from ..models.model_size import model_size
from ..models.steering import allow_experts
from ..routing.expert_map import in_order, label_text
from ..routing.statistics import LoadHealth
from ..training.data import check_domains, rows_of_labels
from ..training.preparation import tokenized
from ..training.scoring import example_losses, loss_name, mean_loss
from .recipe import Recipe
from .stages import TrainerStage

# --- held-out losses -------------------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """
    Results of `evaluate`.

    Args:
        losses: `{"base": {domain: loss}, "adapted": {…}}`: the mean loss per scored token of each domain and, as
            `"mean"`, the mean over domains. A domain called `"mean"` becomes `"mean (domain)"`.
        shares: domain → the share of token assignments of every layer and expert, [L, n]; empty without routers.
        health: how evenly the experts are used; None without routers.
    """

    losses: dict[str, dict[str, float]]
    shares: dict[str, torch.Tensor]
    health: LoadHealth | None


def evaluate(
    model: PeftModel | PreTrainedModel,
    dataset: Dataset,
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
    label_column: str | None = None,
    base: PreTrainedModel | None = None,
    label_mask: Mapping[str, Sequence[int]] | None = None,
) -> Evaluation:
    """
    Compute losses of the model and of its base, routing shares, and how evenly the experts are used.

    Args:
        dataset: held-out examples; `args` sets their preparation.
        label_column: a column of domains.
        base: the model to compare with; None takes the model without its adapter.
        label_mask: domain → indices of the experts allowed for its tokens; None: all experts.
    """
    check_domains(dataset, label_column, "evaluate: ")
    args = copy.copy(args)
    args.packing = args.padding_free = False  # examples are scored one by one
    data, collator = tokenized(dataset, processing_class, args)
    labels = [label_text(label) for label in data[label_column]] if label_column else ["all"] * len(data)
    rows = rows_of_labels(labels)
    parts = {domain: data.select(rows[domain]) for domain in in_order(labels, label_mask)}
    routed = bool(routed_layers(model))
    losses: dict[str, dict[str, float]] = defaultdict(dict)

    def score(name: str, scored: Any, domain: str) -> None:
        losses_and_counts = example_losses(scored, parts[domain], collator)
        losses[name][loss_name(domain)] = mean_loss(*losses_and_counts, f"evaluate: {domain!r}")

    with record_routing(model, list(parts)) if routed else nullcontext() as statistics:
        for domain in parts:
            if statistics is not None:
                statistics.current = domain
            with nullcontext() if label_mask is None else allow_experts(model, label_mask[domain]):
                score("adapted", model, domain)
    with model.disable_adapter() if base is None else nullcontext():
        for domain in parts:
            score("base", base or model, domain)
    if statistics is not None:
        _gather(statistics)
    shares, health = ({}, None) if statistics is None else (statistics.shares(), statistics.health())
    for result in losses.values():
        result["mean"] = sum(result.values()) / len(result)
    return Evaluation({name: losses[name] for name in ("base", "adapted")}, shares, health)


def _gather(statistics: RoutingStatistics) -> None:
    """Sum the counts of all processes."""
    if PartialState().num_processes > 1:
        statistics.counts = sum(gather_object([statistics.counts]))
        statistics.tokens = sum(gather_object([statistics.tokens]))


# --- the stage -------------------------------------------------------------------------------------------------------


class Evaluate(TrainerStage):
    """Held-out losses by domain, and the routing of each domain's tokens."""

    name = "evaluate"
    inputs = ("model", "eval", "chat_template")

    @classmethod
    def wanted(cls, recipe: Recipe) -> bool:
        return recipe.data.eval is not None

    @property
    def _trained(self) -> tuple[str, dict[str, Any]]:
        """Stage that trains the result, and the training arguments in its section."""
        name = "post_train" if self.recipe.facts.assembles else "prepare"
        return name, getattr(self.recipe, name).sft

    @property
    def template(self) -> tuple[str, str | None]:
        """Chat template of the stage that trains the result."""
        name, sft = self._trained
        if "chat_template_path" in sft:
            return f"{name}.sft.chat_template_path", sft["chat_template_path"]
        return super().template

    def examples(self) -> Dataset:
        assert self.context.eval_data is not None  # `wanted` requires it
        return self.context.eval_data

    def example_arguments(self, **overrides: Any) -> SFTConfig:
        """Return training arguments that score examples one by one."""
        return self.arguments(**{"packing": False, "padding_free": False, **overrides})

    def arguments(self, **overrides: Any) -> SFTConfig:
        eos_token = {**self.sft, **self._trained[1]}.get("eos_token")
        return super().arguments(**{"chat_template_path": self.template[1], "eos_token": eos_token, **overrides})

    @property
    def label_mask(self) -> dict[str, list[int]] | None:
        """Experts allowed for the tokens of each label, if stage 4 trained with such a mask."""
        return self.recipe.expert_map if self.recipe.masks_labels else None

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "label mask": self.label_mask}

    def run(self, folder: Path) -> dict[str, Any]:
        assert self.given.model is not None
        args = self.arguments()
        model, base = self.kind.load_result(self.given.model, self.seed)
        measured = evaluate(
            model,
            self.examples(),
            args,
            self.context.base.tokenizer,
            self.recipe.data.label_column,
            base,
            self.label_mask,
        )
        shares = {domain: share.tolist() for domain, share in measured.shares.items()}
        health = None if self._labels_route else measured.health
        warning = health.warning if health else ""
        return {"loss": measured.losses, "shares": shares, "load_warning": warning, "size": asdict(model_size(model))}

    @property
    def _labels_route(self) -> bool:
        """True if an expert map asks for uneven loads."""
        return self.recipe.expert_map is not None
