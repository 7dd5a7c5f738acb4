"""Routing vectors beside a dense model, which become the rows of a router. L layers, d hidden units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel


class RoutingVectors(nn.Module):
    """
    One vector r per layer of a dense model, [L, d]; records `x·r` of each FFN's input while the model runs.

    The scores of a forward pass are in `scores`, one [B·S, 1] per layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = model.config
        weight = torch.empty(config.num_hidden_layers, config.hidden_size)
        self.weight = nn.Parameter(nn.init.normal_(weight, std=0.02).to(model.device))
        self.scores: list[torch.Tensor] = []
        self.layers = config.num_hidden_layers
        for layer in range(config.num_hidden_layers):
            model.get_submodule(f"model.layers.{layer}.mlp").register_forward_pre_hook(self._recorder(layer))

    def forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """`x·r` [..., 1] in float32. Not a matrix product, which autocast would compute in half precision."""
        return (x.float() * self.weight[layer].float()).sum(-1, keepdim=True)

    def _recorder(self, layer: int) -> Callable[[nn.Module, tuple], tuple]:
        def record(ffn: nn.Module, args: tuple) -> tuple:
            score = self(args[0], layer)  # a call, for which ZeRO-3 gathers the vectors
            self.scores.append(score.reshape(-1, 1))
            # The same input, but tied to the score: DistributedDataParallel would take the vectors for unused if no
            # output depended on them.
            return (args[0] + 0 * score.to(args[0].dtype),)

        return record


def router_weights(vectors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The experts' routing vectors [L, d] as the routers' weights, layer → [n, d]."""
    return dict(enumerate(torch.stack(list(vectors), dim=1)))
