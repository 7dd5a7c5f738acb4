"""`moe-peft export`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from ..native import export_adapter, export_gguf, verify_export
from ..native.engines import inexact
from ..native.export import check_verifiable
from ..utils.io import read_text
from ..utils.loading import read_config
from ..utils.messages import InputError


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog,
        usage="%(prog)s (--adapter | --model) FOLDER --output PATH [options]",
        description="Make a native MoE from a MoE-LoRA adapter and its base, or a GGUF file from either.",
        epilog='example:\n  moe-peft export --adapter adapter --output exported --verify "Hello, world."',
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--adapter", metavar="FOLDER", help="a MoE-LoRA adapter")
    source.add_argument("--model", metavar="FOLDER", help="a native MoE (upcycled, exported, pruned) for --format gguf")
    parser.add_argument("--base", help="the base in full precision; default: the one that the adapter names")
    parser.add_argument(
        "--output", required=True, metavar="PATH", help="folder for the MoE, new or empty; or GGUF file"
    )
    parser.add_argument("--format", choices=("safetensors", "gguf"), default="safetensors", help="gguf: for llama.cpp")
    parser.add_argument(
        "--family", metavar="NAME", help="model type of the MoE, e.g. mixtral; default: the one that fits"
    )
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        help="float32, bfloat16 or float16; with gguf float32, bfloat16 or q8_0; default: the base's",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest size of an output file, not of gguf"
    )
    parser.add_argument("--verify", metavar="TEXT", help="compare logits on this text, or on each line of a text file")
    return parser


def run(options: argparse.Namespace) -> None:
    if options.model is not None and (options.base or options.family):
        raise InputError(f"--model {options.model}: --base and --family go with --adapter")
    if options.format == "gguf":
        if options.verify is not None:
            raise InputError("--verify: goes with --format safetensors, which transformers loads")
        source = options.adapter or options.model
        print(export_gguf(source, options.output, options.base, family=options.family, dtype=options.dtype))
        return
    if options.model is not None:
        raise InputError(f"--model {options.model}: is no adapter; give --format gguf, or --adapter FOLDER")
    texts = None if options.verify is None else _texts(options.verify)
    if texts is not None:
        check_verifiable(options.adapter, options.base)
    folder = export_adapter(
        options.adapter, options.output, options.base,
        family=options.family, dtype=options.dtype, max_shard_size=options.max_shard_size,
    )  # fmt: skip
    print(folder)
    for engine, reason in inexact(read_config(folder, folder)).items():
        print(f"not for {engine}: {reason}")
    if texts is not None:
        c = verify_export(options.adapter, folder, texts, options.base)
        print(
            f"{'verified' if c.passed else 'not verified'}: of {c.tokens} tokens, {c.within:.1%} have logits within "
            f"{c.tolerance:.0e} of the largest ({c.largest:.3g}; the largest difference is {c.difference:.2g}), "
            f"{c.agreement:.1%} the same most probable next token"
        )
        if not c.passed:
            sys.exit(1)


def _texts(text_or_file: str) -> list[str]:
    """The text, or the lines of a file, which is read before anything is written."""
    is_file = len(os.fsencode(text_or_file)) < 256 and Path(text_or_file).exists()
    if not is_file and re.fullmatch(r"\S+\.(txt|md|jsonl?|csv)", text_or_file):
        raise InputError(f"--verify {text_or_file!r}: no such file; give text, or a text file")
    text = read_text(text_or_file, f"--verify {text_or_file!r}") if is_file else text_or_file
    texts = [line for line in text.splitlines() if line.strip()]
    if not texts:
        raise InputError(f"--verify {text_or_file!r}: give text, or a text file")
    return texts
