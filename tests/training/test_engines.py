"""Two processes, started by accelerate with the launch files, train, save and resume as one process does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from compatibility import engines as table
from tests.helpers.ports import held_port

pytestmark = pytest.mark.slow

WHOLE = "equal, saved, resumed"
# Cells of the table; the others are like one of these, and DDP has more tests of its own.
CELLS = {
    "DDP": ["output", "upit-lora"],
    "FSDP2": ["LoRA", "output", "projection", "output-4bit", "native", "upit-lora", "sft"],
    "ZeRO-2": ["LoRA", "projection"],
    "ZeRO-3": ["LoRA", "output", "native", "upit-lora-4bit", "upit-ffn"],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """What one process makes."""
    folder = tmp_path_factory.mktemp("alone")
    table.prepare(folder)
    table.train_all(table.ALONE, list(table.KINDS), folder)
    return folder


@pytest.mark.parametrize("engine", CELLS)
def test_an_engine_does_what_one_process_does(engine, alone, tmp_path, monkeypatch):
    if engine.startswith("ZeRO"):
        pytest.importorskip("deepspeed", reason="needs the extra 'deepspeed'")
    monkeypatch.setattr(table, "STOPS", {kind: stops[-1:] for kind, stops in table.STOPS.items()})  # one is enough here
    table.prepare(tmp_path)
    table.train_all(engine, CELLS[engine], tmp_path)
    if engine == "ZeRO-3":
        assert_script_collects(tmp_path / "output")
    assert not (tmp_path / "compiled").exists()
    assert {kind: table.compare(kind, tmp_path, alone) for kind in CELLS[engine]} == dict.fromkeys(CELLS[engine], WHOLE)


def assert_script_collects(folder: Path) -> None:
    """DeepSpeed's `zero_to_fp32` finds the adapter in a checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(folder / "state" / f"checkpoint-{table.STEPS}"))
    named = {name.replace(".default", ""): value for name, value in found.items()}
    saved = table.weights(folder / "saved")
    assert saved.keys() <= named.keys()
    assert all(torch.equal(named[name], value) for name, value in saved.items())


def test_routers_in_the_place_of_gates(tmp_path):
    """They are trained sharded, and folded when they are complete."""
    for engine, folder in ((table.ALONE, tmp_path / "alone"), ("FSDP2", tmp_path / "sharded")):
        folder.mkdir()
        table.prepare(folder)
        table.train_all(engine, table.UNLISTED, folder)
    assert table.compare("upit-routers", tmp_path / "sharded", tmp_path / "alone") == WHOLE


def test_two_launchers_do_what_one_process_does(alone, tmp_path):
    """Each with one process, as on two machines that share a file system."""
    table.prepare(tmp_path)
    flags = ["--config_file", str(table.LAUNCH_FILES / "multi_node.yaml"), "--main_process_ip", "127.0.0.1"]
    kinds = ["output", "upit-lora"]
    with held_port() as port, ThreadPoolExecutor(2) as machines:
        flags += ["--main_process_port", str(port), "--machine_rank"]
        ends = list(machines.map(lambda rank: table.launch("FSDP2", kinds, tmp_path, flags=[*flags, rank]), "01"))
    assert [end.returncode for end in ends] == [0, 0], [end.stderr[-2000:] for end in ends]
    assert {kind: table.compare(kind, tmp_path, alone) for kind in kinds} == dict.fromkeys(kinds, WHOLE)


@pytest.mark.parametrize("kind", ["upit-lora", "sft"])
def test_commands_write_full_weights_whatever_fsdp_is_told(kind, alone, tmp_path):
    table.prepare(tmp_path)
    result = table.launch("FSDP2", [kind], tmp_path, flags=["--fsdp_state_dict_type", "SHARDED_STATE_DICT"])
    assert result.returncode == 0, result.stderr
    assert table.compare(kind, tmp_path, alone) == WHOLE


def test_a_trainer_may_load_the_weights_in_one_process_alone(alone, tmp_path):
    table.prepare(tmp_path)
    table.launch("FSDP2", ["output"], tmp_path, flags=["--fsdp_cpu_ram_efficient_loading", "true"])
    assert table.compare("output", tmp_path, alone) == WHOLE


def test_upit_refuses_to_score_with_empty_weights(tmp_path):
    table.prepare(tmp_path)
    table.launch("FSDP2", ["upit-ffn"], tmp_path, flags=["--fsdp_cpu_ram_efficient_loading", "true"])
    assert "fsdp_cpu_ram_efficient_loading=true: all processes but" in (tmp_path / "upit-ffn.error").read_text()
    assert not (tmp_path / "upit-ffn").exists()


def test_the_page_says_what_was_measured():
    page = (Path(__file__).parents[2] / "docs/distributed.md").read_text()
    rows = [line.strip("|").split("|") for line in table.RESULT.read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for _, *row in rows[2:] for cell in row]
    assert len(rows) == 2 + len(table.ENGINES)
    assert f"All {len(cells)} combinations" in page and set(cells) == {"equal, saved, resumed"}
