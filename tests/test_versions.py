"""What the package imports is declared, and nothing else; what it declares is tested with its lowest versions."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DISTRIBUTIONS = packages_distributions()
# Packages that need the extra `train`; all others get along with the core.
TRAIN = ("training", "analysis", "pruning", "upit", "combine", "demo", "chat", "cli", "validation.py")
DEMO = ("demo",)  # the extra `demo`
WEB = ("web.py",)  # the extra `web`
PICK = ("pick.py", "engines.py", "records.py")  # the extra `pick`
GGUF = ("gguf.py",)  # the extra `gguf`
DEEPSPEED = ("distributed.py",)  # and this the extra `deepspeed`, once a model is sharded by it
# Imported only where the program itself runs, or where a setting names it; we do not install them.
PROGRAMS = {"serving": {"vllm"}, "training": {"wandb"}}


def declared(*lists: list[str]) -> dict[str, Requirement]:
    """Requirements by their distribution's name, without those that name an extra of our own."""
    requirements = [Requirement(line) for lines in lists for line in lines]
    return {canonicalize_name(r.name): r for r in requirements if r.name != PROJECT["name"]}


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=str(module), level=0):
                names.add(module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"moe_peft"}


FILES = sorted(path.relative_to(ROOT) for part in ("moe_peft", "examples/demo") for path in (ROOT / part).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_what_a_file_imports_is_declared(path: Path):
    extras = [
        EXTRAS[name]
        for name, parts in {
            "train": TRAIN,
            "gguf": GGUF,
            "demo": DEMO,
            "web": WEB,
            "pick": PICK,
            "deepspeed": DEEPSPEED,
        }.items()
        if path.parts[1] in parts or path.name in parts
    ]
    allowed = declared(PROJECT["dependencies"], *extras).keys() | PROGRAMS.get(path.parts[1], set())
    missing = {
        package
        for package in imported(ROOT / path)
        if not {canonicalize_name(name) for name in DISTRIBUTIONS.get(package, [package])} & allowed
    }
    assert not missing


def test_what_is_declared_is_imported():
    packages = set().union(*(imported(ROOT / path) for path in FILES))
    used = {canonicalize_name(name) for package in packages for name in DISTRIBUTIONS.get(package, [package])}
    assert not declared(PROJECT["dependencies"], EXTRAS["train"]).keys() - used


def test_the_newest_python_that_is_named_is_tested():
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    newest = max(named, key=Version)
    assert f"shell python{newest} " in (ROOT / "Makefile").read_text()
    assert f'python-version: "{newest}"' in (ROOT / ".github/workflows/latest.yml").read_text()
    (row,) = re.findall(r"^\| Python \|.*$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert row.endswith(f", {newest} |")


def test_lowest_versions_are_the_lower_bounds():
    """torch's wheels at its lower bound bring gigabytes of CUDA: a newer one is tested in its place."""
    requirements = declared(
        PROJECT["dependencies"],
        *(EXTRAS[name] for name in ("train", "quant", "gguf", "demo", "web", "pick", "test")),
    )
    bounds = {
        name: next(s.version for s in requirement.specifier if s.operator == ">=")
        for name, requirement in requirements.items()
        if requirement.specifier and name != "torch"  # other packages set the versions of what has no bound
    }
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pins = {canonicalize_name(r.name): r for r in map(Requirement, (x for x in lines if not x.startswith("#")))}
    torch = pins.pop("torch")
    assert {name: str(r.specifier) for name, r in pins.items()} == {name: f"=={bounds[name]}" for name in bounds}
    assert f"{torch}" in (ROOT / "constraints.txt").read_text().splitlines()


PLACES = (
    "README.md",
    "CONTRIBUTING.md",
    "CITATION.cff",
    "docs/index.md",
    "examples/quickstart.ipynb",
    "examples/several_loras.ipynb",
    "examples/space/requirements.txt",
)


def test_the_repository_has_one_address():
    """Where a reader installs from: every place names the address that `REPOSITORY` is, and no other."""
    from moe_peft.utils.messages import REPOSITORY

    assert PROJECT["urls"]["Repository"] == REPOSITORY
    for place in PLACES:
        text = (ROOT / place).read_text()
        assert re.search(rf"{re.escape(REPOSITORY)}(?![\w/-])", text), place
        cloned = re.findall(r"(?:git clone(?: --\S+)* |git\+)(http\S+)", text)
        assert set(cloned) <= {REPOSITORY}, place
