"""What messages tell a user to use is there: flags, commands, functions, pages and their headings."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from moe_peft.cli.commands import COMMANDS
from moe_peft.cli.usual_options import UsualOptions

ROOT = Path(__file__).parents[1]
OF_OTHERS = {
    "--enable-lora", "--lora-modules", "--hf-overrides", "--tokenizer", "--tensor-parallel-size",
    "--max-lora-rank",  # vLLM's
    "--model_args", "--tasks", "--limit",  # lm_eval's
    "--no_bf16",  # HfArgumentParser's other way to write --bf16 false
}  # fmt: skip


def texts() -> dict[str, set[str]]:
    """Text → the files of the package that have it; docstrings are left out."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "moe_peft").rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = {id(node.body[0].value) for node in ast.walk(tree)
                      if isinstance(node, documented) and isinstance(node.body[0], ast.Expr)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.setdefault(node.value, set()).add(str(path.relative_to(ROOT)))
    return found


TEXTS = texts()


def named(pattern: str) -> list[tuple[str, str]]:
    """What messages name, with a file each."""
    hits = {hit: min(files) for text, files in sorted(TEXTS.items()) for hit in re.findall(pattern, text)}
    return sorted(hits.items())


@pytest.fixture(scope="session")
def flags() -> set[str]:
    """The flags of all commands."""
    known = {"--help", "--help-all", "--quiet", "--plugins", "--config", "--version"}
    for name, command in COMMANDS.items():
        parser = importlib.import_module(command.module, "moe_peft.cli").parser(f"moe-peft {name}")
        parser = parser.complete() if isinstance(parser, UsualOptions) else parser
        known |= {flag for action in parser._actions for flag in action.option_strings}
    return known


def test_flags(flags):
    styles = ("analysis/html.py", "analysis/texts.py", "chat/web.py")  # whose custom properties look like flags
    used = {flag: file for flag, file in named(r"(?<![\w-])--[a-z][\w-]+") if not file.endswith(styles)}
    assert not {flag: file for flag, file in used.items() if flag not in flags | OF_OTHERS}


def test_commands():
    wrong = [hit for hit in named(r"moe-peft ([a-z]+)\b") if hit[0] not in COMMANDS]
    assert not wrong


def test_functions():
    for name, file in named(r"\bmoe_peft\.([a-z][\w.]*\w)"):
        module, _, attribute = f"moe_peft.{name}".rpartition(".")
        found = importlib.util.find_spec(f"moe_peft.{name}") if name.count(".") else None
        assert found or hasattr(importlib.import_module(module), attribute), (name, file)


def test_pages():
    for page, heading in {hit[0] for hit in named(r"docs/([\w-]+\.md)(?:#([\w-]+))?")}:
        text = (ROOT / "docs" / page).read_text("utf-8")
        headings = {re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-")
                    for line in re.findall(r"^#+ (.+)$", text, re.M)}  # fmt: skip
        assert not heading or heading in headings, (page, heading)
