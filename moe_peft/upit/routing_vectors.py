"""Stage 3's routing vectors: one r [d] for each routed module of an expert's model; they become rows of the routers."""

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
        seed: of the initial values, N(0, 0.02²).
    """

    def __init__(self, modules: Sequence[nn.Module], seed: int) -> None:
        super().__init__()
        vectors = initial_vectors([_input_size(module) for module in modules], seed)
        device = next(modules[0].parameters()).device
        self.vectors = nn.ParameterList(vector.to(device) for vector in vectors)

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """`x·r` [B, S] in float32. Not a matrix product, which autocast would compute in half precision."""
        return (x.float() * self.vectors[index].float()).sum(-1)


def initial_vectors(sizes: Sequence[int], seed: int) -> list[torch.Tensor]:
    """Vectors [d] of these sizes, N(0, 0.02²)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.empty(size).normal_(std=0.02, generator=generator) for size in sizes]


def moved(vectors: Sequence[torch.Tensor], seed: int) -> float:
    """How far vectors are from their initial values, relative to the length of these; the mean of the modules."""
    start = initial_vectors([len(vector) for vector in vectors], seed)
    shares = [float((v - s).norm() / s.norm()) for v, s in zip(vectors, start, strict=True)]
    return sum(shares) / len(shares)


def _input_size(module: nn.Module) -> int:
    layout = find_layout(module)
    return linear_features(module if layout is None else module.get_submodule(layout.inputs[0]))[0]


def put_vectors(model: PreTrainedModel, names: Sequence[str], seed: int) -> RoutingVectors:
    """Give a model new vectors for these of its modules."""
    vectors = RoutingVectors([model.get_submodule(name) for name in names], seed)
    model.add_module(VECTORS, vectors)
    return vectors


def is_vector(name: str) -> bool:
    """Whether a parameter of this name is a routing vector that trains: PEFT keeps a frozen copy."""
    return VECTORS in name and "original_module" not in name


def record_scores(model: nn.Module, names: Sequence[str]) -> list[torch.Tensor]:
    """
    Make each forward pass of a model with routing vectors put its scores `x·r` [B, S], one for each routed module, into
    the list that is returned. Clear the list before a pass.

    Under gradient checkpointing, layers run again in the backward pass. A reentrant checkpoint runs them without a
    graph first: then the scores are leaves, whose gradients are added in the second run.
    """
    scores: list[torch.Tensor] = []

    def hook(index: int) -> Callable[[nn.Module, tuple], tuple]:
        def record(module: nn.Module, args: tuple) -> tuple:
            score = model.get_submodule(VECTORS)(args[0], index)  # a module's call, for which ZeRO-3 gathers vectors
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
