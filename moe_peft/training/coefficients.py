"""The coefficients of the losses on routers, and whether a model's routers can be trained with them."""

from __future__ import annotations

from typing import Any

from ..models.view import active_routers, adapter_layers, router_parameters, text_config
from ..routing.losses import ROUTER_LOSSES, coefficient_field


def loss_coefficients(model: Any, args: Any, caller: str) -> dict[str, float]:
    """
    The coefficient of each loss of `ROUTER_LOSSES`.

    Args:
        args: a config with the fields of `RouterLossConfig`.

    Raises:
        ValueError: the model's routers cannot be trained so; the message begins with `caller`.
    """
    if args.training_stage == "routers" and not router_parameters(model):
        raise ValueError(f"{caller}: training_stage='routers': these routers have no parameters; use 'joint'")
    found = {name: getattr(args, coefficient_field(name)) for name in ROUTER_LOSSES}
    constant = all(getattr(router, "by_token_id", False) for router in active_routers(model))
    for name, loss in ROUTER_LOSSES.items():
        wanted = not loss.needs_labels or getattr(args, "expert_map", None) is not None
        if constant and wanted and found[name]:
            raise ValueError(
                f"{caller}: {coefficient_field(name)}={found[name]}: these routers go by token ids, "
                "so the loss is a constant; set it to 0"
            )
    if found["aux"] is None:
        found["aux"] = getattr(text_config(model), "router_aux_loss_coef", 0.0)
    if not adapter_layers(model) and is_reentrant(args) and any(found.values()):
        raise ValueError(
            f"{caller}: gradient_checkpointing_kwargs.use_reentrant=True: a native MoE then has router logits "
            "without gradients, which its losses on routers need; set it to False"
        )
    return found


def is_reentrant(args: Any) -> bool:
    """Whether layers run again inside the backward pass, without gradients in the first one."""
    return bool(args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"))
