"""
Parameters that DeepSpeed's ZeRO-3 shards among processes, in a model that no trainer has prepared yet; how processes
agree, and how to leave them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from .messages import InputError


def shape_of(parameter: Any) -> torch.Size:
    """The full shape of a parameter; a sharded one is empty."""
    return getattr(parameter, "ds_shape", parameter.shape)


def is_sharded(parameter: Any) -> bool:
    """Whether ZeRO-3 has sharded a parameter."""
    return hasattr(parameter, "ds_shape")


@contextmanager
def gathered(parameters: Iterable[nn.Parameter], write: bool = False) -> Iterator[None]:
    """
    Inside this block, sharded parameters are full. All processes must enter it; with `write`, what the first one
    assigns stays.
    """
    sharded = [p for p in parameters if is_sharded(p)]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if write else None):
        yield


@contextmanager
def gathered_as_it_runs(model: nn.Module) -> Iterator[None]:
    """
    Inside this block, a model with sharded parameters can run without DeepSpeed's engine: the weights of each decoder
    layer are gathered while it runs, all others while the model does. All processes must run it the same number of
    times.
    """
    if not any(map(is_sharded, model.parameters())):
        with _marked_full(model):
            yield
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    units = {layer: list(layer.parameters()) for layer in layers}
    units[model] = [p for p in model.parameters() if id(p) not in in_layers]
    handles = []
    for module, parameters in units.items():
        unit = _Unit(parameters)
        handles.append(module.register_forward_pre_hook(unit.enter, prepend=True))
        handles.append(module.register_forward_hook(unit.leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _marked_full(model: nn.Module) -> Iterator[None]:
    """
    Inside this block, the parameters say that ZeRO-3 has not sharded them: TRL's fused head asks them, also those of a
    quantized model, which is not sharded before it is trained.
    """
    if not is_deepspeed_zero3_enabled():
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for parameter in model.parameters():
        parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in model.parameters():
            del parameter.ds_status  # type: ignore[attr-defined]


class _Unit:
    """The hooks of a module whose parameters are gathered together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def enter(self, *args: Any) -> None:
        self.context = gathered(self.parameters)
        self.context.__enter__()

    def leave(self, *args: Any) -> None:
        self.context.__exit__(None, None, None)


Result = TypeVar("Result")


def on_main_process(act: Callable[[], Result]) -> Result:
    """
    Do something only in the main process, once all have come here; the others wait for it.

    Args:
        act: what to do; what it returns can be pickled.

    Returns:
        what it returned, in every process.
    """
    state = PartialState()
    state.wait_for_everyone()
    result, error = None, None
    if state.is_main_process:
        try:
            result = act()
        except Exception as raised:
            error = raised
    message = error and (str(error) if isinstance(error, InputError) else repr(error))
    result, message, is_input = broadcast_object_list([result, message, isinstance(error, InputError)])
    if error is not None:
        raise error
    if message is not None:
        raise InputError(message) if is_input else RuntimeError(f"the main process ended: {message}")
    return result  # type: ignore[return-value]


def leave_processes() -> None:
    """
    Leave the process group, if there is one, at the end of a program.

    DDP's reducers must be gone before: one that is collected later destroys the group while it holds the interpreter's
    lock, and waits for a thread of gloo's that needs the lock.
    """
    gc.collect()
    PartialState().destroy_process_group()
