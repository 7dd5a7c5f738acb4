"""Exported models in programs without this package: the table of results is what a run gives."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from compatibility import serving

MODULES = {"transformers": "transformers", "llama.cpp": "xllamacpp", "mlx-lm": "mlx_lm"}


@pytest.mark.slow
def test_engines_compute_what_the_table_says(tmp_path, monkeypatch):
    """The first rows anew: plain models, and where engines differ."""
    engines = [engine for engine in serving.ENGINES if importlib.util.find_spec(MODULES[engine])]
    settings = ["default", "RoPE scaling (`llama3`)", "sliding window", "odd number of fine-grained experts"]
    arguments = ["--settings", *settings, "--engines", *engines, "--out", str(tmp_path / "table.md")]
    monkeypatch.setattr(sys, "argv", ["serving", *arguments])
    serving.main()
    actual, expected = rows((tmp_path / "table.md").read_text()), rows(serving.RESULT.read_text())
    assert [row["setting"] for row in actual] == settings
    for row in actual:
        (written,) = (other for other in expected if other["setting"] == row["setting"])
        assert {name: written[name] for name in row} == row


def test_the_page_names_the_families_that_mlx_computes():
    default = rows(serving.RESULT.read_text())[0]["mlx-lm"]
    exact = re.search(r"exact\*\*: ([^;]+)", default)[1]
    wrong = re.search(r"wrong by [\d.]+\*\*: (.+)$", default)[1]
    page = " ".join((serving.ROOT / "docs/serving.md").read_text().split())
    said = re.search(r"mlx-lm is exact in the default setting for ([^*]+), \*\*wrong for (\w+),", page)
    assert [said[1].replace(" and ", ", "), said[2]] == [exact, wrong]


def rows(text: str) -> list[dict[str, str]]:
    """The table's rows, by the names of its columns."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
