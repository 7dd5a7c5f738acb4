"""Routing statistics as files: tables and figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from .figures import plot_coactivation, plot_compliance, plot_load_over_time, plot_shares, plot_token_classes
from .record import RoutingStatistics


def write_report(statistics: RoutingStatistics, folder: str | Path) -> list[Path]:
    """
    Write `routing.json` (everything), `load.csv` (share by domain, layer, expert) and the figures that the statistics
    allow: `load.png`, `coactivation.png`, `token_classes.png`, `compliance.png`.

    Returns:
        the paths of the files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "routing.json").write_text(json.dumps(statistics.as_dict(), indent=2) + "\n")
    shares = statistics.shares()
    with (folder / "load.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["domain", "layer", "expert", "share"])
        for domain, share_LN in shares.items():
            for layer, n in enumerate(statistics.sizes):
                writer.writerows([domain, layer, expert, float(share_LN[layer, expert])] for expert in range(n))
    written = [folder / "routing.json", folder / "load.csv", folder / "load.png", folder / "coactivation.png"]
    plot_shares(shares, folder / "load.png", "Where each domain's tokens go")
    plot_coactivation(statistics.coactivation.sum(0), folder / "coactivation.png")
    if statistics.token_classes is not None:
        plot_token_classes(statistics.class_counts.sum(1), folder / "token_classes.png")
        written.append(folder / "token_classes.png")
    if statistics.allowed is not None:
        plot_compliance(statistics.compliance(), folder / "compliance.png")
        written.append(folder / "compliance.png")
    return written


def write_load_over_time(steps: Sequence[int], loads: Sequence[Sequence[float]], folder: Path) -> None:
    """
    Write `load.json` and `load.png`: the experts' shares of assignments during training.

    Args:
        steps: the steps.
        loads: each expert's share at each of the steps.
        folder: where to write the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "load.json").write_text(json.dumps({"steps": list(steps), "loads": list(loads)}) + "\n")
    plot_load_over_time(steps, loads, folder / "load.png")
