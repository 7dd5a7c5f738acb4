"""Every private name of peft, trl and transformers that we use is in `moe_peft.utils.compat` and still exists."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from functools import cache
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import moe_peft
from moe_peft.utils.compat import PRIVATE, TESTED, place, private, require

PACKAGES = ("peft", "trl", "transformers")
ROOT = Path(moe_peft.__file__).parent
LISTED = {name for names in PRIVATE.values() for name in names}
# Of torch and the standard library, which are not this list's business.
ELSEWHERE = {
    "_ActionsContainer",
    "_HelpAction",
    "_StoreFalseAction",
    "_action_groups",
    "_forward_hooks",
    "_ConvNd",
    "_fields",
    "_replace",
    "_name_or_path",
    "_asdict",
    "_unsafe_view",
    "_actions",
    "_cdata",
    "_grouped_mm",
}


@cache
def source(cls) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # made by a decorator
        return ""


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PRIVATE.items() for name in names])
def test_the_name_is_still_where_we_use_it(path, name):
    if path.startswith("liger_kernel"):
        pytest.importorskip("liger_kernel.transformers", reason="needs Triton", exc_type=ImportError)
    owner = place(path)
    fields = {f.name for f in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
    fields |= set(getattr(owner, "__annotations__", ()))
    bases = [b for b in getattr(owner, "__mro__", ()) if b.__module__.partition(".")[0] in PACKAGES]
    of_instances = any(f"self.{name}" in source(base) for base in bases)
    assert hasattr(owner, name) or name in fields or of_instances, f"{path}.{name} has moved"


def our_classes():
    for found in pkgutil.walk_packages([str(ROOT)], "moe_peft."):
        if found.name != "moe_peft.__main__" and "serving.vllm_" not in found.name:  # which vLLM alone can import
            module = importlib.import_module(found.name)
            yield from (c for c in vars(module).values() if inspect.isclass(c) and c.__module__.startswith("moe_peft"))


def test_everything_private_that_we_override_or_set_is_listed():
    unlisted = {}
    for cls in set(our_classes()):
        foreign = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in PACKAGES]
        ours = [base for base in cls.__mro__ if base.__module__.startswith("moe_peft")]
        names = {name for base in ours for name in vars(base) if name.startswith("_") and not name.endswith("__")}
        names |= {name for base in ours for name in re.findall(r"self\.(_[a-z]\w*)", source(base))}
        for name in names - LISTED - {"_abc_impl"}:
            if any(name in vars(base) or f"self.{name}" in source(base) for base in foreign):
                unlisted[name] = cls.__name__
    assert not unlisted


def test_everything_private_that_we_read_or_import_is_listed():
    trees = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    own, used = set(ELSEWHERE), {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            match node:
                case (
                    ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.ClassDef(name=name)
                    | ast.Name(id=name, ctx=ast.Store())
                ):
                    own.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "ctx")):
                    own.add(name)
                case ast.Attribute(attr=name):
                    used.setdefault(name, path)
                case ast.ImportFrom(module=module, names=names) if (module or "").partition(".")[0] in PACKAGES:
                    assert not [a.name for a in names if a.name.startswith("_")], f"{path}: take it through compat"
    # Names that end with "_" are the language's: special methods, and what an enum keeps of its members.
    found = {name: str(path) for name, path in used.items() if name.startswith("_") and not name.endswith("_")}
    assert not {name: path for name, path in found.items() if name not in own | LISTED}


def test_everything_that_is_listed_is_used():
    sources = "\n".join(path.read_text() for path in ROOT.rglob("*.py") if path.name != "compat.py")
    assert not {name for name in LISTED if not re.search(rf"\b{name}\b", sources)}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_version_is_shut_out(package):
    declared = [Requirement(line) for line in requires("moe-peft-hf")]
    assert not [r for r in declared if r.name == package for s in r.specifier if s.operator in ("<", "<=", "==", "~=")]


def test_tested_versions_are_those_of_the_constraints_or_newer():
    lines = (ROOT.parent / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    assert all(Version(tested) >= Version(pins[name]) for name, tested in TESTED.items())


@pytest.mark.parametrize("look", [lambda path: private(path, "gone"), require])
def test_a_name_that_has_moved_is_told(look, monkeypatch):
    path = "peft.tuners.tuners_utils.BaseTuner"
    monkeypatch.setitem(PRIVATE, path, ("_prepare_model", "gone"))
    newest = TESTED["peft"]
    with pytest.raises(ImportError, match=rf"BaseTuner\.gone, which peft .* lacks; the newest .* is peft=={newest}"):
        look(path)
