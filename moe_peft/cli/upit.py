"""`moe-peft upit`, also with `accelerate launch -m moe_peft upit …`."""

from __future__ import annotations

import argparse

from ..training.estimate import STRATEGIES, planned_launch
from ..upit.methods import METHODS
from ..upit.pipeline import UpIT
from ..upit.plan import print_plan
from ..upit.recipe import load_recipe
from ..upit.summary import print_summary
from ..upit.sweep import print_sweep, sweep
from ..utils.distributed import leave_processes
from ..utils.messages import InputError

EXAMPLE = r"""
example:
  echo '{output_dir: upit, num_experts: 4, data: {train: trl-lib/Capybara},
    model: {name_or_path: Qwen/Qwen3-0.6B-Base}}' > upit.yaml
  moe-peft upit --config upit.yaml --dry-run
"""


def parser(prog: str) -> argparse.ArgumentParser:
    methods = "\n".join(f"  mode: {mode:5} {', '.join(names)}" for mode, names in METHODS.items())
    parser = argparse.ArgumentParser(
        prog,
        description="Run a recipe: UpIT or one of its baselines.",
        epilog=f"methods (in the recipe, or --set method=NAME):\n{methods}\n{EXAMPLE}",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe, a YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting, e.g. post_train.seed=1"
    )
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=VALUE,VALUE,…",
        help="one run for each value, in a folder of its own in output_dir, and how they compare",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--time", action="store_true", help="with --dry-run: time a few steps of each stage")
    parser.add_argument("--processes", type=int, metavar="N", help="with --dry-run: plan for this many processes")
    parser.add_argument("--strategy", choices=STRATEGIES, help="with --dry-run: what shards the state among them")
    parser.add_argument(
        "--redo",
        action="store_true",
        help="remove finished stages that a changed recipe does not fit, and do them again",
    )
    return parser


def run(options: argparse.Namespace) -> None:
    launch = planned_launch(options.processes, options.strategy, options.dry_run, options.time)
    if options.sweep:
        if options.dry_run:
            raise InputError("--dry-run: prints the plan of one run; give --set instead of --sweep")
        print_sweep(sweep(options.config, options.set, options.sweep, options.redo))
        leave_processes()
        return
    pipeline = UpIT(load_recipe(options.config, options.set))
    if options.dry_run:
        print_plan(pipeline, launch, options.time)
    else:
        pipeline.run(options.redo)
        print_summary(pipeline)
        leave_processes()
