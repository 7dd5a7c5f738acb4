"""Learning rates of studies: tried until the best one has worse ones on both sides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name")


def best_rate(losses: Mapping[float, float]) -> float:
    """The rate with the lowest loss."""
    return min(losses, key=losses.__getitem__)


def next_rate(losses: Mapping[float, float], first: Sequence[float]) -> float | None:
    """
    The next rate to try: those of `first`, then doublings or halvings of the best one while it lies at an edge.

    Args:
        losses: rate → loss of the rates that were tried.

    Returns:
        None once the best rate has worse ones on both sides.
    """
    untried = [rate for rate in first if rate not in losses]
    if untried:
        return untried[0]
    best = best_rate(losses)
    return 2 * best if best == max(losses) else best / 2 if best == min(losses) else None


def tune(
    names: Sequence[Name],
    losses: Callable[[Name], Mapping[float, float]],
    first: Callable[[Name], Sequence[float]],
    run: Callable[[Name, float], None],
    worker: int,
    workers: int,
) -> dict[Name, float]:
    """
    The best rate of each name, once all workers have tried theirs.

    Args:
        losses: of a name's rates so far, of all workers.
        first: the rates to begin with.
        run: tries a rate, so that `losses` has it afterwards.
    """
    for name in names[worker::workers]:
        while (rate := next_rate(losses(name), first(name))) is not None:
            run(name, rate)
    while any(next_rate(losses(name), first(name)) is not None for name in names):
        time.sleep(5)  # another worker makes it
    return {name: best_rate(losses(name)) for name in names}
