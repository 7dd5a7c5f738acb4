"""What a run did, as tables."""

from __future__ import annotations

from functools import partial
from typing import Any

from accelerate import PartialState
from rich.console import Console
from rich.table import Table

from ..evaluation.results import as_table
from ..models.model_size import ModelSize
from .evaluate import recorded_scores
from .pipeline import UpIT


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
            _duration(pipeline.seconds[stage.name]) if stage.name in pipeline.seconds else "",
            stage.describe(measured),
            _similarity(measured),
        )
    console.print(table)
    evaluated = metrics.get("evaluate", {})
    if "loss" in evaluated:
        console.print(_loss_table(evaluated["loss"]))
    if "tasks" in evaluated:
        console.print(as_table(recorded_scores(evaluated["tasks"])))
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


def _duration(seconds: float) -> str:
    """A time in words: `42 s`, `7 min`, `2 h 05 min`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
