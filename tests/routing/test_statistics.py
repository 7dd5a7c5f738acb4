"""Loads of experts: what is healthy, what is said of them, against the documented limits in plain Python."""

from __future__ import annotations

import random
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
    is_clear,
    load_doubt,
    load_health,
    load_verdicts,
    verdict_line,
)


def shares_of(counts):
    return [count / max(sum(counts), 1) for count in counts]


def variation_of(counts):
    return statistics.pstdev(counts) / statistics.fmean(counts) if any(counts) else 0.0


def chance_of(counts):
    return ((len(counts) - 1) / sum(counts)) ** 0.5 if any(counts) else 0.0


def verdict_by_hand(layer, counts):
    n, shares, variation, chance = len(counts), shares_of(counts), variation_of(counts), chance_of(counts)
    if not variation > 3 * chance:
        even = sum(counts) / n
        below = [share for share, count in zip(shares, counts, strict=True) if even - count > 4 * even**0.5]
        dead = sum(share < min(0.01, 0.25 / n) for share in below)
        if dead:
            return [f"layer {layer}: collapsed: {dead} of {n} experts get less than {min(1, 25 / n):.3g} % of the "
                    "assignments"]  # fmt: skip
        if below and min(below) < min(0.02, 0.5 / n):
            return [f"layer {layer}: uneven: expert {shares.index(min(below))} gets {min(below) * 100:.3g} % of the "
                    "assignments"]  # fmt: skip
        return []
    best = sorted(range(n), key=lambda i: -shares[i])[:2]
    dead = sum(share < min(0.01, 0.25 / n) for share in shares)
    facts, collapsed = [], dead > 0
    if shares[best[0]] > max(0.5, 2 / n):
        collapsed = True
        facts.append(f"expert {best[0]} gets {shares[best[0]] * 100:.3g} % of the assignments")
    elif sum(shares[i] for i in best) > max(0.5, 3 / n):
        collapsed, (one, two) = True, sorted(best)
        facts.append(f"experts {one} and {two} get {sum(shares[i] for i in best) * 100:.3g} % of the assignments")
    if dead:
        facts.append(f"{dead} of {n} experts get less than {min(1, 25 / n):.3g} % of the assignments")
    elif min(shares) < min(0.02, 0.5 / n):
        facts.append(f"expert {shares.index(min(shares))} gets {min(shares) * 100:.3g} % of the assignments")
    if variation > 0.3:
        facts.append(f"coefficient of variation {variation:.2f}, healthy below 0.3, by chance {chance:.2f}")
    return [f"layer {layer}: {'collapsed' if collapsed else 'uneven'}: {'; '.join(facts)}"] if facts else []


# Loads at and next to each limit, and then loads at random.
LOADS = [
    [1000, 1000, 1000, 1000], [5000, 1000, 2000, 2000], [5010, 1000, 1990, 2000], [5000, 5010, 0, 0],
    [900, 8000, 1000, 100], [900, 8000, 1000, 99], [900, 8000, 1000, 201], [900, 8000, 900, 200],
    [7400, 2600], [7600, 2400], [9900, 100],
    [10100, 9900], [7510, 7490, 2500, 2500], [7490, 7500, 2500, 2510], [10**6, 0], [7], [10**4], [0, 0, 0], [4, 0, 0],
    [129, 71], [1299, 701], [1000] * 40, [*[1000] * 39, 240], [*[1000] * 39, 260], [*[1000] * 39, 510],
    [*[1000] * 39, 490], [*[1000] * 29, 9], [*[1000] * 29, 200],
    [12000, 13000, *[1000] * 23], [13010, 12000, *[1000] * 23],
    [25010, 1010, *[1000] * 24], [24990, 1010, *[1000] * 24],
    [1299, 701, 1299, 701], [1290, 710, 1290, 710], [90, 10], [10, 0],
    # One of many experts is unused, or nearly so, in a layer whose variation could be chance.
    [*[133] * 15, 0], [*[258] * 31, 0], [*[555] * 63, 0], [*[945] * 127, 0], [*[196] * 15, 57], [*[133] * 15, 61],
    [*[17] * 40, 0], [*[16] * 40, 0], [*[66] * 40, 31], [*[66] * 40, 32], [*[64] * 40, 31], [*[30] * 38, 0, 0],
]  # fmt: skip
_draw = random.Random(0)
for _ in range(150):
    _n = _draw.choice([2, 3, 4, 5, 8, 40])
    LOADS.append(
        [int(10 ** _draw.uniform(0, 4)) if _draw.random() < 0.5 else 2000 + _draw.randrange(900) for _ in range(_n)]
    )


def padded(loads):
    widest = max(map(len, loads))
    counts = torch.tensor([[*load, *[5] * (widest - len(load))] for load in loads], dtype=torch.float64)
    return counts, [len(load) for load in loads]


def test_verdicts_are_the_documented_limits():
    wanted = [line for layer, load in enumerate(LOADS) for line in verdict_by_hand(layer, load)]
    for load in LOADS:  # one by one, as a whole list's difference is hard to read
        assert load_verdicts(torch.tensor([load]).double(), [len(load)]) == verdict_by_hand(0, load), load
    counts, sizes = padded(LOADS)
    for row, size in enumerate(sizes):
        counts[row, size:] = 0
    assert load_verdicts(counts, sizes) == wanted
    said = " ".join(wanted)
    assert all(
        word in said for word in ("collapsed: expert ", "collapsed: experts ", "uneven: expert ", "less than 0.625")
    )


@pytest.mark.parametrize(("n", "assignments"), [(16, 2000), (32, 8000), (64, 35_000), (128, 120_000)])
def test_an_unused_expert_of_many_is_named_and_chance_is_not(n, assignments):
    """The variation of such a layer, √(1/(n - 1)), is less than three times what chance gives."""
    counts = torch.full((1, n), assignments / (n - 1), dtype=torch.float64)
    counts[0, 3] = 0
    assert load_doubt(counts, [n]) == ""
    assert load_verdicts(counts, [n])[0].startswith(f"layer 0: collapsed: 1 of {n} experts get less than")
    draws = torch.multinomial(torch.ones(200, n), assignments, replacement=True, generator=torch.manual_seed(n))
    even = torch.stack([row.bincount(minlength=n) for row in draws]).double()
    assert load_verdicts(even, [n] * 200) == []


def test_health_is_over_all_layers():
    loads = [[5, 3, 2], [1, 1], [30, 1, 0, 69], [0, 0, 0]]
    counts, sizes = padded(loads)
    for row, size in enumerate(sizes):
        counts[row, size:] = 0
    health = load_health(counts, sizes)
    assert health.coefficient_of_variation == pytest.approx(statistics.fmean(map(variation_of, loads)), rel=1e-12)
    assert (health.smallest, health.largest, health.dead) == (0.0, 0.69, 1)
    assert health.by_chance == pytest.approx(statistics.fmean(map(chance_of, loads)), rel=1e-12)
    assert load_health(torch.tensor([[1.0, 0.0]]), [2]).largest == 1
    used = load_health(counts[:2], sizes[:2])
    assert (used.smallest, used.largest, used.dead) == (0.2, 0.5, 0)


def test_doubt_names_the_layer_with_the_fewest_assignments_and_then_idle_ones():
    enough, few = [[5000.0, 5000.0, 0.0], [3000.0, 4000.0, 3000.0]], [[50.0, 50.0, 0.0], [10.0, 7.0, 3.0]]
    assert load_doubt(torch.tensor(enough), [2, 3]) == ""
    assert load_doubt(torch.tensor([*enough, *few]), [2, 3, 2, 3]) == (
        "layer 3 has 20 assignments to 3 experts, too few to judge its load: by chance alone the coefficient of "
        "variation is 0.32; use more data"
    )
    assert load_doubt(torch.tensor([enough[0], [0.0] * 3, [0.0] * 3]), [2, 3, 2]) == (
        "layer 1 has no assignments to its 3 experts, so there is no load; use more data"
    )
    assert load_doubt(torch.tensor([*few, *enough]), [2, 3, 2, 3]).startswith("layer 1 has 20 assignments to 3")
    # The limit itself: (n - 1)/A = 0.01, so that 0.3 is three times what chance gives.
    assert "100 assignments to 2 experts" in load_doubt(torch.tensor([[50.0, 50.0]]), [2])
    assert load_doubt(torch.tensor([[51.0, 50.0]]), [2]) == ""
    assert not is_clear(3.0, 1.0) and is_clear(3.01, 1.0)


def test_many_verdicts_on_one_line():
    assert verdict_line([]) == ""
    assert verdict_line(["a", "b", "c"]) == f"a. b. c. Try this: {REMEDY}"
    assert verdict_line(["a", "b", "c", "d", "e"]) == f"a. b. c. 2 more layers like that. Try this: {REMEDY}"
    assert verdict_line(["a", "b"], most=1) == f"a. 1 more layers like that. Try this: {REMEDY}"


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
    ("n", "k", "busy", "told"),
    [
        (8, 4, [999, 1000], "collapsed: experts 1 and 6 serve 99.9 % of the tokens or more"),
        (8, 4, [910, 1000], "collapsed: experts 1 and 6 serve 91 % of the tokens or more"),
        (8, 4, [900, 1000], "uneven: "),
        (10, 6, [980, 1000], "collapsed: experts 1 and 6 serve 98 % of the tokens or more"),
        (32, 8, [950, 1000], "collapsed: experts 1 and 6 serve 95 % of the tokens or more"),
        (8, 5, [1000, 1000], "uneven: "),  # even ones serve more than six of ten
        (8, 2, [990, 980], "collapsed: experts 1 and 6 get 98.5 % of the assignments"),
    ],
)
def test_two_experts_that_serve_all_tokens_are_told_for_every_top_k(n, k, busy, told):
    rest = (1000 * k - sum(busy)) / (n - 2)
    counts = torch.full((1, n), rest, dtype=torch.float64)
    counts[0, 1], counts[0, 6] = busy
    assert told in load_verdicts(counts, [n], tokens=1000.0)[0]
    assert ("serve" in told) == (load_verdicts(counts, [n]) != load_verdicts(counts, [n], tokens=1000.0))


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
    torch.testing.assert_close(effective_experts(gates), torch.tensor([4.0, 1.0, 16 / 10, 0.0]))
    torch.testing.assert_close(effective_experts(gates.bfloat16() * 1e-30), effective_experts(gates))
