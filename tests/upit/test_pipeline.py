"""The pipeline: stages, presets, what a changed setting repeats, given experts, several processes, the command line."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import sys
import types
import weakref
from dataclasses import asdict
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from moe_peft.adapter.layers import MoELoraLayer
from moe_peft.cli import main
from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit.plan import plan
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.upit_case import contents, make_case, run, run_as_two_processes

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    return make_case(tmp_path_factory.mktemp("case"), tokenizer)


@pytest.fixture(scope="module")
def upit(case, tmp_path_factory):
    return run(case, tmp_path_factory.mktemp("upit"))


@pytest.fixture(scope="module")
def of_method(case, upit, tmp_path_factory):
    """The finished run of each method, which a test may look at but not change."""
    return cache(lambda method: upit if method == "upit" else run(case, tmp_path_factory.mktemp(method), method=method))


@pytest.fixture
def finished(upit, tmp_path):
    """A copy of the finished run in the folder of the test's own."""
    shutil.copytree(upit.root, tmp_path / "out")


# --- stages ---------------------------------------------------------------------------------------------------------


def test_a_stage_that_diverges_saves_nothing(case, tmp_path):
    sft = {**case["sft"], "optim": "sgd", "learning_rate": 1e38, "max_grad_norm": 0.0}
    with pytest.raises(ValueError, match=r"learning_rate=1e\+38: after step \d+, .* is not finite, and .* not saved"):
        run(case, tmp_path, method="lora", sft=sft)
    assert not [path for path in tmp_path.rglob("*.safetensors") if "initial" not in path.parts]


def test_result_is_an_adapter_like_any_other(upit):
    model = AutoPeftModelForCausalLM.from_pretrained(upit.root / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(upit.root / "adapter")
    config = model.peft_config["default"]
    assert config.peft_type == "MOE_LORA" and config.num_experts == 4 and config.r == 4 and config.lora_alpha == 8
    assert config.lora_dropout == 0.1 and config.mixing == "output"
    model.generate(**tokenizer("w3 w5", return_tensors="pt"), max_new_tokens=3)
    card = (upit.root / "adapter" / "README.md").read_text()
    assert "import moe_peft" in card and "[More Information Needed]" not in card and str(upit.root) not in card
    assert "`moe-peft upit`, method `upit`" in card and "- Training data: `train.jsonl`" in card
    assert "`MoESFTTrainer` with TRL" in card


def test_stages_hand_on_what_they_made(upit):
    """Experts of stage 1 → stage 2 → what stage 3 begins with; stage 3's result is what stage 4 begins with."""
    first = [load_file(upit.root / "prepare" / "experts" / str(i) / WEIGHTS) for i in range(3)]
    assert not any(torch.equal(first[0][name], first[1][name]) for name in first[0] if "lora_B" in name)
    expanded = [upit.root / "expand" / "experts" / str(i) for i in range(4)]
    for i in range(3):
        assert (expanded[i] / WEIGHTS).read_bytes() == (
            upit.root / "prepare" / "experts" / str(i) / WEIGHTS
        ).read_bytes()
    (descent,) = upit.records["expand"]["metrics"]["descents"]
    assert descent["expert"] == 3 and descent["drop_rate"] == 0.2 and 0 < descent["alpha"] < 1
    for folder in expanded:  # every one a LoRA that plain PEFT loads
        assert PeftModel.from_pretrained(tiny_llama(), folder).peft_config["default"].peft_type == "LORA"
    buckets = json.loads((upit.root / "router_init" / "buckets.json").read_text())
    assert [len(bucket) for bucket in buckets["buckets"]] == [3, 3, 3, 3] and len(buckets["perplexity"]) == 12
    routers = load_file(upit.root / "router_init" / "routers.safetensors")
    assert {name: tuple(weight.shape) for name, weight in routers.items()} == {"0": (4, 64), "1": (4, 64)}
    for i in range(4):
        before, after = (load_file(upit.root / s / "experts" / str(i) / WEIGHTS) for s in ("expand", "router_init"))
        assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)
    history = upit.records["post_train"]["metrics"]["history"]
    assert all("aux_loss" in record for record in history)


@pytest.mark.slow
def test_one_base_at_most_is_in_memory(case, tmp_path, monkeypatch):
    """Expansion loads no base; router initialization one at a time, however many experts there are."""
    from transformers import AutoModelForCausalLM

    original, loaded, alive = AutoModelForCausalLM.from_pretrained, [], []

    def from_pretrained(*args, **kwargs):
        alive.append(sum(reference() is not None for reference in loaded))
        model, info = original(*args, **kwargs)
        loaded.append(weakref.ref(model))
        return model, info

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    run(case, tmp_path, num_train_epochs=1)
    assert alive == [0] * 8  # prepare, router_init (scoring, four experts), post_train, evaluate: each alone


def test_manifest_says_what_was_done_with_what(upit):
    manifest = json.loads((upit.root / "manifest.json").read_text())
    assert list(manifest["stages"]) == ["prepare", "expand", "router_init", "post_train", "evaluate"]
    prepare = manifest["stages"]["prepare"]
    assert prepare["fingerprint"]["sft.learning_rate"] == 5e-3 and prepare["fingerprint"]["prepare.seed"] == 0
    assert manifest["stages"]["post_train"]["fingerprint"]["post_train.seed"] == 3
    assert {len(prepare["fingerprint"][f"content of {name}"]) for name in ("model", "train")} == {64}
    assert manifest["versions"]["torch"] == torch.__version__
    losses = manifest["stages"]["evaluate"]["metrics"]["loss"]
    assert set(losses["adapted"]) == {"a", "b", "c", "mean"} and losses["adapted"]["mean"] < losses["base"]["mean"]
    shares = torch.tensor(manifest["stages"]["evaluate"]["metrics"]["shares"]["a"])
    assert shares.shape == (2, 4)
    assert_near(shares.sum(1), torch.ones(2))


def test_held_out_loss_is_that_of_the_loaded_adapter(upit, case):
    model = AutoPeftModelForCausalLM.from_pretrained(upit.root / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(upit.root / "adapter")
    for domain in "abc":
        total, count = 0.0, 0
        for line in Path(case["data"]["eval"]).read_text().splitlines():
            row = json.loads(line)
            if row["domain"] != domain:
                continue
            prompt = tokenizer(row["prompt"])["input_ids"]
            ids = tokenizer(row["prompt"] + row["completion"] + tokenizer.eos_token)["input_ids"]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            answer = torch.arange(1, len(ids)) >= len(prompt)
            target = torch.tensor(ids[1:])
            total += torch.nn.functional.cross_entropy(logits[answer], target[answer], reduction="sum").item()
            count += int(answer.sum())
        measured = upit.records["evaluate"]["metrics"]["loss"]["adapted"][domain]
        assert measured == near(total / count)


# --- what is done again ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_done_twice_and_a_change_redoes_what_follows(case, finished, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="moe_peft")
    logging.getLogger("moe_peft").propagate = True

    def stages(word):
        messages = [record.getMessage() for record in caplog.records if record.name == "moe_peft"]
        return [message.split(":")[0] for message in messages if word in message]

    first = run(case, tmp_path)
    assert stages("done already") == ["prepare", "expand", "router_init", "post_train", "evaluate"]
    before = contents(first.root)
    other = {"router_init": {**case["router_init"], "alpha": 0.25}}
    difference = "router_init.alpha 0.5 and not 0.25"
    with pytest.raises(ValueError, match=rf"router_init is done, but with {difference}; .* --redo"):
        run(case, tmp_path, **other)
    assert contents(first.root) == before  # nothing is removed without being asked for
    plan = UpIT(recipe_from_dict({**case, "output_dir": str(first.root), **other})).outlook()
    assert plan == {
        "prepare": "done",
        "expand": "done",
        "router_init": f"again: {difference}",
        "post_train": "again, if the result of router_init changes",
        "evaluate": "again, if the result of post_train changes",
    }
    caplog.clear()
    changed = run(case, tmp_path, redo=True, **other)
    assert stages("done already") == ["prepare", "expand"]
    assert stages("as it changed") == ["router_init", "post_train", "evaluate"]
    assert difference in caplog.text and "router_init: running (stage 3 of 5)" in caplog.messages
    weights = [p.records["post_train"]["files"][f"adapter/{WEIGHTS}"] for p in (first, changed)]
    assert weights[0] != weights[1]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"stages": 3}', '{"stages": {"prepare": {}}}'])
def test_a_damaged_manifest_is_named_before_a_stage_is_done_again(content, case, finished, tmp_path, monkeypatch):
    (tmp_path / "out/manifest.json").write_text(content)
    monkeypatch.setattr("moe_peft.upit.pipeline.run_stage", None)
    with pytest.raises(InputError, match=r"out/manifest\.json"):
        run(case, tmp_path, redo=True, seed=5)


@pytest.mark.slow
def test_an_edited_card_stays_and_a_damaged_result_is_mended(case, tmp_path):
    first = run(case, tmp_path, method="loramoe_pt", num_train_epochs=1)
    card = (first.result / "README.md").read_text()
    (first.result / "README.md").write_text(card + "My notes.")
    before = contents(first.root)
    run(case, tmp_path, method="loramoe_pt", num_train_epochs=1)
    assert contents(first.root) == before
    (first.result / WEIGHTS).write_bytes(b"damaged")
    (first.result / "notes").mkdir()
    (first.result / "notes/mine.txt").write_text("mine")
    run(case, tmp_path, method="loramoe_pt", num_train_epochs=1)
    assert contents(first.root) == {**before, "adapter/README.md": card.encode(), "adapter/notes/mine.txt": b"mine"}


@pytest.mark.slow
def test_what_cannot_be_done_again_leaves_what_was_done(case, finished, tmp_path):
    first = run(case, tmp_path)
    before = {name: content for name, content in contents(first.root).items() if name.startswith("prepare/")}
    with pytest.raises(ValueError, match="zzz"):
        run(case, tmp_path, redo=True, prepare={**case.get("prepare", {}), "sft": {"eos_token": "<zzz>"}})
    after = contents(first.root)
    assert {name: content for name, content in after.items() if name.startswith("prepare/")} == before
    again = run(case, tmp_path)
    assert again.records == first.records


@pytest.mark.slow
def test_trackers_have_one_run_a_stage_and_keep_their_files(case, tmp_path, monkeypatch):
    """TensorBoard's files outlive a stage's state; W&B, of which this stands for what transformers calls, is closed."""
    log = []
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.run, wandb.finish = None, lambda: (log.append("finish"), setattr(wandb, "run", None))

    class Callback(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if wandb.run is None:
                log.append((args.run_name, os.environ["WANDB_RUN_GROUP"]))
                wandb.run = object()

    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "stand-in", Callback)
    monkeypatch.setattr("trl.trainer.base_trainer.is_wandb_available", lambda: False)  # for its model card
    sft = {**case["sft"], "report_to": ["tensorboard", "stand-in"], "logging_steps": 1}
    pipeline = run(case, tmp_path, sft=sft, num_train_epochs=1)
    trained = ["prepare", "router_init", "post_train"]
    assert log == [entry for name in trained for entry in ((f"out-{name}", "out"), "finish")]
    logs = pipeline.root / "logs"
    assert sorted(path.name for path in logs.iterdir()) == sorted(trained)
    assert all(list((logs / name).rglob("events.out.tfevents.*")) for name in trained)
    assert "WANDB_RUN_GROUP" not in os.environ and "TENSORBOARD_LOGGING_DIR" not in os.environ


@pytest.mark.slow
def test_a_second_run_of_one_object_does_nothing_again(of_method):
    pipeline = of_method("loramoe_sft")
    before = {path: path.stat().st_mtime_ns for path in (pipeline.root / "prepare").rglob("*")}
    pipeline.run()
    assert {path: path.stat().st_mtime_ns for path in (pipeline.root / "prepare").rglob("*")} == before


@pytest.mark.slow
def test_result_does_not_depend_on_what_a_trainer_did_to_the_tokenizer(case, tmp_path):
    """TRL gives the tokenizer a chat template and a padding token; the result has them, however often it is written."""
    rows = [json.loads(line) for line in Path(case["data"]["train"]).read_text().splitlines()]
    talks = [
        {"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["completion"]}]}
        for r in rows
    ]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    sft = {**case["sft"], "chat_template_path": str(tmp_path / "template.jinja")}
    settings = {"data": {"train": str(tmp_path / "talks.jsonl")}, "sft": sft, "num_train_epochs": 1}
    for method in ("lora", "loramoe_pt"):
        (tmp_path / method).mkdir()
        first = run(case, tmp_path / method, method=method, **settings)
        files = {path.name: path.read_bytes() for path in (first.root / "adapter").iterdir()}
        assert "['content']" in AutoTokenizer.from_pretrained(first.root / "adapter").chat_template
        run(case, tmp_path / method, method=method, **settings)
        assert {path.name: path.read_bytes() for path in (first.root / "adapter").iterdir()} == files


@pytest.mark.slow
def test_changed_data_redoes_everything(case, tmp_path):
    first = run(case, tmp_path, method="loramoe_pt", num_train_epochs=1)
    rows = Path(case["data"]["train"]).read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(rows[1:] + rows[:1]))
    data = {**case["data"], "train": str(tmp_path / "other.jsonl")}
    second = run(case, tmp_path, redo=True, method="loramoe_pt", data=data, num_train_epochs=1)
    assert first.records["post_train"]["files"] != second.records["post_train"]["files"]


# --- methods --------------------------------------------------------------------------------------------------------


def steps_of(pipeline):
    return sum(record["metrics"].get("steps", 0) for record in pipeline.records.values())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "loramoe_pt", "loramoe_sft", "self_moe", "pesc"])
def test_baselines(method, of_method, upit):
    pipeline = of_method(method)
    assert steps_of(pipeline) == 48  # 4 passes over 48 rows in batches of 4
    assert steps_of(upit) == 48 + 4 * 2  # and 2 passes of every expert over its bucket of 3
    config = PeftConfig.from_pretrained(pipeline.root / "adapter")
    assert config.peft_type == ("LORA" if method == "lora" else "MOE_LORA")
    if method != "lora":
        assert config.expert_type == ("bottleneck" if method == "pesc" else "lora")
    assert (
        set(pipeline.records) - {"evaluate"}
        == {
            "lora": {"prepare"},
            "loramoe_pt": {"post_train"},
            "loramoe_sft": {"prepare", "post_train"},
            "self_moe": {"prepare", "expand", "post_train"},
            "pesc": {"post_train"},
        }[method]
    )
    if method == "lora":
        assert "shares" in pipeline.records["evaluate"]["metrics"]
        assert pipeline.records["evaluate"]["metrics"]["shares"] == {}
        AutoTokenizer.from_pretrained(pipeline.root / "adapter")


def experts_of(folder):
    model = AutoPeftModelForCausalLM.from_pretrained(folder)
    return {
        f"{name}.{projection}": value.detach()
        for name, layer in model.named_modules()
        if isinstance(layer, MoELoraLayer)
        for projection, value in layer.expert_parameters("default")[0].items()
    }


@pytest.mark.slow
def test_self_moe_trains_the_routers_alone(of_method):
    pipeline = of_method("self_moe")
    expanded = [load_file(pipeline.root / "expand" / "experts" / str(i) / WEIGHTS) for i in range(4)]
    for name, A in experts_of(pipeline.root / "adapter").items():
        module, _, projection = name.rpartition(".")
        path = module.removeprefix("base_model.model.")
        for i in range(4):
            torch.testing.assert_close(
                A[i], expanded[i][f"base_model.model.{path}.{projection}.lora_A.weight"], rtol=0, atol=0
            )


@pytest.mark.slow
def test_no_expansion_or_router_initialization(case, tmp_path):
    pipeline = run(case, tmp_path, prepare={"selection": "uniform"}, router_init={"buckets": "none"})
    assert list(pipeline.records) == ["prepare", "post_train", "evaluate"]
    assert pipeline.records["prepare"]["metrics"]["checkpoint_steps"] == [6, 12, 18, 24]


@pytest.mark.slow
def test_experts_that_exist_already(case, upit, tmp_path):
    adapters = [str(upit.root / "prepare" / "experts" / str(i)) for i in range(3)]
    pipeline = run(case, tmp_path, prepare={"adapters": adapters}, num_train_epochs=1)
    assert list(pipeline.records) == ["expand", "router_init", "post_train", "evaluate"]
    assert pipeline.records["expand"]["files"] == upit.records["expand"]["files"]
    with pytest.raises(ValueError, match=r"prepare\.adapters='nowhere': "):
        run(case, tmp_path, prepare={"adapters": ["nowhere", "nowhere"]})


@pytest.mark.slow
def test_stage_3_takes_what_its_buckets_hold(case, tmp_path):
    """Plan and budget count the examples that the buckets hold: at least one for each expert."""
    router_init = {"seed_fraction": 0.01, "num_train_epochs": 1, "within_budget": True}
    pipeline = run(case, tmp_path, router_init=router_init)
    stage = next(stage for stage in plan(pipeline) if stage.name == "router_init")
    record = pipeline.records["router_init"]["metrics"]
    assert record["bucket_sizes"] == [1] * 4 and stage.steps == record["steps"] == 4
    assert stage.epochs == near(4 / 48)


def test_a_template_in_a_tokenizers_folder_is_an_input(case, tmp_path, tokenizer):
    template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "template")
    own = {"method": "lora", "data": {"train": case["data"]["train"]}}
    own["sft"] = {**case["sft"], "chat_template_path": str(tmp_path / "template")}
    pipeline = run(case, tmp_path, **own)
    assert UpIT(pipeline.recipe).outlook()["prepare"] == "done"
    tokenizer.chat_template = template.replace("eos_token", "' '")
    tokenizer.save_pretrained(tmp_path / "template")
    assert UpIT(pipeline.recipe).outlook()["prepare"].startswith("again: content of chat_template")


@pytest.mark.slow
def test_gates_from_buckets_take_no_training(case, tmp_path):
    own = {"num_train_epochs": 2, "router_init": {**case["router_init"], "gates": "ridge"}}
    pipeline = run(case, tmp_path, **own)
    assert [stage.name for stage in plan(pipeline)] == ["prepare", "post_train"]
    assert "steps" not in pipeline.records["router_init"]["metrics"]
    stage = next(stage for stage in pipeline.stages if stage.name == "post_train")
    assert stage.given.experts == tuple(pipeline.root / "expand/experts" / str(i) for i in range(4))
    for router in load_file(stage.given.routers).values():
        assert_near(router.norm(dim=1), torch.full((4,), 10.0))
    for wrong in ("arrow", "vector"):
        with pytest.raises(ValueError, match=f"^router_init.gates='{wrong}': must be one of vectors, ridge, prompts"):
            recipe_from_dict({**case, "router_init": {"gates": wrong}})


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"name_or_path": "nowhere/model"}}, "model.name_or_path='nowhere/model': neither a model folder"),
        ({"data": {"train": "nowhere.jsonl"}}, "data.train='nowhere.jsonl': no such file"),
        ({"data": {"train": "strange.jsonl"}}, "needs messages, prompt and completion, or text"),
        (
            {"router_init": {"buckets": "label", "expert_map": {"a": [0], "b": [1]}}},
            "expert_map: no experts for the label 'c' of example 2",
        ),
        (
            {"sft": {"use_cpu": True, "lr_scheduler_type": "zigzag"}},
            "sft.lr_scheduler_type='zigzag': must be one of",
        ),
    ],
)
def test_wrong_inputs_end_in_one_line_and_leave_nothing(settings, message, case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange.jsonl").write_text('{"domain": "a", "question": "w3"}')
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**case, "output_dir": str(tmp_path / "out"), **settings}))
    with pytest.raises(SystemExit) as ended:
        main(["upit", "--config", str(path)])
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not any((tmp_path / "out").glob("*/*"))


def test_missing_label_column(case, tmp_path):
    with pytest.raises(ValueError, match=r"label_column='topic': data\.train has only"):
        run(case, tmp_path, data={**case["data"], "label_column": "topic"})


# --- plan and command line ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["upit", "lora", "self_moe"])
def test_plan_is_what_happens(method, of_method, upit):
    pipeline = of_method(method)
    stages = {stage.name: stage for stage in plan(pipeline)}
    trained = [name for name in pipeline.records if name in ("prepare", "router_init", "post_train")]
    assert list(stages) == trained
    for name, stage in stages.items():
        assert stage.steps == pipeline.records[name]["metrics"]["steps"]
        assert stage.memory.total > 4 * sum(p.numel() for p in tiny_llama(vocab=128).parameters())
    if method != "lora":
        assert asdict(stages["post_train"].moe) == pipeline.records["post_train"]["metrics"]["size"]
    if method == "upit":
        model = AutoPeftModelForCausalLM.from_pretrained(upit.root / "adapter", is_trainable=True)
        assert stages["post_train"].trainable == model.get_nb_trainable_parameters()[0]
        lora = PeftModel.from_pretrained(tiny_llama(), upit.root / "prepare" / "experts" / "0", is_trainable=True)
        assert stages["prepare"].trainable == lora.get_nb_trainable_parameters()[0]
        assert stages["prepare"].tokens == pytest.approx(24 * 4 * 10.5, rel=0.15)
        assert stages["router_init"].advice.startswith("2 steps per expert are few")
        assert "num_train_epochs=2 to about 30" in stages["router_init"].advice
        measured = upit.records["router_init"]["metrics"]
        assert measured["steps_per_expert"] == [2] * 4 and min(measured["vectors_moved"]) > 0.05
    if method == "self_moe":
        assert stages["post_train"].trainable == 2 * 4 * 64


def test_plan_finds_what_cannot_be_done(case):
    impossible = recipe_from_dict({**case, "num_train_epochs": 0.5, "router_init": {"buckets": "none"}})
    with pytest.raises(ValueError, match="num_experts=3: are chosen from 6 checkpoints, and the training has 3 steps"):
        plan(UpIT(impossible))
    incomplete = {**case["router_init"], "buckets": "label", "expert_map": {"a": [0], "b": [1]}}
    with pytest.raises(ValueError, match="no experts for the label 'c' of example 2"):
        plan(UpIT(recipe_from_dict({**case, "router_init": incomplete})))


def test_command_line(case, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**case, "output_dir": str(tmp_path / "out")}))
    main(["upit", "--config", str(path), "--set", "method=loramoe_pt", "--dry-run"])
    planned = capsys.readouterr().out
    assert "post_train" in planned and "48" in planned and not (tmp_path / "out").exists()
    main(["upit", "--config", str(path), "--set", "method=loramoe_pt"])
    done = capsys.readouterr().out
    assert "held-out loss" in done and str(tmp_path / "out" / "adapter")[-10:] in done.replace("\n", "")
    assert (tmp_path / "out" / "adapter" / WEIGHTS).exists()


QUANTIZED = {
    "4-bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "8-bit": {"load_in_8bit": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "device"), [("4-bit", "cpu"), *(pytest.param(bits, "cuda", marks=needs_cuda) for bits in QUANTIZED)]
)
def test_quantized_base(bits, device, case, tmp_path):
    """All stages on a bitsandbytes base, with gradient checkpointing; scoring must not spoil the training after it."""
    own = {"use_cpu": device == "cpu", "gradient_checkpointing": True, "learning_rate": 2e-2, "max_grad_norm": 1.0}
    quantization = {**QUANTIZED[bits], **({"bnb_4bit_compute_dtype": "float32"} if bits == "4-bit" else {})}
    model = {**case["model"], "quantization": quantization, "dtype": "float32"}
    longer = {**case["router_init"], "num_train_epochs": 6, "sft": {"logging_steps": 1}}
    pipeline = run(case, tmp_path, model=model, sft={**case["sft"], **own}, router_init=longer)
    losses = pipeline.records["evaluate"]["metrics"]["loss"]
    assert losses["adapted"]["mean"] < losses["base"]["mean"] - 0.01
    first, last = (pipeline.records["router_init"]["metrics"]["history"][i] for i in (0, -1))
    assert last["lm_loss"] < first["lm_loss"] and first["grad_norm"] > 0
    before, after = (load_file(pipeline.root / s / "experts" / "0" / WEIGHTS) for s in ("expand", "router_init"))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    assert not torch.allclose(before[name].float(), after[name].float(), atol=1e-4)


@pytest.mark.slow
def test_several_processes_do_what_one_does(case, upit, tmp_path):
    """Two processes over gloo, half the batch each: the same batches, so the same result up to rounding."""
    # SGD: Adam blows rounding up where gradients are near zero.
    sft = {**case["sft"], "per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
    # All experts at once: with fewer, rounding may choose other ones.
    settings = {
        **case,
        "sft": sft,
        # Buckets of four: whole batches, as accelerate fills the last one up with rows from the first.
        "router_init": {**case["router_init"], "seed_fraction": 1 / 3},
        "output_dir": str(tmp_path / "two"),
        "adapter": {"r": 4, "lora_alpha": 8, "top_k": 4},
    }
    run_as_two_processes(settings, tmp_path)
    one = {**settings, "sft": {**sft, "per_device_train_batch_size": 4}, "output_dir": str(tmp_path / "one")}
    UpIT(recipe_from_dict(one)).run()
    for stage in ("prepare/experts/2", "router_init/experts/1", "post_train/adapter"):
        two, alone = (load_file(tmp_path / name / stage / WEIGHTS) for name in ("two", "one"))
        assert two.keys() == alone.keys()
        for key, value in alone.items():
            assert_near(two[key], value, key)
    buckets = [json.loads((tmp_path / name / "router_init" / "buckets.json").read_text()) for name in ("one", "two")]
    assert buckets[0]["buckets"] == buckets[1]["buckets"]
