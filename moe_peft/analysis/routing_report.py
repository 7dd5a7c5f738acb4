"""
Routing statistics as files, tables and figures. They replace an earlier report's once all are written.

Legend: L layers, n experts, P position buckets.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..utils.io import read_json, remove, write_json
from .figures import MOST_PANELS, SUFFIXES, plot_compliance, plot_shares
from .recorder import RoutingStatistics

MAIN = "routing.json"
_OTHERS = {f"{kind}{suffix}" for kind in ("load", "compliance") for suffix in SUFFIXES}
_OTHERS |= {"load.csv", "compliance.csv", "report.html"}


def is_report(folder: Path) -> bool:
    """Return whether a folder holds a report."""
    with suppress(ValueError):
        return {"tokens", "shares"} <= read_json(folder / MAIN).keys()
    return False


@contextmanager
def replaced_report(folder: Path) -> Iterator[Path]:
    """
    Yield a temporary folder for a report. If the block succeeds, the new files replace all files of an earlier report.
    """
    partial = folder / ".report.partial"
    remove(partial)  # left by a killed run
    partial.mkdir()
    try:
        yield partial
        written = {path.name for path in partial.iterdir()}
        for name in sorted(written, key=lambda name: name != MAIN):  # the main file first
            (partial / name).replace(folder / name)
        for name in _OTHERS - written:
            (folder / name).unlink(missing_ok=True)
    finally:
        remove(partial)


def write_report(
    statistics: RoutingStatistics, folder: Path, suffix: str = ".png", about: Mapping[str, Any] | None = None
) -> list[Path]:
    """
    Write `routing.json` (everything), `load.csv` (share by domain, layer, expert), with an expert map `compliance.csv`
    (by domain, layer and position), and the figures `load` and `compliance`, of the 12 domains with the most tokens.

    Args:
        suffix: the figures' format: ".png", ".pdf" or ".svg".
        about: description of the measurement; becomes `"about"` in `routing.json`.

    Returns:
        the paths of the files.
    """
    written = [folder / MAIN, folder / "load.csv"]
    write_json(written[0], {**statistics.as_dict(), "about": dict(about or {})})
    shares, names = statistics.shares(), (about or {}).get("expert_names")
    rows: list[list[Any]] = []
    for domain, share_LN in shares.items():
        for layer, n in enumerate(statistics.sizes):
            rows += [[domain, layer, names[i] if names else i, float(share_LN[layer, i])] for i in range(n)]
    _write_csv(written[1], ["domain", "layer", "expert", "share"], rows)
    if statistics.allowed is not None:
        written.append(folder / "compliance.csv")
        _write_compliance(statistics, written[-1])
    return written + write_figures(statistics, folder, suffix, names)


def write_figures(
    statistics: RoutingStatistics, folder: Path, suffix: str, names: Sequence[str] | None = None
) -> list[Path]:
    """Draw the figures of `write_report`, and return their paths."""
    written, largest, shares = [folder / f"load{suffix}"], _largest(statistics), statistics.shares()
    title = "Where each domain's tokens go" if len(shares) > 1 else "Where the tokens go"
    shown = {domain: shares[domain] for domain in largest}
    plot_shares(shown, written[-1], title, statistics.expert_map, statistics.sizes, names)
    if statistics.allowed is not None:
        compliance = statistics.compliance_by_domain()
        written.append(folder / f"compliance{suffix}")
        shown = {domain: compliance[domain] for domain in largest}
        plot_compliance(shown, written[-1], statistics.position_starts, statistics.chance())
    return written


def _write_compliance(statistics: RoutingStatistics, path: Path) -> None:
    rows: list[list[Any]] = []
    for domain, share_LP in statistics.compliance_by_domain().items():
        tokens_P = statistics.compliance_tokens[statistics.domains.index(domain)]
        for p, (start, tokens) in enumerate(zip(statistics.position_starts, tokens_P.tolist(), strict=True)):
            if tokens:
                rows += [[domain, layer, start, int(tokens), float(of_P[p])] for layer, of_P in enumerate(share_LP)]
    _write_csv(path, ["domain", "layer", "position", "tokens", "compliance"], rows)


def _write_csv(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def _largest(statistics: RoutingStatistics) -> list[str]:
    """Return the domains with tokens. If a figure cannot show all, the domains with the most tokens come first."""
    tokens = dict(zip(statistics.domains, statistics.tokens.tolist(), strict=True))
    seen = [domain for domain, count in tokens.items() if count]
    return seen if len(seen) <= MOST_PANELS else sorted(seen, key=lambda domain: -tokens[domain])
