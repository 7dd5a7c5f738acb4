"""Bucket rules, which assign seed examples to experts."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from datasets import Dataset

from moe_peft.training.data import drawn
from moe_peft.upit.buckets import (
    BUCKETS,
    Seeds,
    label_buckets,
    perplexity_buckets,
    random_buckets,
)

INF, NAN = float("inf"), float("nan")


def algorithm_3(perplexities, n, capacity):
    """The paper's Algorithm 3, word for word."""
    buckets = [[] for _ in range(n)]
    for i, row in enumerate(perplexities):
        ordered = sorted((p, j) for j, p in enumerate(row))
        for _, j in ordered:
            if len(buckets[j]) < capacity:
                buckets[j].append(i)
                break
    return buckets


@pytest.mark.parametrize("seed", range(20))
def test_perplexity_buckets_are_algorithm_3(seed):
    generator = torch.Generator().manual_seed(seed)
    examples, n = (int(torch.randint(1, high, (), generator=generator)) for high in (60, 9))
    perplexity = torch.rand(examples, n, generator=generator, dtype=torch.float64).mul(4).round() + 1  # with ties
    buckets = perplexity_buckets(perplexity)
    assert buckets == algorithm_3(perplexity.tolist(), n, capacity=-(-examples // n))
    assert sorted(example for bucket in buckets for example in bucket) == list(range(examples))


def test_random_buckets_deal_out_every_example_evenly():
    buckets = random_buckets(22, 4, seed=3)
    assert sorted(example for bucket in buckets for example in bucket) == list(range(22))
    assert sorted(map(len, buckets)) == [5, 5, 6, 6]
    assert buckets == random_buckets(22, 4, seed=3) != random_buckets(22, 4, seed=4)


def test_label_buckets():
    labels = ["code", "prose", "code", "code", "sums", "prose"]
    assert label_buckets(labels, 6) == [[0, 3], [1], [4], [2], [5], []]
    expert_map = {"code": [0, 1], "prose": [1], "sums": [2]}
    assert label_buckets(labels, 3, expert_map) == [[0, 2], [1, 3, 5], [4]]
    expert_map["code"] = [1, 0]  # the list's order does not matter
    assert label_buckets(labels, 3, expert_map) == [[0, 2], [1, 3, 5], [4]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: label_buckets(["a", "b", "c"], 2), "3 labels for 2 experts"),
        (lambda: label_buckets(["a", "b"], 2, {"a": [0]}), "expert_map: no experts for the label 'b' of example 1"),
        (lambda: label_buckets(["a"], 2, {"a": [2]}), "expert_map: 'a': .* name experts from 0 to 1"),
        (
            lambda: perplexity_buckets(torch.tensor([[1.0, float("nan")]])),
            r"perplexity_buckets: no perplexity for examples 0: .* leave them out",
        ),
    ],
)
def test_wrong_inputs(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_edges_of_random_buckets_and_seeds():
    assert random_buckets(0, 2, 0) == [[], []] and sorted(map(len, random_buckets(2, 3, 0))) == [0, 1, 1]
    data = Dataset.from_dict({"i": list(range(20))})
    assert len(drawn(data, 5, seed=0)) == 5 and len(drawn(data, 30, seed=0)) == 20


def test_rules_by_their_names():
    perplexity = torch.ones(6, 2)
    seeds = Seeds(6, 2, seed=5, perplexity_SN=perplexity, labels=list("ababab"))
    assert BUCKETS["label"].fill(seeds) == [[0, 2, 4], [1, 3, 5]]
    swapped = dataclasses.replace(seeds, expert_map={"a": [1], "b": [0]})
    assert BUCKETS["label"].fill(swapped) == [[1, 3, 5], [0, 2, 4]]
    assert BUCKETS["random"].fill(seeds) == random_buckets(6, 2, 5)
    assert BUCKETS["perplexity"].fill(seeds) == [[0, 1, 2], [3, 4, 5]]
    assert [name for name, rule in BUCKETS.items() if rule.needs_perplexities] == ["perplexity"]


def test_the_seed_set_is_in_random_order():
    """In a file sorted by domain, a rule that follows the file's order fills buckets with one domain each."""
    n, per_domain = 8, 100
    data = Dataset.from_dict({"domain": [i // per_domain for i in range(n * per_domain)]})
    seeds = drawn(data, 400, seed=0)
    assert sorted(seeds["domain"]) != seeds["domain"]
    perplexity = torch.rand(400, 1, generator=torch.Generator().manual_seed(0)).expand(-1, n)  # tells nothing
    commonest = []
    for bucket in perplexity_buckets(perplexity):
        counts = Counter(seeds["domain"][i] for i in bucket)
        commonest.append(max(counts.values()) / len(bucket))
    assert sum(commonest) / n < 0.3
    assert drawn(data, 400, seed=0)["domain"] == seeds["domain"] != drawn(data, 400, seed=1)["domain"]
