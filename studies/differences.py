"""Paired differences between methods, as the studies report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats

from moe_peft.analysis.figures import method_color, new_figure, save_figure


class Difference(NamedTuple):
    """The mean of paired differences, and its 95 % t interval."""

    mean: float
    low: float
    high: float

    def excludes_zero(self) -> bool:
        """Whether the interval does."""
        return self.low > 0 or self.high < 0

    def cells(self) -> tuple[str, str]:
        """Mean and interval, as they stand in tables of losses."""
        return f"{self.mean:+.4f}", f"[{self.low:+.4f}, {self.high:+.4f}]"


def paired_difference(values: Sequence[float], others: Sequence[float]) -> Difference:
    """`values` minus `others`, pair by pair (at least two pairs, usually one per seed)."""
    result = stats.ttest_rel(values, others)
    interval = result.confidence_interval(0.95)
    return Difference(float(np.mean(np.subtract(values, others))), float(interval.low), float(interval.high))


def over_rows(by_row: torch.Tensor) -> str:
    """The mean of rows' differences in points, and its 95 % interval, as they stand in tables of right answers."""
    mean, half = 100 * float(by_row.mean()), 196 * float(by_row.std()) / len(by_row) ** 0.5
    return f"{mean:+.1f} [{mean - half:.1f}, {mean + half:.1f}]"


def plot_differences(panels: Mapping[str, Sequence[tuple[str, Difference]]], path: Path, quantity: str) -> None:
    """
    Dots on bars of 95 % intervals around 0, one below the other from the lowest, in the first method's color or gray.

    Args:
        panels: title → (label, "first − other", and difference).
        path: the file to write.
        quantity: what differs, below the axes.
    """
    height = sum(0.5 + 0.3 * len(rows) for rows in panels.values())
    figure = new_figure(7, 0.6 + height)
    axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=list(map(len, panels.values())))
    for axis, (title, rows) in zip(axes.flat, panels.items(), strict=True):
        labels, differences = zip(*sorted(rows, key=lambda row: row[1].mean), strict=True)
        mean, low, high = np.transpose(differences)
        colors = [method_color(label.partition(" − ")[0]) or "gray" for label in labels]
        axis.axvline(0, color="black", linewidth=0.8)
        axis.barh(labels, high - low, 0.45, low, color=colors, alpha=0.4)
        axis.scatter(mean, labels, 30, colors, zorder=2)
        axis.use_sticky_edges = False
        axis.invert_yaxis()
        axis.tick_params(left=False)
        axis.spines["left"].set_visible(False)
        axis.set_title(title, fontsize=11)
    axis.set_xlabel(f"{quantity}\n← first method better       other better →")
    save_figure(figure, path)
