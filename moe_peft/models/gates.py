"""Operations on all gates of a model: set them to given weights, to equivalent linear gates, or to 1/n for a while."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any, Literal, cast

import torch
from torch import nn

from ..adapter.router_outputs import sync_config
from ..routing.routers import RouterSettings
from ..utils.distributed import check_whole
from ..utils.messages import InputError
from .introspection import text_config
from .layer import AdapterLayer, adapter_layers, native_layers, routed_layers

# Fields of a native MoE's config while routers replace its gates: the routers' settings, and the gates' own top_k and
# normalization.
CONFIG_FIELD = "moe_peft_router"
STOCK_FIELD = "moe_peft_stock_gate"


@torch.no_grad()
def fold_routers(model: nn.Module, adapter_name: str | None = None) -> None:
    """
    Replace routers with equivalent linear gates: attention routers (mixture "sum", one key per expert), LocMoE's,
    Switch's (without its capacity limit), and any other router that folds.

    In an adapter, the routers and the config's `router_type` change. In a native MoE, the gates replaced by
    `replace_routers` or `init_attention_routers` become the family's own again. The model then saves to a checkpoint
    that transformers loads without this package. Linear gates stay unchanged.

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE.
        adapter_name: the adapter; the active one if None.

    Raises:
        ValueError: a router does not fold. The message says why, and nothing is changed.

    Example:

    ```python
    >>> from peft import get_peft_model
    >>> from transformers import AutoModelForCausalLM
    >>> from moe_peft import MoELoraConfig, fold_routers
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> model = get_peft_model(
    ...     base,
    ...     MoELoraConfig(
    ...         router_type="attention", num_experts=4, task_type="CAUSAL_LM"
    ...     ),
    ... )
    >>> fold_routers(model)
    >>> model.peft_config["default"].router_type
    'linear'
    ```
    """
    check_whole(model, "fold_routers")
    if is_adapted(model, adapter_name, "fold_routers"):
        layers = adapter_layers(model, adapter_name, "fold_routers")
        put_gates(model, layers, "linear", [layer.fold() for layer in layers])
        return
    gates = native_layers(model)
    try:
        weights = [gate.fold() for gate in gates]
    except InputError as error:
        raise InputError(f"fold_routers: {error}") from error
    for gate, weight_ND in zip(gates, weights, strict=True):
        gate.set_gate(weight_ND)
    for name in (CONFIG_FIELD, STOCK_FIELD):
        if hasattr(text_config(model), name):
            delattr(text_config(model), name)


def is_adapted(model: nn.Module, adapter_name: str | None, caller: str) -> bool:
    """Return whether the routers of a model are an adapter's, not a native MoE's."""
    adapted = isinstance(routed_layers(model, caller)[0], AdapterLayer)
    if not adapted and adapter_name is not None:
        raise InputError(f"{caller}: adapter_name={adapter_name!r}: a native MoE has none; leave it out")
    return adapted


def put_gates(
    model: nn.Module, layers: Sequence[AdapterLayer], router_type: str, weights: Sequence[torch.Tensor]
) -> None:
    """
    Set the routers of an adapter to these weights [n, d]. A router of another kind than `router_type` is replaced,
    unless both are linear gates.
    """
    replaced = [layer.set_gate(weight_ND, router_type) for layer, weight_ND in zip(layers, weights, strict=True)]
    if not any(replaced):
        return
    configs = cast(Any, model).peft_config
    config = copy.copy(configs[layers[0].adapter])  # another adapter may share the object
    for field in fields(RouterSettings):
        if field.name not in ("jitter_noise", "attention_size"):
            setattr(config, f"router_{field.name}", field.default)
    config.router_type = router_type
    configs[layers[0].adapter] = config


@contextmanager
def uniform_gates(model: nn.Module, mixing: Literal["output", "projection"] | None = None) -> Iterator[None]:
    """
    Set the gates of all experts with updates to 1/n inside the `with` block. With mixing `"projection"`, the layer then
    computes the mean of the LoRAs' updates.

    Args:
        mixing: mixing of the adapter inside the block; None: unchanged.
    """
    with ExitStack() as stack:
        stack.callback(_sync_configs, model)  # runs last, after the routers are restored
        for layer in routed_layers(model):
            stack.enter_context(layer.with_uniform_gates(mixing))
        yield


def _sync_configs(model: nn.Module) -> None:
    for module in model.modules():
        sync_config(module, getattr(module, "peft_config", {}))
