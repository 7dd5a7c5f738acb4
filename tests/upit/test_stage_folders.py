"""What a stage leaves in its folder, whatever stopped it: what goes on, what begins anew, what is kept."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_peft.upit import stage_cache as stages
from moe_peft.upit.stage_cache import STATE, Stage, is_run, outlook, run_stage

IDENTITY, RECORD = "identity.json", "stage.json"


class Work(Stage):
    """Writes its value, and what it found of an earlier attempt; may be stopped on the way."""

    name = "work"

    def __init__(self, root: Path, value: Any = 1, stop: BaseException | None = None, name: str = "work", **sft: Any):
        self.context = SimpleNamespace(root=root, records={})
        self.value, self.stop, self.sft, self.name, self.runs = value, stop, sft, name, 0

    @classmethod
    def wanted(cls, recipe: Any) -> bool:
        return True

    def identity(self) -> dict[str, Any]:
        return {"settings": {"value": self.value, "sft": self.sft}, "processes": 1}

    def run(self, folder: Path) -> dict[str, Any]:
        self.runs += 1
        self.found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        if self.stop is not None and str(self.stop) == "at once":
            raise self.stop
        for name in (f"{STATE}/progress", "part/file", "model"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(str(self.value))
        if self.stop is not None:
            raise self.stop
        return {"steps": 3, "place": Path("a")}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def stopped(root: Path, value: Any = 1) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_stage(root, Work(root, value, KeyboardInterrupt()))


def test_a_stage_that_is_done(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        record = run_stage(tmp_path, Work(tmp_path), place="2 of 3")
    assert "work: running (2 of 3)" in caplog.text and "going on" not in caplog.text
    assert files(tmp_path / "work") == {"model", "part/file", RECORD} and [p.name for p in tmp_path.iterdir()] == [
        "work"
    ]
    assert record["identity"] == Work(tmp_path).identity() and record["metrics"] == {"steps": 3, "place": "a"}
    assert record["files"].keys() == {"model", "part/file"}
    (tmp_path / "work.partial").mkdir()  # of a change that was taken back
    again = Work(tmp_path, logging_steps=5)  # which decides nothing
    assert run_stage(tmp_path, again) == record and not again.runs and not (tmp_path / "work.partial").exists()
    with pytest.raises(
        ValueError, match=r"is done, but this recipe differs: settings.value 1 → 2; take the change back"
    ):
        run_stage(tmp_path, Work(tmp_path, 2))
    assert (tmp_path / "work" / "model").read_text() == "1"


def test_one_that_was_stopped_goes_on_with_its_state_alone(tmp_path, caplog):
    stopped(tmp_path)
    assert outlook([Work(tmp_path)]) == {"work": "goes on"} and not (tmp_path / "work").exists()
    work = Work(tmp_path)
    with caplog.at_level(logging.INFO):
        run_stage(tmp_path, work)
    assert work.found == [IDENTITY, f"{STATE}/progress"] and "work: going on" in caplog.text
    assert files(tmp_path / "work") == {"model", "part/file", RECORD}


@pytest.mark.parametrize("damaged", ["", "{", "[]", "{}", '{"settings": 1}'])
def test_one_that_changed_begins_anew(damaged, tmp_path, caplog):
    stopped(tmp_path)
    if damaged:
        (tmp_path / "work.partial" / IDENTITY).write_text(damaged)
    work = Work(tmp_path, 1 if damaged else 2)
    run_stage(tmp_path, work)
    assert work.found == [IDENTITY]
    assert ("work: begun anew, as it changed: settings.value 1 → 2" in caplog.text) == (not damaged)


@pytest.mark.parametrize("value", [1, 2])
def test_one_that_was_whole_when_it_was_stopped_needs_its_name_only(value, tmp_path, monkeypatch, caplog):
    def stop(*folders: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stages, "_keep_foreign", stop)  # after the record, before the renaming
        with pytest.raises(KeyboardInterrupt):
            run_stage(tmp_path, Work(tmp_path))
    work = Work(tmp_path, value)
    run_stage(tmp_path, work)
    assert work.runs == value - 1 and (tmp_path / "work" / "model").read_text() == str(value)
    assert "going on" not in caplog.text and ("begun anew" in caplog.text) == (value == 2)


def test_what_was_refused_before_it_made_anything_leaves_nothing(tmp_path):
    for words, left in (("at once", set()), ("late", {f"work.partial/{name}" for name in (
        IDENTITY, f"{STATE}/progress", "part/file", "model",
    )})):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            run_stage(tmp_path, Work(tmp_path, stop=ValueError(words)))
        assert files(tmp_path) == left and (tmp_path / "work.partial").exists() == bool(left)


def test_what_others_put_there_stays_when_it_is_done_again(tmp_path, caplog):
    run_stage(tmp_path, Work(tmp_path))
    folder = tmp_path / "work"
    for deep in ("part/deep", "a/b"):
        (folder / deep).mkdir(parents=True)
    for name in ("notes", "part/deep/mine", "part/mine", "a/b/mine"):
        (folder / name).write_text("mine")
    (folder / "link").symlink_to(tmp_path)
    (folder / STATE).mkdir()
    (folder / STATE / "left").write_text("by a version that was killed")
    with pytest.raises(ValueError, match="late"):
        run_stage(tmp_path, Work(tmp_path, 2, stop=ValueError("late")), redo=True)
    assert (folder / "model").read_text() == "1"  # the former one, until there is a new one
    run_stage(tmp_path, Work(tmp_path, 2), redo=True)
    assert "work: done again, as it changed: settings.value 1 → 2" in caplog.text
    assert files(folder) == {"model", "part/file", RECORD, "notes", "part/deep/mine", "part/mine", "a/b/mine", "link"}
    assert (folder / "model").read_text() == "2" and (folder / "notes").read_text() == "mine"
    (folder / RECORD).write_text("{")  # it says no more what is whose
    run_stage(tmp_path, Work(tmp_path, 3))
    assert (folder / "model").read_text() == "3" and (folder / "part/mine").read_text() == "mine"


@pytest.mark.parametrize("change", [
    lambda f: (f / "model").write_text("x"), lambda f: (f / "part/file").unlink(), lambda f: (f / RECORD).unlink(),
    lambda f: (f / RECORD).write_text((f / RECORD).read_text().replace('"steps": 3', '"steps": 4')),
    lambda f: (f / RECORD).write_text((f / RECORD).read_text().replace('"settings"', '"setting"')),
])  # fmt: skip
def test_what_is_damaged_is_done_again(change, tmp_path, caplog):
    run_stage(tmp_path, Work(tmp_path))
    change(tmp_path / "work")
    work = Work(tmp_path)
    run_stage(tmp_path, work)
    assert work.runs == 1 and "is damaged or missing; the stage is done again" in caplog.text
    assert files(tmp_path / "work") == {"model", "part/file", RECORD}


def test_a_record_without_a_digest_is_of_an_earlier_version(tmp_path):
    run_stage(tmp_path, Work(tmp_path))
    path = tmp_path / "work" / RECORD
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "digest"}))
    work = Work(tmp_path)
    run_stage(tmp_path, work)
    assert not work.runs


def test_the_outlook_says_what_becomes_of_each(tmp_path):
    def make(*values: Any) -> list[Stage]:
        return [Work(tmp_path, value, name=f"stage{i}") for i, value in enumerate(values)]

    assert outlook(make(1, 1)) == {"stage0": "to do", "stage1": "to do"}
    for stage in make(1, 1, 1):
        run_stage(tmp_path, stage)
    found = make(1, 1, 1)
    assert outlook(found) == {"stage0": "done", "stage1": "done", "stage2": "done"}
    assert found[1].context.records["stage1"]["metrics"] == {"steps": 3, "place": "a"}
    if_changed = "again, if the result of stage1 changes"
    assert outlook(make(1, 2, 1)) == {"stage0": "done", "stage1": "again: settings.value 1 → 2", "stage2": if_changed}
    assert outlook(make(1, 1, 2))["stage2"] == "again: settings.value 1 → 2"
    (tmp_path / "stage0" / RECORD).unlink()
    (tmp_path / "stage0.partial").mkdir()
    assert outlook(make(1, 1)) == {"stage0": "goes on", "stage1": "again, if the result of stage0 changes"}


def test_a_folder_in_which_a_run_has_worked(tmp_path):
    cases = (
        ("manifest.json", '{"recipe": {}, "stages": {}}', True),
        ("manifest.json", '{"name": "a web page"}', False),
        ("manifest.json", "", False),
        (f"a/{RECORD}", "", True),
        (f"a/{IDENTITY}", "", True),
        ("a/b", "", False),
    )
    for i, (name, content, found) in enumerate(cases):
        folder = tmp_path / str(i)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(content)
        assert is_run(folder) == found
