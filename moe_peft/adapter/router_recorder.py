"""
Records router logits and the chosen experts while a backbone runs.

Hooks start the collection of a forward pass with `begin`, and close it. In between, each layer appends its router's
logits, as changed by the router's own forward hooks. Then it appends the chosen experts and their gates, as changed by
steering and the router's own rules. Subscribers use `observing`. The gates of a native MoE are recorded in the same
way, as long as there is a subscriber.

The current collection is thread-local: two threads may generate with one model, and CUDA runs backward, including the
second runs of checkpointed layers, in a separate thread.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..routing.gates import Steering
from ..routing.routers import Router
from ..utils.compat import private
from ..utils.messages import InputError

_top_saved_tensors_hooks = private("torch._C._autograd", "_top_saved_tensors_default_hooks")

# A router's experts [T, k] and their gates [T, k]. A gate of 0 leaves an expert out; None: all gates are more than 0.
Choice = tuple[torch.Tensor, torch.Tensor | None]


@dataclass
class Collection:
    """Router logits and choices of one forward pass, and the inputs of the model's call."""

    owner: nn.Module  # its forward starts and ends the collection
    attached: bool = False  # whether the owner's output gets the logits, and its loss the balancing loss
    explicit: bool = False  # requested by an argument of the call, not by the config
    outer: Collection | None = None  # the collection of the pass around this one
    token_ids: torch.Tensor | None = None  # the call's `input_ids`, unless they are an encoder's
    attention_mask: torch.Tensor | None = None  # [B, S]; None: packed, or no padding
    rows: int = 1  # B
    of_backbone: bool = False  # whether the backbone's output gets the logits, too
    observers: Sequence[Observer] = ()
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    # One entry for each run of a router. A choice of None was not seen.
    logits: list[torch.Tensor] = field(default_factory=list)
    routers: list[nn.Module] = field(default_factory=list)
    choices: list[Choice | None] = field(default_factory=list)

    @property
    def enabled(self) -> bool:
        """True if anybody wants logits and choices."""
        return self.attached or self.of_backbone or len(self.observers) > 0


class Current:
    """
    A thread's current collection and its steering blocks, the innermost last. They are attributes of this object,
    because torch.compile loses values set on a thread-local object where a graph breaks.
    """

    def __init__(self) -> None:  # torch.compile of torch 2.11 takes a class attribute for a constant
        self.collection: Collection | None = None
        self.steered: list[Steered] = []


class State(threading.local):
    def __init__(self) -> None:  # in each thread
        self.current = Current()


state = State()

# --- steering --------------------------------------------------------------------------------------------------------

Steered = dict[nn.Module, Steering]  # by tuner layer, or by gate of a native MoE
_by_any_thread: list[Steered] = []


@contextmanager
def steering_block(steered: Steered) -> Iterator[None]:
    """Route these modules as given inside the block, in this thread. Of nested blocks, the inner one counts."""
    mine = state.current.steered
    mine.append(steered)
    _by_any_thread.append(steered)
    try:
        yield
    finally:
        # Remove the last entry of this block. In `_by_any_thread`, blocks of other threads may follow it.
        for blocks in (mine, _by_any_thread):
            del blocks[max(i for i, block in enumerate(blocks) if block is steered)]


def steering_of(module: nn.Module) -> Steering | None:
    """
    Return how the innermost `with` block of this thread steers a module, or None. On CUDA, backward runs checkpointed
    layers again in other threads, which entered no block. There, the blocks of all threads count.
    """
    blocks = state.current.steered
    if not blocks and state.current.collection is None and torch.is_grad_enabled():
        blocks = _by_any_thread
    for steered in reversed(blocks):
        if module in steered:
            return steered[module]
    return None


# --- a pass ----------------------------------------------------------------------------------------------------------


def outer_collection(module: nn.Module) -> Collection | None:
    """
    Return the collection of the forward pass around a pass of `module`. Skip collections of `module` itself or of its
    backbone: neither calls `module`, so they were left behind by Ctrl-C, when torch runs no hooks.
    """
    outer = state.current.collection
    while outer is not None and (outer.owner is module or outer.owner is getattr(module, "base_model", None)):
        outer = outer.outer
    return outer


def begin(module: Any, args: tuple, kwargs: dict[str, Any], attached: bool = False, explicit: bool = False) -> None:
    """Start the collection of a forward pass of `module`, a transformers model called with these arguments."""
    call = arguments(module, args, kwargs)
    ids, embeds, mask = (call.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))
    rows = next((tensor.shape[0] for tensor in (ids, embeds) if isinstance(tensor, torch.Tensor)), 1)
    # An encoder-decoder's `input_ids` are the encoder's.
    if getattr(module.config, "is_encoder_decoder", False):
        ids = None
    # Reduce a 4-d mask to the attended tokens. Only for observers: reading the mask waits for the device.
    observers = _observers.get(module.base_model, ())
    if observers:
        mask = _without_queries(mask)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[0] != rows:
        mask = None
    outer = outer_collection(module)
    state.current.collection = Collection(module, attached, explicit, outer, ids, mask, rows, observers=observers)


@torch.compiler.disable
def _without_queries(mask: Any) -> Any:
    """Return the attended tokens [B, K] of an attention mask [B, 1, Q, K], without free places of a cache."""
    if isinstance(mask, dict):  # by kind of attention
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        return mask
    # A query attends to a token where a boolean mask is True or a float mask 0. Places after the last one are free.
    attended_BK = (mask if mask.dtype == torch.bool else mask == 0).any(2)[:, 0]
    return attended_BK[:, : int(attended_BK.any(0).nonzero().max()) + 1].long()


def arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `model` by name, including positional ones."""
    if not args:
        return kwargs
    names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def recorded(router: nn.Module, logits_TN: torch.Tensor) -> torch.Tensor:
    """
    Record a router's logits (called by its layer). Return them unchanged, except under reentrant checkpointing (below).
    """
    collection = state.current.collection
    # Outside a pass, this may be the second run of a checkpointed layer.
    if collection is None:
        return _with_pending_gradient(router, logits_TN)
    # In a first run under reentrant checkpointing, gradients are off only inside the layer: record a leaf.
    if collection.enabled:
        if collection.grad_enabled and not torch.is_grad_enabled() and router.training:
            logits_TN = _remember_leaf(router, logits_TN)
        collection.logits.append(logits_TN)
        collection.routers.append(router)
    return logits_TN


def record_choice(experts_TK: torch.Tensor, gates_TK: torch.Tensor) -> None:
    """Record a router's choice (called by its layer, after the router)."""
    collection = state.current.collection
    if collection is not None and collection.enabled:
        collection.choices.append((experts_TK, gates_TK.detach()))


# --- observers -------------------------------------------------------------------------------------------------------

Observer = Callable[[Collection], None]
_observers: dict[nn.Module, list[Observer]] = {}  # by backbone, while there are any
_gate_hooks: dict[nn.Module, list[Any]] = {}  # by backbone of a native MoE, likewise


@contextmanager
def observing(backbone: nn.Module, observe: Observer, gates: Mapping[nn.Module, int] | None) -> Iterator[None]:
    """
    Call `observe` with the collection of each forward pass of a backbone inside the block.

    Args:
        gates: the gates of a native MoE, each with the index of the logits in its output; None if hooks of an adapter
            begin and end a pass.
    """
    # The first observer of a native MoE registers the hooks. The last one removes them.
    if backbone not in _observers and gates is not None:
        _gate_hooks[backbone] = [
            backbone.register_forward_pre_hook(begin, with_kwargs=True),
            backbone.register_forward_hook(_end_native, with_kwargs=True, always_call=True),
            *(gate.register_forward_hook(partial(_see_gate, index=index)) for gate, index in gates.items()),
        ]
    _observers.setdefault(backbone, []).append(observe)
    try:
        yield
    finally:
        _observers[backbone].remove(observe)
        if not _observers[backbone]:
            del _observers[backbone]
            for handle in _gate_hooks.pop(backbone, ()):
                handle.remove()


@torch.compiler.disable
def notify(collection: Collection) -> None:
    """Call the observers, once per pass."""
    observers, collection.observers = collection.observers, ()
    for observe in list(observers):
        observe(collection)


def _end_native(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    collection = state.current.collection
    if collection is not None and collection.owner is module:
        state.current.collection = collection.outer
        if output is not None and collection.logits:  # None: the forward raised
            notify(collection)


def _see_gate(gate: nn.Module, args: tuple, output: Any, index: int) -> None:
    """Record a native gate's output, usually (logits, gates, experts). Skip the second run of a checkpointed layer."""
    collection = state.current.collection
    if collection is None or not collection.enabled:
        return
    logits = output[index] if isinstance(output, tuple) else output
    collection.logits.append(logits.reshape(-1, logits.shape[-1]))
    collection.routers.append(getattr(gate, "moe_router", gate))
    # Other outputs hold no choice, so the choice counts as not seen.
    is_choice = isinstance(output, tuple) and len(output) == 3 and index == 0
    collection.choices.append((output[2], output[1].detach()) if is_choice else None)


# --- token ids ------------------------------------------------------------------------------------------------------

_HANDLES = "_moe_peft_token_ids"


def keep_token_ids(backbone: nn.Module, wanted: bool) -> None:
    """Start or stop passing token ids to the routers in a native MoE's gates."""
    for handle in backbone.__dict__.pop(_HANDLES, ()):
        handle.remove()
    if wanted:
        backbone.__dict__[_HANDLES] = [
            backbone.register_forward_pre_hook(begin, with_kwargs=True),
            backbone.register_forward_hook(_end_native, with_kwargs=True, always_call=True),
        ]


def token_ids_for(router: Router, x_TD: torch.Tensor) -> torch.Tensor | None:
    """
    Return the ids [T] of the tokens to be routed by `router`, or None if the router does not read them.

    Args:
        x_TD: the tokens' hidden states [..., d].

    Raises:
        ValueError: the model was not called with one token id for each hidden state, or a gradient checkpoint would run
            this layer again without them.
    """
    return _token_ids(router, x_TD) if router.needs_token_ids else None


@torch.compiler.disable
def _token_ids(router: Router, x_TD: torch.Tensor) -> torch.Tensor:
    collection, count, field = state.current.collection, x_TD[..., 0].numel(), f"router_type={router.settings.type!r}"
    ids = None if collection is None else collection.token_ids
    if ids is None or ids.numel() != count:
        has = "no input_ids" if ids is None else f"{ids.numel()} input_ids"
        raise InputError(
            f"{field}: {has} for {count} hidden states; call the model itself with "
            "input_ids, on a decoder-only model, or use another router_type"
        )
    if collection is not None and collection.grad_enabled and router.training and _is_checkpointed():
        raise InputError(
            f"{field}: gradient_checkpointing=True runs layers again without their token ids; set "
            "gradient_checkpointing to false, or use another router_type"
        )
    return ids


def _is_checkpointed() -> bool:
    """
    Return whether backward may run the current layer again. Reentrant checkpoints turn gradients off, others set hooks.
    """
    hooks = _top_saved_tensors_hooks(False)
    return not torch.is_grad_enabled() or (hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint")


# --- reentrant gradient checkpointing -------------------------------------------------------------------------------
#
# In reentrant mode a layer first runs without a graph and runs again during backward. Logits recorded in the first run
# have no graph, so a loss on them would not reach the router. Therefore the first run records its logits as a leaf. The
# loss is computed after all layers, so autograd has filled the leaf's gradient before it reaches the layer's second
# run. The second run adds this gradient to the gradient of the new logits. The leaf of a second run is the most recent
# one with a gradient, because autograd goes through the forward passes of one backward in reverse order.

_leaves: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref]] = weakref.WeakKeyDictionary()


def _remember_leaf(router: nn.Module, logits_TN: torch.Tensor) -> torch.Tensor:
    # Add a weak reference to the leaf. Leaves of earlier passes may be gone.
    leaf = logits_TN.detach().requires_grad_()
    alive = [ref for ref in _leaves.get(router, ()) if ref() is not None]
    _leaves[router] = [*alive, weakref.ref(leaf)]
    return leaf


def _with_pending_gradient(router: nn.Module, logits_TN: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() or router not in _leaves or not logits_TN.requires_grad:
        return logits_TN
    # Take the gradient of the most recent leaf, and clear it: each gradient is added once.
    for leaf in (ref() for ref in reversed(_leaves[router])):
        if leaf is not None and leaf.grad is not None:
            gradient, leaf.grad = leaf.grad, None
            return _AddGradient.apply(logits_TN, gradient)
    return logits_TN


class _AddGradient(torch.autograd.Function):
    """The identity. Its backward adds a given gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return d_x + ctx.saved_tensors[0], None
