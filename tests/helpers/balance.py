"""The balancing loss by transformers' formula for one layer, averaged over layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


def layer_balancing_loss(
    router_logits: Sequence[torch.Tensor], num_experts: int, top_k: int, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    each = [load_balancing_loss_func((layer,), num_experts, top_k, attention_mask) for layer in router_logits]
    return torch.stack(each).mean()
