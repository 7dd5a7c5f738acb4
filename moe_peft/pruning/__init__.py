"""Pruning of the experts in an adapter or a native MoE."""

from .prune import PrunedLayer, Pruning, prune_experts

__all__ = ["PrunedLayer", "Pruning", "prune_experts"]
