"""`moe-peft prune`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import Field
from rich.console import Console
from rich.table import Table

from ..utils.validation import Count, DataSettings, Share, Text
from .settings import SettingsParser, check_files, check_models

if TYPE_CHECKING:
    from ..pruning import Pruning

EXAMPLE = r"""
example:
  moe-peft prune --model adapter --output pruned --data trl-lib/Capybara \
    --max-examples 64 --experts-per-layer 3
"""


class PruneSettings(DataSettings):
    """The settings of `moe-peft prune`."""

    model: Text = Field(title="FOLDER", description="an adapter or a native MoE")
    base: Text | None = Field(None, title="PATH", description="an adapter's base; default: the one that it names")
    output: Text = Field(title="FOLDER", description="folder for the result; new or empty")
    min_load: Share | None = Field(
        None,
        title="SHARE",
        description="with --data, drop experts with a smaller share of their layer's assignments (default: 0.01)",
    )
    experts_per_layer: Count | None = Field(None, description="keep this many in every layer")
    drop: int | str | list[int | str] | dict[str | int, int | str | list[int | str]] | None = Field(
        None,
        title="NAMES",
        description='experts to drop: math or [1, 3] in every layer, or by layer, {"0": [1], "5": [2]}',
    )
    data: Text | None = Field(
        None, title="FILE", description="a .jsonl, .json, .csv or .parquet file, or a dataset's name"
    )
    label_column: Text | None = Field(
        None, title="NAME", description="column that holds the domains, for losses by domain"
    )
    dtype: Text = Field("auto", title="NAME", description="dtype of the weights while data run through them")


_GROUPS = {
    "Model": ("model", "base", "output"),
    "Which experts to remove": ("min_load", "experts_per_layer", "drop"),
    "Data": ("data", "label_column", "dtype", *DataSettings.model_fields),
}


def parser(prog: str) -> SettingsParser:
    description = "Drop experts that get next to nothing, or that are named."
    return SettingsParser(PruneSettings, prog, groups=_GROUPS, description=description, epilog=EXAMPLE)


def run(settings: PruneSettings) -> None:
    check_models(model=settings.model, base=settings.base)
    check_files(data=settings.data)
    from ..pruning import prune_experts  # only now: these imports take seconds

    others = settings.model_dump(exclude={"model", "output"})
    print_pruning(prune_experts(settings.model, settings.output, **others))
    print(settings.output)


_MOST_ROWS = 64  # with more layers, similar layers share a row


def print_pruning(pruning: Pruning) -> None:
    """Print tables of the dropped experts, and of size and loss before and after."""
    console = Console(markup=False, emoji=False)
    table = Table("layer", "experts", "dropped", "tokens that lost an expert", title="Pruning")
    # Layers of one kind, such as the linears of attention, share a row if they have lost the same experts.
    rows: dict[tuple[str, ...], list[int]] = {}
    for i, layer in enumerate(pruning.layers):
        change = (f"{layer.num_experts} → {len(layer.kept)}", ", ".join(map(str, layer.dropped)))
        kind = re.sub(r"\.\d+\.", ".*.", layer.name) if len(pruning.layers) > _MOST_ROWS else layer.name
        rows.setdefault((kind, *change), []).append(i)
    for (kind, *changes), layers in rows.items():
        lost = "" if pruning.lost is None else f"{sum(pruning.lost['layers'][i] for i in layers) / len(layers):.1%}"
        table.add_row(f"{kind} ({len(layers)})" if len(layers) > 1 else pruning.layers[layers[0]].name, *changes, lost)
    console.print(table)
    table = Table("", "before", "after")
    for row, name in (("parameters", "total"), ("active per token", "active")):
        table.add_row(row, *(f"{getattr(pruning.size[when], name):,}" for when in ("before", "after")))
    for domain in (pruning.loss or {"before": {}})["before"]:
        assert pruning.loss is not None
        table.add_row(f"loss: {domain}", *(f"{pruning.loss[when][domain]:.4f}" for when in ("before", "after")))
    console.print(table)
    if pruning.lost is not None:
        console.print(f"tokens that lost an expert in any layer: {pruning.lost['any_layer']:.1%}", highlight=False)
