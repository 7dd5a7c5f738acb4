"""A new bucket rule and selection, each one function and one table entry, in a whole run."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from datasets import Dataset
from peft import AutoPeftModelForCausalLM

from moe_peft.cli import main
from moe_peft.training.data import drawn
from moe_peft.upit import UpIT, load_recipe, recipe_from_dict
from moe_peft.upit.buckets import BUCKETS, BucketRule
from moe_peft.upit.prepare import SELECTIONS, Selection
from tests.helpers.close import near
from tests.helpers.upit_case import DOMAINS, make_case, rows

pytestmark = pytest.mark.slow


def by_last_label_first(seeds):
    """Examples whose label comes last in the alphabet go to expert 0, the others to expert 1."""
    buckets = [[] for _ in range(seeds.num_experts)]
    for example, label in enumerate(seeds.labels):
        buckets[0 if label == max(seeds.labels) else 1].append(example)
    return buckets


@pytest.fixture
def extended(monkeypatch):
    monkeypatch.setitem(BUCKETS, "last_label", BucketRule(by_last_label_first, needs_labels=True))
    monkeypatch.setitem(SELECTIONS, "latest", Selection(lambda steps: steps[-2:], per_expert=3))


def test_new_entries_train_save_and_load(extended, tokenizer, tmp_path):
    case = make_case(tmp_path, tokenizer)
    case |= {"output_dir": str(tmp_path / "out"), "num_experts": 2, "num_train_epochs": 2}
    case["prepare"] = {"selection": "latest"}
    case["router_init"] |= {"buckets": "last_label", "alpha": 0.0}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(case))
    main(["upit", "--config", str(tmp_path / "recipe.yaml")])
    out = tmp_path / "out"
    records = json.loads((out / "manifest.json").read_text())["stages"]
    assert records["prepare"]["metrics"]["checkpoint_steps"] == [10, 12]  # of 6 checkpoints in 12 steps
    buckets = json.loads((out / "router_init" / "buckets.json").read_text())
    assert buckets["perplexity"] is None
    labels = drawn(Dataset.from_list(rows(48)), 12, seed=2)["domain"]  # the recipe's seed + 2
    assert buckets["buckets"][0] == [i for i, label in enumerate(labels) if label == max(DOMAINS)] != []
    assert buckets["buckets"][1] == [i for i, label in enumerate(labels) if label != max(DOMAINS)]
    history = records["router_init"]["metrics"]["history"]
    # With alpha 0 there is nothing but it; what is logged is rounded.
    assert history[-2]["routing_loss"] == pytest.approx(history[-2]["loss"], rel=1e-2)
    model = AutoPeftModelForCausalLM.from_pretrained(out / "adapter")
    assert model.peft_config["default"].num_experts == 2
    with torch.no_grad():
        assert model(**tokenizer("w3 w5", return_tensors="pt")).logits.isfinite().all()


def test_recipes_check_the_tables_as_they_are(extended, tmp_path):
    settings = {
        "output_dir": "out",
        "model": {"name_or_path": "base"},
        "data": {"train": "t", "label_column": "domain"},
    }
    assert recipe_from_dict({**settings, "router_init": {"buckets": "last_label"}}).router_init.rule.needs_labels
    with pytest.raises(ValueError, match=r"^data.label_column=None: must be a column of labels with .*'last_label'"):
        recipe_from_dict({**settings, "data": {"train": "t"}, "router_init": {"buckets": "last_label"}})
    for section, key, name in (
        ("router_init", "buckets", "last_label, none"),
        ("prepare", "selection", "latest"),
    ):
        with pytest.raises(ValueError, match=rf"^{section}\.{key}='x': must be one of .*, {name}$"):
            recipe_from_dict({**settings, section: {key: "x"}})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    loaded = load_recipe(tmp_path / "recipe.yaml", ["prepare.selection=latest"])
    assert loaded.prepare.selection == "latest"


def test_stage_4_trains_with_the_losses_on_routers_that_a_recipe_names(tokenizer, tmp_path):
    case = make_case(tmp_path, tokenizer)
    case |= {"output_dir": str(tmp_path / "out"), "method": "loramoe_pt", "num_train_epochs": 3}
    case["adapter"] |= {"top_k": 1}
    own = {
        "expert_map": {"a": [0], "b": [1, 2], "c": [3]}, "router_z_loss_coef": 0.01, "router_balancing": "layer",
        "router_schedule": "three_phase", "lr_scheduler_type": "constant", "learning_rate": 2e-2, "logging_steps": 1,
    }  # fmt: skip
    pipeline = UpIT(recipe_from_dict({**case, "post_train": {"sft": own}}))
    pipeline.run()
    history = [r for r in pipeline.records["post_train"]["metrics"]["history"] if "loss" in r]
    assert history[0]["compliance"] < 0.5 < history[-1]["compliance"]
    assert {"aux_loss", "router_z_loss", "router_label_loss"} <= history[0].keys()
    assert history[0]["learning_rate"] == near(2e-3) and history[10]["learning_rate"] == near(2e-2)


@pytest.mark.parametrize(
    ("own", "label_column", "message"),
    [
        ({"expert_map": {"a": [9]}}, "domain", r"^post_train.sft.expert_map: 'a': \[9\]: name experts from 0 to 3"),
        ({"expert_map": {"a": [0]}}, None, r"^data.label_column=None: must be set for post_train.sft.expert_map"),
        ({"training_stage": "routers"}, None, r"^post_train.sft.training_stage: set post_train.train_experts"),
        ({"router_z_los_coef": 1}, None, r"^post_train.sft.router_z_los_coef: .* did you mean 'router_z_loss_coef'"),
        (
            {"router_aux_loss_coef": 1.0},
            None,
            r"^post_train.sft.router_aux_loss_coef: set adapter.router_aux_loss_coef",
        ),
    ],
)
def test_wrong_losses_on_routers_are_refused(own, label_column, message):
    settings = {
        "output_dir": "out",
        "model": {"name_or_path": "b"},
        "data": {"train": "t", "label_column": label_column},
    }
    with pytest.raises(ValueError, match=message):
        recipe_from_dict({**settings, "num_experts": 4, "post_train": {"sft": own}})
    with pytest.raises(ValueError, match=r"^prepare.sft.router_z_loss_coef: unknown key"):
        recipe_from_dict({**settings, "prepare": {"sft": {"router_z_loss_coef": 0.1}}})
