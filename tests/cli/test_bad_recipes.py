"""Recipes that cannot be meant: every field with values of the wrong kind, and texts that are not a recipe."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import re

import pytest
import yaml

from moe_peft.training.trainers import MoEDPOConfig, MoESFTConfig
from moe_peft.upit import Recipe, load_recipe, recipe_from_dict
from moe_peft.utils.messages import InputError
from moe_peft.utils.validation import Settings, check_fields, check_range, read_yaml

GOOD = {
    "output_dir": "out",
    "model": {"name_or_path": "base"},
    "data": {"train": "train.jsonl", "eval": "eval.jsonl", "label_column": "domain"},
    "num_experts": 4,
}
NAN, INF = math.nan, math.inf
WRONG = [
    None, True, False, "text", "", "  ", 0, -1, 0.5, 1.5, NAN, INF, -INF, 10**9, 10**30, [], {}, [1], {"a": 1}, "a\nb",
    [None], "1", "1e-4", ["x"], [[1]], "\x00",
]  # fmt: skip
TEXTS, DATA = ["text", "1", "1e-4"], ["text", "1", "1e-4", {}, {"a": 1}]
COUNTS, SEEDS, FLAGS, MAPS = [10**9], [None, 0, 10**9], [True, False], [{}]
# What of `WRONG` each field may be. A file or a name that does not exist is found when it is read.
MAY = {
    "output_dir": TEXTS, "plugins": [[]], "num_train_epochs": [0.5, 1.5], "prepare_share": [0.5], "seed": SEEDS[1:],
    "num_experts": [], "mode": [], "method": [], "adapter": MAPS, "moe": MAPS, "sft": MAPS,
    "model.name_or_path": TEXTS, "model.revision": [None, *TEXTS], "model.dtype": [],
    "model.attn_implementation": [None, *TEXTS], "model.quantization": [None, {}],
    "data.train": DATA, "data.eval": [None, *DATA], "data.label_column": [None, *TEXTS],
    "data.calibration_examples": COUNTS, "data.calibration_length": COUNTS,
    "prepare.num_experts": [None], "prepare.num_checkpoints": [None], "prepare.selection": [],
    "prepare.adapters": [None], "prepare.checkpoints": [None], "prepare.seed": SEEDS,
    "prepare.sft": MAPS, "expand.method": [], "expand.similarity": [], "expand.drop_rate": [None, 0, 0.5],
    "expand.seed": SEEDS, "router_init.buckets": [], "router_init.alpha": [0, 0.5],
    "router_init.gates": [], "router_init.router_learning_rate": [None, 0.5, 1.5, 10**9, 10**30],
    "router_init.train_experts": FLAGS, "router_init.seed_fraction": [0.5], "router_init.num_train_epochs": COUNTS,
    "router_init.within_budget": FLAGS, "router_init.expert_map": [None],
    "router_init.seed": SEEDS, "router_init.sft": MAPS, "post_train.train_experts": FLAGS, "post_train.seed": SEEDS,
    "post_train.router": [{}], "post_train.sft": MAPS,
    "prepare": MAPS, "expand": MAPS, "router_init": MAPS, "post_train": MAPS, "model": [], "data": [],
    "adapter.r": [10**9, 10**30], "adapter.top_k": [], "adapter.lora_dropout": [0, 0.5], "adapter.router_type": [],
    "adapter.lora_alpha": [None, 0.5, 1.5], "adapter.mixing": [], "adapter.use_rslora": FLAGS,
    "adapter.normalize_top_k": FLAGS, "adapter.router_aux_loss_coef": [0, 0.5, 1.5, 10**9, 10**30],
    "sft.learning_rate": [0, 0.5, 1.5, 10**9, 10**30], "sft.per_device_train_batch_size": [10**9, 10**30],
    "sft.gradient_accumulation_steps": [10**9, 10**30], "sft.max_length": [None, 10**9, 10**30],
    "sft.logging_steps": [0.5, 1.5, 10**9, 10**30], "sft.save_steps": [10**9, 10**30],
    "sft.max_grad_norm": [0, 0.5, 1.5, 10**9, 10**30], "sft.weight_decay": [0, 0.5, 1.5, 10**9, 10**30],
    "sft.adam_beta1": [0, 0.5], "sft.optim": [], "sft.lr_scheduler_type": [], "sft.bf16": [None, *FLAGS],
    "sft.packing": FLAGS, "sft.warmup_steps": [0, 0.5, 1.5, 10**9, 10**30],
    "sft.dataset_num_proc": [None, 10**9, 10**30],
}  # fmt: skip


def test_the_table_has_every_field():
    names = set(Recipe.model_fields)
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            names |= {f"{name}.{own}" for own in field.annotation.model_fields}
    assert {name for name in MAY if not name.startswith(("adapter.", "sft."))} == names


def same(a, b):
    return type(a) is type(b) and repr(a) == repr(b)


@pytest.mark.parametrize("path", MAY)
def test_a_field_takes_what_it_can_be_alone(path):
    *parents, last = path.split(".")
    for value in WRONG:
        settings = copy.deepcopy(GOOD)
        section = settings
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        if any(same(value, good) for good in MAY[path]):
            recipe_from_dict(settings)
            continue
        with pytest.raises(ValueError) as refused:
            recipe_from_dict(settings)
        assert type(refused.value) is InputError, value
        message = str(refused.value)
        assert "\n" not in message and len(message) < 400 and last in message, (value, message)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a mapping of keys"),
        ("- 1\n", "must be a mapping of keys"),
        ("just words", "must be a mapping of keys"),
        ("output_dir: [", "read as YAML"),
        ("output_dir: a\noutput_dir: b\n", "'output_dir' occurs twice"),
        ("model: {name_or_path: a, name_or_path: b}\n", "'name_or_path' occurs twice"),
        ("a: &a [1]\nb: *c\n", "read as YAML"),
        ("a: !!python/object/apply:os.system ['true']\n", "read as YAML"),
        ("a: !!python/name:os.system\n", "read as YAML"),
        ("a: b\n---\nc: d\n", "read as YAML"),
        ("? [1, 2]\n: 3\n", "read as YAML|unknown key"),
        ("1: 2\n", "output_dir: must be given"),
        ("{" * 5000, "read as YAML"),
        ("a: " + "[" * 5000 + "]" * 5000, "read as YAML"),
        ("a: 2024-13-45\n", "read as YAML|unknown key"),
        ("\x00", "read as YAML"),
        ("a:\tb\n\t- c", "read as YAML"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_recipe(text, words, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=words) as refused:
        load_recipe(tmp_path / "recipe.yaml")
    assert type(refused.value) is InputError and "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize("key", [1, None, True, 1.5, (1, 2)])
def test_a_key_that_is_no_text(key):
    with pytest.raises(ValueError, match=f"{re.escape(str(key))}: Keys should be strings"):
        recipe_from_dict({**GOOD, key: 1})
    with pytest.raises(ValueError, match=f"sft={re.escape(str(key))}: must be a valid string"):
        recipe_from_dict({**GOOD, "sft": {key: 1}})


def test_a_file_that_is_no_text(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # that nobody fills
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    for name, words in (
        (".", "not a file"), ("none", "no such file"), ("pipe", "not a file"), ("binary", "not UTF-8 text at byte 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            load_recipe(tmp_path / name)
    with pytest.raises(ValueError, match="not a file"):
        load_recipe("/dev/zero")


def test_a_byte_order_mark_aliases_and_merged_keys_are_yaml(tmp_path):
    text = yaml.safe_dump(GOOD) + "prepare: &own {seed: 3}\nexpand: {<<: *own, drop_rate: 0.5}\n"
    (tmp_path / "recipe.yaml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert (recipe.prepare.seed, recipe.expand.seed, recipe.expand.drop_rate) == (3, 3, 0.5)
    assert read_yaml("a: &a {b: 1}\nc: {<<: *a, b: 2}\n", "here") == {"a": {"b": 1}, "c": {"b": 2}}


@pytest.mark.parametrize("name", ["hub_token", "hub_model_id", "auto_find_batch_size"])
def test_what_a_stage_does_not_do_is_refused(name):
    """A token would be written to the stage's record, besides."""
    value = True if name.startswith("auto") else "secret"
    with pytest.raises(ValueError, match=f"post_train.sft.{name}: ") as error:
        recipe_from_dict({**GOOD, "post_train": {"sft": {name: value}}})
    assert "secret" not in str(error.value)


def test_the_defaults_of_training_arguments_are_in_range():
    for kind in (MoESFTConfig, MoEDPOConfig):
        fields = {f.name: f.default for f in dataclasses.fields(kind) if f.init}
        check_fields(kind, {name: value for name, value in fields.items() if value is not dataclasses.MISSING})
    for name, value in (
        ("adam_beta2", 1.0),
        ("max_length", 1),
        ("label_smoothing", 1),
        ("seed", 2**32),
        ("learning_rate", -1e-9),
    ):
        with pytest.raises(ValueError, match=f"here.{name}="):
            check_range(name, value, "here.")
    with pytest.raises(ValueError, match=r"lr_scheduler_type='cosin': must be one of cosine, "):
        check_fields(MoESFTConfig, {"lr_scheduler_type": "cosin"})
    with pytest.raises(ValueError, match=r"sft.eval_strategy: stages have no evaluation data"):
        recipe_from_dict({**GOOD, "post_train": {"sft": {"eval_strategy": "steps"}}})
    with pytest.raises(ValueError, match=r"sft.trust_remote_code: code .* is never run"):
        recipe_from_dict({**GOOD, "sft": {"trust_remote_code": True}})
