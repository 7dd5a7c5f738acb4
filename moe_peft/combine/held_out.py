"""What a mixture gives on held-out rows, beside its base, each expert alone, the experts' mean and uniform gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers.utils.logging import tqdm

from ..analysis.recorder import RoutingStatistics
from ..models.gates import uniform_gates
from ..models.introspection import observed_routing
from ..models.layer import AdapterLayer, routed_layers
from ..models.steering import common_size, force_experts
from ..training.scoring import Collator, example_losses, mean_loss

Losses = dict[str, float]


@dataclass(frozen=True)
class Parts:
    """Tokenized held-out rows by the label of the expert that they are for, in the experts' order."""

    rows: Mapping[str, Dataset]
    collator: Collator
    batch_size: int


@dataclass(frozen=True)
class HeldOut:
    """
    What a mixture gives.

    Args:
        losses: way to route → label → mean loss per scored token, and `"mean"` over labels.
        reached: label → the share of its tokens whose first choice is each expert [n], mean over layers.
    """

    losses: dict[str, Losses]
    reached: dict[str, list[float]]


def score(model: Any, parts: Parts, statistics: RoutingStatistics | None = None) -> Losses:
    """The loss on the rows of each label, which is the domain of `statistics` meanwhile."""
    losses = {}
    for label, rows in parts.rows.items():
        if statistics is not None:
            statistics.current = label
        scored = example_losses(model, rows, parts.collator, rows=parts.batch_size)
        losses[label] = mean_loss(*scored, f"held-out rows of {label!r}")
    return {**losses, "mean": sum(losses.values()) / len(losses)}


def score_mixture(model: Any, parts: Parts, gates: str) -> HeldOut:
    """
    Args:
        model: with a MoE-LoRA adapter, or a native MoE.
        gates: what its gates are called.
    """
    names, n, layers = list(parts.rows), common_size(model, "mix"), routed_layers(model)
    adapters = [layer for layer in layers if isinstance(layer, AdapterLayer)]
    ways: dict[str, AbstractContextManager] = {}
    if adapters:
        names = names if len(names) == n else [f"expert {i}" for i in range(n)]
        ways["base"] = model.disable_adapter()
        ways |= {name: force_experts(model, torch.tensor([i])) for i, name in enumerate(names)}
        ways["mean of the adapters"] = uniform_gates(model, "projection")
    if not adapters or any(layer.experts.mixing == "output" for layer in adapters):
        ways["uniform gates"] = uniform_gates(model)  # which with mixing "projection" are the mean
    losses = {}
    for way, context in tqdm(ways.items(), desc="ways to route"):
        with context:
            losses[way] = score(model, parts)
    with first_choices(model, list(parts.rows), n) as statistics:
        losses[f"{gates} gates"] = score(model, parts, statistics)
    return HeldOut(losses, {label: share_LN.mean(0).tolist() for label, share_LN in statistics.shares().items()})


@contextmanager
def first_choices(model: Any, domains: Sequence[str], num_experts: int) -> Iterator[RoutingStatistics]:
    """Statistics in which every token counts for its first choice alone, in each layer."""
    layers = len(routed_layers(model))
    statistics = RoutingStatistics([num_experts] * layers, [1] * layers, domains)
    with observed_routing(model, lambda seen: statistics.update(seen.router_logits, seen.mask, None)):
        yield statistics
