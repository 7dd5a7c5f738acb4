"""The command line: help and version load nothing heavy, and invalid input ends with one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

import moe_peft
from moe_peft.cli import COMMANDS, ONCE, main

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
        (["upcicle"], "invalid choice: 'upcicle'"),
        (["upit", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["upit"], "--config"),
        (["inspect", "--model", "nowhere", "--data", "nowhere.jsonl"], "nowhere"),
        (["upcycle", "--model", "m", "--output", "o", "--num-expert", "x"], "invalid int value: 'x'"),
        (["upcycle", "--model", "m", "--output", "o", "--router-init", "attention"], "--calibration None: goes with"),
        (["upcycle", "--model", "m", "--output", "o", "--calibration", "x.jsonl"], "goes with --router-init attention"),
        (["export", "--adapter", "nowhere", "--output", "o", "--verify", " "], "--verify"),
    ],
)
def test_wrong_input_ends_with_one_line_and_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in last and "Traceback" not in last


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
