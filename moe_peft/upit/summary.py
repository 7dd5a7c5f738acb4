"""What a run will need and do, found without loading weights, and what it did: as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table

from ..evaluation.results import as_table, by_metric
from ..models.model_size import ModelSize
from ..routing.statistics import verdict_line
from ..training.estimate import Launch, Memory, base_dtype, memory, rows_and_length, training_line
from .pipeline import UpIT
from .stages import TrainingStage

# --- plan ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StagePlan:
    """
    One stage. `memory` is an estimate for one process; `training` names the rate, the schedule and the context;
    `moe` is the size of the MoE, of the stage that trains the whole of it.
    """

    name: str
    epochs: float
    steps: int
    tokens: int
    trainable: int
    memory: Memory
    training: str
    moe: ModelSize | None = None


def plan(pipeline: UpIT, launch: Launch | None = None) -> list[StagePlan]:
    """
    The stages of a run that train.

    Steps are exact unless packing or truncation to `max_length` changes the number of rows, or stage 3's buckets differ
    in size; tokens come from the mean length of up to 500 rows.

    Args:
        launch: how the run will be launched; None: as this process was.

    Raises:
        ValueError: the recipe, its base or its data do not fit together.
    """
    r = pipeline.recipe
    # A plan may be made without the launcher and the accelerator that the run will have.
    own: dict[str, Any] = {"fsdp": None}
    if not torch.accelerator.is_available():
        own |= {"bf16": False, "fp16": False, "use_cpu": True}
    pipeline.join_processes(**own)
    launch = launch or Launch(PartialState().num_processes)
    data = pipeline.context.train_data
    pipeline.check(weights=False, **own)
    tokenizer, empty = pipeline.context.base.tokenizer, pipeline.context.base.empty()
    found = []
    for stage in pipeline.stages:
        if not isinstance(stage, TrainingStage):
            continue
        args = stage.example_arguments(**own)
        rows, length = rows_and_length(data, tokenizer, args)
        steps = stage.steps(rows, launch.processes)
        sizes = stage.sizes(empty)
        half = _half_precision(stage)
        needed = memory(
            empty, args, length, sizes.held, sizes.trained, half=half, dtype=r.dtype,
            quantization=r.model.quantization, launch=launch,
            trained=base_dtype(empty, r.dtype) if r.mode == "ffn" else torch.float32,
        )  # fmt: skip
        tokens = round(stage.epochs * rows * length)
        found.append(
            StagePlan(stage.name, stage.epochs, steps, tokens, sizes.trained, needed, training_line(args), sizes.moe)
        )
    return found


def _half_precision(stage: TrainingStage) -> bool:
    """Whether the stage will train in mixed precision; TRL's default is bf16."""
    return bool(stage.sft.get("bf16", True) or stage.sft.get("fp16"))


# --- summary ---------------------------------------------------------------------------------------------------------

# What the similarity of experts is, by the recipe's mode.
_ALIKE = {
    "lora": "similarity of experts: cosine of their updates B A",
    "ffn": "similarity of experts: cosine of their differences from the base's FFNs",
}


def print_summary(pipeline: UpIT) -> None:
    """
    One table of all stages, with the similarity of the experts after each; the held-out losses and the scores on tasks;
    the MoE's size; layers whose load is not healthy, and what to try; and where the result is. From the main process.
    """
    if not PartialState().is_main_process:
        return
    console = Console(markup=False, emoji=False)
    records = pipeline.records
    columns = ("stage", "steps", "loss", "what it made", "similarity of experts")
    recipe = pipeline.recipe
    table = Table(*columns, title=f"{recipe.method}: {pipeline.root}", caption=_ALIKE.get(recipe.mode))
    for stage in pipeline.stages:
        metrics = records[stage.name]["metrics"]
        loss = metrics.get("loss")
        table.add_row(
            stage.name,
            str(int(metrics["steps"])) if "steps" in metrics else "",
            f"{loss:.3f}" if isinstance(loss, float) else "",
            stage.describe(metrics),
            _similarity(metrics),
        )
    console.print(table)
    for stage in pipeline.stages:
        losses = stage.losses(records[stage.name]["metrics"])
        if losses is not None:
            console.print(_loss_table(losses))
        scores = stage.scores(records[stage.name]["metrics"])
        if scores is not None:
            console.print(as_table(by_metric(scores)))
    every = {name: record["metrics"] for name, record in records.items()}
    if "size" in every.get("post_train", {}):
        console.print(f"MoE: {ModelSize(**every['post_train']['size'])}", highlight=False, soft_wrap=True)
    verdict = _verdict(every)
    if verdict:
        console.print(f"load of the experts: {verdict}", style="yellow", highlight=False, soft_wrap=True)
    console.print(f"{pipeline.result.name}: {pipeline.result}", highlight=False, soft_wrap=True)


def _similarity(metrics: dict[str, Any]) -> str:
    """The mean and the range of the cosines of any two experts."""
    found = metrics.get("similarity")
    return f"{found['mean']:.2f} ({found['smallest']:.2f} to {found['largest']:.2f})" if found else ""


def _verdict(metrics: dict[str, dict[str, Any]]) -> str:
    """What is not healthy about the layers' load on held-out data or, without these, at the end of training."""
    if "warnings" in metrics.get("evaluate", {}):
        return verdict_line(metrics["evaluate"]["warnings"])
    log = metrics.get("post_train", {}).get("history", [])
    return verdict_line([line for record in log for line in record.get("load_warnings", [])])


def _loss_table(losses: dict[str, dict[str, float]]) -> Table:
    domains = list(next(reversed(losses.values())))
    table = Table("held-out loss", *domains)
    for who, row in losses.items():
        table.add_row(who, *(f"{row[domain]:.3f}" for domain in domains))
    return table


def print_plan(pipeline: UpIT, launch: Launch | None = None) -> None:
    """The stages, what they will take, and how many examples there are."""
    stages = plan(pipeline, launch)
    if not PartialState().is_main_process:
        return
    console = Console(markup=False, emoji=False)
    r = pipeline.recipe
    title = f"{r.method}: {len(pipeline.context.train_data):,} examples, {r.num_train_epochs:g} passes, seed {r.seed}"
    table = Table("stage", title=title)
    for column in ("passes", "steps", "tokens", "trainable parameters", "memory per process, about"):
        table.add_column(column, justify="right")
    planned = {stage.name: stage for stage in stages}
    for name in (stage.name for stage in pipeline.stages):
        stage = planned.get(name)
        if stage is None:
            table.add_row(name)
            continue
        cells = (f"{stage.epochs:.3g}", f"{stage.steps:,}", f"{stage.tokens:,}", f"{stage.trainable:,}")
        table.add_row(name, *cells, f"{stage.memory.total / 2**30:.2f} GiB")
    console.print(table)
    if pipeline.root.exists():
        for name, what in pipeline.outlook().items():
            console.print(f"{name}: {what}", highlight=False, markup=False, soft_wrap=True)
    for stage in stages:
        console.print(f"{stage.name}: {stage.memory}", highlight=False, soft_wrap=True)
    kinds = {stage.training: [other.name for other in stages if other.training == stage.training] for stage in stages}
    for kind, names in kinds.items():
        console.print(f"{', '.join(names)}: {kind}", highlight=False, soft_wrap=True)
    for stage in stages:
        if stage.moe is not None:
            console.print(f"MoE: {stage.moe}", highlight=False, soft_wrap=True)
    console.print(f"result: {pipeline.result}", highlight=False, soft_wrap=True)
