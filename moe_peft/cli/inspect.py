"""`moe-peft inspect`."""

from __future__ import annotations

import argparse

from ..analysis.inspect import inspect_model
from .parsing import parse_json


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description="Report where a model's tokens go: tables and figures.")
    parser.add_argument("--model", required=True, help="folder of an adapter or a native MoE")
    parser.add_argument("--data", required=True, help="a .jsonl, .json, .csv or .parquet file, or a data set's name")
    parser.add_argument("--output", default="routing", metavar="FOLDER", help="folder for tables and figures")
    parser.add_argument("--label-column", help="column that holds the domains")
    parser.add_argument(
        "--expert-map",
        metavar="JSON",
        help='domain → experts, for compliance, e.g. {"code": [0, 1]}, or masks, {"code": [1, 1, 0, 0]}',
    )
    parser.add_argument("--split", default="train", help="split of the data; a file has only train, also train[:100]")
    parser.add_argument("--dtype", default="auto", help="of the weights: auto, float32, bfloat16 or float16")
    parser.add_argument(
        "--quantization", metavar="JSON", help='fields of BitsAndBytesConfig, e.g. {"load_in_4bit": true}'
    )
    parser.add_argument(
        "--position-width", type=int, metavar="TOKENS", help="compliance by this many positions, not by doubling widths"
    )
    parser.add_argument("--figures", default="png", choices=("png", "pdf", "svg"), help="format of the figures")
    parser.add_argument("--html", action="store_true", help="also write report.html, a page that explains itself")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=1024, help="maximum tokens per example")
    parser.add_argument("--max-examples", type=int, help="maximum number of examples")
    return parser


def run(options: argparse.Namespace) -> None:
    inspect_model(
        options.model,
        options.data,
        options.output,
        label_column=options.label_column,
        expert_map=parse_json("--expert-map", options.expert_map, '{"code": [0, 1], "prose": [2, 3]}'),
        split=options.split,
        dtype=options.dtype,
        quantization=parse_json("--quantization", options.quantization, '{"load_in_4bit": true}'),
        position_width=options.position_width,
        suffix=f".{options.figures}",
        html=options.html,
        batch_size=options.batch_size,
        max_length=options.max_length,
        max_examples=options.max_examples,
    )
