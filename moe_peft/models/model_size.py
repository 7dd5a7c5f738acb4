"""Size of a routed model, its share used by one token, and the similarity of its experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from ..adapter.layers import MoELoraLayer
from ..routing.routers import AttentionRouter
from ..utils.distributed import shape_of
from ..utils.expert_likeness import similarities
from .introspection import base_model
from .layer import idle_copies, native_layers, routed_layers


@dataclass(frozen=True)
class ModelSize:
    """
    Parameters and operations of a model.

    Args:
        total: all parameters: shared ones count once, and inactive adapters count too.
        active: parameters that serve a token: all, but only k of n experts in every MoE layer (at most k, if routers
            may leave experts out), and no inactive adapters. Embeddings count in full.
        flops: floating-point operations of a forward pass per token: 2 for each active parameter of a matrix product,
            including the head. Not counted are attention scores (they grow with the text), norms, activations, gates,
            embeddings, and an implementation's products for experts not chosen.
    """

    total: int
    active: int
    flops: int

    def __str__(self) -> str:
        share = f"{_short(self.active)} active per token ({self.active / max(self.total, 1):.0%})"
        return f"{_short(self.total)} parameters, {share}, {_short(self.flops)}FLOP per token"


def model_size(model: nn.Module) -> ModelSize:
    """
    Return the size of a model with a MoE-LoRA adapter, of a native MoE, or of a dense model. 4-bit weights are
    unpacked.
    """
    used = {id(p): share for p, share in _used_shares(model)}
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    attention = [m for m in model.modules() if isinstance(m, AttentionRouter) and m.settings.mixture == "max"]
    repeats = {id(router.key): router.num_heads for router in attention}  # every query meets all keys
    total, active, products = 0, Fraction(0), Fraction(0)
    for parameter in model.parameters():
        shape = _shape(parameter)
        share = used.get(id(parameter), Fraction(1))
        total += math.prod(shape)
        active += math.prod(shape) * share
        if len(shape) >= 2 and id(parameter) not in looked_up:
            products += math.prod(shape) * share * repeats.get(id(parameter), 1)
    head = base_model(model).get_output_embeddings() if hasattr(base_model(model), "get_output_embeddings") else None
    head = head.original_module if isinstance(head, TrainableTokensWrapper) else head
    if head is not None and id(getattr(head, "weight", None)) in looked_up:  # tied
        products += math.prod(_shape(head.weight))
    return ModelSize(total, int(active), int(2 * products))


@torch.no_grad()
def expert_similarity(model: nn.Module) -> torch.Tensor | None:
    """
    Return the similarity of a model's experts over all layers, [n, n]: cosines of their updates s B A. For bottlenecks
    and in a native MoE, return cosines of their weights. (After upcycling, weights have a common origin, so look at
    differences from 1.) Return None without experts, or if layers have different numbers of experts.
    """
    grams = [gram for layer in routed_layers(model) for gram in layer.grams()]
    if not grams or len({len(gram) for gram in grams}) > 1:
        return None
    return similarities(torch.stack([gram.cpu() for gram in grams]).sum(0))


def _used_shares(model: nn.Module) -> Iterator[tuple[nn.Parameter, Fraction]]:
    """Yield each parameter of experts and adapters, with the share used by one token."""
    for layer in (m for m in model.modules() if isinstance(m, MoELoraLayer)):
        running = [] if layer.disable_adapters else layer.active_adapters
        for part in layer.adapter_layer_names:
            for name, module in getattr(layer, part).items():
                # Routers and shared experts serve every token.
                matrix: Any = {"moe_lora_A": "A", "moe_lora_B": "B"}.get(part)
                share = layer.moe_lora_spec[name].used_share(matrix) if matrix else Fraction(1)
                yield from ((p, share if name in running else Fraction(0)) for p in module.parameters())
    for native in native_layers(model):
        share = Fraction(native.top_k, native.num_experts)
        yield from ((p, share) for experts in native.expert_modules() for p in experts.parameters())
    for wrapper in (m for m in model.modules() if isinstance(m, ModulesToSaveWrapper)):
        yield from ((p, Fraction(0)) for module in idle_copies(wrapper) for p in module.parameters())
    for tokens in (m.token_adapter for m in model.modules() if isinstance(m, TrainableTokensWrapper)):
        yield from ((p, Fraction(0)) for p in tokens.trainable_tokens_delta.values())  # they replace rows of the base


def _shape(parameter: Any) -> tuple[int, ...]:
    """Return a parameter's shape, unpacked (bitsandbytes) and complete (DeepSpeed ZeRO-3)."""
    packed = getattr(parameter, "quant_state", None)
    return tuple(packed.shape) if packed is not None else tuple(shape_of(parameter))


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 999.5:  # a number rounded to 1000 gets the next unit
            return f"{number:.3g} {unit}".rstrip() if not unit else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} T"
