"""A training that resumes is the same one: its settings, its data, its base."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments
from trl import DPOConfig, SFTConfig

from moe_peft.training.checkpointing import INCIDENTAL, fingerprint_of, mark_complete
from moe_peft.utils.validation import _NUMBERS
from tests.helpers.training_case import make_case, run
from tests.helpers.upit_case import rows


def test_arguments_that_do_not_count_are_arguments():
    """A name that is no longer an argument must not stay in a list of arguments."""
    names = {f.name for config in (SFTConfig, DPOConfig) for f in fields(config)}
    assert names >= INCIDENTAL and names >= _NUMBERS.keys()


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    return make_case(tmp_path_factory.mktemp("case"), tokenizer)


@pytest.fixture(scope="module")
def stopped(case, tmp_path_factory):
    """A training of 3 steps."""
    folder = tmp_path_factory.mktemp("stopped")
    settings = {**case, "max_steps": 3, "router_type": "top_p", "router_threshold": 0.5}
    settings |= {"alpha_pattern": {"q_proj": 4}, "target_modules": ["q_proj", "mlp", "v_proj"], "num_experts": 4}
    return settings, run("sft", folder, settings)


def refused(capsys, command: str, folder: Path, settings: dict, resume: str = "true") -> str:
    with pytest.raises(SystemExit) as end:
        run(command, folder, settings, "--resume_from_checkpoint", resume)
    printed = capsys.readouterr().err
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert end.value.code == 2 and len(lines) == 1 and "Traceback" not in printed
    return lines[0]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"router_threshold": None}, "with router_threshold 0.5 and not None; set that"),
        ({"alpha_pattern": {"q_proj": 8}}, "with alpha_pattern {'q_proj': 4} and not {'q_proj': 8}"),
        ({"alpha_pattern": {}}, "with alpha_pattern {'q_proj': 4} and not {}"),
        ({"target_modules": ["q_proj", "mlp"]}, r"with target_modules \['mlp', 'q_proj', 'v_proj'\] and not"),
        ({"modules_to_save": ["lm_head"]}, r"with modules_to_save None and not \['lm_head'\]"),
        ({"label_smoothing_factor": 0.1}, "with label_smoothing_factor 0.0 and not 0.1"),
        ({"bf16": True}, "with bf16 False and not True"),
    ],
)
def test_every_setting_is_that_of_the_checkpoint(own, words, stopped, tmp_path, capsys):
    settings, out = stopped
    shutil.copytree(out, tmp_path / "out")
    line = refused(capsys, "sft", tmp_path, {**settings, **own})
    assert re.search(words, line), line


def test_a_training_that_is_longer_and_logs_more_resumes(stopped, tmp_path):
    settings, out = stopped
    shutil.copytree(out, tmp_path / "out")
    own = {"target_modules": ["v_proj", "mlp", "q_proj"], "max_steps": 6, "logging_steps": 2, "dataset_num_proc": 1}
    own |= {"bf16_full_eval": True, "resume_from_checkpoint": True}  # in a file, it is not a word
    run("sft", tmp_path, {**settings, **own})
    assert (tmp_path / "out" / "checkpoint-6").is_dir()


def test_in_a_file_false_trains_from_the_beginning(stopped, tmp_path):
    settings, _ = stopped
    out = run("sft", tmp_path, {**settings, "max_steps": 1, "resume_from_checkpoint": False})
    assert (out / "checkpoint-1").is_dir()


def test_a_training_resumes_with_as_many_processes(stopped, tmp_path, capsys, monkeypatch):
    """More of them read more rows in each step."""
    settings, out = stopped
    shutil.copytree(out, tmp_path / "out")
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda args: 2))
    line = refused(capsys, "sft", tmp_path, {**settings, "max_steps": 6})
    assert "checkpoint-3': belongs to another training, with processes 1 and not 2; set that" in line


def test_every_row_is_that_of_the_checkpoint(case, tmp_path, capsys):
    data = rows(300)
    settings = {**case, "dataset_name": str(tmp_path / "rows.jsonl"), "max_steps": 1, "save_steps": 1}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, data)))
    run("sft", tmp_path, settings)
    data[1]["completion"] = " w3 w3 w3"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, data)))
    line = refused(capsys, "sft", tmp_path, {**settings, "max_steps": 2})
    assert "checkpoint-1': belongs to another training, with data " in line


@pytest.mark.slow
def test_dpo_resumes_with_its_own_loss_only(case, tmp_path, capsys):
    settings = {**case, "dataset_name": str(Path(case["dataset_name"]).with_name("pairs.jsonl")), "max_steps": 3}
    out = run("dpo", tmp_path, settings)
    for own, words in (
        ({"label_smoothing": 0.1}, "with label_smoothing 0.0 and not 0.1"),
        ({"ld_alpha": 0.5}, "with ld_alpha None and not 0.5"),
        ({"disable_dropout": False}, "with disable_dropout True and not False"),
        ({"f_divergence_type": "js_divergence"}, "with f_divergence_type reverse_kl and not js_divergence"),
    ):
        assert words in refused(capsys, "dpo", tmp_path, {**settings, "max_steps": 6, **own})
    assert not (out / "checkpoint-6").exists()


@pytest.mark.parametrize("file", ["optimizer.pt", "trainer_state.json", "complete.json"])
def test_a_damaged_checkpoint_is_named_or_passed_over(file, stopped, tmp_path, capsys, caplog):
    settings, out = stopped
    shutil.copytree(out, tmp_path / "out")
    path = tmp_path / "out" / "checkpoint-3" / file
    path.write_bytes(path.read_bytes()[:100])
    line = refused(capsys, "sft", tmp_path, {**settings, "max_steps": 6}, str(path.parent))
    assert "resume_from_checkpoint=" in line and "is not a complete checkpoint" in line
    run("sft", tmp_path, {**settings, "max_steps": 4}, "--resume_from_checkpoint", "true")
    assert "training from the beginning" in caplog.text and (tmp_path / "out" / "checkpoint-4").is_dir()


def test_a_checkpoint_without_an_optimizer_is_not_resumed_from(case, tmp_path, capsys):
    """Momentum and scale of the steps are in it; without them, the training would be another one."""
    settings = {**case, "max_steps": 3, "save_only_model": True}
    run("sft", tmp_path, settings)
    run("sft", tmp_path, settings, "--resume_from_checkpoint", "true")  # which is done
    line = refused(capsys, "sft", tmp_path, {**settings, "max_steps": 6})
    assert "checkpoint-3 has no optimizer state (save_only_model saves none)" in line


def test_another_adapter_is_not_overwritten_by_a_training_that_resumes(case, tmp_path, capsys):
    out = run("sft", tmp_path, {**case, "max_steps": 1, "save_strategy": "no"})
    before = (out / "adapter_model.safetensors").read_bytes()
    line = refused(capsys, "sft", tmp_path, {**case, "max_steps": 1, "seed": 3})
    assert line.endswith("is not empty; choose another")
    assert (out / "adapter_model.safetensors").read_bytes() == before


class Planted:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickle_in_a_checkpoint_is_not_run(file, stopped, tmp_path, capsys):
    settings, out = stopped
    shutil.copytree(out, tmp_path / "out")
    checkpoint = tmp_path / "out" / "checkpoint-3"
    torch.save({"state": Planted(tmp_path / "ran")}, checkpoint / file)
    mark_complete(checkpoint, fingerprint_of(checkpoint))  # as whoever plants it would
    line = refused(capsys, "sft", tmp_path, {**settings, "max_steps": 6})
    assert str(checkpoint) in line and not (tmp_path / "ran").exists()
