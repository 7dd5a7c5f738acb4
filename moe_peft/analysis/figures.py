"""Figures of routing, as files whose suffix says the format: .png, .pdf or .svg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .token_classes import TOKEN_CLASSES

_CELLS_WITH_NUMBERS = 16  # with more experts or layers, numbers in the cells would be unreadable
_SMALLEST_WITH_NUMBERS = 0.24  # inches; in narrower cells likewise
MOST_PANELS = 12  # of a figure with one panel per domain
# What else than the drawing a file would hold: left out, so that every matplotlib version writes the same bytes.
_METADATA = {
    ".png": {"Software": None},
    ".pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    ".svg": {"Creator": None, "Date": None},
}
SUFFIXES = tuple(_METADATA)
FORMATS = tuple(suffix.removeprefix(".") for suffix in _METADATA)


def plot_shares(shares: Mapping[str, torch.Tensor], path: str | Path, title: str = "") -> None:
    """
    Heat maps of the share of assignments per expert (columns) and layer (rows), one panel per domain, of the first 12.

    Args:
        shares: domain → [L, n]; each layer sums to 1.
        path: the file to write.
        title: the figure's title.
    """
    shown = dict(list(shares.items())[:MOST_PANELS])
    _heat_maps(shown, path, _title(title, len(shown), len(shares)), "expert", "layer", "share of token assignments (%)")


def plot_coactivation(counts_LNN: torch.Tensor, path: str | Path) -> None:
    """
    Which experts serve the same tokens, one panel per layer, of up to 12 layers: of the tokens of the row's expert, the
    share that the column's also serves.

    Args:
        counts_LNN: number of tokens that both experts serve, [L, n, n]; the diagonal has each expert's tokens.
        path: the file to write.
    """
    share_LNN = counts_LNN / counts_LNN.diagonal(dim1=1, dim2=2).clamp(min=1).unsqueeze(2)
    share_LNN = share_LNN.masked_fill(torch.eye(counts_LNN.shape[-1], dtype=torch.bool), float("nan"))
    layers = _some(len(share_LNN))
    title = f"Experts chosen together{_of_layers(layers, share_LNN)}"
    panels = {f"layer {layer}": share_LNN[layer] for layer in layers}
    _heat_maps(panels, path, title, "also chosen: expert", "of the tokens of expert", "share of its tokens (%)")


def plot_curves(curves: Mapping[str, Sequence[tuple[float, float]]], path: str | Path, x: str, y: str) -> None:
    """
    Lines through points (x, y), one for each name.

    Args:
        x, y: names of the axes.
    """
    figure = _figure(6.4, 4.2)
    axis = figure.subplots()
    for name, points in curves.items():
        axis.plot(*zip(*points, strict=True), label=name.replace("$", r"\$"))
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.legend()
    _save(figure, path, "")


def plot_token_classes(counts_CLN: torch.Tensor, path: str | Path) -> None:
    """Each token class's share of assignments per expert, one panel per layer, of up to 12; counts are [C, L, n]."""
    counts_CN = counts_CLN.sum(1)
    seen = [i for i in range(len(TOKEN_CLASSES)) if counts_CN[i].sum() > 0]
    share_CLN = counts_CLN[seen] / counts_CLN[seen].sum(2, keepdim=True).clamp(min=1)
    layers = _some(share_CLN.shape[1])
    title = f"Classes of tokens{_of_layers(layers, share_CLN[0])}"
    panels = {f"layer {layer}": share_CLN[:, layer] for layer in layers}
    names = [TOKEN_CLASSES[i] for i in seen]
    _heat_maps(panels, path, title, "expert", "", "share of its assignments (%)", names)


def _some(layers: int) -> list[int]:
    """Layers that are shown: all, or as many as a figure has panels, evenly from the first to the last."""
    return sorted({round(i) for i in torch.linspace(0, layers - 1, min(layers, MOST_PANELS)).tolist()})


def _of_layers(shown: Sequence[int], per_layer: torch.Tensor) -> str:
    return f" ({len(shown)} of {len(per_layer)} layers)" if len(shown) < len(per_layer) else ""


def _heat_maps(
    panels: Mapping[str, torch.Tensor], path: str | Path, title: str, columns_are: str, rows_are: str, values_are: str,
    names: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Heat maps of shares with one scale, side by side. NaN is left blank. `names`: of the rows, else their numbers."""
    height_N, width_N = next(iter(panels.values())).shape
    columns, rows = _grid(len(panels), 4)
    width, height = min(0.55 * width_N, 9.6 / columns), min(0.42 * height_N, 8.0 if rows == 1 else 10.5 / rows)
    figure = _figure(max(5.0, 1.6 + columns * (width + 0.2)), max(2.6, 0.9 + rows * (height + 0.6)))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    top = max(float(share.nan_to_num(0).max()) for share in panels.values())
    for axis, (name, share) in zip(axes.flat, panels.items(), strict=False):
        image = axis.imshow(share.numpy() * 100, cmap="viridis", vmin=0, vmax=top * 100, aspect="auto")
        axis.set_title(name, parse_math=False)  # names may have dollar signs
        axis.set_xticks(_ticks(width_N))
        axis.set_yticks(_ticks(height_N), None if names is None else [names[i] for i in _ticks(height_N)])
        if width / width_N >= _SMALLEST_WITH_NUMBERS:
            _write_numbers(axis, share, top)
    _leave_out(axes, len(panels))
    figure.supxlabel(columns_are, fontsize="medium")
    figure.supylabel(rows_are, fontsize="medium")
    figure.colorbar(image, ax=axes, shrink=0.9).set_label(values_are)
    _save(figure, path, title)


def plot_compliance(
    compliance: Mapping[str, torch.Tensor], path: str | Path, starts: Sequence[int], chance: Mapping[str, float]
) -> None:
    """
    Mean compliance by position in the text, one panel per domain, of the first 12: the mean over layers, the first and
    the last layer, the range of all layers, and what uniform routers would reach.

    Args:
        compliance: domain → [L, P]; NaN for buckets without tokens.
        path: the file to write.
        starts: the first position of each bucket, [P].
        chance: domain → its share of the experts.
    """
    shown = dict(list(compliance.items())[:MOST_PANELS])
    columns, rows = _grid(len(shown), 3)
    figure = _figure(max(6.5, 0.8 + 3.6 * columns), max(4.0, 0.9 + 2.7 * rows))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis, (domain, share_LP) in zip(axes.flat, shown.items(), strict=False):
        seen = (~share_LP[0].isnan()).nonzero().flatten().tolist()
        positions, percent_LP = [starts[p] + 1 for p in seen], share_LP[:, seen].numpy() * 100
        axis.fill_between(
            positions, percent_LP.min(0), percent_LP.max(0), color="tab:blue", alpha=0.15, label="all layers"
        )
        if len(share_LP) > 1:
            axis.plot(positions, percent_LP[0], color="tab:orange", linewidth=1, label="first layer")
            axis.plot(positions, percent_LP[-1], color="tab:green", linewidth=1, label="last layer")
        axis.plot(positions, percent_LP.mean(0), color="tab:blue", marker=".", label="mean of the layers")
        axis.axhline(chance[domain] * 100, color="gray", linestyle=":", linewidth=1, label="chance")
        axis.set_title(domain, parse_math=False)  # names may have dollar signs
        axis.set_ylim(0, 102)
        if len(set(torch.tensor(starts).diff().tolist())) > 1:
            axis.set_xscale("log", base=2)
    _leave_out(axes, len(shown))
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("position in the text (tokens)", fontsize="medium")
    figure.supylabel("compliance (%)", fontsize="medium")
    _save(figure, path, _title("Probability given to the experts of the token's domain", len(shown), len(compliance)))


def plot_expert_scores(
    values: Mapping[str, Sequence[float]],
    tasks: Sequence[str],
    higher_is_better: Sequence[bool | None],
    path: str | Path,
) -> None:
    """
    Heat map of what each expert reaches alone, with the model and its base: a row per model, a column per task. Colors
    compare within a task, from its worst value to its best one; where better is unknown, higher counts as better.

    Args:
        values: "model", "expert 0", … → one value per task.
        tasks: the columns' names.
        higher_is_better: of each task's metric.
        path: the file to write.
    """
    value_MT = torch.tensor(list(values.values()), dtype=torch.float64)
    sign_T = torch.tensor([-1.0 if better is False else 1.0 for better in higher_is_better], dtype=torch.float64)
    good_MT = value_MT * sign_T
    low_T, high_T = good_MT.amin(0), good_MT.amax(0)
    relative_MT = ((good_MT - low_T) / (high_T - low_T).clamp(min=1e-12)).nan_to_num(0.0)
    rows, columns = relative_MT.shape
    figure = _figure(max(5.0, min(16.0, 2.6 + 0.9 * columns)), max(3.0, min(16.0, 1.6 + 0.34 * rows)))
    axis = figure.subplots()
    image = axis.imshow(relative_MT.numpy(), cmap="viridis", vmin=0, vmax=1, aspect="auto")
    if columns <= _CELLS_WITH_NUMBERS:
        for row in range(rows):
            for column in range(columns):
                color = "white" if relative_MT[row, column] < 0.6 else "black"
                text = f"{float(value_MT[row, column]):.3g}"
                axis.text(column, row, text, ha="center", va="center", color=color, fontsize=7)
    axis.set_xticks(range(columns), tasks, rotation=45, ha="right", fontsize=7, parse_math=False)
    axis.set_yticks(range(rows), list(values), fontsize=7, parse_math=False)
    bar = figure.colorbar(image, ax=axis, shrink=0.9)
    bar.set_ticks([0, 1], labels=["worst", "best"])
    _save(figure, path, "Each expert alone, by task")


def plot_load_over_time(
    steps: Sequence[int], variations: Sequence[Sequence[float]], untrained: float, path: str | Path
) -> None:
    """
    How uneven the load is during training: the median over layers, half of them, and all.

    Args:
        steps: the steps.
        variations: each layer's coefficient of variation at each of the steps, [steps, L].
        untrained: what gates with random weights have, about.
        path: the file to write.
    """
    variation_SL = torch.tensor(variations, dtype=torch.float64)
    least, low, median, high, most = variation_SL.quantile(
        torch.tensor([0, 0.25, 0.5, 0.75, 1]).double(), dim=1
    ).numpy()
    figure = _figure(7.0, 4.0)
    axis = figure.subplots()
    axis.fill_between(steps, least, most, color="tab:blue", alpha=0.12, linewidth=0)
    axis.fill_between(steps, low, high, color="tab:blue", alpha=0.25, linewidth=0)
    axis.plot(steps, median, color="tab:blue")
    axis.axhline(untrained, color="gray", linestyle=":", linewidth=1)
    for value, text in ((median[-1], " median of the layers"), (untrained, " untrained gates")):
        axis.annotate(text, (steps[-1], value), va="center", fontsize=8, annotation_clip=False)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("step")
    axis.set_ylabel("coefficient of variation of a layer's load")
    _save(figure, path, "Load in training (shaded: half of the layers, all layers)")


def _write_numbers(axis: Any, share: torch.Tensor, top: float) -> None:
    """Percentages in the cells of a heat map, unless there are too many of them."""
    rows, columns = share.shape
    if max(rows, columns) > _CELLS_WITH_NUMBERS:
        return
    for row in range(rows):
        for column in range(columns):
            value = float(share[row, column])
            if value == value:  # no number on the diagonal of co-activation
                color = "white" if value < 0.6 * top else "black"
                axis.text(column, row, f"{value * 100:.0f}", ha="center", va="center", color=color, fontsize=7)


def _grid(count: int, most: int) -> tuple[int, int]:
    """Columns and rows of `count` panels."""
    columns = min(count, most)
    return columns, -(-count // columns)


def _leave_out(axes: Any, used: int) -> None:
    """Hide the panels after the used ones; those above them then have the ticks' labels."""
    columns = axes.shape[1]
    for index, axis in list(enumerate(axes.flat))[used:]:
        axis.set_visible(False)
        axes.flat[index - columns].xaxis.set_tick_params(labelbottom=True)


def _title(title: str, shown: int, total: int) -> str:
    return f"{title} ({shown} of {total} domains)" if shown < total else title


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: str | Path, title: str) -> None:
    import matplotlib

    if title:
        figure.suptitle(title, parse_math=False)
    with matplotlib.rc_context({"svg.hashsalt": "moe-peft"}):
        figure.savefig(path, dpi=150, metadata=_METADATA[Path(path).suffix])


def _ticks(n: int, most: int = 16) -> list[int]:
    return list(range(0, n, -(-n // most)))
