"""Held-out loss by domain, and where the tokens of each domain go."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from ..routing import expert_counts
from .scoring import example_losses


def evaluate(
    model: PeftModel,
    dataset: Dataset,
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
    label_column: str | None = None,
) -> tuple[dict[str, dict[str, float]], dict[str, torch.Tensor]]:
    """
    Losses of the model with its adapter and without, and routing shares.

    Args:
        dataset: held-out examples, prepared as `args` says.
        label_column: a column of domains.

    Returns:
        `{"base": {domain: loss}, "adapted": {…}}`, mean loss per scored token of each domain and, as `"mean"`, the mean
        over domains; and for each domain the share of token assignments of every layer and expert, [L, n] (none without
        routers).
    """
    args = copy.copy(args)
    args.packing = args.padding_free = False  # examples are scored one by one
    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=processing_class)
    config = model.config.get_text_config()
    routed = hasattr(config, "output_router_logits")
    data = trainer.train_dataset
    labels = [str(label) for label in data[label_column]] if label_column else ["all"] * len(data)
    domains = sorted(set(labels))
    losses: dict[str, dict[str, float]] = defaultdict(dict)
    shares: dict[str, torch.Tensor] = {}
    for domain in domains:
        part = data.select([i for i, label in enumerate(labels) if label == domain])
        with model.disable_adapter():
            losses["base"][domain] = _mean(*example_losses(trainer, part))
        counter = _Counter(config.num_experts_per_tok) if routed else None
        before = getattr(config, "output_router_logits", None)
        if counter is not None:
            config.output_router_logits = True
            handle = model.get_base_model().base_model.register_forward_hook(counter, with_kwargs=True)
        losses["adapted"][domain] = _mean(*example_losses(trainer, part))
        if counter is not None:
            handle.remove()
            config.output_router_logits = before
            counted = (
                [torch.stack(counter.counts).tolist()] if counter.counts else []
            )  # a process may have had no batch
            every = gather_object(counted) if trainer.accelerator.num_processes > 1 else counted
            counts_LN = torch.tensor(every, dtype=torch.float64).sum(0)
            shares[domain] = counts_LN / counts_LN.sum(1, keepdim=True)
    for result in losses.values():
        result["mean"] = sum(result.values()) / len(result)
    return dict(losses), shares


def _mean(losses_S1: torch.Tensor, counts_S: torch.Tensor) -> float:
    return float(losses_S1.sum() / counts_S.sum())


class _Counter:
    """Forward hook of the backbone: counts assignments per layer."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.counts: list[torch.Tensor] = []

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        mask_T = kwargs["attention_mask"].flatten()
        counts = [expert_counts(logits_TN, mask_T, self.k) for logits_TN in outputs.router_logits]
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)] if self.counts else counts
