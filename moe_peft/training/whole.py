"""Which checkpoints of a training were written to the end, and are still as they were."""

from __future__ import annotations

import json
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


def whole_checkpoints(folder: Path) -> dict[int, Path]:
    """By step. A file that is missing or cut off makes a checkpoint a broken one."""
    found = {}
    for mark in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{WHOLE}"):
        lengths = mark.read_text()  # empty in those of earlier versions
        if not lengths or json.loads(lengths).items() <= _lengths(mark.parent).items():
            found[int(mark.parent.name.rpartition("-")[2])] = mark.parent
    return dict(sorted(found.items()))
