"""Which checkpoints of stage 1 become experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..messages import one_of


@dataclass(frozen=True)
class Selection:
    """
    Args:
        pool: the steps of all checkpoints → those to choose from, evenly.
        per_expert: checkpoints that training takes for each expert, unless their number is given.
    """

    pool: Callable[[list[int]], list[int]]
    per_expert: int


SELECTIONS: dict[str, Selection] = {
    "back_half": Selection(lambda steps: steps[len(steps) // 2 :], per_expert=2),
    "uniform": Selection(lambda steps: steps, per_expert=1),
    "front_half": Selection(lambda steps: steps[: len(steps) - len(steps) // 2], per_expert=2),
}


def checkpoint_steps(total: int, num_checkpoints: int) -> list[int]:
    """
    The steps after which checkpoints are taken: at equal intervals, the last one at the end.

    Raises:
        ValueError: there are more checkpoints than steps.
    """
    if not 1 <= num_checkpoints <= total:
        raise ValueError(f"num_checkpoints={num_checkpoints}: must be from 1 to the number of steps, {total}")
    return [round(total * (i + 1) / num_checkpoints) for i in range(num_checkpoints)]


def select_checkpoints(steps: list[int], num_experts: int, selection: str = "back_half") -> list[int]:
    """
    The checkpoints that become experts, chosen evenly from the pool of the selection (see `SELECTIONS`).

    Raises:
        ValueError: the selection is unknown, or leaves fewer checkpoints than experts.
    """
    pool = _find(selection).pool(steps)
    if not 1 <= num_experts <= len(pool):
        raise ValueError(
            f"num_experts={num_experts}: selection={selection!r} of {len(steps)} checkpoints leaves {len(pool)}; save "
            "more (num_checkpoints) or make more by expansion"
        )
    return [pool[round(len(pool) * (i + 1) / num_experts) - 1] for i in range(num_experts)]


def chosen_steps(total: int, num_experts: int, num_checkpoints: int | None, selection: str) -> list[int]:
    """The steps whose checkpoints become experts, in a training of `total` steps; see `prepare_experts`."""
    count = num_checkpoints or _find(selection).per_expert * num_experts
    return select_checkpoints(checkpoint_steps(total, count), num_experts, selection)


def _find(name: str) -> Selection:
    if name not in SELECTIONS:
        raise ValueError(one_of("selection", name, SELECTIONS))
    return SELECTIONS[name]
