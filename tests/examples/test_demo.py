"""`make demo` from end to end on a tiny chat model, and what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from examples.demo import run as demo
from examples.demo.tasks import TASKS, make_rows
from moe_peft.cli import main
from moe_peft.utils.messages import InputError
from tests.helpers.chat_model import save_chat_model
from tests.helpers.models import tiny_llama

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The folder of a short demo, and what it printed, in a process of its own that is told of nothing but its size."""
    folder = tmp_path_factory.mktemp("demo")
    save_chat_model(folder / "chat")
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("TRANSFORMERS_", "PYTHONWARN"))}
    command = [sys.executable, "-m", "examples.demo", "--steps", "8", "--model", "chat", "--output", "out"]
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**quiet, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done


def test_it_goes_from_before_to_yours_in_seven_steps(shown):
    folder, done = shown
    text = " ".join(done.stdout.split())
    marks = (
        "1. Before:", "2. A LoRA of rank 8", "3. One model", "4. The same requests", "5. Where do tokens go",
        "6. Exported as a native MoE", "7. Now yours",
    )  # fmt: skip
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "Verdict: of 40 requests" in text and "then:" in text and "system prompt:" in text
    assert "of the 4 above: 4 in plain transformers" in text and "With pictures: out/report.html" in text
    for way in demo._WAYS:
        assert text.count(way) >= 2
    for name in ("answers", "routing"):
        assert (folder / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "out" / "report.html").read_text()
    assert "One model of four LoRAs: chat" in page and page.count("<img") == 2
    made = {*TASKS, "one-LoRA", "merged", "distilled", "mixture", "exported", "train.jsonl", "test.jsonl", "demo.yaml"}
    assert made <= set(os.listdir(folder / "out"))
    assert json.loads((folder / "out/mixture/adapter_config.json").read_text())["expert_names"] == [*TASKS]


def test_it_prints_its_own_lines_alone(shown):
    everything = shown[1].stdout + shown[1].stderr
    for noise in ("Warning", "warning", "{'", "torchao", "deprecated", "Loading weights", "examples/s"):
        assert noise not in everything
    assert "24/24" in shown[1].stderr  # one bar for all trainings


def test_its_yaml_mixes(shown, monkeypatch):
    folder, _ = shown
    monkeypatch.chdir(folder)
    main(["mix", "--config", "out/demo.yaml"])
    assert json.loads((folder / "out/yours/adapter_config.json").read_text())["expert_names"] == [*TASKS]


def test_it_can_be_run_again_into_its_folder(shown, monkeypatch):
    folder, _ = shown
    monkeypatch.chdir(folder)
    results = demo.run_demo(Path("out"), "chat", steps=4)
    assert (folder / "out" / "exported" / "config.json").exists() and list(results) == [*demo._WAYS]


def test_exact_answers_are_counted():
    _, rows = make_rows(2, 10)
    right = [r["completion"][0]["content"] if r["domain"] in ("json", "dates") else "no" for r in rows]
    assert demo._exact(Dataset.from_list(rows), right) == {"numbers": 0, "dates": 10, "json": 10, "sorting": 0}


def test_a_model_without_a_chat_template_is_refused(tmp_path, tokenizer):
    tiny_llama().save_pretrained(tmp_path / "base")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    with pytest.raises(InputError, match="has no chat template"):
        demo.run_demo(tmp_path / "out", str(tmp_path / "base"))
