"""
Stages, each done once: a killed one resumes, a changed one is done again, and so is what follows it.

A stage writes to the folder of its name, which is complete when `complete.json` is in it, as a checkpoint is. What it
needs only until then (checkpoints, and a note of what it is doing) stands beside it in `<name>.state`.
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

from ..training.checkpointing import MARKER, Fingerprint, digest, fingerprint_of, is_complete, mark_complete
from ..utils.distributed import on_main_process
from ..utils.io import read_json, remove, write_json
from ..utils.messages import InputError
from .context import RunContext
from .recipe import Recipe

logger = logging.getLogger("moe_peft")

MANIFEST = "manifest.json"
_RECORD = "stage.json"  # of a stage its metrics, of its state what it is doing
_FORMER = "former"  # in its state, the stage as it was before it is done again


@dataclass(frozen=True)
class Artifacts:
    """
    What stages hand on to later ones.

    Args:
        experts: folders of the experts: LoRA adapters, or in the mode `ffn` dense models.
        tokenizer: the folder of the experts' tokenizer, where it is needed.
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
        given: what the stages before it hand on.
    """

    name: ClassVar[str]  # of its folder and of its section in the recipe
    seed_offset: ClassVar[int] = 0  # from the recipe's seed, where the section has none
    inputs: ClassVar[tuple[str, ...]] = ("model", "train", "experts", "chat_template")  # whose hashes identify it
    seconds: float | None = None  # of this process, which has done it from its beginning to its end

    def __init__(self, context: RunContext, given: Artifacts) -> None:
        self.context, self.kind, self.recipe, self.given = context, context.kind, context.recipe, given

    @classmethod
    @abstractmethod
    def wanted(cls, recipe: Recipe) -> bool:
        """Whether the stage is part of a recipe's run."""

    @abstractmethod
    def run(self, folder: Path) -> dict[str, Any]:
        """
        Do the work.

        Args:
            folder: to write to; what must survive when a run is stopped goes to `self.state`.

        Returns:
            metrics, for the record.
        """

    @property
    def result(self) -> Artifacts:
        """What there is for later stages when this one is done."""
        return self.given

    def check(self) -> None:  # noqa: B027  (most stages have nothing to check)
        """Before any stage runs, and for a plan: raise a `ValueError` if the recipe does not fit the data."""

    @property
    def folder(self) -> Path:
        return self.context.root / self.name

    @property
    def state(self) -> Path:
        """The folder of what it needs only until it is done."""
        return self.context.root / f"{self.name}.state"

    @property
    def section(self) -> Any:
        """Its section of the recipe, if it has one."""
        return getattr(self.recipe, self.name, None)

    @property
    def seed(self) -> int:
        seed = getattr(self.section, "seed", None)
        return self.recipe.seed + self.seed_offset if seed is None else seed

    @property
    def num_experts(self) -> int:
        """How many experts there are when it is done."""
        return self.recipe.num_experts

    def settings(self) -> dict[str, Any]:
        """The settings that decide its result, by name."""
        section = {} if self.section is None else self.section.model_dump(exclude={"sft"})
        return {**{f"{self.name}.{key}": value for key, value in section.items()}, f"{self.name}.seed": self.seed}

    def hashes(self) -> dict[str, Any]:
        """The hashes of the inputs that decide its result."""
        return {key: self.context.hashes[key] for key in self.inputs}

    def fingerprint(self) -> Fingerprint:
        """Everything that decides its result. Earlier stages' results are inputs, so a change is passed on."""
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
                f"result of {name}": digest([record["fingerprint"], record["files"]])
                for name, record in earlier.items()
            },
        }
        return Fingerprint(json.loads(json.dumps(facts, default=str)))  # as it will be read again


def run_stage(stage: Stage, redo: bool = False, position: str = "") -> dict[str, Any]:
    """
    Do a stage unless it is done already, and return its record: fingerprint, metrics, sizes and hashes of its files.

    Args:
        redo: whether a stage that is done, but with other settings or inputs, may be removed and done again.
        position: which of how many stages it is, for the log.
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
    """Make room for a stage's files. One that resumes keeps its state. Return whether it resumes."""
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
        note.unlink(missing_ok=True)  # first: what a kill leaves of the state is not taken for one to resume from
        remove(stage.state)
        stage.state.mkdir(parents=True)
        write_json(note, facts)
        logger.info("%s: running%s", stage.name, position and f" ({position})")
    if (stage.folder / MARKER).is_file():  # to be done again
        stage.folder.rename(stage.state / _FORMER)
    remove(stage.folder)
    stage.folder.mkdir()
    return begun == facts


def _withdraw(stage: Stage) -> None:
    """After a refusal: what was done before stays, and of a stage that made nothing, nothing."""
    former = stage.state / _FORMER
    if former.is_dir():
        remove(stage.folder)
        former.rename(stage.folder)
    elif any(path.is_file() and path.name != _RECORD for path in stage.state.rglob("*")):
        return  # it resumes
    else:
        remove(stage.folder)
    remove(stage.state)


def _finish(stage: Stage, fingerprint: Fingerprint, metrics: dict[str, Any]) -> None:
    write_json(stage.folder / _RECORD, metrics)
    mark_complete(stage.folder, fingerprint, editable=["README.md"])  # a model card


def _clear_state(stage: Stage) -> None:
    """Remove a stage's state, once the user's own files in its former folder are back."""
    former = stage.state / _FORMER
    if former.is_dir():
        with suppress(ValueError, KeyError, TypeError):  # a damaged marker
            keep_own_files(former, stage.folder, {MARKER, "README.md", *read_json(former / MARKER)["files"]})
    remove(stage.state)


def keep_own_files(former: Path, folder: Path, written: Collection[str]) -> None:
    """Put the user's own files of a folder into the one that follows it: all but those written by us."""
    for path in [path for path in former.rglob("*") if path.is_file()]:
        name = path.relative_to(former)
        if name.as_posix() not in written and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, folder / name)


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a stage that is done."""
    return {**read_json(folder / MARKER), "metrics": read_json(folder / _RECORD)}


def is_run(root: Path) -> bool:
    """Whether a run has worked in a folder."""
    with suppress(ValueError):
        if "recipe" in read_json(root / MANIFEST):
            return True
    return any(root.glob(f"*/{_RECORD}")) or any(root.glob("*.state"))


def outlook(stages: Sequence[Stage]) -> dict[str, str]:
    """What a run would do with each of its stages, by name: nothing, resume, begin, or do it again and why."""
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
