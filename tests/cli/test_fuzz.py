"""
Random input, by hypothesis: whatever is read either works or is refused with one line. `make fuzz` tries many more.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import struct
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_peft import MoELoraConfig
from moe_peft.native import UpcycleConfig
from moe_peft.native.safetensors_io import Checkpoint
from moe_peft.routing import read_expert_map
from moe_peft.training.data import check_rows
from moe_peft.upit import Recipe, recipe_from_dict
from moe_peft.utils.io import read_json
from moe_peft.utils.loading import read_adapter_config, read_adapter_weights, read_config
from moe_peft.utils.messages import InputError
from moe_peft.utils.validation import check_fields, read_yaml
from tests.helpers.bad_input import ADAPTER, ADAPTER_WEIGHTS, CONFIG, WEIGHTS, make_world

pytestmark = pytest.mark.slow

quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
settings.register_profile("short", max_examples=30, derandomize=True, deadline=None, suppress_health_check=quiet)
settings.register_profile(
    "long", max_examples=int(os.environ.get("FUZZ_EXAMPLES", "5000")), deadline=None, suppress_health_check=quiet
)
settings.load_profile(os.environ.get("FUZZ", "short"))

numbers = st.integers(-3, 20) | st.integers() | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.sampled_from(["0", "1e-4", "nan", "~", "\x00"])
keys = st.text(max_size=5) | numbers
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)


def refused_in_one_line(function, *args: Any, **own: Any) -> Any:
    """What it returns; None if it refuses its arguments as it should."""
    try:
        return function(*args, **own)
    except InputError as error:
        message = str(error)
        assert type(error) is InputError and message and "\n" not in message and len(message) < 1000, repr(error)
        return None


def paths() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, field in Recipe.model_fields.items():
        own = getattr(field.annotation, "model_fields", {})
        found += [(name,), *((name, inner) for inner in own)]
    named = ("r", "top_k", "router_type", "num_experts_pattern", "target_projections", "lora_dropout")
    trained = (
        "learning_rate",
        "max_length",
        "optim",
        "save_steps",
        "report_to",
        "max_steps",
        "expert_map",
        "warmup_steps",
    )
    return [
        *found,
        ("model", "dtype"),
        ("data", "eval"),
        *(("adapter", n) for n in named),
        *(("sft", n) for n in trained),
    ]


@given(st.lists(st.tuples(st.sampled_from(paths()), values), max_size=3))
def test_recipes(changes):
    recipe: dict[str, Any] = {"output_dir": "out", "model": {"name_or_path": "m"}, "data": {"train": "t.jsonl"}}
    for path, value in changes:
        section = recipe
        for name in path[:-1]:
            section = section.setdefault(name, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section[path[-1]] = value
    refused_in_one_line(recipe_from_dict, recipe)


@given(st.text(max_size=60) | st.text("[]{}:,&*!|>-? \n'\"#a1", max_size=60))
def test_yaml(text):
    refused_in_one_line(read_yaml, text, "text")


@pytest.mark.parametrize("kind", [MoELoraConfig, UpcycleConfig])
@given(data=st.data())
def test_configs(kind, data):
    names = [f.name for f in dataclasses.fields(kind) if f.init and f.name not in ("peft_type", "auto_mapping")]
    settings = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=3))
    # What a recipe or a command line gives is typed.
    refused_in_one_line(lambda: (check_fields(kind, settings), kind(**settings)))


maps = st.dictionaries(
    st.text(max_size=3) | st.integers(0, 3), st.lists(st.integers(-1, 5) | st.booleans(), max_size=6), max_size=3
)


@given(maps, st.integers(1, 5))
def test_expert_maps(drawn, n):
    """What is read is one of the two readings that a map can have; one that has none is refused."""
    found = refused_in_one_line(read_expert_map, drawn, n, "expert_map")
    readings = []
    if all(len(own) == n and set(own) <= {0, 1} and any(own) for own in drawn.values()):
        readings.append({str(label): [i for i, x in enumerate(own) if x] for label, own in drawn.items()})
    if all(own and len(set(own)) == len(own) and set(own) <= set(range(n)) for own in drawn.values()):
        readings.append({str(label): list(own) for label, own in drawn.items()})
    assert found in readings if found is not None else True
    if not readings:
        assert found is None


rows = st.fixed_dictionaries({}, optional={
    "text": st.none() | st.text(max_size=4), "prompt": st.none() | st.text(max_size=4),
    "completion": st.none() | st.text(max_size=4), "input_ids": st.none() | st.lists(st.integers(-2, 130), max_size=3),
    "messages": st.none() | st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]), "content": st.text(max_size=3)}),
        max_size=3,
    ),
})  # fmt: skip


@given(st.lists(rows, min_size=1, max_size=3))
def test_rows(tokenizer, drawn):
    dataset = Dataset.from_list([{"prompt": None, "completion": None, **row} for row in drawn])
    refused_in_one_line(check_rows, dataset, "data", tokenizer, None, lambda: "{{ messages[0].content }}")


@pytest.fixture(scope="module")
def world(tmp_path_factory, tokenizer):
    return make_world(tmp_path_factory.mktemp("files") / "world", tokenizer)


edits = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "zero"]), st.floats(0, 1), st.integers(0, 255)), max_size=4
)


def edited(content: bytes, changes: list[tuple[str, float, int]]) -> bytes:
    for what, share, byte in changes:
        at = int(share * max(0, len(content) - 1))
        if what == "flip":
            content = content[:at] + bytes([content[at] ^ (byte or 1)] if content else []) + content[at + 1 :]
        elif what == "cut":
            content = content[:at]
        elif what == "insert":
            content = content[:at] + bytes([byte]) * 3 + content[at:]
        else:
            content = content[:at] + bytes(len(content) - at)
    return content


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS, "header"])
@given(changes=edits)
def test_model_folders(file, changes, world, tmp_path):
    shutil.copytree(world / "base", tmp_path / "m", dirs_exist_ok=True)
    path = tmp_path / "m" / (WEIGHTS if file == "header" else file)
    content = path.read_bytes()
    if file == "header":  # edited where it says what is where
        (length,) = struct.unpack("<Q", content[:8])
        head = edited(content[8 : 8 + length], changes)
        path.write_bytes(struct.pack("<Q", len(head)) + head + content[8 + length :])
    else:
        path.write_bytes(edited(content, changes))
    refused_in_one_line(read_config, tmp_path / "m", "model")
    checkpoint = refused_in_one_line(Checkpoint, tmp_path / "m")
    for name in list(checkpoint or [])[:3]:
        tensor = refused_in_one_line(checkpoint.tensor, name)
        assert tensor is None or math.isfinite(float(tensor.double().sum()))


@pytest.mark.parametrize("file", [ADAPTER, ADAPTER_WEIGHTS])
@given(changes=edits)
def test_adapter_folders(file, changes, world, tmp_path):
    shutil.copytree(world / "moe", tmp_path / "a", dirs_exist_ok=True)
    (tmp_path / "a" / file).write_bytes(edited((tmp_path / "a" / file).read_bytes(), changes))
    refused_in_one_line(read_adapter_config, tmp_path / "a", "adapter")
    found = refused_in_one_line(read_adapter_weights, tmp_path / "a", "adapter")
    assert found is None or all(isinstance(tensor, torch.Tensor) for tensor in found.values())


@given(value=values, changes=edits)
def test_json(value, changes, tmp_path):
    text = json.dumps(value, skipkeys=True).encode()
    (tmp_path / "f.json").write_bytes(edited(text, changes))
    found = refused_in_one_line(read_json, tmp_path / "f.json")
    assert found is None or isinstance(found, dict)
