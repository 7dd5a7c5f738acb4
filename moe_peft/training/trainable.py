"""Choose the trained parameters, by stage, and their dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from ..utils.messages import InputError

_NOTE = "_moe_stage"  # parameters frozen by the last stage, noted on the model for the next stage's trainer


def unfreeze_stage(model: nn.Module, routers: Mapping[str, nn.Parameter]) -> None:
    """Unfreeze the parameters that an earlier stage froze."""
    before = model.__dict__.pop(_NOTE, None)
    for name, parameter in model.named_parameters():
        if before is not None and (name in before["names"] or (before["routers"] and name in routers)):
            parameter.requires_grad_(True)


def freeze_for_stage(model: nn.Module, routers: Mapping[str, nn.Parameter], stage: str) -> list[nn.Parameter]:
    """
    Freeze the parameters that the stage does not train: all but the routers for "routers", the routers for "rest".
    First unfreeze the parameters of an earlier stage.

    Args:
        model: the model to train.
        routers: the routers' parameters by name. They may have been re-created since the earlier stage.
        stage: "joint", "routers" or "rest".

    Returns:
        the frozen parameters.
    """
    unfreeze_stage(model, routers)
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and stage != "joint" and (name in routers) == (stage == "rest")
    }
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    if frozen:
        names = frozen.keys() - routers.keys()
        model.__dict__[_NOTE] = {"names": names, "routers": bool(frozen.keys() & routers.keys())}
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"training_stage={stage!r}: nothing is left to train; unfreeze what it should train")
    return list(frozen.values())


def train_only(model: nn.Module, names: Collection[str]) -> None:
    """Make only these parameters trainable."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def give_rate(optimizer: torch.optim.Optimizer, routers: Iterable[nn.Parameter], rate: float) -> list[int]:
    """
    Move routers to optimizer groups with learning rate `rate`, otherwise copies of their old groups. Return the
    indices.
    """
    ids = {id(parameter) for parameter in routers}
    trained = [(group, [p for p in group["params"] if id(p) in ids]) for group in optimizer.param_groups]
    if not any(own for _, own in trained):
        raise InputError(
            f"router_learning_rate={rate!r}: the optimizer has no parameters of routers; unfreeze them, or use an "
            "optimizer with groups (optim)"
        )
    for group, own in trained:
        others = [p for p in group["params"] if id(p) not in ids]
        if own and others:
            group["params"] = others
            optimizer.add_param_group({**group, "params": own, "lr": rate})
        elif own:
            group["lr"] = rate
    # Remove empty groups: DeepSpeed would drop them, and so shift the indices.
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return [i for i, group in enumerate(optimizer.param_groups) if any(id(p) in ids for p in group["params"])]


def on_quantized(model: nn.Module) -> nn.Module:
    """Convert the trainable parameters of an adapter on a quantized base model to bfloat16, as TRL does."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    return model
