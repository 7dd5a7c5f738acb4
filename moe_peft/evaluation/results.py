"""The harness's results as scores of a model, its base and its experts; scores as tables, printed and in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ..analysis.figures import FORMATS, plot_expert_scores
from ..analysis.routing_report import ReportFiles
from ..utils.io import write_json

# --- scores ----------------------------------------------------------------------------------------------------------


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

    Example:

    ```python
    >>> from moe_peft.evaluation import Score
    >>> score = Score(
    ...     "arc_easy",
    ...     "acc",
    ...     0.5,
    ...     stderr=0.1,
    ...     shots=0,
    ...     higher_is_better=True,
    ...     part=False,
    ... )
    ```
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
    """
    The scores of what `lm_eval.evaluate` returns.

    Args:
        results: the harness's results.

    Returns:
        (task, metric) → score, such as `("arc_easy", "acc")`.

    Example:

    ```python
    >>> from moe_peft.evaluation import read_scores
    >>> results = {
    ...     "results": {"arc_easy": {"acc,none": 0.5, "acc_stderr,none": 0.1}},
    ...     "group_subtasks": {},
    ...     "n-shot": {"arc_easy": 0},
    ...     "higher_is_better": {"arc_easy": {"acc": True}},
    ... }
    >>> accuracy = read_scores(results)["arc_easy", "acc"].value
    ```
    """
    with_metrics = {task for task, row in results["results"].items() if any("," in name for name in row)}
    groups = {name: children for name, children in results["group_subtasks"].items() if name in with_metrics}
    parts = {child for children in groups.values() for child in children}
    scores: Scores = {}
    for task, row in results["results"].items():
        for name, value in row.items():
            metric, comma, kind = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            stderr = row.get(f"{metric}_stderr,{kind}")
            filtered = metric if kind == "none" else f"{metric} ({kind})"
            scores[task, filtered] = Score(
                task, filtered, float(value), stderr if isinstance(stderr, float) else None,
                results["n-shot"].get(task), results["higher_is_better"].get(task, {}).get(metric), task in parts,
            )  # fmt: skip
    return scores


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


# --- report ----------------------------------------------------------------------------------------------------------

RESULTS = ReportFiles(
    "results.json",
    frozenset({"about", "scores"}),
    frozenset({"results.md", *(f"experts.{kind}" for kind in FORMATS)}),
)
EXPERT = "expert "  # begins the name of an expert that was evaluated alone


def _grids(scores: Mapping[str, Scores]) -> dict[str, Grid]:
    """Title → table: the models beside each other and, if experts were evaluated alone, these by task."""
    models = {name: of_model for name, of_model in scores.items() if not name.startswith(EXPERT)}
    grids = {"": by_metric(models)}
    return grids if len(models) == len(scores) else {**grids, "Each expert alone": by_model(scores)}


def write_results(scores: Mapping[str, Scores], about: Mapping[str, Any], folder: Path, suffix: str) -> list[Path]:
    """Write the files, which replace an earlier run's when all are written; returns their paths."""
    with RESULTS.replaced(folder) as partial:
        rows = {name: [score._asdict() for score in of_model.values()] for name, of_model in scores.items()}
        write_json(partial / "results.json", {"about": about, "scores": rows})
        tables = [f"{title}:\n\n" * bool(title) + as_markdown(grid) for title, grid in _grids(scores).items()]
        (partial / "results.md").write_text("\n".join([f"`{about['model']}`\n", *tables]), encoding="utf-8")
        files = [folder / "results.json", folder / "results.md"]
        if any(name.startswith(EXPERT) for name in scores):
            files.append(folder / f"experts{suffix}")
            columns = top_level(scores["model"])
            values = {name: [of_model[s.task, s.metric].value for s in columns] for name, of_model in scores.items()}
            tasks, better = [f"{s.task}\n{s.metric}" for s in columns], [s.higher_is_better for s in columns]
            plot_expert_scores(values, tasks, better, partial / files[-1].name)
    return files


def print_results(scores: Mapping[str, Scores], about: Mapping[str, Any], files: Sequence[Path]) -> None:
    console = Console(markup=False, emoji=False)
    lines = [f"{about['model']}: {about['class']}, {about['dtype']}, {about['quantization'] or 'not quantized'}"]
    lines += [f"base: {about['base']}"] if "base" in about else []
    lines += [f"experts: {', '.join(map(str, about['experts']))} only"] if about["experts"] is not None else []
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for title, grid in _grids(scores).items():
        console.print(as_table(grid, title))
    for path in files:
        console.print(str(path), highlight=False, soft_wrap=True)
