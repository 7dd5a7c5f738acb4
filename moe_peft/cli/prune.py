"""`moe-peft prune`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import Field
from rich.console import Console
from rich.table import Table

from ..utils.validation import Settings, Text
from .settings import SettingsParser, check_models

if TYPE_CHECKING:
    from ..pruning import Pruning

EXAMPLE = """
example:
  moe-peft prune --model adapter --output pruned --drop '[1, 3]'
"""


class PruneSettings(Settings):
    """The settings of `moe-peft prune`."""

    model: Text = Field(title="FOLDER", description="an adapter or a native MoE")
    base: Text | None = Field(None, title="PATH", description="an adapter's base; default: the one that it names")
    output: Text = Field(title="FOLDER", description="folder for the result; new or empty")
    drop: int | str | list[int | str] | dict[str | int, int | str | list[int | str]] = Field(
        title="NAMES",
        description='experts to drop: math or [1, 3] in every layer, or by layer, {"0": [1], "5": [2]}',
    )


def parser(prog: str) -> SettingsParser:
    return SettingsParser(PruneSettings, prog, description="Drop experts that you name.", epilog=EXAMPLE)


def run(settings: PruneSettings) -> None:
    check_models(model=settings.model, base=settings.base)
    from ..pruning import prune_experts  # only now: these imports take seconds

    print_pruning(prune_experts(settings.model, settings.output, settings.drop, base=settings.base))
    print(settings.output)


_MOST_ROWS = 64  # with more layers, similar layers share a row


def print_pruning(pruning: Pruning) -> None:
    """Print tables of the dropped experts, and of the size before and after."""
    console = Console(markup=False, emoji=False)
    table = Table("layer", "experts", "dropped", title="Pruning")
    # Layers of one kind, such as the linears of attention, share a row if they have lost the same experts.
    rows: dict[tuple[str, ...], list[str]] = {}
    for layer in pruning.layers:
        change = (f"{layer.num_experts} → {len(layer.kept)}", ", ".join(map(str, layer.dropped)))
        kind = re.sub(r"\.\d+\.", ".*.", layer.name) if len(pruning.layers) > _MOST_ROWS else layer.name
        rows.setdefault((kind, *change), []).append(layer.name)
    for (kind, *changes), names in rows.items():
        table.add_row(f"{kind} ({len(names)})" if len(names) > 1 else names[0], *changes)
    console.print(table)
    table = Table("", "before", "after")
    for row, name in (("parameters", "total"), ("active per token", "active")):
        table.add_row(row, *(f"{getattr(pruning.size[when], name):,}" for when in ("before", "after")))
    console.print(table)
