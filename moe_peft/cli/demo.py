"""`moe-peft demo`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

# What other packages read when they are imported; a variable that is set already keeps its value.
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' bars too
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TORCH_LOGS": "-all",  # errors only
}


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog,
        description="See it work in ten minutes on two cores: SmolLM2-135M-Instruct learns four kinds of requests, by "
        "LoRA and by LoRA experts, and is exported to a native MoE.",
    )
    parser.add_argument("--model", help="another causal LM with a chat template, by name or folder")
    parser.add_argument("--output", type=Path, default=Path("demo"), metavar="FOLDER", help="for all that is made")
    parser.add_argument("--steps", type=int, default=50, help="training steps of 8 rows, for each of the two")
    return parser


def run(options: argparse.Namespace) -> None:
    if options.steps < 1:
        raise ValueError(f"--steps {options.steps}: must be at least 1")
    for name, value in {**_QUIET, **({} if sys.stderr.isatty() else {"TQDM_MININTERVAL": "20"})}.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    logging.getLogger("torchao").setLevel(logging.ERROR)  # peft imports it where it is installed
    from ..demo.run import run_demo  # only now: these imports take seconds, and what they print is set above

    run_demo(options.output, options.model, options.steps)
