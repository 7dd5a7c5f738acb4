"""
Recording of router logits while a backbone runs; `protocol.py` starts and ends it.

A forward hook of every router appends its logits to the running collection. The collection is thread-local: two
threads may generate with one model, and CUDA runs backward, with the second runs of checkpointed layers, in a thread of
its own.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Collection:
    """Router logits of one forward pass."""

    owner: nn.Module  # whose forward began it and will end it
    enabled: bool  # whether routers record
    attached: bool  # whether the owner's output gets the logits, and its loss the balancing loss
    explicit: bool  # asked for by an argument of the call, not by the config
    outer: Collection | None  # of the pass that this one runs inside of
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    logits: list[torch.Tensor] = field(default_factory=list)


class State(threading.local):
    collection: Collection | None = None


state = State()


def record_router_logits(router: nn.Module, args: tuple, logits_TN: torch.Tensor) -> torch.Tensor | None:
    """Forward hook of every router. It returns other logits only as told below."""
    collection = state.collection
    if collection is None:
        return _add_pending_gradient(router, logits_TN)
    if not collection.enabled:
        return None
    if collection.grad_enabled and not torch.is_grad_enabled() and router.training:
        logits_TN = _remember_leaf(router, logits_TN)
    collection.logits.append(logits_TN)
    return None


# --- reentrant gradient checkpointing -------------------------------------------------------------------------------
#
# In reentrant mode a layer runs without a graph first and again during backward. What it records in the first run has
# no graph, so a loss on router logits would reach no router. Therefore: in the first run the recorded logits are made a
# leaf. The loss is computed above all layers, so autograd has filled the leaf's gradient before it comes to the layer's
# second run; there it is added to the gradient of the new logits. Which leaf belongs to a second run: the youngest with
# a gradient, as autograd takes the forward passes of one backward in reverse order.

_leaves: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref]] = weakref.WeakKeyDictionary()


def _remember_leaf(router: nn.Module, logits_TN: torch.Tensor) -> torch.Tensor:
    leaf = logits_TN.detach().requires_grad_()
    alive = [ref for ref in _leaves.get(router, ()) if ref() is not None]
    _leaves[router] = [*alive, weakref.ref(leaf)]
    return leaf


def _add_pending_gradient(router: nn.Module, logits_TN: torch.Tensor) -> torch.Tensor | None:
    if torch.compiler.is_compiling() or router not in _leaves or not logits_TN.requires_grad:
        return None
    for leaf in (ref() for ref in reversed(_leaves[router])):
        if leaf is not None and leaf.grad is not None:
            gradient, leaf.grad = leaf.grad, None
            return _AddGradient.apply(logits_TN, gradient)
    return None


class _AddGradient(torch.autograd.Function):
    """The identity, whose backward adds a given gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return d_x + ctx.saved_tensors[0], None
