"""The harness's results as scores, and scores as tables for the terminal and for files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.table import Table

from ..messages import one_line


class Score(NamedTuple):
    """
    One metric of one task, or of a group of tasks.

    Args:
        task: the task's name.
        metric: the metric's name, with its filter if it has one.
        value: the metric, in the metric's unit.
        stderr: its standard error; None where the harness gives none.
        shots: examples in the context; None where tasks of a group differ.
        higher_is_better: None if unknown.
        part: whether a group that has metrics itself contains the task.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    shots: int | None
    higher_is_better: bool | None
    part: bool


Scores = dict[tuple[str, str], Score]


def read_scores(results: Mapping[str, Any]) -> Scores:
    """(task, metric) → score, of what `lm_eval.evaluate` returns."""
    if not isinstance(results, Mapping) or not {"results", "group_subtasks"} <= results.keys():
        raise ValueError(f"read_scores: results={one_line(repr(results), 80)}: give what lm_eval.evaluate returns")
    with_metrics = {task for task, row in results["results"].items() if any("," in name for name in row)}
    groups = {name: children for name, children in results["group_subtasks"].items() if name in with_metrics}
    parts = {child for children in groups.values() for child in children}
    found: Scores = {}
    for task, row in results["results"].items():
        for name, value in row.items():
            metric, comma, kind = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            stderr = row.get(f"{metric}_stderr,{kind}")
            shown = metric if kind == "none" else f"{metric} ({kind})"
            found[task, shown] = Score(
                task, shown, float(value), stderr if isinstance(stderr, float) else None,
                results["n-shot"].get(task), results["higher_is_better"].get(task, {}).get(metric), task in parts,
            )  # fmt: skip
    return found


Grid = list[list[str]]  # of a table's cells; the first row is its head


def by_metric(models: Mapping[str, Scores]) -> Grid:
    """
    A row for each metric and a column for each model, with standard errors.

    Args:
        models: name → scores; the first one decides which metrics are shown.
    """
    grid = [["task", "n-shot", "metric", *models]]
    for key, score in next(iter(models.values())).items():
        shots = "" if score.shots is None else str(score.shots)
        grid.append([score.task, shots, score.metric + _arrow(score), *(_cell(of[key]) for of in models.values())])
    return grid


def by_model(models: Mapping[str, Scores]) -> Grid:
    """A row for each model and a column for each task, without the tasks of a group that has metrics itself."""
    shown = top_level(next(iter(models.values())))
    head = ["", *(f"{score.task} {score.metric}{_arrow(score)}" for score in shown)]
    return [head, *([name, *(f"{of[s.task, s.metric].value:.4f}" for s in shown)] for name, of in models.items())]


def top_level(scores: Scores) -> list[Score]:
    """The metrics of what was asked for: of a group with metrics these, not those of its tasks."""
    return [score for score in scores.values() if not score.part]


def as_table(grid: Grid, title: str = "") -> Table:
    """For the terminal."""
    table = Table(title=title)
    for name in grid[0]:
        table.add_column(name, justify="right" if name not in _WORDS else "left")
    for row in grid[1:]:
        table.add_row(*row)
    return table


def as_markdown(grid: Grid) -> str:
    marks = ["---" if name in _WORDS else "---:" for name in grid[0]]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (grid[0], marks, *grid[1:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


_WORDS = ("", "task", "n-shot", "metric")  # heads of columns that hold no scores


def _cell(score: Score) -> str:
    return f"{score.value:.4f}" + ("" if score.stderr is None else f" ± {score.stderr:.4f}")


def _arrow(score: Score) -> str:
    """Which way is better."""
    return {True: " ↑", False: " ↓", None: ""}[score.higher_is_better]
