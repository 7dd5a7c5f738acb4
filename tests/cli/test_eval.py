"""`moe-peft eval` and `moe-peft exec`: the harness's own numbers, for complete models, single experts and exports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_peft import allow_experts, expert_to_lora, replace_routers
from moe_peft.cli import main
from moe_peft.evaluation import EvalSettings, Harness, TaskSettings, evaluate_model
from moe_peft.models.introspection import base_model
from moe_peft.native import export_adapter, load_routers
from tests.helpers.chat_model import save_chat_model
from tests.helpers.close import near
from tests.helpers.eval_case import CHOICES, light, lighten_command, make_adapter, make_tasks  # noqa: F401  (a fixture)
from tests.helpers.warm import programs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light")]
TASKS = "toy_both,toy_text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    """With `base`, `adapter`, its export `native`, `tasks`."""
    folder = tmp_path_factory.mktemp("eval")
    export_adapter(make_adapter(folder, tokenizer), folder / "native")
    make_tasks(folder / "tasks")
    return folder


def evaluate(folder: Path, output: Path, *arguments: str, tasks: str = TASKS) -> dict:
    """`moe-peft eval` in this process; model → (task, metric) → (value, standard error)."""
    given = ["--tasks", tasks, "--include-path", str(folder / "tasks"), "--output", str(output)]
    main(["eval", *given, *map(str, arguments)])
    found = json.loads((output / "results.json").read_text())["scores"]
    return {
        name: {(s["task"], s["metric"]): (s["value"], s["stderr"]) for s in scores} for name, scores in found.items()
    }


def plain(model, folder: Path, tasks: str = TASKS, **own) -> dict:
    """The same numbers, by the harness's own means."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder / "base"), batch_size=4)
    manager = TaskManager(include_path=str(folder / "tasks"))
    results = simple_evaluate(lm, tasks=tasks.split(","), task_manager=manager, **own)["results"]
    found = {}
    for task, row in results.items():
        for name, value in row.items():
            metric, comma, _ = name.partition(",")
            if comma and not metric.endswith("_stderr"):
                stderr = row[f"{metric}_stderr,none"]
                found[task, metric] = (value, None if stderr == "N/A" else stderr)
    return found


def assert_same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for key, (value, stderr) in wanted.items():
        assert found[key][0] == near(value), key
        assert found[key][1] == (None if stderr is None else near(stderr)), key


def adapter_of(folder: Path):
    return AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")


def dense(path: Path):
    return AutoModelForCausalLM.from_pretrained(path)


def test_adapter_beside_its_base_has_the_harness_numbers(folder, tmp_path, capsys):
    found = evaluate(folder, tmp_path / "out", "--model", folder / "adapter", "--num-fewshot", 2, "--limit", 10)
    assert list(found) == ["model", "base"]
    assert_same(found["model"], plain(adapter_of(folder), folder, num_fewshot=2, limit=10))
    assert_same(found["base"], plain(dense(folder / "base"), folder, num_fewshot=2, limit=10))
    assert found["model"] != found["base"]
    printed = capsys.readouterr().out
    value, stderr = found["model"]["toy_both", "acc"]
    assert "toy_both, 2-shot: acc ↑" in printed and f"{value:.4f} ± {stderr:.4f}" in printed
    assert f"{found['model']['toy_text', 'word_perplexity'][0]:.4f}" in printed and "word_perplexity ↓" in printed
    about = json.loads((tmp_path / "out" / "results.json").read_text())["about"]
    assert about["n-samples"]["toy_a"] == {"original": 24, "effective": 10} and about["dtype"] == "float32"


def test_each_expert_alone_is_its_lora_and_the_exports_expert(folder, tmp_path, capsys):
    """Independent: an expert as PEFT's LoRA adapter, evaluated by the harness."""
    every = ("--each-expert", "--limit", 8)
    found = evaluate(folder, tmp_path / "out", "--model", folder / "adapter", *every)
    assert list(found) == ["model", *(f"expert {i}" for i in range(4)), "base"]
    for expert in (0, 3):
        expert_to_lora(adapter_of(folder), expert, tmp_path / f"lora-{expert}")
        alone = PeftModel.from_pretrained(dense(folder / "base"), tmp_path / f"lora-{expert}")
        assert_same(found[f"expert {expert}"], plain(alone, folder, limit=8))
    assert len({scores["toy_text", "word_perplexity"] for scores in found.values()}) == 6
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "expert 1" in line]  # a model is a row
    assert f"{found['expert 1']['toy_text', 'word_perplexity'][0]:.4f}" in row
    native = evaluate(folder, tmp_path / "native", "--model", folder / "native", *every)
    assert list(native) == ["model", *(f"expert {i}" for i in range(4))]
    for name, scores in native.items():
        assert_same(scores, found[name])


def test_native_moe_beside_a_base(folder, tmp_path):
    """Independent: the adapter that it was exported from."""
    adapter = evaluate(folder, tmp_path / "one", "--model", folder / "adapter")
    native = evaluate(folder, tmp_path / "two", "--model", folder / "native", "--base", folder / "base")
    assert list(native) == ["model", "base"]
    for name, scores in native.items():
        assert_same(scores, adapter[name])


@pytest.mark.parametrize("kind", ["adapter", "native"])
def test_masked_experts(kind, folder, tmp_path):
    found = evaluate(folder, tmp_path / "out", "--model", folder / kind, "--experts", "3,0", tasks="toy_text")
    model = adapter_of(folder) if kind == "adapter" else dense(folder / "native")
    with allow_experts(model, [0, 3]):
        wanted = plain(model, folder, "toy_text")
    assert_same(found["model"], wanted)
    assert found["model"] != plain(model, folder, "toy_text")
    alone = evaluate(
        folder, tmp_path / "one", "--model", folder / kind, "--experts", "2", "--each-expert", tasks="toy_text"
    )
    assert alone["model"] == alone["expert 2"] and "expert 0" not in alone


def test_experts_have_their_names_however_they_are_given(folder, tmp_path):
    named = tmp_path / "named"
    shutil.copytree(folder / "adapter", named)
    config = json.loads((named / "adapter_config.json").read_text())
    (named / "adapter_config.json").write_text(json.dumps({**config, "expert_names": ["a", "b", "1", "d"]}))
    given = ("--experts", "0,1,b", "--each-expert", "--no-base", "--limit", 4)
    found = evaluate(folder, tmp_path / "out", "--model", named, *given, tasks="toy_text")
    assert list(found) == ["model", "expert a", "expert 1", "expert b"]  # a name comes before a number
    about = json.loads((tmp_path / "out" / "results.json").read_text())["about"]
    assert about["experts"] == ["a", "1", "b"]


def test_a_native_moe_keeps_its_own_routers(folder, tmp_path, tokenizer):
    model = dense(folder / "native")
    replace_routers(model, "mlp", seed=3)
    model.save_pretrained(tmp_path / "native")
    tokenizer.save_pretrained(tmp_path / "native")
    found = evaluate(folder, tmp_path / "out", "--model", tmp_path / "native", tasks="toy_text")
    again = dense(tmp_path / "native")
    load_routers(again, tmp_path / "native")
    assert list(found) == ["model"]
    assert_same(found["model"], plain(again, folder, "toy_text"))


def test_quantized_base_another_base_and_seeds(folder, tmp_path, tokenizer):
    four = '{"load_in_4bit": true, "bnb_4bit_compute_dtype": "float32"}'
    quantized = evaluate(
        folder, tmp_path / "q", "--model", folder / "adapter", "--quantization", four, tasks="toy_text"
    )
    whole = evaluate(folder, tmp_path / "w", "--model", folder / "adapter", tasks="toy_text")
    key = ("toy_text", "word_perplexity")
    for name in ("model", "base"):
        assert 1e-5 < abs(quantized[name][key][0] / whole[name][key][0] - 1) < 0.5
    assert json.loads((tmp_path / "q" / "results.json").read_text())["about"]["quantization"].endswith("load_in_4bit")
    other = make_adapter(tmp_path / "other", tokenizer, seed=1).parent / "base"
    moved = evaluate(folder, tmp_path / "m", "--model", folder / "adapter", "--base", other, tasks="toy_text")
    assert_same(moved["base"], plain(dense(other), folder, "toy_text"))
    assert_same(moved["model"], plain(PeftModel.from_pretrained(dense(other), folder / "adapter"), folder, "toy_text"))
    drawn = [
        evaluate(
            folder, tmp_path / "s", "--model", folder / "base", "--seed", seed, "--num-fewshot", 3, tasks="toy_a,toy_b"
        )["model"]
        for seed in (5, 5, 6)
    ]
    assert drawn[0] == drawn[1]
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    wanted = plain(dense(folder / "base"), folder, "toy_a,toy_b", num_fewshot=3, **dict.fromkeys(seeds, 6))
    assert_same(drawn[2], wanted)


def test_chat_template(folder, tmp_path, tokenizer):
    model = tmp_path / "chat"
    dense(folder / "base").save_pretrained(model)
    tokenizer.save_pretrained(model)
    path = model / "chat_template.jinja"
    path.write_text(
        "{% for m in messages %}w7 {{ m['content'] }} w8{% endfor %}{% if add_generation_prompt %} w9{% endif %}"
    )
    found = evaluate(folder, tmp_path / "out", "--model", model, "--apply-chat-template", tasks="toy_text,toy_a")
    raw = evaluate(folder, tmp_path / "raw", "--model", model, tasks="toy_text,toy_a")
    assert found.keys() == raw.keys() and found != raw


def test_experts_that_not_all_layers_have_are_named(caplog):
    from peft import get_peft_model

    from moe_peft import MoELoraConfig
    from moe_peft.evaluation.evaluator import _alone
    from tests.helpers.models import tiny_llama

    config = MoELoraConfig(num_experts=4, task_type="CAUSAL_LM", num_experts_pattern={r"layers\.0\.mlp": 3})
    model = get_peft_model(tiny_llama(hidden=16, vocab=64), config)
    assert _alone(model, [2]) == [2] and not caplog.records
    assert _alone(model, None) == [0, 1, 2]
    assert "layers have 3 to 4 experts; only the first 3" in caplog.text


def test_tasks_may_be_named_one_by_one():
    from moe_peft.cli.eval import parser

    given = parser("eval").parse_args(["--model", "m", "--tasks", "a", "b", "--tasks", "c"])
    assert given.tasks == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "toy_aa"], "tasks='toy_aa': no such task; did you mean 'toy_a'"),
        (["--tasks", "toy_both,toy_a"], "Duplicate task 'toy_a'"),
        (["--tasks", ","], "tasks=[]: must have at least 1 item"),
        (["--model", "{folder}/nowhere"], "--model='{folder}/nowhere'"),
        (["--base", "{folder}/nowhere"], "base='{folder}/nowhere'"),
        (["--include-path", "nowhere"], "--include-path='nowhere': no such folder"),
        (["--model", "{folder}/native", "--base", "{folder}/base", "--no-base"], "give one of the two"),
        (["--batch-size", "1000000"], "must be a whole number from 1 to 999999"),
        (["--seed", "4294967296"], "seed=4294967296: must be at most"),
        (["--batch-size", "0"], "--batch-size=0: must be"),
        (["--batch-size", "automatic"], "--batch-size='automatic': must be"),
        (["--batch-size", "auto:x"], "--batch-size='auto:x': must be"),
        (["--limit", "inf"], "limit='inf': must be a valid number"),
        (["--limit", "nan"], "limit='nan': must be"),
        (["--limit", "2.7"], "limit=2.7: must be"),
        (["--apply-chat-template", "False"], "--apply-chat-template='False': "),
        (["--num-fewshot", "24"], "tasks='toy_a': "),
        (["--limit", "0"], "limit=0: must be"),
        (["--num-fewshot", "-1"], "--num-fewshot=-1: must be at least 0"),
        (["--experts", "4"], "--experts: experts [4]: the model has experts 0 to 3"),
        (["--experts", "9" * 20], "the model has experts 0 to 3"),
        (["--experts", "0,4"], "the model has experts 0 to 3"),
        (["--experts", "one"], "experts='one': the model's experts have no names; give an index"),
        (["--experts", "0,9", "--each-expert"], "experts 0 to 3"),
        (["--quantization", "[4]"], "quantization=[4]: must be a mapping"),
        (["--quantization", '{{"load_in_5bit": true}}'], "--quantization.load_in_5bit: unknown key; did you mean"),
        (["--quantization", "{{}}"], "give load_in_4bit or load_in_8bit"),
        (["--dtype", "float8"], "--dtype='float8'"),
        (["--output", "{folder}/base/config.json"], "not a folder"),
        (["--output", "{folder}/base/config.json/deeper"], "not a folder"),
        (["--model", "{folder}/base", "--each-expert"], "has no router"),
        (["--model", "{folder}/tasks"], "--model='{folder}/tasks'"),
    ],
)
def test_wrong_input_ends_with_one_line_and_code_2(arguments, message, folder, tmp_path, capsys):
    given = ["--model", str(folder / "adapter"), "--include-path", str(folder / "tasks")]
    given += [] if "--tasks" in arguments else ["--tasks", "toy_a"]
    given += ["--output", str(tmp_path / "out"), *(argument.format(folder=folder) for argument in arguments)]
    with pytest.raises(SystemExit) as end:
        main(["eval", *given])
    assert end.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.format(folder=folder) in last and last.startswith("error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("metric: acc, aggregation: mean", "metric: nothing", "KeyError: None"),
        ("test_split: test", "test_split: tset", "KeyError: 'tset'"),
        ("dataset_path: json\n", "", "TypeError: expected str"),
        (
            "metric_list:",
            "filter_list: [{{name: f, filter: [{{function: regex, regex_pattern: '['}}]}}]\nmetric_list:",
            "unterminated character set",
        ),
    ],
)
def test_what_fails_in_a_task_is_one_line(old, new, message, folder, tmp_path):
    text = CHOICES.replace(old, new).format(name="bad", data=folder / "tasks" / "a.jsonl")
    if "filter_list" in text:  # it is applied when the model has answered
        text = text.replace("multiple_choice", "generate_until").replace("metric: acc", "metric: exact_match")
        text = text.replace("doc_to_choice: choices\n", "")
        text += "generation_kwargs: {max_gen_toks: 2, until: []}\n"
    (tmp_path / "bad.yaml").write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    with pytest.raises(ValueError, match=r"bad\.yaml': [A-Za-z]*(Error|error): ") as raised:
        Harness(TaskSettings(tasks=[str(tmp_path / "bad.yaml")], limit=1)).run(dense(folder / "base"), tokenizer)
    assert message in str(raised.value)


def test_errors_of_the_model_are_left_as_they_are(folder, monkeypatch):
    model = dense(folder / "base")
    monkeypatch.setattr(model, "forward", lambda *args, **own: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        Harness(TaskSettings(tasks=[str(folder / "tasks" / "text.yaml")], limit=1)).run(
            model, AutoTokenizer.from_pretrained(folder / "base")
        )


def test_logits_that_are_nan_give_no_score(folder):
    """Tasks of several choices would, of any logits."""
    model = dense(folder / "base")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    for task in sorted((folder / "tasks").glob("*.yaml"))[:2]:
        with pytest.raises(ValueError, match="dtype: the model's logits are NaN; use bfloat16 or float32"):
            Harness(TaskSettings(tasks=[str(task)], limit=2)).run(model, AutoTokenizer.from_pretrained(folder / "base"))


@pytest.mark.parametrize("kind", ["dense", "adapter"])
def test_answers_of_logits_that_are_nan_have_no_score(kind, folder, tmp_path):
    text = CHOICES.format(name="answers", data=folder / "tasks" / "a.jsonl").replace("doc_to_choice: choices\n", "")
    text = text.replace("multiple_choice", "generate_until").replace("metric: acc", "metric: exact_match")
    (tmp_path / "answers.yaml").write_text(text + "generation_kwargs: {max_gen_toks: 2, until: []}\n")
    model = dense(folder / "base") if kind == "dense" else adapter_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    harness = Harness(TaskSettings(tasks=[str(tmp_path / "answers.yaml")], limit=1))
    harness.run(model, tokenizer)
    with torch.no_grad():
        base_model(model).model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="dtype: the model's logits are NaN"):
        harness.run(model, tokenizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--base", "nowhere"], "--base='nowhere'"), (["--base", "{bare}", "--apply-chat-template"], "chat template")],
)
def test_a_base_to_compare_with_is_looked_at_before_anything_runs(arguments, message, folder, tmp_path, monkeypatch):
    def run(*args: Any) -> None:
        raise AssertionError("an evaluation ran")

    monkeypatch.setattr(Harness, "run", run)
    shutil.copytree(folder / "native", tmp_path / "native")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "native")
    given = [argument.format(bare=folder / "base") for argument in arguments]
    with pytest.raises(ValueError, match=message):
        evaluate_model(EvalSettings(
            model=str(tmp_path / "native"), tasks=[str(folder / "tasks/a.yaml")], apply_chat_template=len(given) > 2,
            output=str(tmp_path / "out"), base=given[1],
        ))  # fmt: skip


@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_hides_the_harness_bars(quiet, folder, tmp_path, capsys, loud):
    evaluate(folder, tmp_path / "out", "--model", folder / "adapter", "--limit", 4, *["--quiet"][: int(quiet)])
    shown = capsys.readouterr()
    assert "toy_a" in shown.out and ("%|" in shown.err) is not quiet


def test_a_task_without_rows_says_so(folder, tmp_path, tokenizer):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.yaml").write_text(CHOICES.format(name="toy_empty", data=tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match=r"empty\.yaml': .*no rows"):
        Harness(TaskSettings(tasks=[str(tmp_path / "empty.yaml")])).run(dense(folder / "base"), tokenizer)


def test_groups_and_patterns_reach_the_harness_own_tasks(folder, tmp_path, monkeypatch):
    """A folder instead of the harness's thousands of tasks."""
    import lm_eval.tasks.manager as manager

    monkeypatch.undo()  # `light` leaves the harness's own tasks out
    for name in ("own", "mine"):
        (tmp_path / name).mkdir()
        data = folder / "tasks" / "a.jsonl"
        (tmp_path / name / "task.yaml").write_text(CHOICES.format(name=name, data=data))
    (tmp_path / "mine" / "group.yaml").write_text("group: suite\ntask: [toy_mine, toy_own]\n")
    (tmp_path / "mine" / "wrong.yaml").write_text("group: wrong\ntask: [toy_mine, nowhere]\n")
    looked = []
    monkeypatch.setattr(manager, "__file__", str(tmp_path / "own" / "manager.py"))
    original = manager.TaskManager.__init__

    def init(self, include_path=None, include_defaults=True):
        looked.append(include_defaults)
        original(self, include_path=include_path, include_defaults=include_defaults)

    monkeypatch.setattr(manager.TaskManager, "__init__", init)
    for names, tasks, wanted in (
        (["toy_mine"], {"toy_mine"}, [False]),
        (["suite"], {"toy_mine", "toy_own"}, [False, True]),
        (["toy_*"], {"toy_mine", "toy_own"}, [True]),
    ):
        looked.clear()
        found = Harness(TaskSettings(tasks=names, include_path=str(tmp_path / "mine"))).loaded["tasks"]
        assert found.keys() == tasks and looked == wanted
    with pytest.raises(ValueError, match=r"tasks='wrong': TypeError: "):
        Harness(TaskSettings(tasks=["wrong"], include_path=str(tmp_path / "mine")))


def test_files_go_into_the_folder_that_is_named_and_no_other_is_touched(folder, tmp_path, monkeypatch):
    out, other = tmp_path / "out", tmp_path / "out.partial" / "kept"
    other.mkdir(parents=True)
    out.mkdir()
    monkeypatch.chdir(out)
    common = ("--model", folder / "adapter", "--no-base", "--limit", 2)
    evaluate(folder, Path("."), *common, "--each-expert", tasks="toy_a")
    evaluate(folder, out, *common, tasks="toy_a")
    assert {path.name for path in out.iterdir()} == {"results.json"} and other.is_dir()


@pytest.mark.parametrize("name", ["results.json", "notes.txt"])
def test_what_no_evaluation_wrote_is_refused_before_any_work_and_stays(name, folder, tmp_path, capsys):
    (tmp_path / name).write_text('{"scores": 1}')
    with pytest.raises(SystemExit) as end:
        main(["eval", "--model", str(folder / "adapter"), "--tasks", "toy_a", "--output", str(tmp_path)])
    assert end.value.code == 2 and "is not empty; choose another" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == '{"scores": 1}'


def test_one_evaluation_per_folder(folder, tmp_path, capsys):
    with FileLock(tmp_path / ".lock"), pytest.raises(SystemExit):
        main(["eval", "--model", str(folder / "adapter"), "--tasks", "toy_a", "--output", str(tmp_path)])
    assert "another process is writing it; wait for it" in capsys.readouterr().err


def test_without_the_harness_the_extra_is_named(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(SystemExit) as end:
        main(["eval", "--model", str(folder / "adapter"), "--tasks", "toy_a"])
    assert end.value.code == 2
    assert "pip install '.[eval]'" in capsys.readouterr().err


# --- exec -----------------------------------------------------------------------------------------------------------


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


def test_plain_lm_eval_loads_an_adapter_and_agrees(folder, tmp_path):
    ours = evaluate(folder, tmp_path / "ours", "--model", folder / "adapter", "--no-base", "--batch-size", 1)
    models = f"pretrained={folder / 'base'},peft={folder / 'adapter'},dtype=float32"
    # The harness's command, without its index of thousands of tasks: reading that takes longer than all else here.
    (tmp_path / "harness.py").write_text(
        "from functools import partialmethod\n"
        "from lm_eval.tasks import TaskManager\n"
        "from lm_eval.__main__ import cli_evaluate\n"
        "TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)\n"
        "cli_evaluate()\n"
    )
    done = execute(
        "harness.py", "--model", "hf", "--model_args", models, "--tasks", TASKS, "--device", "cpu", "--include_path",
        str(folder / "tasks"), "--output_path", str(tmp_path / "plain.json"), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.glob("plain*.json")
    results = json.loads(file.read_text())["results"]
    for (task, metric), (value, stderr) in ours["model"].items():
        assert results[task][f"{metric},none"] == near(value)
        if stderr is not None:
            assert results[task][f"{metric}_stderr,none"] == near(stderr)


# --- all of it ------------------------------------------------------------------------------------------------------


def test_from_the_command_line(tmp_path):
    """The example, as a user starts it: the export has the adapter's numbers."""
    script = Path(__file__).parents[2] / "examples" / "from_the_command_line.sh"
    sizes = {"BASE": str(save_chat_model(tmp_path / "chat")), "ROWS": "16 8", "STEPS": "4"}
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    environment = {**os.environ, **sizes, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with programs(tmp_path / "bin", before=lighten_command):
        done = subprocess.run(
            ["bash", str(script), str(tmp_path / "out")], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "verified: of " in done.stdout and "expert 0" in done.stdout
    assert (tmp_path / "out" / "routing" / "load.png").is_file()
    adapter, export = (
        json.loads((tmp_path / "out" / name / "results.json").read_text())["scores"]
        for name in ("evaluation", "evaluation-exported")
    )
    found = {(score["task"], score["metric"]): score["value"] for score in export["model"]}
    wanted = {(score["task"], score["metric"]): score["value"] for score in adapter["model"]}
    assert len(found) == 6 and found == near(wanted)
    bits = {scores[-1]["value"] for scores in (adapter["model"], adapter["base"], adapter["expert 0"])}
    assert len(bits) == 3 and all(score["metric"] in ("acc", "bits_per_byte") for score in adapter["model"])
