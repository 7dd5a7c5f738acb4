"""Scores of a model, its base and its experts, read from the harness's results, and a table of the scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.table import Table

RESULTS = "results.json"  # file in an evaluation's folder


class Score(NamedTuple):
    """
    One metric of one task, or of a group of tasks.

    Args:
        task: the task's name.
        metric: the metric's name, with its filter if it has one.
        value: the metric, in the metric's unit.
        stderr: its standard error; None if the harness gives none.
        shots: examples in the context; None if the tasks of a group differ.
        higher_is_better: None if unknown.

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
    ... )
    ```
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    shots: int | None
    higher_is_better: bool | None


Scores = dict[tuple[str, str], Score]


def read_scores(results: Mapping[str, Any]) -> Scores:
    """
    Read the scores from the result of `lm_eval.evaluate`.

    Args:
        results: the harness's results.

    Returns:
        (task, metric) → score, such as `("arc_easy", "acc")`.

    Example:

    ```python
    >>> from moe_peft.evaluation import read_scores
    >>> results = {
    ...     "results": {"arc_easy": {"acc,none": 0.5, "acc_stderr,none": 0.1}},
    ...     "n-shot": {"arc_easy": 0},
    ...     "higher_is_better": {"arc_easy": {"acc": True}},
    ... }
    >>> accuracy = read_scores(results)["arc_easy", "acc"].value
    ```
    """
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
                results["n-shot"].get(task), results["higher_is_better"].get(task, {}).get(metric),
            )  # fmt: skip
    return scores


_MOST_COLUMNS = 4  # more models are rows, to fit a terminal


def as_table(models: Mapping[str, Scores]) -> Table:
    """
    Return a table of each metric of each model, with standard errors.

    Args:
        models: name → scores; the first model sets the metrics to show.
    """
    rows = [["", *models]]
    for key, score in next(iter(models.values())).items():
        better = {True: " ↑", False: " ↓", None: ""}[score.higher_is_better]
        shots = f", {score.shots}-shot" if score.shots else ""
        rows.append([f"{score.task}{shots}: {score.metric}{better}", *(_cell(of[key]) for of in models.values())])
    if len(models) > _MOST_COLUMNS:
        rows = [list(column) for column in zip(*rows, strict=True)]
    table = Table()
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if i else "left")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _cell(score: Score) -> str:
    return f"{score.value:.4f}" + ("" if score.stderr is None else f" ± {score.stderr:.4f}")
