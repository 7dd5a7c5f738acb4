"""Routing vectors of stage 3: one r [d] for each routed module of an expert's model. They become rows of routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from ..adapter.ffn_layout import find_layout
from ..adapter.layers import linear_features

VECTORS = "routing_vectors"


class RoutingVectors(nn.Module):
    """
    One routing vector r [d] for each routed module of a model: an FFN, or a single linear.

    Args:
        modules: the routed modules.
        seed: seed of the initial values, N(0, 0.02²).
    """

    def __init__(self, modules: Sequence[nn.Module], seed: int) -> None:
        super().__init__()
        vectors = initial_vectors([_input_size(module) for module in modules], seed)
        device = next(modules[0].parameters()).device
        self.vectors = nn.ParameterList(vector.to(device) for vector in vectors)

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """
        Compute `x·r` [B, S] in float32. A sum of products, as autocast would compute a matrix product in half
        precision.
        """
        return (x.float() * self.vectors[index].float()).sum(-1)


def initial_vectors(sizes: Sequence[int], seed: int) -> list[torch.Tensor]:
    """Return random vectors [d] of the given sizes, N(0, 0.02²)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.empty(size).normal_(std=0.02, generator=generator) for size in sizes]


def moved(vectors: Sequence[torch.Tensor], seed: int) -> float:
    """
    Return the vectors' distance from their initial values, relative to the initial length; the mean of the modules.
    """
    start = initial_vectors([len(vector) for vector in vectors], seed)
    shares = [float((v - s).norm() / s.norm()) for v, s in zip(vectors, start, strict=True)]
    return sum(shares) / len(shares)


def _input_size(module: nn.Module) -> int:
    layout = find_layout(module)
    return linear_features(module if layout is None else module.get_submodule(layout.inputs[0]))[0]


def put_vectors(model: PreTrainedModel, names: Sequence[str], seed: int) -> RoutingVectors:
    """Add new routing vectors to a model, for the named modules."""
    vectors = RoutingVectors([model.get_submodule(name) for name in names], seed)
    model.add_module(VECTORS, vectors)
    return vectors


def is_vector(name: str) -> bool:
    """Return whether a parameter's name is a trainable routing vector. PEFT also keeps a frozen copy."""
    return VECTORS in name and "original_module" not in name


def record_scores(model: nn.Module, names: Sequence[str]) -> list[torch.Tensor]:
    """
    Record the scores `x·r` [B, S] of a model with routing vectors. Each forward pass appends them to the returned list,
    one for each routed module. Clear the list before a pass.

    Under gradient checkpointing, layers run again in the backward pass. A reentrant checkpoint first runs them without
    a graph. Then the scores are leaves, and their gradients are added in the second run.
    """
    scores: list[torch.Tensor] = []

    def hook(index: int) -> Callable[[nn.Module, tuple], tuple]:
        def record(module: nn.Module, args: tuple) -> tuple:
            score = model.get_submodule(VECTORS)(args[0], index)  # a module's call, so that ZeRO-3 gathers the vectors
            if len(scores) < len(names):
                scores.append(score if torch.is_grad_enabled() else score.detach().requires_grad_())
            elif scores[index].is_leaf and (gradient := scores[index].grad) is not None:
                score.register_hook(gradient.add)
            # The same input, but tied to the score: DistributedDataParallel would consider the vectors unused if no
            # output depended on them.
            return (args[0] + 0 * score.unsqueeze(-1).to(args[0].dtype), *args[1:])

        return record

    for index, name in enumerate(names):
        model.get_submodule(name).register_forward_pre_hook(hook(index))
    return scores
