"""Adapters to prune, and the same model with its dropped experts out of reach."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from moe_peft.routing.routers import Router
from tests.helpers.native_case import IDS, adapter

WEIGHTS = "adapter_model.safetensors"


def make_adapter(base: str, folder: Path, **settings) -> Path:
    adapter(AutoModelForCausalLM.from_pretrained(base), folder, base, **{"num_experts": 6, **settings})
    return folder


def load_double(folder: Path):
    if (folder / "adapter_config.json").exists():
        return AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float64).double().eval()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()


@torch.no_grad()
def masked_logits(model, dropped: dict[int, list[int]]) -> torch.Tensor:
    """Logits of a model whose routers' logits are minus infinity for some experts of each layer."""

    def hook(dropped):
        def mask(router, args, logits):
            return logits.index_fill(-1, torch.tensor(dropped, dtype=torch.long), -torch.inf)

        return mask

    routers = [module for module in model.modules() if isinstance(module, Router)]
    handles = [router.register_forward_hook(hook(dropped.get(i, []))) for i, router in enumerate(routers)]
    logits = model(input_ids=IDS).logits
    for handle in handles:
        handle.remove()
    return logits
