"""No command runs code that lies in a model's folder, even if stdin answers yes."""

from __future__ import annotations

import ast
import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from moe_peft.cli import main
from tests.helpers.bad_input import changed, make_world, refused

ROOT = Path(__file__).parents[2]
MAPS = {
    "model": ("config.json", {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"}),
    "tokenizer": ("tokenizer_config.json", {"AutoTokenizer": ["planted.Tokenizer", "planted.Tokenizer"]}),
}
KINDS = {"model": {"model_type": "planted"}, "tokenizer": {"tokenizer_class": "Planted"}}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def world(kind, tmp_path, tokenizer, monkeypatch):
    """A base that asks for the code of a file in its folder, and adapters of it."""
    made = make_world(tmp_path / "world", tokenizer)
    (made / "base" / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(3)\n")
    file, auto_map = MAPS[kind]
    changed(file, auto_map=auto_map, **KINDS[kind])(made / "base")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    return made


def arguments(command: str, world: Path) -> list[str]:
    base, data, out = (str(world / name) for name in ("base", "train.jsonl", "out"))
    loras = [str(world / "lora0"), str(world / "lora1")]
    training = ["--model_name_or_path", base, "--dataset_name", data, "--output_dir", out, "--bf16", "false"]
    if command == "upit":
        case = {**json.loads((world / "case.json").read_text()), "output_dir": out}
        (world / "recipe.yaml").write_text(yaml.safe_dump(case))
    return {
        "sft": ["sft", *training],
        "dpo": ["dpo", *training],
        "upit": ["upit", "--config", str(world / "recipe.yaml")],
        "chat": ["chat", "--model", str(world / "moe")],
        "inspect": ["inspect", "--model", str(world / "moe"), "--data", data, "--output", out],
        "mix": ["mix", "--adapters", *loras, "--data", data, data, "--output", out],
        "pick": ["pick", "--fit", "--base", base, "--data", data, "--label-column", "domain", "--gate", out],
        "upcycle": ["upcycle", "--model", base, "--output", out],
        "prune": ["prune", "--model", str(world / "moe"), "--drop", "[3]", "--output", out],
        "export": ["export", "--adapter", str(world / "moe"), "--output", out],
    }[command]  # fmt: skip


COMMANDS = ["sft", "dpo", "upit", "chat", "inspect", "mix", "pick", "upcycle", "prune", "export"]
WITHOUT_TOKENIZER = ["upcycle", "prune", "export"]


@pytest.mark.parametrize("command", COMMANDS)
def test_code_in_a_folder_is_not_run(command, kind, world, capsys, tmp_path):
    given = arguments(command, world)
    if kind == "tokenizer" and command in WITHOUT_TOKENIZER:
        main(given)
    else:
        line = refused(given, capsys, world / "out")
        assert str(world / "base") in line and "trust_remote_code" not in line
    assert not (tmp_path / "ran").exists()


def test_an_architecture_of_transformers_needs_no_code(tmp_path, tokenizer):
    """Such models have `auto_map` for older versions."""
    made = make_world(tmp_path / "world", tokenizer)
    changed("config.json", auto_map=MAPS["model"][1])(made / "base")
    (made / "base" / "planted.py").write_text("raise SystemExit(3)\n")
    main(arguments("upcycle", made))
    assert (made / "out" / "config.json").is_file()


def test_every_load_by_an_auto_class_says_so():
    """Left out, `trust_remote_code` is a question on stdin."""
    loads = 0
    for path in (ROOT / "moe_peft").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("Auto"):
                loads += 1
                assert any(word.arg is None for word in node.keywords), f"{path}:{node.lineno}: lacks **NO_CODE"
    assert loads > 5
