"""
Router Upcycling: routers whose initial values are a base model's attention heads (the paper's sections 3.2
and 5.2.1), and back from them to plain linear gates.

Legend: H query heads of width w, d hidden size, m routers, n experts, d' = H·w/m the width of a router.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..adapter.layer import MoELoraFFN
from ..contexts import evaluating
from ..routing.routers import AttentionRouter, LinearRouter, Mixture, RouterSettings, folded_weight
from .view import adapter_layers, native_routers, router_sizes


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
    Give the routers initial values from the attention of their layers: queries from the query projection, one key per
    expert from the mean keys of calibration data, heads grouped by the similarity of their mean keys.

    Keys are those of the key projection, before a norm and before rotation, as the router's queries have neither. Its
    query projection may be quantized; a bias there is left out. Where two experts get the same key, as heads that share
    a key head do, each further one is moved by a random hundredth: equal keys would route alike for ever.

    - Adapters with `router_type="attention"` get queries and keys. Those with a linear gate ("linear", "sigmoid", …)
      get the linear gate that the mixture "sum" folds into.
    - The gates of a native MoE become functions of queries and keys, which are then what is trained. A model saved so
      has them beside the gates, for going on; `fold_routers` makes the gates plain weights again.

    Args:
        model: a model with a MoE-LoRA adapter on FFNs, or a native MoE. Adapters are off while data runs through it.
        batches: calibration data, as a data loader yields it: `input_ids` [B, S] and, where there is padding,
            `attention_mask` [B, S].
        num_heads: m, for routers that are no attention routers yet. None: n.
        adapter_name: the adapter; the active one if None.
        seed: of the random part.

    Raises:
        ValueError: the model has no router, no attention with `q_proj` and `k_proj` stands before one, the sizes do not
            fit, or there is no data.
    """
    router_sizes(model, "init_attention_routers")
    places = _adapter_places(model, adapter_name) if adapter_layers(model) else _native_places(model)
    attentions = [_attention_before(model, path) for path in places]
    keys = _mean_keys(model, attentions, batches)
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for router, attention, mean_keys_K in zip(places.values(), attentions, keys, strict=True):
        own = router.settings if isinstance(router, AttentionRouter) else RouterSettings(num_heads=num_heads)
        n = int((router.key if isinstance(router, AttentionRouter) else router.weight).shape[0])
        if not isinstance(router, AttentionRouter) and (num_heads or n) > n:
            raise ValueError(f"init_attention_routers: num_heads={num_heads}: a linear gate takes at most n={n} heads")
        weight_HD, head_dim = _weight(_linear(attention.q_proj)), int(attention.head_dim)
        if weight_HD.shape[0] != attention.config.num_attention_heads * head_dim:
            raise ValueError(
                f"init_attention_routers: q_proj of {type(attention).__name__} gives more than queries; use random ones"
            )
        weights.append(
            attention_weights(weight_HD, mean_keys_K, head_dim, own.num_heads or n, n, own.mixture, generator)
        )
    for router, (query, key) in zip(places.values(), weights, strict=True):
        if isinstance(router, AttentionRouter):
            router.query.copy_(query)
            router.key.copy_(key)
        elif isinstance(router, LinearRouter):
            router.weight.copy_(folded_weight(query.double(), key.double()))
        else:
            _to_attention_gate(router, query, key)


@torch.no_grad()
def fold_routers(model: nn.Module, adapter_name: str | None = None) -> None:
    """
    Turn attention routers (mixture "sum", one key per expert) and LocMoE's into the linear gates with the same logits.

    Of a native MoE, the gates that `init_attention_routers` changed become plain weights again; of an adapter, the
    routers and the config's `router_type`. What is linear already stays.

    Raises:
        ValueError: a router does not fold; the message says why. Nothing has been changed then.
    """
    router_sizes(model, "fold_routers")
    if not adapter_layers(model):
        for router in native_routers(model):
            if isinstance(router, _AttentionGate):
                _to_linear_gate(router)
        return
    name = _adapter(model, adapter_name, "fold_routers")
    layers = [layer for layer in adapter_layers(model) if name in layer.moe_lora_router]
    weights = [layer.router(name).fold() for layer in layers]
    for layer, weight_ND in zip(layers, weights, strict=True):
        if isinstance(layer.router(name), LinearRouter):
            continue
        spec, old = layer.moe_lora_spec[name], layer.router(name)
        expert = next(layer.moe_lora_A[name].parameters())
        own = list(old.parameters()) or [expert]
        trained = all(p.requires_grad for p in own)
        settings = replace(spec.router, type="linear", num_heads=None, mixture="sum")
        layer.moe_lora_spec[name] = replace(spec, router=settings)
        layer.put_router(name)
        router = cast(LinearRouter, layer.router(name))
        router.weight.data = weight_ND.to(expert.device, torch.float32)
        router.requires_grad_(trained).train(old.training)
    config = copy.copy(cast(Any, model).peft_config[name])  # another adapter may have the same object
    if config.router_type in ("attention", "locmoe"):
        config.router_type, config.router_num_heads, config.router_mixture = "linear", None, "sum"
        cast(Any, model).peft_config[name] = config


def attention_weights(
    weight_HD: torch.Tensor,
    mean_keys_K: torch.Tensor,
    head_dim: int,
    m: int,
    n: int,
    mixture: Mixture = "sum",
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Queries and keys of an attention router (Router Upcycling, equations 4 and 5; section 5.2.1 for m ≠ n).

    Heads are concatenated to m groups. Where m does not divide H, each head is first split into as many parts as it
    takes. With fewer routers than experts, the heads' keys are repeated n/m times and grouped to n; with more, an
    expert has m/n keys.

    Args:
        weight_HD: the query projection [H·w, d].
        mean_keys_K: mean keys [H'·w], H' key heads; each serves H/H' query heads.

    Returns:
        query [m, d', d] (with the mixture "sum" their sum, [1, d', d]) and key [n, max(1, m/n), d'].

    Raises:
        ValueError: m does not divide H·w, or neither of m and n divides the other.
    """
    heads, (size, d) = weight_HD.shape[0] // head_dim, weight_HD.shape
    parts = m // math.gcd(heads, m)
    if head_dim % parts or max(m, n) % min(m, n):
        raise ValueError(
            f"init_attention_routers: num_heads={m}: must divide the attention's size {size}, and divide, or be a "
            f"multiple of, the {n} experts"
        )
    key_heads = mean_keys_K.numel() // head_dim
    keys_PW = mean_keys_K.view(key_heads, head_dim).repeat_interleave(heads // key_heads, dim=0)
    keys_PW = keys_PW.reshape(heads * parts, -1)
    groups = group_heads(keys_PW, m)
    query_MWD = weight_HD.view(heads * parts, -1, d)[torch.tensor(groups)].flatten(1, 2)
    if m < n:
        keys_PW = keys_PW.repeat(n // m, 1)
        groups = group_heads(keys_PW, n)
    key_NCW = keys_PW[torch.tensor(groups)].view(n, max(1, m // n), -1)
    key_NCW = key_NCW + _separation(key_NCW.flatten(1), generator).view_as(key_NCW)
    return (query_MWD.sum(0, keepdim=True) if mixture == "sum" else query_MWD), key_NCW


def group_heads(keys_HW: torch.Tensor, groups: int) -> list[list[int]]:
    """
    Heads in groups of one size, most similar first: the most similar free pair begins a group, and the free head that
    is most similar to the group's heads, on average, joins it until it is full.

    Args:
        keys_HW: mean keys [H, w].
    """
    size = keys_HW.shape[0] // groups
    unit_HW = nn.functional.normalize(keys_HW.double().cpu(), dim=1)
    similarity = (unit_HW @ unit_HW.T).round(decimals=9)  # equal heads are equal, whatever the order of summation
    heads = keys_HW.shape[0]
    if size == 1:
        return [[head] for head in range(heads)]
    pairs = np.where(np.triu(np.ones((heads, heads), dtype=bool), 1), similarity.numpy(), -np.inf)
    taken = np.zeros(heads, dtype=bool)
    result = []
    for _ in range(groups):
        group = [int(i) for i in np.unravel_index(pairs.argmax(), pairs.shape)]
        taken[group] = True
        while len(group) < size:
            likeness = np.where(taken, -np.inf, similarity.numpy()[:, group].mean(1))
            group.append(int(likeness.argmax()))
            taken[group[-1]] = True
        pairs[group] = pairs[:, group] = -np.inf
        result.append(group)
    return result


def _separation(keys_NK: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Noise of a hundredth of their size for keys that another expert has already, zero for the rest."""
    near_NN = torch.cdist(keys_NK.double(), keys_NK.double()) <= 1e-6 * keys_NK.double().norm(dim=1, keepdim=True)
    again_N1 = near_NN.tril(-1).any(1, keepdim=True)
    noise_NK = torch.randn(keys_NK.shape, generator=generator).to(keys_NK)
    return again_N1 * noise_NK * 0.01 * keys_NK.pow(2).mean(1, keepdim=True).sqrt()


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


def _adapter_places(model: nn.Module, adapter_name: str | None) -> dict[str, Any]:
    name = _adapter(model, adapter_name, "init_attention_routers")
    places = {
        path: layer.router(name)
        for path, layer in model.named_modules()
        if isinstance(layer, MoELoraFFN) and name in layer.moe_lora_router
    }
    for path, router in places.items():
        if not isinstance(router, (AttentionRouter, LinearRouter)):
            raise ValueError(
                f"init_attention_routers: {path}: router_type={router.settings.type!r} cannot take an attention's "
                "values; use 'attention', or one with a linear gate"
            )
    if not places:
        raise ValueError(f"init_attention_routers: adapter {name!r} has no routers at FFNs; target FFN blocks")
    return places


def _native_places(model: nn.Module) -> dict[str, Any]:
    routers = native_routers(model)
    return {path: module for path, module in model.named_modules() if any(module is router for router in routers)}


def _attention_before(model: nn.Module, path: str) -> Any:
    """The attention of the layer that the FFN or gate at `path` is part of."""
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
    """The weight [out, in] that a linear stands for, float32. A quantized one is asked for its products."""
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

    whole: Any = model
    backbone = (whole.get_base_model() if hasattr(model, "get_base_model") else whole).base_model
    device = next(backbone.parameters()).device
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
                backbone(**given, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        for layer, disabled in adapters:
            layer._disable_adapters = disabled
    if not tokens:
        raise ValueError("init_attention_routers: batches: no tokens; give at least one batch of calibration data")
    return [(total / tokens.to(total.device)).float() for total in sums]


class _AttentionGate:
    """
    What makes a native MoE's gate a function of queries and keys: a class in between, whose `weight` is computed. The
    state dict has `weight` beside them, so that a checkpoint is the right model for those who know nothing of this.
    """

    attention_query: nn.Parameter
    attention_key: nn.Parameter

    @property
    def weight(self) -> torch.Tensor:
        return folded_weight(self.attention_query, self.attention_key)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        destination[f"{prefix}weight"] = self.weight.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}attention_query" in state_dict:
            state_dict.pop(f"{prefix}weight", None)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple:  # the class has no name to be found by
        return _new_gate, (type(self).__bases__[1],), self.__dict__


@functools.cache
def _attention_class(cls: Any) -> Any:
    return type(f"Attention{cls.__name__}", (_AttentionGate, cls), {})


def _new_gate(cls: type) -> Any:
    attention = _attention_class(cls)
    return attention.__new__(attention)


def _to_attention_gate(gate: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    trained = all(p.requires_grad for p in gate.parameters())
    like = gate.weight.detach()
    if not isinstance(gate, _AttentionGate):
        del gate.weight
        gate.__class__ = _attention_class(type(gate))  # type: ignore[arg-type]
    gate.attention_query = nn.Parameter(query.to(like), requires_grad=trained)
    gate.attention_key = nn.Parameter(key.to(like), requires_grad=trained)


def _to_linear_gate(gate: Any) -> None:
    weight, trained = gate.weight.detach(), all(p.requires_grad for p in gate.parameters())
    del gate.attention_query, gate.attention_key
    gate.__class__ = type(gate).__bases__[1]
    gate.weight = nn.Parameter(weight, requires_grad=trained)
