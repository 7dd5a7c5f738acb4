"""`moe-peft recipes`: the package's recipes, as settings to start from."""

from __future__ import annotations

import argparse
import os
import shutil
from importlib import metadata
from itertools import takewhile
from pathlib import Path

from ..utils.messages import InputError, choice_error


def recipe_files() -> dict[str, list[Path]]:
    """Return recipe name, such as `sft/qwen3-0.6b`, → its settings and note, from a checkout or the installation."""
    checkout = Path(__file__).parents[2] / "recipes"
    if checkout.is_dir():
        files = [path for path in checkout.rglob("*") if path.is_file()]
    else:
        installed = metadata.files("moe-peft-hf") or []
        files = [Path(str(file.locate())).resolve() for file in installed if "recipes" in file.parts]
    found: dict[str, list[Path]] = {}
    for path in sorted(files):
        if path.suffix in (".yaml", ".md"):
            found.setdefault(f"{path.parent.name}/{path.stem}", []).append(path)
    for script in sorted(path for path in files if path.suffix == ".py"):  # added to recipes with its name in the note
        for paths in found.values():
            if any(script.name in path.read_text("utf-8") for path in paths if path.suffix == ".md"):
                paths.append(script)
    return found


def _description(paths: list[Path]) -> str:
    """Return the note's heading or, without a note, the comment at the top of the settings."""
    first = next((path for path in paths if path.suffix == ".md"), paths[0])
    lines = first.read_text("utf-8").splitlines()
    if first.suffix == ".md":
        return lines[0].removeprefix("# ")
    return " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("# "), lines))


def parser(prog: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog,
        usage="moe-peft recipes [NAME] [--output FOLDER]",
        description="List the recipes that come with the package, or copy one, with the note on it.",
        epilog="example:\n  moe-peft recipes sft/qwen3-0.6b",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("name", nargs="?", metavar="NAME", help="the recipe to copy; without it, all are listed")
    result.add_argument(
        "--output", type=Path, default=Path(), metavar="FOLDER", help="folder to copy it to; default: here"
    )
    return result


def run(options: argparse.Namespace) -> None:
    recipes = recipe_files()
    if options.name is None:
        width = max(map(len, recipes))
        for name, paths in recipes.items():
            print(f"{name:{width}}  {_description(paths)}")
        return
    if options.name not in recipes:
        raise InputError(choice_error("NAME", options.name, recipes))
    options.output.mkdir(parents=True, exist_ok=True)
    targets = [options.output / path.name for path in recipes[options.name]]
    if there := next((target for target in targets if os.path.lexists(target)), None):
        raise InputError(f"{there}: already exists; move it away, or name another folder (--output)")
    for path, target in zip(recipes[options.name], targets, strict=True):
        shutil.copyfile(path, target)
        print(target)
