"""`moe-peft upcycle`; its options are the fields of `UpcycleConfig`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from transformers import HfArgumentParser

from ..models.gate_init import GATE_INITS
from ..native import UpcycleConfig, upcycle
from ..utils.loading import read_tokenizer
from ..utils.messages import InputError
from .help import GroupedParser

# What the short help lists.
USUAL = (
    "num_experts", "top_k", "init", "granularity", "num_shared_experts", "router_init", "calibration", "model",
    "output", "family", "dtype", "seed",
)  # fmt: skip
EXAMPLE = r"""
example:
  moe-peft upcycle --model Qwen/Qwen3-0.6B-Base --output moe \
    --num-experts 4 --init drop
"""


_GROUPS = {
    "Model": ("model", "output", "family", "dtype", "max_shard_size"),
    "Router": ("top_k", "router_init", "router_init_std", "router_num_heads", "router_weights", "router_aux_loss_coef",
               "calibration", "calibration_examples"),
    "Experts": {field.name for field in dataclasses.fields(UpcycleConfig)} - {"seed"},
}  # fmt: skip


class _Parser(GroupedParser, HfArgumentParser):
    pass


def parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        UpcycleConfig, groups=_GROUPS, prog=prog, description="Make a native MoE from dense models.", epilog=EXAMPLE
    )
    add = parser.add_argument
    add("--model", required=True, nargs="+", action="extend", metavar="NAME", help="Folders or names of dense models.")
    add("--output", required=True, metavar="FOLDER", help="Folder for the MoE; new or empty.")
    add("--calibration", metavar="FILE", help="Data for --router-init attention: a file, or a dataset's name.")
    add("--calibration-examples", type=int, metavar="N", help="Examples of it to draw, with --seed; default: 256.")
    return parser


def run(options: argparse.Namespace) -> None:
    settings = {field.name: getattr(options, field.name) for field in dataclasses.fields(UpcycleConfig)}
    config = UpcycleConfig(**settings)
    if config.router_init in GATE_INITS:
        raise InputError(f"--router-init {config.router_init}: needs texts for each expert; use moe-peft mix --models")
    if (options.calibration is None) == (config.router_init == "attention"):
        raise InputError(f"--calibration {options.calibration}: goes with --router-init attention")
    count = options.calibration_examples
    if count is not None and options.calibration is None:
        raise InputError(f"--calibration-examples {count}: goes with --calibration")
    if count is not None and count < 1:
        raise InputError(f"--calibration-examples {count}: use 1 or more")
    batches = None if options.calibration is None else _batches(options)
    print(upcycle(options.model, options.output, config, calibration=batches))


def _batches(options: argparse.Namespace) -> list[dict[str, Any]]:
    try:
        from ..training.data import check_rows, load_data
        from ..training.preparation import calibration_batches
    except ImportError as error:
        raise InputError(f"{error}; install the training extra: pip install 'moe-peft-hf[train]'") from error
    data = load_data(options.calibration, "--calibration", None)
    tokenizer = read_tokenizer(options.model[0], f"--calibration: {options.model[0]!r}")
    check_rows(data, "--calibration", tokenizer)
    return calibration_batches(data, tokenizer, options.calibration_examples or 256, seed=options.seed)
