"""
Upcycling's speed relative to `cp`, and its peak memory relative to the model's size.

    python -m benchmarks.upcycle    # 10 minutes and 15 GB of disk; writes benchmarks/results/upcycle.md

Random bfloat16 Llamas (hidden 1024, FFN 2816) of several depths become Mixtrals with 4 experts. Time: that of `upcycle`
as a multiple of `cp` of its output, on the same disk, both until everything is written to disk; interleaved, medians.
Memory: the peak of resident memory of a process that does nothing else, mapped pages of files included, less what it
held before the call.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moe_peft.native import UpcycleConfig, upcycle

from .processes import run_module

HIDDEN, WIDTH, N = 1024, 2816, 4
DEPTHS = (4, 16, 40)
INITS = ("copy", "permute", "drop", "noise")


def make(folder: Path, layers: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=layers, num_attention_heads=16, vocab_size=8192
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def one(source: str, target: str, init: str) -> None:
    """Upcycle, in a process of its own, and print seconds and bytes of memory as JSON."""
    process = psutil.Process()
    before = process.memory_info().rss
    most, done = before, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    upcycle(source, target, UpcycleConfig(num_experts=N, init=init))
    os.sync()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    print(json.dumps({"seconds": seconds, "bytes": most - before}))


def measure(root: Path, source: Path, init: str, rounds: int) -> tuple[float, float, int]:
    """Median multiple of `cp`'s time, peak memory in MiB, bytes of the output."""
    ratios, memory, size = [], 0.0, 0
    for _ in range(rounds):
        target, copy = root / "moe", root / "copy"
        for folder in (target, copy):
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        measured = json.loads(run_module("benchmarks.upcycle", "--one", source, target, init))
        start = time.perf_counter()
        subprocess.run(["cp", "-r", str(target), str(copy)], check=True)
        os.sync()
        ratios.append(measured["seconds"] / (time.perf_counter() - start))
        memory = max(memory, measured["bytes"] / 2**20)
        size = sum(path.stat().st_size for path in target.iterdir())
    return statistics.median(ratios), memory, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write models; default: the folder for temporary files")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/upcycle.md"))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(*args.one)
        return
    ffn = 3 * HIDDEN * WIDTH * 2 / 2**20
    lines = [
        "# Upcycling: speed and memory",
        "",
        f"Made by `python -m benchmarks.upcycle`: bfloat16, {N} experts; one FFN has {ffn:.0f} MiB. Time is a "
        "multiple of `cp` of the output.",
        "",
        "| init | layers | dense model, MiB | output, MiB | time | peak memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        root = Path(folder)
        for layers in DEPTHS:
            source = root / f"dense-{layers}"
            make(source, layers)
            dense = sum(path.stat().st_size for path in source.iterdir()) / 2**20
            for init in INITS if layers > DEPTHS[0] else ("copy", "drop"):
                ratio, memory, size = measure(root, source, init, args.rounds)
                lines.append(f"| {init} | {layers} | {dense:.0f} | {size / 2**20:.0f} | {ratio:.2f} | {memory:.0f} |")
                print(lines[-1], flush=True)
    args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
