"""Gradient clipping that counts a parameter as often as the parameters that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from ..routing.routers import Router


def multiplicities(model: nn.Module) -> dict[nn.Parameter, int]:
    """The parameters of routers that stand for several with equal gradients, and for how many (`Router.stands_for`)."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return {getattr(router, name): count for router in routers for name, count in router.stands_for.items()}


@contextmanager
def whole_norm(model: nn.Module) -> Iterator[None]:
    """Gradients whose norm is that of all the parameters that a model's stand for; undone afterwards, to rounding."""
    counted = [(p.grad, count**0.5) for p, count in multiplicities(model).items() if p.grad is not None]
    for grad, root in counted:
        grad.mul_(root)
    yield
    for grad, root in counted:
        grad.div_(root)


class WholeNormMixin:
    """Mixin for a Trainer: it clips by, and logs, the norm of `whole_norm`. DeepSpeed clips by itself, without it."""

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        with whole_norm(model):
            return super()._clip_grad_norm(model)  # type: ignore[misc]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        with whole_norm(model) if grad_norm is None else nullcontext():  # None: nothing was clipped
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
