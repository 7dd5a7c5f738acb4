"""Table and figure of the UpIT study, from the runs that are finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from examples.toy.tasks import TASKS

from .differences import paired_difference
from .rates import best_rate
from .runs import Ledger
from .upit_methods import (
    CONFIRMED,
    CURVES,
    EXPANDED,
    IDEAS,
    LATER,
    MAIN,
    SEEDS,
    SIZES,
    TUNING_SEED,
    UNVARIED,
    VARIED,
    WHOLE,
)  # fmt: skip
from .upit_study import at_end, tuned

Key = tuple[str, int, str]  # order, seed, method
PRIMARY = (
    *(("UpIT", other) for other in MAIN if other != "UpIT" and not other.startswith("UpIT 4→8")),
    ("UpIT 4→8, genetic", "UpIT 4→8, random"),
    ("UpIT 4→8, genetic", "UpIT"),
)
SWEEPS = {
    "share of the data": {share: f"{share:g} of the data" for share in (0.125, 0.25, 0.5, 1)},
    "experts": {n: f"{n} experts" for n in (2, 4, 8, 16)},
    "active experts": {k: f"{k} active" for k in (1, 2, 4)},
}


class Results:
    """Held-out results along stage 4, by order, seed and method."""

    def __init__(self, ledger: Ledger, size: str) -> None:
        self.ledger, self.size = ledger, SIZES[size]
        self.runs: dict[Key, dict[str, Any]] = {
            (r["order"], r["seed"], r["method"]): r for r in ledger.records() if r["seed"] != TUNING_SEED
        }

    def mean(self, orders: Sequence[str], method: str, outcome: str, seeds: Sequence[int] = SEEDS) -> float | None:
        return self.average(orders, method, lambda run: at_end(run, outcome), seeds)

    def average(
        self, orders: Sequence[str], method: str, value: Callable[[dict[str, Any]], float], seeds: Sequence[int] = SEEDS
    ) -> float | None:
        """The mean of a run's value; None unless all these runs are there."""
        found = [self.runs.get((order, seed, method)) for order in orders for seed in seeds]
        known = [value(run) for run in found if run is not None]
        return sum(known) / len(known) if known and len(known) == len(found) else None

    def complete(self, names: Iterable[str]) -> list[int]:
        """The seeds that have all these runs, order iid."""
        wanted = list(names)
        return [seed for seed in SEEDS if all(("iid", seed, name) in self.runs for name in wanted)]

    def difference(
        self, method: str, other: str, orders: Sequence[str], outcome: str, seeds: Sequence[int] = SEEDS,
        other_orders: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """`method` minus `other`, averaged over orders and paired by seed, with its 95 % interval."""
        asked = ((orders, method), (other_orders or orders, other))
        pairs = [[self.mean(own, name, outcome, [seed]) for own, name in asked] for seed in seeds]
        whole = [pair for pair in pairs if None not in pair]
        if len(whole) < 2:
            return "–"
        fewer = f" ({len(whole)} seeds)" if len(whole) < len(seeds) else ""
        return " ".join(paired_difference(*zip(*whole, strict=True)).cells()) + fewer


def report(ledger: Ledger, table: Path, size: str) -> None:
    """Write the tables to `table`, the figure beside it, and print the tables."""
    results = Results(ledger, size)
    lines = [*_head(results, table, size), *_contrasts(results), *_losses(results), *_tasks(results)]
    if results.size.variants:
        lines += [*_sweeps(results), *_ideas(results), *_later(results)]
    text = "\n".join(lines).rstrip("\n")
    table.write_text(text + "\n")
    _figure(results, table.with_suffix(".png"))
    print(text)


def _head(results: Results, table: Path, size: str) -> list[str]:
    orders, methods = results.size.orders, results.size.methods
    wanted = [(order, name) for name in methods for order in orders if order == "iid" or name not in EXPANDED]
    whole = [seed for seed in SEEDS if all((order, seed, name) in results.runs for order, name in wanted)]
    own = f" --size {size}" if size != next(iter(SIZES)) else ""
    curves = ", and over data, experts, active experts" if results.size.variants else ""
    return [
        "# When does UpIT pay?", "",
        f"Made by `python -m benchmarks.upit_study run{own} --workers 2` and `… report{own}`. The script's head says",
        "what was fixed before the first run. Seeds with all runs of the main table: "
        f"{len(whole)} of {len(SEEDS)}. Losses are",
        "per answer token, lower is better; exact matches are shares of 500 held-out answers, higher is better.", "",
        f"![Loss along stage 4{curves}]({table.with_suffix('.png').name})", "",
    ]  # fmt: skip


def _contrasts(results: Results) -> list[str]:
    orders = results.size.orders
    several = len(orders) > 1
    columns = ["loss, all orders", *orders, "exact, all orders"] if several else ["loss", "exact"]
    rows = ["## Primary contrasts", "", f"| contrast | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for method, other in PRIMARY:
        if {method, other} <= set(results.size.methods):
            every = ("iid",) if method in EXPANDED else orders
            asked = (every, *zip(orders)) if several else (every,)
            cells = [results.difference(method, other, own, "loss") for own in asked]
            cells.append(results.difference(method, other, every, "exact"))
            rows.append(f"| {method} minus {other} | {' | '.join(cells)} |")
    return [*rows, ""]


def _losses(results: Results) -> list[str]:
    orders = results.size.orders
    outcomes: dict[str, Callable[[dict[str, Any]], float]] = {
        "loss": lambda run: at_end(run, "loss"),
        "exact": lambda run: at_end(run, "exact"),
        "loss at the start of stage 4": lambda run: run["points"][0]["loss"],
    }
    columns = [f"{outcome}, {order}" for outcome in outcomes for order in orders]
    rows = ["## All methods", "", f"| method | rate | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for name in results.size.methods:
        as_name = MAIN[name].tuned_as or name
        losses = tuned(results.ledger, as_name)
        rate = f"{best_rate(losses):g}" if losses else "–"
        cells = [_cell(results.average([order], name, value)) for value in outcomes.values() for order in orders]
        rows.append(f"| {name} | {rate} | {' | '.join(cells)} |")
    return [*rows, ""]


def _tasks(results: Results) -> list[str]:
    rows = ["## Exact matches by task (order iid)", ""]
    rows += [f"| method | {' | '.join(TASKS)} |", f"|---|{'---|' * len(TASKS)}"]
    for name in results.size.methods:
        values = [partial(at_end, outcome="exact", task=task) for task in TASKS]
        cells = [_cell(results.average(["iid"], name, value), digits=2) for value in values]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return [*rows, ""]


def _sweeps(results: Results) -> list[str]:
    rows = ["## Data, experts, active experts (order iid)", ""]
    for sweep, labels in SWEEPS.items():
        methods, seeds = sweep_of(results, sweep)
        columns = [*methods, *(f"UpIT minus {other}" for other in methods[1:])]
        rows += [f"| {sweep}, {len(seeds)} seeds | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        for value, label in labels.items():
            names = [_varied(method, label) for method in methods]
            cells = [_cell(results.mean(["iid"], name, "loss", seeds)) for name in names]
            cells += [results.difference(names[0], other, ["iid"], "loss") for other in names[1:]]
            rows.append(f"| {value:g} | {' | '.join(cells)} |")
        rows.append("")
    return rows


def sweep_of(results: Results, sweep: str) -> tuple[list[str], list[int]]:
    """A sweep's methods, UpIT first, and the seeds that have all its runs."""
    methods = [*VARIED, *(WHOLE if sweep == "share of the data" else ())]
    return methods, results.complete(_varied(method, label) for method in methods for label in SWEEPS[sweep].values())


def _ideas(results: Results) -> list[str]:
    seeds, ten = [TUNING_SEED + i for i in (1, 2)], "UpIT, 10 experts"
    rows = [
        "## Beyond the paper",
        "",
        "On two further tuning seeds, order iid: the variant minus UpIT, which differs in what the name says. Label",
        f"buckets need an expert for each of the ten tasks, so theirs is minus {ten}.",
        "",
    ]
    rows += ["| variant | loss | exact | difference of the loss |", "|---|---|---|---|"]
    for name in ("UpIT", *IDEAS):
        cells = [_cell(results.mean(["iid"], name, outcome, seeds)) for outcome in ("loss", "exact")]
        other = ten if name.startswith("label buckets") else "UpIT"
        versus = "" if name == "UpIT" else results.difference(name, other, ["iid"], "loss", seeds)
        rows.append(f"| {name} | {' | '.join(cells)} | {versus} |")
    rows += [
        "",
        "The best by loss, on the seeds of the main table:",
        "",
        "| contrast | loss | exact |",
        "|---|---|---|",
    ]
    cells = [results.difference(CONFIRMED, UNVARIED, ["iid"], outcome) for outcome in ("loss", "exact")]
    return [*rows, f"| {CONFIRMED} minus UpIT | {' | '.join(cells)} |", ""]


def _later(results: Results) -> list[str]:
    rows = [
        "## Later runs",
        "",
        "In the runs above, stage 3 averages its losses over each row, then over rows; here over tokens at once.",
        "",
        "| contrast | order | loss | exact |",
        "|---|---|---|---|",
    ]
    upit, genetic, random = LATER["blocks"]
    contrasts = [
        ("iid", upit, "iid", UNVARIED),
        ("iid", upit, "iid", _varied("LoRAMoE-SFT", "8 experts")),
        *(("blocks", method, "blocks", other) for method, other in combinations((genetic, random, upit), 2)),
        ("blocks", upit, "iid", upit),
    ]
    for order, method, other_order, other in contrasts:
        cells = [
            results.difference(method, other, [order], outcome, other_orders=[other_order])
            for outcome in ("loss", "exact")
        ]
        orders = order if order == other_order else f"{order} minus {other_order}"
        rows.append(f"| {method} minus {other} | {orders} | {' | '.join(cells)} |")
    return rows


def _figure(results: Results, path: Path) -> None:
    """Loss along stage 4 for each order, and the sweeps."""
    orders, sweeps = results.size.orders, SWEEPS if results.size.variants else {}
    count = len(orders) + len(sweeps)
    figure, grid = plt.subplots(1, count, figsize=(max(4 * count, 6), 3.6), squeeze=False)
    axes = grid[0]
    for axis, order in zip(axes, orders, strict=False):
        for name in results.size.methods:
            curves = [results.runs[key]["points"] for seed in SEEDS if (key := (order, seed, name)) in results.runs]
            if curves:
                shares = [point["share"] for point in curves[0]]
                means = [sum(curve[i]["loss"] for curve in curves) / len(curves) for i in range(len(shares))]
                axis.plot(shares, means, label=name, marker=".", linewidth=2 if name == "UpIT" else 1)
        axis.set(title=f"first half {order}", xlabel="share of stage 4", ylabel="held-out loss", yscale="log")
    for axis, (sweep, labels) in zip(axes[len(orders) :], sweeps.items(), strict=True):
        methods, seeds = sweep_of(results, sweep)
        for method in methods:
            means = [results.mean(["iid"], _varied(method, label), "loss", seeds) for label in labels.values()]
            known = [(value, mean) for value, mean in zip(labels, means, strict=True) if mean is not None]
            axis.plot(*zip(*known, strict=True) if known else ((), ()), label=method, marker="o")
        axis.set(title="order iid", xlabel=sweep, ylabel="held-out loss", xscale="log", xticks=list(labels))
        axis.set_xticklabels([f"{value:g}" for value in labels])
        axis.minorticks_off()
    axes[0].legend(fontsize=6)
    for axis in axes[len(orders) :]:
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _varied(method: str, label: str) -> str:
    """A run of a sweep; the method's own setting has one name in all of them."""
    return f"{method}, {label}" if f"{method}, {label}" in CURVES else f"{method}, 2 active"


def _cell(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
