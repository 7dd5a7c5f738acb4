"""Loads of experts: their variation in plain Python, and the verdict on them."""

from __future__ import annotations

import re
import statistics

import pytest
import torch

from moe_peft.routing.statistics import (
    REMEDY,
    chosen_experts,
    compliance,
    effective_experts,
    expert_counts,
    load_health,
)
from tests.helpers.close import assert_near, near


def variation_of(counts):
    return statistics.pstdev(counts) / statistics.fmean(counts) if any(counts) else 0.0


def chance_of(counts):
    return ((len(counts) - 1) / sum(counts)) ** 0.5 if any(counts) else 0.0


def padded(loads):
    widest = max(map(len, loads))
    counts = torch.tensor([[*load, *[5] * (widest - len(load))] for load in loads], dtype=torch.float64)
    return counts, [len(load) for load in loads]


def test_health_is_over_all_layers():
    loads = [[5, 3, 2], [1, 1], [30, 1, 0, 69], [0, 0, 0]]
    counts, sizes = padded(loads)
    for row, size in enumerate(sizes):
        counts[row, size:] = 0
    health = load_health(counts, sizes, 5.0)
    assert health.variation == near(statistics.fmean(map(variation_of, loads)), dtype=torch.float64)
    assert (health.dead, health.experts) == (1, 12)
    assert health.by_chance == near(statistics.fmean(map(chance_of, loads)), dtype=torch.float64)
    used = load_health(counts[:2], sizes[:2], 5.0)
    assert used.dead == 0


# Counts of 1,000 tokens, k of them each, and the verdict.
@pytest.mark.parametrize(
    ("counts", "k", "status"),
    [
        ([250, 250, 250, 250], 1, "even"),
        ([400, 300, 200, 100], 1, "even"),  # as untrained gates have: 0.45 of at most 1.73
        ([700, 100, 100, 100], 1, "uneven"),  # 1.04 of 1.73
        ([970, 10, 10, 10], 1, "collapsed"),
        ([800, 800, *[400 / 6] * 6], 2, "collapsed"),  # 40 %, 40 % and six times 3.3 %
        ([990, 980, *[5] * 6], 2, "collapsed"),
        ([*[2000 / 7] * 7, 0], 2, "collapsed"),  # a dead expert of 8; untrained gates have 1 in 30
        ([*[4000 / 31] * 31, 0], 4, "even"),  # of 32, untrained gates leave a third
        ([*[4000 / 8] * 8, *[0] * 24], 4, "collapsed"),
        ([500, 500], 1, "even"),
        ([0, 0, 0], 1, "unknown"),
    ],
)
def test_a_load_is_compared_with_that_of_untrained_gates(counts, k, status):
    health = load_health(torch.tensor([counts]).double(), [len(counts)], 1000.0)
    assert health.status == status
    assert health.warning == ("" if status in ("even", "unknown") else f"{health}. Try this: {REMEDY}")
    several = load_health(torch.tensor([counts]).double().expand(30, -1), [len(counts)] * 30, 1000.0)
    assert several.status == status and str(several).startswith(f"{status}, CV {variation_of(counts):.2f} ")


def test_one_bad_layer_of_many_is_said_and_does_not_make_a_collapse():
    counts = torch.full((30, 8), 250.0)
    counts[4] = torch.tensor([995.0, 995.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0])
    health = load_health(counts, [8] * 30, 1000.0)
    assert health.status == "even" and health.warning == ""
    assert str(health).endswith("monopolies: 1 of 30 layers, dead: 6 of 240 experts")
    counts[5:9] = counts[4]
    assert load_health(counts, [8] * 30, 1000.0).status == "collapsed"


@pytest.mark.parametrize(("n", "k"), [(4, 1), (8, 2), (16, 4), (32, 2)])
def test_untrained_gates_are_not_called_uneven(n, k):
    """On inputs that share directions, as the hidden states of a language model do."""
    torch.manual_seed(0)
    counts = torch.zeros(30, n)
    for layer in range(30):
        x = torch.randn(2000, 64) + 0.5 * torch.randn(64) + torch.randn(2000, 2) @ torch.randn(2, 64)
        counts[layer] = torch.bincount((x @ torch.randn(64, n)).topk(k).indices.flatten(), minlength=n)
    health = load_health(counts, [n] * 30, 2000.0)
    assert health.status == "even" and health.variation > 0.3
    assert health.variation == pytest.approx(health.untrained, rel=0.4)


@pytest.mark.parametrize("n, k, tokens", [(2, 1, 12), (8, 2, 20), (16, 2, 64)])
def test_few_tokens_say_nothing(n, k, tokens):
    torch.manual_seed(0)
    counts = torch.stack([torch.rand(tokens, n).topk(k).indices.flatten().bincount(minlength=n) for _ in range(30)])
    health = load_health(counts, [n] * 30, float(tokens))
    assert health.status == "unknown" and health.warning == "" and health.variation > 0.15
    assert load_health(1000 * counts, [n] * 30, 1000.0 * tokens).status == "even"
    # With replacement, a load's squared coefficient of variation is on average (n - 1)/A.
    drawn = torch.stack([torch.randint(n, (tokens * k,)).bincount(minlength=n).double() for _ in range(4000)])
    squares = (drawn.std(1, correction=0) / drawn.mean(1)) ** 2
    assert health.by_chance**2 == pytest.approx(squares.mean().item(), rel=0.1)


def test_experts_that_serve_are_those_with_a_gate():
    experts = torch.tensor([[2, 0], [1, 3], [3, 2]])
    gates = torch.tensor([[0.5, 0.0], [0.0, 0.0], [-0.1, 0.2]])
    assert chosen_experts(experts, None, 4).int().tolist() == [[1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]]
    assert chosen_experts(experts, gates, 4).int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 1]]
    assert chosen_experts(experts, gates, 4).dtype == torch.bool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_are_exact_whatever_the_logits_dtype(dtype):
    logits = torch.tensor([[3.0, 2.0, 1.0]]).expand(1001, 3).to(dtype)
    mask = torch.ones(1001)
    mask[-1] = 0
    assert expert_counts(logits, None, 2).tolist() == [1001, 1001, 0]
    counts = expert_counts(logits, mask, 2)
    assert counts.tolist() == [1000, 1000, 0] and counts.dtype == torch.float64


COUNTS = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: expert_counts(COUNTS, torch.ones(3), 2),
            "expert_counts: mask_T has shape [3]",
        ),
        (lambda: expert_counts(COUNTS, None, 5), "top_k=5: "),
        (
            lambda: compliance([COUNTS, torch.ones(2, 3)], torch.ones(2, 4)),
            "compliance: allowed_TN has shape [2, 4]",
        ),
        (lambda: compliance([], COUNTS), "compliance: allowed_TN has shape [2, 4]"),
    ],
)
def test_what_is_refused_is_shown(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


def test_effective_number_of_experts():
    gates = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0], [3.0, 1.0, 0, 0], [0] * 4])  # the last token has no expert
    assert_near(effective_experts(gates), torch.tensor([4.0, 1.0, 16 / 10, 0.0]))
    assert_near(effective_experts(gates.bfloat16() * 1e-30), effective_experts(gates))
