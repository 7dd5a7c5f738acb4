"""Paired differences between methods, as the studies report them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Difference(NamedTuple):
    """The mean of paired differences, and its 95 % t interval."""

    mean: float
    low: float
    high: float

    def cells(self) -> tuple[str, str]:
        """Mean and interval, as they stand in tables of losses."""
        return f"{self.mean:+.4f}", f"[{self.low:+.4f}, {self.high:+.4f}]"


def paired_difference(values: Sequence[float], others: Sequence[float]) -> Difference:
    """`values` minus `others`, pair by pair (at least two pairs, usually one per seed)."""
    result = stats.ttest_rel(values, others)
    interval = result.confidence_interval(0.95)
    return Difference(float(np.mean(np.subtract(values, others))), float(interval.low), float(interval.high))
