"""A killed run resumes and ends with the same bytes as an uninterrupted one."""

from __future__ import annotations

import shutil

import pytest

from tests.helpers.upit_case import contents, make_case, run_in_process

pytestmark = pytest.mark.slow

# Stage 1 has 24 steps, stage 3 has 2 for each of 4 experts, stage 4 has 24; stage 1 saves at 5, 10, 15, 16, 20 and 24.
STEPS, SAVE_STEPS = 56, 5
KILLS = [
    ("step", 8),
    ("within a checkpoint", 2),
    ("before a checkpoint is marked", 6),
    ("marking a stage", 1),  # stage 1 is complete but not yet marked
    ("removing", 3),  # its state
    ("scoring", 3),
    ("writing an expert", 3),  # in stage 3
    ("step", 40),  # in stage 4
    ("publishing", 1),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("undisturbed")
    settings = make_case(folder, tokenizer)
    assert run_in_process(settings, folder) == 0
    assert len((folder / "steps").read_bytes()) == STEPS
    files = contents(folder / "out")
    for name in (
        "adapter/adapter_model.safetensors",
        "router_init/buckets.json",
        "evaluate/complete.json",
        "manifest.json",
    ):
        assert name in files
    assert not any("partial" in name or ".state" in name for name in files)
    return settings, files, folder


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill[0]} {kill[1]}")
def test_killed_run_goes_on_to_the_same_bytes(kill, undisturbed, tmp_path):
    settings, files, _ = undisturbed
    assert run_in_process(settings, tmp_path, kill) == -9
    assert run_in_process(settings, tmp_path) == 0
    assert contents(tmp_path / "out") == files
    # Nothing that was saved is trained again: only what came after the last save.
    assert STEPS <= len((tmp_path / "steps").read_bytes()) <= STEPS + SAVE_STEPS


def test_killed_again_and_again(undisturbed, tmp_path):
    settings, files, _ = undisturbed
    attempts = 0
    while (code := run_in_process(settings, tmp_path, ("step", 15))) != 0:
        attempts += 1
        assert code == -9 and attempts < 30
    assert attempts > 2
    assert contents(tmp_path / "out") == files


@pytest.fixture(scope="module")
def changed(undisturbed, tmp_path_factory):
    """The same run with another setting of stage 3: settings and files."""
    settings = {**undisturbed[0], "router_init": {**undisturbed[0]["router_init"], "alpha": 0.25}}
    folder = tmp_path_factory.mktemp("changed")
    assert run_in_process(settings, folder) == 0
    return settings, contents(folder / "out")


@pytest.mark.parametrize(
    ("point", "n", "then"), [("removing", 3, "undisturbed"), ("removing", 4, "changed"), ("step", 3, "undisturbed")]
)
def test_killed_while_a_changed_stage_is_done_again(point, n, then, undisturbed, changed, tmp_path):
    """Whether the setting then stays changed or is changed back: half a stage is never taken for a whole one."""
    shutil.copytree(undisturbed[2] / "out", tmp_path / "out")
    assert run_in_process(changed[0], tmp_path, (point, n)) == -9
    settings, files = changed if then == "changed" else undisturbed[:2]
    assert run_in_process(settings, tmp_path) == 0
    assert contents(tmp_path / "out") == files


def test_another_seed_gives_another_run(undisturbed, tmp_path):
    settings, files, _ = undisturbed
    assert run_in_process({**settings, "seed": 1}, tmp_path) == 0
    other = contents(tmp_path / "out")
    weights = "adapter/adapter_model.safetensors"
    assert other.keys() == files.keys() and other[weights] != files[weights]
