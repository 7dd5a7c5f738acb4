"""Tables of a study of methods with seeds and orders, from the runs that are finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .differences import paired_difference
from .runs import read


@dataclass(frozen=True)
class Plan:
    """
    What a study compares.

    Args:
        domains: whose losses are reported.
        seeds: pairs of a paired difference.
        orders: of the data; each has a table of losses.
        replicates: runs of a method with one seed and order; their mean counts.
        methods: fixed before the first run; their learning rates are tuned.
        added: methods added after the results were seen, with their learning rates.
        reference: the method that the tables of losses compare with.
        subject: the method that the primary contrasts are about.
        primary: the methods it is compared with.
        post_hoc: pairs of methods, compared after the results were seen.
        interest: the smallest difference that matters.
    """

    domains: Sequence[str]
    seeds: Sequence[int]
    orders: Sequence[str]
    replicates: int
    methods: Sequence[str]
    added: Mapping[str, float]
    reference: str
    subject: str
    primary: Sequence[str]
    post_hoc: Sequence[tuple[str, str]]
    interest: float


class Results:
    """The losses of all finished runs of a plan."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self.plan = plan
        self.records = [read(path) for path in sorted((out / "results").glob("*.json"))]

    def loss(self, name: str, order: str, seed: int, domain: str = "mean") -> float | None:
        """A method's loss, averaged over the replicates; None unless all are finished."""
        wanted = {"method": name, "order": order, "seed": seed}
        found = [r["loss"][domain] for r in self.records if all(r[key] == value for key, value in wanted.items())]
        return sum(found) / len(found) if len(found) == self.plan.replicates else None

    def mean_loss(self, name: str, order: str, domain: str) -> str:
        values = [value for seed in self.plan.seeds if (value := self.loss(name, order, seed, domain)) is not None]
        return f"{sum(values) / len(values):.4f}" if values else "–"

    def difference(self, name: str, other: str, orders: Sequence[str]) -> str:
        """`name` minus `other`, averaged over orders and paired by seed, with its 95 % interval."""
        pairs = []
        for seed in self.plan.seeds:
            losses = [[self.loss(method, order, seed) for order in orders] for method in (name, other)]
            if all(None not in of_method for of_method in losses):
                pairs.append([sum(of_method) / len(orders) for of_method in losses])
        return " ".join(paired_difference(*zip(*pairs, strict=True)).cells()) if len(pairs) > 1 else "–"

    def contrast_rows(self, contrasts: Mapping[str, tuple[str, str]]) -> list[str]:
        """A table row for each labelled pair of methods: over all orders, and for each."""
        orders = self.plan.orders
        return [
            f"| {label} | {' | '.join(self.difference(*pair, some) for some in (orders, *zip(orders)))} |"
            for label, pair in contrasts.items()
        ]

    def loss_rows(self, order: str, rates: Mapping[str, float]) -> list[str]:
        """A table row for each method: its learning rate, losses, and difference from the reference."""
        rows = []
        for name in (*self.plan.methods, *self.plan.added):
            cells = [self.mean_loss(name, order, domain) for domain in (*self.plan.domains, "mean")]
            versus = "" if name == self.plan.reference else self.difference(name, self.plan.reference, (order,))
            rows.append(f"| {name} | {rates[name]:g} | {' | '.join(cells)} | {versus} |")
        return rows

    def complete_seeds(self) -> int:
        """How many seeds have all runs of the methods that were planned."""
        runs = [(name, order) for name in self.plan.methods for order in self.plan.orders]
        return sum(all(self.loss(name, order, seed) is not None for name, order in runs) for seed in self.plan.seeds)


def tuned_rates(out: Path) -> dict[str, float]:
    """The learning rate of each method that was tuned."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in map(read, (out / "tuning").glob("*.json")):
        found.setdefault(record["method"], []).append((record["loss"]["mean"], record["rate"]))
    return {name: min(of_method)[1] for name, of_method in found.items()}


def report(plan: Plan, out: Path, table: Path) -> None:
    """
    Write and print the tables.

    Args:
        plan: what the study compares.
        out: the study's folder, with records of runs in `results` and of tuning in `tuning`.
        table: the Markdown file to write.
    """
    results, rates = Results(plan, out), {**tuned_rates(out), **plan.added}
    orders = " | ".join(plan.orders)
    lines = [
        "# UpIT against its baselines, small",
        "",
        "Made by `python -m benchmarks.upit_study run --workers 2` and `… report`; the script's head says what was",
        f"fixed beforehand. Seeds with all runs: {results.complete_seeds()} of {len(plan.seeds)}. Lower is better.",
        "",
        f"## Primary contrasts ({plan.subject} minus the other, both orders)",
        "",
        f"| {plan.subject} against | difference | {orders} |",
        "|---|---|---|---|",
        *results.contrast_rows({other: (plan.subject, other) for other in plan.primary}),
        "",
        f"Smallest difference of interest: {plan.interest}.",
        "",
        "Added afterwards, to find the causes of two of these:",
        "",
        f"| contrast | difference | {orders} |",
        "|---|---|---|---|",
        *results.contrast_rows({f"{name}, against: {other}": (name, other) for name, other in plan.post_hoc}),
        "",
        "## Held-out loss",
        "",
    ]
    for order in plan.orders:
        lines += [
            f"First half {order}:",
            "",
            f"| method | rate | {' | '.join(plan.domains)} | mean | mean minus {plan.reference}'s |",
            f"|---|---|{'---|' * (len(plan.domains) + 2)}",
            *results.loss_rows(order, rates),
            "",
        ]
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("\n".join(lines))
    print("\n".join(lines))
