"""`moe-peft exec`: other programs, which load adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft import AutoPeftModelForCausalLM

from tests.helpers.close import near
from tests.helpers.eval_case import light, make_adapter, make_tasks, plain_scores  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light")]


def execute(*program: str, **own) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moe_peft", "exec", "--", *program]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [own.pop("path", "")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, **own)


def test_exec_reaches_children_passes_all_on_and_loads_nothing_heavy(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text("import builtins\nbuiltins.seen = True\n")
    (tmp_path / "child.py").write_text(
        "import sys\n"
        "heavy = {'torch', 'peft', 'transformers'} & set(sys.modules)\n"
        "print(sys.argv[1:], 'moe_peft' in sys.modules, heavy, seen)\n"
        "sys.exit(7)\n"
    )
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, 'child.py', *sys.argv[1:]]))\n"
    )
    own = {"cwd": tmp_path, "path": str(tmp_path / "other")}
    for program in (["parent.py"], ["python", "parent.py"], ["-m", "parent"]):
        done = execute(*program, "-m", "--help", "--", "x y", **own)
        assert done.returncode == 7, done.stderr
        assert done.stdout.strip() == "['-m', '--help', '--', 'x y'] True set() True"
    (tmp_path / "no-shebang").write_text("echo hello\n")
    (tmp_path / "no-shebang").chmod(0o755)
    wrong = {"": "name a program", "no-such-program": "no such program", "./no-shebang": "does its first line"}
    for program, message in wrong.items():
        failed = execute(*filter(None, [program]), **own)
        assert failed.returncode == 2
        assert message in failed.stderr and len(failed.stderr.splitlines()) == 1


def test_plain_lm_eval_loads_an_adapter_and_agrees(tmp_path, tokenizer):
    adapter, tasks = make_adapter(tmp_path, tokenizer), make_tasks(tmp_path / "tasks")
    # The harness's command, without its index of thousands of tasks: reading that takes longer than all else here.
    (tmp_path / "harness.py").write_text(
        "from functools import partialmethod\n"
        "from lm_eval.tasks import TaskManager\n"
        "from lm_eval.__main__ import cli_evaluate\n"
        "TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)\n"
        "cli_evaluate()\n"
    )
    models = f"pretrained={tmp_path / 'base'},peft={adapter},dtype=float32"
    done = execute(
        "harness.py", "--model", "hf", "--model_args", models, "--tasks", "toy_both,toy_text", "--device", "cpu",
        "--include_path", str(tasks), "--output_path", str(tmp_path / "plain.json"), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.glob("plain*.json")
    results = json.loads(file.read_text())["results"]
    wanted = plain_scores(AutoPeftModelForCausalLM.from_pretrained(adapter), tmp_path, ["toy_both", "toy_text"])
    assert len(wanted) == 4
    for (task, metric), value in wanted.items():
        assert results[task][f"{metric},none"] == near(value)
