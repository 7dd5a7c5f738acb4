"""Figures of routing, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .token_classes import TOKEN_CLASSES

_CELLS_WITH_NUMBERS = 16  # with more experts or layers, numbers in the cells would be unreadable


def plot_shares(shares: Mapping[str, torch.Tensor], path: str | Path, title: str = "") -> None:
    """
    Heat maps of the share of assignments per expert (columns) and layer (rows), one panel per domain, as a PNG.

    Args:
        shares: domain → [L, n]; each layer sums to 1.
        path: the file to write.
        title: the figure's title.
    """
    layers, n = next(iter(shares.values())).shape
    cell = min(0.55, 6.0 / n)
    width = max(5.0, 1.6 + len(shares) * (n * cell + 0.5))
    figure = _figure(width, max(2.6, min(0.42 * layers, 8.0) + 1.5))
    axes = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    top = max(float(share.max()) for share in shares.values())
    for axis, (domain, share) in zip(axes, shares.items(), strict=True):
        image = axis.imshow(share.numpy() * 100, cmap="viridis", vmin=0, vmax=top * 100, aspect="auto")
        axis.set_title(domain)
        axis.set_xlabel("expert")
        axis.set_xticks(_ticks(n))
        axis.set_yticks(_ticks(layers))
        if n <= _CELLS_WITH_NUMBERS and layers <= _CELLS_WITH_NUMBERS:
            for layer in range(layers):
                for expert in range(n):
                    value = float(share[layer, expert])
                    color = "white" if value < 0.6 * top else "black"
                    axis.text(expert, layer, f"{value * 100:.0f}", ha="center", va="center", color=color, fontsize=7)
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, shrink=0.9).set_label("share of token assignments (%)")
    _save(figure, path, title)


def plot_coactivation(counts_NN: torch.Tensor, path: str | Path) -> None:
    """
    Which experts serve the same tokens: of the tokens of the row's expert, the share that the column's also serves.

    Args:
        counts_NN: number of tokens that both experts serve, [n, n]; the diagonal has each expert's tokens.
        path: the file to write.
    """
    n = counts_NN.shape[0]
    share = counts_NN / counts_NN.diagonal().clamp(min=1).unsqueeze(1)
    share = share.masked_fill(torch.eye(n, dtype=torch.bool), float("nan"))
    size = max(4.0, min(8.0, 1.5 + 0.45 * n))
    figure = _figure(size + 1, size)
    axis = figure.subplots()
    image = axis.imshow(share.numpy() * 100, cmap="magma", vmin=0)
    axis.set_xticks(_ticks(n))
    axis.set_yticks(_ticks(n))
    axis.set_xlabel("also chosen: expert")
    axis.set_ylabel("of the tokens of expert")
    figure.colorbar(image, ax=axis, shrink=0.9).set_label("share of its tokens (%)")
    _save(figure, path, "Experts chosen together, all layers")


def plot_token_classes(counts_CN: torch.Tensor, path: str | Path) -> None:
    """Each token class's share of assignments per expert, over all layers; counts are [C, n]."""
    seen = [i for i in range(len(TOKEN_CLASSES)) if counts_CN[i].sum() > 0]
    share = counts_CN[seen] / counts_CN[seen].sum(1, keepdim=True)
    n = counts_CN.shape[1]
    figure = _figure(max(5.0, min(10.0, 2.5 + 0.5 * n)), 1.6 + 0.45 * len(seen))
    axis = figure.subplots()
    image = axis.imshow(share.numpy() * 100, cmap="viridis", vmin=0, aspect="auto")
    axis.set_xticks(_ticks(n))
    axis.set_yticks(range(len(seen)), [f"{TOKEN_CLASSES[i]} ({int(counts_CN[i].sum()):,})" for i in seen])
    axis.set_xlabel("expert")
    figure.colorbar(image, ax=axis, shrink=0.9).set_label("share of its assignments (%)")
    _save(figure, path, "Classes of tokens (assignments), all layers")


def plot_compliance(compliance_LP: torch.Tensor, path: str | Path) -> None:
    """Mean compliance by position in the text, one line per layer; buckets of doubling width, [L, P]."""
    figure = _figure(6.5, 4.0)
    axis = figure.subplots()
    seen = [p for p in range(compliance_LP.shape[1]) if not compliance_LP[0, p].isnan()]
    layers = compliance_LP.shape[0]
    import matplotlib

    colors = matplotlib.colormaps["viridis"]
    for layer in range(layers):
        shade = colors(layer / max(1, layers - 1))
        label = f"layer {layer}" if layers <= 8 or layer in (0, layers - 1) else None
        axis.plot([2**p for p in seen], compliance_LP[layer, seen].numpy() * 100, color=shade, label=label, marker=".")
    axis.set_xscale("log", base=2)
    axis.set_ylim(0, 102)
    axis.set_xlabel("position in the text (tokens)")
    axis.set_ylabel("compliance (%)")
    axis.legend(fontsize=8)
    _save(figure, path, "Probability given to the experts of the token's domain")


def plot_load_over_time(
    steps: Sequence[int], loads: Sequence[Sequence[float]] | torch.Tensor, path: str | Path
) -> None:
    """Share of assignments per expert during training, over all layers; [steps, n]."""
    load_SN = torch.as_tensor(loads, dtype=torch.float64)
    n = load_SN.shape[1]
    figure = _figure(7.0, 4.0)
    axis = figure.subplots()
    if n <= _CELLS_WITH_NUMBERS:
        import matplotlib

        colors = matplotlib.colormaps["tab20"]
        for expert in range(n):
            axis.plot(steps, load_SN[:, expert].numpy() * 100, label=f"expert {expert}", color=colors(expert % 20))
        axis.axhline(100 / n, color="gray", linestyle=":", linewidth=1, label="even")
        axis.legend(fontsize=7, ncols=2)
        axis.set_ylabel("share of assignments (%)")
    else:
        image = axis.imshow(load_SN.T.numpy() * 100, aspect="auto", cmap="viridis", vmin=0)
        labels = _ticks(len(steps), 8)
        axis.set_xticks(labels, [str(steps[i]) for i in labels])
        axis.set_yticks(_ticks(n))
        axis.set_ylabel("expert")
        figure.colorbar(image, ax=axis).set_label("share of assignments (%)")
    axis.set_xlabel("step")
    _save(figure, path, "Load in training, all layers")


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: str | Path, title: str) -> None:
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=150, metadata={"Software": None})  # every matplotlib version writes the same bytes


def _ticks(n: int, most: int = 16) -> list[int]:
    return list(range(0, n, -(-n // most)))
