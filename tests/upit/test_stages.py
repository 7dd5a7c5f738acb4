"""Stages: what identifies them, which ones a recipe has, what they pass on."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit.context import Budget
from moe_peft.upit.methods import METHODS
from moe_peft.upit.pipeline import MODES
from moe_peft.upit.stage_cache import Stage
from moe_peft.upit.stages import TrainerStage
from tests.helpers.models import tiny_llama
from tests.helpers.upit_case import make_case

MINIMAL = {"output_dir": "out", "model": {"name_or_path": "base"}, "data": {"train": "train.jsonl"}}


def pipeline_of(settings):
    """A pipeline that needs no files."""
    pipeline = UpIT(recipe_from_dict(settings))
    rows = [{"text": "w", "domain": "abc"[i % 3]} for i in range(48)]
    pipeline.context.__dict__["train_data"] = Dataset.from_list(rows)
    pipeline.context.__dict__["positions"] = None
    names = ("model", "train", "eval", "experts", "chat_template")
    pipeline.context.__dict__["hashes"] = {name: f"hash of {name}" for name in names}
    return pipeline


def test_settings_that_decide_no_result_leave_finished_stages_alone():
    settings = {**MINIMAL, "num_experts": 4, "sft": {"bf16": False, "use_cpu": True}}

    def fingerprint(**sft):
        return pipeline_of({**settings, "sft": {**settings["sft"], **sft}}).stages[0].fingerprint()

    first = fingerprint()
    other = {"report_to": "tensorboard", "logging_steps": 3, "save_steps": 7, "dataloader_num_workers": 1}
    assert first.difference(fingerprint(**other)) is None
    own = {
        "max_length": 77, "warmup_steps": 3, "weight_decay": 0.3, "max_grad_norm": 0.3, "optim": "sgd", "packing": True,
        "lr_scheduler_type": "cosine", "adam_beta2": 0.9, "per_device_train_batch_size": 3, "neftune_noise_alpha": 5.0,
        "gradient_accumulation_steps": 3, "completion_only_loss": False, "dataloader_drop_last": True,
    }  # fmt: skip
    for name, value in own.items():
        assert f"sft.{name} " in first.difference(fingerprint(**{name: value}))


def test_a_change_is_passed_on_to_what_follows():
    pipeline = pipeline_of({**MINIMAL, "num_experts": 4})
    stage = pipeline.stages[1]
    pipeline.records["prepare"] = {"fingerprint": {"seed": 0}, "files": {"model": [1, None]}}
    before = stage.fingerprint()
    for record in ({"fingerprint": {"seed": 1}, "files": {"model": [1, None]}}, {"fingerprint": {}, "files": {}}):
        pipeline.records["prepare"] = record
        assert "result of prepare" in before.difference(stage.fingerprint())


@pytest.mark.parametrize(("mode", "rate"), [("lora", 2e-4), ("ffn", 2e-5)])
def test_what_a_recipe_leaves_out_is_the_papers(mode, rate, tmp_path):
    settings = {**MINIMAL, "mode": mode, "num_experts": 4, "sft": {"bf16": False, "use_cpu": True}}
    for stage in pipeline_of(settings).stages:
        if isinstance(stage, TrainerStage):
            args = stage.arguments()
            assert (args.learning_rate, args.lr_scheduler_type, args.max_length) == (rate, "constant", 2048)
    own = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "max_length": 64}
    settings = {**settings, "sft": {**settings["sft"], **own}, "prepare": {"sft": {"learning_rate": 3e-3}}}
    first, *_, last = (s for s in UpIT(recipe_from_dict(settings)).stages if isinstance(s, TrainerStage))
    assert first.arguments().learning_rate == 3e-3
    args = last.arguments()
    assert (args.learning_rate, args.lr_scheduler_type, args.max_length) == (1e-3, "cosine", 64)


@pytest.mark.parametrize("mode", ["lora", "ffn"])
def test_stage_3_stands_beside_the_budget_or_within_it(mode):
    settings = {**MINIMAL, "mode": mode, "num_experts": 4, "num_train_epochs": 2}
    settings["router_init"] = {"seed_fraction": 0.125, "num_train_epochs": 2}
    assert pipeline_of(settings).context.budget == Budget(1.0, 0.25, 1.0)
    settings["router_init"]["within_budget"] = True
    assert pipeline_of(settings).context.budget == Budget(1.0, 0.25, 0.75)
    settings["router_init"]["num_train_epochs"] = 8
    with pytest.raises(ValueError, match=r"no passes are left for stage 4; set router_init\.within_budget=false"):
        pipeline_of(settings).context.budget  # noqa: B018


def test_every_mode_has_methods_and_stages():
    assert METHODS.keys() == MODES.keys()
    for mode, methods in METHODS.items():
        for method, facts in methods.items():
            settings = {**MINIMAL, "mode": mode, "method": method, "num_experts": 4}
            stages = [stage.name for stage in UpIT(recipe_from_dict(settings)).stages]
            assert ("prepare" in stages, "post_train" in stages) == (facts.prepares, facts.assembles)
            assert ("router_init" in stages) == facts.initializes_routers


def handed(**settings):
    """Stage → what it is given, as paths relative to the run."""
    pipeline = UpIT(recipe_from_dict({**MINIMAL, "num_experts": 4, **settings}))
    return {stage.name: stage.given for stage in pipeline.stages}, pipeline


def experts(stage, *indices):
    return tuple(Path("out", stage, "experts", str(i)) for i in indices)


def test_stages_hand_on_the_latest_experts():
    artifacts, pipeline = handed(prepare={"num_experts": 2})
    assert artifacts["prepare"].experts == ()
    assert artifacts["expand"].experts == experts("prepare", 0, 1)
    assert artifacts["router_init"].experts == experts("expand", 0, 1, 2, 3)
    assert artifacts["post_train"].experts == experts("router_init", 0, 1, 2, 3)
    assert artifacts["post_train"].routers == Path("out/router_init/routers.safetensors")
    assert pipeline.stages[-1].result.model == Path("out/post_train/adapter") and pipeline.result == Path("out/adapter")
    artifacts, pipeline = handed(mode="ffn")
    assert artifacts["post_train"].experts == experts("router_init", 0, 1, 2, 3)
    assert artifacts["post_train"].routers == Path("out/router_init/routers.safetensors")
    assert pipeline.result == Path("out/model")


def test_copies_and_given_experts_are_handed_on():
    artifacts, _ = handed(method="loramoe_sft")
    assert artifacts["post_train"].experts == experts("prepare", 0) * 4
    artifacts, _ = handed(method="loramoe_sft", prepare={"adapters": ["x", "y"]})
    assert list(artifacts) == ["post_train"] and artifacts["post_train"].experts == (Path("y"),) * 4
    assert artifacts["post_train"].routers is None
    _, pipeline = handed(method="lora", prepare={"adapters": ["x"]})
    assert [stage.name for stage in pipeline.stages] == ["prepare"] and pipeline.stages[0].result.model == Path(
        "out/prepare/adapter"
    )


def test_a_stage_is_one_class_and_one_entry(monkeypatch):
    class Note(Stage):
        """Needs no section of the recipe."""

        name = "note"

        @classmethod
        def wanted(cls, recipe):
            return True

        def run(self, folder):
            return {"model": str(self.given.model)}

    monkeypatch.setattr(MODES["lora"], "stages", [*MODES["lora"].stages, Note])
    pipeline = pipeline_of({**MINIMAL, "method": "lora"})
    assert [stage.name for stage in pipeline.stages] == ["prepare", "note"]
    note = pipeline.stages[-1]
    assert note.run(Path()) == {"model": str(Path("out/prepare/adapter"))}
    assert note.fingerprint().facts["note.seed"] == 0
    assert pipeline.result == Path("out/adapter")


def test_stage_1_saves_the_same_bytes_whatever_the_hash_seed(tmp_path, tokenizer):
    recipe = recipe_from_dict(make_case(tmp_path, tokenizer))
    config = UpIT(recipe).context.kind.lora_config(tiny_llama(vocab=128))
    saved = config.to_dict()["target_modules"]
    assert saved == sorted(saved) and len(saved) == 3


def test_labels_of_an_expert_map_may_be_numbers(tmp_path, tokenizer):
    case = make_case(tmp_path, tokenizer)
    case["router_init"] |= {"buckets": "label", "expert_map": {0: [0, 1], 1: [2, 3]}}
    assert recipe_from_dict(case).router_init.expert_map == {0: [0, 1], 1: [2, 3]}
