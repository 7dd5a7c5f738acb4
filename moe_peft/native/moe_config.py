"""Config of a MoE, from its dense model's config."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..utils.loading import empty_model
from ..utils.messages import InputError
from .families import DenseFamily, MoEFamily

# Qwen2-MoE always has a shared expert. An unused shared expert has this width and computes zero.
EMPTY_SHARED = 32
# Fields that are derived from others, describe the file, or mean nothing without sliding windows.
_NOT_CARRIED = {"model_type", "architectures", "dtype", "transformers_version", "_name_or_path", "layer_types",
                "max_window_layers", "tie_word_embeddings", "intermediate_size", "pretraining_tp"}  # fmt: skip
_FFN_BLOCKS = (".mlp.", ".block_sparse_moe.")  # of all families, by their names in memory


def moe_config(
    families: tuple[DenseFamily, MoEFamily],
    dense: PreTrainedConfig,
    *,
    num_experts: int,
    top_k: int,
    width: int,
    normalizes: bool = True,
    shared_width: int = 0,
    router_aux_loss_coef: float = 0.0,
    dense_layers: list[int] | None = None,
) -> PreTrainedConfig:
    """
    Return the MoE's config: the dense model's settings and the experts' settings.

    Tied embeddings are untied, since some loaders support no tied MoE. Router outputs are off, and so is the balancing
    loss.

    Args:
        families: families of the dense model and of the MoE.
        width: an expert's intermediate size.
        normalizes: whether the gates of the chosen experts sum to 1.
        shared_width: the shared expert's intermediate size; a family with a mandatory shared expert gets an empty one.
        router_aux_loss_coef: coefficient of the balancing loss.
        dense_layers: layers without experts.
    """
    family = families[1]
    if not normalizes and family.normalizes is None:
        raise InputError(
            f"normalize_top_k=False: {family.model_type} always has gates that sum to 1; train with "
            "normalize_top_k=True"
        )
    if dense_layers and family.dense_layers is None:
        raise InputError(
            f"layers {dense_layers} without experts: {family.model_type} has experts in every layer; give all layers "
            "the same number of experts"
        )
    experts: dict[str, Any] = {
        family.count: num_experts,
        "num_experts_per_tok": top_k,
        "intermediate_size": dense.intermediate_size,
        family.width: width,
        "output_router_logits": False,
        "router_aux_loss_coef": float(router_aux_loss_coef),  # transformers' configs accept no integer
        "tie_word_embeddings": False,
    }
    if family.normalizes:
        experts[family.normalizes] = normalizes
    if family.shared:
        experts["shared_expert_intermediate_size"] = shared_width or EMPTY_SHARED
    if family.dense_layers:
        experts[family.dense_layers] = dense_layers or []
    config = CONFIG_MAPPING[family.model_type](**{**carried_settings(families, dense), **experts})
    config.architectures = [type(empty_model(config, family.model_type)).__name__]
    return config


def carried_settings(families: tuple[DenseFamily, MoEFamily], config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings that the dense model and its MoE have in common."""
    dense, moe = families
    values, defaults = dense.settings(config), type(config)().to_dict()
    moe_fields = {*CONFIG_MAPPING[moe.model_type]().to_dict(), *moe.keeps}
    # Models read the head size, even if their config class does not declare it.
    defaults.setdefault("head_dim", config.hidden_size // config.num_attention_heads)
    for key, value in values.items():
        # The dense model ignores all other fields that its config class does not declare.
        if key in defaults and key not in moe_fields | _NOT_CARRIED and value != defaults[key]:
            raise InputError(f"{key}={value!r} of the dense model: {moe.model_type} has no such setting")
    carried = {key: value for key, value in values.items() if key in (moe_fields & defaults.keys()) - _NOT_CARRIED}
    layer_types = values.get("layer_types")
    if layer_types and "layer_types" in moe_fields:
        carried["layer_types"], carried["max_window_layers"] = layer_types, values.get("max_window_layers")
    elif layer_types and set(layer_types) != {"full_attention"}:
        raise InputError(f"layer_types of the dense model: {moe.model_type} has full attention in every layer")
    elif layer_types:  # the dense model reads nothing else
        off = {"use_sliding_window": False, "sliding_window": None}
        carried |= {key: value for key, value in off.items() if key in moe_fields}
    return carried


def backbone_shapes(config: PreTrainedConfig) -> dict[str, torch.Size]:
    """Return the names and shapes of all non-FFN tensors of a dense model or a MoE."""
    state = empty_model(config, f"config of the model type {config.model_type!r}").state_dict()
    return {name: t.shape for name, t in state.items() if not any(block in name for block in _FFN_BLOCKS)}
