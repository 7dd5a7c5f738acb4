"""Adapters on tiny models, and a padded batch for them."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import get_peft_model

from moe_peft import MoELoraConfig
from tests.helpers.models import tiny_llama

COEF = 0.5  # large, so that a loss added twice or not at all cannot hide


def adapter(**kwargs) -> MoELoraConfig:
    defaults = {"num_experts": 4, "top_k": 2, "r": 4, "router_aux_loss_coef": COEF, "init_lora_weights": False}
    return MoELoraConfig(task_type="CAUSAL_LM", **{**defaults, **kwargs})


def adapted(seed: int = 0, base=None, **kwargs):
    base = tiny_llama() if base is None else base
    torch.manual_seed(seed)
    return get_peft_model(base, adapter(**kwargs))


def batch(padded: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 7:] = 0
        mask[2, 4:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def save_adapter_with_sets(folder: str | Path) -> None:
    adapted(
        target_modules=["q_proj", "v_proj", "o_proj", "k_proj", "mlp"], modules_to_save=["lm_head", "norm"],
        exclude_modules=["layers.0.mlp", "layers.1.self_attn.o_proj"], layers_to_transform=[1, 0],
        target_projections=["up_proj", "gate_proj", "down_proj"], num_experts_pattern={"q_proj": 1, "k_proj": 2},
    ).save_pretrained(folder)  # fmt: skip
