"""The command line: help and version load nothing heavy, and invalid input ends with one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import moe_peft
from moe_peft.cli import COMMANDS, ONCE, main
from moe_peft.native import UpcycleConfig, upcycle
from tests.helpers.models import tiny_llama

LIGHT = """
import sys
import moe_peft.cli
try:
    moe_peft.cli.main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
heavy = {"torch", "transformers", "peft", "trl", "datasets", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_load_nothing_heavy(argument):
    result = subprocess.run([sys.executable, "-c", LIGHT, argument], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    if argument == "--version":
        assert result.stdout.strip() == f"moe-peft {moe_peft.__version__}"
    else:
        assert all(f"  {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_of_its_own(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: moe-peft {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["upcicle"], "command='upcicle': must be one of sft, dpo"),
        (["upit", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["upit"], "--config"),
        (["upit", "--config"], "--config: expected one argument"),
        (["upcycle", "--plugins"], "--plugins: expected at least one argument"),
        (["inspect", "--model", "nowhere", "--data", "nowhere.jsonl"], "nowhere"),
        (["upcycle", "--model", "m", "--output", "o", "--num-expert", "x"], "invalid int value: 'x'"),
        (["upcycle", "--model", "m", "--output", "o", "--router-init", "attention"], "--calibration None: goes with"),
        (["upcycle", "--model", "m", "--output", "o", "--calibration", "x.jsonl"], "goes with --router-init attention"),
        (["export", "--adapter", "nowhere", "--output", "o", "--verify", " "], "--verify"),
        (["export", "--adapter", "a", "--output", "o", "--verify", "texts.txt"], "'texts.txt': no such file"),
        (
            ["inspect", "--model", "m", "--data", "d.jsonl", "--position-width", "8"],
            "give expert_map (--expert-map), too",
        ),
    ],
)
def test_wrong_input_ends_with_one_line_and_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in last and "Traceback" not in last


@pytest.mark.parametrize("rank", ["", "x"])
def test_what_is_no_number_of_a_process_is_not_taken_for_one(rank, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as end:
        main(["upcycle"])
    assert end.value.code == 2


def test_the_home_folder_is_expanded_where_results_go(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_llama().save_pretrained(tmp_path / "base")
    main(["upcycle", "--model", str(tmp_path / "base"), "--output", "~/moe", "--num-experts", "2"])
    assert (tmp_path / "moe" / "config.json").is_file()


@pytest.mark.parametrize("drop", ["0", "false", '""'])
def test_what_is_no_list_of_experts_is_not_ignored(drop, tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "base")
    upcycle(tmp_path / "base", tmp_path / "moe", UpcycleConfig(num_experts=3))
    command = ["prune", "--model", str(tmp_path / "moe"), "--output", str(tmp_path / "out"), "--merge-twins", "0.99"]
    with pytest.raises(SystemExit) as end:
        main([*command, "--drop", drop])
    assert (
        end.value.code == 2
        and "error: argument --drop: " in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "base")
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(SystemExit) as end:
        main(["upcycle", "--model", str(tmp_path / "base"), "--output", str(tmp_path / "out")])
    assert end.value.code == 2 and "out" in capsys.readouterr().err


@pytest.mark.slow
def test_a_backend_of_notebooks_is_not_needed():
    code = "from moe_peft.cli import main\ntry:\n    main(['inspect'])\nexcept SystemExit:\n    import matplotlib"
    environment = {**os.environ, "MPLBACKEND": "module://nowhere.backend"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_pipe_is_no_file_of_routers(tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "base")
    os.mkfifo(tmp_path / "routers")
    command = [
        "upcycle",
        "--model",
        str(tmp_path / "base"),
        "--output",
        str(tmp_path / "moe"),
        "--router-init",
        "given",
    ]
    with pytest.raises(SystemExit) as end:
        main([*command, "--router-weights", str(tmp_path / "routers")])
    assert end.value.code == 2 and "routers': no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_results_are_printed_in_any_encoding(tmp_path):
    moe = tmp_path / "moe"
    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    upcycle(tmp_path / "base", moe, UpcycleConfig(num_experts=3))
    command = [sys.executable, "-m", "moe_peft", "prune", "--model", moe, "--drop", "[2]", "--output", tmp_path / "out"]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    )
    assert done.returncode == 0, done.stderr
    assert b"3 ? 2" in done.stdout


@pytest.mark.parametrize("command", ONCE)
def test_the_first_of_several_processes_does_the_work(command, monkeypatch):
    """torch's and accelerate's launchers number their processes; a second one would write to the same folder."""
    monkeypatch.setenv("RANK", "1")
    assert main([command]) is None  # not even the missing options are looked at
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        main([command])


def test_version_is_the_distributions():
    from importlib.metadata import version

    assert version("moe-peft-hf") == moe_peft.__version__


@pytest.mark.usefixtures("loud")
@pytest.mark.parametrize("quiet", ["before", "after", None])
def test_quiet_hides_progress(quiet, tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "base")
    capsys.readouterr()
    command = ["upcycle", "--model", str(tmp_path / "base"), "--output", str(tmp_path / "moe"), "--num-experts", "2"]
    main({"before": ["--quiet", *command], "after": [*command, "--quiet"], None: command}[quiet])
    shown = capsys.readouterr().err
    assert (tmp_path / "moe" / "model.safetensors").is_file()
    assert (shown == "") if quiet else ("layers" in shown and "%|" in shown)


def test_another_program_gets_its_own_quiet(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: started.append(command))
    main(["exec", "--", sys.executable, "program.py", "--quiet"])
    assert started[0][1:] == ["program.py", "--quiet"]
