"""`moe-peft upit --compare`: runs in one table; a number that a folder lacks is an empty cell."""

from __future__ import annotations

import csv
import json
import shutil

import pytest

from moe_peft.cli import main
from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit.compare import compare
from moe_peft.utils.messages import InputError
from tests.helpers.upit_case import make_case, make_ffn_case, run

SHORT = {"num_experts": 2, "num_train_epochs": 2, "prepare": {"num_experts": 2}}


@pytest.fixture(scope="module")
def upit(tmp_path_factory, tokenizer) -> UpIT:
    folder = tmp_path_factory.mktemp("upit")
    return run({**make_case(folder, tokenizer), **SHORT}, folder)


@pytest.fixture(scope="module")
def drop(tmp_path_factory, tokenizer) -> UpIT:
    """Drop-Upcycling without held-out data."""
    folder = tmp_path_factory.mktemp("drop")
    case = make_ffn_case(folder, tokenizer, **SHORT, method="upcycle_pt")
    case["moe"]["init"] = "drop"
    del case["data"]["eval"]
    return run(case, folder)


def test_a_row_has_the_numbers_of_a_run(upit, drop, tmp_path, capsys):
    shutil.copytree(upit.root, tmp_path / "upit")
    folders = [str(tmp_path / "upit"), str(drop.root)]
    for name in ("table.json", "table.csv"):
        main(["upit", "--compare", *folders, "--output", str(tmp_path / name)])
    first, second = json.loads((tmp_path / "table.json").read_text())
    stages = {name: record["metrics"] for name, record in upit.records.items()}
    losses = stages["evaluate"]["loss"]["adapted"]
    # Stages 1 and 4 have 2 passes, stage 3 has 2 over a quarter of the rows. There are 2 layers of 3 matrices 64 × 128,
    # and 2 experts of rank 4 with a routing vector each.
    trained = 2 * 2 * (3 * 4 * (64 + 128) + 64)
    assert first == {
        "folder": folders[0], "method": "upit", **{f"loss {domain}": loss for domain, loss in losses.items()},
        "passes": 2.5, "steps": sum(stages[name]["steps"] for name in ("prepare", "router_init", "post_train")),
        "trained parameters": trained, "learning rates": "0.005, 0.005, 0.005",
        "parameters": trained + sum(p.numel() for p in upit.context.base.empty().parameters()),
        "active parameters": first["parameters"], "seconds": first["seconds"],
    }  # fmt: skip
    assert len(losses) == 4 and first["seconds"] >= 1
    assert (second["method"], second["passes"], second["learning rates"]) == ("upcycle_pt (init drop)", 2.0, "0.001")
    assert second["trained parameters"] == second["parameters"] and not any(key.startswith("loss") for key in second)
    with (tmp_path / "table.csv").open(newline="") as file:
        of_csv = [*csv.DictReader(file)]
    assert of_csv[1]["loss a"] == "" and float(of_csv[0]["loss a"]) == losses["a"]
    assert f"{losses['mean']:.4g}" in capsys.readouterr().out


def test_a_result_of_sft_has_a_row(upit, tmp_path):
    base, data = (str(upit.context.root.parent / name) for name in ("base", "train.jsonl"))
    flags = "--max_steps 3 --learning_rate 3e-4 --bf16 false --use_cpu true --report_to none --disable_tqdm true"
    arguments = ["--model_name_or_path", base, "--dataset_name", data, "--output_dir", str(tmp_path / "sft")]
    main(["sft", *arguments, *flags.split()])
    (row,) = compare([str(tmp_path / "sft")])
    assert (row["method"], row["steps"], row["learning rates"]) == ("MoESFTTrainer", 3, "0.0003")


def test_a_stage_that_is_done_already_keeps_its_seconds(upit, tmp_path):
    """One that this process resumes has none, as nobody knows how long it ran before."""
    shutil.copytree(upit.root, tmp_path / "out")
    before = json.loads((upit.root / "manifest.json").read_text())["seconds"]
    again = UpIT(recipe_from_dict({**upit.recipe.model_dump(), "output_dir": str(tmp_path / "out")}))
    again.run()
    assert json.loads((tmp_path / "out/manifest.json").read_text())["seconds"] == before
    (tmp_path / "out/manifest.json").unlink()
    (tmp_path / "out/evaluate/complete.json").unlink()
    (tmp_path / "out/evaluate.state").mkdir()
    (tmp_path / "out/evaluate.state/stage.json").write_text(
        json.dumps({**again.records["evaluate"]["fingerprint"], "processes": 1})
    )
    again.run()
    assert json.loads((tmp_path / "out/manifest.json").read_text())["seconds"] == dict.fromkeys(before)
    assert "seconds" not in compare([str(tmp_path / "out")])[0]


@pytest.mark.parametrize("file, content", [
    (None, ""), ("manifest.json", ""), ("manifest.json", "[]"), ("manifest.json", "{}"),
    ("manifest.json", '{"recipe": {"method": "upit", "moe": {}}, "stages": {"prepare": 3}, "seconds": {}}'),
    ("trainer_state.json", '{"log_history": 3}'), ("trainer_state.json", "{"),
])  # fmt: skip
def test_a_folder_without_a_run_is_named(file, content, tmp_path):
    if file is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(InputError, match=f"{tmp_path}.*{file or 'manifest.json'}"):
        compare([str(tmp_path)])


@pytest.mark.parametrize("flags", [
    ["--output", "table.txt"], ["--output", "nowhere/table.csv"], ["--config", "recipe.yaml"], ["--redo"],
])  # fmt: skip
def test_flags_that_do_not_go_with_it(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("{}")
    with pytest.raises(SystemExit) as end:
        main(["upit", "--compare", ".", *flags])
    assert end.value.code == 2 and flags[0].strip("-") in capsys.readouterr().err
