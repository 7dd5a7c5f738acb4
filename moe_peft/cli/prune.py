"""`moe-peft prune`."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from ..pruning import Pruning, prune_experts
from ..pruning.prune import MIN_LOAD
from ..utils.validation import Count, Share
from .arguments import add_data_options, reads


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog, description="Drop experts that get next to nothing, and merge experts that are nearly the same."
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="an adapter or a native MoE")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder for the result; new or empty")
    parser.add_argument("--data", help="a .jsonl, .json, .csv or .parquet file, or a dataset's name")
    parser.add_argument("--label-column", help="column that holds the domains, for losses by domain")
    parser.add_argument(
        "--min-load",
        type=reads(Share),
        metavar="SHARE",
        help=f"with --data, drop experts with a smaller share of their layer's assignments ({MIN_LOAD})",
    )
    parser.add_argument(
        "--merge-twins",
        type=reads(Share),
        metavar="COSINE",
        help="merge experts that are at least this much alike, e.g. 0.99",
    )
    parser.add_argument("--experts-per-layer", type=reads(Count), metavar="N", help="keep this many in every layer")
    parser.add_argument(
        "--drop",
        metavar="JSON",
        type=reads(list[int] | dict[str | int, list[int]], 'give JSON like [1, 3] or {"0": [1], "5": [2]}'),
        help='experts to drop: [1, 3] in every layer, or by layer, {"0": [1], "5": [2]}',
    )
    parser.add_argument("--dtype", default="auto", help="of the weights while data run through them")
    add_data_options(parser)
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
