"""`moe-peft inspect`."""

from __future__ import annotations

import argparse

from ..analysis.inspect import inspect_model
from ..utils.validation import Count
from .arguments import add_data_options, add_figures_option, add_weights_options, reads

EXAMPLE = r"""
example:
  moe-peft inspect --model adapter --data trl-lib/Capybara --max-examples 64
"""


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog, description="Report where a model's tokens go: tables and figures.", epilog=EXAMPLE
    )
    inputs, report = map(parser.add_argument_group, ("Model and data", "Report"))
    inputs.add_argument("--model", required=True, metavar="FOLDER", help="an adapter or a native MoE")
    inputs.add_argument("--base", help="an adapter's base; default: the one that it names")
    add_weights_options(inputs)
    inputs.add_argument(
        "--data", required=True, metavar="FILE", help="a .jsonl, .json, .csv or .parquet file, or a dataset's name"
    )
    add_data_options(inputs)
    inputs.add_argument("--label-column", metavar="NAME", help="column that holds the domains")
    report.add_argument("--output", default="routing", metavar="FOLDER", help="folder for tables and figures")
    report.add_argument("--html", action="store_true", help="also write report.html, a page that explains itself")
    add_figures_option(report)
    report.add_argument(
        "--expert-map",
        metavar="JSON",
        type=reads(dict[str | int, list[int]], 'give JSON like {"code": [0, 1], "prose": [2, 3]}'),
        help='domain → experts, for compliance, e.g. {"code": [0, 1]}, or masks, {"code": [1, 1, 0, 0]}',
    )
    report.add_argument(
        "--position-width",
        type=reads(Count),
        metavar="TOKENS",
        help="compliance by this many positions, not by doubling widths",
    )
    return parser


def run(options: argparse.Namespace) -> None:
    inspect_model(
        options.model,
        options.data,
        options.output,
        base=options.base,
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
