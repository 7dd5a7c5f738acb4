"""Tables that pages show are those that the programs print: the same names, columns and form, with shown numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo.run import _WAYS, Result, _score_table
from examples.demo.tasks import TASKS
from moe_peft.cli.mix import print_held_out
from moe_peft.combine.gate_report import GateReport
from moe_peft.combine.held_out import HeldOut

ROOT = Path(__file__).parents[1]


def shown(page: str, beginning: str) -> list[str]:
    """Lines of the page's first block without a language that has this text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return next(block.splitlines() for language, block in blocks if not language and beginning in block)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_readme_shows_the_demos_table():
    lines = shown("README.md", "held-out requests")
    counts = {way: dict(zip(TASKS, map(int, of), strict=False)) for way, *of in filter(None, map(cells, lines))}
    assert [*counts] == [*_WAYS]
    console = Console(markup=False, emoji=False, highlight=False, width=80)
    with console.capture() as printed:
        console.print(_score_table({way: Result([], exact) for way, exact in counts.items()}))
    assert printed.get().splitlines() == lines


def test_combine_shows_what_mix_prints(monkeypatch, capsys):
    lines = shown("docs/combine.md", "Right answers")
    of_answers, of_tokens = ([*map(cells, part)] for part in (lines[: lines.index("…")], lines[lines.index("…") :]))
    columns = [cell.strip() for cell in lines[2].split("┃")[2:-1]]
    right = {
        way.removesuffix(" alone"): {column: float(value[:-1]) / 100 for column, value in zip(columns, of, strict=True)}
        for way, *of in filter(None, of_answers)
    }
    rows, picked, reached = {}, {}, {}
    for label, number, share, first in filter(None, of_tokens):
        rows[label], picked[label] = int(number), float(share[:-1]) / 100
        reached[label] = [float(first[:-1]) / 100] * (len(columns) - 1)
    monkeypatch.setenv("COLUMNS", "80")
    print_held_out(HeldOut([*rows], rows, {}, right, picked, 0.0, None, reached, []))
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    tables = [line for line in lines if line.startswith(tuple("┏┃┡│└")) or line.startswith("  " * 10)]
    assert printed == tables


@pytest.mark.parametrize("beginning", ["Each text, by the gate", "base          20 "])
def test_serve_many_shows_what_pick_prints(beginning: str):
    lines = shown("docs/serve-many.md", beginning)
    start = next(i for i, line in enumerate(lines) if line.startswith("requests for"))
    picked: dict[str, dict[str, int]] = {}
    for line in lines[start + 1 :]:
        if not (found := re.match(r"(\w+) +(\d+) +([\d.]+)% +(?:([\d.]+)% +)?([\d.]+)%(?: +(\w+))?$", line)):
            break
        name, number, kept, to_base, elsewhere, most = found.groups()
        counts = {"base": to_base, most or "another": elsewhere, name: kept}
        picked[name] = {to: round(int(number) * float(share) / 100) for to, share in counts.items() if share}
        picked[name] = {to: count for to, count in picked[name].items() if count}
    report = GateReport(0.5, picked, [], [])
    assert report.lines() == lines[start : start + 1 + len(picked)] and len(picked) > 2


def test_readme_shows_the_log_of_the_tutorial():
    logged = re.findall(r"^# (\{'loss'.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(logged) == 3 and logged == shown("docs/tutorial.md", "'aux_loss'")[:3]
