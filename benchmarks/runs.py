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


class Ledger:
    """A study's finished runs as lines of one file, which several processes may add to and a repository can keep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines]

    def find(self, order: str, seed: int, method: str, rate: float | None = None) -> dict[str, Any] | None:
        """The run of a method; with one rate, if it is given."""
        wanted = {"order": order, "seed": seed, "method": method} | ({} if rate is None else {"rate": rate})
        return next((r for r in self.records() if all(r[key] == value for key, value in wanted.items())), None)

    def has(self, order: str, seed: int, method: str, rate: float | None = None) -> bool:
        return self.find(order, seed, method, rate) is not None

    def add(self, record: dict[str, Any], note: str) -> None:
        """Add a run, and print what it was and a note."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(_rounded(record)) + "\n")
        what = ", ".join(str(value) for key, value in record.items() if key != "points")
        print(f"{time.strftime('%H:%M:%S')} {what}: {note}", flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(of) for key, of in value.items()}
    if isinstance(value, list):
        return [_rounded(of) for of in value]
    return round(value, 6) if isinstance(value, float) else value
