"""`moe-peft upit --sweep`: a run for each value, what they share done once, and how they compare."""

from __future__ import annotations

import json

import pytest
import yaml

from moe_peft.cli import main
from moe_peft.training.checkpointing import fingerprint_of
from moe_peft.upit.sweep import _names, _values
from tests.helpers.close import near
from tests.helpers.upit_case import contents, make_case, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def swept(tmp_path_factory, tokenizer):
    """A sweep over active experts, and the recipe."""
    folder = tmp_path_factory.mktemp("sweep")
    case = make_case(folder, tokenizer)
    case |= {"num_train_epochs": 2, "num_experts": 2, "prepare": {"num_experts": 2}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**case, "output_dir": str(folder / "runs")}))
    main(["upit", "--config", str(folder / "recipe.yaml"), "--sweep", "adapter.top_k=1,2"])
    return case, folder


def test_what_runs_share_is_done_once_and_each_is_that_of_its_recipe(swept, tmp_path):
    case, folder = swept
    one, two = (folder / "runs" / f"adapter.top_k={k}" for k in (1, 2))
    for stage in ("prepare", "router_init"):
        weights = [path.relative_to(one) for path in (one / stage).rglob("*.safetensors")]
        assert weights and all((one / name).samefile(two / name) for name in weights)
    assert (
        fingerprint_of(one / "post_train").difference(fingerprint_of(two / "post_train")) == "adapter.top_k 1 and not 2"
    )
    run({**case, "adapter": {**case["adapter"], "top_k": 2}}, tmp_path)
    assert contents(two / "adapter") == contents(tmp_path / "out" / "adapter")


def test_the_table_has_what_it_took(swept):
    folder = swept[1] / "runs"
    one, two = json.loads((folder / "sweep.json").read_text())
    assert (one["name"], two["name"]) == ("adapter.top_k=1", "adapter.top_k=2") and one["tokens"] == two["tokens"]
    assert one["flops"] < two["flops"] < two["flops_with_attention"]
    target = max(point["curve"][-1][2] for point in (one, two))
    for point in (one, two):
        assert point["curve"][-1][:2] == near([point["tokens"], point["flops"]])
        assert point["tokens_to_loss"] == next(int(tokens) for tokens, _, loss in point["curve"] if loss <= target)
        metrics = json.loads((folder / point["name"] / "evaluate" / "stage.json").read_text())
        assert point["held_out"] == metrics["loss"]["adapted"]["mean"]
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_values_are_yaml():
    swept = 'data.train={path: json, split: "train[:25%]"}, train.jsonl,1e-4'
    values = ['{path: json, split: "train[:25%]"}', "train.jsonl", "1e-4"]
    assert _values(swept) == [f"data.train={value}" for value in values]


def test_values_that_differ_in_what_a_folder_cannot_hold_are_two_runs():
    points = [("model=org/a",), ("model=org_a",), ("model=b",), ("model=b",)]
    names = _names(points)
    assert list(names.values()) == points[:3] and len({name.split("-")[0] for name in names}) == 2
    assert list(names)[2] == "model=b" and set(_names(points[::-1])) == set(names)  # whatever the order


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("num_experts", "give key=value,value"),
        ("num_experts=2,[", "give key=value,value"),
        ("num_experts=2,x", "num_experts='x': must be a valid integer"),
    ],
)
def test_a_wrong_sweep_ends_before_its_first_run(value, words, swept, tmp_path, capsys):
    arguments = ["upit", "--config", str(swept[1] / "recipe.yaml"), "--set", f"output_dir={tmp_path / 'out'}"]
    with pytest.raises(SystemExit):
        main([*arguments, "--sweep", value])
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
