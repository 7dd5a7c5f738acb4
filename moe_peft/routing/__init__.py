"""Routers, and gates, losses and statistics from their logits. Needs only torch."""

from .expert_map import read_expert_map
from .gates import (
    AllowedExperts,
    ForcedExperts,
    ForcedOrBase,
    WeightedExperts,
    pad_logits,
    sigmoid_gates,
    switch_gates,
    threshold_gates,
    top_k_gates,
    top_p_gates,
)
from .losses import balancing_loss, label_losses, z_losses
from .routers import ROUTERS, Router, RouterSettings, make_router
from .statistics import (
    LoadHealth,
    chosen_experts,
    compliance,
    effective_experts,
    entropies,
    expert_counts,
    load_health,
    variation,
)

__all__ = [
    "ROUTERS",
    "AllowedExperts",
    "ForcedExperts",
    "ForcedOrBase",
    "LoadHealth",
    "Router",
    "RouterSettings",
    "WeightedExperts",
    "balancing_loss",
    "chosen_experts",
    "compliance",
    "effective_experts",
    "entropies",
    "expert_counts",
    "label_losses",
    "load_health",
    "make_router",
    "pad_logits",
    "read_expert_map",
    "sigmoid_gates",
    "switch_gates",
    "threshold_gates",
    "top_k_gates",
    "top_p_gates",
    "variation",
    "z_losses",
]
