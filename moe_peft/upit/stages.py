"""The stages of a run, each done once: killed, it goes on; changed, it is done again, and so is what follows."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState

from .inputs import hash_folder

logger = logging.getLogger("moe_peft")

STATE = "state"  # what a stage needs only until it is done
_IDENTITY, _RECORD = "identity.json", "stage.json"


@dataclass(frozen=True)
class Stage:
    """
    One stage of a run.

    Args:
        name: its folder.
        identity: everything that decides its result: settings, seed, hashes of inputs.
        run: does it. Gets the folder to write to, whose `state` is kept when a run is stopped, and returns metrics.
    """

    name: str
    identity: dict[str, Any]
    run: Callable[[Path], dict[str, Any]]


def run_stage(root: Path, stage: Stage) -> dict[str, Any]:
    """
    Do a stage unless it is done already, and return its record: identity, metrics, hashes of its files.

    It is done in `<name>.partial`, which is renamed when whole.
    """
    folder, partial = root / stage.name, root / f"{stage.name}.partial"
    main = PartialState().is_main_process
    done = _read(folder / _RECORD)
    if done is not None and _same_result(done["identity"], stage.identity):
        if main:
            logger.info("%s: done already", stage.name)
        return done
    whole = _read(partial / _RECORD)
    begun = _read(partial / _IDENTITY) or (whole and whole["identity"])
    PartialState().wait_for_everyone()  # all have read before anything is removed
    if main:
        if done is not None:
            logger.warning(
                "%s: done again, as it changed: %s", stage.name, _difference(done["identity"], stage.identity)
            )
        if begun is not None and begun != stage.identity:
            logger.warning("%s: begun anew, as it changed: %s", stage.name, _difference(begun, stage.identity))
        _remove(folder)
        if begun != stage.identity:
            _remove(partial)
            partial.mkdir(parents=True)
            write_json(partial / _IDENTITY, stage.identity)
        elif whole is None:
            logger.info("%s: going on", stage.name)
            for path in partial.iterdir():
                if path.name not in (STATE, _IDENTITY):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    PartialState().wait_for_everyone()
    if whole is None or begun != stage.identity:
        if main:
            logger.info("%s: running", stage.name)
        metrics = stage.run(partial)
        if main:
            files = hash_folder(partial, leave_out=(STATE, _IDENTITY))
            write_json(partial / _RECORD, {"identity": stage.identity, "metrics": metrics, "files": files})
    if main:
        shutil.rmtree(partial / STATE, ignore_errors=True)
        (partial / _IDENTITY).unlink(missing_ok=True)  # the record has it
        partial.rename(folder)
    PartialState().wait_for_everyone()
    record = _read(folder / _RECORD)
    assert record is not None
    return record


def _same_result(done: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a finished stage serves. How many processes made it matters only for going on with one half done."""
    return {**done, "processes": None} == {**wanted, "processes": None}


def _remove(folder: Path) -> None:
    """Remove a folder under another name, so that what is left of it after a kill is not taken for the whole."""
    removed = folder.with_name(f"{folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    if folder.exists():
        folder.rename(removed)
        shutil.rmtree(removed)


def write_json(path: Path, value: Any) -> None:
    """Write under a temporary name first: a reader never meets half a file."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _difference(before: Any, after: Any, path: str = "") -> str:
    """The settings that differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        return "; ".join(_difference(before.get(key), after.get(key), f"{path}.{key}".lstrip(".")) for key in keys)
    shown = [str(value)[:40] for value in (before, after)]
    return f"{path} {shown[0]} → {shown[1]}"
