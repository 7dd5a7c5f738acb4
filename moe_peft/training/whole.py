"""Which checkpoints of a training were written to the end, and are still as they were."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

WHOLE = "whole"  # a file that says so, with the lengths of the files beside it, and hashes of all but large ones
_LARGE = 2**30  # bytes; a shard of a whole model is not hashed, as all processes would wait for that at each saving


def mark_whole(checkpoint: Path) -> None:
    """Say that a checkpoint is whole as it is now."""
    _note(checkpoint, {name: [length, _hash(checkpoint / name)] for name, length in _lengths(checkpoint)})


def remove_from(checkpoint: Path, name: str) -> None:
    """Remove a file of a checkpoint, which stays whole."""
    _note(checkpoint, {other: noted for other, noted in _noted(checkpoint).items() if other != name})
    (checkpoint / name).unlink()


def _note(checkpoint: Path, files: dict[str, Any]) -> None:
    (checkpoint / f"{WHOLE}.partial").write_text(json.dumps(files))
    (checkpoint / f"{WHOLE}.partial").replace(checkpoint / WHOLE)


def _lengths(checkpoint: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and not path.name.startswith(WHOLE):
            yield str(path.relative_to(checkpoint)), path.stat().st_size


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(path: Path) -> str | None:
    return None if path.stat().st_size > _LARGE else hash_file(path)


def _noted(checkpoint: Path) -> dict[str, Any]:
    """What the file says, if it says anything."""
    try:
        found = json.loads((checkpoint / WHOLE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: noted if isinstance(noted, list) else [noted, None] for name, noted in found.items()}  # lengths once


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """A trainer's checkpoints by step, whole or not; none of the folders that others made beside them."""
    named = ((re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name), path) for path in folder.glob("*"))
    return dict(sorted((int(name[1]), path) for name, path in named if name and path.is_dir()))


def whole_checkpoints(folder: Path, thoroughly: bool = False) -> dict[int, Path]:
    """
    By step. A file that is missing or cut off makes a checkpoint a broken one.

    Args:
        thoroughly: so does a file with other bytes.
    """
    return {step: path for step, path in numbered_checkpoints(folder).items() if _is_whole(path, thoroughly)}


def _is_whole(checkpoint: Path, thoroughly: bool) -> bool:
    files, lengths = _noted(checkpoint), dict(_lengths(checkpoint))
    as_long = bool(files) and all(lengths.get(name) == noted[0] for name, noted in files.items())
    hashes = {name: noted[1] for name, noted in files.items() if noted[1] is not None}
    return as_long and not (thoroughly and any(_hash(checkpoint / name) != known for name, known in hashes.items()))
