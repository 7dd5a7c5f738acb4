"""`moe-peft upit`: run a recipe. `accelerate launch -m moe_peft upit …` on several devices."""

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
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_peft").setLevel(logging.INFO)
    try:
        options.run(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


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
