"""Learning rates of studies: tried until the best one has worse ones on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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
