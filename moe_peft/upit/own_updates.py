"""
One optimizer for all experts of an adapter, with the updates that each expert would get in a training of its own.

Experts are slices of stacked tensors [n, ...], so a step of the optimizer moves them all. For elementwise optimizers
(SGD, Adam, AdamW) the slices do not see each other; what is left is done here: clipping by each expert's own gradient
norm, and keeping still the experts whose own training is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from ..models.view import adapter_layers


class OwnUpdates(TrainerCallback):
    """
    Args:
        model: a base with a MoE-LoRA adapter, of which nothing but experts and routers is trained.
        steps: optimizer steps of each expert's own training, [n].
        max_grad_norm: the largest norm of an expert's gradient over all layers, its rows of linear routers included;
            0 clips nothing. Routers whose parameters belong to no single expert (MLP, attention) are clipped together,
            apart from the experts.
    """

    def __init__(self, model: nn.Module, steps: Sequence[int], max_grad_norm: float) -> None:
        self.steps, self.max_grad_norm = steps, max_grad_norm
        whole = {
            id(p)
            for layer in adapter_layers(model)
            for router in layer.moe_lora_router.values()
            if not router.linear_gate
            for p in router.parameters()
        }
        trained = [p for p in model.parameters() if p.requires_grad]
        self.stacked = [p for p in trained if id(p) not in whole]  # each [n, ...]
        self.shared = [p for p in trained if id(p) in whole]
        self.kept: list[torch.Tensor] = []

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.max_grad_norm > 0:
            self._clip()
        over = [expert for expert, steps in enumerate(self.steps) if steps <= state.global_step]
        self.over = torch.tensor(over, dtype=torch.long)
        self.kept = [p.detach()[self.over.to(p.device)].clone() for p in self.stacked] if over else []

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Without gradients they would still move, by momentum and weight decay.
        for parameter, values in zip(self.stacked if self.kept else [], self.kept, strict=True):
            parameter.data[self.over.to(parameter.device)] = values

    def _clip(self) -> None:
        grads = [p.grad for p in self.stacked if p.grad is not None]
        if grads:
            square_N = torch.zeros(max(map(len, grads)), device=grads[0].device)
            for grad in grads:
                square_N[: len(grad)] += grad.float().flatten(1).square().sum(1).to(square_N.device)
            factor_N = (self.max_grad_norm / (square_N.sqrt() + 1e-6)).clamp(max=1)
            for grad in grads:
                grad.mul_(factor_N[: len(grad)].to(grad).view(-1, *[1] * (grad.dim() - 1)))
        torch.nn.utils.clip_grad_norm_(self.shared, self.max_grad_norm)
