"""
Router Upcycling: initialises routers from a base model's attention heads (the paper's sections 3.2 and 5.2.1), and
folds them back into plain linear gates.

Legend: H query heads of width w, d hidden size, m routers, n experts, d' = H·w/m the width of a router.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..adapter.ffn_layer import MoELoraFFN
from ..contexts import evaluating
from ..routing.attention_heads import attention_weights
from ..routing.routers import LinearRouter, Mixture, Router, RouterSettings
from .attention_gate import AttentionGate, to_attention_gate, to_linear_gate
from .view import adapter_layers, backbone, native_routers, router_sizes


@torch.no_grad()
def init_attention_routers(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_heads: int | None = None,
    adapter_name: str | None = None,
    seed: int = 0,
) -> None:
    """
    Initialise the routers from the attention of their layers. Queries come from the query projection, and one key per
    expert from the mean keys on calibration data. Heads are grouped by the similarity of their mean keys.

    Keys are the outputs of the key projection, before any norm or rotation, because the router's queries have neither.
    The query projection may be quantized; its bias is ignored. Where experts would get the same key, as with heads that
    share a key head, noise of a hundredth of the key's size is added to all but the first: experts with equal keys
    would always get identical logits.

    - Adapters with `router_type="attention"` get queries and keys. Those with a linear gate ("linear", "sigmoid", …)
      get the linear gate that the mixture "sum" folds into.
    - The gates of a native MoE become functions of queries and keys, which are trained in their place. A saved model
      has them beside the gates, so that training can continue; `fold_routers` turns the gates into plain weights again.

    Args:
        model: a model with a MoE-LoRA adapter on FFNs, or a native MoE. Adapters are disabled while the data runs.
        batches: calibration data, as a data loader yields it: `input_ids` [B, S] and, if there is padding,
            `attention_mask` [B, S].
        num_heads: m, for routers that are not attention routers yet. None: n.
        adapter_name: the adapter; the active one if None.
        seed: the seed of the noise.

    Raises:
        ValueError: the model has no router, a router has no attention with `q_proj` and `k_proj` before it, the sizes
            do not fit, or there is no data.
    """
    router_sizes(model, "init_attention_routers")
    places = _adapter_places(model, adapter_name) if adapter_layers(model) else _native_places(model)
    attentions = [_attention_before(model, path) for path in places]
    keys = _mean_keys(model, attentions, batches)
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for place, attention, mean_keys_K in zip(places.values(), attentions, keys, strict=True):
        m, n = place.heads(num_heads), place.num_experts
        weight_HD, head_dim = _weight(_linear(attention.q_proj)), int(attention.head_dim)
        if weight_HD.shape[0] != attention.config.num_attention_heads * head_dim:
            raise ValueError(
                f"init_attention_routers: q_proj of {type(attention).__name__} returns more than queries; use random "
                "routers"
            )
        weights.append(attention_weights(weight_HD, mean_keys_K, head_dim, m, n, place.mixture, generator))
    for place, (query, key) in zip(places.values(), weights, strict=True):
        place.set_heads(query, key)


@torch.no_grad()
def fold_routers(model: nn.Module, adapter_name: str | None = None) -> None:
    """
    Replace routers with equivalent linear gates: attention routers (mixture "sum", one key per expert), LocMoE's,
    Switch's (without its capacity limit), and any other router that folds.

    In an adapter, the routers and the config's `router_type` change. In a native MoE, the gates that
    `init_attention_routers` replaced become plain weights again. Linear gates stay as they are.

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE.
        adapter_name: the adapter; the active one if None.

    Raises:
        ValueError: a router does not fold; the message says why, and nothing is changed.
    """
    router_sizes(model, "fold_routers")
    if not adapter_layers(model):
        for router in native_routers(model):
            if isinstance(router, AttentionGate):
                to_linear_gate(router)
        return
    name = _adapter(model, adapter_name, "fold_routers")
    layers = [layer for layer in adapter_layers(model) if name in layer.moe_lora_router]
    specs = [layer.moe_lora_spec[name] for layer in layers]
    weights = [
        layer.router(name).fold(spec.top_k, spec.normalize_top_k) for layer, spec in zip(layers, specs, strict=True)
    ]
    for layer, spec, weight_ND in zip(layers, specs, weights, strict=True):
        old = layer.router(name)
        if old.linear_gate:
            continue
        expert = next(layer.moe_lora_A[name].parameters())
        own = list(old.parameters()) or [expert]
        trained = all(p.requires_grad for p in own)
        settings = RouterSettings(jitter_noise=spec.router.jitter_noise)
        layer.moe_lora_spec[name] = replace(spec, router=settings)
        layer.put_router(name)
        router = cast(LinearRouter, layer.router(name))
        router.weight.data = weight_ND.to(expert.device, torch.float32)
        router.requires_grad_(trained).train(old.training)
    config = copy.copy(cast(Any, model).peft_config[name])  # another adapter may share the object
    if not config.router_class.linear_gate:
        for field in fields(RouterSettings):
            if field.name not in ("jitter_noise", "attention_size"):
                setattr(config, f"router_{field.name}", field.default)
        cast(Any, model).peft_config[name] = config


# --- the places in a model ------------------------------------------------------------------------------------------


def _adapter(model: nn.Module, adapter_name: str | None, caller: str) -> str:
    """The adapter of that name; the active one if None."""
    layers = adapter_layers(model)
    known = {name for layer in layers for name in layer.moe_lora_router}
    active = (name for layer in layers for name in layer.active_adapters if name in known)
    found = next(active, None) if adapter_name is None else adapter_name
    if found not in known:
        raise ValueError(
            f"{caller}: adapter_name={adapter_name!r}: no such adapter with routers; there is {sorted(known)}"
        )
    return found


class _AdapterPlace:
    """An adapter's router. An attention router's own settings give its number of heads."""

    def __init__(self, router: Router) -> None:
        self.router, self.num_experts = router, router.num_experts
        self.mixture = router.settings.mixture if router.needs_attention else "sum"

    def heads(self, num_heads: int | None) -> int:
        if self.router.needs_attention:
            return self.router.settings.num_heads or self.num_experts
        return _linear_heads(num_heads, self.num_experts)

    def set_heads(self, query: torch.Tensor, key: torch.Tensor) -> None:
        self.router.set_heads(query, key)


class _NativePlace:
    """A native MoE's gate, which becomes a function of queries and keys."""

    mixture: Mixture = "sum"

    def __init__(self, gate: Any) -> None:
        self.gate, self.num_experts = gate, int(gate.weight.shape[0])

    def heads(self, num_heads: int | None) -> int:
        return _linear_heads(num_heads, self.num_experts)

    def set_heads(self, query: torch.Tensor, key: torch.Tensor) -> None:
        to_attention_gate(self.gate, query, key)


def _linear_heads(num_heads: int | None, n: int) -> int:
    if (num_heads or n) > n:
        raise ValueError(f"init_attention_routers: num_heads={num_heads}: a linear gate takes at most n={n} heads")
    return num_heads or n


def _adapter_places(model: nn.Module, adapter_name: str | None) -> dict[str, Any]:
    name = _adapter(model, adapter_name, "init_attention_routers")
    places = {
        path: _AdapterPlace(layer.router(name))
        for path, layer in model.named_modules()
        if isinstance(layer, MoELoraFFN) and name in layer.moe_lora_router
    }
    for path, place in places.items():
        if not place.router.takes_attention:
            raise ValueError(
                f"init_attention_routers: {path}: router_type={place.router.settings.type!r} cannot be "
                "initialised from an attention; use 'attention', or a router with a linear gate"
            )
    if not places:
        raise ValueError(f"init_attention_routers: adapter {name!r} has no routers on FFNs; target FFN blocks")
    return places


def _native_places(model: nn.Module) -> dict[str, Any]:
    routers = native_routers(model)
    return {
        path: _NativePlace(gate) for path, gate in model.named_modules() if any(gate is router for router in routers)
    }


def _attention_before(model: nn.Module, path: str) -> Any:
    """The attention of the layer that the FFN or gate at `path` belongs to."""
    while path:
        path = path.rpartition(".")[0]
        found = [m for m in model.get_submodule(path).modules() if hasattr(m, "q_proj") and hasattr(m, "k_proj")]
        if len(found) == 1 and hasattr(found[0], "head_dim"):
            return found[0]
        if found:
            break
    raise ValueError(
        f"init_attention_routers: {type(model).__name__} has no attention with q_proj, k_proj and head_dim before each "
        "of its FFNs; use random routers"
    )


def _linear(module: nn.Module) -> Any:
    while isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    return module


def _weight(linear: Any) -> torch.Tensor:
    """The weight [out, in] of a linear, float32. For a quantized one it is computed from its outputs."""
    if type(linear.weight) is nn.Parameter and linear.weight.is_floating_point():
        return linear.weight.float()
    bias = getattr(linear, "bias", None)
    dtype = torch.float32 if bias is None else bias.dtype
    unit_DD = torch.eye(linear.in_features, dtype=dtype, device=linear.weight.device)
    with evaluating(linear):
        columns_DH = linear(unit_DD).float()
    return (columns_DH if bias is None else columns_DH - bias.float()).T


def _mean_keys(model: nn.Module, attentions: list[Any], batches: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Mean output of each attention's key projection over all real tokens of the batches, float32."""
    sums: list[Any] = [0.0] * len(attentions)
    tokens: Any = 0.0
    mask_BS1 = torch.ones(())

    def adder(i: int) -> Any:
        def hook(module: nn.Module, args: tuple, keys_BSK: torch.Tensor) -> None:
            sums[i] = sums[i] + (keys_BSK.double() * mask_BS1.to(keys_BSK.device)).sum(dim=(0, 1))

        return hook

    device = next(backbone(model).parameters()).device
    adapters = [(layer, layer._disable_adapters) for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    handles = [_linear(a.k_proj).register_forward_hook(adder(i)) for i, a in enumerate(attentions)]
    try:
        for layer, _ in adapters:
            layer._disable_adapters = True
        for batch in batches:
            given = {k: batch[k].to(device) for k in ("input_ids", "attention_mask", "position_ids") if k in batch}
            mask_BS1 = given.get("attention_mask", torch.ones_like(given["input_ids"])).unsqueeze(-1).double()
            tokens = tokens + mask_BS1.sum()
            with evaluating(model):
                backbone(model)(**given, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        for layer, disabled in adapters:
            layer._disable_adapters = disabled
    if not tokens:
        raise ValueError("init_attention_routers: batches: no tokens; give at least one batch of calibration data")
    return [(total / tokens.to(total.device)).float() for total in sums]
