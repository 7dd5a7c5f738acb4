"""
Router Upcycling: initializes routers from a base model's attention heads (sections 3.2 and 5.2.1 of the paper).

`init_attention_routers` changes a model. `attention_gates` computes the gates of a MoE before it is made. Then come
helpers to find a model's routers and to read its attentions.

Legend: H query heads of width w, K = H'·w of all key heads, d hidden size, m routers, n experts, d' = H·w/m the width
of a router.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..adapter.layers import MoELoraFFN, without_adapters
from ..routing.attention_heads import attention_weights, fitting_heads
from ..routing.routers import Router, RouterSettings, folded_weight
from ..utils.distributed import check_whole
from ..utils.messages import InputError
from ..utils.torch_contexts import double, evaluating
from .gates import is_adapted
from .introspection import base_model, base_passes, text_config
from .layer import adapter_layers, native_layers
from .native_routers import replace_routers


@torch.no_grad()
def init_attention_routers(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_heads: int | None = None,
    adapter_name: str | None = None,
    dense: nn.Module | None = None,
) -> None:
    """
    Initialize the routers from the attention of their layers. Queries come from the query projection. One key per
    expert comes from the mean keys on calibration data. Heads are grouped by the similarity of their mean keys.

    Keys are the outputs of the key projection, before any norm or rotation, because the router's queries have neither.
    The query projection may be quantized. Its bias is ignored. If experts would get the same key, as with query heads
    that share a key head, the key is divided among them (`moe_peft.routing.attention_heads.share_keys`).

    - Adapters with `router_type="attention"` get queries and keys. Adapters with a linear gate ("linear", "sigmoid", …)
      get the linear gate equivalent to the mixture "sum".
    - The gates of a native MoE become attention routers with the mixture "sum", to be trained instead; see
      `replace_routers`. For other settings, such as the mixture "max", call `replace_routers` first: its routers are
      then initialized like an adapter's. `fold_routers` turns routers that fold into plain gates again.

    Args:
        model: a model with a MoE-LoRA adapter on FFNs, or a native MoE. Adapters are disabled while the data runs.
        batches: calibration data, as a data loader yields it: `input_ids` [B, S] and, if there is padding,
            `attention_mask` [B, S].
        num_heads: m, for routers that are not attention routers yet. None: n.
        adapter_name: the adapter; the active one if None.
        dense: for a native MoE, the dense model it was upcycled from. Its attention is read instead, because the
            paper's keys are the dense model's. Keys of a MoE with perturbed experts (`drop`, `noise`) differ.

    Raises:
        ValueError: the model has no router, a router has no attention with `q_proj` and `k_proj` before it, the sizes
            do not fit, or there is no data.
    """
    check_whole(model, "init_attention_routers")
    layers = _checked_layers(model, adapter_name)
    source = model if dense is None else dense
    attentions = [_counterpart(model, attention_before(model, layer.path), source) for layer in layers]
    weights = _weights(source, attentions, batches, [(_heads(layer, num_heads), layer.num_experts) for layer in layers])
    if not all(isinstance(layer.router, Router) for layer in layers):
        replace_routers(model, RouterSettings("attention", num_heads=num_heads))
    for layer, (query_MWD, key_NCW) in zip(layers, weights, strict=True):
        layer.router.set_heads(query_MWD, key_NCW)


@torch.no_grad()
def attention_gates(
    dense: nn.Module, batches: Iterable[Mapping[str, Any]], num_experts: int, num_heads: int | None = None
) -> list[torch.Tensor]:
    """
    Return, for each layer of a dense model, the linear gate [n, d] equivalent to an attention router with the mixture
    "sum".

    Args:
        dense: a dense model.
        batches: see `init_attention_routers`.
        num_experts: n.
        num_heads: m, at most n. None: the largest number that fits, see `fitting_heads`.
    """
    attentions = _attentions(dense)
    if num_heads is None:
        heads = [fitting_heads(a.config.num_attention_heads, int(a.head_dim), num_experts) for a in attentions]
    else:
        heads = [_linear_heads(num_heads, num_experts)] * len(attentions)
    sizes = [(m, num_experts) for m in heads]
    weights = _weights(dense, attentions, batches, sizes)
    return [folded_weight(double(query_MWD).sum(0), double(key_NCW)).cpu() for query_MWD, key_NCW in weights]


def _attentions(dense: nn.Module) -> list[Any]:
    """Return the attentions of all layers of a dense model."""
    attentions = [module for module in base_model(dense).modules() if is_attention(module)]
    if len(attentions) != text_config(dense).num_hidden_layers:
        raise no_attention(dense)
    return attentions


def _weights(
    model: nn.Module, attentions: list[Any], batches: Iterable[Mapping[str, Any]], sizes: list[tuple[int, int]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return queries [m, d', d] and keys [n, c, d'] from each attention. `sizes` holds (m, n)."""
    means = attention_means(model, attentions, batches)
    return [
        attention_weights(query_weight(attention), mean.key_K, mean.input_D, int(attention.head_dim), m, n)
        for attention, mean, (m, n) in zip(attentions, means, sizes, strict=True)
    ]


def _counterpart(model: nn.Module, path: str, source: nn.Module) -> Any:
    """Return the attention of `source` that corresponds to `path` in `model`."""
    attention = model.get_submodule(path)
    if source is model:
        return attention
    path = next(name for name, module in base_model(model).named_modules() if module is attention)
    try:
        counterpart: Any = base_model(source).get_submodule(path)
    except AttributeError:
        raise no_attention(source) from None
    shape = cast(Any, attention).q_proj.weight.shape
    if not is_attention(counterpart) or counterpart.q_proj.weight.shape != shape:
        raise InputError(
            f"init_attention_routers: dense: {type(source).__name__} has no attention like that at {path!r}; give the "
            "dense model that the MoE was made from"
        )
    return counterpart


# --- a model's routers ------------------------------------------------------------------------------------------------


def _checked_layers(model: nn.Module, adapter_name: str | None) -> list[Any]:
    """Return the routed layers on FFNs. Raise if a router cannot be initialized from an attention."""
    layers: list[Any]
    if is_adapted(model, adapter_name, "init_attention_routers"):
        every = adapter_layers(model, adapter_name, "init_attention_routers")
        layers = [layer for layer in every if isinstance(layer.module, MoELoraFFN)]
        if not layers:
            raise InputError(
                f"init_attention_routers: adapter {every[0].adapter!r} has no routers on FFNs; target FFN blocks"
            )
    else:
        layers = native_layers(model)
    for layer in layers:
        if isinstance(layer.router, Router) and not layer.router.takes_attention:
            raise InputError(
                f"init_attention_routers: {layer.path}: router_type={layer.router.settings.type!r} cannot be "
                "initialized from an attention; use 'attention', or a router with a linear gate"
            )
    return layers


def _heads(layer: Any, num_heads: int | None) -> int:
    """
    Return m, from the settings of an attention router. For a native MoE's own gate, return `num_heads` or n. For a
    linear gate, m is at most n.
    """
    router, n = layer.router, layer.num_experts
    if not isinstance(router, Router):
        return num_heads or n
    if not router.needs_attention:
        return _linear_heads(num_heads, n)
    m = router.settings.num_heads or n
    if num_heads not in (None, m):
        raise InputError(
            f"init_attention_routers: num_heads={num_heads}: these attention routers have {m}; leave it out, or set "
            "router_num_heads when they are made"
        )
    return m


def _linear_heads(num_heads: int | None, n: int) -> int:
    if (num_heads or n) > n:
        raise InputError(f"init_attention_routers: num_heads={num_heads}: a linear gate takes at most num_experts={n}")
    return num_heads or n


# --- reading attentions ----------------------------------------------------------------------------------------------


class AttentionMeans(NamedTuple):
    """Means over all real tokens, float32."""

    key_K: torch.Tensor  # of the key projection's output
    input_D: torch.Tensor


def is_attention(module: nn.Module) -> bool:
    """Return whether a module's queries and keys can be read."""
    return all(hasattr(module, name) for name in ("q_proj", "k_proj", "head_dim"))


def attention_before(model: nn.Module, path: str) -> str:
    """Return the path of the attention in the layer of the FFN or gate at `path`."""
    while path:
        path = path.rpartition(".")[0]
        attentions = {
            name: module
            for name, module in model.get_submodule(path).named_modules()
            if hasattr(module, "q_proj") and hasattr(module, "k_proj")
        }
        if len(attentions) == 1 and all(map(is_attention, attentions.values())):
            return f"{path}.{next(iter(attentions))}".lstrip(".")
        if attentions:
            break
    raise no_attention(model)


def no_attention(model: nn.Module) -> InputError:
    return InputError(
        f"init_attention_routers: {type(model).__name__} has no attention with q_proj, k_proj and head_dim before each "
        "of its FFNs; use random routers"
    )


def query_weight(attention: Any) -> torch.Tensor:
    """
    Return the weight of the query projection [H·w, d], float32. A quantized weight is computed from the projection's
    outputs.
    """
    linear: Any = without_adapters(attention.q_proj)
    weight_HD = _weight(linear)
    if weight_HD.shape[0] != attention.config.num_attention_heads * int(attention.head_dim):
        raise InputError(
            f"init_attention_routers: q_proj of {type(attention).__name__} returns more than queries; use random "
            "routers"
        )
    return weight_HD


def _weight(linear: Any) -> torch.Tensor:
    if type(linear.weight) is nn.Parameter and linear.weight.is_floating_point():
        return linear.weight.float()
    bias = getattr(linear, "bias", None)
    dtype = torch.float32 if bias is None else bias.dtype
    unit_DD = torch.eye(linear.in_features, dtype=dtype, device=linear.weight.device)
    with evaluating(linear):
        columns_DH = linear(unit_DD).float()
    return (columns_DH if bias is None else columns_DH - bias.float()).T


def attention_means(
    model: nn.Module, attentions: list[Any], batches: Iterable[Mapping[str, Any]]
) -> list[AttentionMeans]:
    """Return the means of each attention over all real tokens of the batches, with adapters disabled."""
    keys: list[Any] = [0.0] * len(attentions)
    inputs: list[Any] = [0.0] * len(attentions)
    tokens: Any = [0.0] * len(attentions)

    def add(i: int, batch: Any, mask_BS: torch.Tensor, x_BSD: torch.Tensor, keys_BSK: torch.Tensor) -> None:
        weights_BS1 = double(mask_BS).unsqueeze(-1)
        keys[i] = keys[i] + (double(keys_BSK) * weights_BS1).sum(dim=(0, 1))
        inputs[i] = inputs[i] + (double(x_BSD) * weights_BS1).sum(dim=(0, 1))
        tokens[i] = tokens[i] + weights_BS1.sum()

    base_passes(model, batches, [without_adapters(attention.k_proj) for attention in attentions], add)
    if not tokens[0]:
        raise InputError("init_attention_routers: batches: no tokens; give at least one batch of calibration data")
    return [
        AttentionMeans((key / count).float(), (total / count).float())
        for key, total, count in zip(keys, inputs, tokens, strict=True)
    ]
