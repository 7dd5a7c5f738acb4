"""The tables of `upit_study.py`, from the runs there are so far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from differences import paired_difference
from upit_study import DOMAINS, INTEREST, METHODS, ORDERS, POST_HOC, PRIMARY, REPLICATES, SEEDS, read


class Results:
    """The losses of all runs there are so far."""

    def __init__(self, out: Path) -> None:
        self.records = [read(path) for path in sorted((out / "results").glob("*.json"))]

    def loss(self, name: str, order: str, seed: int, domain: str = "mean") -> float | None:
        """A method's loss, averaged over the replicates; None unless all are there."""
        wanted = {"method": name, "order": order, "seed": seed}
        found = [r["loss"][domain] for r in self.records if all(r[key] == value for key, value in wanted.items())]
        return sum(found) / len(found) if len(found) == len(REPLICATES) else None

    def mean_loss(self, name: str, order: str, domain: str) -> str:
        values = [value for seed in SEEDS if (value := self.loss(name, order, seed, domain)) is not None]
        return f"{sum(values) / len(values):.4f}" if values else "–"

    def difference(self, name: str, other: str, orders: Sequence[str]) -> str:
        """`name` minus `other`, averaged over orders and paired by seed, with its 95 % interval."""
        pairs = []
        for seed in SEEDS:
            losses = [[self.loss(method, order, seed) for order in orders] for method in (name, other)]
            if all(None not in of_method for of_method in losses):
                pairs.append([sum(of_method) / len(orders) for of_method in losses])
        if len(pairs) < 2:
            return "–"
        d = paired_difference(*zip(*pairs, strict=True))
        return f"{d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]"


def contrast_rows(results: Results, contrasts: dict[str, tuple[str, str]]) -> list[str]:
    """A table row for each labelled pair of methods: over both orders, and for each."""
    return [
        f"| {label} | {' | '.join(results.difference(*pair, orders) for orders in (ORDERS, *zip(ORDERS)))} |"
        for label, pair in contrasts.items()
    ]


def loss_rows(results: Results, order: str, rates: dict[str, float]) -> list[str]:
    rows = []
    for name in (*METHODS, *POST_HOC):
        cells = [results.mean_loss(name, order, domain) for domain in (*DOMAINS, "mean")]
        versus = "" if name == "LoRAMoE-SFT" else results.difference(name, "LoRAMoE-SFT", (order,))
        rows.append(f"| {name} | {rates.get(name) or POST_HOC[name].rate:g} | {' | '.join(cells)} | {versus} |")
    return rows


def tuned_rates(out: Path) -> dict[str, float]:
    """The learning rate of each method that was tuned."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in map(read, (out / "tuning").glob("*.json")):
        found.setdefault(record["method"], []).append((record["loss"]["mean"], record["rate"]))
    return {name: min(of_method)[1] for name, of_method in found.items()}


def report(out: Path, table: Path) -> None:
    """Tables of what there is so far."""
    results, rates = Results(out), tuned_rates(out)
    runs = [(name, order) for name in METHODS for order in ORDERS]
    complete = [s for s in SEEDS if all(results.loss(name, order, s) is not None for name, order in runs)]
    shorter, same_rate = POST_HOC
    post_hoc = [("UpIT", shorter), (shorter, "no router initialisation"), ("UpIT", same_rate)]
    lines = [
        "# UpIT against its baselines, small",
        "",
        "Made by `python benchmarks/upit_study.py run --workers 2` and `… report`; the script's head says what was",
        f"fixed beforehand. Seeds with all runs: {len(complete)} of {len(SEEDS)}. Lower is better.",
        "",
        "## Primary contrasts (UpIT minus the other, both orders)",
        "",
        f"| UpIT against | difference | {' | '.join(ORDERS)} |",
        "|---|---|---|---|",
        *contrast_rows(results, {other: ("UpIT", other) for other in PRIMARY}),
        "",
        f"Smallest difference of interest: {INTEREST}.",
        "",
        "Added afterwards, to see where two of these come from:",
        "",
        f"| contrast | difference | {' | '.join(ORDERS)} |",
        "|---|---|---|---|",
        *contrast_rows(results, {f"{name}, against: {other}": (name, other) for name, other in post_hoc}),
        "",
        "## Held-out loss",
        "",
    ]
    for order in ORDERS:
        lines += [
            f"First half {order}:",
            "",
            f"| method | rate | {' | '.join(DOMAINS)} | mean | mean minus LoRAMoE-SFT's |",
            f"|---|---|{'---|' * (len(DOMAINS) + 2)}",
            *loss_rows(results, order, rates),
            "",
        ]
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("\n".join(lines))
    print("\n".join(lines))
