"""
Assignment of seed examples to experts: UpIT's expert-specific data selection (Algorithm 3) and its alternatives.

A bucket is the list of an expert's example indices. There are S seed examples and n experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..routing.expert_map import label_text, read_expert_map
from ..utils.messages import InputError

Buckets = list[list[int]]


@dataclass(frozen=True)
class Seeds:
    """
    Inputs of a rule.

    Args:
        count: S.
        num_experts: n.
        seed: seed of all random choices.
        perplexity_SN: every expert's perplexity on every example, for rules that need it.
        labels: one per example, for rules that need them.
        expert_map: label → experts, if the user gave it.
    """

    count: int
    num_experts: int
    seed: int
    perplexity_SN: Any = None
    labels: Any = None
    expert_map: Mapping[Any, Sequence[int]] | None = None


@dataclass(frozen=True)
class BucketRule:
    """
    A rule to fill buckets.

    Args:
        fill: seeds → n buckets.
        needs_perplexities: `fill` reads `perplexity_SN`: all experts are scored on all examples first.
        needs_labels: `fill` reads `labels`: the data need a label column.
    """

    fill: Callable[[Seeds], Buckets]
    needs_perplexities: bool = False
    needs_labels: bool = False


def perplexity_buckets(perplexity_SN: torch.Tensor) -> Buckets:
    """
    Fill buckets by Algorithm 3. Each example in turn goes to the expert of lowest perplexity with room in its bucket. A
    bucket has room for `ceil(S / n)` examples, so every example finds one.

    Args:
        perplexity_SN: perplexity of every expert on every example, [S, n].

    Returns:
        n buckets. Among equal perplexities the earlier expert wins. An infinite perplexity comes last.
    """
    examples, n = perplexity_SN.shape
    capacity = -(-examples // n)
    unscored = perplexity_SN.isnan().any(1).nonzero().flatten().tolist()
    if unscored:
        raise InputError(
            f"perplexity_buckets: no perplexity for examples {', '.join(map(str, unscored[:5]))}: they have no token "
            "to score, or their loss is not finite; leave them out, or raise max_length"
        )
    buckets: Buckets = [[] for _ in range(n)]
    for example, ranking in enumerate(perplexity_SN.argsort(dim=1, stable=True).tolist()):
        buckets[next(i for i in ranking if len(buckets[i]) < capacity)].append(example)
    return buckets


def random_buckets(examples: int, num_experts: int, seed: int) -> Buckets:
    """Deal examples out at random, at most `ceil(S / n)` to a bucket."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed)).tolist()
    return [sorted(order[i::num_experts]) for i in range(num_experts)]


def label_buckets(
    labels: Sequence[Any], num_experts: int, expert_map: Mapping[Any, Sequence[int]] | None = None
) -> Buckets:
    """
    Assign examples by label: each goes to the emptiest bucket of its label's experts.

    Args:
        labels: one per example, [S]; compared as text, because YAML and datasets may give them different types.
        num_experts: n.
        expert_map: label → experts, see `read_expert_map`. If None, the sorted labels take experts in turn: label j
            takes the experts i ≡ j modulo the number of labels.
    """
    labels = [label_text(label) for label in labels]
    if expert_map is None:
        names = sorted(set(labels))
        if len(names) > num_experts:
            raise InputError(f"label_buckets: {len(names)} labels for {num_experts} experts; give an expert_map")
        experts = {name: list(range(j, num_experts, len(names))) for j, name in enumerate(names)}
    else:
        experts = read_expert_map(expert_map, num_experts, "expert_map")
    buckets: Buckets = [[] for _ in range(num_experts)]
    for example, label in enumerate(labels):
        if label not in experts:
            raise InputError(f"expert_map: no experts for the label {label!r} of example {example}; add it")
        buckets[min(experts[label], key=lambda i: (len(buckets[i]), i))].append(example)
    return buckets


BUCKETS: dict[str, BucketRule] = {
    "perplexity": BucketRule(lambda seeds: perplexity_buckets(seeds.perplexity_SN), needs_perplexities=True),
    "label": BucketRule(
        lambda seeds: label_buckets(seeds.labels, seeds.num_experts, seeds.expert_map), needs_labels=True
    ),
    "random": BucketRule(lambda seeds: random_buckets(seeds.count, seeds.num_experts, seeds.seed)),
}
