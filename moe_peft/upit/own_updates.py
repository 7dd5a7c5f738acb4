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
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from ..models.view import adapter_layers
from ..routing.routers import LinearRouter
from ..sharding import Access, ZeROAccess, shape_of
from ..training.clipping import multiplicities

_NOT_ELEMENTWISE = ("adafactor", "galore", "apollo", "lomo", "muon", "stable_adamw", "grokadamw")


class OwnUpdates(TrainerCallback):
    """
    Works on one process, under DistributedDataParallel, under FSDP2 and under DeepSpeed's ZeRO.

    Args:
        steps: optimizer steps of each expert's own training, [n].
        max_grad_norm: the largest norm of an expert's gradient over all layers, its rows of linear routers included;
            0 clips nothing. What belongs to no single expert (MLP and attention routers, layers with a single LoRA) is
            clipped together, apart from the experts; a parameter that stands for several counts as often.
    """

    def __init__(self, steps: Sequence[int], max_grad_norm: float | None) -> None:
        self.steps, self.max_grad_norm = torch.tensor(steps), max_grad_norm or 0.0
        self.access: Access = Access()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Look up the parameters, which FSDP has replaced by now."""
        self.stacked = [p for p in _of_experts(model) if p.requires_grad]
        # Experts that only some layers have are never trained, so they are over from the start.
        missing = max((shape_of(p)[0] for p in self.stacked), default=0) - len(self.steps)
        self.steps = torch.nn.functional.pad(self.steps, (0, max(missing, 0)))
        known = {id(p) for p in self.stacked}
        self.shared = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
        self.counts = multiplicities(model)
        if PartialState().distributed_type == DistributedType.DEEPSPEED:
            self.access = ZeROAccess()
            self._step_with(optimizer.optimizer, state)

    def _step_with(self, zero: Any, state: TrainerState) -> None:
        """Have DeepSpeed's optimizer do what the callbacks do: it steps in the backward pass, where none is called."""
        step, zero.clip_grad = zero.step, 0.0

        def own_step(*args: Any, **kwargs: Any) -> Any:
            self._before_step(state.global_step)
            result = step(*args, **kwargs)
            self._after_step(state.global_step)
            return result

        zero.step = own_step

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not isinstance(self.access, ZeROAccess):
            self._before_step(state.global_step)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not isinstance(self.access, ZeROAccess):
            self._after_step(state.global_step)

    def _before_step(self, step: int) -> None:
        if self.max_grad_norm > 0:
            self._clip()
        over = bool((self.steps <= step).any())
        self.kept = [self.access.value(p).clone() for p in self.stacked] if over else []

    def _after_step(self, step: int) -> None:
        # Without gradients they would still move, by momentum and weight decay.
        over_N = self.steps <= step
        for parameter, values in zip(self.stacked if self.kept else [], self.kept, strict=True):
            now = self.access.value(parameter)
            self.access.set_value(parameter, torch.where(_rows(over_N, values), values, now))
        self.kept = []

    def _clip(self) -> None:
        square_N = torch.zeros(len(self.steps))
        for parameter in self.stacked:
            grad = self.access.grad(parameter)
            if grad is not None:
                own_N = _whole(_squares(grad).flatten(1).sum(1))
                square_N = square_N.to(own_N.device, torch.promote_types(square_N.dtype, own_N.dtype))
                square_N[: len(own_N)] += own_N
        self._scale(self.stacked, self._factor(square_N))
        shared = [(p, grad) for p in self.shared if (grad := self.access.grad(p)) is not None]
        squares = [self.counts.get(p, 1) * _whole(_squares(grad).sum()) for p, grad in shared]
        if squares:
            self._scale(self.shared, self._factor(torch.stack(squares).sum()))

    def _factor(self, square: torch.Tensor) -> torch.Tensor:
        return (self.max_grad_norm / (square.sqrt() + 1e-6)).clamp(max=1)

    def _scale(self, parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
        for parameter in parameters:
            grad = self.access.grad(parameter)
            if grad is not None:
                rows = _rows(factor, grad) if factor.dim() else factor.to(grad.device)
                self.access.set_grad(parameter, grad * rows)


def _squares(grad: torch.Tensor) -> torch.Tensor:
    """In float32, or float64 if the gradient is."""
    return grad.to(torch.promote_types(grad.dtype, torch.float32)).square()


def refuse_optimizer(optim: Any, fp16: bool, max_grad_norm: float | None) -> None:
    """
    Raises:
        ValueError: the optimizer's steps mix the entries of a tensor, or gradients are scaled when experts are clipped.
    """
    name = str(getattr(optim, "value", optim))
    if any(part in name for part in _NOT_ELEMENTWISE):
        raise ValueError(f"router_init: optim={name!r}: mixes the experts of a tensor; use adamw_torch, or sgd")
    if fp16 and max_grad_norm:
        raise ValueError(
            f"router_init: fp16=True, max_grad_norm={max_grad_norm:g}: scaled gradients would be clipped; use bf16, or "
            "max_grad_norm=0"
        )


def _of_experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of which every expert has a slice, [n, ...]."""
    for layer in adapter_layers(model):
        for name, router in layer.moe_lora_router.items():
            for of_layer in layer.expert_parameters(name):
                yield from of_layer.values()
            if isinstance(router, LinearRouter):
                yield router.weight


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _rows(values_N: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of the experts in the shape of a stacked tensor, [n, 1, …], on its device or devices."""
    shaped = values_N[: like.shape[0]].view(-1, *[1] * (like.dim() - 1)).to(like.device)
    return distribute_tensor(shaped, like.device_mesh, like.placements) if isinstance(like, DTensor) else shaped
