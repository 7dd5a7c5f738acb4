"""Where a run writes: nowhere that something of another's is, or that it reads from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..training.data import local_files
from .recipe import Recipe
from .stages import MANIFEST, is_run

# Inputs of which every file counts where they are folders: one that the run writes would make it another input.
_WHOLE = ("model.name_or_path", "prepare.adapters", "prepare.checkpoints", "data.train", "data.eval")


def check_places(recipe: Recipe, root: Path, stages: Sequence[str], result: str) -> None:
    """
    Check that the folders of the stages and of the result hold nothing that is not a run's.

    Args:
        root: the run's folder.
        stages: names of its stages.
        result: name of the result's folder.

    Raises:
        ValueError: one does, or one of the recipe's own inputs is in it; or the run would write into a model.
    """
    what = f"output_dir={recipe.output_dir!r}"
    names = [name for place in (*stages, result) for name in (place, f"{place}.partial", f"{place}.former")]
    ours = is_run(root)
    if not ours and (root / MANIFEST).exists():
        raise ValueError(f"{what}: {root / MANIFEST} is there already, and no run has made it; choose another folder")
    for path in (root / name for name in names):
        foreign = path.is_symlink() or (path.exists() and not path.is_dir())
        if foreign or (not ours and path.is_dir() and any(path.iterdir())):
            raise ValueError(f"{what}: {path} is there already, and no run has made it; choose another folder")
    places = [(root / name).resolve() for name in names]
    for field, source in _inputs(recipe):
        whole = source.resolve()
        if any(whole.is_relative_to(place) for place in places):
            raise ValueError(f"{what}: the run would overwrite {field}={str(source)!r}; choose another folder")
        if field in _WHOLE and whole.is_dir() and root.resolve().is_relative_to(whole):
            raise ValueError(f"{what}: is in {field}={str(source)!r}; choose a folder outside of it")


def _inputs(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """What of the recipe's inputs is on this disk, by field."""
    folders = {
        "model.name_or_path": [recipe.model.name_or_path],
        "prepare.adapters": recipe.prepare.adapters or [],
        "prepare.checkpoints": recipe.prepare.checkpoints or [],
        "evaluate.include_path": [recipe.evaluate.include_path] if recipe.evaluate.include_path else [],
        "data.train": local_files(recipe.data.train),
        "data.eval": local_files(recipe.data.eval),
    }
    for field, paths in folders.items():
        yield from ((field, Path(path)) for path in paths if Path(path).exists())
