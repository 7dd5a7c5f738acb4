"""Puts routers of `ROUTERS` in the place of a native MoE's gates, and folds them back into plain ones."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ..adapter.config import MoELoraConfig, unread_settings
from ..adapter.router_recorder import keep_token_ids
from ..routing.routers import ROUTERS, RouterSettings, make_router
from ..utils.messages import InputError
from .introspection import backbone, base_model, native_routers, router_sizes, text_config
from .routed_gate import RoutedGate, gate_rule, put_router, take_router

# Fields of a native MoE's config while routers are in the place of its gates: their settings, and what the gates did.
CONFIG_FIELD = "moe_peft_router"
STOCK_FIELD = "moe_peft_stock_gate"


def replace_routers(model: nn.Module, router: RouterSettings | str, *, top_k: int | None = None, seed: int = 0) -> None:
    """
    Put other routers, with random values, in the place of a native MoE's gates.

    The model's forward pass, its `router_logits`, its losses and its trainers are used as before. The state dict has
    the routers' parameters (`….moe_router.*`) and, where a router folds, the equivalent `weight` of the stock gate (not
    under FSDP2). To load a saved model, load it with transformers and then call `moe_peft.native.load_routers`.
    `fold_routers` makes stock gates of routers that fold; there is no stock checkpoint of a model with other routers.

    The config's `num_experts_per_tok` becomes what the router uses: 1 with "switch", n with "soft". With "switch",
    gates are probabilities, so `norm_topk_prob` becomes False where the family has that field. A later call goes back
    to both values of the stock gates.

    Args:
        model: a native MoE of transformers whose gates are linear, with a softmax over the top k.
        router: a name in `ROUTERS`, or the settings of a router; its `attention_size` follows from the model.
        top_k: experts per token; None: the stock gates'.
        seed: the seed of the random values.

    Raises:
        ValueError: the model is no native MoE, its gates are of another kind, or a setting does not fit.

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
    sizes, gates = router_sizes(model, "replace_routers"), native_gates(model, "replace_routers")
    settings = RouterSettings(router) if isinstance(router, str) else router
    _check_settings(settings, top_k, max(n for n, _ in sizes))
    try:
        rules = [gate_rule(gate) for gate in gates.values()]
    except InputError as error:
        raise InputError(f"replace_routers: {error}") from error
    config = text_config(model)
    stock = getattr(config, STOCK_FIELD, None) or {"top_k": sizes[0][1], "normalizes": rules[0]}
    made = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for n, _ in sizes:
            spec = _adapter_config(settings, n, top_k or stock["top_k"], stock["normalizes"]).expert_spec("", config)
            keeps = stock["normalizes"] and (spec.normalize_top_k or not hasattr(config, "norm_topk_prob"))
            made.append((make_router(config.hidden_size, n, spec.router), spec.top_k, keeps))
    for (path, gate), (new, k, normalizes) in zip(gates.items(), made, strict=True):
        put_router(gate, new, k, normalizes, _like(model, path))
    keep_token_ids(backbone(model), any(router.by_token_id for router, _, _ in made))
    for holder in (config, base_model(model)):
        if hasattr(holder, "num_experts_per_tok"):
            holder.num_experts_per_tok = made[0][1]
    if hasattr(config, "norm_topk_prob"):
        config.norm_topk_prob = made[0][2]
    setattr(config, CONFIG_FIELD, _options(settings))
    setattr(config, STOCK_FIELD, stock)


def check_router(settings: RouterSettings, num_experts: int, top_k: int) -> None:
    """
    Check, without a model, what `replace_routers` would take.

    Raises:
        ValueError: a setting does not fit.
    """
    _check_settings(settings, None, num_experts)
    _adapter_config(settings, num_experts, top_k, True)


def _check_settings(settings: RouterSettings, top_k: int | None, num_experts: int) -> None:
    """Raise if no native gate can be such a router, or the router has no use for a setting."""
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


def fold_native_routers(model: nn.Module) -> None:
    """
    Make the gates that `replace_routers` replaced plain ones again.

    Raises:
        ValueError: a router does not fold; nothing is changed.
    """
    gates = {path: gate for path, gate in native_gates(model, "fold_routers").items() if isinstance(gate, RoutedGate)}
    try:
        weights = [gate.fold() for gate in gates.values()]
    except InputError as error:
        raise InputError(f"fold_routers: {error}") from error
    for (path, gate), weight_ND in zip(gates.items(), weights, strict=True):
        take_router(gate, weight_ND, _like(model, path))
    for name in (CONFIG_FIELD, STOCK_FIELD):
        if hasattr(text_config(model), name):
            delattr(text_config(model), name)


def native_gates(model: nn.Module, caller: str) -> dict[str, Any]:
    """
    The gates of a native MoE by their paths.

    Raises:
        ValueError: it has none; the message begins with `caller`.
    """
    routers = {id(router) for router in native_routers(model)}
    if not routers:
        raise InputError(f"{caller}: {type(model).__name__} has no router; give a native MoE of transformers")
    return {path: gate for path, gate in model.named_modules() if id(gate) in routers}


def _adapter_config(settings: RouterSettings, n: int, k: int, normalizes: bool) -> MoELoraConfig:
    """The same settings of an adapter that is not trained, which checks them and adjusts top_k."""
    options: dict[str, Any] = {f"router_{name}": value for name, value in _options(settings).items()}
    return MoELoraConfig(
        num_experts=n, top_k=k, normalize_top_k=normalizes, mixing="projection", inference_mode=True, **options
    )


def _options(settings: RouterSettings) -> dict[str, Any]:
    """The settings that a user gives."""
    return {name: value for name, value in asdict(settings).items() if name != "attention_size"}


def _like(model: nn.Module, path: str) -> torch.Tensor:
    """A floating tensor of the gate, or of the block around a gate that has none."""
    while True:
        parameter = next((p for p in model.get_submodule(path).parameters() if p.is_floating_point()), None)
        if parameter is not None:
            return parameter.detach()
        path = path.rpartition(".")[0]
