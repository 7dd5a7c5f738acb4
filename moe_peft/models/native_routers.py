"""Replaces a native MoE's gates with routers of `ROUTERS`. `gates.fold_routers` restores the gates."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ..adapter.config import MoELoraConfig, unread_settings
from ..adapter.router_recorder import keep_token_ids
from ..routing.routers import ROUTERS, RouterSettings, make_router
from ..utils.messages import InputError
from .gates import CONFIG_FIELD, STOCK_FIELD
from .introspection import backbone, base_model, text_config
from .layer import native_layers
from .routed_gate import gate_rule


def replace_routers(model: nn.Module, router: RouterSettings | str, *, top_k: int | None = None, seed: int = 0) -> None:
    """
    Replace a native MoE's gates with other routers, with random values.

    The model's forward pass, its `router_logits`, its losses and its trainers are used as before. The state dict has
    the routers' parameters (`….moe_router.*`) and, if a router folds, the equivalent `weight` of the stock gate (not
    under FSDP2). To load a saved model, load it with transformers and then call `moe_peft.native.load_routers`.
    `fold_routers` makes stock gates of routers that fold. A model with other routers has no stock checkpoint.

    The config's `num_experts_per_tok` becomes the router's: 1 with "switch", n with "soft". With "switch", gates are
    probabilities, so `norm_topk_prob` becomes False in families with this field. A later call starts again from both
    values of the stock gates.

    Args:
        model: a native MoE of transformers whose gates are linear, with a softmax over the top k.
        router: a name in `ROUTERS`, or the settings of a router; its `attention_size` follows from the model.
        top_k: experts per token; None: as in the stock gates.
        seed: the seed of the random values.

    Raises:
        ValueError: the model is not a native MoE, its gates are of another kind, or a setting does not fit.

    Example:

    ```python
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from moe_peft import replace_routers
    >>> sizes = {
    ...     "hidden_size": 32,
    ...     "intermediate_size": 64,
    ...     "num_hidden_layers": 1,
    ...     "vocab_size": 64,
    ... }
    >>> model = MixtralForCausalLM(
    ...     MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    ... )
    >>> replace_routers(model, "mlp")
    ```
    """
    layers = native_layers(model, "replace_routers")
    settings = RouterSettings(router) if isinstance(router, str) else router
    _check_settings(settings, top_k, max(layer.num_experts for layer in layers))
    try:
        rules = [gate_rule(layer.module) for layer in layers]
    except InputError as error:
        raise InputError(f"replace_routers: {error}") from error
    config = text_config(model)
    stock = getattr(config, STOCK_FIELD, None) or {"top_k": layers[0].top_k, "normalizes": rules[0]}
    made = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in layers:
            n = layer.num_experts
            spec = _adapter_config(settings, n, top_k or stock["top_k"], stock["normalizes"]).expert_spec("", config)
            keeps = stock["normalizes"] and (spec.normalize_top_k or not hasattr(config, "norm_topk_prob"))
            made.append((make_router(config.hidden_size, n, spec.router), spec.top_k, keeps))
    for layer, of_layer in zip(layers, made, strict=True):
        layer.put_router(*of_layer)
    keep_token_ids(backbone(model), any(router.needs_token_ids for router, _, _ in made))
    for holder in (config, base_model(model)):
        if hasattr(holder, "num_experts_per_tok"):
            holder.num_experts_per_tok = made[0][1]
    if hasattr(config, "norm_topk_prob"):
        config.norm_topk_prob = made[0][2]
    setattr(config, CONFIG_FIELD, _options(settings))
    setattr(config, STOCK_FIELD, stock)


def check_router(settings: RouterSettings, num_experts: int, top_k: int) -> None:
    """Check settings of `replace_routers` without a model."""
    _check_settings(settings, None, num_experts)
    _adapter_config(settings, num_experts, top_k, True)


def _check_settings(settings: RouterSettings, top_k: int | None, num_experts: int) -> None:
    """Raise if no native gate can be such a router, or if the router does not read a setting."""
    if settings.type not in ROUTERS:
        return  # `MoELoraConfig` raises
    router = ROUTERS[settings.type]
    if settings.bias_update_rate:
        raise InputError(
            f"replace_routers: bias_update_rate={settings.bias_update_rate}: a native MoE keeps no biases; use a "
            "balancing loss"
        )
    for setting in unread_settings(router):
        if (value := getattr(settings, setting.name)) != setting.default:
            raise InputError(
                f"replace_routers: {setting.name}={value!r}: router={settings.type!r} has no use for it; leave it out"
            )
    fixed = num_experts if router.all_experts else router.only_top_k
    if fixed is not None and top_k not in (None, fixed):
        raise InputError(f"replace_routers: top_k={top_k}: router={settings.type!r} has top_k={fixed}; leave it out")


def _adapter_config(settings: RouterSettings, n: int, k: int, normalizes: bool) -> MoELoraConfig:
    """
    Return the same settings as the config of an adapter that is not trained. The config checks them and adjusts top_k.
    """
    options: dict[str, Any] = {f"router_{name}": value for name, value in _options(settings).items()}
    return MoELoraConfig(
        num_experts=n, top_k=k, normalize_top_k=normalizes, mixing="projection", inference_mode=True, **options
    )


def _options(settings: RouterSettings) -> dict[str, Any]:
    """Return the settings given by a user."""
    return {name: value for name, value in asdict(settings).items() if name != "attention_size"}
