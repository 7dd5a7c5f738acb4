"""What trainers log of routers: means over tokens, and how even the experts' load is. T tokens, N experts, L layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..models.introspection import RoutedPass
from ..routing.statistics import LoadHealth, load_health

Sum = tuple[torch.Tensor, torch.Tensor]  # of values, and how many they are


def token_sum(values_T: torch.Tensor, mask_T: torch.Tensor) -> Sum:
    """The sum over the tokens that count, and their number."""
    return (values_T * mask_T).sum(), mask_T.sum()


class RouterLog:
    """
    What a trainer logs of its routers: means over all tokens since the last log, of all batches and processes.

    Args:
        trainer: a TRL trainer, which logs the means of the lists that it is given, and clears them then.
        sizes: each router's n.
    """

    def __init__(self, trainer: Any, sizes: Sequence[int]) -> None:
        self.trainer, self.sizes = trainer, sizes
        self._sums: dict[tuple[bool, str], torch.Tensor] = {}  # in training or not, and name → since the last log

    @torch.no_grad()
    def note(self, noted: Mapping[str, Sum]) -> None:
        """Values of one batch, by name."""
        sums = torch.stack([torch.stack([part.detach().float() for part in pair]) for pair in noted.values()])
        for name, (total, count) in zip(noted, self._since_the_last_log(noted, sums).tolist(), strict=True):
            self._log[name] = [total / max(count, 1.0)]

    @torch.no_grad()
    def note_load(self, passes: Sequence[RoutedPass], mask_T: torch.Tensor) -> None:
        """How evenly the experts were used."""
        by_layer = zip(*(seen.chosen for seen in passes), strict=True)
        real_T1 = mask_T.bool().unsqueeze(1)
        counts_LN = torch.stack([
            (real_T1 & torch.cat([chosen_TN.to(mask_T.device) for chosen_TN in of_layer])).sum(0)
            for of_layer in by_layer
        ])  # fmt: skip
        tokens_L1 = real_T1.sum().expand(len(counts_LN), 1)
        sums = self._since_the_last_log(["load_cv"], torch.cat([counts_LN, tokens_L1], dim=1).unsqueeze(0))
        health = load_health(sums[0, :, :-1], self.sizes, float(sums[0, 0, -1]))
        self._log["load_cv"] = [health.variation]
        self._log["load_cv_by_chance"] = [health.by_chance]
        self._log["dead_experts"] = [health.dead / health.experts]

    def load_health(self) -> LoadHealth | None:
        """That of the load in training, of the tokens that the last log was about or of those since then."""
        sums = self._sums.get((True, "load_cv"))
        return None if sums is None else load_health(sums[:, :-1], self.sizes, float(sums[0, -1]))

    def _since_the_last_log(self, names: Iterable[str], sums: torch.Tensor) -> torch.Tensor:
        """Sums of a batch, one per name, with those of other processes and of the batches before it."""
        # Sums of many batches are in float64, which not all devices have.
        reduced = self.trainer.accelerator.reduce(sums, "sum").cpu().double()
        for i, name in enumerate(names):
            key = (self.trainer.model.training, name)
            if name in self._log:
                reduced[i] += self._sums[key]
            self._sums[key] = reduced[i]
        return reduced

    @property
    def _log(self) -> Any:
        trainer = self.trainer
        log = trainer._metrics if hasattr(trainer, "_metrics") else trainer._stored_metrics
        return log["train" if trainer.model.training else "eval"]
