"""
Puts a router of `ROUTERS` into a native MoE's gate. The gate's class stays a subclass of the one known to transformers.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ..adapter.router_recorder import token_ids_for
from ..routing.gates import top_k_gates
from ..routing.routers import Router
from ..utils.messages import InputError


class RoutedGate:
    """
    Mixin for the gate class of a native MoE: `moe_router` computes the logits and chooses the experts. If the router
    folds, the state dict has the gate's `weight` too, so transformers loads the right model from a checkpoint.
    (Stricter loaders may refuse the names of the router's parameters.) Under FSDP2, the state dict is sharded and has
    no such `weight`.
    """

    moe_router: Router
    num_experts: int
    top_k: int
    normalizes: bool  # whether the family's own gate divides the k gates by their sum

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, float32 [T, n], gates in the dtype of the hidden states and experts, each [T, k]."""
        logits_TN = self.moe_router(hidden_states, token_ids_for(self.moe_router, hidden_states))
        gates_TK, experts_TK = self.moe_router.choose(logits_TN, self.top_k, self.normalizes)
        return logits_TN, gates_TK.to(hidden_states.dtype), experts_TK

    def fold(self) -> torch.Tensor:
        """Return the weight of the family's own gate with the same routing, float64 [n, d]."""
        settings = self.moe_router.settings
        if self.moe_router.only_top_k is not None and self.normalizes:
            raise InputError(
                f"router_type={settings.type!r} does not fold into a linear gate: {type(self).__bases__[1].__name__} "
                "divides gates by their sum, so a single one would be 1; use a family with norm_topk_prob"
            )
        return self.moe_router.fold(self.top_k, self.normalizes)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if any(isinstance(parameter, DTensor) for parameter in self.moe_router.parameters()):
            return  # FSDP2 knows only weights of the model
        try:
            weight_ND = self.fold()
        except InputError:
            return
        like = next(self.moe_router.parameters(), None)
        destination[f"{prefix}weight"] = weight_ND.float() if like is None else weight_ND.to(like.device, like.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}weight", None)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple:  # pickle cannot find the class by a name
        return _new_gate, (type(self).__bases__[1],), self.__dict__


@functools.cache
def _routed_class(cls: Any) -> Any:
    return type(f"Routed{cls.__name__}", (RoutedGate, cls), {})


def _new_gate(cls: type) -> Any:
    routed = _routed_class(cls)
    return routed.__new__(routed)


@torch.no_grad()
def gate_rule(gate: Any, linear: bool = True) -> bool:
    """
    Return whether a native MoE's gate divides the gates of the chosen experts by their sum, found by running the gate.

    Args:
        linear: whether its logits must be a linear layer's without a bias, so another router can replace it.
    """
    if isinstance(gate, RoutedGate):
        return gate.normalizes
    weight_ND: Any = getattr(gate, "weight", None)
    if isinstance(weight_ND, torch.Tensor) and weight_ND.is_meta:  # in a plan: try random values
        gate = copy.deepcopy(gate).to_empty(device="cpu")
        weight_ND = gate.weight.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    try:
        x_TD = torch.randn(32, weight_ND.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight_ND)
        logits_TN, gates_TK, experts_TK = type(gate).forward(gate, x_TD)
        tolerance = 8 * max(torch.finfo(d).eps for d in (gates_TK.dtype, logits_TN.dtype, torch.float32))
        close = functools.partial(torch.allclose, rtol=tolerance, atol=tolerance)
        if not linear or close(logits_TN.float(), F.linear(x_TD, weight_ND).float()):
            by_expert_TN = torch.zeros_like(logits_TN, dtype=torch.float32)
            actual_TN = by_expert_TN.scatter(1, experts_TK, gates_TK.float())
            for normalizes in (True, False):
                gates, experts = top_k_gates(logits_TN.float(), gate.top_k, normalizes)
                if close(actual_TN, by_expert_TN.scatter(1, experts, gates)):
                    return normalizes
    except (TypeError, ValueError, RuntimeError, AttributeError):  # other arguments, or other outputs
        pass
    if linear:
        why = "is not a linear gate with a softmax over the top k, so no other router can replace it"
    else:
        why = "does not choose by a softmax over its logits and the top k alone, so its choice cannot be recomputed"
    raise InputError(f"{type(gate).__name__} {why}; use a family such as Mixtral, Qwen-MoE or OLMoE")


def put_router(gate: Any, router: Router, top_k: int, normalizes: bool, like: torch.Tensor) -> None:
    """
    Let a router decide in place of a native MoE's gate. The router becomes a submodule of the gate, and the gate's own
    weight is removed. The router gets the dtype and device of `like`, and is frozen if the gate was.
    """
    trained = all(p.requires_grad for p in gate.parameters())
    if not isinstance(gate, RoutedGate):
        del gate.weight
        gate.__class__ = _routed_class(type(gate))  # type: ignore[arg-type]
    gate.moe_router = router.to(like).requires_grad_(trained).train(gate.training)
    gate.num_experts, gate.top_k, gate.normalizes = router.num_experts, top_k, normalizes
    if hasattr(gate, "norm_topk_prob"):
        gate.norm_topk_prob = normalizes


def take_router(gate: Any, weight_ND: torch.Tensor, like: torch.Tensor) -> None:
    """Restore the family's own gate, with this weight."""
    trained = all(p.requires_grad for p in gate.moe_router.parameters())
    del gate.moe_router, gate.normalizes
    gate.__class__ = type(gate).__bases__[1]
    gate.weight = nn.Parameter(weight_ND.to(like), requires_grad=trained)
