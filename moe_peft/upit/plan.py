"""Plan of a run: its training stages and their cost, computed without loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table

from ..models.model_size import ModelSize, model_size
from ..training.estimate import COLUMNS, MEMORY_LINE, Memory, count_rows, gib, memory, training_line
from ..training.trainable import on_quantized
from .pipeline import UpIT
from .stages import PostTrain, TrainingStage


@dataclass(frozen=True)
class StagePlan:
    """
    Plan of one stage. `memory` is an estimate; `training` is a line with learning rate, schedule and context; `moe` is
    the MoE's size, for the stage that trains all of it; `advice` is further text.
    """

    name: str
    epochs: float
    steps: int
    tokens: int
    trainable: int
    memory: Memory
    training: str
    moe: ModelSize | None = None
    advice: str = ""


def plan(pipeline: UpIT) -> list[StagePlan]:
    """
    Return the plans of the stages that train.

    Steps are exact unless there are more than some 500 rows and packing or truncation to `max_length` changes their
    number, or stage 3's buckets differ in size. Tokens are estimated from the mean length of about 500 rows.
    """
    r = pipeline.recipe
    # The machine of a plan may lack the run's accelerator.
    overrides = {} if torch.accelerator.is_available() else {"bf16": False, "fp16": False, "use_cpu": True}
    pipeline.join_processes(**overrides)
    processes = PartialState().num_processes
    data = pipeline.context.train_data
    pipeline.check(weights=False, **overrides)
    base, quantization = pipeline.context.base, r.model.quantization
    plans = []
    for stage in pipeline.stages:
        if not isinstance(stage, TrainingStage) or not stage.epochs:
            continue
        args, model = stage.example_arguments(**overrides), stage.planned(base.empty())
        rows = count_rows(data, base.tokenizer, args)
        needed = memory(on_quantized(model) if quantization else model, args, quantization)
        plans.append(
            StagePlan(
                stage.name,
                stage.epochs,
                stage.steps(rows.count, processes),
                round(stage.epochs * rows.count * rows.length),
                sum(p.numel() for p in model.parameters() if p.requires_grad),
                needed,
                training_line(args),
                model_size(model) if isinstance(stage, PostTrain) else None,
                stage.advice(rows.count, processes),
            )
        )
    return plans


def print_plan(pipeline: UpIT) -> None:
    """Print the stages, their steps, tokens and memory, and the number of examples."""
    plans = {stage_plan.name: stage_plan for stage_plan in plan(pipeline)}
    if not PartialState().is_main_process:
        return
    console = Console(markup=False, emoji=False)
    say = partial(console.print, highlight=False, soft_wrap=True)
    r = pipeline.recipe
    title = f"{r.method}: {len(pipeline.context.train_data):,} examples, {r.num_train_epochs:g} passes, seed {r.seed}"
    table = Table("stage", title=title)
    for column in ("passes", *COLUMNS):
        table.add_column(column, justify="right")
    for stage in pipeline.stages:
        cells: tuple[str, ...] = ()
        if p := plans.get(stage.name):
            cells = (f"{p.epochs:.3g}", f"{p.steps:,}", f"{p.tokens:,}", f"{p.trainable:,}", gib(p.memory.total))
        table.add_row(stage.name, *cells)
    console.print(table)
    if pipeline.root.exists():
        for name, outlook in pipeline.outlook().items():
            say(f"{name}: {outlook}")
    for p in plans.values():
        say(f"{p.name}: {p.memory}")
        if p.advice:
            say(f"{p.name}: {p.advice}")
    say(MEMORY_LINE)
    for training in dict.fromkeys(p.training for p in plans.values()):
        say(f"{', '.join(p.name for p in plans.values() if p.training == training)}: {training}")
    for p in plans.values():
        if p.moe is not None:
            say(f"MoE: {p.moe}")
    say(f"result: {pipeline.result}")
