"""Load the routers that replace a native MoE's gates (`replace_routers`). transformers does not load them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from ..models.gates import CONFIG_FIELD, STOCK_FIELD
from ..models.introspection import text_config
from ..models.layer import native_layers
from ..models.native_routers import replace_routers
from ..models.routed_gate import RoutedGate
from ..routing.routers import RouterSettings
from ..utils.io import open_safetensors, reading, refused_by_libraries
from ..utils.messages import InputError
from .safetensors_io import Checkpoint

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_ROUTER = re.compile(r"\.(moe_router\..+)$")


def load_routers(model: Any, folder: str | os.PathLike) -> None:
    """
    Replace a native MoE's gates by the routers it was saved with (`replace_routers`).

    `from_pretrained` alone leaves gates random if the routers do not fold into plain gates. transformers then reports
    missing weights.

    Args:
        model: the native MoE that transformers loaded from `folder`.
        folder: folder written by `save_pretrained`, with the routers' settings in its config.

    Raises:
        ValueError: the config names no routers, or the folder lacks their weights.
    """
    layers = native_layers(model, "load_routers")
    settings = getattr(text_config(model), CONFIG_FIELD, None)
    if settings is None:
        raise InputError(f"{os.fspath(folder)!r}: its config names no routers; use the model as it is")
    with reading(f"{os.fspath(folder)!r}: {CONFIG_FIELD} in its config", "save the model again"):
        made = RouterSettings(**settings)
        stock = getattr(text_config(model), STOCK_FIELD, None)
        _ = stock and (int(stock["top_k"]), stock["normalizes"])
    with refused_by_libraries(f"{os.fspath(folder)!r}: {CONFIG_FIELD} in its config", "save the model again"):
        replace_routers(model, made, top_k=layers[0].top_k)
    state = router_tensors(model, folder)
    for layer in layers:
        start = f"{layer.path}."
        of_gate = {name.removeprefix(start): w for name, w in state.items() if name.startswith(start)}
        missing = layer.module.load_state_dict(of_gate, strict=False).missing_keys
        if missing:
            raise InputError(f"{os.fspath(folder)!r} has no {start}{missing[0]}; is it complete?")


def router_tensors(model: Any, folder: str | os.PathLike) -> dict[str, torch.Tensor]:
    """
    Read the tensors of the routers that replaced gates, by their names in `model`. Names on disk are the names of the
    family's checkpoints, up to the router itself.
    """
    stored = Checkpoint(Path(folder))
    gates = {
        _LAYER.search(f".{layer.path}.").group(1): layer.path  # type: ignore[union-attr]
        for layer in native_layers(model)
        if isinstance(layer.module, RoutedGate)
    }
    tensors = {}
    for name in stored:
        layer, router = _LAYER.search(f".{name}"), _ROUTER.search(name)
        if layer and router and layer.group(1) in gates:
            file = open_safetensors(Path(folder, stored.files[name]), folder)  # may hold integers, too
            tensors[f"{gates[layer.group(1)]}.{router.group(1)}"] = file.get_tensor(name)
    return tensors
