"""Forced routing: every row of a batch goes through an expert chosen from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .layer import MoELoraLayer


@contextmanager
def force_experts(model: nn.Module, experts_B: torch.Tensor) -> Iterator[None]:
    """
    Send every row of a batch through one expert, with gate 1, in all MoE layers.

    Routers still run, so `router_logits` are what they would be. With gradient checkpointing the backward pass belongs
    inside the block, too: it runs the layers again.

    Args:
        model: a model with a MoE-LoRA adapter.
        experts_B: the expert of each row, integers [B]; or of each token, [B·S], where there are no rows
            (padding-free).

    Raises:
        ValueError: the model has no MoE-LoRA router, or fewer experts than `experts_B` asks for.
    """
    layers = [m for m in model.modules() if isinstance(m, MoELoraLayer) and m.moe_lora_router]
    if not layers:
        raise ValueError(f"force_experts: {type(model).__name__} has no MoE-LoRA router; add a MoELoraConfig adapter")
    smallest = min(layer.moe_lora_spec[name].num_experts for layer in layers for name in layer.moe_lora_router)
    if experts_B.numel() and not 0 <= int(experts_B.min()) <= int(experts_B.max()) < smallest:
        raise ValueError(f"force_experts: experts {experts_B.unique().tolist()}: every layer has 0 to {smallest - 1}")
    before = [layer.forced_experts for layer in layers]
    for layer in layers:
        layer.forced_experts = experts_B
    try:
        yield
    finally:
        for layer, forced in zip(layers, before, strict=True):
            layer.forced_experts = forced
