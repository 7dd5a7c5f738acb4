"""Files that are there completely or not at all, and folders that one process writes to."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moe_peft
from moe_peft.utils.io import atomic_write, hash_file, new_folder, output_folder, write_json
from moe_peft.utils.messages import InputError
from tests.helpers import warm


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_file_and_a_folder_replace_the_ones_before_when_they_are_complete(tmp_path):
    for text in ("one", "two"):
        with atomic_write(tmp_path / "file") as partial:
            partial.write_text(text)
        with atomic_write(tmp_path / "folder") as partial:
            partial.mkdir()
            (partial / text).write_text(text)
    assert names(tmp_path) == ["file", "folder", "folder/two"] and (tmp_path / "file").read_text() == "two"


def test_what_was_there_stays_if_the_new_one_is_not_written(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "folder") as partial:
        partial.mkdir()
        (partial / "new").write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["folder", "folder/old"]


def _killed(path: Path, moment: str) -> None:
    """Die at a moment of writing a folder: "block", or between the two renames."""
    if moment == "renames":
        Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
    with atomic_write(path) as partial:
        partial.mkdir()
        (partial / "new").write_text("half")
        if moment == "block":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["block", "renames"])
def test_a_process_that_was_killed_loses_nothing_and_leaves_nothing(moment, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("old")
    process = warm.start(_killed, tmp_path / "folder", moment)
    process.join()
    assert process.exitcode == -signal.SIGKILL and len(names(tmp_path)) > 2
    with pytest.raises(OSError), atomic_write(tmp_path / "folder"):
        raise OSError
    assert names(tmp_path) == ["folder", "folder/old"]


def _write(path: Path, text: str, is_folder: bool, started: Any, go: Any) -> None:
    with atomic_write(path) as partial:
        if is_folder:
            partial.mkdir()
        started.set()
        for i in range(3):
            with (partial / "file" if is_folder else partial).open("a", encoding="utf-8") as file:
                file.write(text * 1000)
            if i == 0:
                assert go.wait(300)


@pytest.mark.parametrize("is_folder", [False, True])
def test_two_processes_that_write_one_path_each_write_all_of_theirs(is_folder, tmp_path):
    context = multiprocessing.get_context("forkserver")
    path, go = tmp_path / "out", context.Event()
    started = [context.Event(), context.Event()]
    processes = [
        warm.start(_write, path, text, is_folder, began, go) for text, began in zip("ab", started, strict=True)
    ]
    assert all(began.wait(300) for began in started)
    go.set()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    content = (path / "file" if is_folder else path).read_text("utf-8")
    assert content in ("a" * 3000, "b" * 3000)
    assert names(tmp_path) == (["out", "out/file"] if is_folder else ["out"])


@pytest.mark.parametrize("kind", ["new", "empty", "link", "mount point"])
def test_a_new_folder_is_written_where_its_name_points(kind, tmp_path, monkeypatch):
    out, disk = tmp_path / "out", tmp_path / "disk"
    if kind != "new":
        disk.mkdir()
        out.symlink_to(disk) if kind == "link" else out.mkdir()
    if kind == "mount point":
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)
        (out / ".partial").mkdir()  # of a run that was killed
    inode = out.stat().st_ino if kind == "mount point" else None
    with pytest.raises(KeyboardInterrupt), new_folder(out) as folder:
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt
    with new_folder(out) as folder:
        (folder / "config.json").write_text("all")
        assert not (out / "config.json").exists()
    assert names(out) == ["config.json"] and (out / "config.json").read_text() == "all"
    if kind == "link":
        assert out.is_symlink() and names(disk) == ["config.json"]
    assert inode in (None, out.stat().st_ino)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_text_is_utf_8_whatever_the_locale():
    """Every text file that the package opens names its encoding; Python would take the locale's."""
    without = []
    for path in Path(moe_peft.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if call.func.attr not in ("read_text", "write_text", "open") or ast.unparse(call.func) == "os.open":
                continue
            given = [ast.unparse(each) for each in (*call.args, *(keyword.value for keyword in call.keywords))]
            is_binary = call.func.attr == "open" and "b" in "".join(given[:1])
            if not is_binary and not any("utf" in each for each in given):
                without.append(f"{path.name}:{call.lineno}")
    assert not without


def test_json_has_what_was_written(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1, "path": tmp_path})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1, "path": str(tmp_path)}
    write_json(tmp_path / "b.json", {"a": 1, "path": tmp_path})
    assert hash_file(tmp_path / "a.json") == hash_file(tmp_path / "b.json")


def test_an_output_folder_goes_again_if_nothing_is_put_into_it(tmp_path):
    with output_folder(tmp_path / "a" / "b", "output_dir") as folder:
        assert folder.is_dir()
    assert names(tmp_path) == []
    with output_folder(tmp_path / "a" / "b", "output_dir") as folder:
        (folder / "file").touch()
    assert names(tmp_path) == ["a", "a/b", "a/b/file"]


def test_what_is_not_empty_is_only_written_to_if_it_is_ours(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^output_dir='.*': is not empty; choose another$"):
        output_folder(tmp_path, "output_dir").__enter__()
    with output_folder(tmp_path, "output_dir", is_ours=lambda folder: (folder / "file").exists()):
        pass
    assert names(tmp_path) == ["file"]


def test_empty_folders_go_if_they_were_made_meanwhile_alone(tmp_path):
    (tmp_path / "out" / "of the user").mkdir(parents=True)
    with pytest.raises(InputError, match="is not empty"), output_folder(tmp_path / "out", "output_dir"):
        pass
    with output_folder(tmp_path / "out", "output_dir", is_ours=lambda folder: True) as folder:
        (folder / "stage" / "runs").mkdir(parents=True)
    assert [path.name for path in folder.iterdir()] == ["of the user"]


def test_one_process_writes_to_a_folder(tmp_path):
    held = output_folder(tmp_path / "out", "output_dir")
    held.__enter__()
    code = f"from moe_peft.utils.io import output_folder as o\nwith o({str(tmp_path / 'out')!r}, 'output_dir'): pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "InputError: output_dir=" in done.stderr and "another process is writing it" in done.stderr
    held.__exit__(None, None, None)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["file", "file/out", "link"])
def test_what_can_be_no_folder(name, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="is not a folder; choose another"):
        output_folder(tmp_path / name, "output_dir").__enter__()


def test_a_place_where_the_system_makes_no_folder(tmp_path):
    name = tmp_path / ("x" * 300)
    with pytest.raises(InputError, match=r"output_dir='.*': .*File name too long.*; choose another"):
        output_folder(name, "output_dir").__enter__()


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with output_folder(os.path.join("~", "out"), "output_dir") as folder:
        assert folder == tmp_path / "out"


@pytest.mark.parametrize("path", ["", "  "])
def test_no_name_is_no_folder(path):
    with pytest.raises(ValueError, match=r"output_dir='(  )?': name a folder"), output_folder(path, "output_dir"):
        pass
