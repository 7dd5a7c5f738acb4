"""Each expert alone, on tasks of lm-evaluation-harness; and the shell script that uses it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM

from examples import each_expert
from moe_peft import expert_to_lora
from moe_peft.native import export_adapter
from tests.helpers.chat_model import save_chat_model
from tests.helpers.eval_case import light, lighten_harness, make_adapter, make_tasks, plain_scores  # noqa: F401  (a fixture)
from tests.helpers.warm import programs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light")]
TASKS = ["toy_both", "toy_text"]
Scores = dict[str, dict[tuple[str, str], float]]


def printed_scores(text: str) -> Scores:
    """Way → (task, metric) → value."""
    found: Scores = {}
    for way, task, metric, value in re.findall(r"^(model|base|expert \w+): (\S+) (\S+) ([\d.]+)$", text, re.MULTILINE):
        found.setdefault(way, {})[task, metric] = float(value)
    return found


def test_each_expert_alone_is_its_lora_and_the_exports_expert(tmp_path, tokenizer, monkeypatch, capsys):
    """Independent: an expert as PEFT's LoRA adapter, evaluated by the harness."""
    adapter, tasks = make_adapter(tmp_path, tokenizer), make_tasks(tmp_path / "tasks")
    export_adapter(adapter, tmp_path / "native")

    def scores(model: Path) -> Scores:
        options = ["--tasks", *TASKS, "--include-path", str(tasks), "--limit", "8", "--each-expert"]
        monkeypatch.setattr(sys, "argv", ["each_expert", str(model), *options])
        each_expert.main()
        return printed_scores(capsys.readouterr().out)

    def dense():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    found = scores(adapter)
    expert_to_lora(AutoPeftModelForCausalLM.from_pretrained(adapter), 3, tmp_path / "lora")
    wanted = {
        "model": AutoPeftModelForCausalLM.from_pretrained(adapter),
        "base": dense(),
        "expert 3": PeftModel.from_pretrained(dense(), tmp_path / "lora"),
    }
    assert found.keys() == {"model", "base", *(f"expert {expert}" for expert in range(4))}
    for way, model in wanted.items():
        assert found[way] == pytest.approx(plain_scores(model, tmp_path, TASKS, limit=8), rel=1e-4, abs=1e-4)
    assert len({of["toy_text", "word_perplexity"] for of in found.values()}) == 6
    native = scores(tmp_path / "native")
    assert native.keys() == found.keys() - {"base"}
    for way, of_way in native.items():
        assert of_way == pytest.approx(found[way], rel=1e-4)


def test_from_the_command_line(tmp_path):
    """The example, as a user starts it: the export has the adapter's numbers."""
    script = Path(__file__).parents[2] / "examples" / "from_the_command_line.sh"
    sizes = {"BASE": str(save_chat_model(tmp_path / "chat")), "ROWS": "16 8", "STEPS": "4"}
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    environment = {**os.environ, **sizes, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with programs(tmp_path / "bin", before=lighten_harness):
        done = subprocess.run(
            ["bash", str(script), str(tmp_path / "out")], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "verified: of " in done.stdout and (tmp_path / "out" / "routing" / "load.png").is_file()
    adapter, export = (
        printed_scores((tmp_path / "out" / name).read_text()) for name in ("scores.txt", "scores-exported.txt")
    )
    assert len(export["model"]) == 6 and export["model"] == pytest.approx(adapter["model"], rel=1e-4, abs=1e-4)
    assert len({adapter[way]["short_json_text", "bits_per_byte"] for way in ("model", "base", "expert 0")}) == 3
