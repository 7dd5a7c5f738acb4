"""Recipes with labels, or with unusual routers: what is refused before training; evaluation under a label mask."""

from __future__ import annotations

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from moe_peft.models.steering import allow_experts
from moe_peft.routing.routers import ROUTERS, RouterSettings, make_router
from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit.plan import plan
from tests.helpers.close import assert_near, near
from tests.helpers.upit_case import make_case, rows

MASKS = {"a": [1, 1, 0, 0], "b": [0, 0, 1, 1], "c": [0, 1, 1, 1]}


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    return {**make_case(tmp_path_factory.mktemp("case"), tokenizer), "output_dir": "nowhere"}


def recipe(case, mode="lora", **settings):
    """A recipe; `sft` and `router` are stage 4's."""
    case = {key: value for key, value in case.items() if key not in ("adapter", "prepare")}
    own = {name: settings.pop(name) for name in ("sft", "router") if name in settings}
    settings["post_train"] = {**settings.get("post_train", {}), **own}
    return recipe_from_dict({**case, "mode": mode, "method": "upcycle_pt" if mode == "ffn" else "upit", **settings})


# --- the experts that a map may name ----------------------------------------------------------------------------------


def masks(n):
    return {"a": [1] * (n // 2) + [0] * (n - n // 2), "b": [0] * (n // 2) + [1] * (n - n // 2), "c": [1] * n}


@pytest.mark.parametrize("moe, routed", [
    ({}, 4), ({"granularity": 2}, 8), ({"granularity": 3}, 12), ({"granularity": 4, "num_shared_experts": 2}, 14),
    ({"num_shared_experts": 1}, 3),
])  # fmt: skip
def test_a_native_moes_map_is_over_its_routed_experts(moe, routed, case):
    kept = recipe(case, "ffn", moe=moe, sft={"expert_map": masks(routed)})
    assert kept.expert_map == {label: [i for i, on in enumerate(m) if on] for label, m in masks(routed).items()}
    for n in {4, 8, routed + 1} - {routed}:
        with pytest.raises(
            ValueError, match=rf"^post_train.sft.expert_map: .* a mask of {routed} entries|mask has {routed}"
        ):
            recipe(case, "ffn", moe=moe, sft={"expert_map": masks(n)})
    with pytest.raises(ValueError, match=f"name experts from 0 to {routed - 1},"):
        recipe(case, "ffn", moe=moe, sft={"expert_map": {"a": [routed]}})


def test_buckets_are_of_the_experts_before_they_are_split(case):
    own = {"buckets": "label", "expert_map": MASKS}
    assert recipe(case, "ffn", method="upit", moe={"granularity": 2}, router_init=own).router_init.expert_map == MASKS


# --- labels and masks that cannot be ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["lora", "ffn"])
def test_a_label_of_the_data_without_experts_is_found_before_any_training(mode, case, tmp_path):
    own = {"mode": mode, "sft": {"expert_map": {"a": [0, 1], "b": [2, 3]}}, "output_dir": str(tmp_path / "out")}
    message = r"^post_train.sft.expert_map: no experts for the labels \['c'\] of data.train; add them$"
    with pytest.raises(ValueError, match=message):
        plan(UpIT(recipe(case, **own)))
    with pytest.raises(ValueError, match=message):
        UpIT(recipe(case, **own)).run()
    assert not (tmp_path / "out").exists()


def test_held_out_labels_count_where_they_are_masked(case, tmp_path):
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps({**row, "domain": "z"}) for row in rows(3)))
    data = {**case["data"], "eval": str(tmp_path / "eval.jsonl")}
    assert plan(UpIT(recipe(case, data=data, sft={"expert_map": MASKS})))
    with pytest.raises(ValueError, match=r"no experts for the labels \['z'\] of data.eval; add them"):
        plan(UpIT(recipe(case, data=data, sft={"expert_map": MASKS, "router_label_mask": True})))


# --- routers with nothing to train ------------------------------------------------------------------------------------


def test_the_trait_says_whether_a_router_has_parameters():
    for name, router in ROUTERS.items():
        made = make_router(16, 4, RouterSettings(name, attention_size=16))
        assert bool(list(made.parameters())) == router.has_parameters, name


@pytest.mark.parametrize("router", ["hash", "locmoe"])
def test_routers_without_parameters_are_not_trained_by_themselves(router, case):
    own = {"adapter": {"router_type": router}}
    for trains in (True, False):
        with pytest.raises(
            ValueError, match=rf"^adapter.router_type='{router}': must be left out: stage 3 makes .*buckets=none$"
        ):
            recipe(case, **own, router_init={"train_experts": trains})
    alone = r"^post_train: these routers have no parameters; use others: .* trains nothing else$"
    with pytest.raises(ValueError, match=alone):
        recipe(case, **own, method="self_moe")
    with pytest.raises(ValueError, match=alone):
        recipe(case, **own, router_init={"buckets": "none"}, post_train={"train_experts": False})
    assert recipe(case, **own, router_init={"buckets": "none"}).trains_experts
    for method in ("loramoe_pt", "pesc", "lora"):
        assert recipe(case, **own, method=method)


# --- evaluation -------------------------------------------------------------------------------------------------------


def losses(model, tokenizer, mask):
    """Of every domain, by a plain loop; `mask` says which experts may serve it."""
    result = {}
    for domain in "abc":
        total = count = 0
        for row in (row for row in rows(12, offset=5) if row["domain"] == domain):
            prompt = tokenizer(row["prompt"])["input_ids"]
            ids = torch.tensor([tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]])
            with torch.no_grad(), allow_experts(model, mask[domain]):
                logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            total += cross_entropy(logits, ids[0, len(prompt) :], reduction="sum").item()
            count += ids.shape[1] - len(prompt)
        result[domain] = total / count
    return result


@pytest.mark.parametrize("mode", ["lora", "ffn"])
def test_evaluation_is_masked_if_stage_4_was(mode, case, tokenizer, tmp_path):
    own = {"expert_map": MASKS, "router_label_mask": True, "router_label_loss_coef": 0.0}
    settings = {"output_dir": str(tmp_path / "out"), "num_train_epochs": 1}
    settings["method"] = "loramoe_pt" if mode == "lora" else "upcycle_pt"
    masked, free = (UpIT(recipe(case, mode, sft=sft, **settings)) for sft in (own, {**own, "router_label_mask": False}))
    masked.run()
    metrics = masked.records["evaluate"]["metrics"]
    for domain, mask in MASKS.items():
        shares = torch.tensor(metrics["shares"][domain])
        assert not shares[:, ~torch.tensor(mask, dtype=torch.bool)].any()
        assert_near(shares.sum(1), torch.ones(2))
    kind = AutoPeftModelForCausalLM if mode == "lora" else AutoModelForCausalLM
    model = kind.from_pretrained(masked.result).eval()
    experts = {label: [i for i, on in enumerate(mask) if on] for label, mask in MASKS.items()}
    expected, unmasked = losses(model, tokenizer, experts), losses(model, tokenizer, dict.fromkeys("abc", range(4)))
    for domain in "abc":
        assert metrics["loss"]["adapted"][domain] == near(expected[domain])
        assert abs(unmasked[domain] - expected[domain]) > 1e-5
    evaluate = masked.stages[-1], free.stages[-1]
    assert evaluate[0].settings()["label mask"] == experts and evaluate[1].settings()["label mask"] is None
