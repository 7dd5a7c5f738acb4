"""
The last stage: held-out losses by domain, where the tokens of each domain go, and tasks of
lm-evaluation-harness, for the result and for its base.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig

from ..analysis.figures import method_name, plot_shares
from ..analysis.html import (
    load_line,
    load_section,
    losses_line,
    losses_section,
    model_name,
    shares_section,
    who_serves_what,
    write_page,
)
from ..analysis.recorder import RoutingStatistics, record_routing
from ..evaluation.harness import Harness
from ..evaluation.results import Score, Scores, read_scores
from ..models.layer import routed_layers
from ..models.steering import allow_experts
from ..routing.expert_map import in_order, label_text
from ..routing.statistics import LoadHealth
from ..training.data import check_domains, rows_of_labels, source_name
from ..training.preparation import tokenized
from ..training.scoring import example_losses, loss_name, mean_loss
from ..utils.io import hash_file
from ..utils.loading import chat_template, check_template
from ..utils.messages import InputError
from .recipe_fields import EvaluateSection
from .recipe_rules import Recipe
from .stages import TrainerStage

# --- held-out losses -------------------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """
    What `evaluate` measures.

    Args:
        losses: `{"base": {domain: loss}, "adapted": {…}}`: the mean loss per scored token of each domain and, as
            `"mean"`, the mean over domains. A domain of that name is `"mean (domain)"`.
        shares: domain → the share of token assignments of every layer and expert, [L, n]; none without routers.
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
    Losses of the model and of its base, routing shares, and how evenly the experts are used.

    Args:
        dataset: held-out examples; `args` says how they are prepared.
        label_column: a column of domains.
        base: the model to compare with; None takes the model without its adapter.
        label_mask: domain → the indices of the only experts that its tokens may go to; None: all.
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
    """Count the batches of all processes."""
    if PartialState().num_processes > 1:
        statistics.counts = sum(gather_object([statistics.counts]))
        statistics.tokens = sum(gather_object([statistics.tokens]))


# --- tasks -----------------------------------------------------------------------------------------------------------


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
    records = {"adapted": harness.run(model, processing_class)}
    with model.disable_adapter() if base is None else nullcontext():
        records["base"] = harness.run(base or model, processing_class)
    scores = {name: read_scores(records[name]) if records[name] else {} for name in ("base", "adapted")}
    return {name: [score._asdict() for score in of.values()] for name, of in scores.items()}


def recorded_scores(recorded: dict[str, list[dict[str, Any]]]) -> dict[str, Scores]:
    """What `evaluate_tasks` returned, from the record."""
    scores = {name: [Score(**values) for values in of] for name, of in recorded.items()}
    return {name: {(score.task, score.metric): score for score in of} for name, of in scores.items()}


# --- the stage -------------------------------------------------------------------------------------------------------


class Evaluate(TrainerStage):
    """Held-out losses by domain, where the tokens of each domain go, and tasks of lm-evaluation-harness."""

    name = "evaluate"
    inputs = ("model", "eval", "chat_template")

    @classmethod
    def wanted(cls, recipe: Recipe) -> bool:
        return recipe.data.eval is not None or bool(recipe.evaluate.tasks)

    @cached_property
    def harness(self) -> Harness | None:
        """The tasks; None if the recipe names none."""
        if not self.recipe.evaluate.tasks:
            return None
        try:
            return Harness(self.recipe.evaluate)
        except InputError as error:  # a task is unknown or cannot be loaded
            raise InputError(f"evaluate.{error}") from error

    @property
    def _trained(self) -> tuple[str, dict[str, Any]]:
        """The stage that trains the result, and its own training arguments."""
        name = "post_train" if self.recipe.facts.assembles else "prepare"
        return name, getattr(self.recipe, name).sft

    @property
    def template(self) -> tuple[str, str | None]:
        """The chat template of the stage that trains the result."""
        name, sft = self._trained
        if "chat_template_path" in sft:
            return f"{name}.sft.chat_template_path", sft["chat_template_path"]
        return super().template

    def examples(self) -> Dataset | None:
        return self.context.eval_data

    def example_arguments(self, **overrides: Any) -> SFTConfig:
        """Examples are scored one by one."""
        return self.arguments(**{"packing": False, "padding_free": False, **overrides})

    def arguments(self, **overrides: Any) -> SFTConfig:
        return super().arguments(**{"chat_template_path": self.template[1], "eos_token": self._eos_token, **overrides})

    @property
    def _eos_token(self) -> str | None:
        return {**self.sft, **self._trained[1]}.get("eos_token")

    def check(self) -> None:
        _ = self.harness  # a wrong name should be known before the run
        self._tokenizer()

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer for tasks, with the chat template and the EOS token of the training."""
        tokenizer, asked = self.context.base.tokenizer, self.recipe.evaluate.apply_chat_template
        field, path = self.template
        tokenizer.chat_template = chat_template(path, field) or tokenizer.chat_template
        tokenizer.eos_token = self._eos_token or tokenizer.eos_token
        if self.recipe.evaluate.tasks:
            check_template(tokenizer, asked, "evaluate.apply_chat_template", "set sft.chat_template_path")
        return tokenizer

    def check_base(self) -> None:
        plugin = self.arguments().deepspeed_plugin
        if self.harness is not None and plugin is not None and plugin.zero_stage == 3:
            raise InputError(
                f"evaluate.tasks={self.recipe.evaluate.tasks}: one process runs them, and ZeRO-3 shards the model; "
                "leave them out, and run `moe-peft eval` on the result"
            )

    @property
    def label_mask(self) -> dict[str, list[int]] | None:
        """The experts that tokens of a label may go to, if stage 4 trained with such a mask."""
        return self.recipe.expert_map if self.recipe.masks_labels else None

    def settings(self) -> dict[str, Any]:
        section, settings = self.recipe.evaluate, super().settings()
        if not section.tasks:
            settings = {name: value for name, value in settings.items() if not name.startswith("evaluate.")}
        else:
            settings["task files"] = [hash_file(path) for path in task_files(section, apart_from=self.context.root)]
        return {**settings, "label mask": self.label_mask}

    def run(self, folder: Path) -> dict[str, Any]:
        assert self.given.model is not None
        args = self.arguments()
        model, base = self.kind.load_result(self.given.model, self.seed)
        metrics = self._losses(args, folder, model, base)
        if self.harness is not None:
            metrics["tasks"] = evaluate_tasks(self.harness, model, self._tokenizer(), base)
        return metrics

    def _losses(
        self, args: SFTConfig, folder: Path, model: PeftModel | PreTrainedModel, base: PreTrainedModel | None
    ) -> dict[str, Any]:
        """Held-out losses and routing, if there are held-out data."""
        r, data = self.recipe, self.context.eval_data
        if data is None:
            return {}
        measured = evaluate(model, data, args, self.context.base.tokenizer, r.data.label_column, base, self.label_mask)
        if args.should_save:
            self._write_page(measured, folder)
        shares = {domain: share.tolist() for domain, share in measured.shares.items()}
        health = None if self._labels_route else measured.health
        return {"loss": measured.losses, "shares": shares, "load_warning": health.warning if health else ""}

    @property
    def _labels_route(self) -> bool:
        """Whether labels ask for uneven loads."""
        return self.recipe.expert_map is not None

    def _write_page(self, measured: Evaluation, folder: Path) -> None:
        """`losses.png`, `routing.png` and `report.html`: losses beside the base's, and routing."""
        r, base = self.recipe, model_name(self.recipe.model.name_or_path)
        title, shares, health = f"{method_name(r.method)} on {base}", measured.shares, measured.health
        losses = dict(zip(("base", method_name(r.method)), measured.losses.values(), strict=True))
        lead, sections = [losses_line(losses)], [losses_section(losses, folder / "losses.png")]
        if health is not None:
            plot_shares(shares, folder / "routing.png", f"{title}: where each domain's tokens go", r.expert_map)
            lead += [load_line(health, self._labels_route), who_serves_what(shares)]
            sections += [shares_section(shares, folder / "routing.png"), load_section(health, self._labels_route)]
        facts = [f"Base: `{r.model.name_or_path}`", f"Held-out data: `{source_name(r.data.eval)}`"]
        write_page(folder / "report.html", title, list(filter(None, lead)), sections, facts)

    def describe(self, metrics: dict[str, Any]) -> str:
        return "routing.png, report.html" if metrics.get("shares") else "report.html" if "loss" in metrics else ""
