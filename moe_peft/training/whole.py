"""Which checkpoints of a training were written to the end, and are still as they were."""

from __future__ import annotations

import json
import re
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

WHOLE = "whole"  # a file that says so, with the lengths of the files beside it


def mark_whole(checkpoint: Path, without: str = "") -> None:
    """Say that a checkpoint is whole, even without one of its files."""
    lengths = {name: length for name, length in _lengths(checkpoint).items() if name != without}
    (checkpoint / f"{WHOLE}.partial").write_text(json.dumps(lengths))
    (checkpoint / f"{WHOLE}.partial").replace(checkpoint / WHOLE)


def _lengths(checkpoint: Path) -> dict[str, int]:
    files = (path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith(WHOLE))
    return {str(path.relative_to(checkpoint)): path.stat().st_size for path in files}


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """A trainer's checkpoints by step, whole or not; none of the folders that others made beside them."""
    named = ((re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name), path) for path in folder.glob("*"))
    return dict(sorted((int(name[1]), path) for name, path in named if name and path.is_dir()))


def whole_checkpoints(folder: Path) -> dict[int, Path]:
    """By step. A file that is missing or cut off makes a checkpoint a broken one."""
    return {step: path for step, path in numbered_checkpoints(folder).items() if _is_whole(path)}


def _is_whole(checkpoint: Path) -> bool:
    if not (checkpoint / WHOLE).is_file():
        return False
    lengths = (checkpoint / WHOLE).read_text()  # empty in those of earlier versions
    return not lengths or json.loads(lengths).items() <= _lengths(checkpoint).items()
