"""`moe-peft prune`."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from ..pruning import Pruning, prune_experts
from ..pruning.prune import MIN_LOAD
from ..utils.validation import Count, Share
from .arguments import add_data_options, reads

EXAMPLE = r"""
example:
  moe-peft prune --model adapter --output pruned --data trl-lib/Capybara \
    --max-examples 64 --experts-per-layer 3
"""


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog,
        description="Drop experts that get next to nothing, and merge experts that are nearly the same.",
        epilog=EXAMPLE,
    )
    folders, rules, data = map(parser.add_argument_group, ("Model", "Which experts go", "Data"))
    folders.add_argument("--model", required=True, metavar="FOLDER", help="an adapter or a native MoE")
    folders.add_argument("--base", help="an adapter's base; default: the one that it names")
    folders.add_argument("--output", required=True, metavar="FOLDER", help="folder for the result; new or empty")
    data.add_argument("--data", metavar="FILE", help="a .jsonl, .json, .csv or .parquet file, or a dataset's name")
    data.add_argument("--label-column", metavar="NAME", help="column that holds the domains, for losses by domain")
    rules.add_argument(
        "--min-load",
        type=reads(Share),
        metavar="SHARE",
        help=f"with --data, drop experts with a smaller share of their layer's assignments (default: {MIN_LOAD})",
    )
    rules.add_argument(
        "--merge-twins",
        type=reads(Share),
        metavar="COSINE",
        help="merge experts that are at least this much alike, e.g. 0.99",
    )
    rules.add_argument("--experts-per-layer", type=reads(Count), metavar="N", help="keep this many in every layer")
    rules.add_argument(
        "--drop",
        metavar="JSON",
        type=reads(list[int] | dict[str | int, list[int]], 'give JSON like [1, 3] or {"0": [1], "5": [2]}'),
        help='experts to drop: [1, 3] in every layer, or by layer, {"0": [1], "5": [2]}',
    )
    data.add_argument("--dtype", default="auto", metavar="NAME", help="of the weights while data run through them")
    add_data_options(data)
    return parser


def run(options: argparse.Namespace) -> None:
    settings = {name: value for name, value in vars(options).items() if name not in ("model", "output")}
    print_pruning(prune_experts(options.model, options.output, **settings))
    print(options.output)


def print_pruning(pruning: Pruning) -> None:
    """Tables of what became of the experts, and of the size and the loss before and after."""
    console = Console(markup=False, emoji=False)
    table = Table("layer", "experts", "dropped", "merged", "tokens that lost an expert", title="Pruning")
    for i, layer in enumerate(pruning.layers):
        merged = "; ".join("+".join(map(str, group)) for group in layer.groups if len(group) > 1)
        lost = "" if pruning.lost is None else f"{pruning.lost['layers'][i]:.1%}"
        count = f"{layer.num_experts} → {len(layer.groups)}"
        table.add_row(layer.name, count, ", ".join(map(str, layer.dropped)), merged, lost)
    console.print(table)
    table = Table("", "before", "after")
    for row, name in (("parameters", "total"), ("active per token", "active")):
        table.add_row(row, *(f"{getattr(pruning.size[when], name):,}" for when in ("before", "after")))
    for domain in (pruning.loss or {"before": {}})["before"]:
        assert pruning.loss is not None
        table.add_row(f"loss: {domain}", *(f"{pruning.loss[when][domain]:.4f}" for when in ("before", "after")))
    console.print(table)
    for event, shares in (("lost an expert", pruning.lost), ("had one that is merged", pruning.merged)):
        if shares is not None and shares["any_layer"]:
            console.print(f"tokens that {event} in any layer: {shares['any_layer']:.1%}", highlight=False)
