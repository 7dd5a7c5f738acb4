"""Tasks of lm-evaluation-harness in a recipe's last stage."""

from __future__ import annotations

import json
import logging

import pytest
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_peft.evaluation import Harness, TaskSettings, read_scores
from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit.summary import print_summary
from tests.helpers.close import near
from tests.helpers.eval_case import light, make_tasks  # noqa: F401  (a fixture)
from tests.helpers.upit_case import make_case, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light")]


@pytest.fixture
def case(tmp_path, tokenizer):
    tasks = make_tasks(tmp_path / "tasks")
    evaluate = {"tasks": ["toy_both", "toy_text"], "include_path": str(tasks), "num_fewshot": 1, "limit": 8}
    settings = make_case(tmp_path, tokenizer)
    del settings["prepare"], settings["router_init"]
    return {**settings, "method": "loramoe_pt", "num_train_epochs": 1, "evaluate": evaluate}


def scores_of(model, case) -> dict:
    """The same tasks on a model loaded from its folder."""
    settings = TaskSettings(**case["evaluate"])
    tokenizer = AutoTokenizer.from_pretrained(case["model"]["name_or_path"])
    scores = read_scores(Harness(settings).run(model.eval(), tokenizer))
    return {key: score.value for key, score in scores.items()}


def recorded(pipeline: UpIT, name: str) -> dict:
    manifest = json.loads((pipeline.root / "manifest.json").read_text())
    scores = manifest["stages"]["evaluate"]["metrics"]["tasks"][name]
    return {(score["task"], score["metric"]): score["value"] for score in scores}


def done_again(case, folder, caplog, **settings) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "moe_peft"):
        run(case, folder, redo=True, **settings)
    return [record.message.split(":")[0] for record in caplog.records if "done again" in record.message]


def test_scores_of_the_adapter_and_its_base(case, tmp_path, capsys, caplog):
    pipeline = run(case, tmp_path)
    adapter = AutoPeftModelForCausalLM.from_pretrained(pipeline.result)
    base = AutoModelForCausalLM.from_pretrained(case["model"]["name_or_path"])
    assert recorded(pipeline, "adapted") == near(scores_of(adapter, case))
    assert recorded(pipeline, "base") == near(scores_of(base, case))
    assert recorded(pipeline, "base") != recorded(pipeline, "adapted")
    metrics = pipeline.records["evaluate"]["metrics"]
    assert metrics["loss"]["adapted"]["mean"] < metrics["loss"]["base"]["mean"]
    print_summary(pipeline)
    printed = capsys.readouterr().out
    assert (
        "word_perplexity ↓" in printed
        and f"{recorded(pipeline, 'adapted')['toy_text', 'word_perplexity']:.4f}" in printed
    )

    assert done_again(case, tmp_path, caplog) == []
    case["evaluate"] = {**case["evaluate"], "tasks": ["toy_a"]}
    assert done_again(case, tmp_path, caplog) == ["evaluate"]
    data = tmp_path / "tasks" / "a.jsonl"
    data.write_text("\n".join(reversed(data.read_text().splitlines())))
    assert done_again(case, tmp_path, caplog) == ["evaluate"]
    del case["evaluate"]
    assert done_again(case, tmp_path, caplog) == ["evaluate"]


def test_native_moe_without_held_out_data(case, tmp_path, capsys):
    data = {key: value for key, value in case["data"].items() if key != "eval"}
    adapter = case.pop("adapter")
    pipeline = run(case, tmp_path, mode="ffn", method="upcycle_pt", data=data, moe={"top_k": adapter["top_k"]})
    model = AutoModelForCausalLM.from_pretrained(pipeline.result)
    base = AutoModelForCausalLM.from_pretrained(case["model"]["name_or_path"])
    assert recorded(pipeline, "adapted") == near(scores_of(model, case))
    assert recorded(pipeline, "base") == near(scores_of(base, case))
    assert "loss" not in pipeline.records["evaluate"]["metrics"]
    print_summary(pipeline)
    assert "toy_both" in capsys.readouterr().out


def test_settings_of_tasks_do_not_count_without_them(case):
    stage = UpIT(recipe_from_dict({**case, "evaluate": {}})).stages[-1]
    assert stage.name == "evaluate" and not any(name.startswith("evaluate.") for name in stage.settings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ["toy_bo"]}, "evaluate.tasks='toy_bo': no such task; did you mean 'toy_b'"),
        ({"include_path": "nowhere"}, "evaluate.include_path='nowhere': no such folder"),
        ({"num_fewshot": -1}, "evaluate.num_fewshot=-1: must be at least 0"),
        ({"batch_size": "many"}, "evaluate.batch_size='many': must be"),
        ({"limit": 0}, "evaluate.limit=0: must be above 0"),
        ({"few_shot": 1}, "evaluate.few_shot: unknown key"),
    ],
)
def test_wrong_settings_end_a_run_before_it_begins(settings, message, case, tmp_path):
    with pytest.raises(ValueError, match="evaluate") as error:
        run(case, tmp_path, evaluate={**case["evaluate"], **settings})
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
