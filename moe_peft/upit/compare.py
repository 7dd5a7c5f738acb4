"""Table of several runs: method, cost and results."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers.trainer import TRAINER_STATE_NAME

from ..utils.io import atomic_write, read_json, reading
from ..utils.messages import InputError
from ..utils.model_card import card_facts
from .stage_cache import MANIFEST

Row = dict[str, Any]  # column → a number or a text; a missing number is left out


def compare(folders: Sequence[str]) -> list[Row]:
    """Return a row for each folder: a run of a recipe, or a result of `moe-peft sft` or `dpo`."""
    rows = []
    for name in folders:
        folder, source = Path(name), f"compare={name!r}"
        kind = next((kind for kind in _READERS if (folder / kind).is_file()), None)
        if kind is None:
            raise InputError(f"{source}: has no {' and no '.join(_READERS)}; name a finished run, or a result of sft")
        with reading(f"{source}: {kind}", "run it again"):
            rows.append({"folder": name, **_READERS[kind](folder, read_json(folder / kind))})
    return rows


def _of_recipe(folder: Path, manifest: dict[str, Any]) -> Row:
    recipe, stages, seconds = manifest["recipe"], manifest["stages"], manifest["seconds"]
    made = ", ".join(f"{key} {recipe['moe'][key]}" for key in ("init", "router_init") if key in recipe["moe"])
    row: Row = {"method": f"{recipe['method']}" + (f" ({made})" if made else "")}
    evaluated = stages.get("evaluate", {}).get("metrics", {})
    row |= {f"loss {domain}": float(loss) for domain, loss in evaluated.get("loss", {}).get("adapted", {}).items()}
    trained = [stage for stage in stages.values() if "steps" in stage["metrics"]]
    row["passes"] = float(sum(stage["fingerprint"]["epochs"] for stage in trained))
    row["steps"] = int(sum(stage["metrics"]["steps"] for stage in trained))
    last = trained[-1]["metrics"] if trained else {}
    if trained:
        row["trained parameters"] = int(last["trained_parameters"])
        rates = (f"{stage['fingerprint']['sft.learning_rate']:g}" for stage in trained)
        row["learning rates"] = ", ".join(rates)
    if size := evaluated.get("size") or last.get("size"):
        row |= {"parameters": int(size["total"]), "active parameters": int(size["active"])}
    spent = [seconds[name] for name in stages if name != "evaluate"]
    return row if None in spent else {**row, "seconds": round(sum(spent))}


def _of_training(folder: Path, state: dict[str, Any]) -> Row:
    """Read the last stage's log and the facts of the model card."""
    facts = " ".join(card_facts(folder).get("training", ())[-2:])
    row: Row = {"method": name[1] if (name := re.search(r"`(\w+)`", facts)) else "training"}
    log = {key: value for record in state["log_history"] for key, value in record.items()}
    row |= {key: float(value) for key, value in log.items() if key.startswith("eval_") and key.endswith("loss")}
    row |= {"passes": float(state["epoch"]), "steps": int(state["global_step"])}
    if rate := re.search(r"learning rate ([\d.e+-]+)", facts):
        row["learning rates"] = rate[1]
    return row if "train_runtime" not in log else {**row, "seconds": round(log["train_runtime"])}


_READERS = {MANIFEST: _of_recipe, TRAINER_STATE_NAME: _of_training}


def print_comparison(rows: Sequence[Row]) -> None:
    """Print the rows as a table. If it is wider than the terminal, print a column for each folder."""
    columns = _columns(rows)
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    console = Console(markup=False, emoji=False)
    for way in (cells, [list(line) for line in zip(*cells, strict=True)]):
        table = Table()
        for i, name in enumerate(way[0]):
            table.add_column(name, justify="right" if i else "left", overflow="fold")
        for line in way[1:]:
            table.add_row(*line)
        if console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width:
            break
    console.print(table)


def write_comparison(rows: Sequence[Row], path: str) -> None:
    """Write the rows as JSON or, to a .csv, as a table."""
    with atomic_write(path) as partial:
        if path.endswith(".json"):
            partial.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            return
        with partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, _columns(rows))
            writer.writeheader()
            writer.writerows(rows)


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of all rows."""
    return list(dict.fromkeys(column for row in rows for column in row))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value or ""
