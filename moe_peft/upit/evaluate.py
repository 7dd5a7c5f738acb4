"""Held-out losses by domain, and where the tokens of each domain go."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig

from ..analysis.record import RoutingStatistics, record_routing
from ..models.steering import allow_experts
from ..models.view import adapter_layers, native_routers
from ..routing.expert_map import label_text
from ..training.data import check_domains, check_label_column, rows_of_labels
from ..training.scoring import example_losses, loss_name, make_scorable, mean_loss
from ..training.tokenizing import tokenized


class Evaluation(NamedTuple):
    """
    What `evaluate` measures.

    Args:
        losses: `{"base": {domain: loss}, "adapted": {…}}`: the mean loss per scored token of each domain and, as
            `"mean"`, the mean over domains. A domain of that name is `"mean (domain)"`.
        shares: domain → the share of token assignments of every layer and expert, [L, n]; none without routers.
        warnings: the layers whose load is not healthy, see `moe_peft.routing.load_verdicts`.
    """

    losses: dict[str, dict[str, float]]
    shares: dict[str, torch.Tensor]
    warnings: list[str]


def evaluate(
    model: PeftModel | PreTrainedModel,
    dataset: Dataset,
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
    label_column: str | None = None,
    base: PreTrainedModel | None = None,
    label_mask: Mapping[str, Sequence[int]] | None = None,
) -> Evaluation:
    """
    Losses of the model and of its base, routing shares, and what is not healthy about the load of the experts.

    Args:
        dataset: held-out examples; `args` says how they are prepared.
        label_column: a column of domains.
        base: the model to compare with; None takes the model without its adapter.
        label_mask: domain → the indices of the only experts that its tokens may go to; None: all.

    Raises:
        ValueError: a domain has no token to score, or the column has too many values for domains.
    """
    check_label_column(label_column, "evaluate: ")
    check_domains(dataset, label_column, "evaluate: ")
    args = copy.copy(args)
    args.packing = args.padding_free = False  # examples are scored one by one
    data, collator = tokenized(dataset, processing_class, args)
    make_scorable(model)
    labels = [label_text(label) for label in data[label_column]] if label_column else ["all"] * len(data)
    parts = {domain: data.select(own) for domain, own in rows_of_labels(labels).items()}
    routed = bool(adapter_layers(model) or native_routers(model))
    losses: dict[str, dict[str, float]] = defaultdict(dict)
    with record_routing(model, list(parts)) if routed else nullcontext() as statistics:
        for domain, part in parts.items():
            if statistics is not None:
                statistics.current = domain
            with nullcontext() if label_mask is None else allow_experts(model, label_mask[domain]):
                losses["adapted"][loss_name(domain)] = mean_loss(
                    *example_losses(model, part, collator), f"evaluate: {domain!r}"
                )
    if base is not None:
        make_scorable(base)
    with model.disable_adapter() if base is None else nullcontext():
        for domain, part in parts.items():
            losses["base"][loss_name(domain)] = mean_loss(
                *example_losses(base or model, part, collator), f"evaluate: {domain!r}"
            )
    if statistics is not None:
        _gather(statistics)
    shares, warnings = ({}, []) if statistics is None else (statistics.shares(), statistics.warnings())
    for result in losses.values():
        result["mean"] = sum(result.values()) / len(result)
    return Evaluation({name: losses[name] for name in ("base", "adapted")}, shares, warnings)


def _gather(statistics: RoutingStatistics) -> None:
    """Count the batches of all processes."""
    if PartialState().num_processes > 1:
        statistics.counts = sum(gather_object([statistics.counts]))
        statistics.tokens = sum(gather_object([statistics.tokens]))
