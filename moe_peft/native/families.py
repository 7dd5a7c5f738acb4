"""
Which dense family becomes which MoE family, and how the latter names things. This table is all that upcycling and
export know of families.

Names are those on disk, which transformers, vLLM and others read, and not those of transformers' fused parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Width of Qwen2-MoE's shared expert where none is wanted: it must have one, so it is zero.
EMPTY_SHARED = 32
DENSE_NAME = "model.layers.{layer}.mlp.{projection}.weight"  # in every dense family of the table


@dataclass(frozen=True)
class Family:
    """
    A MoE family.

    Args:
        model_type: of its config.
        dense: model types that it can hold the rest of.
        block: the MoE block's name in a layer.
        router: the router's weight [n, d] in the block.
        experts: projection → name in the block, with `{expert}`; without it one tensor [n, …] has all experts, in which
            gate and up are one after the other, [n, 2f, d].
        count: config field of the number of experts.
        width: config field of an expert's intermediate size.
        normalises: config field that says whether gates sum to 1; None: they always do.
        shared: the shared expert's projection in the block, with `{projection}`, or None.
        dense_layers: config field of the layers that have no experts, or None.
        keeps: dense fields that its config class does not declare, but its model reads.
    """

    model_type: str
    dense: tuple[str, ...]
    block: str
    router: str
    experts: Mapping[str, str]
    count: str
    width: str
    normalises: str | None = None
    shared: str | None = None
    dense_layers: str | None = None
    keeps: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        return "{expert}" not in self.experts["down_proj"]

    def name(self, layer: int, part: str) -> str:
        """The full name of a part of a layer's block."""
        return f"model.layers.{layer}.{self.block}.{part}"


_QWEN = {projection: f"experts.{{expert}}.{projection}.weight" for projection in PROJECTIONS}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "mixtral",
            ("llama", "mistral"),
            "block_sparse_moe",
            "gate.weight",
            {
                "gate_proj": "experts.{expert}.w1.weight",
                "up_proj": "experts.{expert}.w3.weight",
                "down_proj": "experts.{expert}.w2.weight",
            },
            "num_local_experts",
            "intermediate_size",
        ),
        Family(
            "qwen2_moe",
            ("qwen2",),
            "mlp",
            "gate.weight",
            _QWEN,
            "num_experts",
            "moe_intermediate_size",
            "norm_topk_prob",
            "shared_expert.{projection}.weight",
            "mlp_only_layers",
        ),
        Family(
            "qwen3_moe",
            ("qwen3",),
            "mlp",
            "gate.weight",
            _QWEN,
            "num_experts",
            "moe_intermediate_size",
            "norm_topk_prob",
            dense_layers="mlp_only_layers",
            keeps=("head_dim",),
        ),
        Family(
            "flex_olmo",
            ("olmo2",),
            "mlp",
            "gate.weight",
            _QWEN,
            "num_experts",
            "intermediate_size",
            "norm_topk_prob",
        ),
        Family(
            "granitemoe",
            ("granite",),
            "block_sparse_moe",
            "router.layer.weight",
            {
                "gate_proj": "input_linear.weight",
                "up_proj": "input_linear.weight",
                "down_proj": "output_linear.weight",
            },
            "num_local_experts",
            "intermediate_size",
        ),
    )
}
# Fields that follow from others, describe the file, or say nothing where sliding windows are off.
_NOT_CARRIED = {"model_type", "architectures", "dtype", "transformers_version", "_name_or_path", "layer_types",
                "max_window_layers", "tie_word_embeddings", "intermediate_size", "pretraining_tp"}  # fmt: skip


def find_family(dense_type: str, wanted: str | None, caller: str) -> Family:
    """
    The MoE family for a dense one.

    Raises:
        ValueError: there is none, or the wanted one does not hold it.
    """
    fitting = [family for family in FAMILIES.values() if dense_type in family.dense]
    if wanted is not None:
        fitting = [family for family in fitting if family.model_type == wanted]
    if not fitting:
        known = ", ".join(f"{d} → {f.model_type}" for f in FAMILIES.values() for d in f.dense)
        raise ValueError(
            f"{caller}: a {dense_type!r} model does not become {wanted or 'a native MoE'}; there is: {known}"
        )
    return fitting[0]


def moe_config(
    family: Family,
    dense: PreTrainedConfig,
    *,
    num_experts: int,
    top_k: int,
    width: int,
    normalises: bool = True,
    shared_width: int = 0,
    dense_layers: list[int] | None = None,
    caller: str = "upcycle",
) -> PreTrainedConfig:
    """
    The MoE's config: the dense model's fields and the experts'. Tied embeddings are untied (some loaders know no tied
    MoE); balancing and router outputs are off.

    Args:
        width: an expert's intermediate size.
        normalises: whether the chosen experts' gates sum to 1.

    Raises:
        ValueError: the family cannot hold one of these; the message names it.
    """

    def refuse(field: str, why: str) -> None:
        raise ValueError(f"{caller}: {field}: {family.model_type} {why}")

    if not normalises and family.normalises is None:
        refuse("normalize_top_k=False", "always has gates that sum to 1; train with normalize_top_k=True")
    if shared_width and family.shared is None:
        refuse("num_shared_experts", "has no shared experts; use 0, or a Qwen2 model")
    if dense_layers and family.dense_layers is None:
        refuse(f"layers {dense_layers} without experts", "has experts in every layer; give all layers as many experts")
    experts: dict[str, Any] = {
        family.count: num_experts,
        "num_experts_per_tok": top_k,
        "intermediate_size": dense.intermediate_size,
        family.width: width,
        "output_router_logits": False,
        "tie_word_embeddings": False,
    }
    if family.normalises:
        experts[family.normalises] = normalises
    if family.shared:
        experts["shared_expert_intermediate_size"] = shared_width
    if family.dense_layers:
        experts[family.dense_layers] = dense_layers or []
    config = CONFIG_MAPPING[family.model_type](**{**_carried(family, dense, refuse), **experts})
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    return config


def _carried(family: Family, dense: PreTrainedConfig, refuse: Callable[[str, str], None]) -> dict[str, Any]:
    """The dense model's fields that its MoE has too; refuses those it lacks, unless they say nothing."""
    values, defaults = dense.to_dict(), type(dense)().to_dict()
    known = set(CONFIG_MAPPING[family.model_type]().to_dict()) | set(family.keeps)
    for key, value in values.items():
        # What the dense class does not declare, its model does not read.
        if key in defaults and key not in known | _NOT_CARRIED and value != defaults[key]:
            refuse(f"{key}={value!r} of the dense model", "has no such setting")
    carried = {key: value for key, value in values.items() if key in known - _NOT_CARRIED}
    layer_types = values.get("layer_types")
    if layer_types and "layer_types" in known:
        carried["layer_types"], carried["max_window_layers"] = layer_types, values.get("max_window_layers")
    elif layer_types and set(layer_types) != {"full_attention"}:
        refuse("layer_types of the dense model", "has full attention in every layer")
    return carried


def backbone_shapes(config: PreTrainedConfig) -> dict[str, torch.Size]:
    """Names and shapes of what is no FFN, of a dense model or a MoE."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    return {name: t.shape for name, t in state.items() if ".mlp." not in name and ".block_sparse_moe." not in name}
