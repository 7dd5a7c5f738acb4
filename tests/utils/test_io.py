"""Files that are there completely or not at all, and folders that one process writes to."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moe_peft
from moe_peft.utils.io import atomic_write, hash_file, output_folder, write_json
from moe_peft.utils.messages import InputError


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


def test_a_process_that_was_killed_between_the_names_loses_nothing(tmp_path):
    (tmp_path / ".folder.former").mkdir()
    (tmp_path / ".folder.former" / "old").write_text("old")
    with pytest.raises(OSError), atomic_write(tmp_path / "folder"):
        raise OSError
    assert names(tmp_path) == ["folder", "folder/old"]


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
