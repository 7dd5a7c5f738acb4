"""Imports flow one way, files are small, and none deals with two of trainers, disk formats and tensor mathematics."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import moe_peft

ROOT = Path(moe_peft.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FORMATS = {"safetensors", "json", "yaml", "csv", "filelock"}
# What a file may use of torch and not be about tensors: types, and contexts.
PLAIN = {
    "Tensor", "Size", "dtype", "device", "Generator", "no_grad", "enable_grad", "float64", "float32", "bfloat16",
    "float16", "int64", "long", "bool", "nn", "optim", "cuda", "accelerator", "backends", "is_grad_enabled",
    "set_grad_enabled", "utils", "compiler", "autocast", "is_autocast_enabled", "distributed", "uint8",
}  # fmt: skip


def knows(path: Path) -> set[str]:
    """Which of the three a file deals with itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=module, names=names) if (module or "").startswith(("trl", "transformers")):
                if any(alias.name.endswith("Trainer") for alias in names):
                    found.add("trainers")
            case ast.Import(names=names) if {alias.name.partition(".")[0] for alias in names} & FORMATS:
                found.add("disk formats")
            case ast.ImportFrom(module=module, level=0) if (module or "").partition(".")[0] in FORMATS:
                found.add("disk formats")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name not in PLAIN:
                found.add("tensors")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="F"))):
                found.add("tensors")
    return found


def test_imports_flow_one_way_without_circles():
    """The contracts stand in `pyproject.toml`. In a process of its own: the linter sets up logging for all."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_small_and_knows_one_thing(path):
    assert len(path.read_text().splitlines()) <= 400
    assert len(knows(path)) <= 1, knows(path)
