"""Gates and chosen experts from logits alone, against a plain loop in float64."""

from __future__ import annotations

import math
import re

import pytest
import torch

from moe_peft.routing.gates import (
    AllowedExperts,
    ForcedExperts,
    pad_logits,
    sigmoid_gates,
    switch_gates,
    threshold_gates,
    top_k_gates,
    top_p_gates,
)
from tests.helpers.close import assert_near

T, N = 9, 5
MANY = "use 1 to the number of experts, 5"


def logits(seed=0):
    return 2 * torch.randn(T, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(row, k):
    """The k experts of the largest logits, and the probabilities of all."""
    exp = [math.exp(value) for value in row]
    return sorted(range(len(row)), key=lambda i: -row[i])[:k], [value / sum(exp) for value in exp]


def divided(gates, normalize):
    return [gate / sum(gates) for gate in gates] if normalize else gates


def top_k(row, k, normalize):
    experts, p = by_hand(row, k)
    return divided([p[i] for i in experts], normalize), experts


def sigmoid(row, k, normalize):
    experts, _ = by_hand(row, k)
    return divided([1 / (1 + math.exp(-row[i])) for i in experts], normalize), experts


def top_p(row, k, normalize):
    experts, p = by_hand(row, k)
    gates = [p[i] if sum(p[j] for j in experts[:place]) < 0.6 else 0.0 for place, i in enumerate(experts)]
    return divided(gates, normalize), experts


def threshold(row, k, normalize):
    experts, p = by_hand(row, k)
    return divided([p[i] if p[i] >= 0.25 or i == experts[0] else 0.0 for i in experts], normalize), experts


RULES = {
    "top_k": (top_k_gates, top_k),
    "sigmoid": (sigmoid_gates, sigmoid),
    "top_p": (lambda x, k, normalize: top_p_gates(x, k, normalize, 0.6), top_p),
    "threshold": (lambda x, k, normalize: threshold_gates(x, k, normalize, 0.25), threshold),
}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_gates_and_experts_are_those_of_a_plain_loop(rule, normalize):
    ours, reference = RULES[rule]
    for k in range(1, N + 1):
        # A second token whose logits are small: a threshold above 1/n keeps its best expert all the same.
        x = torch.cat([logits(k), 0.01 * logits(k + 10)]).requires_grad_()
        gates, experts = ours(x, k, normalize)
        wanted = [reference(row, k, normalize) for row in x.tolist()]
        assert experts.tolist() == [chosen for _, chosen in wanted]
        assert_near(gates, torch.tensor([own for own, _ in wanted], dtype=torch.float64))
        weights = torch.arange(1.0, gates.numel() + 1, dtype=torch.float64).view_as(gates)
        (gradient,) = torch.autograd.grad((gates * weights).sum(), x)
        kept = gates.detach() != 0
        p = (x.sigmoid() if rule == "sigmoid" else x.softmax(-1)).gather(1, experts) * kept
        again = (p / p.sum(1, keepdim=True) if normalize and k > 1 else p) * weights  # a single gate: straight-through
        assert_near(gradient, torch.autograd.grad(again.sum(), x)[0], scale=weights)  # differences of weighted gates


@pytest.mark.parametrize("ours", [top_k_gates, sigmoid_gates])
def test_gates_are_divided_by_their_sum_unless_told_otherwise(ours):
    gates, _ = ours(logits(), 2)
    assert_near(gates.sum(-1), torch.ones(T, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_a_single_gate_is_exactly_one_and_its_router_learns(rule, dtype):
    x = logits().to(dtype).requires_grad_()
    gates, experts = RULES[rule][0](x, 1, True)
    assert torch.equal(gates, torch.ones_like(gates)) and torch.equal(experts, x.argmax(-1, keepdim=True))
    (gradient,) = torch.autograd.grad(gates.sum(), x)
    score = x.sigmoid() if rule == "sigmoid" else x.softmax(-1)
    assert_near(gradient, torch.autograd.grad(score.gather(1, experts).sum(), x)[0])
    assert gradient.abs().sum() > 0.1


@pytest.mark.parametrize("edge", ["top_p", "threshold"])
def test_an_expert_exactly_at_the_limit(edge):
    x = torch.zeros(1, 4)  # probabilities of exactly a quarter
    rule, p, kept = {"top_p": (top_p_gates, 0.5, 2), "threshold": (threshold_gates, 0.25, 4)}[edge]
    assert rule(x, 4, False, p)[0].tolist() == [[0.25] * kept + [0.0] * (4 - kept)]


def test_switch_gates_and_capacity():
    x = logits()
    best = [by_hand(row, 1) for row in x.tolist()]
    for capacity in (None, 1, 2, T):
        gates, experts = switch_gates(x, capacity)
        used, wanted = [0] * N, []
        for (i,), p in best:
            used[i] += 1
            wanted.append([p[i] if capacity is None or used[i] <= capacity else 0.0])
        assert experts.tolist() == [chosen for chosen, _ in best]
        assert_near(gates, torch.tensor(wanted, dtype=torch.float64))


def test_steered_experts_of_rows_and_of_tokens():
    x = logits()
    rows = torch.tensor([4, 0, 2])
    for experts in (rows, rows.repeat_interleave(3)):
        gates, chosen = ForcedExperts(experts).route(x, 2, True)
        assert chosen.tolist() == [[4]] * 3 + [[0]] * 3 + [[2]] * 3 and torch.equal(gates, torch.ones_like(x[:, :1]))
    allowed = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    for normalize in (True, False):
        gates, chosen = AllowedExperts(allowed).route(x, 2, normalize)
        inside = x.clone()
        inside[~allowed.repeat_interleave(3, 0)] = -torch.inf
        wanted = [top_k(row, 2, normalize) for row in inside.tolist()]
        assert chosen.tolist() == [own for _, own in wanted]
        assert_near(gates, torch.tensor([own for own, _ in wanted], dtype=torch.float64))
    # Another rule is asked with the same settings.
    asked = []
    AllowedExperts(allowed).route(x, 2, False, lambda *given: asked.append(given) or ("gates", "experts"))
    assert torch.equal(asked[0][0], inside) and asked[0][1:] == (2, False)


def test_a_forced_gate_is_1_whatever_the_logits_and_its_gradient_is_0():
    x = torch.tensor([[torch.inf, 0.0], [torch.nan, 1.0], [-torch.inf, 2.0]], requires_grad=True)
    gates, _ = ForcedExperts(torch.tensor([0])).route(x, 1, True)
    assert gates.tolist() == [[1.0]] * 3
    assert torch.equal(torch.autograd.grad(gates.sum(), x)[0], torch.zeros(3, 2))


def test_no_row_may_be_steered_if_there_is_no_token():
    gates, experts = ForcedExperts(torch.zeros(0, dtype=torch.long)).route(torch.zeros(0, N), 1, True)
    assert gates.shape == experts.shape == (0, 1)


def test_steering_is_brought_to_the_logits_device():
    """The device "meta" has no values, but refuses to meet tensors of another device, as a GPU does."""
    x = logits().to("meta")
    for steering in (ForcedExperts(torch.tensor([0, 1, 2])), AllowedExperts(torch.ones(3, N).bool())):
        assert all(one.device.type == "meta" for one in steering.route(x, 1, True))


def test_padded_logits():
    x = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)
    least = torch.finfo(torch.bfloat16).min
    assert pad_logits(x, 4).tolist() == [[1.0, -2.0, least, least]] and pad_logits(x, 4).dtype == torch.bfloat16
    assert pad_logits(x, 3).softmax(-1)[0, 2] == 0
    assert pad_logits(x, 2) is x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (lambda k=k, rule=rule: rule(logits(), k), f"top_k={k!r}: {MANY}")
            for rule in (top_k_gates, sigmoid_gates)
            for k in (0, 6)
        ),
        (lambda: top_p_gates(logits(), 6, True, 0.5), f"top_k=6: {MANY}"),
        (lambda: threshold_gates(logits(), 0, True, 0.5), f"top_k=0: {MANY}"),
        (
            lambda: ForcedExperts(torch.zeros(2).long()).route(logits(), 1, True),
            "steered routing: 2 rows are steered, the batch has 9 tokens",
        ),
        (lambda: pad_logits(logits(), 4), "pad_logits: n=4: the logits have 5 experts"),
    ],
)  # fmt: skip
def test_what_is_refused_is_shown(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()
