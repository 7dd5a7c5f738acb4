"""Figures of studies: differences as dots with intervals around zero, and curves labelled at their ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from .differences import Difference

# One colour for a method, in every figure (Okabe and Ito's, and two greys).
COLOURS = {
    "lora_kr": "#999999", "lora_nr": "#444444", "loramoe_pt": "#0072B2", "loramoe_sft": "#56B4E9", "pesc": "#009E73",
    "upit": "#D55E00", "upit_no_init": "#E69F00", "upit_expanded": "#CC79A7", "self_moe": "#B8A800",
    "dense": "#444444", "copy": "#0072B2", "drop": "#D55E00", "checkpoints": "#009E73",
}  # fmt: skip
_SETTINGS = {"svg.hashsalt": "studies", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
_METADATA = {"Creator": None, "Date": None}  # so that the same numbers make the same file


def plot_differences(panels: Mapping[str, Sequence[tuple[str, str, Difference]]], path: Path, quantity: str) -> None:
    """
    Dots with 95 % intervals, a line for each contrast, sorted by the first panel.

    Args:
        panels: title → (label, method that gives the colour, difference).
        path: of the .svg file.
        quantity: what differs, below the axes.
    """
    with matplotlib.rc_context(_SETTINGS):
        first = sorted(next(iter(panels.values())), key=lambda row: -row[2].mean)
        order = {label: i for i, (label, *_) in enumerate(first)}
        figure = Figure(figsize=(3.2 + 3.4 * len(panels), 0.8 + 0.3 * len(order)))
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
        for axis, (title, rows) in zip(axes[0], panels.items(), strict=True):
            axis.axvline(0, color="black", linewidth=0.8)
            for label, method, (mean, low, high) in rows:
                axis.plot([low, high], [order[label]] * 2, color=COLOURS[method], linewidth=1.5)
                axis.plot(mean, order[label], "o", color=COLOURS[method], markersize=5)
            axis.set_title(title, fontsize=9)
            axis.set_xlabel(quantity)
        axes[0, 0].set_yticks(range(len(order)), list(order))
        figure.savefig(path, bbox_inches="tight", metadata=_METADATA)


def plot_curves(curves: Mapping[str, tuple[str, Sequence[tuple[float, float]]]], path: Path, x: str, y: str) -> None:
    """
    Lines with their labels at the right end, moved apart where they would overlap.

    Args:
        curves: label → (method that gives the colour, points).
    """
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(7, 3.6))
        axis = figure.subplots()
        for method, points in curves.values():
            axis.plot(*zip(*points, strict=True), color=COLOURS[method], linewidth=1.5)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        low, high = axis.get_ylim()
        below = float("-inf")
        for label, (method, points) in sorted(curves.items(), key=lambda item: item[1][1][-1][1]):
            below = max(points[-1][1], below + (high - low) / 18)
            axis.annotate(
                label, points[-1], (points[-1][0] + axis.get_xlim()[1] / 50, below),
                color=COLOURS[method], va="center", fontsize=8, annotation_clip=False,
            )  # fmt: skip
        figure.savefig(path, bbox_inches="tight", metadata=_METADATA)
