"""`moe-peft export`."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from ..native import export_adapter, verify_export
from ..native.export import check_verifiable
from ..utils.io import read_text


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description="Make a native MoE from a MoE-LoRA adapter and its base.")
    parser.add_argument("--adapter", required=True, metavar="FOLDER")
    parser.add_argument("--base", help="the base in full precision; default: the one that the adapter names")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder for the MoE; new or empty")
    parser.add_argument("--family", help="model type of the MoE, e.g. mixtral; default: the one that fits")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default: the base's")
    parser.add_argument("--max-shard-size", default="5GB", help="largest size of an output file")
    parser.add_argument("--verify", metavar="TEXT", help="compare logits on a text, or on each line of a text file")
    return parser


def run(options: argparse.Namespace) -> None:
    texts = None if options.verify is None else _texts(options.verify)
    if texts is not None:
        check_verifiable(options.adapter, options.base)
    folder = export_adapter(
        options.adapter, options.output, options.base,
        family=options.family, dtype=options.dtype, max_shard_size=options.max_shard_size,
    )  # fmt: skip
    print(folder)
    if texts is not None:
        found = verify_export(options.adapter, folder, texts, options.base)
        print(
            f"{found.tokens} tokens: logits differ by at most {found.difference:.2g} (the largest is "
            f"{found.largest:.3g}); the most probable next token is the same for {found.agreement:.1%}"
        )


def _texts(given: str) -> list[str]:
    """A text, or the lines of a file, which is read before anything is written."""
    is_file = len(os.fsencode(given)) < 256 and Path(given).exists()
    if not is_file and re.fullmatch(r"\S+\.(txt|md|jsonl?|csv)", given):
        raise ValueError(f"export: --verify {given!r}: no such file; give a text, or a text file")
    text = read_text(given, f"export: --verify {given!r}") if is_file else given
    texts = [line for line in text.splitlines() if line.strip()]
    if not texts:
        raise ValueError(f"export: --verify {given!r}: give a text, or a text file")
    return texts
