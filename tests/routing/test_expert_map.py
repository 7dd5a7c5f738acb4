"""Expert maps: lists of indices and masks of 0 and 1, never one taken for the other."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from datasets import Dataset

from moe_peft.analysis import record_routing
from moe_peft.routing.expert_map import check_allowed, expert_masks, in_order, label_text, read_expert_map
from moe_peft.training.trainers import MoESFTConfig, MoESFTTrainer
from moe_peft.upit import recipe_from_dict
from moe_peft.upit.buckets import label_buckets
from tests.helpers.routed_models import routed_model
from tests.helpers.trainers import EXPERTS, arguments, make_model
from tests.helpers.upit_case import rows

MASKS = {"a": [1, 1, 0, 0, 0, 0], "b": [0, 0, 1, 1, 0, 0], "c": [0, 0, 0, 0, 1, 1]}  # EXPERTS, as the source writes it
BOOLEANS = {label: [bool(entry) for entry in mask] for label, mask in MASKS.items()}


@pytest.mark.parametrize("expert_map", [EXPERTS, MASKS, BOOLEANS], ids=["indices", "masks", "booleans"])
def test_all_forms_mean_the_same(expert_map):
    assert read_expert_map(expert_map, 6, "expert_map") == EXPERTS
    assert expert_masks(read_expert_map(expert_map, 6, "expert_map"), 6).int().tolist() == list(MASKS.values())
    arrays = {label: np.array(entries) for label, entries in expert_map.items()}
    assert read_expert_map(arrays, 6, "expert_map") == EXPERTS


def reference(expert_map: dict, n: int):
    """Every reading of a map, by trying all sets of experts; None where there is not exactly one."""
    readings = []
    for form in ("indices", "mask"):
        read = {}
        for label, entries in expert_map.items():
            for bits in range(1, 2**n):
                chosen = [i for i in range(n) if bits >> i & 1]
                if form == "indices":
                    same = sorted(entries) == chosen
                else:
                    same = entries == [int(i in chosen) for i in range(n)]
                if same:
                    read[label] = chosen
        if len(read) == len(expert_map):
            readings.append(read)
    if n > 2 and len(expert_map) > 1 and all(sorted(entries) == [0, 1] for entries in expert_map.values()):
        return None  # masks of the wrong length
    return readings[0] if len(readings) == 1 else None


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_whatever_has_one_reading_is_read_so_and_all_else_is_refused(n):
    """All maps of one or two short lists, against trying every set of experts."""
    from itertools import product

    lists = [list(entries) for length in range(n + 2) for entries in product(range(min(n, 2) + 1), repeat=length)]
    lists = lists if n < 4 else lists[::7]
    maps = [{"a": one} for one in lists] + [{"a": one, "b": other} for one in lists[::2] for other in lists[::3]]
    accepted = 0
    for expert_map in maps:
        expected = reference(expert_map, n)
        try:
            read = read_expert_map(expert_map, n, "m")
        except ValueError as error:
            assert str(error).startswith("m: ") and "\n" not in str(error)
            read = None
        if read is not None:
            accepted += 1
            read = {label: sorted(experts) for label, experts in read.items()}
        assert read == expected, expert_map
    assert 0 < accepted < len(maps)


@pytest.mark.parametrize(
    ("expert_map", "n", "message"),
    [
        ({"a": [0, 0]}, 6, r"^m: 'a': \[0, 0\]: names an expert twice; a mask has 6 entries"),
        ({"a": [1, 1, 0]}, 6, "names an expert twice; a mask has 6 entries"),
        ({"a": [0, 6]}, 6, "name experts from 0 to 5, or give a mask of 6 entries"),
        ({"a": [-1]}, 6, "name experts from 0 to 5"),
        ({"a": []}, 6, "name experts from 0 to 5"),
        ({"a": [0] * 6}, 6, "the mask allows no expert"),
        ({"a": [False] * 6}, 6, "the mask allows no expert"),
        ({"a": [True, False]}, 6, "a mask has 6 entries"),
        ({"a": [True, 0, 0, 0, 0, 0]}, 6, "true and false among numbers"),
        ({"a": [0.5]}, 6, "name experts by integers"),
        ({"a": ["0"]}, 6, "name experts by integers"),
        ({"a": 0}, 6, "give a list of experts from 0 to 5"),
        ({"a": "01"}, 6, "give a list of experts"),
        ({"a": b"01"}, 6, "give a list of experts"),
        ({"a": {0, 1}}, 6, "give a list of experts"),
        ({"a": [1, 1, 0, 0], "b": [2, 3]}, 4, "'a' has a mask, 'b' a list of indices; write all in one form"),
        ({"b": [2, 3], "a": [1, 1, 0, 0]}, 4, "'a' has a mask, 'b' a list of indices; write all in one form"),
        ({"a": [0, 1]}, 2, r"may be indices or masks; write masks as \[true, false\]"),
        ({"a": [1, 0], "b": [0, 1]}, 2, "may be indices or masks"),
        ({"a": [1, 0], "b": [0, 1]}, 4, "look like masks for two experts, .* are 4; write masks of 4 entries"),
        ({"a": [0, 1], "b": [0, 1]}, 3, "look like masks for two experts"),
        ({}, 6, "give a map of labels to experts"),
        ([1], 6, "give a map of labels to experts"),
        ({0: [0], "0": [1]}, 6, "the label '0' occurs twice"),
    ],
)
def test_what_is_refused(expert_map, n, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_expert_map(expert_map, n, "m")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_long_maps_and_lists_are_cut_in_messages():
    long = {"a": [0, 1], "b": [1, 0], **{f"label {i}": [0, 1] for i in range(9)}}
    with pytest.raises(ValueError, match=f"^m: {re.escape(str(long)[:79])}…: .* write masks of 3 entries$"):
        read_expert_map(long, 3, "m")
    with pytest.raises(ValueError, match=f"^m: 'a': {re.escape(str([8] * 30)[:79])}…: name experts from 0 to 2"):
        read_expert_map({"a": [8] * 30}, 3, "m")


def test_maps_whose_labels_have_too_few_experts():
    experts = {"a": [0, 1], "b": [2]}
    check_allowed(experts, 1, "m")
    with pytest.raises(ValueError, match=r"^m: 'b' has 1 of the experts, a token gets top_k=2; "):
        check_allowed(experts, 2, "m")
    assert torch.equal(expert_masks(experts, 3), torch.tensor([[True, True, False], [False, False, True]]))


def test_other_lists_of_the_map_decide_what_two_entries_mean():
    assert read_expert_map({"a": [1, 0], "b": [1, 1]}, 2, "m") == {"a": [0], "b": [0, 1]}
    assert read_expert_map({"a": [0, 1], "b": [1]}, 2, "m") == {"a": [0, 1], "b": [1]}
    assert read_expert_map({"a": [False, True], "b": [0, 1]}, 2, "m") == {"a": [1], "b": [1]}


def test_experts_0_and_1_of_more_are_named_where_no_mask_could_be_meant():
    assert read_expert_map({"a": [0, 1]}, 4, "m") == {"a": [0, 1]}
    assert read_expert_map({"a": [0, 1], "b": [2, 3]}, 4, "m") == {"a": [0, 1], "b": [2, 3]}
    assert read_expert_map({"a": [0, 1], "b": [1]}, 4, "m") == {"a": [0, 1], "b": [1]}
    both = [True, True, False, False]
    assert read_expert_map({"a": both, "b": both}, 4, "m") == {"a": [0, 1], "b": [0, 1]}


def test_labels_match_as_text():
    assert [label_text(label) for label in (3, "3", 3.0, 2.5, True)] == ["3", "3", "3", "2.5", "True"]
    assert label_text("cafe\u0301") == label_text("caf\u00e9") == "caf\u00e9"
    assert list(read_expert_map({0: [0], 1: [1]}, 3, "m")) == ["0", "1"]
    assert label_buckets([0, "1", 1.0], 3, {0: [0, 1], 1: [2]}) == [[0], [], [1, 2]]


@pytest.mark.parametrize("expert_map", [MASKS, BOOLEANS])
def test_masks_reach_trainer_recorder_buckets_and_recipe(expert_map, tokenizer, tmp_path):
    args = arguments(tmp_path, MoESFTConfig, label_column="domain", expert_map=expert_map)
    data = Dataset.from_list(rows(12))
    trainer = MoESFTTrainer(make_model(), args, train_dataset=data, processing_class=tokenizer)
    assert trainer._allowed.int().tolist() == list(MASKS.values())
    with record_routing(routed_model("adapter"), list("abc"), expert_map) as statistics:
        assert statistics.allowed.int().tolist() == list(MASKS.values())
    assert label_buckets(["a", "a", "b", "c"], 6, expert_map) == [[0], [1], [2], [], [3], []]
    recipe = recipe_from_dict({
        "output_dir": "out", "model": {"name_or_path": "base"}, "num_experts": 6,
        "data": {"train": "train.jsonl", "label_column": "domain"},
        "router_init": {"buckets": "label", "expert_map": json.loads(json.dumps(expert_map))},
    })  # fmt: skip
    assert read_expert_map(recipe.router_init.expert_map, 6, "m") == EXPERTS


def test_a_recipe_refuses_a_wrong_map_when_it_is_read():
    with pytest.raises(ValueError, match=r"router_init.expert_map: 'a': \[1, 1, 0\]: names an expert twice"):
        recipe_from_dict({
            "output_dir": "out", "model": {"name_or_path": "base"}, "num_experts": 4,
            "data": {"train": "train.jsonl", "label_column": "domain"},
            "router_init": {"buckets": "label", "expert_map": {"a": [1, 1, 0]}},
        })  # fmt: skip


def test_numbers_as_domains_of_recorded_passes():
    with torch.no_grad(), record_routing(routed_model("adapter"), [0, 1], {0: [0, 1, 2], "1": [3, 4]}) as statistics:
        statistics.current = [1, "0"]
        statistics.update([torch.zeros(4, 6)] * 2, torch.ones(2, 2), None)
    assert list(statistics.shares()) == ["0", "1"] and statistics.tokens.tolist() == [2, 2]


def test_labels_come_in_the_order_of_the_map_then_of_the_data():
    assert in_order(["c", "b", "1", "a", "b"], {"a": [0], "x": [1], 1: [2], "b": [3]}) == ["a", "1", "b", "c"]
    assert in_order(["c", "b", "c"], None) == ["c", "b"]
