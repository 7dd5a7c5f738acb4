"""The examples run as their docstrings say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_demo_runs_every_method_and_compares(tmp_path):
    out = run(EXAMPLES / "demo.py", "--fast", "--out", tmp_path)
    for word in ("base", "LoRA", "LoRAMoE-SFT", "UpIT", "code", "prose", "arithmetic", "routing.png"):
        assert word in out
    rows = json.loads((tmp_path / "results.json").read_text())
    assert list(rows) == ["base", "LoRA", "LoRAMoE-SFT", "UpIT"]
    assert all(row.keys() == {"code", "prose", "arithmetic", "mean"} for row in rows.values())
    assert (tmp_path / "upit" / "evaluate" / "routing.png").read_bytes().startswith(b"\x89PNG")


def test_domains_are_the_same_for_one_seed_and_their_parts_share_nothing(tmp_path):
    for name in ("one", "two"):
        run(EXAMPLES / "domains.py", "--out", tmp_path / name, "--train", 30, "--test", 10, "--seed", 3)
    for part in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "one" / part).read_bytes() == (tmp_path / "two" / part).read_bytes()
    train, test = (
        [json.loads(line) for line in (tmp_path / "one" / part).read_text().splitlines()]
        for part in ("train.jsonl", "test.jsonl")
    )
    assert {row["domain"] for row in train} == {row["domain"] for row in test} == {"code", "prose", "arithmetic"}
    contents = [row["messages"][-1]["content"] for row in train if row["domain"] != "arithmetic"]
    assert not {row["messages"][-1]["content"] for row in test if row["domain"] != "arithmetic"} & set(contents)
