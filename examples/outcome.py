"""The demo's last screen: held-out losses, where tokens go, what that means, and what to try next."""

import os
import shlex
import shutil
import sys
from itertools import combinations
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .comparison import Outcome

NOTICEABLE = 0.01  # the smallest difference of mean losses that one run may claim
SPECIALISED = 0.1  # the least share of assignments that differs between domains whose routing differs
SHADES = " ░▒▓█"


def show_outcome(outcome: Outcome, out: Path, fast: bool) -> None:
    """Print everything; the next command is the last line."""
    console = Console()
    for domain, (question, answer) in ({} if fast else outcome.answers).items():
        console.print(Text.assemble((f"{domain}: ", "bold"), question))
        console.print(Text(answer or "(an empty answer)", "cyan"))
    console.print(loss_table(outcome.losses))
    even = 1 / len(next(iter(outcome.shares.values()))[0])
    console.print(f"Where UpIT sends each domain's tokens, % per expert, layers averaged (even: {100 * even:.0f})")
    console.print(routing_table(outcome.shares))
    console.print(f"the same for each layer: {outcome.figure}", highlight=False, soft_wrap=True)
    console.print()
    if fast:
        console.print("These numbers mean nothing: --fast trains a minimal model for a few steps.", style="yellow")
    console.print(
        compare_losses({method: losses["mean"] for method, losses in outcome.losses.items()}), highlight=False
    )
    console.print(compare_routing(outcome.shares), highlight=False)
    console.print("\nNext: which words, digits and brackets does each expert take?")
    console.print(next_command(outcome.adapter, out), style="bold", highlight=False, markup=False, soft_wrap=True)


def loss_table(losses: dict[str, dict[str, float]]) -> Table:
    """Methods × domains; the lowest loss of each column is bold."""
    table = Table("method", title="Held-out loss per answer token (lower is better)")
    columns = list(next(iter(losses.values())))
    for column in columns:
        table.add_column(column, justify="right")
    best = {column: min(of_method[column] for of_method in losses.values()) for column in columns}
    for method, of_method in losses.items():
        cells = [Text(f"{of_method[c]:.3f}", "bold" if of_method[c] == best[c] else "") for c in columns]
        table.add_row(method, *cells)
    return table


def routing_table(shares: dict[str, list[list[float]]]) -> Table:
    """Domains × experts: the share of a domain's token assignments, mean of the layers, as shade and percentage."""
    mean = {
        domain: [sum(column) / len(column) for column in zip(*layers, strict=True)] for domain, layers in shares.items()
    }
    top = max(map(max, mean.values()))
    table = Table("expert", box=box.SIMPLE)
    for expert in range(len(next(iter(mean.values())))):
        table.add_column(str(expert), justify="right")
    for domain, row in mean.items():
        shades = [SHADES[round(share / top * (len(SHADES) - 1))] for share in row]
        table.add_row(domain, *(f"{2 * shade} {100 * share:2.0f}" for shade, share in zip(shades, row, strict=True)))
    return table


def compare_losses(means: dict[str, float]) -> str:
    """UpIT against the best of the other trained methods, in words."""
    others = {method: mean for method, mean in means.items() if method not in ("base", "UpIT")}
    best = min(others, key=lambda method: others[method])
    gap = means["UpIT"] - others[best]
    if abs(gap) < NOTICEABLE:
        verdict = (
            f"UpIT and {best} are level: {means['UpIT']:.3f} and {others[best]:.3f} differ by less than {NOTICEABLE}"
        )
    elif gap < 0:
        verdict = f"UpIT does best: its mean loss, {means['UpIT']:.3f}, is {-gap:.3f} below {best}'s"
    else:
        verdict = f"UpIT does not win: its mean loss, {means['UpIT']:.3f}, is {gap:.3f} above {best}'s"
    return (
        f"{verdict}. The base model has {means['base']:.3f}. This is one run with one seed; "
        "docs/studies.md says what is known with more."
    )


def compare_routing(shares: dict[str, list[list[float]]]) -> str:
    """The two domains whose routing differs most, by total variation averaged over layers, in words."""

    def distance(pair: tuple[str, str]) -> float:
        layers = list(zip(shares[pair[0]], shares[pair[1]], strict=True))
        return sum(abs(a - b) for one, other in layers for a, b in zip(one, other, strict=True)) / 2 / len(layers)

    pair = max(combinations(shares, 2), key=distance)
    if distance(pair) < SPECIALISED:
        return (
            f"UpIT's routers treat all domains alike: {pair[0]} and {pair[1]}, which differ most, share "
            f"{1 - distance(pair):.0%} of their routing."
        )
    return (
        f"UpIT's routers tell domains apart: {pair[0]} and {pair[1]}, which differ most, send {distance(pair):.0%} of "
        "their tokens to different experts."
    )


def next_command(adapter: Path, out: Path) -> str:
    """`moe-peft inspect` on the demo's adapter, to be typed where the demo was started."""
    arguments = [
        "--model",
        adapter,
        "--data",
        out / "test.jsonl",
        "--label-column",
        "domain",
        "--output",
        out / "inspect",
    ]
    command = shutil.which("moe-peft")
    python = Path(sys.executable)
    if command is not None and Path(command).parent == python.parent:
        program = ["moe-peft"]
    else:  # an environment that is not activated
        inside = python.is_relative_to(Path.cwd())
        program = [os.path.relpath(python) if inside else str(python), "-m", "moe_peft"]
    return shlex.join([*program, "inspect", *map(str, arguments)])
