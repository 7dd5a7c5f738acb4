"""Loads the routers that stand in the place of a native MoE's gates (`replace_routers`), which transformers drops."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..models.introspection import router_sizes, text_config
from ..models.native_routers import CONFIG_FIELD, native_gates, replace_routers
from ..models.routed_gate import RoutedGate
from ..routing.routers import RouterSettings
from ..utils.io import check_weights, reading
from ..utils.loading import read_config, read_model
from ..utils.validation import PATH, check
from .safetensors_io import Checkpoint

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_OWN = re.compile(r"\.(moe_router\..+|attention_(?:query|key))$")  # the second: how they were saved before


def load_routers(model: Any, folder: str | os.PathLike) -> None:
    """
    Put the routers that a saved native MoE was trained with in the place of its gates.

        model = AutoModelForCausalLM.from_pretrained(folder)
        load_routers(model, folder)

    The first line alone leaves gates random where the routers do not fold into plain ones; transformers then reports
    missing weights.

    Args:
        model: the native MoE that transformers loaded from `folder`.
        folder: what `save_pretrained` wrote, with the settings of the routers in its config.

    Raises:
        ValueError: the config names no routers, or the folder lacks their weights.
    """
    check("load_routers", folder=(folder, PATH))
    sizes = router_sizes(model, "load_routers")
    settings = getattr(text_config(model), CONFIG_FIELD, None)
    if settings is None:
        raise ValueError(f"load_routers: {os.fspath(folder)!r}: its config names no routers; use the model as it is")
    with reading(f"load_routers: {os.fspath(folder)!r}: {CONFIG_FIELD} in its config", "save the model again"):
        replace_routers(model, RouterSettings(**settings), top_k=sizes[0][1])
    state = router_tensors(model, folder)
    for path, gate in native_gates(model, "load_routers").items():
        own = {name.removeprefix(f"{path}."): tensor for name, tensor in state.items() if name.startswith(f"{path}.")}
        missing = gate.load_state_dict(own, strict=False).missing_keys
        if missing:
            raise ValueError(f"load_routers: {os.fspath(folder)!r} has no {path}.{missing[0]}; is it complete?")


def read_routed_model(name: str | os.PathLike, what: object, **own: Any) -> Any:
    """
    A causal language model, with the routers in the place of gates that it was saved with, if its config names some.

    Args:
        what: the field and its value, for messages.
        own: arguments of `from_pretrained`.

    Raises:
        ValueError: it cannot be loaded.
    """
    if not hasattr(read_config(name, what).get_text_config(), CONFIG_FIELD):
        return read_model(name, what, **own)
    if Path(name).is_dir():
        check_weights(Path(name), what)
    with reading(what):  # lacks gates in the place of which other routers are
        model = AutoModelForCausalLM.from_pretrained(os.fspath(name), use_safetensors=True, **own)
        load_routers(model, name)
    return model


def router_tensors(model: Any, folder: str | os.PathLike) -> dict[str, torch.Tensor]:
    """
    The tensors in a folder of the routers in the place of gates, by the names that `model` has for them: the names on
    disk are those of the family's checkpoints, up to the router itself.
    """
    stored = Checkpoint(Path(folder), "load_routers")
    gates = {
        _LAYER.search(f".{path}.").group(1): path  # type: ignore[union-attr]
        for path, gate in native_gates(model, "load_routers").items()
        if isinstance(gate, RoutedGate)
    }
    found = {}
    for name in stored:
        layer, own = _LAYER.search(f".{name}"), _OWN.search(name)
        if layer and own and layer.group(1) in gates:
            found[f"{gates[layer.group(1)]}.{own.group(1)}"] = stored.tensor(name)
    return found
