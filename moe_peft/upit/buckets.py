"""
Rules that give seed examples to experts: UpIT's expert-specific data selection (Algorithm 3) and its alternatives.

A bucket is the list of an expert's example indices. S seed examples, n experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from ..routing.expert_map import label_text, read_expert_map
from ..training.data import check_label_column, drawn
from ..utils.validation import COUNT, EXPERTS, SEED, Rule, check, choice_error, is_a, whole

Buckets = list[list[int]]


@dataclass(frozen=True)
class Seeds:
    """
    What a rule may use.

    Args:
        count: S.
        num_experts: n.
        seed: of everything random.
        capacity: the most examples a bucket takes; None leaves that to the rule.
        perplexity_SN: every expert's perplexity on every example, for rules that need it.
        labels: one per example, for rules that need them.
        expert_map: label → experts, if the user gave it.
    """

    count: int
    num_experts: int
    seed: int
    capacity: int | None = None
    perplexity_SN: torch.Tensor | None = None
    labels: Sequence[Any] | None = None
    expert_map: Mapping[Any, Sequence[int]] | None = None


@dataclass(frozen=True)
class BucketRule:
    """
    A way to fill buckets.

    Args:
        fill: seeds → n buckets.
        needs_perplexities: `fill` reads `perplexity_SN`: all experts are scored on all examples first.
        needs_labels: `fill` reads `labels`: the data need a column of them.
    """

    fill: Callable[[Seeds], Buckets]
    needs_perplexities: bool = False
    needs_labels: bool = False


_PERPLEXITIES = Rule(
    lambda v: isinstance(v, torch.Tensor) and v.dim() == 2 and v.shape[1] > 0 and not (v <= 0).any(),
    "give a tensor [examples, experts] of positive numbers",
)


def draw_seeds(dataset: Dataset, count: int, seed: int) -> Dataset:
    """
    The seed set: `count` of the examples, in random order. Rules with a capacity visit them in this order, so that it
    must not follow that of the file, which may be sorted by domain.
    """
    check("draw_seeds", dataset=(dataset, is_a(Dataset)), count=(count, COUNT), seed=(seed, SEED))
    return drawn(dataset, count, seed)


def perplexity_buckets(perplexity_SN: torch.Tensor, capacity: int | None = None) -> Buckets:
    """
    Algorithm 3: each example in turn goes to the expert of lowest perplexity whose bucket has room.

    Args:
        perplexity_SN: perplexity of every expert on every example, [S, n].
        capacity: C, the most examples a bucket takes; `ceil(S / n)` if None, so that every example finds one.

    Returns:
        n buckets. Between equal perplexities the earlier expert wins, and an infinite one comes last. An example that
        finds no room is left out.

    Raises:
        ValueError: a perplexity is not a number, or the capacity not positive.
    """
    check("perplexity_buckets", perplexity_SN=(perplexity_SN, _PERPLEXITIES), capacity=(capacity, COUNT.or_none()))
    examples, n = perplexity_SN.shape
    capacity = -(-examples // n) if capacity is None else capacity
    _refuse(perplexity_SN, perplexity_SN.isnan(), "perplexity_buckets")
    buckets: Buckets = [[] for _ in range(n)]
    for example, ranking in enumerate(perplexity_SN.argsort(dim=1, stable=True).tolist()):
        expert = next((i for i in ranking if len(buckets[i]) < capacity), None)
        if expert is not None:
            buckets[expert].append(example)
    return buckets


def _refuse(perplexity_SN: torch.Tensor, bad_SN: torch.Tensor, caller: str) -> None:
    if bad_SN.any():
        found = [f"{i} ({perplexity_SN[i][bad_SN[i]][0]:g})" for i in bad_SN.any(1).nonzero().flatten().tolist()]
        raise ValueError(
            f"{caller}: no perplexity for examples {', '.join(found[:5])}: they have no token to score, or their loss "
            "is not finite; leave them out, or raise max_length"
        )


def relative_perplexity(perplexity_SN: torch.Tensor) -> torch.Tensor:
    """
    Perplexities divided by each expert's geometric mean over the examples, [S, n]. They show on which examples an
    expert is *unusually* good, even where later checkpoints are better on all of them.

    Raises:
        ValueError: a perplexity is infinite or not a number, so that there is no mean.
    """
    check("relative_perplexity", perplexity_SN=(perplexity_SN, _PERPLEXITIES))
    _refuse(perplexity_SN, ~perplexity_SN.isfinite(), "relative_perplexity")
    return perplexity_SN / perplexity_SN.log().mean(dim=0, keepdim=True).exp()


def random_buckets(examples: int, num_experts: int, seed: int) -> Buckets:
    """Examples dealt out at random, at most `ceil(S / n)` to a bucket."""
    counts = {"examples": (examples, whole(0)), "num_experts": (num_experts, EXPERTS), "seed": (seed, SEED)}
    check("random_buckets", **counts)
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed)).tolist()
    return [sorted(order[i::num_experts]) for i in range(num_experts)]


def label_buckets(
    labels: Sequence[Any], num_experts: int, expert_map: Mapping[Any, Sequence[int]] | None = None
) -> Buckets:
    """
    Examples by their label: each goes to the emptiest of its label's experts.

    Args:
        labels: one per example, [S]; compared as text, because YAML and data sets may give them different types.
        num_experts: n.
        expert_map: label → experts, see `read_expert_map`. If None, the sorted labels take experts in turn (label j
            those with i ≡ j modulo the number of labels).

    Raises:
        ValueError: the map lacks a label or has no valid form, or there are more labels than experts.
    """
    one_each = Rule(lambda v: isinstance(v, Iterable) and not isinstance(v, str), "give a list with one per example")
    check("label_buckets", labels=(labels, one_each), num_experts=(num_experts, EXPERTS))
    labels = [label_text(label) for label in labels]
    if expert_map is None:
        names = sorted(set(labels))
        if len(names) > num_experts:
            raise ValueError(f"label_buckets: {len(names)} labels for {num_experts} experts; give an expert_map")
        known = {name: list(range(j, num_experts, len(names))) for j, name in enumerate(names)}
    else:
        known = read_expert_map(expert_map, num_experts, "expert_map")
    buckets: Buckets = [[] for _ in range(num_experts)]
    for example, label in enumerate(labels):
        if label not in known:
            raise ValueError(f"expert_map: no experts for the label {label!r} of example {example}; add it")
        buckets[min(known[label], key=lambda i: (len(buckets[i]), i))].append(example)
    return buckets


def _by_perplexity(seeds: Seeds) -> Buckets:
    assert seeds.perplexity_SN is not None
    return perplexity_buckets(seeds.perplexity_SN, seeds.capacity)


def _by_relative_perplexity(seeds: Seeds) -> Buckets:
    assert seeds.perplexity_SN is not None
    return perplexity_buckets(relative_perplexity(seeds.perplexity_SN), seeds.capacity)


def _by_label(seeds: Seeds) -> Buckets:
    assert seeds.labels is not None
    return label_buckets(seeds.labels, seeds.num_experts, seeds.expert_map)


def _at_random(seeds: Seeds) -> Buckets:
    return random_buckets(seeds.count, seeds.num_experts, seeds.seed)


BUCKETS: dict[str, BucketRule] = {
    "perplexity": BucketRule(_by_perplexity, needs_perplexities=True),
    "relative": BucketRule(_by_relative_perplexity, needs_perplexities=True),
    "label": BucketRule(_by_label, needs_labels=True),
    "random": BucketRule(_at_random),
}


def fill_buckets(
    seeds: Dataset,
    num_experts: int,
    rule: str,
    perplexities: Callable[[], torch.Tensor],
    *,
    seed: int,
    capacity: int | None = None,
    label_column: str | None = None,
    expert_map: Mapping[Any, Sequence[int]] | None = None,
) -> tuple[Buckets, torch.Tensor | None]:
    """
    The seed examples in buckets.

    Args:
        seeds: tokenized, as they are trained on.
        rule: a name in `BUCKETS`.
        perplexities: finds the experts' [S, n]; called only if the rule needs them.

    Returns:
        the buckets, and the perplexities if the rule needed them.

    Raises:
        ValueError: the rule is unknown, needs labels that the data lack, or cannot place an example.
    """
    if rule not in BUCKETS:
        raise ValueError(f"{choice_error('buckets', rule, BUCKETS)}, or leave this stage out")
    needs = BUCKETS[rule]
    if needs.needs_labels and (label_column is None or label_column not in seeds.column_names):
        raise ValueError(f"label_column={label_column!r}: buckets={rule!r} needs a column of labels in the data")
    check_label_column(label_column if needs.needs_labels else None, "")
    perplexity_SN = perplexities() if needs.needs_perplexities else None
    labels = seeds[label_column] if needs.needs_labels else None
    found = Seeds(len(seeds), num_experts, seed, capacity, perplexity_SN, labels, expert_map)
    return needs.fill(found), perplexity_SN


def expert_batches(bucket: Sequence[int], epochs: int, rows: int, seed: int) -> list[list[int]]:
    """
    The batches of one expert's own training, in order: in every epoch its bucket is shuffled and cut into batches of
    `rows` examples; an epoch's last batch may be smaller.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(epochs):
        shuffled = [bucket[i] for i in torch.randperm(len(bucket), generator=generator).tolist()]
        batches += [shuffled[start : start + rows] for start in range(0, len(shuffled), rows)]
    return batches
