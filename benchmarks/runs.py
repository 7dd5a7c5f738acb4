"""A study's finished runs, one JSON file for each, so that a study that was stopped continues where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def slug(name: str) -> str:
    """A method's name as part of a file name."""
    return "".join(c if c.isalnum() else "-" for c in name)


def finished(path: Path, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The record at `path`; if there is none yet, `run` makes it, and its name and time are printed."""
    if not path.exists():
        start = time.perf_counter()
        record = run()
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record))
        partial.replace(path)
        print(f"{time.strftime('%H:%M:%S')} {path.stem} ({time.perf_counter() - start:.0f} s)", flush=True)
    return read(path)


def read(path: Path) -> Any:
    return json.loads(path.read_text())
