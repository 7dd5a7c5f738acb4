"""Headline numbers of README and pages are those of the ledgers, rounded once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def text(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


def records(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


def request_gate(set_name: str, way: str, rows: int, key: str = "exact") -> str:
    """A mean over seeds, in per cent."""
    found = [
        record[key]
        for record in records("studies/results/request_gate.jsonl")
        if (record["set"], record["way"], record.get("rows")) == (set_name, way, rows)
    ]
    assert len(found) == 3
    return f"{100 * sum(found) / 3:.0f} %"


def test_picking_and_mixing():
    own, picked = request_gate("domains", "own", 0), request_gate("domains", "picked, 8 layers, base", 240)
    token, to_base = request_gate("domains", "token, tokens", 240), "picked, 8 layers, base"
    general = request_gate("domains", to_base, 240, "to_base")
    assert (
        f"on eight look-alike tasks {picked} right where each task's own LoRA has {own} and a mixture by token "
        f"{token}; {general} of general requests go to the base"
    ) in text("README.md")
    short = [request_gate("short", "picked, 8 layers, base", 150), request_gate("short", "own", 0)]
    assert f"| {short[0]} (own: {short[1]}) | {picked} (own: {own}) |" in text("docs/combine.md")


def test_speed_on_a_gpu():
    """Each cell of the page's table, and what README says of it."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for record in records("benchmarks/results/gpu.jsonl"):
        for task, of_task in record["cells"]:
            if "lora" in of_task:
                cells[record["name"].rsplit(", ", 1)[1], task] = of_task
    page = (ROOT / "docs/speed.md").read_text()
    shown = re.findall(r"^\| (bfloat16|4-bit) (?:NF4 )?\| ([a-z ]+) \| (.+) \| (.+) \|$", page, re.M)
    assert {(base, task): {"output": a, "projection": b} for base, task, a, b in shown} == {
        key: {name: of_task[name] for name in ("output", "projection")} for key, of_task in cells.items()
    }
    step, peak = cells["bfloat16", "training step"], cells["bfloat16", "peak memory"]
    values = [of[name].split(" ")[0] for name in ("output", "projection") for of in (step, peak)]
    assert (
        'a training step takes {} times LoRA\'s, its peak {} times; with `mixing="projection"` {} and {}'.format(
            *values
        )
    ) in text("README.md")


def test_generation_by_a_compiled_pass():
    page = (ROOT / "benchmarks/results/generate.md").read_text()
    measured = dict(re.findall(r"^\| (\w+, [a-z ]+) \| ([\d.]+) \|", page, re.M))
    for shown, method in (("base alone", "base"), ("LoRA", "lora"), ("MoE, `output`", "output"),
                          ("MoE, `projection`", "projection")):  # fmt: skip
        cells = [f"{float(measured[f'{method}, {way}']):.1f}" for way in ("as usual", "static and compiled")]
        assert f"| {shown} | {' | '.join(cells)} |" in text("docs/speed.md")
