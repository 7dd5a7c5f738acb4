"""
Stages, each done once. A stopped stage resumes. A changed stage is done again, with all stages after it.

A stage writes to the folder of its name. The folder is complete when it has `complete.json`, like a checkpoint. Files
needed only until then (checkpoints, and a note with the stage's settings) are in `<name>.state`.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from accelerate import PartialState

from ..training.checkpointing import MARKER, Fingerprint, fingerprint_of, hash_value, is_complete, mark_complete
from ..utils.distributed import on_main_process
from ..utils.io import read_json, remove, write_json
from ..utils.messages import InputError
from .context import RunContext
from .recipe import Recipe

logger = logging.getLogger("moe_peft")

MANIFEST = "manifest.json"
_RECORD = "stage.json"  # in a stage's folder: its metrics; in its state: its settings
_FORMER = "former"  # in the state: the stage's former result, before it is done again


@dataclass(frozen=True)
class Artifacts:
    """
    Results that stages pass to later ones.

    Args:
        experts: folders of the experts: LoRA adapters, or in the mode `ffn` dense models.
        tokenizer: the folder of the experts' tokenizer, if it is needed.
        routers: the file of the routers' weights.
        model: the trained adapter or model.
    """

    experts: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    routers: Path | None = None
    model: Path | None = None


class Stage(ABC):
    """
    One stage of a run.

    Args:
        context: the run.
        given: the artifacts of the previous stages.
    """

    name: ClassVar[str]  # name of its folder and of its section in the recipe
    seed_offset: ClassVar[int] = 0  # added to the recipe's seed if the section has no seed
    inputs: ClassVar[tuple[str, ...]] = ("model", "train", "experts", "chat_template")  # hashed to identify it
    seconds: float | None = None  # set if this process did the whole stage

    def __init__(self, context: RunContext, given: Artifacts) -> None:
        self.context, self.kind, self.recipe, self.given = context, context.kind, context.recipe, given

    @classmethod
    @abstractmethod
    def wanted(cls, recipe: Recipe) -> bool:
        """Return whether the stage is part of a recipe's run."""

    @abstractmethod
    def run(self, folder: Path) -> dict[str, Any]:
        """
        Run the stage.

        Args:
            folder: folder to write to. Files that a stopped run needs again go to `self.state`.

        Returns:
            metrics for the record.
        """

    @property
    def result(self) -> Artifacts:
        """Artifacts for later stages, once this stage is done."""
        return self.given

    def check(self) -> None:  # noqa: B027  (most stages have nothing to check)
        """Raise a `ValueError` if the recipe does not fit the data; before any stage runs, and for a plan."""

    @property
    def folder(self) -> Path:
        return self.context.root / self.name

    @property
    def state(self) -> Path:
        """Folder of the files needed only until the stage is done."""
        return self.context.root / f"{self.name}.state"

    @property
    def section(self) -> Any:
        """Stage's section of the recipe, or None."""
        return getattr(self.recipe, self.name, None)

    @property
    def seed(self) -> int:
        seed = getattr(self.section, "seed", None)
        return self.recipe.seed + self.seed_offset if seed is None else seed

    @property
    def num_experts(self) -> int:
        """Number of experts after the stage."""
        return self.recipe.num_experts

    def settings(self) -> dict[str, Any]:
        """Return the settings that change the stage's result, by name."""
        section = {} if self.section is None else self.section.model_dump(exclude={"sft"})
        return {**{f"{self.name}.{key}": value for key, value in section.items()}, f"{self.name}.seed": self.seed}

    def hashes(self) -> dict[str, Any]:
        """Return the hashes of the inputs that change the stage's result."""
        return {key: self.context.hashes[key] for key in self.inputs}

    def fingerprint(self) -> Fingerprint:
        """Return all that changes the stage's result. It includes earlier stages' results, so a change is passed on."""
        r, earlier = self.recipe, self.context.records
        model = {**r.model.model_dump(), "dtype": r.dtype}
        facts = {
            **self.settings(),
            "mode": r.mode,
            "method": r.method,
            "num_experts": self.num_experts,
            "data.label_column": r.data.label_column,
            **{f"model.{key}": value for key, value in model.items() if key != "name_or_path"},
            **{f"content of {name}": value for name, value in self.hashes().items()},
            **{
                f"result of {name}": hash_value([record["fingerprint"], record["files"]])
                for name, record in earlier.items()
            },
        }
        return Fingerprint(json.loads(json.dumps(facts, default=str)))  # as it will be read back


def run_stage(stage: Stage, redo: bool = False, position: str = "") -> dict[str, Any]:
    """
    Run a stage unless it is done. Return its record: fingerprint, metrics, sizes and hashes of its files.

    Args:
        redo: whether a stage done with other settings or inputs may be removed and run again.
        position: "stage 1 of 4", for the log.
    """
    fingerprint = stage.fingerprint()
    if not on_main_process(lambda: _is_done(stage, fingerprint, redo)):
        start, resumes = time.monotonic(), on_main_process(lambda: _begin(stage, fingerprint, position))
        try:
            metrics = stage.run(stage.folder)
        except InputError:
            if PartialState().is_main_process:
                _withdraw(stage)
            raise
        PartialState().wait_for_everyone()
        on_main_process(lambda: _finish(stage, fingerprint, metrics))
        stage.seconds = None if resumes else round(time.monotonic() - start, 1)
    on_main_process(lambda: _clear_state(stage))
    return on_main_process(lambda: read_record(stage.folder))


def _is_done(stage: Stage, fingerprint: Fingerprint, redo: bool) -> bool:
    if not (stage.folder / MARKER).is_file():
        return False
    if not is_complete(stage.folder):
        logger.warning("%s: a file in %s is damaged or missing; the stage is done again", stage.name, stage.folder)
        return False
    difference = fingerprint_of(stage.folder).difference(fingerprint)
    if difference is None:
        logger.info("%s: done already", stage.name)
        return True
    if not redo:
        raise InputError(
            f"{stage.folder} is done, but with {difference}; undo the change, choose another output_dir, or do "
            "this stage and those after it again with --redo (in Python run(redo=True))"
        )
    logger.warning("%s: done again, as it changed: %s", stage.name, difference)
    return False


def _begin(stage: Stage, fingerprint: Fingerprint, position: str) -> bool:
    """Make room for a stage's files. A resumed stage keeps its state. Return whether the stage resumes."""
    note = stage.state / _RECORD
    facts = {**fingerprint.facts, "processes": PartialState().num_processes}
    begun = None
    with suppress(ValueError):
        begun = read_json(note)
    if begun == facts:
        logger.info("%s: resuming%s", stage.name, position and f" ({position})")
    else:
        if begun is not None:
            difference = Fingerprint(begun).difference(Fingerprint(facts))
            logger.warning("%s: begins anew, as it changed: %s", stage.name, difference)
        note.unlink(missing_ok=True)  # first: a kill during `remove` must not leave a state to resume from
        remove(stage.state)
        stage.state.mkdir(parents=True)
        write_json(note, facts)
        logger.info("%s: running%s", stage.name, position and f" ({position})")
    if (stage.folder / MARKER).is_file():  # it will be done again
        stage.folder.rename(stage.state / _FORMER)
    remove(stage.folder)
    stage.folder.mkdir()
    return begun == facts


def _withdraw(stage: Stage) -> None:
    """Undo `_begin` after an `InputError`: restore a former result. Keep the state only if a run can resume from it."""
    former = stage.state / _FORMER
    if former.is_dir():
        remove(stage.folder)
        former.rename(stage.folder)
    elif any(path.is_file() and path.name != _RECORD for path in stage.state.rglob("*")):
        return  # a later run resumes
    else:
        remove(stage.folder)
    remove(stage.state)


def _finish(stage: Stage, fingerprint: Fingerprint, metrics: dict[str, Any]) -> None:
    write_json(stage.folder / _RECORD, metrics)
    mark_complete(stage.folder, fingerprint, editable=["README.md"])  # a model card


def _clear_state(stage: Stage) -> None:
    """Put the user's own files in the former folder back, then remove the stage's state."""
    former = stage.state / _FORMER
    if former.is_dir():
        with suppress(ValueError, KeyError, TypeError):  # if the marker is damaged
            keep_own_files(former, stage.folder, {MARKER, "README.md", *read_json(former / MARKER)["files"]})
    remove(stage.state)


def keep_own_files(former: Path, folder: Path, written: Collection[str]) -> None:
    """Copy the user's own files of a folder to its replacement: all files except `written`."""
    for path in [path for path in former.rglob("*") if path.is_file()]:
        name = path.relative_to(former)
        if name.as_posix() not in written and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, folder / name)


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a done stage."""
    return {**read_json(folder / MARKER), "metrics": read_json(folder / _RECORD)}


def is_run(root: Path) -> bool:
    """Return whether a folder has files of a run."""
    with suppress(ValueError):
        if "recipe" in read_json(root / MANIFEST):
            return True
    return any(root.glob(f"*/{_RECORD}")) or any(root.glob("*.state"))


def outlook(stages: Sequence[Stage]) -> dict[str, str]:
    """Return stage → status for the next run: "done", "resumes", "to do", or "again" with the reason."""
    plans: dict[str, str] = {}
    for stage in stages:
        changed = [name for name, plan in plans.items() if plan != "done"]
        if not is_complete(stage.folder):
            plans[stage.name] = "resumes" if (stage.state / _RECORD).is_file() else "to do"
            continue
        difference = fingerprint_of(stage.folder).difference(stage.fingerprint())
        if difference is not None:
            plans[stage.name] = f"again: {difference}"
        else:
            plans[stage.name] = f"again, if the result of {changed[-1]} changes" if changed else "done"
        stage.context.records[stage.name] = read_record(stage.folder)
    return plans
