"""
Random input, by hypothesis: whatever is read either works or is refused with one line. `make fuzz` tries many more.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_peft import MoELoraConfig
from moe_peft.analysis.inspect_settings import InspectSettings
from moe_peft.cli import main
from moe_peft.cli.chat import ChatSettings
from moe_peft.cli.export import ExportSettings
from moe_peft.cli.pick import PickSettings
from moe_peft.cli.prune import PruneSettings
from moe_peft.cli.upcycle import UpcycleSettings
from moe_peft.combine.mix_settings import MixSettings
from moe_peft.combine.request_gate import FILE as GATE
from moe_peft.native import UpcycleConfig
from moe_peft.native.safetensors_io import Checkpoint
from moe_peft.routing import read_expert_map
from moe_peft.training.data import check_rows
from moe_peft.upit import Recipe, recipe_from_dict
from moe_peft.utils.io import read_json
from moe_peft.utils.loading import read_adapter_config, read_adapter_weights, read_config
from moe_peft.utils.messages import InputError
from moe_peft.utils.validation import check_fields, plain_types, read_yaml
from tests.helpers.bad_input import ADAPTER, ADAPTER_WEIGHTS, CONFIG, WEIGHTS, make_world
from tests.helpers.upit_case import rows as prompts

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


# --- every setting of every command, and every file that the package writes for itself ------------------------------

with_time = pytest.mark.skipif(os.environ.get("FUZZ") != "long", reason="takes minutes; `make fuzz` runs it")
TEXTS = [
    "", "   ", "\0", "cafe\u0301", "[", "(?P<", "x" * 300, "../x", "dangling", "folder", "base", "mean", "mixture",
    "mean of the adapters", "~", "a/b", "a\nb", "😀", "%s {0}", "-x", "nan", "/dev/null", "\u200b",
]  # fmt: skip
NUMBERS = [math.nan, math.inf, 1e39, -0.0, True, "1", -1, 10**30, 0.5]
# Command → its settings, and those of a run that succeeds; `mix` in its two ways.
COMMANDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "inspect": (InspectSettings, {"model": "moe", "data": "train.jsonl", "label_column": "domain", "output": "out"}),
    "prune": (PruneSettings, {"model": "moe", "drop": [3], "output": "out"}),
    "export": (ExportSettings, {"adapter": "moe", "output": "out"}),
    "upcycle": (UpcycleSettings, {"model": ["base"], "output": "out"}),
    "mix": (MixSettings, {"adapters": ["lora0", "lora1"], "gates": "arrow", "output": "out"}),
    "mix with data": (MixSettings, {"adapters": ["lora0", "lora1"], "data": ["a.jsonl", "b.jsonl"], "output": "out"}),
    "pick": (PickSettings, {"fit": True, "base": "base", "data": ["a.jsonl", "b.jsonl"], "gate": "out"}),
    "chat": (ChatSettings, {"model": "moe"}),
}  # fmt: skip
WRITES = ("out", "upit", "sft")  # folders that a case begins without
UPIT = ["upit", "--config", "recipe.yaml"]
SFT = [
    "sft", "--model_name_or_path", "base", "--dataset_name", "train.jsonl", "--output_dir", "sft", "--bf16", "false",
    "--use_cpu", "true", "--max_steps", "4", "--save_steps", "2", "--report_to", "none",
    "--resume_from_checkpoint", "true",
]  # fmt: skip
# File → the command that writes it, and others that read it.
FILES: dict[str, tuple[list[str], ...]] = {
    "out/mix.json": (
        ["mix", "--adapters", "lora0", "lora1", "--data", "a.jsonl", "b.jsonl", "--output", "out"],
        ["mix", "--add-to", "out", "--adapters", "moved", "--labels", "c", "--data", "a.jsonl", "--output", "more"],
    ),
    f"out/{GATE}": (
        ["pick", "--fit", "--base", "base", "--data", "a.jsonl", "b.jsonl", "--gate", "out"],
        ["pick", "--gate", "out", "--server", "http://127.0.0.1:9"],  # where nobody answers
    ),
    "out/routing.json": (["inspect", "--model", "moe", "--data", "train.jsonl", "--output", "out"],),
    **dict.fromkeys(
        [f"upit/{name}" for name in ("manifest.json", "prepare/complete.json", "prepare/stage.json")],
        (UPIT, [*UPIT, "--dry-run"], ["upit", "--compare", "upit"]),
    ),
    **dict.fromkeys(
        ("sft/trainer_state.json", "sft/checkpoint-4/complete.json", "sft/checkpoint-4/trainer_state.json"),
        (SFT, ["upit", "--compare", "sft"]),
    ),
}  # fmt: skip


@pytest.fixture
def here(world, tmp_path, monkeypatch) -> Path:
    """The current folder: a copy of the world, and what commands need besides."""
    shutil.copytree(world, tmp_path / "world")
    monkeypatch.chdir(tmp_path / "world")
    Path("folder").mkdir()
    Path("dangling").symlink_to("nowhere")
    for name, offset in (("a", 0), ("b", 7)):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, prompts(12, offset))))
    shutil.copytree("lora1", "moved")
    state = load_file(f"moved/{ADAPTER_WEIGHTS}")
    save_file({name: 0.5 * tensor for name, tensor in state.items()}, f"moved/{ADAPTER_WEIGHTS}", {"format": "pt"})
    short = {"output_dir": "upit", "num_experts": 2, "num_train_epochs": 1, "prepare": {"num_experts": 2}}
    Path("recipe.yaml").write_text(yaml.safe_dump({**json.loads(Path("case.json").read_text()), **short}))
    return tmp_path / "world"


def complaint(arguments: list[str], monkeypatch, capsys) -> str:
    """How a command ended, unless it succeeded or was refused in one line."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code: Any = 0
    try:
        main([arguments[0], "--quiet", *arguments[1:]])
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr().err
    refused = code == 2 and printed.count("error: ") == 1 and "Traceback" not in printed
    return "" if code in (0, None) or refused else f"exit code {code}: {printed[-300:]}"


def odd_settings(command: str) -> Iterator[dict[str, Any]]:
    kind, usual = COMMANDS[command]
    for name, field in kind.model_fields.items():
        kinds = {*plain_types(field.annotation)}
        for value in (TEXTS if str in kinds else []) + (NUMBERS if kinds & {int, float} else []):
            each = [value] if list in kinds else {value: value} if dict in kinds else value
            chosen = {**usual, name: each}
            if command == "export" and name == "model":
                del chosen["adapter"]
            if command == "upcycle" and name == "calibration":
                chosen["router_init"] = "attention"
            yield chosen


@with_time
@pytest.mark.parametrize("command", COMMANDS)
def test_settings_of_commands(command, here, monkeypatch, capsys):
    found, arguments = {}, [command.split()[0], "--config", "settings.yaml"]
    Path("settings.yaml").write_text(yaml.safe_dump(COMMANDS[command][1]))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    main(arguments)  # succeeds
    for chosen in odd_settings(command):
        for folder in WRITES:
            shutil.rmtree(folder, ignore_errors=True)
        Path("settings.yaml").write_text(yaml.safe_dump(chosen))
        if wrong := complaint(arguments, monkeypatch, capsys):
            found[repr(chosen)] = wrong
    assert not found


def text_of(path: Path) -> str:
    """What is in a JSON file; of a gate, in its header."""
    if path.name != GATE:
        return path.read_text()
    with safe_open(path, "pt") as file:
        return file.metadata()["request_gate"]


def put(path: Path, text: str) -> None:
    if path.name == GATE:
        save_file(load_file(path), path, {"request_gate": text})
    else:
        path.write_text(text)


def odd_contents(text: str) -> Iterator[str]:
    yield from ("", text[: len(text) // 2], "[]", "{}", "null", "3", "\0" * 9, "[" * 100_000)
    saved = json.loads(text)
    for name, value in saved.items():
        yield json.dumps({key: other for key, other in saved.items() if key != name})
        yield from (json.dumps({**saved, name: other}) for other in (None, 3, "x", [], {"a": 3}) if other != value)


@with_time
@pytest.mark.parametrize("file", FILES)
def test_files_of_ours(file, here, monkeypatch, capsys):
    folder, made, found = Path(file).parts[0], here / "made", {}
    assert not complaint(FILES[file][0], monkeypatch, capsys)
    shutil.copytree(folder, made)
    needs_empty_folder = FILES[file][0][0] in ("mix", "pick")
    for content in odd_contents(text_of(Path(file))):
        for arguments in FILES[file][needs_empty_folder:]:
            for each in (*WRITES, "more"):
                shutil.rmtree(each, ignore_errors=True)
            shutil.copytree(made, folder)
            put(Path(file), content)
            if wrong := complaint(arguments, monkeypatch, capsys):
                found[f"{arguments}: {content[:80]}"] = wrong
    assert not found
