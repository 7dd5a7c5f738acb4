"""How well a gate for requests chooses: what it keeps, what it confuses, and at which margin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..analysis.figures import new_figure, save_figure
from ..utils.io import write_json
from ..utils.messages import one_line
from .request_gate import BASE, RequestChoice, RequestGate
from .request_texts import Request, request_text

WORST = 20  # number of mistakes in a report
FEW = 24  # texts of an adapter
SHARED = 0.1  # of two adapters' texts
_MARGINS = [round(0.02 * i, 2) for i in range(31)]


@dataclass(frozen=True)
class Mistake:
    """
    A request that does not go where it belongs.

    Args:
        text: the request.
        wanted: the adapter that the request is for, or `"base"`.
        picked: the gate's choice.
        lead: score of `picked` above the score of `wanted`.
        decided_by: the part or the earlier message that decided.
    """

    text: str
    wanted: str
    picked: str
    lead: float
    decided_by: str


@dataclass(frozen=True)
class GateReport:
    """
    How a gate chooses for requests that are known to be for an adapter or for the base.

    Args:
        margin: the gate's margin.
        picked: adapter, or `"base"` → choice → number of requests.
        curve: for some margins, the share of the adapters' requests that keep their adapter, and the share of general
            requests that go to the base (None without general requests).
        mistakes: the worst mistakes first.
    """

    margin: float
    picked: dict[str, dict[str, int]]
    curve: list[dict[str, float | None]]
    mistakes: list[Mistake]

    def lines(self) -> list[str]:
        """Return the report as lines of text: a table of choices, and the worst mistakes."""
        rows = [("requests for", "number", "kept", "to the base", "to another", "most often to")]
        for name, counts in self.picked.items():
            total, kept, to_base = sum(counts.values()), counts.get(name, 0), counts.get(BASE, 0)
            others = {other: count for other, count in counts.items() if other not in (name, BASE)}
            worst = max(others, key=others.__getitem__, default="")
            of_base = "" if name == BASE else f"{to_base / total:.1%}"
            rows.append((
                name, str(total), f"{kept / total:.1%}", of_base, f"{sum(others.values()) / total:.1%}",
                one_line(worst, 24),
            ))  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.mistakes:
            lines += ["", "the worst mistakes:"]
            for mistake in self.mistakes:
                by = "" if mistake.decided_by == mistake.text else f", by {one_line(mistake.decided_by, 40)!r}"
                to = f"{mistake.wanted} → {mistake.picked} ({mistake.lead:+.2f}{by})"
                lines.append(f"  {to}: {one_line(mistake.text, 80)}")
        return lines

    def write(self, folder: Path) -> None:
        """Write `gate_report.json` and `gate_report.png`."""
        write_json(folder / "gate_report.json", asdict(self))
        figure = new_figure(9, 3.6)
        table, curve = figure.subplots(1, 2, width_ratios=(1.2, 1))
        rows, columns = [*self.picked], list(dict.fromkeys(name for of in self.picked.values() for name in of))
        columns = [name for name in rows if name in columns] + [name for name in columns if name not in rows]
        share = torch.tensor([
            [of.get(column, 0) / sum(of.values()) for column in columns] for of in self.picked.values()
        ])  # fmt: skip
        table.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        if len(rows) * len(columns) <= 256:
            for i, j in torch.cartesian_prod(torch.arange(len(rows)), torch.arange(len(columns))).tolist():
                dark = share[i, j] > 0.5
                table.text(j, i, f"{100 * share[i, j]:.0f}", ha="center", va="center", color="w" if dark else "k")
        table.set_xticks(range(len(columns)), [one_line(name, 16) for name in columns], rotation=45, ha="right")
        table.set_yticks(range(len(rows)), [one_line(name, 16) for name in rows])
        table.set_title("requests for … (rows) go to … (%)")
        margins = [point["margin"] for point in self.curve]
        for key, label in (("own", "own requests kept"), ("general", "general requests to the base")):
            if self.curve[0][key] is not None:
                curve.plot(margins, [100 * (point[key] or 0) for point in self.curve], label=label)
        curve.axvline(self.margin, color="gray", linestyle=":")
        curve.set_xlabel("margin")
        curve.set_ylabel("%")
        curve.legend()
        save_figure(figure, folder / "gate_report.png")


def report_on(gate: RequestGate, requests: Mapping[str, Sequence[Request]]) -> GateReport:
    """
    Report how a gate chooses for held-out requests.

    Args:
        requests: adapter → requests that are for it. `"base"` has general requests.
    """
    wanted = [name for name, of_name in requests.items() for _ in of_name]
    asked = [request for of_name in requests.values() for request in of_name]
    return _report(gate, wanted, [request_text(request) for request in asked], gate.choose(asked))


def left_out_report(gate: RequestGate) -> GateReport:
    """Report how a gate chooses for its own texts, each by the gate without this text. Mistakes are not listed."""
    scores_RN, own_R = gate.left_out()
    choices = []
    for scores in scores_RN.tolist():
        by_name = dict(zip(gate.columns, scores, strict=True))
        best = max(gate.names, key=by_name.__getitem__)
        is_for_adapter = by_name[best] - by_name.get(BASE, -torch.inf) > gate.margin
        choices.append(RequestChoice(best if is_for_adapter else None, by_name))
    report = _report(gate, [gate.columns[i] for i in own_R.tolist()], [""] * len(choices), choices)
    return GateReport(report.margin, report.picked, report.curve, [])


def concerns(gate: RequestGate) -> list[str]:
    """Return what is doubtful in a gate's texts, one line each: few texts, and texts that adapters share."""
    found, names = [], gate.names
    numbers = {name: set(gate.texts[name].digests.tolist()) for name in names}
    for name in names:
        if len(numbers[name]) < FEW:
            found.append(f"{name}: has {len(numbers[name])} different texts; give dozens, better hundreds")
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            shared = len(numbers[name] & numbers[other])
            if shared >= SHARED * min(len(numbers[name]), len(numbers[other])):
                found.append(f"{name}, {other}: have {shared} texts in common; such requests go to either of them")
    if BASE in gate.texts:
        general = set(gate.texts[BASE].digests.tolist())
        for name in names:
            if shared := len(numbers[name] & general):
                found.append(f"{name}: {shared} of its texts are general requests, too; such requests go to the base")
    return found


def _report(gate: RequestGate, wanted: list[str], texts: list[str], choices: list[RequestChoice]) -> GateReport:
    picked: dict[str, dict[str, int]] = {}
    mistakes = []
    for name, text, choice in zip(wanted, texts, choices, strict=True):
        to = choice.name or BASE
        of_name = picked.setdefault(name, {})
        of_name[to] = of_name.get(to, 0) + 1
        if to != name:
            lead = choice.scores.get(to, 0.0) - choice.scores.get(name, 0.0)
            mistakes.append(Mistake(text, name, to, round(lead, 4), choice.text))
    mistakes.sort(key=lambda mistake: -mistake.lead)
    return GateReport(gate.margin, picked, _curve(gate, wanted, choices), mistakes[:WORST])


def _curve(gate: RequestGate, wanted: list[str], choices: list[RequestChoice]) -> list[dict[str, Any]]:
    """Return the shares that would be kept at other margins."""
    points: list[dict[str, Any]] = []
    leads, is_best = [], []
    for name, choice in zip(wanted, choices, strict=True):
        best = max(gate.names, key=choice.scores.__getitem__)
        lead = choice.scores[best] - choice.scores.get(BASE, -torch.inf)
        # A request about another text is for the base at any margin.
        leads.append(-torch.inf if choice.name is None and lead > gate.margin else lead)
        is_best.append(best == name)
    lead_R, best_R = torch.tensor(leads), torch.tensor(is_best)
    general_R = torch.tensor([name == BASE for name in wanted])
    for margin in _MARGINS:
        for_adapter_R = lead_R > margin
        own_R, of_base_R = (for_adapter_R & best_R)[~general_R], ~for_adapter_R[general_R]
        points.append({"margin": margin, "own": _mean(own_R), "general": _mean(of_base_R)})
    return points


def _mean(is_R: torch.Tensor) -> float | None:
    return round(float(is_R.double().mean()), 4) if len(is_R) else None
