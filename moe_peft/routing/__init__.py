"""Routers and what is computed from their logits: gates, losses, statistics. Needs only torch."""

from .gates import Steering, pad_logits, sigmoid_gates, switch_gates, threshold_gates, top_k_gates, top_p_gates
from .losses import balancing_loss, label_losses, z_losses
from .routers import ROUTERS, Router, RouterSettings, make_router
from .statistics import LoadHealth, compliance, entropies, expert_counts, load_health

__all__ = [
    "ROUTERS",
    "LoadHealth",
    "Router",
    "RouterSettings",
    "Steering",
    "balancing_loss",
    "compliance",
    "entropies",
    "expert_counts",
    "label_losses",
    "load_health",
    "make_router",
    "pad_logits",
    "sigmoid_gates",
    "switch_gates",
    "threshold_gates",
    "top_k_gates",
    "top_p_gates",
    "z_losses",
]
