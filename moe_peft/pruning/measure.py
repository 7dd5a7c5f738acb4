"""Measurements on data: a model's loss, and the experts of each token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from ..analysis.inputs import ReportData
from ..models.introspection import RoutedPass, observed_routing
from ..training.data import rows_of_labels
from ..training.scoring import example_losses, loss_name, mean_loss


class Choices:
    """
    Experts that served each token of a dataset, one bit each.

    Args:
        sizes: n of every layer.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._packed: list[list[np.ndarray]] = [[] for _ in sizes]

    def add(self, seen: RoutedPass) -> None:
        """Record a forward pass, without padding."""
        for packed, n, chosen_TN in zip(self._packed, self.sizes, seen.chosen, strict=True):
            length = chosen_TN.shape[0] // seen.mask.shape[0]
            real_T = seen.mask[:, -length:].flatten().bool().to(chosen_TN.device)
            packed.append(np.packbits(chosen_TN[real_T, :n].cpu().numpy(), axis=1))

    def layer(self, layer: int) -> np.ndarray:
        """Return the choices in a layer, bool [T, n]: True if the expert served the token."""
        packed = np.concatenate(self._packed[layer])
        return np.unpackbits(packed, axis=1, count=self.sizes[layer]).astype(bool)

    def loads(self) -> list[torch.Tensor]:
        """Compute each expert's share of its layer's assignments, [n] for every layer."""
        counts = [torch.from_numpy(self.layer(i).sum(0)).double() for i in range(len(self.sizes))]
        return [count_N / count_N.sum().clamp(min=1) for count_N in counts]

    def share_with(self, experts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """
        Compute the share of tokens served by at least one of the given experts, by layer and in any layer.

        Args:
            experts: the given experts of every layer.
        """
        hit_LT = np.stack([self.layer(i)[:, list(of_layer)].any(1) for i, of_layer in enumerate(experts)])
        return {"layers": hit_LT.mean(1).tolist(), "any_layer": float(hit_LT.any(0).mean())}


def losses_of(model: Any, rows: ReportData, choices: Choices | None = None) -> dict[str, float]:
    """
    Compute the mean loss per scored token of each domain and, as `"mean"`, of all tokens. A domain called `"mean"`
    becomes `"mean (domain)"`.

    Args:
        model: a loaded model, with routers.
        choices: records the experts of every token.
    """
    with nullcontext() if choices is None else observed_routing(model, choices.add):
        losses_S, counts_S = example_losses(model, rows.data, rows.collator, rows=rows.batch_size)
    losses = {
        loss_name(domain): mean_loss(losses_S[index], counts_S[index], f"domain {domain!r}")
        for domain, index in rows_of_labels(rows.domains).items()
    }
    return {**losses, "mean": mean_loss(losses_S, counts_S, "data")}
