"""A run that was killed goes on and ends with the bytes of one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
from upit_case import make_case, run_in_process

# Stage 1 has 24 steps, stage 3 has 6, stage 4 has 18; stage 1 saves at 5, 10, 15, 16, 20 and 24.
KILLS = [
    ("step", 1),
    ("step", 8),
    ("within a checkpoint", 2),
    ("before a checkpoint is marked", 1),
    ("before a checkpoint is marked", 6),
    ("step", 24),
    ("renaming a stage", 1),  # stage 1 is whole but not yet named so
    ("writing an expert", 1),
    ("renaming a stage", 2),
    ("scoring", 1),
    ("step", 28),  # stage 3
    ("renaming a stage", 3),
    ("step", 31),  # the first of stage 4
    ("step", 40),
    ("renaming a stage", 4),
    ("evaluating", 1),
    ("renaming a stage", 5),
    ("renaming a stage", 6),  # the result
    ("writing json", 3),
]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("undisturbed")
    settings = make_case(folder, tokenizer)
    assert run_in_process(settings, folder) == 0
    files = contents(folder / "out")
    for name in (
        "adapter/adapter_model.safetensors",
        "router_init/buckets.json",
        "evaluate/routing.png",
        "manifest.json",
    ):
        assert name in files
    assert not any("partial" in name or "state" in Path(name).parts for name in files)
    return settings, files


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill[0]} {kill[1]}")
def test_killed_run_goes_on_to_the_same_bytes(kill, undisturbed, tmp_path):
    settings, files = undisturbed
    assert run_in_process(settings, tmp_path, kill) == -9
    assert run_in_process(settings, tmp_path) == 0
    assert contents(tmp_path / "out") == files


def test_killed_again_and_again(undisturbed, tmp_path):
    settings, files = undisturbed
    attempts = 0
    while (code := run_in_process(settings, tmp_path, ("step", 7))) != 0:
        attempts += 1
        assert code == -9 and attempts < 30
    assert attempts > 3
    assert contents(tmp_path / "out") == files


def test_two_runs_of_one_seed_are_equal_and_another_seed_is_not(undisturbed, tmp_path):
    settings, files = undisturbed
    for folder in ("same", "other"):
        (tmp_path / folder).mkdir()
    assert run_in_process(settings, tmp_path / "same") == 0
    assert contents(tmp_path / "same" / "out") == files
    assert run_in_process({**settings, "seed": 1}, tmp_path / "other") == 0
    other = contents(tmp_path / "other" / "out")
    weights = "adapter/adapter_model.safetensors"
    assert other.keys() == files.keys() and other[weights] != files[weights]
