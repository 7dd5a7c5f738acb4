"""Figures of routing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch


def plot_shares(shares: Mapping[str, torch.Tensor], path: str | Path, title: str = "") -> None:
    """
    Heat maps of the share of tokens per expert (columns) and layer (rows), one panel per domain, as a PNG.

    Args:
        shares: domain → [L, n], each layer's sum 1.
    """
    from matplotlib.figure import Figure

    layers, n = next(iter(shares.values())).shape
    cell = min(0.55, 6.0 / n)
    width = 1.6 + len(shares) * (n * cell + 0.5)
    figure = Figure(figsize=(max(5.0, width), max(2.6, layers * 0.42 + 1.5)), layout="constrained")
    axes = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    top = max(float(share.max()) for share in shares.values())
    for axis, (domain, share) in zip(axes, shares.items(), strict=True):
        image = axis.imshow(share.numpy() * 100, cmap="viridis", vmin=0, vmax=top * 100, aspect="auto")
        axis.set_title(domain)
        axis.set_xlabel("expert")
        step = max(1, n // 16)
        axis.set_xticks(range(0, n, step))
        axis.set_yticks(range(0, layers, max(1, layers // 16)))
        if n <= 16 and layers <= 16:
            for layer in range(layers):
                for expert in range(n):
                    value = float(share[layer, expert])
                    color = "white" if value < 0.6 * top else "black"
                    axis.text(expert, layer, f"{value * 100:.0f}", ha="center", va="center", color=color, fontsize=7)
    axes[0].set_ylabel("layer")
    bar = figure.colorbar(image, ax=axes, shrink=0.9)
    bar.set_label("share of token assignments (%)")
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=150, metadata={"Software": None})
