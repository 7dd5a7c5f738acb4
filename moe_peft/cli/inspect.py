"""`moe-peft inspect`."""

from __future__ import annotations

import argparse
import json

from ..analysis.inspect import inspect_model


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description="Report where a model's tokens go: tables and figures.")
    parser.add_argument("--model", required=True, help="folder of an adapter or a native MoE")
    parser.add_argument("--data", required=True, help="a .jsonl, .json, .csv or .parquet file, or a data set's name")
    parser.add_argument("--output", default="routing", metavar="FOLDER", help="folder for tables and figures")
    parser.add_argument("--label-column", help="column that holds the domains")
    parser.add_argument("--expert-map", metavar="JSON", help='domain → experts, for compliance, e.g. {"code": [0, 1]}')
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
        expert_map=_parse_expert_map(options.expert_map),
        batch_size=options.batch_size,
        max_length=options.max_length,
        max_examples=options.max_examples,
    )


def _parse_expert_map(text: str | None) -> dict[str, list[int]] | None:
    """`{"code": [0, 1], …}`, as JSON."""
    if text is None:
        return None
    try:
        value = json.loads(text)
        return {str(domain): [int(i) for i in experts] for domain, experts in value.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f'--expert-map {text!r}: give JSON like {{"code": [0, 1], "prose": [2, 3]}}') from error
