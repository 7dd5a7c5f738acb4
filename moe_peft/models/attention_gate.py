"""The gate of a native MoE as a function of trainable queries and keys."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..routing.routers import folded_weight


class AttentionGate:
    """
    Mixin for the gate class of a native MoE, which computes `weight` from queries and keys. The state dict has `weight`
    beside them, so that other software loads the right model from a checkpoint.
    """

    attention_query: nn.Parameter
    attention_key: nn.Parameter

    @property
    def weight(self) -> torch.Tensor:
        return folded_weight(self.attention_query, self.attention_key)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        destination[f"{prefix}weight"] = self.weight.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}attention_query" in state_dict:
            state_dict.pop(f"{prefix}weight", None)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple:  # pickle cannot find the class by a name
        return _new_gate, (type(self).__bases__[1],), self.__dict__


@functools.cache
def _attention_class(cls: Any) -> Any:
    return type(f"Attention{cls.__name__}", (AttentionGate, cls), {})


def _new_gate(cls: type) -> Any:
    attention = _attention_class(cls)
    return attention.__new__(attention)


def to_attention_gate(gate: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    trained = all(p.requires_grad for p in gate.parameters())
    like = gate.weight.detach()
    if not isinstance(gate, AttentionGate):
        del gate.weight
        gate.__class__ = _attention_class(type(gate))  # type: ignore[arg-type]
    gate.attention_query = nn.Parameter(query.to(like), requires_grad=trained)
    gate.attention_key = nn.Parameter(key.to(like), requires_grad=trained)


def to_linear_gate(gate: Any) -> None:
    weight, trained = gate.weight.detach(), all(p.requires_grad for p in gate.parameters())
    del gate.attention_query, gate.attention_key
    gate.__class__ = type(gate).__bases__[1]
    gate.weight = nn.Parameter(weight, requires_grad=trained)
