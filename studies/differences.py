"""Paired differences between methods, as the studies report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
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


def plot_differences(panels: Mapping[str, Sequence[tuple[str, Difference]]], path: Path, quantity: str) -> None:
    """
    Dots with 95 % intervals, a line for each contrast.

    Args:
        panels: title → (label, difference).
        path: of the .svg file.
        quantity: what differs, below the axes.
    """
    figure = Figure(figsize=(3.2 + 3.4 * len(panels), 4), layout="constrained")
    for axis, (title, rows) in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items(), strict=True
    ):
        labels, differences = zip(*rows, strict=True)
        mean, low, high = np.transpose(differences)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.errorbar(mean, labels, xerr=[mean - low, high - mean], fmt="o")
        axis.set_title(title)
        axis.set_xlabel(quantity)
    with matplotlib.rc_context({"svg.hashsalt": "studies"}):
        figure.savefig(path, metadata={"Date": None})  # so that the same numbers make the same file
