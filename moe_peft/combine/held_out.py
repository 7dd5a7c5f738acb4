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
from ..models.introspection import base_passes, observed_routing
from ..models.layer import AdapterLayer, adapter_layers, routed_layers
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


@torch.no_grad()
def picked_experts(model: Any, rows: Dataset, collator: Collator, batch_size: int) -> list[int]:
    """
    One expert for each row, as a classifier in front of a server with one LoRA for a request picks it: the one with the
    largest gate of a softmax, a mean over the tokens of the row's prompt (of a row without, over all) and over routers,
    which see the base's hidden states.
    """
    layers = adapter_layers(model, None, "mix")
    starts = range(0, len(rows), batch_size)
    batches = ({**collator([*rows.select(range(i, min(i + batch_size, len(rows))))]), "start": i} for i in starts)
    scores_BN = torch.zeros(len(rows), layers[0].num_experts, dtype=torch.float64)

    def add(i: int, batch: Any, mask_BS: torch.Tensor, x_BSD: torch.Tensor, output: torch.Tensor) -> None:
        prompt_BS = mask_BS * (batch["labels"].to(mask_BS.device) == -100)
        prompt_BS = torch.where(prompt_BS.any(1, keepdim=True), prompt_BS, mask_BS)
        gates_BSN = layers[i].router(x_BSD.flatten(0, 1)).float().softmax(-1).view(*x_BSD.shape[:2], -1)
        sum_BN = torch.einsum("bs,bsn->bn", prompt_BS.to(gates_BSN), gates_BSN)
        own = slice(batch["start"], batch["start"] + len(sum_BN))
        scores_BN[own] += (sum_BN / prompt_BS.sum(1, keepdim=True)).cpu().double()

    base_passes(model, batches, [layer.module for layer in layers], add)
    return scores_BN.argmax(1).tolist()


@contextmanager
def first_choices(model: Any, domains: Sequence[str], num_experts: int) -> Iterator[RoutingStatistics]:
    """Statistics in which every token counts for its first choice alone, in each layer."""
    layers = len(routed_layers(model))
    statistics = RoutingStatistics([num_experts] * layers, [1] * layers, domains)
    with observed_routing(model, lambda seen: statistics.update(seen.router_logits, seen.mask, None)):
        yield statistics
