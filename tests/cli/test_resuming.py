"""What a training that resumes must be like, and what it refuses: other settings, and files that are cut off."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments
from trl import DPOConfig, KTOConfig, SFTConfig

from moe_peft.training import MoEDPOConfig, MoESFTConfig
from moe_peft.training import checkpointing as continuing
from tests.helpers.training_case import make_case, run

# What does not decide a training, or is seen in the prepared rows or the base, of which hashes are noted.
INCIDENTAL = {
    "model_init_kwargs", "trust_remote_code", "chat_template_path", "dataset_text_field", "dataset_kwargs",
    "dataset_num_proc", "eos_token", "pad_token", "shuffle_dataset", "packing_strategy", "padding_free",
    "pad_to_multiple_of", "eval_packing", "activation_offloading", "precompute_ref_log_probs",
    "precompute_ref_batch_size", "label_column",
}  # fmt: skip


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, KTOConfig, MoESFTConfig, MoEDPOConfig])
def test_every_argument_of_a_trainer_decides_or_does_not(config):
    own = {f.name for f in fields(config)} - {f.name for f in fields(TrainingArguments)}
    left = {name for name in own - continuing._DECISIVE - INCIDENTAL if not name.startswith("router_")}
    assert not left, "add them to _DECISIVE of moe_peft/training/checkpointing.py, or to INCIDENTAL"
    assert not INCIDENTAL & continuing._DECISIVE


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
        ({"router_threshold": None}, "router_threshold=None: resume_from_checkpoint: .* was trained with 0.5; set"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern={'q_proj': 8}: .* was trained with {'q_proj': 4}; set"),
        ({"alpha_pattern": {}}, "alpha_pattern={}: .* was trained with {'q_proj': 4}"),
        ({"target_modules": ["q_proj", "mlp"]}, r"target_modules=\['mlp', 'q_proj'\]: .*; set that, or start anew"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: .* was trained with None"),
        ({"label_smoothing_factor": 0.1}, "with label_smoothing_factor 0.0 and not 0.1"),
        ({"bf16": True}, "with bf16 False and not True"),
    ],
)
def test_every_setting_is_that_of_the_checkpoint(own, words, stopped, tmp_path, capsys):
    settings, out = stopped
    shutil.copytree(out, tmp_path / "out")
    line = refused(capsys, "sft", tmp_path, {**settings, **own})
    assert re.search(words, line), line


def test_an_unchanged_training_goes_on(stopped, tmp_path):
    settings, out = stopped
    shutil.copytree(out, tmp_path / "out")
    note = tmp_path / "out" / "checkpoint-3" / continuing.NOTE
    noted = json.loads(note.read_text())
    assert noted["bf16"] is False
    note.write_text(json.dumps({name: value for name, value in noted.items() if name != "bf16"}))  # an older version's
    names = ["v_proj", "mlp", "q_proj"]
    run("sft", tmp_path, {**settings, "target_modules": names, "max_steps": 6}, "--resume_from_checkpoint", "true")
    assert (tmp_path / "out" / "checkpoint-6").is_dir()


@pytest.mark.slow
def test_dpo_goes_on_with_its_own_loss_only(case, tmp_path, capsys):
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


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("rng_state.pth", lambda text: text[:100], "rng_state.pth is cut off"),
        ("scheduler.pt", lambda text: text[:100], "scheduler.pt is cut off"),
        ("trainer_state.json", lambda text: text[:100], "trainer_state.json: Expecting ',' .*; remove the folder"),
        ("trainer_state.json", lambda text: b"[1]", "trainer_state.json: TypeError: "),
        ("trainer_state.json", lambda text: b'{"global_step": null}', "trainer_state.json: global_step=None: must be"),
        ("trainer_state.json", lambda text: b'{"global_step": true}', "trainer_state.json: global_step=True: must be"),
        ("trainer_state.json", lambda text: b'{"unknown": 1}', "trainer_state.json: TypeError: .*'unknown'; remove"),
    ],
)
def test_a_damaged_checkpoint_is_refused(file, damage, words, stopped, tmp_path, capsys):
    settings, out = stopped
    shutil.copytree(out, tmp_path / "out")
    path = tmp_path / "out" / "checkpoint-3" / file
    path.write_bytes(damage(path.read_bytes()))
    for resume in ("true", str(path.parent)):
        line = refused(capsys, "sft", tmp_path, {**settings, "max_steps": 6}, resume)
        assert "resume_from_checkpoint: " in line and re.search(words, line), line
