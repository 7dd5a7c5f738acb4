"""What a mixture gives on held-out rows, beside its base, each expert alone, the experts' mean, and one by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers.utils.logging import tqdm

from ..adapter.lora_conversion import averaged_linears
from ..analysis.recorder import RoutingStatistics
from ..models.gates import pick_experts, uniform_gates
from ..models.introspection import observed_routing
from ..models.layer import AdapterLayer, routed_layers
from ..models.steering import common_size, force_experts
from ..training.scoring import Collator, example_losses, mean_loss

Losses = dict[str, float]
PICKED = "picked by its prompt"
_AS_GOOD = 1.01  # a loss that is no more than this times another is as good


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

    def verdict(self) -> list[str]:
        """Whether the mixture, the last way, is worth its routers: a sentence on each simpler way."""
        domains, gates = list(self.reached), list(self.losses)[-1]
        routed, lines = self.losses[gates], []
        merged = next((self.losses[way] for way in self.losses if way.startswith("mean of the ")), None)
        if merged is not None:
            better = [domain for domain in domains if routed[domain] < merged[domain]]
            worse = [domain for domain in domains if routed[domain] > merged[domain]]
            lines.append(
                f"{gates} beat merging (the mean) in {len(better)} of {len(domains)} domains"
                + (f"; they lose to it in {', '.join(worse)}." if worse else ".")
            )
        if picked := self.losses.get(PICKED):
            if picked["mean"] <= _AS_GOOD * routed["mean"]:
                lines.append(
                    "One adapter picked by the prompt is as good: your requests are easily told apart, so you may as "
                    "well serve the adapters one per request (vLLM: --enable-lora) behind a classifier."
                )
            else:
                worse = [domain for domain in domains if picked[domain] > routed[domain]]
                lines.append(f"One adapter picked by the prompt is worse in {', '.join(worse)}.")
        alone = [way for way in self.losses if way in domains and self.losses[way]["mean"] <= routed["mean"]]
        if alone:
            best = min(alone, key=lambda way: self.losses[way]["mean"])
            lines.append(f"{best} alone is at least as good as the mixture: use that.")
        return lines


def score(model: Any, parts: Parts, statistics: RoutingStatistics | None = None) -> Losses:
    """The loss on the rows of each label, which is the domain of `statistics` meanwhile."""
    losses = {}
    for label, rows in parts.rows.items():
        if statistics is not None:
            statistics.current = label
        scored = example_losses(model, rows, parts.collator, rows=parts.batch_size)
        losses[label] = mean_loss(*scored, f"held-out rows of {label!r}")
    return _with_mean(losses)


def score_mixture(model: Any, parts: Parts, gates: str, labels: Sequence[str]) -> HeldOut:
    """
    Args:
        model: with a MoE-LoRA adapter, or a native MoE.
        gates: what its gates are called.
        labels: the experts' names, of which `parts` may have some.
    """
    n, layers = common_size(model, "mix"), routed_layers(model)
    adapters = [layer for layer in layers if isinstance(layer, AdapterLayer)]
    ways: dict[str, AbstractContextManager] = {}
    if adapters:
        ways["base"] = model.disable_adapter()
        ways |= {label: alone(model, i) for i, label in enumerate(labels)}
        ways["mean of the adapters"] = uniform_gates(model, "projection")
    if not adapters or any(layer.experts.mixing == "output" for layer in adapters):
        ways["uniform gates"] = uniform_gates(model)  # which with mixing "projection" are the mean
    losses = {}
    for way, context in tqdm(ways.items(), desc="ways to route"):
        with context:
            losses[way] = score(model, parts)
    if adapters:
        losses[PICKED] = _score_picked(model, parts)
    with first_choices(model, list(parts.rows), n) as statistics:
        losses[f"{gates} gates"] = score(model, parts, statistics)
    return HeldOut(losses, {label: share_LN.mean(0).tolist() for label, share_LN in statistics.shares().items()})


@contextmanager
def alone(model: Any, expert: int) -> Iterator[None]:
    """
    A context manager: inside the block, the model has one of the adapters that a mixture was made of: its expert serves
    every token, and LoRAs that are a mean have only its part.
    """
    name = model.active_adapter
    config, before = model.peft_config[name], {}
    own = slice(expert * config.r, (expert + 1) * config.r)
    for layer in averaged_linears(model, name).values():
        B_1RO = layer.expert_parameters(name)[1]["weight"]
        before[B_1RO] = B_1RO.data
        B_1RO.data = torch.zeros_like(B_1RO)
        B_1RO.data[:, own] = config.num_updates * before[B_1RO][:, own]
    try:
        with force_experts(model, expert):
            yield
    finally:
        for B_1RO, data in before.items():
            B_1RO.data = data


def _score_picked(model: Any, parts: Parts) -> Losses:
    """The loss where each row is served by the one adapter that its prompt picks."""
    losses = {}
    for label, rows in parts.rows.items():
        picked = picked_experts(model, rows, parts.collator, parts.batch_size)
        scored = []
        for expert in sorted(set(picked)):
            with alone(model, expert):
                own = rows.select([i for i, other in enumerate(picked) if other == expert])
                scored.append(example_losses(model, own, parts.collator, rows=parts.batch_size))
        losses_S, counts_S = (torch.cat(values) for values in zip(*scored, strict=True))
        losses[label] = mean_loss(losses_S, counts_S, f"held-out rows of {label!r}")
    return _with_mean(losses)


def _with_mean(losses: Losses) -> Losses:
    return {**losses, "mean": sum(losses.values()) / len(losses)}


def picked_experts(model: Any, rows: Dataset, collator: Collator, batch_size: int) -> list[int]:
    """The expert that each row's prompt picks, see `pick_experts`."""
    starts = range(0, len(rows), batch_size)
    batches = (collator([*rows.select(range(i, min(i + batch_size, len(rows))))]) for i in starts)
    return [expert for batch in batches for expert in pick_experts(model, batch).tolist()]


@contextmanager
def first_choices(model: Any, domains: Sequence[str], num_experts: int) -> Iterator[RoutingStatistics]:
    """Statistics in which every token counts only for its first choice, in each layer."""
    layers = len(routed_layers(model))
    statistics = RoutingStatistics([num_experts] * layers, [1] * layers, domains)
    with observed_routing(model, lambda seen: statistics.update(seen.router_logits, seen.mask, None)):
        yield statistics
