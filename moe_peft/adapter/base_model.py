"""Finds parts of a base model: its FFNs, its language model without vision and audio towers, and its routed experts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from ..utils.messages import InputError
from .ffn_layout import FFNLayout, find_layout, layout_in_layer
from .layers import MoELoraFFN

logger = logging.getLogger(__name__)


def find_ffns(model: nn.Module) -> set[str]:
    """
    Return name endings that match every FFN of the language model and no other module, usually `{"mlp"}`. If endings
    match other modules too, return full names. If decoder layers hold the parts of an FFN without a block for them
    (OPT), return the FFN's linears.
    """
    if is_encoder_decoder(model):
        raise InputError(
            f"MoELoraConfig: target_modules=None: {type(model).__name__} is an encoder-decoder, and this finds "
            "the FFNs of causal language models; name linears, or start from a decoder-only model"
        )
    ffns = [name for name, module in _language_modules(model) if layout_of(module) is not None]
    targets = ffns or _linears_of_ffns(model)
    if not targets:
        raise InputError(
            "MoELoraConfig: target_modules=None: no FFN block of a known layout in "
            f"{type(model).__name__}; name the modules, or call moe_peft.register_ffn_layout first"
        )
    return short_names(targets, [name for name, _ in model.named_modules()])


def name_endings(names: Iterable[str]) -> set[str]:
    """Return the last parts of module names."""
    return {name.rsplit(".", 1)[-1] for name in names}


def short_names(names: Iterable[str], every: Iterable[str]) -> set[str]:
    """Return the last parts of module names if they match no other module in `every`, else the full names."""
    full, endings = set(names), name_endings(names)
    return endings if {name for name in every if name.rsplit(".", 1)[-1] in endings} == full else full


def embeddings_name(model: nn.Module) -> str:
    """Return the name of the module that embeds the tokens of a transformers model."""
    embeddings = cast(Any, model).get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is embeddings)


def is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def layout_of(module: nn.Module) -> FFNLayout | None:
    """Return the layout of an FFN, with or without experts, or None for other modules."""
    return module.layout if isinstance(module, MoELoraFFN) else find_layout(module)


def _linears_of_ffns(model: nn.Module) -> list[str]:
    """Return the names of FFN linears held directly by decoder layers. Warn if there are any."""
    linears = []
    for name, module in _language_modules(model):
        layout = layout_in_layer(module)
        if layout is not None:
            linears += [f"{name}.{projection}" for projection in layout.projections]
    if linears:
        _warn_of_linears(type(model).__name__, ", ".join(sorted(name_endings(linears))))
    return linears


@functools.cache  # once per kind of model and set of linears
def _warn_of_linears(model: str, linears: str) -> None:
    logger.warning(
        f"{model}: decoder layers hold the parts of their FFNs, so each of {linears} gets experts and a router of its "
        "own (mixing 'projection')"
    )


def _language_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield named modules of the language model: no vision or audio towers, nothing inside a tuner's `base_layer`."""
    config = getattr(model, "config", None)
    inside = set(model.modules())
    if config is not None and hasattr(config, "get_text_config") and config.get_text_config() is not config:
        inside = set(cast(Any, model).get_decoder().modules())
    for tower in _towers(model):
        inside -= set(tower.modules())
    for name, module in model.named_modules():
        if module in inside and ".base_layer" not in name:
            yield name, module


def _towers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the models inside `model` with its vision or audio config (Phi-4 has them in the decoder)."""
    config = getattr(model, "config", None)
    names = [name for name in getattr(config, "sub_configs", {}) if "vision" in name or "audio" in name]
    kinds = tuple(type(getattr(config, name)) for name in names if getattr(config, name, None) is not None)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module is not model and isinstance(module.config, kinds):
            yield module


def behind_backbone(model: nn.Module, paths: Iterable[str]) -> set[str]:
    """
    Return the paths of modules outside the backbone, such as a head. They run after the recording of a pass has ended.
    """
    inside = {*cast(nn.Module, getattr(model, "base_model", model)).modules()}
    return {path for path in paths if model.get_submodule(path) not in inside}


def has_routed_experts(model: nn.Module) -> bool:
    """
    Return whether a model has routed experts. Its config does not tell: dense models may have the config of a MoE
    (Jamba, Llama 4), and MoE families use different names for the fields.
    """
    routers = tuple(cls for module in model.modules() for cls in recorded_routers(module))
    return any(isinstance(m, routers) or _holds_experts(m) for m in model.modules())


def recorded_routers(module: nn.Module) -> dict[type, int]:
    """
    Return the router classes recorded by a transformers model, mapped to the index of the logits in a router's output.
    """
    recorded: Any = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits") or []
    recorders: list[Any] = recorded if isinstance(recorded, list) else [recorded]
    # An entry is a recorder or only the class.
    return {getattr(r, "target_class", r): getattr(r, "index", 0) for r in recorders}


def _holds_experts(module: nn.Module) -> bool:
    """Return whether a block has several experts in `experts`, as a list of modules or stacked in tensors [n, …, …]."""
    if isinstance(module, nn.ModuleDict):  # of a tuner layer, by adapter: an adapter may be named "experts"
        return False
    experts = getattr(module, "experts", None)
    if isinstance(experts, nn.ModuleList):
        return len(experts) > 1
    return isinstance(experts, nn.Module) and any(p.dim() > 2 and len(p) > 1 for p in experts.parameters())
