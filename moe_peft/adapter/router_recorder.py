"""
Records router logits, and what was chosen, while a backbone runs; `protocol.py` starts and ends the recording.

A layer appends its router's logits (as the router's own forward hooks leave them) to the current collection, and then
the experts that were chosen and their gates (steering and routers' own rules included). The collection is thread-local:
two threads may generate with one model, and CUDA runs backward, including the second runs of checkpointed layers, in a
separate thread.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..utils.compat import private

_top_saved_tensors_hooks = private("torch._C._autograd", "_top_saved_tensors_default_hooks")

# A router's experts [T, k] and their gates [T, k]. A gate of 0 leaves an expert out; None: all gates are more than 0.
Choice = tuple[torch.Tensor, torch.Tensor | None]


@dataclass
class Collection:
    """Router logits and choices of one forward pass."""

    owner: nn.Module  # the module whose forward starts and ends it
    enabled: bool  # whether routers record
    attached: bool  # whether the owner's output gets the logits, and its loss the balancing loss
    explicit: bool  # requested by an argument of the call, not by the config
    outer: Collection | None  # that of the pass around this one
    token_ids: torch.Tensor | None = None  # the call's `input_ids`
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    logits: list[torch.Tensor] = field(default_factory=list)
    routers: list[nn.Module] = field(default_factory=list)  # one for each of the logits
    choices: list[Choice] = field(default_factory=list)  # one for each of the logits


class State(threading.local):
    def __init__(self) -> None:  # in each thread; torch.compile of torch 2.11 takes a class attribute for a constant
        self.collection: Collection | None = None


state = State()


def recorded(router: nn.Module, logits_TN: torch.Tensor) -> torch.Tensor:
    """Called by a layer with its router's logits. It replaces them only under reentrant checkpointing (below)."""
    collection = state.collection
    if collection is None:
        return _with_pending_gradient(router, logits_TN)
    if collection.enabled:
        if collection.grad_enabled and not torch.is_grad_enabled() and router.training:
            logits_TN = _remember_leaf(router, logits_TN)
        collection.logits.append(logits_TN)
        collection.routers.append(router)
    return logits_TN


def record_choice(experts_TK: torch.Tensor, gates_TK: torch.Tensor) -> None:
    """Called by a layer after its router."""
    collection = state.collection
    if collection is not None and collection.enabled:
        collection.choices.append((experts_TK, gates_TK.detach()))


# --- token ids ------------------------------------------------------------------------------------------------------
#
# With gradient checkpointing, layers run again during backward, when nobody knows the batch any more. Routers that need
# its ids therefore keep those of the last forward passes under checkpointing, with some entries of their input. A
# second run takes the ids whose input was the same, since losses may go backward in any order, or never.

_MOST_PASSES = 64  # before one backward
_KEPT_COLUMNS = 8  # of a router's input
_DIFFERENCE = 0.1  # of a token's kept entries, relative: kernels may round differently in a second run


class _Pass(NamedTuple):
    ids: torch.Tensor  # [T] in any shape
    input_TC: torch.Tensor  # some columns of the router's input


_past_passes: weakref.WeakKeyDictionary[nn.Module, deque[_Pass]] = weakref.WeakKeyDictionary()


@torch.compiler.disable
def token_ids_for(router: nn.Module, x_TD: torch.Tensor) -> torch.Tensor:
    """
    The ids of the tokens that a router is about to route, from their hidden states [T, d].

    Raises:
        ValueError: the model was not called with one id for each of these tokens, or a layer runs again during backward
            on hidden states of no forward pass.
    """
    collection, count = state.collection, len(x_TD)
    if collection is None and router in _past_passes:
        return _ids_of_first_run(_past_passes[router], x_TD)
    ids = None if collection is None else collection.token_ids
    if ids is None or ids.numel() != count:
        has = "no input_ids" if ids is None else f"{ids.numel()} input_ids"
        raise ValueError(
            f"MoELoraConfig: router_type='hash': {has} for {count} hidden states; call the whole model with input_ids, "
            "on a decoder-only model, or use another router_type"
        )
    if collection is not None and collection.grad_enabled and router.training and _is_checkpointed():
        past = _past_passes.setdefault(router, deque(maxlen=_MOST_PASSES))
        past.append(_Pass(ids, _kept(x_TD)))
    return ids


def _is_checkpointed() -> bool:
    """
    Whether the layer at work may run again, in a pass with gradients: a reentrant checkpoint turns them off, another
    one saves no tensors, by hooks.
    """
    return not torch.is_grad_enabled() or _top_saved_tensors_hooks(False) is not None


def _kept(x_TD: torch.Tensor) -> torch.Tensor:
    return x_TD.detach()[:, :_KEPT_COLUMNS].nan_to_num()


def _ids_of_first_run(past: deque[_Pass], x_TD: torch.Tensor) -> torch.Tensor:
    """Takes the pass whose input is nearest. This waits for the device, but in second runs alone."""
    x_TC = _kept(x_TD).float()
    limit_T = _DIFFERENCE * x_TC.norm(dim=1).clamp(min=1e-12)
    alike = [place for place, other in enumerate(past) if other.input_TC.shape == x_TC.shape]
    ratios = [((past[place].input_TC.float() - x_TC).norm(dim=1) / limit_T).max() for place in alike]
    nearest, place = min(zip(torch.stack(ratios).tolist(), alike, strict=True)) if ratios else (2.0, 0)
    if nearest > 1:
        raise ValueError(
            f"MoELoraConfig: router_type='hash': a layer runs again on {len(x_TD)} hidden states of none of the "
            f"{len(past)} forward passes whose input_ids are kept; under gradient checkpointing, go backward once "
            f"through a forward pass (no retain_graph) and through at most {_MOST_PASSES} together"
        )
    ids = past[place].ids
    del past[place]
    return ids


# --- reentrant gradient checkpointing -------------------------------------------------------------------------------
#
# In reentrant mode a layer first runs without a graph and runs again during backward. Logits recorded in the first run
# have no graph, so a loss on them would not reach the router. Therefore the first run records its logits as a leaf. The
# loss is computed after all layers, so autograd has filled the leaf's gradient before it reaches the layer's second
# run, which adds it to the gradient of the new logits. The leaf of a second run is the most recent one with a gradient,
# because autograd goes through the forward passes of one backward in reverse order.

_leaves: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref]] = weakref.WeakKeyDictionary()


def _remember_leaf(router: nn.Module, logits_TN: torch.Tensor) -> torch.Tensor:
    leaf = logits_TN.detach().requires_grad_()
    alive = [ref for ref in _leaves.get(router, ()) if ref() is not None]
    _leaves[router] = [*alive, weakref.ref(leaf)]
    return leaf


def _with_pending_gradient(router: nn.Module, logits_TN: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() or router not in _leaves or not logits_TN.requires_grad:
        return logits_TN
    for leaf in (ref() for ref in reversed(_leaves[router])):
        if leaf is not None and leaf.grad is not None:
            gradient, leaf.grad = leaf.grad, None
            return _AddGradient.apply(logits_TN, gradient)
    return logits_TN


class _AddGradient(torch.autograd.Function):
    """The identity, whose backward adds a given gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return d_x + ctx.saved_tensors[0], None
