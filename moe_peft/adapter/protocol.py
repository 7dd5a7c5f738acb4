"""
The adapted model speaks transformers' MoE protocol.

The model's config carries `num_experts`, `num_experts_per_tok`, `output_router_logits` and `router_aux_loss_coef`. With
`output_router_logits` the backbone's output has `router_logits`, a tuple of float32 [tokens, n], one per router in the
order of the forward pass. TRL's trainers read these and add the balancing loss themselves; for everyone else (the plain
`Trainer`, a loop of one's own) the model adds it to `outputs.loss` and sets `outputs.aux_loss`, as a native MoE does.

Everything is done by forward hooks that are module-level functions, so that models deepcopy and pickle.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ..routing import pad_logits
from .layer import MoELoraLayer
from .recording import Collection, state

FIELDS = ("num_experts", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")


# --- the config's fields ------------------------------------------------------------------------------------------


def refuse_native_moe(model: nn.Module) -> None:
    """Raise if the model has routed experts of its own, whose protocol fields the adapter's would overwrite."""
    config = _text_config(model)
    if config is None or _is_installed(model):
        return
    for name in ("num_experts_per_tok", "num_local_experts", "moe_topk"):
        if getattr(config, name, None):
            raise ValueError(
                f"MoELoraConfig: the base model {config.model_type!r} already has routed experts "
                f"({name}={getattr(config, name)}); adapt it with a plain LoraConfig, or start from a dense model"
            )


def sync_config(model: nn.Module, configs: dict[str, Any]) -> None:
    """
    Make the model config's fields those of the active adapters; remove them where no router is left.

    What a user or a trainer set (`output_router_logits`, `router_aux_loss_coef`) stays until other adapters are active.
    """
    config = _text_config(model)
    if config is None or not isinstance(model, PreTrainedModel):
        return
    layers = [layer for layer in model.modules() if isinstance(layer, MoELoraLayer)]
    active = _active_adapters(layers)
    specs = [layer.moe_lora_spec[name] for layer in layers for name in active if name in layer.moe_lora_router]
    state = (active, tuple((spec.num_experts, spec.top_k) for spec in specs))
    if getattr(model, "_moe_lora_synced", None) == state:
        return
    model._moe_lora_synced = state
    if not specs:
        for name in FIELDS:
            config.__dict__.pop(name, None)
        return
    coef = max(configs[name].router_aux_loss_coef for name in active if name in configs)
    config.num_experts = max(spec.num_experts for spec in specs)
    config.num_experts_per_tok = specs[0].top_k
    config.router_aux_loss_coef = coef
    config.output_router_logits = coef > 0


def _active_adapters(layers: Iterable[MoELoraLayer]) -> tuple[str, ...]:
    return next((tuple(layer.active_adapters) for layer in layers), ())


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


# --- the hooks ----------------------------------------------------------------------------------------------------


def install(model: nn.Module) -> None:
    """Register the hooks on a transformers model, once. Other modules speak no protocol and are left alone."""
    if not isinstance(model, PreTrainedModel) or _is_installed(model):
        return
    backbone = model.base_model
    handles = [
        backbone.register_forward_pre_hook(_start_collection, with_kwargs=True),
        backbone.register_forward_hook(_finish_collection, with_kwargs=True, always_call=True),
    ]
    if backbone is not model:
        handles += [
            model.register_forward_pre_hook(_prepare_model_forward, with_kwargs=True),
            model.register_forward_hook(_add_aux_loss, with_kwargs=True),
        ]
    model._moe_lora_handles = handles


def uninstall(model: nn.Module) -> None:
    """Take the hooks and the config's fields away."""
    for handle in model.__dict__.pop("_moe_lora_handles", ()):
        handle.remove()
    if model.__dict__.pop("_moe_lora_synced", None) is not None:
        for name in FIELDS:
            _text_config(model).__dict__.pop(name, None)


def _is_installed(model: nn.Module) -> bool:
    return "_moe_lora_handles" in model.__dict__


def _prepare_model_forward(model: nn.Module, args: tuple, kwargs: dict) -> None:
    state.finished = None
    # transformers' own `set_adapter` and `delete_adapter` speak to the layers alone, so look at one of them each time.
    if _active_adapters(m for m in model.modules() if isinstance(m, MoELoraLayer)) != model._moe_lora_synced[0]:
        sync_config(model, getattr(model, "peft_config", {}))


def _start_collection(backbone: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    requested = kwargs.pop("output_router_logits", None)
    if requested is None:
        requested = getattr(_text_config(backbone), "output_router_logits", False)
    state.collection = Collection(torch.is_grad_enabled()) if requested else None
    return args, kwargs


def _finish_collection(backbone: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
    collection, state.collection = state.collection, None
    if collection is None or output is None:  # output is None when the forward raised
        return None
    n = max((logits.shape[-1] for logits in collection.logits), default=0)
    state.finished = tuple(pad_logits(logits, n) for logits in collection.logits) or None
    if not isinstance(output, tuple):
        output["router_logits"] = state.finished
    return output


def _add_aux_loss(model: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
    router_logits, state.finished = state.finished, None
    if router_logits is None or kwargs.get("fused_lm_head"):  # TRL's fused head adds the loss itself
        return None
    loss = (
        output[0] if isinstance(output, tuple) and kwargs.get("labels") is not None else getattr(output, "loss", None)
    )
    if loss is None and not kwargs.get("output_router_logits"):
        return None
    config = _text_config(model)
    mask = _argument(model, "attention_mask", args, kwargs)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        mask = None
    aux_loss = load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok, mask)
    if loss is not None:
        loss = loss + config.router_aux_loss_coef * aux_loss.to(loss.device)
    if isinstance(output, tuple):
        return output if loss is None else (loss, *output[1:])
    if loss is not None:
        output["loss"] = loss
    output["aux_loss"] = aux_loss
    output["router_logits"] = router_logits
    return output


def _argument(model: nn.Module, name: str, args: tuple, kwargs: dict) -> Any:
    if name in kwargs or not args:
        return kwargs.get(name)
    names = [p for p in inspect.signature(type(model).forward).parameters if p != "self"]
    return dict(zip(names, args, strict=False)).get(name)
