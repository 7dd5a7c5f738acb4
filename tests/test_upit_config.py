"""Recipes: what is refused, and how."""

from __future__ import annotations

import pytest
import yaml

from moe_peft.upit import load_recipe, recipe_from_dict
from moe_peft.upit.pipeline import budget

MINIMAL = {"output_dir": "out", "model": {"name_or_path": "base"}, "data": {"train": "train.jsonl"}}


def recipe(**settings):
    return recipe_from_dict({**MINIMAL, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_expert": 4}, "num_expert: unknown key; did you mean 'num_experts'?"),
        ({"prepare": {"selectoin": "uniform"}}, "prepare.selectoin: unknown key; did you mean 'selection'?"),
        ({"sft": {"learning_rat": 1}}, "sft.learning_rat: unknown key; did you mean 'learning_rate'?"),
        ({"post_train": {"sft": {"foo": 1}}}, "post_train.sft.foo: unknown key"),
        (
            {"post_train": {"sft": {"max_steps": 9}}},
            "post_train.sft.max_steps: the recipe's budget and resuming decide",
        ),
        ({"adapter": {"rank": 3}}, "adapter.rank: unknown key"),
        ({"adapter": {"r": 0}}, "r=0"),
        ({"adapter": {"top_k": 9}}, "top_k=9"),
        ({"method": "mola"}, "method='mola': Input should be 'upit', 'self_moe', 'lora'"),
        ({"num_experts": "many"}, "num_experts='many': Input should be a valid integer"),
        ({"num_experts": 1}, "num_experts=1: must be at least 2"),
        ({"prepare_share": 1.0}, "prepare_share=1.0: must be above 0 and below 1"),
        ({"router_init": {"seed_fraction": 0}}, "router_init.seed_fraction=0.0: must be above 0, at most 1"),
        ({"router_init": {"buckets": "label"}}, "data.label_column=None"),
        ({"prepare": {"order": "blocks"}}, "data.label_column=None"),
        ({"prepare": {"adapters": []}}, r"prepare.adapters=\[\]: must be one folder at least"),
        ({"prepare": {"num_experts": 4}, "expand": {"method": "none"}}, "stage 1 gives 4, expand.method='none'"),
        ({"prepare": {"num_experts": 9}}, "num_experts=8: stage 1 gives 9; ask for that many or more"),
        ({"prepare": {"num_experts": 1}}, "stage 1 gives 1, expansion needs two"),
        (
            {"method": "self_moe", "prepare": {"num_experts": 4}, "expand": {"method": "none"}},
            "stage 1 gives 4, expand.method='none'",
        ),
        ({"router_init": {"capacity": 0}}, "router_init.capacity=0: must be at least 1"),
        ({"sft": {"save_steps": 0.1}}, "sft.save_steps=0.1: must be a whole number of at least 1"),
        ({"prepare": {"sft": {"save_steps": 0}}}, "sft.save_steps=0: must be"),
        ({"model": {"name_or_path": "m", "dtype": "bf16"}}, "model.dtype='bf16': must be one of auto, float32"),
        (
            {"model": {"name_or_path": "m", "quantization": {"load_in_4bits": True}}},
            "model.quantization.load_in_4bits: unknown key; did you mean 'load_in_4bit'?",
        ),
        ({"model": {}}, "model.name_or_path: Field required"),
        ({"data": {"train": 3}}, "data.train=3"),
        ({"router_init": 3}, "router_init=3"),
    ],
)
def test_wrong_settings_are_refused_by_name_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as raised:
        recipe(**settings)
    assert "\n" not in str(raised.value)


def test_yaml_and_overrides(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "sft": {"packing": False}}) + "num_train_epochs: 2e0\n")
    loaded = load_recipe(path, ["sft.learning_rate=1e-4", "prepare.selection=uniform", "method=lora", "num_experts=6"])
    assert loaded.sft == {"packing": False, "learning_rate": 1e-4}
    assert (loaded.num_train_epochs, loaded.prepare.selection, loaded.method, loaded.num_experts) == (
        2,
        "uniform",
        "lora",
        6,
    )
    for override, message in (("foo", "an override is key=value"), ("method.x=1", "'method' is no section")):
        path.write_text(yaml.safe_dump({**MINIMAL, "method": "upit"}))
        with pytest.raises(ValueError, match=message):
            load_recipe(path, [override])
    path.write_text("a: [1\n")
    with pytest.raises(ValueError, match="while parsing a flow sequence") as raised:
        load_recipe(path)
    assert "\n" not in str(raised.value)
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match="a recipe is a mapping"):
        load_recipe(path)
    with pytest.raises(FileNotFoundError):
        load_recipe(tmp_path / "none.yaml")


def test_every_method_has_the_same_budget():
    for method in ("upit", "lora", "loramoe_pt", "loramoe_sft", "self_moe"):
        passes = budget(recipe(method=method, num_train_epochs=4, prepare_share=0.5), 1000)
        assert passes.prepare + passes.router_init + passes.post_train == pytest.approx(4), method
    upit = budget(recipe(router_init={"seed_fraction": 0.1, "num_train_epochs": 4}), 1000)
    assert (upit.prepare, upit.router_init) == (2, 0.4)
    assert budget(recipe(), 100).router_init == 8 / 100 * 4  # never less than one example an expert
    given = budget(recipe(prepare={"adapters": ["a", "b"]}, router_init={"buckets": "none"}), 1000)
    assert (given.prepare, given.router_init, given.post_train) == (0, 0, 4)
    with pytest.raises(ValueError, match="stage 4 is left with none"):
        budget(recipe(router_init={"seed_fraction": 1, "num_train_epochs": 2}), 1000)
