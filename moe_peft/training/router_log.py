"""What trainers log of routers: means over tokens, and how even the experts' load is. T tokens, N experts, L layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    What a trainer logs of its routers: means over all tokens since the last log, of all batches and processes. Sums
    stay on the device, which is waited for once a log.

    Args:
        trainer: the trainer, whose `log` calls `add_to`.
        sizes: each router's n.
    """

    def __init__(self, trainer: Any, sizes: Sequence[int]) -> None:
        self.trainer, self.sizes = trainer, sizes
        # In training and in evaluation: of values and of what they are about, [2] by name; of a layer's assignments and
        # tokens, [L, n + 1].
        self._sums: dict[bool, dict[str, torch.Tensor]] = {True: {}, False: {}}
        self._loads: dict[bool, torch.Tensor] = {}
        self._last_health: LoadHealth | None = None

    @torch.no_grad()
    def note(self, noted: Mapping[str, Sum]) -> None:
        """Values of one batch, by name."""
        sums = self._sums[self.trainer.model.training]
        device = next(iter(noted.values()))[0].device
        batch = torch.stack([part.detach().to(device).float() for pair in noted.values() for part in pair]).view(-1, 2)
        for name, sum_2 in zip(noted, batch, strict=True):
            sums[name] = sums[name] + sum_2 if name in sums else sum_2

    @torch.no_grad()
    def note_load(self, passes: Sequence[RoutedPass], mask_T: torch.Tensor) -> None:
        """How evenly the experts were used."""
        by_layer = zip(*(seen.chosen for seen in passes), strict=True)
        chosen_LTN = torch.stack([
            torch.cat([chosen_TN.to(mask_T.device) for chosen_TN in of_layer]) for of_layer in by_layer
        ])  # fmt: skip
        real_T1 = mask_T.bool().unsqueeze(1)
        counts_LN = (chosen_LTN & real_T1).sum(1)
        load = torch.cat([counts_LN, real_T1.sum().expand(len(counts_LN), 1)], dim=1)
        training = self.trainer.model.training
        self._loads[training] = self._loads[training] + load if training in self._loads else load

    def add_to(self, logs: dict[str, float]) -> None:
        """Put the means since the last call into a trainer's log, before it logs; in evaluation with a prefix."""
        training = self.trainer.model.training
        health, values = self._load_health(training), {}
        if sums := self._sums[training]:
            totals, counts = self._of_all(torch.stack([*sums.values()])).T.tolist()
            values = {name: total / max(count, 1.0) for name, total, count in zip(sums, totals, counts, strict=True)}
        if health is not None:
            values |= {
                "load_cv": health.variation,
                "load_cv_by_chance": health.by_chance,
                "dead_experts": health.dead / health.experts,
            }
            self._last_health = health if training else self._last_health
        logs.update({name if training else f"eval_{name}": value for name, value in values.items()})
        self._sums[training] = {}
        self._loads.pop(training, None)

    def load_health(self) -> LoadHealth | None:
        """The health of the load in training, for the tokens since the last log, or else for those that it covered."""
        return self._load_health(True) or self._last_health

    def _load_health(self, training: bool) -> LoadHealth | None:
        if training not in self._loads:
            return None
        load = self._of_all(self._loads[training])
        return load_health(load[:, :-1].double(), self.sizes, float(load[0, -1]))

    def _of_all(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over all processes, on the CPU."""
        return self.trainer.accelerator.reduce(sums, "sum").cpu()
