"""Figures of routing and of methods, as files whose suffix says the format: .png, .pdf or .svg."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from .token_classes import TOKEN_CLASSES

DPI = 150
MOST_PANELS = 12  # of a figure with one panel per domain or layer, and of a panel's layers
_MOST_EXPERTS = 16  # with more, numbers in the cells would be unreadable
# What a file would hold besides the drawing: left out, so that every matplotlib version writes the same bytes.
_METADATA = {
    ".png": {"Software": None},
    ".pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    ".svg": {"Creator": None, "Date": None},
}
SUFFIXES = tuple(_METADATA)
FORMATS = tuple(suffix.removeprefix(".") for suffix in _METADATA)

# The name of every method of recipes, and its color in all figures: those of Okabe and Ito, which color-blind
# people tell apart.
_METHODS = {
    "base": ("base", "#8c8c8c"),
    "dense": ("dense", "#8c8c8c"),
    "lora": ("LoRA", "#e69f00"),
    "sft": ("SFT", "#e69f00"),
    "experts": ("MoE-LoRA", "#0072b2"),
    "loramoe_pt": ("LoRAMoE-PT", "#0072b2"),
    "upcycle_pt": ("Upcycle-PT", "#0072b2"),
    "copy": ("copy", "#0072b2"),
    "loramoe_sft": ("LoRAMoE-SFT", "#56b4e9"),
    "upcycle_sft": ("Upcycle-SFT", "#56b4e9"),
    "drop": ("drop", "#009e73"),
    "pesc": ("PESC", "#009e73"),
    "self_moe": ("Self-MoE", "#cc79a7"),
    "upit": ("UpIT", "#d55e00"),
    "mean": ("mean of the checkpoints", "#7a6a00"),
    "checkpoints": ("checkpoints", "#d55e00"),
}
# The same of the ways to use several adapters, which have no other names.
_WAYS = {
    "mixture": "#0072b2", "mean of the adapters": "#7a6a00", "mean of four LoRAs": "#7a6a00",
    "mean of the LoRAs": "#7a6a00", "one LoRA on all rows": "#009e73", "one LoRA for all": "#009e73",
    "joint LoRA": "#009e73", "one LoRA in turn": "#e69f00",
    "picked by its prompt": "#cc79a7", "each its own LoRA": "#333333", "its own LoRA for each row": "#333333",
}  # fmt: skip


def method_name(method: str) -> str:
    """The name that people know a method of recipes by."""
    return _METHODS[method][0] if method in _METHODS else method


def method_color(name: str) -> str | None:
    """A method's color; of a variant such as "UpIT, random routers" its method's. None for another name."""
    return {**dict(_METHODS.values()), **_WAYS}.get(name.partition(",")[0])


# --- where tokens go --------------------------------------------------------------------------------------------------


def plot_shares(
    shares: Mapping[str, torch.Tensor],
    path: str | Path,
    title: str,
    experts: Mapping[str, Sequence[int]] | None = None,
    sizes: Sequence[int] | None = None,
) -> None:
    """
    Heat maps of the share of assignments per expert (columns) and layer (rows), one panel per domain, of the first 12.
    White is an even share. Of more than 12 layers, the most uneven ones: with `experts` those that comply least.

    Args:
        shares: domain → [L, n]; each layer sums to 1.
        path: the file to write.
        title: the figure's title.
        experts: domain → the experts that should serve it, which are outlined.
        sizes: experts of each layer; None: n in all.
    """
    shown = dict(list(shares.items())[:MOST_PANELS])
    share_DLN = torch.stack(list(shown.values())).double()
    L, n = share_DLN.shape[1:]
    size_L = torch.tensor(sizes or [n] * L)
    share_DLN = share_DLN.masked_fill(torch.arange(n) >= size_L[:, None], float("nan"))
    if experts is None:
        layers, chosen_by = _most_uneven(share_DLN.nanmean(0) * size_L[:, None]), "most uneven"
    else:
        inside = [share_LN[:, list(experts[d])].nansum(1) for d, share_LN in zip(shown, share_DLN, strict=True)]
        layers, chosen_by = _worst(-sum(inside)), "least compliant"
    _heat_maps(
        {domain: share_LN[layers] for domain, share_LN in zip(shown, share_DLN, strict=True)}, 1 / size_L[layers],
        path, _title(title, len(shown), len(shares)), "expert", "layer", "% of the layer's assignments",
        note=f"the {len(layers)} {chosen_by} of {L} layers, the worst on top" if len(layers) < L else "",
        names=layers, outlined=experts,
    )  # fmt: skip


def plot_coactivation(counts_LNN: torch.Tensor, path: str | Path) -> None:
    """
    Which experts serve the same tokens, one panel per layer, of up to 12 layers: of the tokens of the row's expert, the
    share that the column's also serves. White is what independent experts would share.

    Args:
        counts_LNN: number of tokens that both experts serve, [L, n, n]; the diagonal has each expert's tokens.
        path: the file to write.
    """
    tokens_LN = counts_LNN.diagonal(dim1=1, dim2=2)
    n = tokens_LN.shape[1]
    share_LNN = counts_LNN / tokens_LN.clamp(min=1).unsqueeze(2)
    share_LNN = share_LNN.masked_fill(torch.eye(n, dtype=torch.bool), float("nan"))
    even = (counts_LNN.sum() / tokens_LN.sum().clamp(min=1) - 1) / max(n - 1, 1)
    panels, note = _panels_of_layers(share_LNN, tokens_LN)
    columns, rows, values = "also chosen: expert", "of the tokens of expert", "% of its tokens"
    _heat_maps(panels, even.clamp(min=1e-3), path, "Experts chosen together", columns, rows, values, note)


def plot_token_classes(counts_CLN: torch.Tensor, path: str | Path) -> None:
    """Each token class's share of assignments per expert, one panel per layer, of up to 12; counts are [C, L, n]."""
    seen = counts_CLN.sum((1, 2)) > 0
    share_CLN = counts_CLN[seen] / counts_CLN[seen].sum(2, keepdim=True).clamp(min=1)
    panels, note = _panels_of_layers(share_CLN.transpose(0, 1), counts_CLN.sum(0))
    names = [name for name, is_seen in zip(TOKEN_CLASSES, seen, strict=True) if is_seen]
    even = torch.tensor(1 / counts_CLN.shape[2])
    _heat_maps(panels, even, path, "Kinds of tokens", "expert", "", "% of the kind's assignments", note, names)


def _panels_of_layers(values_LRN: torch.Tensor, load_LN: torch.Tensor) -> tuple[dict[str, torch.Tensor], str]:
    """Up to 12 layers in their order, the most uneven ones; and a note that says so."""
    layers = sorted(_most_uneven(load_LN / load_LN.mean(1, keepdim=True).clamp(min=1)))
    note = f"the {len(layers)} most uneven of {len(values_LRN)} layers" if len(layers) < len(values_LRN) else ""
    return {f"layer {layer}": values_LRN[layer] for layer in layers}, note


def _most_uneven(load_LN: torch.Tensor) -> list[int]:
    """Layers by the spread of their loads, relative to even ones; NaN where there is no expert."""
    return _worst((load_LN - 1).square().nanmean(1))


def _worst(badness_L: torch.Tensor) -> list[int]:
    """All layers in their order, or the worst 12, the worst first."""
    few = len(badness_L) <= MOST_PANELS
    return list(range(len(badness_L))) if few else badness_L.topk(MOST_PANELS).indices.tolist()


def _heat_maps(
    panels: Mapping[str, torch.Tensor], even: torch.Tensor, path: str | Path, title: str, columns_are: str,
    rows_are: str, values_are: str, note: str = "", names: Sequence[Any] | None = None,
    outlined: Mapping[str, Sequence[int]] | None = None,
) -> None:  # fmt: skip
    """
    Heat maps of shares with one scale. NaN is left blank.

    Args:
        even: what is white, one number or one for each row.
        note: below the title.
        names: of the rows; None: their numbers.
        outlined: panel → columns that are outlined.
    """
    from matplotlib.colors import TwoSlopeNorm

    height_N, width_N = next(iter(panels.values())).shape
    names = list(names or range(height_N))
    # With numbers in the cells if a narrow page, or at least a wide one, has room for them.
    for page in (7.6, 11.6):
        width, height = 0.34 * width_N, 0.27 * height_N
        columns, rows = _grid(len(panels), min(4, max(1, int(page / (width + 0.3)))))
        if numbers := width_N <= _MOST_EXPERTS and rows * (height + 0.4) <= 12.5:
            break
    else:
        columns, rows = _grid(len(panels), 4)
        width, height = min(width, 8.0 / columns), min(height, 8.0 if rows == 1 else 10.5 / rows)
    width_of_page = max(4.4, 1.0 + columns * (width + 0.2) + (0 if numbers else 1.1))
    percent = f", {float(even.min() * 100):.3g} %" if even.min() == even.max() else ""
    keys = [f"cells: {values_are}; white: the even share{percent}"] if numbers else []
    keys += ["outlined: the domain's experts"] if outlined else []
    text = [line for part in (title, note, *keys) for line in wrap(part, int(12 * width_of_page))]
    figure = new_figure(width_of_page, 0.9 + 0.2 * len(text) + rows * (height + 0.4))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    relative = {name: (share / even.reshape(-1, 1)).numpy() for name, share in panels.items()}
    top = max(2.0, *(float(share[share == share].max(initial=0)) for share in relative.values()))
    norm, colors = TwoSlopeNorm(1, 0, top), _diverging()
    for axis, (name, share) in zip(axes.flat, relative.items(), strict=False):
        image = axis.imshow(share, cmap=colors, norm=norm, aspect="auto")
        axis.set_title(name, parse_math=False, fontsize=11)  # names may have dollar signs
        axis.set_xticks(_ticks(width_N, width))
        axis.set_yticks(ticks := _ticks(height_N, height), [str(names[i]) for i in ticks])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        if numbers:
            _write_numbers(axis, panels[name] * 100, colors(norm(share)))
        _outline(axis, (outlined or {}).get(name, ()), height_N)
    _leave_out(axes, len(panels))
    figure.supxlabel(columns_are, fontsize="medium")
    figure.supylabel(rows_are, fontsize="medium")
    if not numbers:
        bar = figure.colorbar(image, ax=axes, shrink=0.9, ticks=[0, 0.5, 1, (1 + top) / 2, top], format="%.2g")
        bar.set_label("× even share")
    save_figure(figure, path, "\n".join(text))


def _outline(axis: Any, columns: Sequence[int], height: int) -> None:
    """A frame around each run of neighboring columns."""
    for column in columns:
        edges = [[(column - 0.5, column + 0.5), (y, y)] for y in (-0.5, height - 0.5)]
        edges += [[(column + s / 2,) * 2, (-0.5, height - 0.5)] for s in (-1, 1) if column + s not in columns]
        for xs, ys in edges:
            axis.plot(xs, ys, color="black", linewidth=1.8, clip_on=False, solid_capstyle="projecting")


def _write_numbers(axis: Any, values: torch.Tensor, colors: Any, form: str = "{:.0f}") -> None:
    """Numbers in the cells of a heat map, in black or white, whatever is legible on the cell's color."""
    for row, column in torch.cartesian_prod(*map(torch.arange, values.shape)).tolist():
        value = float(values[row, column])
        if value == value:  # no number on the diagonal of co-activation
            color = "black" if colors[row, column][:3] @ (0.3, 0.59, 0.11) > 0.5 else "white"
            axis.text(column, row, form.format(value), ha="center", va="center", color=color, fontsize=9)


# --- compliance -------------------------------------------------------------------------------------------------------


def plot_compliance(
    compliance: Mapping[str, torch.Tensor], path: str | Path, starts: Sequence[int], chance: Mapping[str, float]
) -> None:
    """
    Mean compliance by position in the text, one panel per domain, of the first 12: every layer, their mean, and what
    uniform routers would reach.

    Args:
        compliance: domain → [L, P]; NaN for buckets without tokens.
        path: the file to write.
        starts: the first position of each bucket, [P].
        chance: domain → its share of the experts.
    """
    from matplotlib.ticker import ScalarFormatter

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
        (ends[f"chance {chance[domain]:.0%}"],) = axis.plot(
            positions,
            [chance[domain] * 100] * len(positions),
            color="black",
            linestyle="--",
            linewidth=1,
            label="chance",
        )
        axis.set_title(domain, parse_math=False, fontsize=11)  # names may have dollar signs
        axis.set_ylim(0, 102)
        axis.margins(x=0)
        if len(set(torch.tensor(starts).diff().tolist())) > 1:
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({*axis.get_xticks(), *positions} & {start + 1 for start in starts}))
            axis.xaxis.set_major_formatter(ScalarFormatter())
    for axis, ends in zip(axes.flat, labels, strict=False):  # all axes have their final limits
        _label_ends(axis, ends)
    _leave_out(axes, len(shown))
    figure.supxlabel("position in the text (tokens)", fontsize="medium")
    figure.supylabel("compliance (%)", fontsize="medium")
    title = "Router probability of the experts of the token's domain"
    save_figure(figure, path, _title(title, len(shown), len(compliance)))


# --- methods ----------------------------------------------------------------------------------------------------------


def plot_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], path: str | Path, x: str, y: str, scale: str = "log"
) -> None:
    """
    Lines through points (x, y), one for each name, which stands at its end. Methods have their colors, variants of one
    method differ by dashes, and other names get shades in their order.

    Args:
        x, y: names of the axes.
        scale: of y, matplotlib's.
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
    Bars with numbers, one group per domain, one bar per method, whose names stand beside the first group.

    Args:
        values: method → domain → value.
        path: the file to write.
        title: what the values are.
        form: of the numbers.
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
    figure = new_figure(6.4, 4.0)
    axis = figure.subplots()
    axis.fill_between(steps, least, most, color=method_color("MoE-LoRA"), alpha=0.12, linewidth=0)
    axis.fill_between(steps, low, high, color=method_color("MoE-LoRA"), alpha=0.25, linewidth=0)
    (line,) = axis.plot(steps, median, color=method_color("MoE-LoRA"))
    (dashes,) = axis.plot(steps, [untrained] * len(steps), color="black", linestyle="--", linewidth=1)
    axis.margins(x=0)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("step")
    axis.set_ylabel("coefficient of variation of a layer's load")
    _label_ends(axis, {"median layer": line, "untrained gates": dashes})
    save_figure(figure, path, "Load in training (shaded: half of the layers, all layers)")


# --- what they share --------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Any:
    """A figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: str | Path, title: str = "") -> None:
    """Write a figure, so that the same numbers are the same bytes, without the upper and right edges of axes."""
    import matplotlib

    for axis in figure.axes:
        if "right" in axis.spines:  # not of a color bar
            axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, parse_math=False, fontsize=11)
    with matplotlib.rc_context({"svg.hashsalt": "moe-peft"}):
        figure.savefig(path, dpi=DPI, metadata=_METADATA[Path(path).suffix])


def _label_ends(axis: Any, lines: Mapping[str, Any]) -> None:
    """Names at the ends of lines, moved apart where they would overlap."""
    to_axes = axis.transData + axis.transAxes.inverted()
    axis.autoscale_view()
    ends = sorted(
        ((name, line, line.get_xydata()[-1]) for name, line in lines.items() if len(line.get_xdata())),
        key=lambda end: end[2][1],
    )
    gap = 0.17 / (axis.get_position().height * axis.figure.get_size_inches()[1])  # of 9 points
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
    """From blue (less) over white to red (more), light enough for black numbers."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap

    shades = matplotlib.colormaps["RdBu_r"](torch.linspace(0.15, 0.85, 256).numpy())
    return LinearSegmentedColormap.from_list("diverging", shades)


def _shades(count: int) -> list[Any]:
    """Colors of one hue, from light to dark."""
    import matplotlib

    return list(matplotlib.colormaps["Blues"](torch.linspace(0.45, 1, count).numpy()))


def _grid(count: int, most: int) -> tuple[int, int]:
    """Columns and rows of `count` panels, with rows of like length."""
    rows = -(-count // most)
    return -(-count // rows), rows


def _leave_out(axes: Any, used: int) -> None:
    """Hide the panels after the used ones; those above them then have the ticks' labels."""
    columns = axes.shape[1]
    for index, axis in list(enumerate(axes.flat))[used:]:
        axis.set_visible(False)
        axes.flat[index - columns].xaxis.set_tick_params(labelbottom=True)


def _title(title: str, shown: int, total: int) -> str:
    return f"{title} ({shown} of {total} domains)" if shown < total else title


def _ticks(n: int, inches: float) -> list[int]:
    """Which of n rows or columns have labels: all, or every 5th, 10th, … as there is room for them."""
    return list(range(0, n, next(step for step in (1, 5, 10, 20, 50, n) if step * inches / n >= 0.2)))
