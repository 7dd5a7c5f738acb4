"""`moe-peft inspect`."""

from __future__ import annotations

import argparse

from ..analysis.inspect import inspect_model
from ..utils.validation import Count
from .arguments import add_data_options, add_figures_option, add_weights_options, reads


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description="Report where a model's tokens go: tables and figures.")
    parser.add_argument("--model", required=True, help="folder of an adapter or a native MoE")
    parser.add_argument("--data", required=True, help="a .jsonl, .json, .csv or .parquet file, or a dataset's name")
    parser.add_argument("--output", default="routing", metavar="FOLDER", help="folder for tables and figures")
    parser.add_argument("--label-column", help="column that holds the domains")
    parser.add_argument(
        "--expert-map",
        metavar="JSON",
        type=reads(dict[str | int, list[int]], 'give JSON like {"code": [0, 1], "prose": [2, 3]}'),
        help='domain → experts, for compliance, e.g. {"code": [0, 1]}, or masks, {"code": [1, 1, 0, 0]}',
    )
    add_data_options(parser)
    add_weights_options(parser)
    parser.add_argument(
        "--position-width",
        type=reads(Count),
        metavar="TOKENS",
        help="compliance by this many positions, not by doubling widths",
    )
    add_figures_option(parser)
    parser.add_argument("--html", action="store_true", help="also write report.html, a page that explains itself")
    return parser


def run(options: argparse.Namespace) -> None:
    inspect_model(
        options.model,
        options.data,
        options.output,
        label_column=options.label_column,
        expert_map=options.expert_map,
        split=options.split,
        dtype=options.dtype,
        quantization=options.quantization,
        position_width=options.position_width,
        suffix=f".{options.figures}",
        html=options.html,
        batch_size=options.batch_size,
        max_length=options.max_length,
        max_examples=options.max_examples,
    )
