"""The examples run as their docstrings say, and the demo prints only its result."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tests.helpers.warm import run_module

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(module: str, *arguments: object, **own) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **own)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of a fast demo, and what it printed where it was told of nothing but its folder."""
    folder = tmp_path_factory.mktemp("demo")
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("TRANSFORMERS_", "PYTHONWARN"))}
    return folder, run("examples.demo", "--fast", "--out", folder, env=quiet)


def test_demo_runs_every_method_and_compares(demo):
    folder, printed = demo
    for word in ("base", "LoRA", "LoRAMoE-SFT", "UpIT", "code", "prose", "arithmetic", "routing.png"):
        assert word in printed.stdout
    rows = json.loads((folder / "results.json").read_text())
    assert list(rows) == ["base", "LoRA", "LoRAMoE-SFT", "UpIT"]
    assert all(row.keys() == {"code", "prose", "arithmetic", "mean"} for row in rows.values())
    assert (folder / "upit" / "evaluate" / "routing.png").read_bytes().startswith(b"\x89PNG")


def test_demo_prints_its_own_lines_alone(demo):
    _, printed = demo
    everything = printed.stdout + printed.stderr
    assert len(everything.splitlines()) < 60
    for noise in ("Warning", "warning", "{'", "torchao", "deprecated", "Loading weights", "examples/s"):
        assert noise not in everything
    for stage in ("lora-prepare", "loramoe-sft-post_train", "upit-prepare", "upit-router_init", "upit-post_train"):
        assert re.search(rf"{stage} 100%.*steps, loss \d.*left", printed.stderr), stage
    assert "base model 100%" in printed.stderr
    assert re.match(r"LoRA, LoRAMoE-SFT and UpIT learn .*\nAbout a minute", printed.stdout)


def test_demo_ends_with_table_picture_meaning_and_a_command_that_works(demo):
    folder, printed = demo
    losses = json.loads((folder / "results.json").read_text())
    end = printed.stdout[printed.stdout.index("Held-out loss") :]
    for method, of_method in losses.items():
        assert re.search(rf"{method} .*{of_method['mean']:.3f}", end)
    picture = end[end.index("Where UpIT sends each domain's tokens") :]
    for domain in ("code", "prose", "arithmetic"):
        shares = re.search(rf"^ +{domain} (.*)$", picture, re.MULTILINE).group(1)
        assert sum(map(int, re.findall(r"\d+", shares))) == pytest.approx(100, abs=2)
    text = " ".join(picture.split())
    assert re.search(r"numbers mean nothing.* UpIT (does|and) .*\. UpIT's routers .*\. Next: ", text)
    command = printed.stdout.splitlines()[-1]
    assert "inspect" in command
    program, *arguments = shlex.split(command)
    assert shutil.which(program) or os.access(ROOT / program, os.X_OK)
    done = run_module("moe_peft", *arguments[arguments.index("inspect") :])
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "inspect" / "load.png").is_file()


def test_demo_shows_an_answer_for_each_domain(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT)
    from examples.comparison import Outcome
    from examples.outcome import show_outcome

    losses = {method: {"sums": 1.0, "mean": 1.0} for method in ("base", "LoRA", "UpIT")}
    shares = {"sums": [[0.75, 0.25]], "code": [[0.5, 0.5]]}
    answers = {"sums": ("What is [1] + 1?", "It is [bold]2."), "code": ("Write nothing.", "")}
    show_outcome(Outcome(losses, shares, Path("routing.png"), Path("adapter"), answers), Path("out"), fast=False)
    printed = capsys.readouterr().out
    assert "sums: What is [1] + 1?\nIt is [bold]2.\ncode: Write nothing.\n(an empty answer)\n" in printed
    assert "mean nothing" not in printed


def test_verbose_demo_shows_what_others_print_and_what_is_done_already(demo):
    folder, printed = demo
    verbose = run_module("examples.demo", "--fast", "--verbose", "--out", folder)
    assert verbose.returncode == 0, verbose.stderr[-3000:]
    assert "prepare: done already" in verbose.stderr and "Loading weights" in verbose.stderr
    assert verbose.stdout == printed.stdout


def test_demo_passes_errors_on(tmp_path):
    (tmp_path / "base").mkdir()
    failed = run_module("examples.demo", "--fast", "--out", tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith(f"error: {tmp_path / 'base'}: exists but is not a model folder")


@pytest.mark.parametrize(
    ("upit", "verdict"),
    [(2.90, "UpIT does best: its mean loss, 2.900, is 0.050 below LoRAMoE-SFT's."),
     (2.955, "UpIT and LoRAMoE-SFT are level: 2.955 and 2.950 differ by less than 0.01."),
     (2.98, "UpIT does not win: its mean loss, 2.980, is 0.030 above LoRAMoE-SFT's.")],
)  # fmt: skip
def test_meaning_follows_the_losses(upit, verdict, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from examples.outcome import compare_losses

    means = {"base": 3.5, "LoRA": 3.0, "LoRAMoE-SFT": 2.95, "UpIT": upit}
    assert compare_losses(means).startswith(verdict + " The base model has 3.500.")


def test_meaning_follows_the_routing(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from examples.outcome import compare_routing

    even, left, right = [0.5, 0.5], [1.0, 0.0], [0.0, 1.0]
    apart = {"code": [left, even], "prose": [even, even], "sums": [right, even]}
    assert "code and sums, which differ most, send 50% of" in compare_routing(apart)
    alike = {"code": [[0.52, 0.48]], "prose": [even], "sums": [even]}
    assert "treat all domains alike: code and prose, which differ most, share 98%" in compare_routing(alike)


def test_domains_are_the_same_for_one_seed_and_their_parts_share_nothing(tmp_path):
    for name, process in (("one", run), ("two", run_module)):  # a fresh process has another hash seed
        process("examples.toy.domains", "--out", tmp_path / name, "--train", 30, "--test", 10, "--seed", 3)
    for part in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "one" / part).read_bytes() == (tmp_path / "two" / part).read_bytes()
    train, test = (
        [json.loads(line) for line in (tmp_path / "one" / part).read_text().splitlines()]
        for part in ("train.jsonl", "test.jsonl")
    )
    assert {row["domain"] for row in train} == {row["domain"] for row in test} == {"code", "prose", "arithmetic"}
    contents = [row["messages"][-1]["content"] for row in train if row["domain"] != "arithmetic"]
    assert not {row["messages"][-1]["content"] for row in test if row["domain"] != "arithmetic"} & set(contents)


def reference_answer(question: str) -> str:
    """The rules again, from the question's words alone."""
    words = question.rstrip(".?").replace(",", "").split()
    numbers = [word for word in words if word.isdigit()]
    d = list(max(numbers, key=len)) if "Move" not in words and "each" not in words else list(numbers[-1])
    if words[0] == "Add" and "and" in words:
        a, b = map(int, numbers)
        low, high = a % 10 + b % 10, a // 10 + b // 10
        carry = int(low > 9)
        return f"{a % 10}+{b % 10}+0={low};{a // 10}+{b // 10}+{carry}={high + carry};{a + b}"
    found = {
        "Write": lambda: d[::-1],
        "Sort": lambda: sorted(d),
        "Add": lambda: [str(int(c) + int(numbers[0]))[-1] for c in d],
        "Keep": lambda: [c for c in d if c in "13579"],
        "Swap": lambda: [c for i in range(0, len(d), 2) for c in d[i : i + 2][::-1]],
        "Drop": lambda: [c for i, c in enumerate(d) if c not in d[:i]],
        "Move": lambda: d[int(numbers[0]) :] + d[: int(numbers[0])],
        "Give": lambda: (
            [str(max(map(int, d[: i + 1]))) for i in range(len(d))]
            if "maximum" in words
            else [str(sum(map(int, d[: i + 1])))[-1] for i in range(len(d))]
        ),
    }[words[0]]()
    return "".join(found) or "none"


def test_tasks_are_right_endless_and_split():
    from examples.toy.tasks import TASKS, build, documents, rows

    train, test = build(3, 600, 200)
    assert (train, test) == build(3, 600, 200) != build(4, 600, 200)
    for side in (train, test):
        assert Counter(row["domain"] for row in side) == {task: len(side) // 10 for task in TASKS}
        for row in side:
            question, answer = (message["content"] for message in row["messages"])
            assert answer == reference_answer(question), row
    asked = [{re.sub(r"[^0-9 ]", "", row["messages"][0]["content"]) for row in side} for side in (train, test)]
    sequences = [{max(digits.split(), key=len) for digits in side if digits.split()} for side in asked]
    assert not {s for s in sequences[0] & sequences[1] if len(s) > 3}  # no sequence is on both sides
    assert len(list(islice(rows(0), 5000))) == 5000
    text = next(documents(random.Random(0)))
    assert all(re.fullmatch(r"[A-I][1-3] \d+ > (\d+|none)", line) for line in text.splitlines())
