"""`moe-peft upit` runs a recipe (also under `accelerate launch -m moe_peft …`), `moe-peft inspect` shows routing."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. A wrong input ends it with one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="moe-peft", description="Mixture-of-Experts from dense language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    upit = commands.add_parser("upit", help="run a recipe: UpIT or a method it is compared with")
    upit.add_argument("--config", required=True, metavar="FILE", help="the recipe, a YAML file")
    upit.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting, e.g. post_train.seed=1"
    )
    upit.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    upit.set_defaults(run=_upit)
    inspect = commands.add_parser("inspect", help="report where a model's tokens go")
    inspect.add_argument("--model", required=True, help="an adapter folder, or a native MoE's")
    inspect.add_argument("--data", required=True, help="a .jsonl, .json, .csv or .parquet file, or a data set's name")
    inspect.add_argument("--output", default="routing", metavar="FOLDER", help="for tables and figures")
    inspect.add_argument("--label-column", help="the data's column of domains")
    inspect.add_argument("--expert-map", metavar="JSON", help='domain → experts, e.g. {"code": [0, 1]}: compliance')
    inspect.add_argument("--batch-size", type=int, default=8)
    inspect.add_argument("--max-length", type=int, default=1024, help="tokens of an example")
    inspect.add_argument("--max-examples", type=int, help="the first so many only")
    inspect.set_defaults(run=_inspect)
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_peft").setLevel(logging.INFO)
    try:
        options.run(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def _inspect(options: argparse.Namespace) -> None:
    try:
        from .inspection import inspect_model, parse_expert_map
    except ImportError as error:
        raise ValueError(f"{error}; install the training extra: pip install 'moe-peft-hf[train]'") from error
    inspect_model(
        options.model,
        options.data,
        options.output,
        label_column=options.label_column,
        expert_map=parse_expert_map(options.expert_map),
        batch_size=options.batch_size,
        max_length=options.max_length,
        max_examples=options.max_examples,
    )


def _upit(options: argparse.Namespace) -> None:
    try:  # heavy, and optional for the rest of the package
        from .upit.config import load_recipe
        from .upit.pipeline import UpIT
        from .upit.summary import print_plan, print_summary
    except ImportError as error:
        raise ValueError(f"{error}; install the training extra: pip install 'moe-peft-hf[train]'") from error
    pipeline = UpIT(load_recipe(options.config, options.set))
    if options.dry_run:
        print_plan(pipeline)
    else:
        pipeline.run()
        print_summary(pipeline)
