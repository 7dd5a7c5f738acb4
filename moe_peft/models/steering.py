"""Steers the routing of a MoE-LoRA adapter or a native transformers MoE from outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..routing.gates import Steering, top_k_gates
from .gate import RoutedGate
from .view import adapter_layers, native_routers, router_sizes


@contextmanager
def force_experts(model: nn.Module, experts_B: torch.Tensor) -> Iterator[None]:
    """
    Send every row of a batch through one expert, with gate 1, in all MoE layers.

    Routers still run, so `router_logits` are recorded as usual. With gradient checkpointing, run the backward pass
    inside the block too, because it runs the layers again.

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE.
        experts_B: the expert of each row, integers [B]; or of each token, [B·S], if the batch has no rows
            (padding-free).

    Raises:
        ValueError: the model has no router, or fewer experts than `experts_B` asks for.
    """
    smallest = min(n for n, _ in router_sizes(model, "force_experts"))
    if experts_B.numel() and not 0 <= int(experts_B.min()) <= int(experts_B.max()) < smallest:
        raise ValueError(f"force_experts: experts {experts_B.unique().tolist()}: every layer has 0 to {smallest - 1}")
    with _steered(model, Steering(experts=experts_B)):
        yield


@contextmanager
def allow_experts(model: nn.Module, allowed: torch.Tensor | Sequence[int]) -> Iterator[None]:
    """
    Restrict routers to some of the experts, in training and in `generate`.

    The logits of the other experts count as minus infinity; `router_logits` are recorded without the mask. With
    gradient checkpointing, run the backward pass inside the block too.

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE.
        allowed: a list of experts for all rows; or a mask for each row (for each token if the batch has no rows), bool
            [B, n].

    Raises:
        ValueError: the model has no router, the mask's n is not the model's, or fewer experts are allowed than a token
            gets (top_k).
    """
    sizes = router_sizes(model, "allow_experts")
    n, k = sizes[0][0], max(k for _, k in sizes)
    routers = [layer.router(name) for layer in adapter_layers(model) for name in layer.moe_lora_router]
    routers = routers or [gate.moe_router for gate in native_routers(model) if isinstance(gate, RoutedGate)]
    if routers and all(router.leaves_out for router in routers):
        k = 1
    if len({n for n, _ in sizes}) > 1:
        raise ValueError(
            f"allow_experts: layers have {sorted({n for n, _ in sizes})} experts; one mask needs the same number in all"
        )
    if not isinstance(allowed, torch.Tensor):
        if not all(0 <= i < n for i in allowed):
            raise ValueError(f"allow_experts: allowed={list(allowed)}: the model has experts 0 to {n - 1}")
        mask = torch.zeros(1, n, dtype=torch.bool)
        mask[0, list(allowed)] = True
        allowed = mask
    if allowed.dim() != 2 or allowed.shape[1] != n or allowed.dtype != torch.bool:
        raise ValueError(f"allow_experts: a mask {allowed.dtype} {tuple(allowed.shape)}; give bool [rows, {n}]")
    fewest = int(allowed.sum(1).min())
    if fewest < k:
        raise ValueError(f"allow_experts: some row allows only {fewest} of the experts; allow at least top_k={k}")
    with _steered(model, Steering(allowed=allowed)):
        yield


@contextmanager
def _steered(model: nn.Module, steering: Steering) -> Iterator[None]:
    layers = adapter_layers(model)
    before = [layer.steering for layer in layers]
    with ExitStack() as stack:
        for router in [] if layers else native_routers(model):
            handle = router.register_forward_hook(_NativeHook(steering))
            stack.callback(handle.remove)
        for layer in layers:
            layer.steering = steering
        try:
            yield
        finally:
            for layer, outer in zip(layers, before, strict=True):
                layer.steering = outer


class _NativeHook:
    """Replaces the choice of a transformers router, which returns (logits, gates, experts)."""

    def __init__(self, steering: Steering) -> None:
        self.steering = steering

    def __call__(self, router: Any, args: tuple, output: tuple) -> tuple:
        logits_TN, gates_TK, _ = output
        normalize = bool(getattr(router, "norm_topk_prob", True))  # Mixtral always does
        choose = router.moe_router.choose if isinstance(router, RoutedGate) else top_k_gates
        gates, experts = self.steering.route(logits_TN.float(), router.top_k, normalize, choose)
        return logits_TN, gates.to(gates_TK.dtype), experts
