"""Scores of a model, its base and its experts: printed, and as files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..analysis.figures import plot_expert_scores
from .scores import Grid, Scores, as_markdown, as_table, by_metric, by_model, top_level

EXPERT = "expert "  # begins the name of an expert that was evaluated alone


def _grids(found: Mapping[str, Scores]) -> dict[str, Grid]:
    """Title → table: the models beside each other and, if experts were evaluated alone, these by task."""
    models = {name: scores for name, scores in found.items() if not name.startswith(EXPERT)}
    grids = {"": by_metric(models)}
    return grids if len(models) == len(found) else {**grids, "Each expert alone": by_model(found)}


def write_results(found: Mapping[str, Scores], about: Mapping[str, Any], folder: Path, suffix: str) -> list[Path]:
    """The files, in a temporary folder until all are whole."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    scores = {name: [score._asdict() for score in of_model.values()] for name, of_model in found.items()}
    text = json.dumps({"about": about, "scores": scores}, indent=2, default=str)
    (partial / "results.json").write_text(text + "\n", encoding="utf-8")
    tables = [f"{title}:\n\n" * bool(title) + as_markdown(grid) for title, grid in _grids(found).items()]
    (partial / "results.md").write_text("\n".join([f"`{about['model']}`\n", *tables]), encoding="utf-8")
    written = ["results.json", "results.md"]
    if any(name.startswith(EXPERT) for name in found):
        written.append(f"experts{suffix}")
        shown = top_level(found["model"])
        values = {name: [of_model[s.task, s.metric].value for s in shown] for name, of_model in found.items()}
        tasks, better = [f"{s.task}\n{s.metric}" for s in shown], [s.higher_is_better for s in shown]
        plot_expert_scores(values, tasks, better, partial / written[-1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in written:
        (partial / name).replace(folder / name)
    shutil.rmtree(partial)
    return [folder / name for name in written]


def print_results(found: Mapping[str, Scores], about: Mapping[str, Any], files: Sequence[Path]) -> None:
    console = Console()
    lines = [f"{about['model']}: {about['class']}, {about['dtype']}, {about['quantization'] or 'not quantized'}"]
    lines += [f"base: {about['base']}"] if "base" in about else []
    lines += [f"experts: {', '.join(map(str, about['experts']))} only"] if about["experts"] is not None else []
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for title, grid in _grids(found).items():
        console.print(as_table(grid, title))
    for path in files:
        console.print(str(path), highlight=False, soft_wrap=True)
