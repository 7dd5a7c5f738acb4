"""What a stage leaves in its folder, whatever stopped it: what resumes, what begins anew, what is done again."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_peft.training.checkpointing import MARKER, Fingerprint
from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit import stage_cache as stages
from moe_peft.upit.stage_cache import Stage, is_run, outlook, run_stage
from moe_peft.utils.messages import InputError
from tests.helpers.upit_case import contents, make_case, run, without_paths

RECORD = "stage.json"


class Work(Stage):
    """Writes its value, and what it found of an earlier attempt; may be stopped on the way."""

    name = "work"

    def __init__(self, root: Path, value: Any = 1, stop: BaseException | None = None, name: str = "work"):
        self.context = SimpleNamespace(root=root, records={})
        self.value, self.stop, self.name, self.runs = value, stop, name, 0

    @classmethod
    def wanted(cls, recipe: Any) -> bool:
        return True

    def fingerprint(self) -> Fingerprint:
        return Fingerprint({"value": self.value})

    def run(self, folder: Path) -> dict[str, Any]:
        self.runs += 1
        self.files_at_start = files(folder) | files(self.state)
        if self.stop is not None and str(self.stop) == "at once":
            raise self.stop
        for path in (self.state / "progress", folder / "part/file", folder / "model"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(str(self.value))
        if self.stop is not None:
            raise self.stop
        return {"steps": 3, "place": Path("a")}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


DONE = {"model", "part/file", RECORD, MARKER}


def stopped(root: Path, value: Any = 1) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_stage(Work(root, value, KeyboardInterrupt()))


def test_a_stage_that_is_done(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        record = run_stage(Work(tmp_path), position="2 of 3")
    assert "work: running (2 of 3)" in caplog.text and "resuming" not in caplog.text
    assert files(tmp_path / "work") == DONE and [path.name for path in tmp_path.iterdir()] == ["work"]
    assert record["fingerprint"] == {"value": 1} and record["metrics"] == {"steps": 3, "place": "a"}
    assert record["files"].keys() == DONE - {MARKER}
    (tmp_path / "work.state").mkdir()  # of a run that was stopped when the stage was complete
    again = Work(tmp_path)
    assert run_stage(again) == record and not again.runs and not (tmp_path / "work.state").exists()
    with pytest.raises(ValueError, match="is done, but with value 1 and not 2; undo the change"):
        run_stage(Work(tmp_path, 2))
    assert (tmp_path / "work" / "model").read_text() == "1"
    own = {"notes.txt", "part/mine/notes.txt"}  # which stay
    for name in own:
        (tmp_path / "work" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "work" / name).write_text("mine")
    run_stage(Work(tmp_path, 2), redo=True)
    assert "work: done again, as it changed: value 1 and not 2" in caplog.text
    assert (tmp_path / "work" / "model").read_text() == "2" and files(tmp_path / "work") == DONE | own
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


def test_one_that_was_stopped_resumes_with_its_state_alone(tmp_path, caplog):
    stopped(tmp_path)
    assert outlook([Work(tmp_path)]) == {"work": "resumes"} and not (tmp_path / "work" / MARKER).exists()
    work = Work(tmp_path)
    with caplog.at_level(logging.INFO):
        run_stage(work)
    assert work.files_at_start == {RECORD, "progress"} and "work: resuming" in caplog.text
    assert files(tmp_path / "work") == DONE


@pytest.mark.parametrize("damaged", ["", "{", "[]", "{}", '{"value": 3}'])
def test_one_that_changed_begins_anew(damaged, tmp_path, caplog):
    stopped(tmp_path)
    if damaged:
        (tmp_path / "work.state" / RECORD).write_text(damaged)
    work = Work(tmp_path, 1 if damaged else 2)
    run_stage(work)
    assert work.files_at_start == {RECORD}
    assert ("work: begins anew, as it changed: value 1 and not 2" in caplog.text) == (not damaged)


def test_one_that_other_processes_began_begins_anew(tmp_path, monkeypatch):
    """What is done serves any number of processes; half-done training does not."""
    two = SimpleNamespace(num_processes=2, is_main_process=True, wait_for_everyone=lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "PartialState", lambda: two)
        stopped(tmp_path)
    work = Work(tmp_path)
    run_stage(work)
    assert work.files_at_start == {RECORD}


@pytest.mark.parametrize("value", [1, 2])
def test_one_that_was_complete_when_it_was_stopped(value, tmp_path, monkeypatch, caplog):
    def stop(path: Path) -> None:
        if (tmp_path / "work" / MARKER).exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stages, "remove", stop)  # of its state
        with pytest.raises(KeyboardInterrupt):
            run_stage(Work(tmp_path))
    work = Work(tmp_path, value)
    run_stage(work, redo=True)
    assert work.runs == value - 1 and (tmp_path / "work" / "model").read_text() == str(value)
    assert "resuming" not in caplog.text and ("done again" in caplog.text) == (value == 2)


def test_what_raised_an_error_before_it_made_anything_leaves_nothing(tmp_path):
    for words, left in (("at once", set()), ("late", {"work.state", "work"})):
        with pytest.raises(ValueError, match=words):
            run_stage(Work(tmp_path, stop=InputError(words)))
        assert {path.name for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize("change", [
    lambda f: (f / "model").write_text("x"), lambda f: (f / "part/file").unlink(), lambda f: (f / RECORD).unlink(),
    lambda f: (f / RECORD).write_text((f / RECORD).read_text().replace('"steps": 3', '"steps": 4')),
    lambda f: (f / MARKER).write_text((f / MARKER).read_text().replace('"files"', '"file"')),
])  # fmt: skip
def test_what_is_damaged_is_done_again(change, tmp_path, caplog):
    run_stage(Work(tmp_path))
    change(tmp_path / "work")
    work = Work(tmp_path)
    run_stage(work)
    assert work.runs == 1 and "is damaged or missing; the stage is done again" in caplog.text
    assert files(tmp_path / "work") == DONE


def test_the_outlook_says_what_becomes_of_each(tmp_path):
    def make(*values: Any) -> list[Stage]:
        return [Work(tmp_path, value, name=f"stage{i}") for i, value in enumerate(values)]

    assert outlook(make(1, 1)) == {"stage0": "to do", "stage1": "to do"}
    for stage in make(1, 1, 1):
        run_stage(stage)
    planned = make(1, 1, 1)
    assert outlook(planned) == {"stage0": "done", "stage1": "done", "stage2": "done"}
    assert planned[1].context.records["stage1"]["metrics"] == {"steps": 3, "place": "a"}
    again, if_changed = "again: value 1 and not 2", "again, if the result of stage1 changes"
    assert outlook(make(1, 2, 1)) == {"stage0": "done", "stage1": again, "stage2": if_changed}
    assert outlook(make(1, 1, 2))["stage2"] == again
    (tmp_path / "stage0" / MARKER).unlink()
    (tmp_path / "stage0.state").mkdir()
    (tmp_path / "stage0.state" / RECORD).touch()
    assert outlook(make(1, 1)) == {"stage0": "resumes", "stage1": "again, if the result of stage0 changes"}


def test_a_folder_in_which_a_run_has_worked(tmp_path):
    cases = (
        ("manifest.json", '{"recipe": {}, "stages": {}}', True),
        ("manifest.json", '{"name": "a web page"}', False),
        ("manifest.json", "", False),
        (f"prepare/{RECORD}", "", True),
        (f"prepare.state/{RECORD}", "", True),
        ("a/b", "", False),
        (f"checkpoint-5/{MARKER}", "", False),
    )
    for i, (name, content, expected) in enumerate(cases):
        folder = tmp_path / str(i)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(content)
        assert is_run(folder) == expected, name


# --- folders of runs -------------------------------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path, tokenizer):
    settings = make_case(tmp_path, tokenizer)
    return {**settings, "method": "loramoe_pt", "num_train_epochs": 1, "prepare": {}, "router_init": {}}


@pytest.mark.parametrize("name", ["prepare/script.py", "manifest.json", "base/config.json", "notes.txt"])
def test_a_folder_that_is_neither_empty_nor_a_runs(name, case, tmp_path):
    mine = tmp_path / "out" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("{}")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"^output_dir=.*: is not empty; choose another$"):
        run(case, tmp_path)
    assert contents(tmp_path) == before


def test_an_empty_folder_may_be_there(case, tmp_path, monkeypatch):
    """Named from below, too."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    UpIT(recipe_from_dict({**case, "output_dir": "."})).run()
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()


def test_what_lies_beside_a_bases_files_is_no_part_of_it(case, tmp_path, monkeypatch):
    """A card, and what version control, a file manager or the hub's tools leave; nor is how its folder is spelt."""
    first = run(case, tmp_path)
    before = without_paths(first.root)
    (tmp_path / "base" / "README.md").write_text("# Mine")
    for name in (".git/index", ".cache/huggingface/download/x.lock", ".DS_Store"):
        (tmp_path / "base" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "base" / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    again = UpIT(recipe_from_dict({**case, "output_dir": str(first.root), "model": {"name_or_path": "./base/"}}))
    assert set(again.outlook().values()) == {"done"}
    assert without_paths(first.root) == before
    (tmp_path / "base" / "generation_config.json").write_text("{}")
    changed = UpIT(recipe_from_dict({**case, "output_dir": str(first.root)}))
    assert "done" not in changed.outlook().values()


def test_a_run_in_the_folder_of_its_base_is_done_once(case, tmp_path):
    """What it writes is not part of the base."""
    base = Path(case["model"]["name_or_path"])
    first = UpIT(recipe_from_dict({**case, "output_dir": str(base / "out")}))
    first.run()
    assert set(UpIT(first.recipe).outlook().values()) == {"done"}


def test_a_finished_run_is_done_and_a_missing_result_is_written_again(case, tmp_path):
    first = run(case, tmp_path)
    before = without_paths(first.root)
    shutil.rmtree(first.result)
    assert without_paths(run(case, tmp_path).root) == before
