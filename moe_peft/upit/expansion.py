"""
UpIT's Algorithm 2 as pure functions: the similarity of experts, the DARE merge of two, expansion to more experts.

An expert is a mapping of names to tensors, with the same names in every expert. LoRA experts have PEFT's names:
`lora_A` [r, in] and `lora_B` [out, r] of each module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from ..utils.messages import InputError

ExpertTensors = Mapping[str, torch.Tensor]
Merge = Callable[[ExpertTensors, ExpertTensors, float, float, torch.Generator], ExpertTensors]
Similarity = Literal["update", "values"]
Expansion = Literal["genetic", "random", "none"]


@dataclass(frozen=True)
class Descent:
    """Origin of an expert made by expansion."""

    expert: int
    parents: tuple[int, int]
    alpha: float  # weight of the first parent; the second has 1 - alpha
    drop_rate: float
    similarity: float | None  # of the parents; None if the pair was random


def values_inner(a: ExpertTensors, b: ExpertTensors) -> float:
    """Return the inner product of the flattened parameters, in float64."""
    return sum(float(torch.dot(a[name].flatten().double(), b[name].flatten().double())) for name in sorted(a))


def update_inner(a: ExpertTensors, b: ExpertTensors, scaling: Mapping[str, float] | None = None) -> float:
    """
    Return the inner product of the LoRA updates s B A over all modules, in float64.

    Σ s² ⟨B_a A_a, B_b A_b⟩ = Σ s² sum((B_aᵀ B_b) ∘ (A_a A_bᵀ)) needs only r×r matrices, none of out×in.

    Args:
        scaling: each module's s by the name of its A; None: s is the same in all modules and counts as 1.
    """
    total = 0.0
    for name in sorted(name for name in a if ".lora_A." in name):
        name_B = name.replace(".lora_A.", ".lora_B.")
        left_RR = a[name_B].double().T @ b[name_B].double()
        right_RR = a[name].double() @ b[name].double().T
        total += float((left_RR * right_RR).sum()) * (1 if scaling is None else scaling[name] ** 2)
    return total


def dare_tensor(
    a: torch.Tensor, b: torch.Tensor, alpha: float, drop_rate: float, generator: torch.Generator
) -> torch.Tensor:
    """Apply `dare_merge` to one tensor."""
    parts = []
    for weight, tensor in ((alpha, a), (1 - alpha, b)):
        kept = torch.rand(tensor.shape, generator=generator) >= drop_rate
        parts.append(tensor.float() * kept * (weight / (1 - drop_rate)))
    merged = (parts[0] + parts[1]).to(a.dtype)
    if not merged.isfinite().all():
        raise InputError(
            f"drop_rate={drop_rate}: values divided by {1 - drop_rate:g} are not finite in {a.dtype}, or a parent's "
            "are not; use a lower drop_rate, or repair the parent"
        )
    return merged


def dare_merge(
    a: ExpertTensors, b: ExpertTensors, alpha: float, drop_rate: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """
    Merge two experts by DARE: `DARE(α a, (1-α) b)`. Drop each entry of each parent with probability `drop_rate`, divide
    the rest by `1 - drop_rate`, and add both parents (Yu et al., 2024, as in UpIT's Algorithm 2).

    Args:
        a: an expert.
        b: an expert with the same names and shapes.
        alpha: the weight of `a`, in [0, 1].
        drop_rate: p, in [0, 1).
        generator: a CPU generator; the only source of randomness.

    Returns:
        the new expert, in the dtypes of `a`.
    """
    return {name: dare_tensor(a[name], b[name], alpha, drop_rate, generator) for name in sorted(a)}


def expand(
    experts: Sequence[ExpertTensors],
    num_experts: int,
    *,
    method: Expansion = "genetic",
    similarity: Similarity = "update",
    drop_rate: float = 0.2,
    seed: int = 0,
    scaling: Mapping[str, float] | None = None,
    merge: Merge = dare_merge,
) -> tuple[list[ExpertTensors], list[Descent]]:
    """
    Make more experts from the given ones (UpIT, Algorithm 2). Merge the least similar pair of all experts so far by
    DARE with a random weight, until there are `num_experts`.

    Each step computes similarities for the newest expert only.

    Args:
        experts: m ≥ 2 experts (m ≥ 1 if no more are needed).
        num_experts: n ≥ m.
        method: `"genetic"`: the least similar pair. `"random"`: a random pair. `"none"`: no expansion; raises an error
            if it is needed.
        similarity: the cosine of `"update"` B A, or of the parameters' `"values"`.
        drop_rate: DARE's p.
        seed: the same seed gives the same experts, bit for bit.
        scaling: the factor of each module's update by the name of its A, for `"update"`; None: all factors are equal.
        merge: makes a new expert from two; replace it for experts that are not in memory.

    Returns:
        all n experts, the given ones first, and the descent of each new expert.
    """
    _check(experts, num_experts, method)
    family, descents = list(experts), list[Descent]()
    generator = torch.Generator().manual_seed(seed)
    inner = partial(update_inner, scaling=scaling) if similarity == "update" else values_inner
    gram: list[list[float]] = []
    while len(family) < num_experts:
        if method == "random":
            j, k = sorted(torch.randperm(len(family), generator=generator)[:2].tolist())
            cosine = None
        else:
            for i in range(len(gram), len(family)):
                gram.append([inner(family[i], family[j]) for j in range(i + 1)])
            cosine, j, k = min((_cosine(gram, j, k), j, k) for k in range(len(family)) for j in range(k))
        alpha = float(torch.rand((), generator=generator))
        family.append(merge(family[j], family[k], alpha, drop_rate, generator))
        descents.append(Descent(len(family) - 1, (j, k), alpha, drop_rate, cosine))
    return family, descents


def _cosine(gram: list[list[float]], j: int, k: int) -> float:
    norms = (gram[j][j] * gram[k][k]) ** 0.5
    return gram[k][j] / norms if norms else 0.0  # a zero expert is similar to none


def _check(experts: Sequence[ExpertTensors], num_experts: int, method: Expansion) -> None:
    """Raise a ValueError if the experts cannot be expanded to `num_experts`, or hold NaN or infinity."""
    m = len(experts)
    if not 1 <= m <= num_experts:
        raise InputError(f"num_experts={num_experts}: {m} experts are given; ask for that many or more")
    if num_experts > m and (method == "none" or m < 2):
        why = "method='none' makes none" if method == "none" else "expansion needs two parents"
        raise InputError(f"num_experts={num_experts}: {m} experts are given and {why}; give more experts")
    for i, expert in enumerate(experts):
        if _layout(expert) != _layout(experts[0]):
            raise InputError(f"experts[{i}] differs from experts[0] in names, shapes or dtypes; adapt the same modules")
        for name, tensor in expert.items():
            if not tensor.isfinite().all():
                raise InputError(f"experts[{i}]: {name} holds NaN or infinity; train or save it again")


def _layout(expert: ExpertTensors) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in expert.items()}
