"""`moe-peft demo`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..utils.messages import InputError


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog,
        description="See it work in ten minutes on two cores: SmolLM2-135M-Instruct learns four kinds of requests, by "
        "LoRA and by LoRA experts, and is exported to a native MoE.",
        epilog="example:\n  moe-peft demo --output demo --steps 50",
    )
    parser.add_argument("--model", help="another causal LM with a chat template, by name or folder")
    parser.add_argument("--output", type=Path, default=Path("demo"), metavar="FOLDER", help="for all that is made")
    parser.add_argument("--steps", type=int, default=50, help="training steps of 8 rows, for each of the two")
    return parser


def run(options: argparse.Namespace) -> None:
    if options.steps < 1:
        raise InputError(f"--steps {options.steps}: must be at least 1")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "20")
    from ..demo.run import run_demo  # only now: these imports take seconds

    run_demo(options.output, options.model, options.steps)
