"""Imports flow one way, without circles (the contracts stand in `pyproject.toml`), and a name means one thing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path


def test_imports_flow_one_way_without_circles():
    """In a process of its own: the linter sets up logging for all."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_a_name_means_one_thing():
    """Of public classes, functions and type aliases, except the `run` and `parser` of the commands."""
    where = defaultdict(set)
    for path in (Path(__file__).parents[1] / "moe_peft").rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            aliases = [t.id for t in targets if isinstance(t, ast.Name) and not t.id.isupper() and t.id[0].isupper()]
            for name in [node.name] if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else aliases:
                where[name].add(str(path))
    repeated = {name for name, paths in where.items() if len(paths) > 1 and name[0] != "_"}
    assert repeated <= {"run", "parser"}
