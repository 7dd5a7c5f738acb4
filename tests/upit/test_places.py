"""A run loses nothing of its user's: it writes nowhere that something of another's is, or that it reads."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit import stage_cache as stages
from moe_peft.upit.files import publish
from tests.helpers.upit_case import contents, make_case, run, without_paths

pytestmark = pytest.mark.slow


@pytest.fixture
def case(tmp_path, tokenizer):
    return make_case(tmp_path, tokenizer)


def refused(settings: dict, folder: Path, message: str) -> None:
    """Neither a run nor its plan goes on, and nothing has changed."""
    before = contents(folder)
    for start in (UpIT.run, lambda pipeline: pipeline.check(weights=False)):
        with pytest.raises(ValueError) as error:
            start(UpIT(recipe_from_dict(settings)))
        assert message in str(error.value) and "\n" not in str(error.value)
        assert contents(folder) == before


@pytest.mark.parametrize("name", ["prepare", "router_init", "evaluate", "adapter", "prepare.partial", "adapter.former"])
def test_a_folder_of_the_users_with_the_name_of_a_stage(name, case, tmp_path):
    own = tmp_path / "out" / name
    own.mkdir(parents=True)
    (own / "script.py").write_text("mine")
    refused({**case, "output_dir": str(tmp_path / "out")}, tmp_path, f"{own} is there already, and no run has made it")


@pytest.mark.parametrize("make", [lambda p: p.write_text("x"), lambda p: p.symlink_to(p.parent), os.mkfifo])
def test_what_is_no_folder(make, case, tmp_path):
    (tmp_path / "out").mkdir()
    make(tmp_path / "out" / "prepare")
    refused({**case, "output_dir": str(tmp_path / "out")}, tmp_path / "base", "prepare is there already")


@pytest.mark.parametrize("own", ['{"name": "a web page"}', "", "[]"])
def test_a_manifest_of_another_program(own, case, tmp_path):
    (tmp_path / "out" / "adapter").mkdir(parents=True)
    (tmp_path / "out" / "manifest.json").write_text(own)
    message = f"{tmp_path / 'out' / 'manifest.json'} is there already, and no run has made it"
    refused({**case, "output_dir": str(tmp_path / "out")}, tmp_path, message)


@pytest.mark.parametrize("source", [str, lambda path: {"path": "json", "data_dir": str(path)}])
def test_the_output_in_a_folder_of_data(source, case, tmp_path):
    """The next start would read what the run has written."""
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(case["data"]["train"], data / "examples.jsonl")
    settings = {**case, "data": {**case["data"], "train": source(data)}, "output_dir": str(data / "out")}
    refused(settings, tmp_path, f"is in data.train={str(data)!r}")


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


def _interrupted(*args):
    raise KeyboardInterrupt


def test_an_output_folder_that_is_named_from_below(case, tmp_path, monkeypatch):
    """A run goes on in it, too."""
    whole = without_paths(run(case, tmp_path / "whole").root)
    (tmp_path / "out" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "out" / "below")
    settings = {**case, "output_dir": ".."}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("moe_peft.upit.prepare.copy_adapter", _interrupted)
        UpIT(recipe_from_dict(settings)).run()
    assert list((tmp_path / "out/prepare.partial/state/out").glob("checkpoint-*"))
    UpIT(recipe_from_dict(settings)).run()
    (tmp_path / "out" / "below").rmdir()
    assert without_paths(tmp_path / "out") == whole


def test_an_empty_folder_may_be_there(case, tmp_path):
    (tmp_path / "out" / "prepare").mkdir(parents=True)
    UpIT(recipe_from_dict({**case, "output_dir": str(tmp_path / "out")})).check(weights=False)


def test_data_in_a_stages_folder(case, tmp_path):
    pipeline = run(case, tmp_path)
    data = pipeline.root / "prepare" / "train.jsonl"
    shutil.copy(case["data"]["train"], data)
    for source in (str(data), {"path": "json", "data_files": {"train": [str(data)]}}):
        settings = {**case, "output_dir": str(pipeline.root), "data": {**case["data"], "train": source}}
        refused(settings, tmp_path, f"the run would overwrite data.train={str(data)!r}")


def test_experts_that_are_the_result(case, tmp_path):
    given = [str(tmp_path / "out" / "adapter"), str(tmp_path / "out" / "other")]
    first = run({**case, "method": "loramoe_pt", "num_train_epochs": 1, "prepare": {}, "router_init": {}}, tmp_path)
    shutil.copytree(first.result, given[1])
    settings = {**case, "output_dir": str(first.root), "num_experts": 2, "prepare": {"adapters": given}}
    settings["expand"] = {}
    refused(settings, tmp_path, f"the run would overwrite prepare.adapters={given[0]!r}")


@pytest.mark.parametrize("place", [".", "out"])
def test_a_run_in_its_base(place, case, tmp_path):
    base = case["model"]["name_or_path"]
    refused({**case, "output_dir": str(Path(base) / place)}, tmp_path, f"is in model.name_or_path={base!r}")


def test_files_of_the_users_in_a_stage_that_is_done_again_stay(case, tmp_path):
    """Also where its record cannot be read, which says what the stage itself wrote."""
    first = run(case, tmp_path)
    stage = first.root / "post_train"
    (stage / "notes.txt").write_text("mine")
    (stage / "figures").mkdir()
    (stage / "figures" / "loss.svg").write_text("mine, too")
    (stage / "base").symlink_to(tmp_path / "base")
    before = contents(stage)

    def still() -> None:
        assert (stage / "notes.txt").read_text() == "mine" and (stage / "figures" / "loss.svg").is_file()
        assert (stage / "base").is_symlink() and (tmp_path / "base" / "config.json").is_file()

    assert UpIT(first.recipe).outlook()["post_train"] == "done"
    run(case, tmp_path, redo=True, post_train={"seed": 9})
    still()
    run(case, tmp_path, redo=True)
    still()
    (stage / "stage.json").write_text("{")
    run(case, tmp_path)
    still()
    (stage / "adapter" / "adapter_model.safetensors").write_bytes(b"x")
    run(case, tmp_path)
    still()
    assert contents(stage).keys() == before.keys() and UpIT(first.recipe).outlook()["post_train"] == "done"
    weights = "adapter/adapter_model.safetensors"
    assert contents(stage)[weights] == before[weights]


def test_the_users_files_stay_whenever_publishing_is_stopped(tmp_path, monkeypatch):
    """Before and after each removal and renaming."""
    source, target = tmp_path / "stage", tmp_path / "result"
    source.mkdir()
    (source / "weights.txt").write_text("new")

    class Stopped(BaseException):
        pass

    for stop in range(6):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (target / "mine.txt").write_text("mine")
        (target / "weights.txt").write_text("old")
        count = iter(range(100))

        def or_stop(original, count=count, stop=stop):
            def changed(*args, **kwargs):
                if next(count) == stop:
                    raise Stopped
                return original(*args, **kwargs)

            return changed

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", or_stop(shutil.rmtree))
            patch.setattr(Path, "rename", or_stop(Path.rename))
            with contextlib.suppress(Stopped):
                publish(source, target, ["weights.txt"])
        publish(source, target, ["weights.txt"])
        assert {path.name: path.read_text() for path in target.iterdir()} == {"mine.txt": "mine", "weights.txt": "new"}
        assert {path.name for path in tmp_path.iterdir()} == {"stage", "result"}


def test_a_run_that_was_stopped_while_it_published_keeps_the_users_files(case, tmp_path, monkeypatch):
    first = run(case, tmp_path)
    (first.result / "notes.txt").write_text("mine")
    rename = Path.rename

    def stopped(path, target):
        if path.name == f"{first.result.name}.partial":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", stopped)
        run(case, tmp_path, redo=True, post_train={"seed": 9})
    assert not first.result.exists()
    again = run(case, tmp_path, post_train={"seed": 9})
    assert (again.result / "notes.txt").read_text() == "mine"
    weights = "adapter_model.safetensors"
    assert (again.result / weights).read_bytes() == (again.root / "post_train/adapter" / weights).read_bytes()
    assert not [path for path in again.root.iterdir() if path.suffix in (".partial", ".former")]


def test_a_finished_run_is_found_done(case, tmp_path):
    before = without_paths(run(case, tmp_path).root)
    assert without_paths(run(case, tmp_path).root) == before


def test_files_stay_where_the_manifest_is_gone(case, tmp_path):
    first = run(case, tmp_path)
    (first.result / "notes.txt").write_text("mine")
    for damaged in ("", "{}"):
        (first.root / "manifest.json").write_text(damaged)
        run(case, tmp_path)
        assert (first.result / "notes.txt").read_text() == "mine"


def test_files_stay_where_a_change_is_taken_back(case, tmp_path, monkeypatch):
    """The run was stopped when the new stage was whole and the former one still there."""
    first = run(case, tmp_path)
    notes = first.root / "post_train" / "notes.txt"
    notes.write_text("mine")
    remove = stages._remove

    def stopped(folder):
        if folder.name == "post_train":
            raise KeyboardInterrupt
        remove(folder)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stages, "_remove", stopped)
        run(case, tmp_path, redo=True, post_train={"seed": 9})
    run(case, tmp_path)
    assert notes.read_text() == "mine" and not (first.root / "post_train.partial").exists()
