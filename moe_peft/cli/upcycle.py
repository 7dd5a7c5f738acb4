"""`moe-peft upcycle`; its options are the fields of `UpcycleConfig`."""

from __future__ import annotations

import argparse
import dataclasses

from transformers import HfArgumentParser

from ..native import UpcycleConfig, upcycle


def parser(prog: str) -> argparse.ArgumentParser:
    parser = HfArgumentParser(UpcycleConfig, prog=prog, description="Make a native MoE from dense models.")
    parser.add_argument("--model", required=True, nargs="+", help="folders or names of one or more dense models")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder for the MoE; must not exist yet")
    return parser


def run(options: argparse.Namespace) -> None:
    settings = {field.name: getattr(options, field.name) for field in dataclasses.fields(UpcycleConfig)}
    print(upcycle(options.model, options.output, UpcycleConfig(**settings)))
