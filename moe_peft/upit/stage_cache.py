"""
Stages, each done once: a killed one goes on, a changed one is done again, and so is what follows it.

Where a run writes: nowhere that something of another's is, or that it reads from.
"""

from __future__ import annotations

import json
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from ..evaluation.results import Scores
from ..training.data import local_files
from ..utils.validation import one_line
from .context import RunContext
from .files import read_json, write_json
from .fingerprint import damage, hash_folder, hash_json
from .recipe import Recipe, as_dict

# --- stages ----------------------------------------------------------------------------------------------------------

logger = logging.getLogger("moe_peft")

MANIFEST = "manifest.json"
STATE = "state"  # what a stage needs only until it is done
_IDENTITY, _RECORD = "identity.json", "stage.json"
# Training arguments that do not decide a result: what is shown, logged and saved on the way, and how rows are loaded.
_INCIDENTAL = {
    "report_to", "run_name", "project", "trackio_space_id", "log_level", "log_level_replica", "log_on_each_node",
    "logging_dir", "logging_strategy", "logging_first_step", "logging_steps", "logging_nan_inf_filter", "disable_tqdm",
    "include_num_input_tokens_seen", "include_tokens_per_second", "skip_memory_metrics", "save_steps",
    "save_on_each_node", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    "torch_empty_cache_steps", "ddp_timeout", "hub_model_id", "hub_token", "hub_private_repo",
}  # fmt: skip


@dataclass(frozen=True)
class Artefacts:
    """
    What stages hand on to later ones.

    Args:
        experts: folders of the experts: LoRA adapters, or in the mode `ffn` dense models.
        initial: the LoRA adapter from which the experts were trained.
        routers: the adapter whose routers are initialised, or in the mode `ffn` the file of routing vectors.
        model: the trained adapter or model.
    """

    experts: tuple[Path, ...] = ()
    initial: Path | None = None
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
    inputs: ClassVar[tuple[str, ...]] = ("model", "train", "adapters", "chat_template")  # whose hashes identify it

    def __init__(self, context: RunContext, given: Artefacts) -> None:
        self.context, self.recipe, self.given = context, context.recipe, given

    @classmethod
    @abstractmethod
    def wanted(cls, recipe: Recipe) -> bool:
        """Whether the stage is part of a recipe's run."""

    @abstractmethod
    def run(self, folder: Path) -> dict[str, Any]:
        """
        Do the work.

        Args:
            folder: to write to; its `state` is kept when a run is stopped.

        Returns:
            metrics, for the record.
        """

    @property
    def result(self) -> Artefacts:
        """What there is for later stages when this one is done."""
        return self.given

    def check(self) -> None:  # noqa: B027  (most stages have nothing to check)
        """
        Before any stage runs, and for a plan.

        Raises:
            ValueError: the recipe does not fit the data.
        """

    def check_base(self) -> None:  # noqa: B027
        """
        Before any stage runs; may read weights.

        Raises:
            ValueError: the recipe does not fit the base.
        """

    def likeness(self, folder: Path) -> dict[str, Any]:
        """How alike the experts are that it wrote to `folder`, for the record; nothing if it wrote none."""
        return {}

    def describe(self, metrics: dict[str, Any]) -> str:
        """What it made, in a few words."""
        return ""

    def losses(self, metrics: dict[str, Any]) -> dict[str, dict[str, float]] | None:
        """Held-out losses by model and domain, if it measured them."""
        return None

    def scores(self, metrics: dict[str, Any]) -> dict[str, Scores] | None:
        """Scores on tasks by model, if it measured them."""
        return None

    @property
    def folder(self) -> Path:
        return self.context.root / self.name

    @property
    def section(self) -> Any:
        """Its section of the recipe, if it has one."""
        return getattr(self.recipe, self.name, None)

    @property
    def seed(self) -> int:
        own = getattr(self.section, "seed", None)
        return self.recipe.seed + self.seed_offset if own is None else own

    @property
    def num_experts(self) -> int:
        """The experts that there are when it is done."""
        return self.recipe.num_experts

    def settings(self) -> dict[str, Any]:
        """The settings that decide its result."""
        return {} if self.section is None else {**as_dict(self.section), "seed": self.seed}

    def identity(self) -> dict[str, Any]:
        """Everything that decides its result. Earlier stages' files are inputs, so a change is passed on."""
        r = self.recipe
        base = Path(r.model.name_or_path)
        settings = {
            **self.settings(),
            "mode": r.mode,
            "method": r.method,
            "num_experts": self.num_experts,
            "label_column": r.data.label_column,
        }
        found = {
            "settings": settings,
            "processes": PartialState().num_processes,
            "model": as_dict(r.model) | ({"name_or_path": str(base.resolve())} if base.is_dir() else {}),
            "inputs": {key: self.context.hashes[key] for key in self.inputs},
            "earlier_stages": {name: hash_json(record["files"]) for name, record in self.context.records.items()},
        }
        return json.loads(json.dumps(found, default=str))  # as it will be read again


def run_stage(root: Path, stage: Stage, redo: bool = False, place: str = "") -> dict[str, Any]:
    """
    Do a stage unless it is done already, and return its record: identity, metrics, hashes of its files.

    The work is done in `<name>.partial`, which is renamed when it is whole.

    Args:
        redo: whether a stage that is done, but with other settings or inputs, may be removed and done again.
        place: which of how many it is, for the log.

    Raises:
        ValueError: it would have to be, and may not.
    """
    folder, partial = root / stage.name, root / f"{stage.name}.partial"
    identity = stage.identity()
    main = PartialState().is_main_process
    done = _finished(folder, stage.name)
    if done is not None and _same_result(done["identity"], identity):
        if main:
            logger.info("%s: done already", stage.name)
            _remove(partial)  # of a change that was taken back
        return done
    if done is not None and not redo:
        change = _difference(_decisive(done["identity"]), _decisive(identity))
        raise ValueError(
            f"{folder} is done, but this recipe differs: {change}; "
            "take the change back, choose another output_dir, or do this stage and those after it again with --redo "
            "(in Python run(redo=True))"
        )
    whole = _record(partial)
    begun = _intact(partial / _IDENTITY, "settings") or (whole and whole["identity"])
    goes_on = begun is not None and _decisive(begun) == _decisive(identity)
    PartialState().wait_for_everyone()  # all have read before anything is removed
    if main:
        if done is not None:
            logger.warning("%s: done again, as it changed: %s", stage.name, _difference(done["identity"], identity))
        if begun is not None and not goes_on:
            logger.warning("%s: begun anew, as it changed: %s", stage.name, _difference(begun, identity))
        elif goes_on and whole is None:
            logger.info("%s: going on", stage.name)
        _begin(partial, identity, anew=not goes_on, whole=whole is not None)
    PartialState().wait_for_everyone()
    if whole is None or not goes_on:
        if main:
            logger.info("%s: running%s", stage.name, place and f" ({place})")
        _work(stage, partial, identity)
    if main:
        shutil.rmtree(partial / STATE, ignore_errors=True)
        (partial / _IDENTITY).unlink(missing_ok=True)  # the record has it
        _keep_foreign(folder, partial)
        _remove(folder)  # only now: a stage that cannot be done again leaves the former one
        partial.rename(folder)
    PartialState().wait_for_everyone()
    record = _record(folder)
    assert record is not None
    return record


def _work(stage: Stage, partial: Path, identity: dict[str, Any]) -> None:
    """Let the stage write its files, and add the record of them."""
    main = PartialState().is_main_process
    try:
        metrics = stage.run(partial)
    except ValueError:
        if main and [path.name for path in partial.rglob("*") if path.is_file()] == [_IDENTITY]:
            shutil.rmtree(partial)  # it was refused before it made anything
        raise
    PartialState().wait_for_everyone()
    # In every process, because those that wait for long time out.
    metrics = {**metrics, **stage.likeness(partial)}
    PartialState().wait_for_everyone()  # all have read the files before the folder gets its name
    if main:
        files = hash_folder(partial, lambda name: name.parts[0] in (STATE, _IDENTITY))
        record = json.loads(json.dumps({"identity": identity, "metrics": metrics, "files": files}, default=str))
        write_json(partial / _RECORD, {**record, "digest": hash_json(record)})


def _finished(folder: Path, name: str) -> dict[str, Any] | None:
    """The record of a finished stage; None if there is none, or if its files are not what it says."""
    found: list[Any] = [None, None]
    if PartialState().is_main_process and folder.is_dir():
        found[0] = _record(folder)
        found[1] = _RECORD if found[0] is None else damage(folder, found[0]["files"])
        if found[1] is not None:
            logger.warning("%s: %s is damaged or missing; the stage is done again", name, folder / found[1])
    if PartialState().num_processes > 1:
        broadcast_object_list(found)
    return found[0] if found[1] is None else None


def _keep_foreign(folder: Path, partial: Path) -> None:
    """
    What no run wrote in a stage's former folder, in its new one, too: the former one goes only then, and stays where
    the run is stopped and the change taken back.
    """
    former, new = _record(folder), _record(partial)
    written = {_RECORD, _IDENTITY, *(former or {"files": {}})["files"], *(new or {"files": {}})["files"]}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if (path.is_dir() and not path.is_symlink()) or str(name) in written or name.parts[0] == STATE:
            continue
        target = partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copy2(path, target, follow_symlinks=False)


def _record(folder: Path) -> dict[str, Any] | None:
    """The record of what was done in a folder, if it is there and not damaged."""
    found = _intact(folder / _RECORD, "identity", "metrics", "files")
    if found is None or not isinstance(found["identity"].get("settings"), dict):
        return None
    digest = found.pop("digest", None)  # earlier versions wrote none
    return found if digest in (None, hash_json(found)) else None


def _intact(path: Path, *sections: str) -> dict[str, Any] | None:
    """A JSON file, if it is there and has these sections, each an object."""
    with suppress(ValueError):
        found = read_json(path)
        if found is not None and all(isinstance(found.get(section), dict) for section in sections):
            return found
    return None


def is_run(root: Path) -> bool:
    """
    Whether a run has worked in a folder: it leaves a manifest, or a stage with a record or the begin of one. Others
    write manifests, too.
    """
    left = (f"*/{_RECORD}", f"*/{_IDENTITY}")
    begun = any(path.is_file() for pattern in left for path in root.glob(pattern))
    return begun or _intact(root / MANIFEST, "recipe", "stages") is not None


def outlook(stages: Sequence[Stage]) -> dict[str, str]:
    """What a run would do with each of its stages, by name: nothing, go on, begin, or do it again and why."""
    found: dict[str, str] = {}
    for stage in stages:
        done, earlier = _record(stage.folder), [name for name, what in found.items() if what != "done"]
        if done is None:
            found[stage.name] = "goes on" if stage.folder.with_name(f"{stage.name}.partial").exists() else "to do"
            continue
        identity = stage.identity()
        if _same_result(done["identity"], identity):
            found[stage.name] = f"again, if the result of {earlier[-1]} changes" if earlier else "done"
        else:
            found[stage.name] = f"again: {_difference(_decisive(done['identity']), _decisive(identity))}"
        stage.context.records[stage.name] = done
    return found


def _same_result(done: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a finished stage serves. How many processes made it matters only for going on with a half-done one."""
    return {**_decisive(done), "processes": None} == {**_decisive(wanted), "processes": None}


def _decisive(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity without the training arguments that do not decide a result."""
    settings = identity["settings"]
    if "sft" not in settings:
        return identity
    sft = {key: value for key, value in settings["sft"].items() if key not in _INCIDENTAL}
    return {**identity, "settings": {**settings, "sft": sft}}


def _remove(folder: Path) -> None:
    """Remove a folder under another name, so that what a kill leaves of it is not taken for the whole."""
    removed = folder.with_name(f"{folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    if folder.exists():
        folder.rename(removed)
        shutil.rmtree(removed)


def _begin(partial: Path, identity: dict[str, Any], *, anew: bool, whole: bool) -> None:
    """Make room for a stage's files. One that goes on keeps its state; one that is whole keeps all."""
    if anew:
        _remove(partial)
        partial.mkdir(parents=True)
        write_json(partial / _IDENTITY, identity)
    elif not whole:
        for path in partial.iterdir():
            if path.name not in (STATE, _IDENTITY):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _difference(before: Any, after: Any, path: str = "") -> str:
    """The settings that differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        return "; ".join(_difference(before.get(key), after.get(key), f"{path}.{key}".lstrip(".")) for key in keys)
    return f"{path} {one_line(before, 40)} → {one_line(after, 40)}"


# --- places ----------------------------------------------------------------------------------------------------------

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
