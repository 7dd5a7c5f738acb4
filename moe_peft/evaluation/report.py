"""Scores of a model, its base and its experts: printed, and as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..analysis.figures import FORMATS, plot_expert_scores
from ..analysis.files import ReportFiles
from .scores import Grid, Scores, as_markdown, as_table, by_metric, by_model, top_level

RESULTS = ReportFiles(
    "results.json",
    frozenset({"about", "scores"}),
    frozenset({"results.md", *(f"experts.{kind}" for kind in FORMATS)}),
)
EXPERT = "expert "  # begins the name of an expert that was evaluated alone


def _grids(found: Mapping[str, Scores]) -> dict[str, Grid]:
    """Title → table: the models beside each other and, if experts were evaluated alone, these by task."""
    models = {name: scores for name, scores in found.items() if not name.startswith(EXPERT)}
    grids = {"": by_metric(models)}
    return grids if len(models) == len(found) else {**grids, "Each expert alone": by_model(found)}


def write_results(found: Mapping[str, Scores], about: Mapping[str, Any], folder: Path, suffix: str) -> list[Path]:
    """The files, which replace an earlier run's when all are whole. The folder is held."""
    with RESULTS.replaced(folder) as partial:
        written = _write(found, about, partial, suffix)
    return [folder / name for name in written]


def _write(found: Mapping[str, Scores], about: Mapping[str, Any], folder: Path, suffix: str) -> list[str]:
    """The files' names."""
    scores = {name: [score._asdict() for score in of_model.values()] for name, of_model in found.items()}
    text = json.dumps({"about": about, "scores": scores}, indent=2, default=str)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    tables = [f"{title}:\n\n" * bool(title) + as_markdown(grid) for title, grid in _grids(found).items()]
    (folder / "results.md").write_text("\n".join([f"`{about['model']}`\n", *tables]), encoding="utf-8")
    written = ["results.json", "results.md"]
    if any(name.startswith(EXPERT) for name in found):
        written.append(f"experts{suffix}")
        shown = top_level(found["model"])
        values = {name: [of_model[s.task, s.metric].value for s in shown] for name, of_model in found.items()}
        tasks, better = [f"{s.task}\n{s.metric}" for s in shown], [s.higher_is_better for s in shown]
        plot_expert_scores(values, tasks, better, folder / written[-1])
    return written


def print_results(found: Mapping[str, Scores], about: Mapping[str, Any], files: Sequence[Path]) -> None:
    console = Console(markup=False, emoji=False)
    lines = [f"{about['model']}: {about['class']}, {about['dtype']}, {about['quantization'] or 'not quantized'}"]
    lines += [f"base: {about['base']}"] if "base" in about else []
    lines += [f"experts: {', '.join(map(str, about['experts']))} only"] if about["experts"] is not None else []
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for title, grid in _grids(found).items():
        console.print(as_table(grid, title))
    for path in files:
        console.print(str(path), highlight=False, soft_wrap=True)
