"""`moe-peft sft` and `moe-peft dpo`: what a user types, against the same training in Python."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from huggingface_hub import HfApi
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from moe_peft import MoELoraConfig, replace_routers
from moe_peft.cli import main
from moe_peft.cli.arguments import training_stages
from moe_peft.cli.sft import parser
from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.training import MoESFTConfig, MoESFTTrainer, resuming
from moe_peft.training.checkpointing import fingerprint_of, mark_complete
from moe_peft.training.data import load_data
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.routed_models import tuner_layers
from tests.helpers.training_case import ADAPTER, MAPS, MASKS, SETTINGS, make_case, run, weights
from tests.helpers.upit_case import make_case as make_recipe
from tests.helpers.upit_case import rows, run_as_two_processes
from tests.helpers.upit_case import run as run_upit


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    """Base model, data, and the settings of a run."""
    return make_case(tmp_path_factory.mktemp("case"), tokenizer)


RESUME = ("--resume_from_checkpoint", "true")


def refused(command: str, folder: Path, settings: dict, *flags: str, capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as end:
        run(command, folder, settings, *flags)
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and (RESUME[0] in flags or not (folder / "out").exists())
    return lines[0]


@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_hides_the_bar_and_the_log(quiet, case, tmp_path, capsys):
    settings = {key: value for key, value in case.items() if key != "disable_tqdm"}
    run("sft", tmp_path, {**settings, "max_steps": 2}, *["--quiet"][: int(quiet)])
    shown = capsys.readouterr()
    assert "result: " in shown.out
    assert ("%|" not in shown.err and "loss" not in shown.err) if quiet else "%|" in shown.err


def test_the_command_trains_what_python_trains(case, tokenizer, tmp_path):
    out = run("sft", tmp_path, case, "--learning_rate", "1e-2", "--router-z-loss-coef", "0.001")
    args = MoESFTConfig(
        output_dir=str(tmp_path / "python"), **{**SETTINGS, "learning_rate": 1e-2}, router_z_loss_coef=0.001
    )
    base = AutoModelForCausalLM.from_pretrained(case["model_name_or_path"], dtype=torch.float32)
    data = Dataset.from_list(rows(24))
    set_seed(args.seed)
    config = MoELoraConfig(task_type="CAUSAL_LM", **ADAPTER)
    trainer = MoESFTTrainer(base, args, train_dataset=data, processing_class=tokenizer, peft_config=config)
    trainer.train()
    trainer.save_model(str(tmp_path / "python"))
    ours, theirs = weights(out), weights(tmp_path / "python")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0)
    config = PeftConfig.from_pretrained(out)
    assert (config.num_experts, config.top_k, config.r, config.lora_alpha) == (6, 2, 4, 8)
    log = json.loads((out / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    assert log[0]["learning_rate"] == 1e-2 and "router_z_loss" in log[0]
    card = (out / "README.md").read_text()
    assert "- Training data: " in card and "6 steps of 4 rows" in card and "import moe_peft" in card
    assert AutoPeftModelForCausalLM.from_pretrained(out)(input_ids=torch.tensor([[3, 4]])).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "upit"])
def test_an_adapter_names_the_revision_of_its_base(command, case, tmp_path, tokenizer):
    """Whoever loads it gets that one, and not the main branch."""
    if command == "sft":
        out = run("sft", tmp_path, {**case, "model_revision": "v2", "max_steps": 1})
    else:
        recipe = make_recipe(tmp_path, tokenizer)
        recipe["model"]["revision"] = "v2"
        out = run_upit({**recipe, "num_train_epochs": 1}, tmp_path).result
    assert PeftConfig.from_pretrained(out).revision == "v2"


def test_two_stages_from_one_file(case, tmp_path):
    """Routers alone, with their own learning rate; then all but the routers."""
    stages = {"routers": {"learning_rate": 5e-2, "max_steps": 12, "save_steps": 12}, "rest": None}
    out = run("sft", tmp_path, {**case, "label_column": "domain", "expert_map": MASKS, "stages": stages})
    routers, end = weights(out / "routers" / "checkpoint-12"), weights(out)
    assert routers.keys() == end.keys()
    for name, value in routers.items():
        of_router = "router" in name
        assert torch.equal(end[name], value) == of_router, name
        if name.endswith("moe_lora_B.up_proj"):
            assert not value.any()  # the first stage left the experts alone
    for stage, step, rate in (("routers", 12, 5e-2), ("rest", 6, 5e-3)):
        log = json.loads((out / stage / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"]
        assert log[0]["learning_rate"] == rate
        if stage == "routers":
            assert log[-2]["compliance"] > log[0]["compliance"] + 0.1
    # The card has the last training.
    assert "- 6 steps of 4 rows, learning rate 0.005" in (out / "README.md").read_text()


def test_stages_may_be_flags(case, tmp_path):
    flags = ["--stages", "routers", "rest", "--label_column", "domain", "--expert_map", json.dumps(MAPS)]
    out = run("sft", tmp_path, case, *flags)
    assert (out / "routers" / "checkpoint-6").is_dir() and (out / "rest" / "checkpoint-6").is_dir()


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ({}, {"routers", "rest"}),
        ({"stages": ["joint"]}, {"joint"}),
        ({"training_stage": "routers"}, set()),
        ({"router_label_mask": True, "expert_map": {"a": [0, 1], "b": [2, 3], "c": [4, 5]}}, set()),
    ],
)
def test_labels_train_routers_first(own, names, case, tmp_path):
    """Unless the settings say otherwise: both losses together did harm in the paper."""
    out = run("sft", tmp_path, {**case, "label_column": "domain", "expert_map": MAPS, **own})
    assert {path.name for path in out.iterdir() if path.name in ("routers", "rest", "joint")} == names
    stages = names or {"."}
    assert all((out / name / "checkpoint-6").is_dir() for name in stages)


def test_one_training_of_labels_and_all_does_not_begin_anew_as_two(case, tmp_path, capsys):
    """It resumes where it is told to."""
    own = {**case, "label_column": "domain", "expert_map": MAPS, "lr_scheduler_type": "constant", "save_steps": 3}
    whole = weights(run("sft", tmp_path, {**own, "stages": ["joint"]}))
    shutil.move(tmp_path / "out/joint/checkpoint-3", tmp_path / "out/checkpoint-3")
    shutil.rmtree(tmp_path / "out/joint")
    with pytest.raises(SystemExit):
        run("sft", tmp_path, own, "--resume_from_checkpoint", "true")
    assert "is not empty; choose another" in capsys.readouterr().err
    (tmp_path / "out/joint").mkdir()
    shutil.move(tmp_path / "out/checkpoint-3", tmp_path / "out/joint/checkpoint-3")
    again = weights(run("sft", tmp_path, {**own, "stages": ["joint"]}, "--resume_from_checkpoint", "true"))
    for name, value in whole.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=0)


def test_hard_masks(case, tmp_path):
    settings = {**case, "label_column": "domain", "expert_map": {"a": [0, 1], "b": [2, 3], "c": [2, 3]}}
    out = run("sft", tmp_path, {**settings, "router_label_mask": True})
    for name, value in weights(out).items():
        if ".moe_lora_B." in name:
            used = [bool(value[i].any()) for i in range(6)]
            assert used == [True] * 4 + [False] * 2, name


def test_resumed_is_as_never_stopped(case, tmp_path):
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    # A constant learning rate, so that a training of 3 steps begins like one of 6.
    settings = {**case, "label_column": "domain", "expert_map": MAPS, "lr_scheduler_type": "constant"}
    settings["stages"] = ["routers", "rest"]
    first = {**settings, "stages": {"routers": None, "rest": {"max_steps": 3}}}
    out = run("sft", tmp_path / "stopped", first)  # as if killed after the third step of the second stage
    assert run("sft", tmp_path / "stopped", settings, "--resume_from_checkpoint", "true") == out
    whole = run("sft", tmp_path / "whole", settings)
    assert weights(whole).keys() == weights(out).keys()
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(out)[name], value, rtol=0, atol=0)


def test_a_native_moe_trains_all_its_weights(case, tmp_path):
    moe = upcycle(case["model_name_or_path"], tmp_path / "moe", UpcycleConfig(num_experts=4, top_k=2))
    own = {key: value for key, value in case.items() if key not in ADAPTER}
    before = AutoModelForCausalLM.from_pretrained(moe).state_dict()
    out = run("sft", tmp_path, {**own, "model_name_or_path": str(moe)})
    after = AutoModelForCausalLM.from_pretrained(out)
    assert after.config.model_type == "mixtral"
    card = (out / "README.md").read_text()
    assert (
        "`mixtral` with 4 experts per layer" in card and "- Training data: " in card and "import moe_peft" not in card
    )
    assert f"# Mixture-of-Experts of {moe.name}\n" in card
    changed = {name for name, value in after.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == before.keys()


@pytest.mark.parametrize("flags", [["--trainable_token_indices", "5", "50"], []])
def test_rows_of_tokens_train_and_resume(flags, case, tmp_path):
    tokens = {} if flags else {"trainable_token_indices": {"embed_tokens": [5, 50], "lm_head": [6]}}
    settings = {**case, **tokens, "lr_scheduler_type": "constant"}
    for name, steps in (("whole", 4), ("stopped", 2)):
        (tmp_path / name).mkdir()
        run("sft", tmp_path / name, {**settings, "max_steps": steps}, *flags)
    flags = [*flags, "--resume_from_checkpoint", "true"]
    resumed = weights(run("sft", tmp_path / "stopped", {**settings, "max_steps": 4}, *flags))
    whole = weights(tmp_path / "whole/out")
    base = AutoModelForCausalLM.from_pretrained(case["model_name_or_path"])
    trained = [key for key in whole if "trainable_tokens_delta" in key]
    assert len(trained) == len(tokens.get("trainable_token_indices", ["embed_tokens"]))
    for key, value in whole.items():
        torch.testing.assert_close(resumed[key], value, rtol=0, atol=0)
    rows = whole["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    assert not torch.isclose(rows, base.get_input_embeddings().weight[[5, 50]]).all(1).any()


def test_attention_experts_and_patterns(case, tmp_path):
    own = {"target_modules": ["mlp", "q_proj", "v_proj"], "num_experts_pattern": {"[qv]_proj": 1}}
    out = run("sft", tmp_path, {**case, **own})
    model = AutoPeftModelForCausalLM.from_pretrained(out)
    assert len(tuner_layers(model)) == 2
    names = {name.split(".moe_lora")[0].rsplit(".", 1)[-1] for name in weights(out)}
    assert {"mlp", "q_proj", "v_proj"} <= names


@pytest.mark.slow
def test_quantized_base(case, tmp_path):
    out = run("sft", tmp_path, {**case, "load_in_4bit": True, "max_steps": 2})
    assert any(value.any() for name, value in weights(out).items() if ".moe_lora_B." in name)


def test_evaluation_on_a_split(case, tmp_path):
    (tmp_path / "data").mkdir()
    for split, offset in (("train", 0), ("test", 5)):
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows(12, offset))))
    own = {"dataset_name": str(tmp_path / "data"), "eval_strategy": "steps", "eval_steps": 3}
    out = run("sft", tmp_path, {**case, **own})
    log = json.loads((out / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    assert sum("eval_loss" in record for record in log) == 2
    started = run("sft", tmp_path / "data", {**case, "dataset_name": own["dataset_name"], "eval_on_start": True})
    log = json.loads((started / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    assert [record["step"] for record in log if "eval_loss" in record] == [0]


def test_it_stops_early_and_says_which_step_is_the_result(case, tmp_path, capsys, monkeypatch):
    (tmp_path / "data").mkdir()
    for split, offset in (("train", 0), ("test", 5)):
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows(12, offset))))
    own = {"dataset_name": str(tmp_path / "data"), "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    own |= {
        "load_best_model_at_end": True,
        "greater_is_better": True,
        "early_stopping_patience": 2,
    }  # the first is best
    own |= {"metric_for_best_model": "loss", "max_steps": 8}
    out = run("sft", tmp_path, {**case, **own})
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] < 7 and state["best_global_step"] < state["global_step"]
    step, steps = state["best_global_step"], state["global_step"]
    printed = capsys.readouterr().out
    assert f"result: {out} (step {step} of {steps}: the best loss, {state['best_metric']:.4g})\n" in printed
    assert f"next: moe-peft inspect --model {out} " in printed
    best = weights(out / f"checkpoint-{step}")
    assert all(torch.equal(value, best[name]) for name, value in weights(out).items())
    # A run that is done stays as it is, and one that was killed waits no longer than one that was not.
    before = (out / "adapter_model.safetensors").read_bytes()
    run("sft", tmp_path, {**case, **own}, "--resume_from_checkpoint", "true")
    shutil.rmtree(out / f"checkpoint-{steps}")
    assert run("sft", tmp_path, {**case, **own}, "--resume_from_checkpoint", "true") == out
    again = json.loads((out / "trainer_state.json").read_text())
    assert again["global_step"] == steps and (out / "adapter_model.safetensors").read_bytes() == before
    patient = {**case, **own, "early_stopping_patience": 3, "resume_from_checkpoint": True}
    assert json.loads((run("sft", tmp_path, patient) / "trainer_state.json").read_text())["global_step"] == steps + 1

    def as_sharded(trainer, *args):  # whose result cannot be made of a checkpoint without training
        trainer.is_fsdp_enabled = True
        return load_if_done(trainer, *args)

    load_if_done = resuming._load_if_done
    monkeypatch.setattr(resuming, "_load_if_done", as_sharded)
    with pytest.raises(SystemExit):
        run("sft", tmp_path, patient)
    said = f"checkpoint-{steps + 1} has {steps + 1} steps already; raise early_stopping_patience, or start anew"
    assert f"error: early_stopping_patience=3: {out}/{said}" in capsys.readouterr().err
    without = {**case, "early_stopping_patience": 2}
    line = refused("sft", tmp_path / "data", without, capsys=capsys)
    assert line.startswith("error: early_stopping_patience=2: set eval_strategy=steps, eval_steps and load_best_model")
    line = refused("sft", tmp_path / "data", {**case, **own, "save_steps": 2}, capsys=capsys)
    assert line.startswith(
        "error: save_steps=2: load_best_model_at_end finds only steps that were saved; set it to eval"
    )


@pytest.mark.parametrize(
    ("command", "own", "rate"),
    [("sft", {}, 2e-4), ("sft", {"learning_rate": 2e-5}, 2e-5), ("dpo", {}, 5e-6)],
)
def test_an_adapter_learns_at_the_usual_rate_of_adapters(command, own, rate, case, tmp_path, capsys):
    settings = {**{key: value for key, value in case.items() if key != "learning_rate"}, **own, "max_steps": 1}
    if command == "dpo":
        settings["dataset_name"] = str(Path(case["dataset_name"]).with_name("pairs.jsonl"))
    out = run(command, tmp_path, settings)
    assert json.loads((out / "trainer_state.json").read_text())["log_history"][0]["learning_rate"] == rate
    assert capsys.readouterr().out.startswith(f"learning_rate={rate:g}\n")


@pytest.mark.parametrize("flag", ["--max-steps", "--max_steps"])
def test_flags_have_dashes_or_underscores(flag, case, tmp_path):
    out = run("sft", tmp_path, case, flag, "1")
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 1


def test_a_metric_that_no_evaluation_has(case, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for split, offset in (("train", 0), ("test", 5)):
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows(12, offset))))
    own = {"dataset_name": str(tmp_path / "data"), "eval_strategy": "steps", "eval_steps": 3}
    own |= {"load_best_model_at_end": True, "metric_for_best_model": "no"}
    with pytest.raises(SystemExit) as end:
        run("sft", tmp_path, {**case, **own})
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "metric_for_best_model='no': " in lines[0] and "eval_loss" in lines[0]


def test_what_trl_does_not_do_is_one_line(case, tmp_path, capsys):
    own = {**case, "dataset_name": str(Path(case["dataset_name"]).with_name("pairs.jsonl")), "sync_ref_model": True}
    assert "sync_ref_model=True" in refused("dpo", tmp_path, own, capsys=capsys)


def test_routers_alone_need_a_loss_that_trains_them(case, tmp_path, capsys):
    pairs = {**case, "dataset_name": str(Path(case["dataset_name"]).with_name("pairs.jsonl"))}
    own = {**pairs, "training_stage": "routers", "router_aux_loss_coef": 0.1}
    message = "training_stage='routers' needs router_z_loss_coef above 0: no loss trains the routers"
    assert message in refused("dpo", tmp_path, own, capsys=capsys)
    own = {**case, "label_column": "domain", "expert_map": MASKS, "router_label_loss_coef": 0.0}
    assert "needs label_column and expert_map, and router_label_loss_coef or router_z" in refused(
        "sft", tmp_path, {**own, "stages": {"joint": None, "routers": None}}, capsys=capsys
    )


def test_dpo_trains_routers_alone(case, tmp_path):
    own = {**case, "dataset_name": str(Path(case["dataset_name"]).with_name("pairs.jsonl")), "max_steps": 2}
    own |= {"training_stage": "routers", "router_z_loss_coef": 0.1}
    found = []
    for rate in (0.0, 1e-2):
        (tmp_path / str(rate)).mkdir()
        found.append(weights(run("dpo", tmp_path / str(rate), {**own, "learning_rate": rate})))
    before, after = found
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".moe_lora_router." in name} != set()


def test_dpo(case, tmp_path):
    own = {"dataset_name": case["dataset_name"].replace("train.jsonl", "pairs.jsonl"), "router_aux_loss_coef": 0.5}
    out = run("dpo", tmp_path, {**case, **own})
    log = json.loads((out / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    assert "rewards/margins" in log[0] and "aux_loss" in log[0]
    assert PeftConfig.from_pretrained(out).router_aux_loss_coef == 0.5


def test_each_stage_of_dpo_has_the_model_that_it_starts_from_as_its_reference(case, tmp_path, monkeypatch, capsys):
    """And the copies are not left in the result."""
    settings = {**case, "max_steps": 2, "save_steps": 2}
    settings["dataset_name"] = case["dataset_name"].replace("train.jsonl", "pairs.jsonl")
    stages = {"rest": None, "routers": {"router_z_loss_coef": 0.1}, "joint": None}
    out = run("dpo", tmp_path, {**settings, "stages": stages})
    assert not (out / "ref").exists() and not any("ref" in name for name in weights(out))
    for stage in stages:
        (first, *_) = json.loads((out / stage / "checkpoint-2/trainer_state.json").read_text())["log_history"]
        assert first["rewards/margins"] == near(0, scale=first["logps/chosen"])
    (tmp_path / "plan").mkdir()
    run("dpo", tmp_path / "plan", {**settings, "stages": stages}, "--dry-run")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as its launcher says it
    line = refused("dpo", tmp_path / "plan", {**settings, "stages": stages}, capsys=capsys)
    assert line.startswith("error: stages=['rest', 'routers', 'joint']: TRL copies the adapter as a reference")


def test_dry_run_says_what_happens_and_writes_nothing(case, tmp_path, capsys):
    stages = {"routers": {"learning_rate": 1e-2}, "rest": None}
    own = {"label_column": "domain", "expert_map": MAPS, "stages": stages, "max_steps": -1, "num_train_epochs": 2}
    out = run("sft", tmp_path, {**case, **own}, "--dry-run")
    printed = capsys.readouterr().out
    routers, experts = 2 * 6 * 64, 2 * 6 * 4 * 3 * (64 + 128)
    for number in (f"{routers:,}", f"{experts:,}", "12", "learning rate 0.01", "FLOP per token"):
        assert number in printed, number
    assert not out.exists()
    base = AutoModelForCausalLM.from_pretrained(case["model_name_or_path"])
    model = get_peft_model(base, MoELoraConfig(task_type="CAUSAL_LM", **ADAPTER))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == routers + experts


@pytest.mark.parametrize("own, message", [
    ({"num_expert": 4}, "num_expert: unknown key; did you mean 'num_experts'?"),
    ({"num_experts": "four"}, "num_experts='four': must be a valid integer"),
    ({"num_experts": [4]}, "num_experts=[4]: must be a valid integer"),
    ({"use_cpu": "maybe"}, "use_cpu='maybe'"),
    ({"mixing": "both"}, "mixing='both'"),
    ({"top_k": 9}, "top_k=9: must be at most the number of experts (6)"),
    ({"stages": ["router"]}, "stages='router': must be one of joint, routers, rest"),
    ({"stages": []}, "stages=[]: name some of"),
    ({"stages": ["joint", "joint"]}, "stages=['joint', 'joint']: name some of joint, routers, rest, each once"),
    ({"stages": ["joint"], "training_stage": "rest"}, "training_stage='rest': stages already says which; leave it out"),
    ({"stages": {"joint": {"output_dir": "x"}}}, "stages.joint.output_dir: it is the folder of the stage's name"),
    ({"stages": {"rest": None, "joint": {"chat_template_path": "no"}}}, "chat_template_path='no'"),
    ({"stages": {"rest": None, "joint": {"eval_strategy": "steps", "eval_steps": 1}}}, 'Unknown split "test"'),
    ({"zzz": 1}, "zzz: unknown key; see `moe-peft sft --help-all`"),
    ({"zzz": 1, "adapter": "qlora", "sequence_len": 9}, "instead: max_length | zzz: unknown key"),
    ({"stages": {"rest": {"learning_rat": 1}}}, "stages.rest.learning_rat: unknown key; did you mean 'learning_rate'?"),
    ({"stages": {"joint": {"training_stage": "rest"}}}, "stages.joint.training_stage: the stage's name says this"),
    ({"dataset_name": None}, "dataset_name=None: name a file"),
    ({"dataset_name": "nowhere.jsonl"}, "dataset_name='nowhere.jsonl': no such file"),
    ({"model_name_or_path": "no/such/model"}, "model_name_or_path='no/such/model':"),
    ({"model_name_or_path": None}, "model_name_or_path=None: name a model folder"),
    ({"label_column": "topic", "expert_map": MAPS}, "label_column='topic': dataset_name has only"),
    ({"load_in_4bit": True, "load_in_8bit": True}, "8 bit and 4 bit precision"),
    ({"fp16": True, "bf16": False}, "fp16=True: a CPU does not train in float16"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(own, message, case, tmp_path, capsys):
    assert message in refused("sft", tmp_path, {**case, **own}, capsys=capsys)


@pytest.mark.parametrize("plan", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"label_column": "no", "expert_map": MAPS}, "stages.rest.label_column='no': dataset_name has only ['prompt'"),
        ({"label_column": "text", "expert_map": MAPS}, "stages.rest.label_column='text': trainers add the EOS token"),
        ({"assistant_only_loss": True}, "stages.rest.assistant_only_loss=True: the data have no conversations"),
    ],
)  # fmt: skip
def test_a_later_stage_is_checked_before_the_first_one_trains(own, message, plan, case, tmp_path, capsys):
    settings = {**case, "stages": {"joint": None, "rest": own}}
    assert message in refused("sft", tmp_path, settings, *plan, capsys=capsys)


def test_a_later_stage_of_routers_without_parameters(case, tmp_path, capsys):
    settings = {**case, "router_type": "hash", "label_column": "domain", "expert_map": MAPS}
    settings |= {"router_aux_loss_coef": 0.0, "router_label_loss_coef": 0.0}
    routers = {"router_z_loss_coef": 0.1}
    message = "stages.routers: training_stage='routers': these routers have no parameters; use 'joint'"
    found = refused("sft", tmp_path, {**settings, "stages": {"rest": None, "routers": routers}}, capsys=capsys)
    assert message in found


@pytest.mark.slow
def test_a_checkpoint_is_of_one_stage(case, tmp_path, capsys):
    settings = {**case, "label_column": "domain", "expert_map": MAPS, "lr_scheduler_type": "constant"}
    flags = ("--stages", "routers", "rest", "--resume_from_checkpoint", str(tmp_path / "out/routers/checkpoint-3"))
    message = (
        "checkpoint-3': belongs to one of the stages routers, rest; use true, or stages.<name>.resume_from_checkpoint"
    )
    assert message in refused("sft", tmp_path, settings, *flags, capsys=capsys)
    whole = weights(run("sft", tmp_path, {**settings, "stages": ["routers", "rest"]}))
    (tmp_path / "again").mkdir()
    own = {"routers": {"resume_from_checkpoint": flags[-1]}, "rest": None}
    again = weights(run("sft", tmp_path / "again", {**settings, "stages": own}))
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    log = json.loads((tmp_path / "again/out/routers/checkpoint-6/trainer_state.json").read_text())["log_history"]
    assert log[0]["step"] == 1  # of the checkpoint


@pytest.mark.parametrize("flags, message", [
    (["--num_expert", "4"], "--num_expert: unknown key; did you mean '--num_experts'?"),
    (["--learning_rat", "1"], "--learning_rat: unknown key; did you mean '--learning_rate'?"),
    (["--num_experts", "four"], "--num_experts"),
    (["--lora_r=4", "--zzz", "1"], "--lora_r: not a setting here; instead: r, the rank of one expert"),
    (["--lora_r=4", "--zzz", "1"], " | --zzz: unknown key"),
    (["--target_modules", "["], "target_modules='[': is no regular expression"),
    (["--exclude_modules", "a", "("], "exclude_modules='(': is no regular expression"),
    (["--layers_pattern", "*", "--layers_to_transform", "0"], "layers_pattern='*': is no regular expression"),
    (["--num_experts_pattern", '{"(": 3}'], "num_experts_pattern='(': is no regular expression"),
    (["--rank_pattern", '{"a{2,1}": 3}'], "rank_pattern='a{2,1}': is no regular expression"),
    (["--lora_alpha", "1e39"], "lora_alpha=1e+39: must be from 1e-06 to 65536"),
    (["--expert_map", "a=0"], "must be JSON"),
])  # fmt: skip
def test_wrong_flags_too(flags, message, case, tmp_path, capsys):
    assert message in refused("sft", tmp_path, case, *flags, capsys=capsys)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"learning_rate": -1e-3}, "learning_rate=-0.001: must be at least 0"),
        ({"router_z_loss_coef": -1.0}, "router_z_loss_coef=-1.0: must be at least 0"),
        ({"router_label_loss_coef": None}, "router_label_loss_coef=None: must be a valid number"),
        ({"router_balancing": "tokens"}, "router_balancing='tokens': must be 'global' or 'layer'"),
        ({"learning_rate": float("nan")}, "learning_rate=nan: must be finite"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0: must be at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"max_length": 0}, "max_length=0: must be at least 2"),
        ({"seed": -1}, "seed=-1"),
        (
            {"stages": {"routers": {"learning_rate": "fast"}}},
            "learning_rate='fast': must be a valid number",
        ),
        ({"stages": {"rest": {"max_grad_norm": -1.0}}}, "stages.rest.max_grad_norm=-1.0: must be at least 0"),
        ({"dataset_streaming": True}, "dataset_streaming=True: rows are counted"),
        ({"max_length": 2}, "max_length=2: no example keeps a token to learn from; raise it"),
        ({"stages": {"rest": {"max_length": 2}, "joint": None}}, "max_length=2: no example keeps"),
        ({"eos_token": "<no>"}, "The specified `eos_token` ('<no>')"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0: must be at least 1"),
        ({"push_to_hub": True, "hub_token": "no"}, "push_to_hub=True: "),
    ],
)
def test_numbers_out_of_range_and_what_would_be_ignored(own, message, case, tmp_path, capsys):
    settings = {**case, "label_column": "domain", "expert_map": MASKS} if "stages" in own else case
    assert message in refused("sft", tmp_path, {**settings, **own}, capsys=capsys)


def test_a_checkpoint_is_resumed_with_its_own_settings(case, tmp_path, capsys):
    run("sft", tmp_path, {**case, "max_steps": 3, "save_steps": 3})
    for own, message in (
        ({"top_k": 1}, "checkpoint-3': belongs to another training, with top_k 2 and not 1"),
        ({"lora_alpha": 2}, "with lora_alpha 8 and not 2"),
    ):
        with pytest.raises(SystemExit):
            run("sft", tmp_path, {**case, **own}, "--resume_from_checkpoint", "true")
        error = capsys.readouterr().err
        assert message in error and "set that, or choose another output_dir" in error


@pytest.mark.slow
def test_a_run_that_is_done_stays_as_it_is(case, tmp_path, capsys):
    own = {**case, "max_steps": 4, "save_steps": 2}  # in the middle of an epoch
    before = weights(run("sft", tmp_path, own))
    out = run("sft", tmp_path, own, "--resume_from_checkpoint", "true")
    after = weights(out)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not (out / "checkpoint-5").exists() and "4 steps of 4 rows" in (out / "README.md").read_text()
    for flags, message in (
        (["--max_steps", "3"], "max_steps=3: "),
        (["--max_steps", "9", "--learning_rate", "0.5"], "learning_rate 0.005 and not 0.5"),
        (["--max_steps", "9", "--optim", "sgd"], "optim adamw_torch"),
    ):
        with pytest.raises(SystemExit):
            run("sft", tmp_path, own, "--resume_from_checkpoint", "true", *flags)
        assert message in capsys.readouterr().err
    (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, rows(24, 5))))
    with pytest.raises(SystemExit):
        run("sft", tmp_path, {**own, "dataset_name": str(tmp_path / "other.jsonl"), "max_steps": 9},
            "--resume_from_checkpoint", "true")  # fmt: skip
    assert ": belongs to another training, with data " in capsys.readouterr().err
    run("sft", tmp_path, own, "--resume_from_checkpoint", "true", "--max_steps", "6")
    assert (out / "checkpoint-6").is_dir()


@pytest.mark.slow
def test_a_folder_that_is_not_empty_is_not_written_to(case, tmp_path, capsys):
    """Unless the training in it is resumed, which must be the same one."""
    out = run("sft", tmp_path, {**case, "learning_rate": 5e-2, "max_steps": 3})
    with pytest.raises(SystemExit):
        run("sft", tmp_path, {**case, "learning_rate": 1e-4})
    assert f"output_dir='{out}': is not empty; set resume_from_checkpoint=true" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("sft", tmp_path, {**case, "learning_rate": 1e-4}, "--resume_from_checkpoint", "true")
    assert (
        "checkpoint-3': belongs to another training, with learning_rate 0.05 and not 0.0001" in capsys.readouterr().err
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit):
        run("sft", tmp_path, {**case, "output_dir": str(tmp_path / "mine")})
    capsys.readouterr()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    # Nor to one with files, or another program's checkpoints, if there is no training to resume in it.
    (tmp_path / "theirs" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "theirs" / "checkpoint-5" / "trainer_state.json").write_text("{}")
    for name in ("mine", "theirs"):
        line = refused("sft", tmp_path, {**case, "output_dir": str(tmp_path / name)}, *RESUME, capsys=capsys)
        assert line == f"error: output_dir='{tmp_path / name}': is not empty; choose another"


@pytest.mark.slow
def test_a_run_of_a_part_of_an_epoch_is_done_when_it_is(case, tmp_path, capsys):
    own = {**{name: value for name, value in case.items() if name != "max_steps"}, "num_train_epochs": 1.5}
    before = weights(run("sft", tmp_path, own))  # 9 steps of 4 of 24 rows
    out = run("sft", tmp_path, own, "--resume_from_checkpoint", "true")
    assert not (out / "checkpoint-10").exists() and (out / "checkpoint-9").is_dir()
    after = weights(out)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(SystemExit):
        run("sft", tmp_path, {**own, "num_train_epochs": 1}, "--resume_from_checkpoint", "true")
    message = capsys.readouterr().err
    assert "num_train_epochs=1: " in message and "has 9 steps already" in message


def test_the_best_checkpoint_stays_the_result_of_a_run_that_is_done(case, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows(24))))
    own = {
        **case, "dataset_name": str(tmp_path / "data"), "max_steps": 3, "save_steps": 1, "eval_strategy": "steps",
        "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }  # fmt: skip
    before = weights(run("sft", tmp_path, own))
    first = weights(tmp_path / "out" / "checkpoint-1")
    after = weights(run("sft", tmp_path, own, "--resume_from_checkpoint", "true"))
    for name, value in first.items():
        assert torch.equal(before[name], value) and torch.equal(after[name], value)
    assert "3 steps of 4 rows" in (card := (tmp_path / "out" / "README.md").read_text())
    assert "its weights are of step 1, the best" in card
    # Also where it was moved, and another training is in its place.
    moved = {**own, "output_dir": str((tmp_path / "out").rename(tmp_path / "moved"))}
    run("sft", tmp_path, {**own, "seed": 7})
    run("sft", tmp_path, moved, "--resume_from_checkpoint", "true")
    assert all(torch.equal(weights(tmp_path / "moved")[name], value) for name, value in first.items())
    shutil.rmtree(tmp_path / "moved" / "checkpoint-1")
    line = refused("sft", tmp_path, moved, *RESUME, capsys=capsys)
    assert "checkpoint-1 has the best weights, and is not complete" in line
    # The best by another metric is another one.
    other = {**moved, "metric_for_best_model": "eval_aux_loss"}
    line = refused("sft", tmp_path, other, *RESUME, capsys=capsys)
    assert "with metric_for_best_model eval_loss and not eval_aux_loss" in line


@pytest.mark.slow
def test_a_stage_belongs_to_the_result_of_the_one_before(case, tmp_path, capsys):
    settings = {**case, "max_steps": 2, "save_steps": 2, "stages": ["joint", "rest"]}
    out = run("sft", tmp_path, settings)
    before = weights(out)
    after = weights(run("sft", tmp_path, settings, "--resume_from_checkpoint", "true"))
    assert all(torch.equal(after[name], value) for name, value in before.items())
    line = refused("sft", tmp_path, {**settings, "max_steps": 4}, *RESUME, capsys=capsys)
    assert "rest/checkpoint-2': belongs to another training, with stage before " in line


def test_folders_beside_the_checkpoints_are_not_taken_for_some(case, tmp_path):
    out = run("sft", tmp_path, case)
    before = weights(out)
    for name in ("checkpoint-3-1000", "checkpoint-6-best1", "checkpoint-9x"):
        shutil.copytree(out / "checkpoint-3", out / name)
    (out / "checkpoint-12").write_text("a file")
    after = weights(run("sft", tmp_path, case, "--resume_from_checkpoint", "true"))
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert (out / "checkpoint-3-1000").is_dir()


@pytest.mark.slow
def test_a_batch_that_the_trainer_made_smaller_is_that_of_the_steps_to_go(case, tmp_path):
    own = {**{name: value for name, value in case.items() if name != "max_steps"}, "num_train_epochs": 1}
    own["auto_find_batch_size"] = True
    out = run("sft", tmp_path, own)  # 6 steps of 4 of 24 rows
    path = out / "checkpoint-6" / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "train_batch_size": 2, "max_steps": 12}))
    mark_complete(path.parent, fingerprint_of(path.parent))
    run("sft", tmp_path, own, "--resume_from_checkpoint", "true")
    assert json.loads((out / "checkpoint-12" / "trainer_state.json").read_text())["global_step"] == 12


def test_a_checkpoint_that_was_cut_off_is_none(case, tmp_path, capsys, caplog):
    """A killed training resumes from the one before, or begins anew; either way it ends with the same weights."""
    out = run("sft", tmp_path, case)
    before = weights(out)
    for cut_off, told in (([6], "resuming from"), ([3, 6], "training from the beginning")):
        for step in cut_off:
            (out / f"checkpoint-{step}" / "complete.json").unlink()  # which is written last
        if len(cut_off) == 2:
            for path in (*out.glob("*.*"), *out.glob("checkpoint-*/trainer_state.json")):
                path.unlink()
        after = weights(run("sft", tmp_path, case, "--resume_from_checkpoint", "true"))
        assert told in caplog.text and "checkpoint-6: is not complete; skipped" in caplog.text
        assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("from", "value", "human", "gpt"), ("role", "content", "user", "assistant")], ids=["from", "role"]
)
def test_conversations_are_messages(names, case, tmp_path, capsys):
    role, content, user, assistant = names
    texts = [(row["prompt"], row["completion"]) for row in rows(12)]
    given = [[{role: user, content: prompt}, {role: assistant, content: answer}] for prompt, answer in texts]
    messages = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}] for prompt, answer in texts
    ]
    trained = {}
    for column, data in (("conversations", given), ("messages", messages)):
        (tmp_path / column).mkdir()
        (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
        (tmp_path / f"{column}.jsonl").write_text("\n".join(json.dumps({column: turn}) for turn in data))
        settings = {
            **case, "dataset_name": str(tmp_path / f"{column}.jsonl"), "max_steps": 2, "save_steps": 2,
            "chat_template_path": str(tmp_path / "template.jinja"),
        }  # fmt: skip
        run("sft", tmp_path / column, settings, "--dry-run")
        trained[column] = weights(run("sft", tmp_path / column, settings))
    for name, value in trained["messages"].items():
        assert torch.equal(trained["conversations"][name], value)


@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_prints_results_alone(quiet, case, tmp_path, capsys):
    out = run("sft", tmp_path, {**case, "max_steps": 1, "logging_steps": 1}, *["--quiet"] * quiet)
    printed = capsys.readouterr()
    assert f"result: {out}" in printed.out
    assert ("'loss'" in printed.out + printed.err) != quiet and (not quiet or printed.err == "")


@pytest.mark.parametrize(("plugins", "flags"), [([], ""), (["fractions", "colorsys"], " --plugins fractions colorsys")])
def test_what_follows_can_be_pasted_where_folders_have_spaces(plugins, flags, case, tmp_path, capsys):
    (tmp_path / "my results").mkdir()
    out = run("sft", tmp_path / "my results", {**case, "max_steps": 1, "plugins": plugins})
    commands = f"moe-peft inspect --model '{out}' --data …{flags}; moe-peft chat --model '{out}'{flags}"
    assert capsys.readouterr().out.endswith(f"next: {commands}\n")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="bfloat16 is TRL's default where a GPU has it")
def test_without_an_accelerator_bfloat16_is_off_unless_asked_for(case, tmp_path, capsys):
    settings = {name: value for name, value in case.items() if name not in ("bf16", "use_cpu")}
    assert weights(run("sft", tmp_path, {**settings, "max_steps": 1}))
    (tmp_path / "asked").mkdir()
    assert "add --bf16 false" in refused("sft", tmp_path / "asked", {**settings, "bf16": True}, capsys=capsys)


def test_rows_as_in_alpaca_are_prompts_and_completions(tmp_path):
    given = [
        {"instruction": "Add them.", "input": "2 and 3", "output": "5", "topic": "a"},
        {"instruction": "Say hi.", "input": "", "output": "hi", "topic": "b", "system": "Be kind.",
         "history": [["hello", "hello!"]]},
    ]  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps(given))
    rows = load_data(str(tmp_path / "rows.json"), "dataset_name", "topic").to_list()
    assert rows[0] == {
        "topic": "a", "prompt": [{"role": "user", "content": "Add them.\n\n2 and 3"}],
        "completion": [{"role": "assistant", "content": "5"}],
    }  # fmt: skip
    asked = [("system", "Be kind."), ("user", "hello"), ("assistant", "hello!"), ("user", "Say hi.")]
    assert [(m["role"], m["content"]) for m in rows[1]["prompt"]] == asked


def test_the_reference_of_a_native_moe_is_what_it_starts_from(case, tmp_path):
    """Not the folder on the disk, which has no routers in the place of its gates, and not a later stage's start."""
    pairs = case["dataset_name"].replace("train.jsonl", "pairs.jsonl")
    native = {name: value for name, value in case.items() if name not in ADAPTER}
    settings = {**native, "dataset_name": pairs, "max_steps": 2, "save_steps": 2, "learning_rate": 0.05}
    bases = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(bases):
        tiny_llama(vocab=128, seed=seed).save_pretrained(folder)
    upcycle(bases, tmp_path / "moe", UpcycleConfig(num_experts=2, top_k=1, init="checkpoints"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    replace_routers(model, "mlp")
    model.save_pretrained(tmp_path / "replaced")
    AutoTokenizer.from_pretrained(case["model_name_or_path"]).save_pretrained(tmp_path / "replaced")
    settings |= {"model_name_or_path": str(tmp_path / "replaced"), "stages": ["joint", "rest"]}
    out = run("dpo", tmp_path, settings)
    for stage in ("joint", "rest"):
        (first, *_) = json.loads((out / stage / "checkpoint-2/trainer_state.json").read_text())["log_history"]
        assert first["rewards/margins"] == near(0, scale=first["logps/chosen"])


@pytest.mark.parametrize("command", ["sft", "inspect", "chat", "mix", "upcycle", "pick"])
def test_a_base_that_is_no_causal_language_model_is_called_so(command, case, tokenizer, tmp_path, capsys):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    T5ForConditionalGeneration(T5Config(vocab_size=128, **sizes)).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    model, out, data = str(tmp_path / "t5"), str(tmp_path / "out"), case["dataset_name"]
    arguments = {
        "sft": ["--model_name_or_path", model, "--output_dir", out, "--dataset_name", data],
        "inspect": ["--model", model, "--output", out, "--data", data],
        "chat": ["--model", model],
        "mix": [
            "--models",
            case["model_name_or_path"],
            model,
            "--labels",
            "a",
            "b",
            "--data",
            data,
            data,
            "--output",
            out,
        ],
        "upcycle": ["--model", model, "--output", out],
        "pick": ["--fit", "--base", model, "--gate", out, "--data", data],
    }
    with pytest.raises(SystemExit):
        main([command, *arguments[command]])
    assert "t5': is a 't5' model; name a causal language model" in capsys.readouterr().err


def test_the_column_of_texts_may_have_another_name(case, tmp_path):
    texts = [f"{row['prompt']} {row['completion']}" for row in rows(24)]
    results = []
    for column in ("text", "content"):
        (folder := tmp_path / column).mkdir()
        file = folder / "rows.jsonl"
        file.write_text("\n".join(json.dumps({column: text, "other": "x"}) for text in texts))
        own = {"dataset_name": str(file), "dataset_text_field": column, "max_steps": 2, "save_strategy": "no"}
        results.append(weights(run("sft", folder, {**case, **own})))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value)


def test_a_stage_reads_numbers_as_the_file_does(case, tmp_path):
    text = yaml.safe_dump({**case, "output_dir": str(tmp_path / "out")})
    text += "\neval_strategy: no"  # which YAML reads as false
    (tmp_path / "run.yaml").write_text(text + "\nstages: {rest: {learning_rate: 1e-3, fp16: true}}\n")
    options = parser("moe-peft sft").parse_args(["--config", str(tmp_path / "run.yaml")])
    assert options.run.stages == {"rest": {"learning_rate": 1e-3, "fp16": True}}


@pytest.mark.slow
@pytest.mark.parametrize("own", [{"every_n_layers": 2}, {"selective": True}, {"selective": False}], ids=str)
def test_keys_of_checkpointing_that_transformers_and_trl_take(own, case, tmp_path, capsys):
    renamed = getattr(PreTrainedModel, "activation_checkpointing_enable", None)
    known = inspect.signature(renamed or PreTrainedModel.gradient_checkpointing_enable).parameters
    if "every_n_layers" in own and "every_n_layers" not in known:
        pytest.skip("this version of transformers does not know it")
    if own.get("selective") and renamed:
        message = refused("sft", tmp_path, {**case, "gradient_checkpointing_kwargs": own}, capsys=capsys)
        assert "gradient_checkpointing_kwargs.selective=True: TRL sets it in a method that" in message
        return
    before = weights(run("sft", tmp_path, {**case, "max_steps": 2}))
    settings = {**case, "max_steps": 2, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": own}
    after = weights(run("sft", tmp_path, {**settings, "output_dir": str(tmp_path / "other")}))
    assert_near(after, before)


@pytest.mark.parametrize("alias", ["gradient", "activation"])
def test_a_stage_changes_what_the_arguments_have_set_by_themselves(alias, case, tmp_path):
    """Arguments resolve precision and checkpointing, and note both names of the latter."""
    own = {name: value for name, value in case.items() if name not in ("bf16", "gradient_checkpointing")}
    rest = {"fp16": True, f"{alias}_checkpointing": False}
    if f"{alias}_checkpointing" not in {f.name for f in dataclasses.fields(MoESFTConfig)}:
        pytest.skip("this version of transformers has the old name alone")
    first = {f"{alias}_checkpointing_kwargs": {"use_reentrant": True}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({
        **own, "output_dir": "out", "label_column": "domain", "expert_map": MASKS,
        "stages": {"routers": first, "rest": rest},
    }, sort_keys=False))  # fmt: skip
    routers, rest = training_stages(parser("moe-peft sft").parse_args(["--config", str(path)])).values()
    assert routers.gradient_checkpointing and routers.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert rest.fp16 and not rest.bf16 and not rest.gradient_checkpointing
    for args in (routers, rest):
        assert getattr(args, "activation_checkpointing", args.gradient_checkpointing) == args.gradient_checkpointing


@pytest.mark.parametrize("name", [None, "me/mine"])
def test_stages_push_one_repository_with_the_result(name, case, tmp_path, monkeypatch):
    pushed = []

    def upload(self, *, repo_id, folder_path, **own):
        pushed.append((repo_id, Path(folder_path).name))

    monkeypatch.setattr(HfApi, "whoami", lambda self: {"name": "me"})
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **own: type("Url", (), {"repo_id": repo_id})())
    settings = {**case, "max_steps": 1, "stages": ["joint", "rest"], "push_to_hub": True, "hub_strategy": "end"}
    out = run("sft", tmp_path, settings | ({} if name is None else {"hub_model_id": name}))
    assert {repo for repo, _ in pushed} == {name or out.name} and {folder for _, folder in pushed} == {"rest"}
    assert f'from_pretrained("{name or out.name}")' in (out / "rest" / "README.md").read_text()


def test_rows_that_have_nothing_to_learn_are_counted(case, tmp_path, capsys):
    data = tmp_path / "long.jsonl"
    rows = [{"prompt": " ".join(["w5"] * n), "completion": " w6"} for n in (3, 40, 3, 40, 40)]
    data.write_text("\n".join(map(json.dumps, rows)))
    run("sft", tmp_path, {**case, "dataset_name": str(data), "max_steps": 1, "max_length": 16})
    assert "3 of 5 rows are left out: within max_length=16 they have nothing to learn\n" in capsys.readouterr().out


def test_a_flag_that_each_stage_outvotes_is_refused(case, tmp_path, capsys):
    """It would do nothing; where a stage has no value of its own, it has the flag's."""
    stages = {"joint": {"learning_rate": 1e-2}, "rest": {"learning_rate": 1e-3}}
    flags = ["--learning_rate", "0.5"]
    line = refused("sft", tmp_path, {**case, "stages": stages}, *flags, capsys=capsys)
    assert "--learning_rate: each of stages has its own value, in " in line
    line = refused("sft", tmp_path, {**case, "stages": {"rest": 3}}, *flags, capsys=capsys)
    assert "stages.rest=3: must be a mapping of settings" in line
    stages["rest"] = None
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**case, "output_dir": "out", "stages": stages}, sort_keys=False))
    joint, rest = training_stages(parser("moe-peft sft").parse_args(["--config", str(path), *flags])).values()
    assert (joint.learning_rate, rest.learning_rate) == (1e-2, 0.5)


@pytest.mark.parametrize("new_first", [True, False])
def test_a_stage_may_spell_a_setting_otherwise(new_first, case, tmp_path):
    names = ["activation_checkpointing", "gradient_checkpointing"][:: 1 if new_first else -1]
    if "activation_checkpointing" not in {f.name for f in dataclasses.fields(MoESFTConfig)}:
        pytest.skip("this version of transformers has the old name alone")
    own = {name: value for name, value in case.items() if name != "gradient_checkpointing"}
    own |= {"label_column": "domain", "expert_map": MASKS}
    stages = {"routers": {names[1]: False, "fp16": True}, "rest": None}
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump({**own, "output_dir": "out", "bf16": True, names[0]: True, "stages": stages}, sort_keys=False)
    )
    routers, rest = training_stages(parser("moe-peft sft").parse_args(["--config", str(path)])).values()
    assert (routers.gradient_checkpointing, routers.bf16, routers.fp16) == (False, False, True)
    assert (rest.gradient_checkpointing, rest.bf16, rest.fp16) == (True, True, False)


def test_a_stages_own_metric_has_its_own_direction(case, tmp_path):
    """What arguments derive from a setting is derived anew from a stage's."""
    settings = {
        **case, "output_dir": "out", "label_column": "domain", "expert_map": MASKS, "load_best_model_at_end": True,
        "eval_strategy": "steps", "eval_steps": 3, "torch_compile": True,
        "stages": {"routers": {"metric_for_best_model": "eval_compliance", "torch_compile": False}, "rest": None},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    options = parser("moe-peft sft").parse_args(["--config", str(tmp_path / "run.yaml")])
    routers, rest = training_stages(options).values()
    assert (routers.greater_is_better, rest.greater_is_better) == (True, False)
    assert (routers.torch_compile, rest.torch_compile) == (False, True)


@pytest.mark.parametrize("own", [{"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 1}], ids=str)
@pytest.mark.parametrize("plan", [(), ("--dry-run",)], ids=["run", "plan"])
def test_rows_that_fill_no_batch_are_no_training(own, plan, case, tmp_path, capsys):
    settings = {**case, **own, "per_device_train_batch_size": 32, "dataloader_drop_last": True}
    with pytest.raises(SystemExit) as end:
        run("sft", tmp_path, settings, *plan)
    line = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "dataloader_drop_last=True: 24 rows do not fill a batch of 32; lower" in line


def test_weights_that_are_not_finite_are_not_saved(case, tmp_path, capsys):
    own = {**case, "learning_rate": 1e38, "optim": "sgd", "max_grad_norm": 0.0, "max_steps": 3, "save_steps": 3}
    message = refused("sft", tmp_path, own, capsys=capsys)
    assert message.startswith("error: learning_rate=1e+38: after step 3, ") and "use a lower learning rate" in message
    assert not [*tmp_path.rglob("*.safetensors")]


def test_deepspeed_takes_one_stage(case, tmp_path, capsys, monkeypatch):
    plugin = property(lambda self: object(), lambda self, value: None)
    monkeypatch.setattr(MoESFTConfig, "deepspeed_plugin", plugin, raising=False)
    own = {**case, "label_column": "domain", "expert_map": MASKS, "stages": ["routers", "rest"]}
    assert "DeepSpeed prepares a model for one training" in refused("sft", tmp_path, own, capsys=capsys)


def test_data_of_the_other_kind_is_refused(case, tmp_path, capsys):
    assert "needs chosen and rejected" in refused("dpo", tmp_path, case, capsys=capsys)


def test_flags_go_before_the_file_and_all_fields_are_flags(case, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**case, "output_dir": "out", "learning_rate": 3e-4}))
    options = parser("moe-peft sft").parse_args(["--config", str(tmp_path / "run.yaml"), "--top-k", "1"])
    assert options.adapter["top_k"] == 1 and options.adapter["num_experts"] == 6
    assert options.training.learning_rate == 3e-4
    fields = {f.name for f in dataclasses.fields(MoELoraConfig)} - {f.name for f in dataclasses.fields(PeftConfig)}
    assert fields - {"router_aux_loss_coef"} == options.adapter.keys()
    config = MoELoraConfig(task_type="CAUSAL_LM", revision="main", **{**ADAPTER, "top_k": 1})
    assert options.adapter_config() == config


@pytest.mark.slow
def test_two_processes_train_as_one(case, tmp_path):
    """Half the batch each, over gloo, in two stages. SGD and all experts at once: rounding is not blown up."""
    own = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "top_k": 6, "router_aux_loss_coef": 0.0}
    own |= {"label_column": "domain", "expert_map": MAPS, "stages": ["routers", "rest"]}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = run("sft", tmp_path / "one", {**case, **own})
    two = {**case, **own, "per_device_train_batch_size": 2, "output_dir": str(tmp_path / "two" / "out")}
    run_as_two_processes(two, tmp_path / "two", "sft")
    expected, found = weights(one), weights(tmp_path / "two" / "out")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(found[name], value)
        assert "moe_lora_B" not in name or value.any()


def test_a_plan_needs_no_accelerator(case, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    run("sft", tmp_path, {**case, "bf16": True, "use_cpu": False}, "--dry-run")
    assert "memory, about" in capsys.readouterr().out
    own = {name: value for name, value in case.items() if name not in ADAPTER}
    (tmp_path / "other").mkdir()
    assert "LlamaForCausalLM has no router" in refused(
        "sft", tmp_path / "other", {**own, "use_peft": False}, capsys=capsys
    )
    with pytest.raises(SystemExit):
        main(["sft", "--num_expert", "4"])
    assert "did you mean" in capsys.readouterr().err  # before anything else is looked at


# --- what a file may say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *(
            (key, None, f"{key}=None: must be a valid ")
            for key in ("learning_rate", "seed", "logging_steps", "optim", "lr_scheduler_type", "save_strategy", "beta")
        ),
        *(
            (key, {"a": 1}, f"{key}={{'a': 1}}: must be a valid ")
            for key in ("learning_rate", "output_dir", "model_name_or_path", "max_length", "bf16", "use_cpu", "dtype",
                        "target_modules", "load_in_4bit", "use_peft", "r", "report_to", "dry_run")
        ),
        ("report_to", "comet_ml", "report_to='comet_ml': "),
        ("report_to", "nonsense", "report_to='nonsense': "),
        ("report_to", "wandb", "report_to='wandb': "),
        ("num_experts", 1, "num_experts=1: a single expert is always active and has no router"),
        ("target_modules", "all", "target_modules: all: not a setting here; instead: target_modules: all-linear"),
        ("target_modules", ["W_pack"], "{'W_pack'} not found in the base model"),
        ("bf16", "auto", "bf16: auto: not a setting here; instead: leave it out"),
        ("fp16", True, "fp16=True: a CPU does not train in float16"),
        ("stages", {"joint": {"fp16": True}}, "stages.joint.fp16=True: a CPU does not train in float16"),
        ("adapter", "lora", "adapter: lora: not a setting here; instead: leave it out"),
        ("model", "no/such", "model: not a setting here; instead: model_name_or_path"),
        ("optim", "schedule_free_adamw", "optim='schedule_free_adamw': "),
        ("optim_args", "foo", "optim_args='foo': "),
        ("lr_scheduler_kwargs", {"foo": 1}, "lr_scheduler_kwargs={'foo': 1}: of 'linear'"),
        ("lr_scheduler_type", "warmup_stable_decay", "lr_scheduler_kwargs={}: of 'warmup_stable_decay'"),
        ("accelerator_config", {"foo": 1}, "foo"),
        ("max_steps", 0, "max_steps=0: must be from 1 to 1,000,000,000, or -1"),
        ("num_train_epochs", 1e308, "num_train_epochs=1e+308: must be above 0"),
        ("chat_template_path", "nowhere", "chat_template_path='nowhere'"),
        ("expert_map", "[" * 100_000, "must be JSON like"),
        ("rank_pattern", '{"a": 1, "a": 2}', "must be a valid dictionary"),
        ("activation_checkpointing_kwargs", "x", "activation_checkpointing_kwargs='x': must be a mapping"),
        ("dataset_kwargs", "x", "dataset_kwargs='x': must be a mapping"),
        ("torch_compile_mode", "fast", "torch_compile_mode='fast': must be one of default, "),
        ("trust_remote_code", True, "trust_remote_code=True: is not read here; code that comes with a model"),
        ("model_init_kwargs", {"a": 1}, "model_init_kwargs={'a': 1}: is not read here; use model_revision"),
        ("assistant_only_loss", True, "assistant_only_loss=True: the data have no conversations; use"),
        ("resume_from_checkpoint", "nowhere", "resume_from_checkpoint='nowhere': is not a complete checkpoint"),
    ],
)  # fmt: skip
def test_a_wrong_value_of_a_file_is_named(key, value, message, case, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # where W&B would find a login
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    command = "dpo" if key == "beta" else "sft"
    assert message in refused(command, tmp_path, {**case, key: value}, capsys=capsys)


def test_the_eos_token_goes_with_the_result(case, tmp_path):
    out = run("sft", tmp_path, {**case, "max_steps": 1}, "--eos_token", "w5")
    assert AutoTokenizer.from_pretrained(out).eos_token == "w5"


@pytest.mark.parametrize(
    ("rows_of_base", "added", "why"),
    [(128, ["<new>"], "adds '<new>'"), (192, [], "gives 128 rows to the embeddings, which have 192")],
)
def test_another_tokenizers_template_that_would_change_the_base(
    rows_of_base, added, why, case, tmp_path, tokenizer, capsys
):
    """A native MoE, whose embeddings are saved with it, may have it."""
    tiny_llama(vocab=rows_of_base).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    other = copy.deepcopy(tokenizer)
    other.add_tokens(added)
    other.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    other.save_pretrained(tmp_path / "other")
    settings = {**case, "model_name_or_path": str(tmp_path / "base"), "chat_template_path": str(tmp_path / "other")}
    line = refused("sft", tmp_path, settings, capsys=capsys)
    assert f"its tokenizer {why}, and an adapter keeps its base's; name a .jinja file, and set eos_token" in line
    upcycle(tmp_path / "base", tmp_path / "moe", UpcycleConfig(num_experts=4))
    own = {name: value for name, value in settings.items() if name not in ADAPTER}
    run("sft", tmp_path, {**own, "model_name_or_path": str(tmp_path / "moe"), "max_steps": 1})


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_launchers_variable_that_is_no_number(name, case, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(name, "two")
    assert f"error: {name}='two' in the environment: must be an integer" in refused(
        "sft", tmp_path, case, capsys=capsys
    )


def test_what_is_not_on_this_machine_is_said_before_training(case, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("moe_peft.training.preflight.is_liger_kernel_available", lambda: False)
    own = {**case, "use_liger_kernel": True}
    assert "use_liger_kernel=True: liger-kernel is not installed; pip" in refused("sft", tmp_path, own, capsys=capsys)
    own = {**case, "activation_offloading": True}
    assert "activation_offloading=True: there is no accelerator" in refused("sft", tmp_path, own, capsys=capsys)


def test_rows_of_one_token_have_nothing_to_learn(case, tmp_path, capsys):
    """Their routers would train alone."""
    data = tmp_path / "tokens.jsonl"
    data.write_text('{"input_ids": [3]}\n{"input_ids": [4]}\n')
    line = refused("sft", tmp_path, {**case, "dataset_name": str(data)}, capsys=capsys)
    assert "max_length=1024: no example keeps a token to learn from; " in line


def test_a_plan_says_which_packages_are_missing(case, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_tensorboard_available", lambda: False)
    for flags in ([], ["--dry-run"]):
        line = refused("sft", tmp_path, {**case, "report_to": "tensorboard"}, *flags, capsys=capsys)
        assert "report_to='tensorboard': TensorBoardCallback requires tensorboard to be installed" in line


@pytest.mark.parametrize("key", ["completion_only_loss", "assistant_only_loss"])
def test_answers_that_no_row_has(key, tokenizer, tmp_path):
    args = MoESFTConfig(output_dir=str(tmp_path), **SETTINGS, **{key: True})
    data = Dataset.from_list([{"text": "w1 w2 w3"}])
    with pytest.raises(ValueError, match=f"^{key}=True: the data have no "):
        MoESFTTrainer(tiny_llama(), args, train_dataset=data, processing_class=tokenizer)


def test_a_value_that_may_be_null_is(case, tmp_path):
    assert run("sft", tmp_path, {**case, "max_steps": 1, "max_length": None, "eval_steps": None, "lora_dropout": 0.0})


def test_one_excluded_module_is_a_name(case, tmp_path):
    out = run("sft", tmp_path, {**case, "max_steps": 1, "exclude_modules": ["layers.0.mlp"]})
    assert all("layers.1." in name for name in weights(out))


def test_the_models_own_folder_and_fields_of_an_adapter(case, tmp_path, capsys):
    moe = tmp_path / "moe"
    upcycle(case["model_name_or_path"], moe, UpcycleConfig(num_experts=4))
    own = {key: value for key, value in case.items() if key not in ADAPTER} | {"model_name_or_path": str(moe)}
    before = (moe / "model.safetensors").read_bytes()
    for flags, message in (
        (["--output_dir", str(moe)], f"output_dir='{moe}': is not empty"),
        (["--num_experts", "4"], "num_experts=4: is for a MoE-LoRA adapter"),
    ):
        assert message in refused("sft", tmp_path, own, *flags, capsys=capsys)
    assert (moe / "model.safetensors").read_bytes() == before


# --- an adapter that is trained further -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(case, tmp_path_factory):
    return run("sft", tmp_path_factory.mktemp("trained"), {**case, "max_steps": 3})


@pytest.fixture
def further(case, trained, tmp_path):
    """Settings without those of a new adapter, and a trained one."""
    first = shutil.copytree(trained, tmp_path / "first")
    settings = {key: value for key, value in case.items() if key not in (*ADAPTER, "model_name_or_path")}
    return {**settings, "adapter": str(first)}, first


def test_an_adapter_is_trained_further_as_in_python(further, case, tokenizer, tmp_path):
    settings, first = further
    out = run("sft", tmp_path, settings, "--router_aux_loss_coef", "0.02")
    args = MoESFTConfig(output_dir=str(tmp_path / "python"), **SETTINGS, router_aux_loss_coef=0.02)
    base = AutoModelForCausalLM.from_pretrained(case["model_name_or_path"], dtype=torch.float32)
    set_seed(args.seed)
    model = PeftModel.from_pretrained(base, first, is_trainable=True)
    trainer = MoESFTTrainer(model, args, train_dataset=Dataset.from_list(rows(24)), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(tmp_path / "python"))
    before, after = weights(first), weights(out)
    for name, value in weights(tmp_path / "python").items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0)
        assert not torch.equal(value, before[name]), name
    config = PeftConfig.from_pretrained(out)
    assert (config.num_experts, config.router_aux_loss_coef) == (6, 0.02)
    assert config.base_model_name_or_path == case["model_name_or_path"]
    trainings = [(folder / "README.md").read_text().count("\n- `MoESFTTrainer`") for folder in (first, out)]
    assert trainings == [1, 1]


def test_further_training_resumes_and_knows_its_adapter(further, tmp_path, capsys):
    settings, first = further
    settings["lr_scheduler_type"] = "constant"
    expected = weights(run("sft", tmp_path, settings))
    shutil.rmtree(tmp_path / "out/checkpoint-6")
    resumed = run("sft", tmp_path, settings, "--resume_from_checkpoint", "true")
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())
    shutil.rmtree(tmp_path / "out/checkpoint-6")
    save_file({name: 2 * value for name, value in weights(first).items()}, first / "adapter_model.safetensors")
    with pytest.raises(SystemExit):
        run("sft", tmp_path, settings, "--resume_from_checkpoint", "true")
    assert "adapter " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_an_adapter_of_other_kinds_of_trainers_and_its_plan(command, further, case, tmp_path, capsys):
    settings, first = further
    if command == "dpo":
        settings = {**settings, "dataset_name": str(Path(case["dataset_name"]).with_name("pairs.jsonl"))}
    run(command, tmp_path, settings, "--dry_run", "true")
    assert "trainable parameters" in capsys.readouterr().out.replace("\n", " ")
    out = run(command, tmp_path, {**settings, "max_steps": 1, "save_steps": 1})
    assert weights(out).keys() == weights(first).keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4}, "num_experts=4: is for a new adapter, but adapter names an existing one"),
        ({"router_type": "mlp"}, "router_type='mlp': is for a new adapter"),
        ({"adapter": "nowhere"}, "adapter='nowhere'"),
        ({"adapter": "base"}, "is a dense model; give a MOE_LORA adapter"),
        ({"adapter": "lora"}, "is a LORA adapter; give a MOE_LORA adapter"),
        ({"adapter": "pickled"}, "only safetensors are read"),
    ],
)
def test_an_adapter_that_cannot_be_trained_further(changes, message, further, case, tmp_path, capsys):
    settings, first = further
    lora = get_peft_model(tiny_llama(vocab=128), LoraConfig(task_type="CAUSAL_LM", target_modules=["up_proj"]))
    lora.save_pretrained(tmp_path / "lora")
    shutil.copytree(first, tmp_path / "pickled")
    (tmp_path / "pickled/adapter_model.safetensors").rename(tmp_path / "pickled/adapter_model.bin")
    folders = {"base": case["model_name_or_path"], "lora": str(tmp_path / "lora"), "pickled": str(tmp_path / "pickled")}
    changes = {name: folders.get(value, value) for name, value in changes.items()}
    assert message in refused("sft", tmp_path, {**settings, **changes}, capsys=capsys)
