"""
`moe-peft upit` runs a recipe (also under `accelerate launch -m moe_peft …`), `inspect` shows routing, `upcycle` makes a
native MoE of dense models, `export` one of an adapter.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import HfArgumentParser

from ..native import UpcycleConfig, export_adapter, upcycle, verify_export


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. A wrong input ends it with one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="moe-peft", description="Mixture-of-Experts from dense language models.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=HfArgumentParser)
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
    up = commands.add_parser("upcycle", dataclass_types=[UpcycleConfig], help="make a native MoE of dense models")
    up.add_argument("--model", required=True, nargs="+", help="a dense model's folder or name, or several")
    up.add_argument("--output", required=True, metavar="FOLDER", help="for the MoE; it must not exist yet")
    up.set_defaults(run=_upcycle)
    export = commands.add_parser("export", help="make a native MoE of a MoE-LoRA adapter and its base")
    export.add_argument("--adapter", required=True, metavar="FOLDER")
    export.add_argument("--base", help="the base in full precision; default: the one that the adapter names")
    export.add_argument("--output", required=True, metavar="FOLDER", help="for the MoE; it must not exist yet")
    export.add_argument("--family", help="model type of the MoE, e.g. mixtral; default: the one that fits")
    export.add_argument("--dtype", help="float32, bfloat16 or float16; default: the base's")
    export.add_argument("--max-shard-size", default="5GB", help="size of the output's files")
    export.add_argument("--verify", metavar="TEXT", help="compare logits on a text, or on each line of a text file")
    export.set_defaults(run=_export)
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
        from ..analysis.inspect import inspect_model, parse_expert_map
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


def _upcycle(options: argparse.Namespace) -> None:
    settings = {field.name: getattr(options, field.name) for field in dataclasses.fields(UpcycleConfig)}
    print(upcycle(options.model, options.output, UpcycleConfig(**settings)))


def _export(options: argparse.Namespace) -> None:
    if options.verify is not None and not options.verify.strip():
        raise ValueError("export: --verify '': give a text, or a text file")
    folder = export_adapter(
        options.adapter, options.output, options.base,
        family=options.family, dtype=options.dtype, max_shard_size=options.max_shard_size,
    )  # fmt: skip
    print(folder)
    if options.verify is not None:
        is_file = len(os.fsencode(options.verify)) < 256 and Path(options.verify).is_file()
        texts = Path(options.verify).read_text(encoding="utf-8").splitlines() if is_file else [options.verify]
        found = verify_export(options.adapter, folder, texts, options.base)
        print(
            f"{found.tokens} tokens: logits differ by {found.difference:.2g} at most, the largest is "
            f"{found.largest:.3g}; the most probable next token is the same for {found.agreement:.1%}"
        )


def _upit(options: argparse.Namespace) -> None:
    try:  # heavy, and optional for the rest of the package
        from accelerate import PartialState

        from ..upit.parsing import load_recipe
        from ..upit.pipeline import UpIT
        from ..upit.summary import print_plan, print_summary
    except ImportError as error:
        raise ValueError(f"{error}; install the training extra: pip install 'moe-peft-hf[train]'") from error
    pipeline = UpIT(load_recipe(options.config, options.set))
    if options.dry_run:
        print_plan(pipeline)
    else:
        pipeline.run()
        print_summary(pipeline)
        PartialState().destroy_process_group()
