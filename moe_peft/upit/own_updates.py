"""
One optimizer for all experts of an adapter, with the updates that each expert would get in a training of its own.

Experts are slices of stacked tensors [n, ...], so a step of the optimizer moves them all. For elementwise optimizers
(SGD, Adam, AdamW) the slices do not see each other; what is left is done here: clipping by each expert's own gradient
norm, and keeping still the experts whose own training is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from ..models.view import adapter_layers
from ..routing.routers import LinearRouter

_NOT_ELEMENTWISE = ("adafactor", "galore", "apollo", "lomo", "muon", "stable_adamw", "grokadamw")


class OwnUpdates(TrainerCallback):
    """
    Works on one process, under DistributedDataParallel and under FSDP2.

    Args:
        steps: optimizer steps of each expert's own training, [n].
        max_grad_norm: the largest norm of an expert's gradient over all layers, its rows of linear routers included;
            0 clips nothing. What belongs to no single expert (MLP and attention routers, layers with a single LoRA) is
            clipped together, apart from the experts.
    """

    def __init__(self, steps: Sequence[int], max_grad_norm: float) -> None:
        self.steps, self.max_grad_norm = torch.tensor(steps), max_grad_norm

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Look up the parameters, which FSDP has replaced by now."""
        self.stacked = [p for p in _of_experts(model) if p.requires_grad]
        # Experts that only some layers have are never trained, so they are over from the start.
        missing = max((len(p) for p in self.stacked), default=0) - len(self.steps)
        self.steps = torch.nn.functional.pad(self.steps, (0, max(missing, 0)))
        known = {id(p) for p in self.stacked}
        self.shared = [p for p in model.parameters() if p.requires_grad and id(p) not in known]

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.max_grad_norm > 0:
            self._clip()
        over = bool((self.steps <= state.global_step).any())
        self.kept = [p.detach().clone() for p in self.stacked] if over else []

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Without gradients they would still move, by momentum and weight decay.
        over_N = self.steps <= state.global_step
        for parameter, values in zip(self.stacked if self.kept else [], self.kept, strict=True):
            parameter.data.copy_(torch.where(_rows(over_N, values), values, parameter.data))
        self.kept = []

    def _clip(self) -> None:
        grads = [p.grad for p in self.stacked if p.grad is not None]
        square_N = torch.zeros(len(self.steps), device=grads[0].device if grads else None)
        for grad in grads:
            own_N = grad.float().square().flatten(1).sum(1)
            own_N = own_N.full_tensor() if isinstance(own_N, DTensor) else own_N
            square_N[: len(own_N)] += own_N.to(square_N.device)
        factor_N = (self.max_grad_norm / (square_N.sqrt() + 1e-6)).clamp(max=1)
        for grad in grads:
            grad.mul_(_rows(factor_N.to(grad.dtype), grad))
        torch.nn.utils.clip_grad_norm_(self.shared, self.max_grad_norm)


def refuse_optimizer(args: TrainingArguments) -> None:
    """
    Raises:
        ValueError: the optimizer's steps mix the entries of a tensor, or are taken where no callback can see them.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if any(part in name for part in _NOT_ELEMENTWISE):
        raise ValueError(f"router_init: optim={name!r}: mixes the experts of a tensor; use adamw_torch, or sgd")
    if args.deepspeed:
        raise ValueError(
            "router_init: deepspeed: clips and steps inside the backward pass, where experts cannot be told apart; use "
            "DDP or FSDP2, or leave this stage out"
        )


def _of_experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of which every expert has a slice, [n, ...]."""
    for layer in adapter_layers(model):
        for name, router in layer.moe_lora_router.items():
            for of_layer in layer.expert_parameters(name):
                yield from of_layer.values()
            if isinstance(router, LinearRouter):
                yield router.weight


def _rows(values_N: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of the experts in the shape of a stacked tensor, [n, 1, …], on its device or devices."""
    shaped = values_N[: like.shape[0]].view(-1, *[1] * (like.dim() - 1)).to(like.device)
    return distribute_tensor(shaped, like.device_mesh, like.placements) if isinstance(like, DTensor) else shaped
