"""
Routing statistics as files, tables and figures, which replace an earlier report's when all are written.

Legend: L layers, n experts, P position buckets.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..utils.io import read_json, remove, write_json
from .figures import (
    MOST_PANELS,
    SUFFIXES,
    plot_coactivation,
    plot_compliance,
    plot_load_over_time,
    plot_shares,
    plot_token_classes,
)
from .recorder import RoutingStatistics

# --- folders of reports ----------------------------------------------------------------------------------------------


class ReportFiles(NamedTuple):
    """
    The files of one kind of reports.

    Args:
        main: a JSON file that every report has.
        keys: some of its keys, which tell it from other files.
        others: the names of all other files that a report may have.
    """

    main: str
    keys: frozenset[str]
    others: frozenset[str]

    def is_in(self, folder: Path) -> bool:
        """Whether a folder holds such a report."""
        with suppress(ValueError):
            return self.keys <= read_json(folder / self.main).keys()
        return False

    @contextmanager
    def replaced(self, folder: Path) -> Iterator[Path]:
        """
        A temporary folder to write a report into. When the block succeeds, its files replace those of an earlier
        report, of which nothing stays.
        """
        partial = folder / ".report.partial"
        remove(partial)  # of a run that was killed
        partial.mkdir()
        try:
            yield partial
            written = {path.name for path in partial.iterdir()}
            for name in sorted(written, key=lambda name: name != self.main):  # the main file first
                (partial / name).replace(folder / name)
            for name in self.others - written:
                (folder / name).unlink(missing_ok=True)
        finally:
            remove(partial)


_FIGURES = [
    f"{kind}{suffix}" for kind in ("load", "coactivation", "token_classes", "compliance") for suffix in SUFFIXES
]
REPORT = ReportFiles(
    "routing.json",
    frozenset({"tokens", "shares", "coactivation"}),
    frozenset({"load.csv", "compliance.csv", "report.html", *_FIGURES}),
)

# --- report ----------------------------------------------------------------------------------------------------------


def write_report(
    statistics: RoutingStatistics, folder: Path, suffix: str = ".png", about: Mapping[str, Any] | None = None
) -> list[Path]:
    """
    Write `routing.json` (everything), `load.csv` (share by domain, layer, expert), with an expert map `compliance.csv`
    (by domain, layer and position), and the figures that the statistics allow: `load`, `coactivation`, `token_classes`,
    `compliance`. Figures by domain show the 12 domains with the most tokens.

    Args:
        suffix: the figures' format: ".png", ".pdf" or ".svg".
        about: what was measured; becomes `"about"` in `routing.json`.

    Returns:
        the paths of the files.
    """
    written = [folder / "routing.json", folder / "load.csv"]
    write_json(written[0], {**statistics.as_dict(), "about": dict(about or {})})
    shares, names = statistics.shares(), (about or {}).get("expert_names") or range(max(statistics.sizes))
    rows: list[list[Any]] = []
    for domain, share_LN in shares.items():
        for layer, n in enumerate(statistics.sizes):
            rows += [[domain, layer, names[i], float(share_LN[layer, i])] for i in range(n)]
    _write_csv(written[1], ["domain", "layer", "expert", "share"], rows)
    if statistics.allowed is not None:
        written.append(folder / "compliance.csv")
        _write_compliance(statistics, written[-1])
    return written + write_figures(statistics, folder, suffix)


def write_figures(statistics: RoutingStatistics, folder: Path, suffix: str) -> list[Path]:
    """The figures of `write_report`; returns their paths."""
    written, largest, shares = [folder / f"load{suffix}"], _largest(statistics), statistics.shares()
    title = "Where each domain's tokens go" if len(shares) > 1 else "Where the tokens go"
    shown = {domain: shares[domain] for domain in largest}
    plot_shares(shown, written[-1], title, statistics.expert_map, statistics.sizes)
    if max(statistics.ks) > 1:
        written.append(folder / f"coactivation{suffix}")
        plot_coactivation(statistics.coactivation, written[-1])
    if statistics.class_counts.any():  # there are token classes, and ids were seen
        written.append(folder / f"token_classes{suffix}")
        plot_token_classes(statistics.class_counts, written[-1])
    if statistics.allowed is not None:
        compliance = statistics.compliance_by_domain()
        written.append(folder / f"compliance{suffix}")
        plot_compliance(
            {domain: compliance[domain] for domain in largest},
            written[-1],
            statistics.position_starts,
            statistics.chance(),
        )
    return written


def _write_compliance(statistics: RoutingStatistics, path: Path) -> None:
    rows: list[list[Any]] = []
    for domain, share_LP in statistics.compliance_by_domain().items():
        tokens_P = statistics.domain_compliance_tokens[statistics.domains.index(domain)]
        for p, (start, tokens) in enumerate(zip(statistics.position_starts, tokens_P.tolist(), strict=True)):
            if tokens:
                rows += [[domain, layer, start, int(tokens), float(of_P[p])] for layer, of_P in enumerate(share_LP)]
    _write_csv(path, ["domain", "layer", "position", "tokens", "compliance"], rows)


def _write_csv(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def _largest(statistics: RoutingStatistics) -> list[str]:
    """The domains with tokens; those with the most come first where there are more than a figure shows."""
    tokens = dict(zip(statistics.domains, statistics.tokens.tolist(), strict=True))
    seen = [domain for domain, count in tokens.items() if count]
    return seen if len(seen) <= MOST_PANELS else sorted(seen, key=lambda domain: -tokens[domain])


def write_load_over_time(points: Sequence[Mapping[str, Any]], folder: Path, suffix: str = ".png") -> None:
    """
    Write `load.json` and the figure `load`: how uneven the experts' load is during training.

    Args:
        points: the step, each layer's coefficient of variation (`variations`), that of untrained gates (`untrained`),
            and the `warning`.
        folder: where to write the files.
        suffix: the figure's format.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figure = folder / f".partial{suffix}"  # the suffix says the format
    steps, variations = zip(*((point["step"], point["variations"]) for point in points), strict=True)
    plot_load_over_time(steps, variations, points[-1]["untrained"], figure)
    write_json(folder / "load.json", {"points": list(points)})
    figure.replace(folder / f"load{suffix}")


def read_load_over_time(folder: Path, until: int) -> list[dict[str, Any]]:
    """The points up to the step `until` that `write_load_over_time` wrote; none if it did not."""
    with suppress(ValueError, KeyError, TypeError):
        return [point for point in read_json(folder / "load.json")["points"] if point["step"] <= until]
    return []
