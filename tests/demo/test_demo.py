"""`moe-peft demo` from end to end on a tiny chat model, and what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

from moe_peft.cli import main
from moe_peft.demo import run as demo
from moe_peft.demo.tasks import make_rows
from tests.helpers.chat_model import save_chat_model
from tests.helpers.models import tiny_llama

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The folder of a short demo, and what it printed, in a process of its own that is told of nothing but its size."""
    folder = tmp_path_factory.mktemp("demo")
    save_chat_model(folder / "chat")
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("TRANSFORMERS_", "PYTHONWARN"))}
    command = [sys.executable, "-m", "moe_peft", "demo", "--steps", "2", "--model", "chat", "--output", "out"]
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**quiet, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done


def test_it_goes_from_before_to_yours_in_six_steps(shown):
    folder, done = shown
    text = " ".join(done.stdout.split())
    places = [text.index(mark) for mark in ("1. Before:", "2. Training", "3. After:", "4. Who serves what? ",
                                            "5. Exported as a native MoE", "6. Now yours")]  # fmt: skip
    assert places == sorted(places)
    assert "of the 4 above: 4 in plain transformers" in text and "With pictures: out/report.html" in text
    for name in ("answers", "losses", "routing"):
        assert (folder / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "out" / "report.html").read_text()
    assert "MoE-LoRA on chat" in page and page.count("<img") == 3
    assert {"lora", "experts", "exported", "train.jsonl", "test.jsonl", "demo.yaml"} <= set(os.listdir(folder / "out"))


def test_it_prints_its_own_lines_alone(shown):
    everything = shown[1].stdout + shown[1].stderr
    for noise in ("Warning", "warning", "{'", "torchao", "deprecated", "Loading weights", "examples/s"):
        assert noise not in everything
    assert "4/4" in shown[1].stderr  # one bar for both trainings


def test_its_yaml_trains(shown, monkeypatch):
    folder, _ = shown
    monkeypatch.chdir(folder)
    settings = yaml.safe_load((folder / "out" / "demo.yaml").read_text())
    assert settings["num_experts"] == 4 and settings["max_steps"] == 2
    main(["sft", "--config", "out/demo.yaml"])
    assert json.loads((folder / "out" / "yours" / "adapter_config.json").read_text())["peft_type"] == "MOE_LORA"


def test_it_can_be_run_again_into_its_folder(shown, monkeypatch):
    folder, _ = shown
    monkeypatch.chdir(folder)
    results = demo.run_demo(Path("out"), "chat", steps=1)
    assert (folder / "out" / "exported" / "config.json").exists() and list(results) == ["base", "LoRA", "experts"]


def test_exact_answers_are_counted():
    _, rows = make_rows(2, 20)
    right = [r["completion"][0]["content"] if r["domain"] in ("json", "dates") else "no" for r in rows]
    assert demo._exact(Dataset.from_list(rows), right) == {"numbers": 0, "dates": 20, "json": 20, "sorting": 0}


def test_a_model_without_a_chat_template_is_refused(tmp_path, tokenizer, capsys):
    tiny_llama().save_pretrained(tmp_path / "base")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--model", str(tmp_path / "base"), "--output", str(tmp_path / "out")])
    assert ended.value.code == 2 and "has no chat template" in capsys.readouterr().err
