"""
Seed examples to experts: UpIT's expert-specific data selection (Algorithm 3) and what it is compared with.

A bucket is the list of an expert's example indices. S seed examples, n experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from datasets import Dataset

BucketKind = Literal["perplexity", "relative", "label", "random", "none"]
Buckets = list[list[int]]


def perplexity_buckets(perplexity_SN: torch.Tensor, capacity: int | None = None) -> Buckets:
    """
    Algorithm 3: example after example goes to the expert of lowest perplexity whose bucket has room.

    Args:
        perplexity_SN: perplexity of every expert on every example, [S, n].
        capacity: C, the most examples a bucket takes; `ceil(S / n)` if None, so that every example finds one.

    Returns:
        n buckets. Of equal perplexities the earlier expert comes first. An example that finds no room is left out.

    Raises:
        ValueError: a perplexity is not a number, or the capacity not positive.
    """
    examples, n = perplexity_SN.shape
    capacity = -(-examples // n) if capacity is None else capacity
    if capacity < 1 and examples:
        raise ValueError(f"perplexity_buckets: capacity={capacity}: must be at least 1")
    if perplexity_SN.isnan().any():
        bad = perplexity_SN.isnan().any(1).nonzero().flatten().tolist()
        raise ValueError(f"perplexity_buckets: no perplexity for examples {bad[:5]}; they have no token to score")
    buckets: Buckets = [[] for _ in range(n)]
    for example, ranking in enumerate(perplexity_SN.argsort(dim=1, stable=True).tolist()):
        expert = next((i for i in ranking if len(buckets[i]) < capacity), None)
        if expert is not None:
            buckets[expert].append(example)
    return buckets


def relative_perplexity(perplexity_SN: torch.Tensor) -> torch.Tensor:
    """
    Perplexities divided by each expert's geometric mean over the examples, [S, n]: which examples an expert is
    *unusually* good at. Where later checkpoints are better throughout, the plain perplexity only tells the latest.
    """
    return perplexity_SN / perplexity_SN.log().mean(dim=0, keepdim=True).exp()


def random_buckets(examples: int, num_experts: int, seed: int) -> Buckets:
    """Examples dealt out at random, `ceil(S / n)` to a bucket at most."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed)).tolist()
    return [sorted(order[i::num_experts]) for i in range(num_experts)]


def label_buckets(
    labels: Sequence[Any], num_experts: int, expert_map: Mapping[Any, Sequence[int]] | None = None
) -> Buckets:
    """
    Examples by their label: each goes to the emptiest of its label's experts.

    Args:
        labels: one per example, [S]; compared as text, as YAML and data sets may differ in types.
        num_experts: n.
        expert_map: label → experts. If None, the labels in sorted order take experts in turn, i ≡ j (mod labels).

    Raises:
        ValueError: a label that the map lacks, an expert out of range, or more labels than experts.
    """
    labels = [str(label) for label in labels]
    if expert_map is None:
        names = sorted(set(labels))
        if len(names) > num_experts:
            raise ValueError(f"label_buckets: {len(names)} labels for {num_experts} experts; give an expert_map")
        expert_map = {name: range(j, num_experts, len(names)) for j, name in enumerate(names)}
    expert_map = {str(label): experts for label, experts in expert_map.items()}
    for label, experts in expert_map.items():
        if not experts or not all(0 <= i < num_experts for i in experts):
            raise ValueError(f"expert_map: {label!r}: {list(experts)}: name experts from 0 to {num_experts - 1}")
    buckets: Buckets = [[] for _ in range(num_experts)]
    for example, label in enumerate(labels):
        if label not in expert_map:
            raise ValueError(f"expert_map: no experts for the label {label!r} of example {example}; add it")
        buckets[min(expert_map[label], key=lambda i: (len(buckets[i]), i))].append(example)
    return buckets


def fill_buckets(
    seeds: Dataset,
    num_experts: int,
    kind: BucketKind,
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
        perplexities: finds the experts' [S, n]; called only where they decide.

    Returns:
        the buckets, and the perplexities where they decided.
    """
    if kind in ("perplexity", "relative"):
        perplexity_SN = perplexities()
        ranked_SN = relative_perplexity(perplexity_SN) if kind == "relative" else perplexity_SN
        return perplexity_buckets(ranked_SN, capacity), perplexity_SN
    if kind == "label":
        if label_column is None or label_column not in seeds.column_names:
            raise ValueError(f"label_column={label_column!r}: buckets='label' needs a column of the data")
        return label_buckets(seeds[label_column], num_experts, expert_map), None
    if kind == "random":
        return random_buckets(len(seeds), num_experts, seed), None
    raise ValueError(f"buckets={kind!r}: use 'perplexity', 'relative', 'label' or 'random', or leave this stage out")


def bucket_schedule(buckets: Buckets, epochs: int, seed: int) -> list[tuple[int, int]]:
    """
    The (example, expert) pairs of a training over all buckets, in order: in every epoch each bucket is shuffled, then
    the buckets take turns, so that any stretch of the schedule serves the experts alike.
    """
    generator = torch.Generator().manual_seed(seed)
    schedule: list[tuple[int, int]] = []
    for _ in range(epochs):
        shuffled = [[b[i] for i in torch.randperm(len(b), generator=generator).tolist()] for b in buckets]
        for turn in range(max(map(len, shuffled), default=0)):
            schedule += [(bucket[turn], expert) for expert, bucket in enumerate(shuffled) if turn < len(bucket)]
    return schedule
