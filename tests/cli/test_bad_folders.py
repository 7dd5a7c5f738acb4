"""Damaged and wrong folders: each command refuses them with one line, before it writes anything."""

from __future__ import annotations

import copy
import json
import re
import shutil

import pytest
import torch
import yaml

from moe_peft.native import upcycle
from moe_peft.utils import loading
from tests.helpers.bad_input import (
    NO_ADAPTER,
    NO_MODEL,
    NO_MOE,
    NO_NATIVE,
    NO_SHARDS,
    NO_TOKENIZER,
    changed,
    damaged,
    make_world,
    refused,
    tensors,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory, tokenizer):
    return make_world(tmp_path_factory.mktemp("files") / "world", tokenizer)


def recipe(world, folder, **settings):
    """The arguments of a run whose recipe has these sections."""
    case = {**json.loads((world / "case.json").read_text()), "output_dir": str(folder / "out")}
    for name, value in settings.items():
        case[name] = {**case[name], **value} if isinstance(value, dict) and name in case else value
    (folder / "recipe.yaml").write_text(yaml.safe_dump(copy.deepcopy(case)))
    return ["upit", "--config", str(folder / "recipe.yaml")]


def training(world, folder, model):
    options = ["--model_name_or_path", str(model), "--dataset_name", str(world / "train.jsonl"), "--output_dir", folder]
    return ["sft", *map(str, options), "--max_steps", "1", "--bf16", "false", "--use_cpu", "true"]


COMMANDS = {
    "upcycle": lambda world, model, out: ["upcycle", "--model", str(model), "--output", str(out)],
    "export": lambda world, model, out: ["export", "--adapter", str(model), "--output", str(out)],
    "prune": lambda world, model, out: ["prune", "--model", str(model), "--drop", "[3]", "--output", str(out)],
    "inspect": lambda world, model, out: [
        "inspect", "--model", str(model), "--data", str(world / "train.jsonl"), "--output", str(out)
    ],
    "sft": lambda world, model, out: training(world, out, model),
    "upit": lambda world, model, out: recipe(world, out.parent, model={"name_or_path": str(model)}),
    "upit, given": lambda world, model, out: recipe(
        world, out.parent, num_experts=2, prepare={"adapters": [str(model), str(world / "lora1")], "num_experts": None}
    ),
}  # fmt: skip


def to_eight_bits(state):
    state |= {name: tensor.to(torch.float8_e4m3fn) for name, tensor in state.items() if ".mlp." in name}


def in_turn(commands, **cases):
    """Each damage, with one of the commands and the folder that it reads."""
    return [(*commands[i % len(commands)], name, *case) for i, (name, case) in enumerate(cases.items())]


# Of UpIT, its first stage reads the weights. The run's folder has been made by then, and is removed again.
CASES = [
    *in_turn([("upcycle", "base"), ("sft", "base"), ("upit", "base")], **NO_MODEL),
    *in_turn([("upcycle", "sharded"), ("sft", "sharded"), ("upit", "sharded")], **NO_SHARDS),
    *in_turn([("export", "moe"), ("prune", "moe"), ("inspect", "moe"), ("upit, given", "lora0")], **NO_ADAPTER),
    *in_turn([("export", "moe"), ("prune", "moe"), ("inspect", "moe")], **NO_MOE),
    *in_turn([("prune", "native"), ("inspect", "native")], **NO_NATIVE),
    *in_turn([("inspect", "native"), ("sft", "base"), ("upit", "base")], **NO_TOKENIZER),
    (
        "prune",
        "native",
        "no experts",
        changed("config.json", num_local_experts=0),
        "num_local_experts: the config says",
    ),
    (
        "upcycle",
        "base",
        "eight bits",
        tensors("model.safetensors", to_eight_bits),
        "F8_E4M3; use a checkpoint of",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "folder", "damage", "words"), [(c[0], c[1], c[3], c[4]) for c in CASES],
                         ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES])  # fmt: skip
def test_a_damaged_folder_is_refused_in_one_line(command, folder, damage, words, world, tmp_path, capsys):
    wrong = damaged(world, folder, damage, tmp_path)
    line = refused(COMMANDS[command](world, wrong, tmp_path / "out"), capsys, tmp_path / "out")
    assert re.search(words, line), line


@pytest.mark.parametrize(("tokens", "words"), [(5, "133 tokens, its embeddings have 128 rows"), (0, "no tokenizer")])
def test_export_finds_out_before_it_writes_that_it_cannot_be_verified(tokens, words, world, tmp_path, capsys):
    damage = NO_TOKENIZER["fewer embeddings than tokens" if tokens else "no tokenizer"][0]
    base = damaged(world, "base", damage, tmp_path)
    adapter = damaged(world, "moe", changed("adapter_config.json", base_model_name_or_path=str(base)), tmp_path)
    arguments = ["export", "--adapter", str(adapter), "--output", str(tmp_path / "out"), "--verify", "w3 w4"]
    assert words in refused(arguments, capsys, tmp_path / "out")


def test_a_single_file_of_weights_goes_before_an_index(world, tmp_path):
    """As in transformers. A model that is saved again may leave shards of the one before, or their index."""
    shutil.copytree(world / "sharded", tmp_path / "model")
    for shard in (tmp_path / "model").glob("model-*"):
        shard.unlink()
    shutil.copy(world / "base" / "model.safetensors", tmp_path / "model")
    made = upcycle(tmp_path / "model", tmp_path / "made")
    expected = upcycle(world / "base", tmp_path / "expected")
    assert (made / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def test_of_an_adapter_on_the_hub_only_safetensors_are_read(world, monkeypatch):
    asked = []

    def download(name, file):
        asked.append((name, file))
        return str(world / "moe" / file)

    monkeypatch.setattr(loading, "hf_hub_download", download)
    assert any("moe_lora_A" in key for key in loading.read_adapter_weights("some/adapter", "adapter"))
    assert asked == [("some/adapter", "adapter_model.safetensors")]


@pytest.mark.parametrize("name", ["tokenizer.model", "additional_chat_templates", "LICENSE"])
@pytest.mark.parametrize(
    ("command", "folder"), [("upcycle", "base"), ("export", "moe"), ("prune", "moe"), ("prune", "native")]
)
def test_a_link_out_of_a_folder_is_not_followed_into_what_may_be_published(
    command, folder, name, world, tmp_path, capsys
):
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key.jinja").write_text("secret")
    target = tmp_path / "private" / ("" if name.endswith("templates") else "key.jinja")

    def damage(copy):
        for path in (world / "base").glob("tokenizer*"):  # an adapter without a tokenizer gives an export nothing
            shutil.copy(path, copy)
        (copy / name).symlink_to(target)

    wrong = damaged(world, folder, damage, tmp_path)
    line = refused(COMMANDS[command](world, wrong, tmp_path / "out"), capsys, tmp_path / "out")
    assert f"{name}" in line and "key.jinja, outside the folder; copy that file here, or remove it" in line


def test_links_of_the_hubs_cache_and_loops(world, tmp_path):
    """In the cache, a snapshot's files are links to blobs beside it."""
    snapshot, blobs = (tmp_path / "models--org--name" / part for part in ("snapshots/revision", "blobs"))
    shutil.copytree(world / "base", snapshot)
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    templates = snapshot / "additional_chat_templates"
    templates.mkdir()
    (templates / "loop").symlink_to(templates)
    (templates / "rag.jinja").write_text("{{ messages }}")
    made = upcycle(snapshot, tmp_path / "made")
    assert (made / "tokenizer.json").read_bytes() == (world / "base" / "tokenizer.json").read_bytes()
    assert [path.name for path in (made / "additional_chat_templates").iterdir()] == ["rag.jinja"]
