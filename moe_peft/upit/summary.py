"""What a run will need and do, found without loading weights, and what it did: as tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table

from ..evaluation.results import as_table, by_metric
from ..models.model_size import ModelSize, model_size
from ..training.estimate import (
    COLUMNS,
    Launch,
    Measured,
    Memory,
    count_rows,
    duration,
    gib,
    measured_steps,
    memory,
    memory_line,
    training_line,
)
from ..training.trainable import on_quantized
from .evaluate import recorded_scores
from .pipeline import UpIT
from .stages import PostTrain, TrainingStage

# --- plan ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StagePlan:
    """
    One stage. `memory` is an estimate for one process; `training` names the rate, the schedule and the context;
    `moe` is the size of the MoE, of the stage that trains all of it; `measured` is what a step took, if some were run;
    `advice` is what else there is to say.
    """

    name: str
    epochs: float
    steps: int
    tokens: int
    trainable: int
    memory: Memory
    training: str
    moe: ModelSize | None = None
    measured: Measured | None = None
    advice: str = ""


def plan(pipeline: UpIT, launch: Launch | None = None, timed: bool = False) -> list[StagePlan]:
    """
    The stages of a run that train.

    Steps are exact unless packing or truncation to `max_length` changes the number of rows, or stage 3's buckets differ
    in size; tokens come from the mean length of up to 500 rows.

    Args:
        launch: how the run will be launched; None: as this process was.
        timed: whether to load the base and measure a few steps of each stage, which are thrown away.

    Raises:
        ValueError: the recipe, its base or its data do not fit together.
    """
    r = pipeline.recipe
    # A plan may be made on a machine without the accelerator that the run will have.
    overrides = {} if torch.accelerator.is_available() else {"bf16": False, "fp16": False, "use_cpu": True}
    pipeline.join_processes(**overrides)
    launch = launch or Launch(PartialState().num_processes)
    data = pipeline.context.train_data
    pipeline.check(weights=False, **overrides)
    base, quantization = pipeline.context.base, r.model.quantization
    plans = []
    for stage in pipeline.stages:
        if not isinstance(stage, TrainingStage) or not stage.epochs:
            continue
        args, model = stage.example_arguments(**overrides), stage.planned(base.empty())
        rows = count_rows(data, base.tokenizer, args)
        needed = memory(on_quantized(model) if quantization else model, args, quantization=quantization, launch=launch)
        steps, measured = stage.steps(rows.count, launch.processes), None
        if timed:
            trained = stage.planned(base.load())
            measured = measured_steps(partial(stage.planned_trainer, trained), args, data)
        plans.append(
            StagePlan(
                stage.name,
                stage.epochs,
                steps,
                round(stage.epochs * rows.count * rows.length),
                sum(p.numel() for p in model.parameters() if p.requires_grad),
                needed,
                training_line(args),
                model_size(model) if isinstance(stage, PostTrain) else None,
                measured,
                stage.advice(rows.count, launch.processes),
            )
        )
    return plans


# --- summary ---------------------------------------------------------------------------------------------------------


def print_summary(pipeline: UpIT) -> None:
    """
    One table of all stages, with the time of those done now and the similarity of the experts after each; the held-out
    losses and the scores on tasks; the MoE's size; what is wrong with the load, and what to try; and where the result
    is. From the main process.
    """
    if not PartialState().is_main_process:
        return
    console = Console(markup=False, emoji=False)
    say = partial(console.print, highlight=False, soft_wrap=True)
    recipe, metrics = pipeline.recipe, {name: record["metrics"] for name, record in pipeline.records.items()}
    columns = ("stage", "steps", "loss", "time", "what it made", "similarity of experts")
    caption = f"similarity of experts: cosine of {pipeline.context.kind.compared}"
    table = Table(*columns, title=f"{recipe.method}: {pipeline.root}", caption=caption)
    for stage in pipeline.stages:
        measured = metrics[stage.name]
        steps, loss = measured.get("steps"), measured.get("loss")
        table.add_row(
            stage.name,
            "" if steps is None else f"{steps:.0f}",
            f"{loss:.3f}" if isinstance(loss, float) else "",
            duration(pipeline.seconds[stage.name]) if stage.name in pipeline.seconds else "",
            stage.describe(measured),
            _similarity(measured),
        )
    console.print(table)
    evaluated = metrics.get("evaluate", {})
    if "loss" in evaluated:
        console.print(_loss_table(evaluated["loss"]))
    if "tasks" in evaluated:
        console.print(as_table(by_metric(recorded_scores(evaluated["tasks"]))))
    if "size" in metrics.get("post_train", {}):
        say(f"MoE: {ModelSize(**metrics['post_train']['size'])}")
    if warning := _load_warning(metrics):
        say(f"load of the experts: {warning}", style="yellow")
    say(f"{pipeline.result.name}: {pipeline.result}")


def _similarity(metrics: dict[str, Any]) -> str:
    """The mean and the range of the cosines of any two experts."""
    cosines = metrics.get("similarity")
    return f"{cosines['mean']:.2f} ({cosines['smallest']:.2f} to {cosines['largest']:.2f})" if cosines else ""


def _load_warning(metrics: dict[str, dict[str, Any]]) -> str:
    """What is wrong with the load on held-out data or, without these, at the end of training."""
    if "load_warning" in metrics.get("evaluate", {}):
        return metrics["evaluate"]["load_warning"]
    log = metrics.get("post_train", {}).get("history", [])
    return next((record["load_warning"] for record in log if record.get("load_warning")), "")


def _loss_table(losses: dict[str, dict[str, float]]) -> Table:
    domains = list(next(reversed(losses.values())))
    table = Table("held-out loss", *domains)
    for model, row in losses.items():
        table.add_row(model, *(f"{row[domain]:.3f}" for domain in domains))
    return table


def print_plan(pipeline: UpIT, launch: Launch | None = None, timed: bool = False) -> None:
    """The stages, what they will take, and how many examples there are."""
    memory_said = memory_line()  # before models are loaded
    plans = {stage_plan.name: stage_plan for stage_plan in plan(pipeline, launch, timed)}
    if not PartialState().is_main_process:
        return
    console = Console(markup=False, emoji=False)
    say = partial(console.print, highlight=False, soft_wrap=True)
    r = pipeline.recipe
    title = f"{r.method}: {len(pipeline.context.train_data):,} examples, {r.num_train_epochs:g} passes, seed {r.seed}"
    table = Table("stage", title=title)
    for column in ("passes", *(COLUMNS if timed else COLUMNS[:-2])):
        table.add_column(column, justify="right")
    for stage in pipeline.stages:
        cells: tuple[str, ...] = ()
        if p := plans.get(stage.name):
            cells = (f"{p.epochs:.3g}", f"{p.steps:,}", f"{p.tokens:,}", f"{p.trainable:,}", gib(p.memory.total))
            if p.measured is not None:
                cells += (gib(p.measured.peak), duration(p.steps * p.measured.seconds))
        table.add_row(stage.name, *cells)
    console.print(table)
    if pipeline.root.exists():
        for name, outlook in pipeline.outlook().items():
            say(f"{name}: {outlook}")
    for p in plans.values():
        say(f"{p.name}: {p.memory}")
        if p.advice:
            say(f"{p.name}: {p.advice}")
    say(memory_said)
    for training in dict.fromkeys(p.training for p in plans.values()):
        say(f"{', '.join(p.name for p in plans.values() if p.training == training)}: {training}")
    for p in plans.values():
        if p.moe is not None:
            say(f"MoE: {p.moe}")
    say(f"result: {pipeline.result}")
