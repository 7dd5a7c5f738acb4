"""
Parameters sharded by DeepSpeed's ZeRO-3, in a model that no trainer has prepared yet. Also how processes agree on a
result, and how they end.
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
    """Return the full shape of a parameter. A sharded parameter itself is empty."""
    return getattr(parameter, "ds_shape", parameter.shape)


def is_sharded(parameter: Any) -> bool:
    """Return whether ZeRO-3 has sharded a parameter."""
    return hasattr(parameter, "ds_shape")


def check_whole(model: nn.Module, caller: str) -> None:
    """Raise if ZeRO-3 or FSDP2 has sharded a model's weights, for functions that write routers."""
    if any(is_sharded(p) or hasattr(p, "placements") for p in model.parameters()):
        raise InputError(
            f"{caller}: the model's weights are sharded (ZeRO-3 or FSDP2); call it before training, or on the saved "
            "model"
        )


@contextmanager
def gathered(parameters: Iterable[nn.Parameter], write: bool = False) -> Iterator[None]:
    """
    Gather sharded parameters inside the block. All processes must enter it. With `write`, the first process's
    assignments are kept.
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
    Let a model with sharded parameters run without DeepSpeed's engine inside the block. Each decoder layer's weights
    are gathered while the layer runs, all other weights while the model runs. All processes must run it the same number
    of times.
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
    Mark the parameters as not sharded by ZeRO-3 inside the block. TRL's fused head reads the mark, even for a quantized
    model, which is not sharded before training.
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
    """Hooks to gather a module's parameters together."""

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
    Call a function only in the main process, once all processes have arrived. The others wait for its result.

    Args:
        act: the function; its result can be pickled.

    Returns:
        the result, in every process.
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
    Leave the process group at the end of a program, if there is a group.

    DDP's reducers must be freed first. A reducer collected later destroys the group while it holds the
    interpreter's lock, and waits for a thread of gloo that needs the same lock.
    """
    gc.collect()
    PartialState().destroy_process_group()
