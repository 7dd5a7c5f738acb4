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
    layers, n = next(iter(shares.values())).shape
    shown = dict(list(shares.items())[:MOST_PANELS])
    columns, rows = _grid(len(shown), 4)
    width, height = min(0.55 * n, 9.6 / columns), min(0.42 * layers, 8.0 if rows == 1 else 10.5 / rows)
    figure = _figure(max(5.0, 1.6 + columns * (width + 0.2)), max(2.6, 0.9 + rows * (height + 0.6)))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    top = max(float(share.max()) for share in shown.values())
    for axis, (domain, share) in zip(axes.flat, shown.items(), strict=False):
        image = axis.imshow(share.numpy() * 100, cmap="viridis", vmin=0, vmax=top * 100, aspect="auto")
        axis.set_title(domain, parse_math=False)  # names may have dollar signs
        axis.set_xticks(_ticks(n))
        axis.set_yticks(_ticks(layers))
        if width / n >= _SMALLEST_WITH_NUMBERS:
            _write_numbers(axis, share, top)
    _leave_out(axes, len(shown))
    figure.supxlabel("expert", fontsize="medium")
    figure.supylabel("layer", fontsize="medium")
    figure.colorbar(image, ax=axes, shrink=0.9).set_label("share of token assignments (%)")
    _save(figure, path, _title(title, len(shown), len(shares)))


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
    _write_numbers(axis, share, float(share.nan_to_num(0).max()))
    axis.set_xticks(_ticks(n))
    axis.set_yticks(_ticks(n))
    axis.set_xlabel("also chosen: expert")
    axis.set_ylabel("of the tokens of expert")
    figure.colorbar(image, ax=axis, shrink=0.9).set_label("share of its tokens (%)")
    _save(figure, path, "Experts chosen together, all layers")


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


def plot_token_classes(counts_CN: torch.Tensor, path: str | Path) -> None:
    """Each token class's share of assignments per expert, over all layers; counts are [C, n]."""
    seen = [i for i in range(len(TOKEN_CLASSES)) if counts_CN[i].sum() > 0]
    share = counts_CN[seen] / counts_CN[seen].sum(1, keepdim=True)
    n = counts_CN.shape[1]
    figure = _figure(max(5.0, min(10.0, 2.5 + 0.5 * n)), 1.6 + 0.45 * len(seen))
    axis = figure.subplots()
    image = axis.imshow(share.numpy() * 100, cmap="viridis", vmin=0, aspect="auto")
    _write_numbers(axis, share, float(share.max()))
    axis.set_xticks(_ticks(n))
    axis.set_yticks(range(len(seen)), [f"{TOKEN_CLASSES[i]} ({int(counts_CN[i].sum()):,})" for i in seen])
    axis.set_xlabel("expert")
    figure.colorbar(image, ax=axis, shrink=0.9).set_label("share of its assignments (%)")
    _save(figure, path, "Classes of tokens (assignments), all layers")


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
