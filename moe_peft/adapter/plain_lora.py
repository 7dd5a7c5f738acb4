"""Reads plain LoRA adapters of PEFT, and checks that they can become experts."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from ..utils.compat import private
from ..utils.distributed import shape_of
from ..utils.loading import as_lora, read_adapter_config, read_adapter_weights, way_to_lora, with_scaled_rows
from ..utils.messages import InputError
from .base_model import embeddings_name
from .config import TOKEN_ROWS, by_pattern, name_in_base, trained_tokens
from .ffn_layout import find_layout

Adapter: TypeAlias = str | os.PathLike | PeftModel | tuple[LoraConfig, dict[str, torch.Tensor]]
logger = logging.getLogger("moe_peft")
_maybe_include_all_linear_layers = private("peft.tuners.tuners_utils", "_maybe_include_all_linear_layers")
BASE_PREFIX = "base_model.model."
# Features of a LoRA that an expert cannot have: field → (value without the feature, besides None and empty ones; why).
_REFUSED: dict[str, tuple[Any, str]] = {
    "use_dora": (False, "DoRA rescales the whole weight; train a LoRA without it"),
    "bias": ("none", "biases of the base were trained; train a LoRA without them"),
    "lora_bias": (False, "an expert has no bias; train a LoRA without it"),
    "target_parameters": (
        None,
        "the experts of a MoE cannot hold experts; train LoRAs on its attention (target_modules=['q_proj', …]), or "
        "serve these as they are with moe-peft pick",
    ),
    "alora_invocation_tokens": (None, "it is active only after certain tokens; train an ordinary LoRA"),
    "layer_replication": (None, "its base repeats some layers; train a LoRA of the base as it is"),
    "use_qalora": (False, "its A reads means of inputs; train an ordinary LoRA"),
    "use_bdlora": (None, "its matrices are block-diagonal; train an ordinary LoRA"),
    "kasa_config": (None, "it changes the base's weights; train an ordinary LoRA"),
    "monteclora_config": (None, "it has weights besides A and B; train an ordinary LoRA"),
    "arrow_config": (None, "it routes between LoRAs itself; give these"),
}
# Values of `init_lora_weights` that do not change the base's weights.
_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class PlainLora:
    """
    A plain LoRA adapter: A [r, in] and B [out, r] of each linear module, trained rows [D] of embeddings by module and
    token, and complete tensors of the base, by their names in the base.
    """

    name: str
    config: LoraConfig
    A: dict[str, torch.Tensor]
    B: dict[str, torch.Tensor]
    tokens: dict[str, dict[int, torch.Tensor]]
    saved: dict[str, torch.Tensor]


def read_loras(model: nn.Module, adapters: Sequence[Adapter]) -> tuple[list[PlainLora], dict[str, tuple[str, str]]]:
    """
    Read adapters and check them with the base model. Return them, and the target of each module: MoE layer and
    projection.
    """
    loras = [_read_lora(adapter, i, model) for i, adapter in enumerate(adapters)]
    for lora in loras:
        _check_fits(lora, model)
    return loras, {module: _target(model, module) for lora in loras for module in lora.A}


def _read_lora(source: Adapter, index: int, model: nn.Module) -> PlainLora:
    """Read a LoRA adapter. Raise if it is no plain LoRA, or lacks a tensor. `index`: its place among them."""
    name = f"adapters[{index}]" if isinstance(source, PeftModel | tuple) else str(source)
    if isinstance(source, PeftModel):
        active = source.active_adapters[0]
        state = with_scaled_rows(get_peft_model_state_dict(source, adapter_name=active))
        source = as_lora(source.peft_config[active]), state
    config = source[0] if isinstance(source, tuple) else read_adapter_config(source, f"lora_to_moe: {name}")
    if not isinstance(config, LoraConfig):
        way = way_to_lora(config.peft_type)
        raise InputError(
            f"lora_to_moe: {name} is an adapter of type {config.peft_type.value}; give plain LoRA adapters{way}"
        )
    _check_plain(config, f"lora_to_moe: {name}")
    state = source[1] if isinstance(source, tuple) else read_adapter_weights(source, f"lora_to_moe: {name}")

    # Sort the tensors: A and B by module, rows by module and token, and complete tensors of the base by name.
    A: dict[str, torch.Tensor] = {}
    B: dict[str, torch.Tensor] = {}
    tokens: dict[str, dict[int, torch.Tensor]] = {}
    saved: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        if not tensor.isfinite().all():
            raise InputError(f"lora_to_moe: {name}: {key} holds NaN or infinity; train the adapter again")
        module, _, kind = name_in_base(key).partition(".lora_")
        if module.endswith(TOKEN_ROWS):
            module = module.removesuffix(TOKEN_ROWS)
            tokens[module] = _rows_by_token(name, config, module, tensor, model)
            continue
        if kind not in ("A.weight", "B.weight", ""):
            raise InputError(f"lora_to_moe: {name}: {key}: not a weight of a plain LoRA on a linear layer")
        if not kind:
            _check_saved(name, module, tensor, model)
        {"A.weight": A, "B.weight": B, "": saved}[kind][module] = tensor

    # Ignore LoRAs on modules outside `target_modules`, like PEFT.
    ignored = _untargeted(config, [*A, *B], model)
    if ignored:
        logger.warning(
            "%s: target_modules=%s leaves out %s, whose LoRA is in the file; like PEFT, the mixture does not use it",
            name, config.target_modules, ", ".join(sorted(ignored)),
        )  # fmt: skip
    A, B = ({module: tensor for module, tensor in of.items() if module not in ignored} for of in (A, B))

    # Each A needs its B, weights named by the config must be there, and ranks must be the config's.
    lora = PlainLora(name, config, A, B, tokens, saved)
    if not A or A.keys() != B.keys():
        module = next(iter(A.keys() ^ B.keys()), "any module")
        raise InputError(f"lora_to_moe: {name}: lacks a matrix of {module}; save the adapter again")
    for field, found in (("trainable_token_indices", tokens), ("modules_to_save", saved)):
        if (value := getattr(config, field)) and not found:
            raise InputError(f"lora_to_moe: {name}: lacks the weights of {field}={value!r}; save the adapter again")
    for module in A:
        ranks, stated = (A[module].shape[0], B[module].shape[-1]), lora_rank(config, module)
        if ranks != (stated, stated):
            raise InputError(
                f"lora_to_moe: {name}: {module} has the ranks {ranks}, its config says {stated}; save the adapter again"
            )
    return lora


def _check_plain(config: LoraConfig, source: str) -> None:
    for field, (plain, why) in _REFUSED.items():
        if (value := getattr(config, field, None)) and value != plain:
            raise InputError(f"{source}: {field}={value!r}: {why}")
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights not in _KEEP_THE_BASE:
        raise InputError(
            f"{source}: init_lora_weights={config.init_lora_weights!r}: it fits only a base that this has changed; "
            "save it for the plain base, with path_initial_model_for_weight_conversion"
        )


def check_only_linears(config: LoraConfig, names: Iterable[str], source: str) -> None:
    """
    Raise an `InputError` if a LoRA adapter is more than A and B of linears. Only these are merged.

    Args:
        names: names of its tensors.
        source: name of the adapter, for messages.
    """
    _check_plain(config, source)
    for name in names:
        if name_in_base(name).partition(".lora_")[2] not in ("A.weight", "B.weight"):
            raise InputError(f"{source}: {name}: is not a weight of a LoRA on a linear; train LoRAs without it")


def _untargeted(config: LoraConfig, modules: Sequence[str], model: nn.Module) -> set[str]:
    """Return the modules without a LoRA in PEFT under this config, such as a head with "all-linear"."""
    if config.target_modules is None:
        return set()
    config = copy.copy(config)
    _maybe_include_all_linear_layers(config, model)
    return {module for module in modules if not check_target_module_exists(config, module)}


def _rows_by_token(
    name: str, config: LoraConfig, module: str, rows: torch.Tensor, model: nn.Module
) -> dict[int, torch.Tensor]:
    """
    Return the trained rows [D] of embeddings or a head, by token, from the adapter's `rows` [T, D]. A tied head has
    none.
    """
    ids = trained_tokens(config, module)
    weight = dict(model.named_parameters(remove_duplicate=False)).get(f"{module}.weight")
    if weight is None or not isinstance(ids, list) or rows.shape != (len(ids), shape_of(weight)[-1]):
        raise InputError(
            f"lora_to_moe: {name}: {module}: rows of the shape {list(rows.shape)} do not fit the base and "
            f"trainable_token_indices={config.trainable_token_indices}; was it trained on a different base?"
        )
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if tied and module != (embeddings := embeddings_name(model)):
        if ids != trained_tokens(config, embeddings):
            raise InputError(
                f"lora_to_moe: {name}: {module} has rows of its own, but the base ties it to {embeddings}; train both "
                "for the same tokens"
            )
        return {}  # a copy of the embeddings' rows
    return dict(zip(ids, rows, strict=True))


def _check_saved(name: str, key: str, tensor: torch.Tensor, model: nn.Module) -> None:
    """
    Raise if a complete tensor does not fit the base: trained in full, or of embeddings or a head saved after tokens
    were added.
    """
    base = dict(model.named_parameters(remove_duplicate=False)).get(key)
    if base is None:
        raise InputError(f"lora_to_moe: {name}: {key}: the base model has no such weight; is it the adapter's base?")
    if shape_of(base) != tensor.shape:
        raise InputError(
            f"lora_to_moe: {name}: {key} has {len(tensor)} rows, the base's {len(base)}: tokens were added, and "
            "experts share embeddings; save the base with these, and train on that"
        )


def _check_fits(lora: PlainLora, model: nn.Module) -> None:
    modules = dict(model.named_modules())
    for name, A in lora.A.items():
        if name not in modules:
            raise InputError(
                f"lora_to_moe: {lora.name}: the base model has no module {name!r}; was it trained on a different base?"
            )
        module = modules[name]
        features = (getattr(module, "in_features", A.shape[1]), getattr(module, "out_features", lora.B[name].shape[0]))
        if features != (A.shape[1], lora.B[name].shape[0]):
            shape = (A.shape[1], lora.B[name].shape[0])
            raise InputError(
                f"lora_to_moe: {lora.name}: {name} has in and out features {shape}, the base model's has {features}; "
                "was it trained on a different base?"
            )


def _target(model: nn.Module, module: str) -> tuple[str, str]:
    """Return the MoE layer for the LoRA of a linear module, and the projection's name in the layer."""
    owner, _, projection = module.rpartition(".")
    layout = find_layout(model.get_submodule(owner))
    if layout is not None and projection in layout.projections:
        return owner, projection
    return module, "weight"


def lora_rank(config: LoraConfig, module: str) -> int:
    """Return r of one module of a plain LoRA, with `rank_pattern` applied."""
    return by_pattern(config.rank_pattern, module, config.r)


def lora_scaling(config: LoraConfig, module: str) -> float:
    """Return the factor of one module's update B A in a plain LoRA, with `rank_pattern` and `alpha_pattern` applied."""
    alpha = by_pattern(config.alpha_pattern, module, config.lora_alpha)
    r = lora_rank(config, module)
    return alpha / (r**0.5 if config.use_rslora else r)


def lora_scalings(config: LoraConfig, names: Iterable[str]) -> dict[str, float]:
    """Return `lora_scaling` by the names of the A matrices in a saved adapter."""
    modules = {name: name.removeprefix(BASE_PREFIX).partition(".lora_A.")[0] for name in names if ".lora_A." in name}
    return {name: lora_scaling(config, module) for name, module in modules.items()}
