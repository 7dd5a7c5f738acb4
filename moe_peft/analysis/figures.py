"""Figures of routing and of methods, as files. The suffix sets the format: .png, .pdf or .svg."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

DPI = 150
MOST_PANELS = 12  # panels of a figure with one panel per domain, and layers of a panel
_MOST_EXPERTS = 16  # with more, numbers in the cells would be unreadable
_LONGEST_NAME = 16  # letters of an expert's name under a column
# Metadata to leave out, so that every matplotlib version writes the same bytes.
_METADATA = {
    ".png": {"Software": None},
    ".pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    ".svg": {"Creator": None, "Date": None},
}
SUFFIXES = tuple(_METADATA)

# Color → methods with this color in all figures. Color-blind people can tell Okabe and Ito's colors apart.
_COLORS = {
    "#8c8c8c": ("base", "dense"),
    "#e69f00": ("LoRA", "SFT", "one LoRA in turn"),
    "#0072b2": ("MoE-LoRA", "LoRAMoE-PT", "Upcycle-PT", "copy", "mixture"),
    "#56b4e9": ("LoRAMoE-SFT", "Upcycle-SFT"),
    "#009e73": ("drop", "PESC", "one LoRA on all rows", "one LoRA for all", "joint LoRA"),
    "#cc79a7": ("Self-MoE", "picked by its prompt"),
    "#d55e00": ("UpIT", "checkpoints"),
    "#7a6a00": ("mean of the checkpoints", "mean of the adapters", "mean of four LoRAs", "mean of the LoRAs"),
    "#333333": ("each its own LoRA", "its own LoRA for each row"),
}


def method_color(name: str) -> str | None:
    """Return a method's color; a variant such as "UpIT, random routers" has its method's. None for other names."""
    return next((color for color, names in _COLORS.items() if name.partition(",")[0] in names), None)


# --- where tokens go --------------------------------------------------------------------------------------------------


def telling_layer(shares: Mapping[str, torch.Tensor]) -> int:
    """Return the layer whose shares [L, n] differ most between domains."""
    share_DLN = torch.stack(list(shares.values()))
    return int((share_DLN - share_DLN.mean(0)).abs().sum((0, 2)).argmax())


def plot_shares(
    shares: Mapping[str, torch.Tensor],
    path: str | Path,
    title: str,
    experts: Mapping[str, Sequence[int]] | None = None,
    sizes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """
    Plot heat maps of the share of assignments per expert (columns) and layer (rows), one panel per domain, for the
    first 12. White is an even share. Of more than 12 layers, the figure has the most uneven (with `experts` the least
    compliant), and the layer with the largest differences between domains.

    Args:
        shares: domain → [L, n]; each layer sums to 1.
        path: the file to write.
        title: the figure's title.
        experts: domain → the experts that should serve it; they are outlined.
        sizes: number of experts of each layer; None: n in all.
        names: names of the experts; None: their numbers.
    """
    from matplotlib.colors import TwoSlopeNorm

    shown, colors = dict(list(shares.items())[:MOST_PANELS]), _diverging()
    share_DLN = torch.stack(list(shown.values())).double()
    L, n = share_DLN.shape[1:]
    size_L = torch.tensor(sizes or [n] * L)
    share_DLN = share_DLN.masked_fill(torch.arange(n) >= size_L[:, None], float("nan"))
    # Select the layers: all in order, or the worst 12, the worst first. The layer of a page's headline is always among
    # them.
    if experts is None:
        badness_L, chosen_by = (share_DLN.nanmean(0) * size_L[:, None] - 1).square().nanmean(1), "most uneven"
    else:
        inside = [share_LN[:, list(experts[d])].nansum(1) for d, share_LN in zip(shown, share_DLN, strict=True)]
        badness_L, chosen_by = -sum(inside), "least compliant"
    layers = list(range(L)) if L <= MOST_PANELS else badness_L.topk(MOST_PANELS).indices.tolist()
    worst, telling = len(layers), telling_layer(shares)
    if len(shares) > 1 and telling not in layers:
        worst, layers[-1] = worst - 1, telling
    share_DLN, even_L = share_DLN[:, layers], 1 / size_L[layers]
    relative_DLN = share_DLN / even_L[:, None]
    top = max(2.0, float(relative_DLN.nan_to_num().max()))
    norm = TwoSlopeNorm(1, 0, top)
    # Write numbers into the cells if a page has room for them.
    width, height = 0.34 * n, 0.27 * len(layers)
    columns, rows = _grid(len(shown), min(4, max(1, int(11.6 / (width + 0.3)))))
    if not (numbers := n <= _MOST_EXPERTS and rows * (height + 0.4) <= 12.5):
        columns, rows = _grid(len(shown), 4)
        width, height = min(width, 8.0 / columns), min(height, 10.5 / rows)
    width_of_page = max(4.4, 1.0 + columns * (width + 0.2) + (0 if numbers else 1.1))
    even = f", {100 * float(even_L[0]):.3g} %" if even_L.min() == even_L.max() else ""
    lines = [
        _of_domains(title, len(shown), len(shares)),
        f"the {worst} {chosen_by} of {L} layers, the worst on top" if len(layers) < L else "",
        f"at the bottom layer {telling}, where domains differ most" if worst < len(layers) else "",
        f"cells: % of the layer's assignments; white: the even share{even}" if numbers else "",
        "outlined: the domain's experts" if experts else "",
    ]
    text = [part for line in lines for part in wrap(line, int(12 * width_of_page))]
    labels = [
        name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…" for name in names or map(str, range(n))
    ]
    upright = names is not None and max(map(len, labels)) > 2
    height_of_names = 0.08 * max(map(len, labels)) if upright else 0.0
    figure = new_figure(width_of_page, 0.9 + 0.2 * len(text) + rows * (height + 0.4) + height_of_names)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis, domain, share_LN, relative_LN in zip(axes.flat, shown, share_DLN, relative_DLN.numpy(), strict=False):
        image = axis.imshow(relative_LN, cmap=colors, norm=norm, aspect="auto")
        axis.set_title(domain, parse_math=False, fontsize=11)  # names may have dollar signs
        ticks = range(0, n, 1 if numbers else max(1, n // 8))
        axis.set_xticks(ticks, [labels[i] for i in ticks], rotation=90 if upright else 0, parse_math=False)
        axis.set_yticks(range(len(layers)), layers)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        if numbers:
            _write_numbers(axis, share_LN * 100, colors(norm(relative_LN)))
        _outline(axis, (experts or {}).get(domain, ()), len(layers))
    _leave_out(axes, len(shown))
    figure.supxlabel("expert", fontsize="medium")
    figure.supylabel("layer", fontsize="medium")
    if not numbers:
        bar = figure.colorbar(image, ax=axes, shrink=0.9, ticks=[0, 0.5, 1, (1 + top) / 2, top], format="%.2g")
        bar.set_label("× even share")
    save_figure(figure, path, "\n".join(text))


def _outline(axis: Any, columns: Sequence[int], height: int) -> None:
    """Draw a frame around each run of neighboring columns."""
    for column in columns:
        edges = [[(column - 0.5, column + 0.5), (y, y)] for y in (-0.5, height - 0.5)]
        edges += [[(column + s / 2,) * 2, (-0.5, height - 0.5)] for s in (-1, 1) if column + s not in columns]
        for xs, ys in edges:
            axis.plot(xs, ys, color="black", linewidth=1.8, clip_on=False, solid_capstyle="projecting")


def _write_numbers(axis: Any, values_LN: torch.Tensor, colors: Any) -> None:
    """Write numbers into the cells of a heat map, in black or white, to be legible on the cell's color."""
    for row, column in torch.cartesian_prod(*map(torch.arange, values_LN.shape)).tolist():
        value = float(values_LN[row, column])
        if value == value:  # NaN where a layer has fewer experts
            color = "black" if colors[row, column][:3] @ (0.3, 0.59, 0.11) > 0.5 else "white"
            axis.text(column, row, f"{value:.0f}", ha="center", va="center", color=color, fontsize=9)


# --- compliance -------------------------------------------------------------------------------------------------------


def plot_compliance(
    compliance: Mapping[str, torch.Tensor], path: str | Path, starts: Sequence[int], chance: Mapping[str, float]
) -> None:
    """
    Plot mean compliance by position in the text, one panel per domain, for the first 12: every layer, their mean, and
    the compliance of uniform routers.

    Args:
        compliance: domain → [L, P]; NaN for buckets without tokens.
        path: the file to write.
        starts: the first position of each bucket, [P].
        chance: domain → its share of the experts.
    """
    shown = dict(list(compliance.items())[:MOST_PANELS])
    columns, rows = _grid(len(shown), 2 if len(shown) <= 4 else 3)
    figure = new_figure(max(4.4, 0.6 + 3.6 * columns), max(3.2, 0.9 + 2.5 * rows))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    labels: list[dict[str, Any]] = []
    for axis, (domain, share_LP) in zip(axes.flat, shown.items(), strict=False):
        seen = (~share_LP[0].isnan()).nonzero().flatten().tolist()
        positions, percent_LP = [starts[p] + 1 for p in seen], share_LP[:, seen].numpy() * 100
        L = len(percent_LP)
        for layer, (percent_P, color) in enumerate(zip(percent_LP, _shades(L), strict=True)):
            axis.plot(positions, percent_P, color=color, linewidth=1, label=f"layer {layer}")
        labels.append(ends := {f"layer {layer}": axis.lines[layer] for layer in {0, L - 1}})
        if L > 1:
            (ends["mean"],) = axis.plot(positions, percent_LP.mean(0), color="black", linewidth=2, label="mean")
        even, dashes = [chance[domain] * 100] * len(positions), {"color": "black", "linestyle": "--", "linewidth": 1}
        (ends[f"chance {chance[domain]:.0%}"],) = axis.plot(positions, even, label="chance", **dashes)
        axis.set_title(domain, parse_math=False, fontsize=11)  # names may have dollar signs
        axis.set_ylim(0, 102)
        axis.margins(x=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(positions)
        axis.xaxis.set_major_formatter("{x:g}")
    for axis, ends in zip(axes.flat, labels, strict=False):  # all axes have their final limits
        _label_ends(axis, ends)
    _leave_out(axes, len(shown))
    figure.supxlabel("position in the text (tokens)", fontsize="medium")
    figure.supylabel("compliance (%)", fontsize="medium")
    title = "Router probability of the experts of the token's domain"
    save_figure(figure, path, _of_domains(title, len(shown), len(compliance)))


# --- methods ----------------------------------------------------------------------------------------------------------


def plot_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], path: str | Path, x: str, y: str, scale: str = "log"
) -> None:
    """
    Plot lines through points (x, y), one for each name, with the name at its end. Methods have their colors. Variants
    of one method differ by dashes. Other names get shades in their order.

    Args:
        x, y: names of the axes.
        scale: scale of y, as in matplotlib.
    """
    from matplotlib.ticker import LogLocator

    figure = new_figure(6.4, 4.2)
    axis = figure.subplots()
    others = iter(_shades(sum(method_color(name) is None for name in curves)))
    styles: dict[str | None, Iterator[str]] = defaultdict(lambda: cycle(("-", "--", ":", "-.")))
    for name, points in curves.items():
        color = method_color(name)
        style = "-" if color is None else next(styles[color])
        axis.plot(*zip(*points, strict=True), color=color or next(others), linestyle=style)
    axis.margins(x=0)
    axis.set_yscale(scale)
    if scale == "log":
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    _label_ends(axis, dict(zip(curves, axis.lines, strict=True)))
    save_figure(figure, path)


def plot_bars(values: Mapping[str, Mapping[str, float]], path: str | Path, title: str, form: str = "{:.2f}") -> None:
    """
    Plot bars with numbers, one group per domain, one bar per method. The names of the methods are beside the first
    group.

    Args:
        values: method → domain → value.
        path: the file to write.
        title: meaning of the values.
        form: format of the numbers.
    """
    domains, M = list(next(iter(values.values()))), len(values)
    figure = new_figure(5.6, 0.9 + 0.23 * len(domains) * (M + 0.8))
    axis = figure.subplots()
    for i, (method, by_domain) in enumerate(values.items()):
        y = [d + (i - (M - 1) / 2) / (M + 0.8) for d in range(len(domains))]
        color = method_color(method)
        bars = axis.barh(y, [by_domain[d] for d in domains], 0.92 / (M + 0.8), color=color)
        labels = [form.format(by_domain[d]) for d in domains]
        axis.bar_label(bars, [f"{labels[0]}  {method}", *labels[1:]], padding=3, fontsize=9, color="black")
    axis.set_yticks(range(len(domains)), domains, fontsize=11, parse_math=False)
    axis.invert_yaxis()
    axis.tick_params(left=False, bottom=False, labelbottom=False)
    axis.spines["bottom"].set_visible(False)
    axis.margins(x=0.15)
    save_figure(figure, path, title)


# --- common parts -----------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Any:
    """Create a figure of the given size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: str | Path, title: str = "") -> None:
    """Write a figure without the upper and right edges of axes. The same numbers give the same bytes."""
    import matplotlib

    for axis in figure.axes:
        if "right" in axis.spines:  # color bars have no edges
            axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, parse_math=False, fontsize=11)
    with matplotlib.rc_context({"svg.hashsalt": "moe-peft"}):
        figure.savefig(path, dpi=DPI, metadata=_METADATA[Path(path).suffix])


def _label_ends(axis: Any, lines: Mapping[str, Any]) -> None:
    """Write names at the ends of lines, moved apart if they would overlap."""
    to_axes = axis.transData + axis.transAxes.inverted()
    axis.autoscale_view()
    ends = sorted(
        ((name, line, line.get_xydata()[-1]) for name, line in lines.items() if len(line.get_xdata())),
        key=lambda end: end[2][1],
    )
    gap = 0.17 / (axis.get_position().height * axis.figure.get_size_inches()[1])  # for letters of 9 points
    heights: list[float] = []
    for _, _, end in ends:
        heights.append(max(to_axes.transform(end)[1], heights[-1] + gap if heights else -1.0))
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], heights[i + 1] - gap if i + 1 < len(heights) else 1.0)
    for (name, line, end), height in zip(ends, heights, strict=True):
        axis.annotate(
            name, end, (1.03, height), textcoords="axes fraction", va="center", fontsize=9, parse_math=False,
            color=(color := line.get_color()),
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


def _diverging() -> Any:
    """Return colors from blue (less) over white to red (more), light enough for black numbers."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap

    shades = matplotlib.colormaps["RdBu_r"](torch.linspace(0.15, 0.85, 256).numpy())
    return LinearSegmentedColormap.from_list("diverging", shades)


def _shades(count: int) -> list[Any]:
    """Return `count` colors of one hue, from light to dark."""
    import matplotlib

    return list(matplotlib.colormaps["Blues"](torch.linspace(0.45, 1, count).numpy()))


def _grid(count: int, most: int) -> tuple[int, int]:
    """Return columns and rows for `count` panels, with rows of similar length."""
    rows = -(-count // most)
    return -(-count // rows), rows


def _leave_out(axes: Any, used: int) -> None:
    """Hide the panels after the used ones. The panels above them then have the ticks' labels."""
    columns = axes.shape[1]
    for index, axis in list(enumerate(axes.flat))[used:]:
        axis.set_visible(False)
        axes.flat[index - columns].xaxis.set_tick_params(labelbottom=True)


def _of_domains(title: str, shown: int, total: int) -> str:
    return f"{title} ({shown} of {total} domains)" if shown < total else title
