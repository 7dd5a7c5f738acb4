"""
For the day a GPU is there: everything that only a GPU can say, in one command.

    python -m benchmarks.gpu                    # nine minutes at most; again: goes on with what is missing
    python -m benchmarks.gpu --profile output   # where the time of a training step goes, kernel by kernel
    python -m benchmarks.gpu --wheels FOLDER    # elsewhere: downloads packages for a GPU's machine without a network

Each case is a line in a ledger as soon as it is measured (benchmarks/results/gpu.jsonl), and the page beside it
(gpu.md) is written anew from that: crossovers of the ways in which one FFN layer of an 8B model's width is computed,
with the constants that they suggest for `moe_peft.adapter.dispatch_choice.DEVICES`; then training, prefill, decoding
and memory of 8 such layers as multiples of plain LoRA's of the same active rank, in bf16, in 4-bit NF4 and with
torch.compile. Models are random: times do not depend on the weights. All methods run interleaved in an order that
changes every round; cells are medians, of ratios with quartiles. `--small` runs the script on any machine, to test it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_peft.adapter.dispatch_choice import DEVICES

from .adapter import DEVICE, DTYPE, TASKS, Case, compile_for, train_step
from .dispatch import METHODS as WAYS
from .dispatch import R, build, measure
from .processes import peak_growth
from .timing import interleave, ratio

WIDE = Case(4096, layers=8, intermediate=14336, length=2048, vocab=8192, checkpointing=True)
SMALL = Case(64, layers=1, intermediate=160, length=80, batch=2, vocab=64, checkpointing=True)
MODELS = ("lora", "output", "projection")
EXPERTS = (8, 16, 32, 64, 128)
BATCHES = [(tokens, False) for tokens in (1, 8, 16, 32, 64, 512, 8192)] + [(tokens, True) for tokens in (512, 8192)]
# What the library needs beside torch.
PACKAGES = (
    "transformers", "peft", "trl", "accelerate", "datasets", "tokenizers", "safetensors", "huggingface_hub",
    "bitsandbytes",
)  # fmt: skip

Cells = dict[str, Any]


def crossovers(case: Case, experts: int, mixing: str, rounds: int) -> Iterator[tuple[str, Cells]]:
    """Of one layer: seconds by the way of computing it, for each batch."""
    layer = build(case.hidden, experts, R, case.k, mixing, case.intermediate)
    for tokens, train in BATCHES:
        yield f"{tokens}{', training' if train else ''}", measure(layer, case.hidden, tokens, train, rounds)


def against_lora(case: Case, rounds: int, compiled: bool) -> Iterator[tuple[str, Cells]]:
    """Of whole models: each task's cells, by method."""
    models = {name: case.model(name) for name in MODELS}
    ids = case.ids()
    for task, run in TASKS.items():
        jobs: dict[str, Callable[[], float]] = {name: partial(run, model, ids) for name, model in models.items()}
        if compiled:
            jobs = {"lora": jobs["lora"]}
            jobs |= {f"{name}, compiled": partial(run, fast, ids) for name, fast in compile_for(task, models)}
        seconds = interleave(jobs, rounds)
        yield task, {name: str(ratio(times, seconds["lora"])) for name, times in seconds.items()}
    if DEVICE == "cuda" and not compiled:  # a process's resident memory has one peak, whoever made it
        peaks = {name: peak_growth(partial(train_step, model, ids)) for name, model in models.items()}
        yield "peak memory", {name: f"{peak / peaks['lora']:.2f}" for name, peak in peaks.items()}


def jobs(case: Case, rounds: int) -> dict[str, Callable[[], Iterator[tuple[str, Cells]]]]:
    """What is measured, by name, the most useful first."""
    found: dict[str, Callable[[], Iterator[tuple[str, Cells]]]] = {}

    def models(compiled: bool = False, **own: Any) -> None:
        of_case = dataclasses.replace(case, **own)
        kind = "4-bit" if of_case.quantized else str(DTYPE)[6:]
        name = f"f = {of_case.intermediate}, r = {of_case.r}, {kind}{', compiled' if compiled else ''}"
        found[name] = partial(against_lora, of_case, rounds, compiled)

    def layers(experts: int) -> None:
        for mixing in ("output", "projection"):
            found[f"{mixing} {experts}/{case.k}/{R}"] = partial(crossovers, case, experts, mixing, rounds)

    models()
    layers(EXPERTS[0])
    if DEVICE == "cuda":
        models(quantized=True)
        layers(64)
        models(compiled=True)
    models(r=16)
    for experts in EXPERTS:  # of which those above keep their places
        layers(experts)
    return found


def suggestion(records: list[Cells]) -> str:
    """The constants that the crossovers suggest."""
    columns, pair_columns, pairs, narrow_pairs = [0], [0], [0], [0]
    for record in records:
        mixing, _, shape = record["name"].partition(" ")
        if mixing not in ("output", "projection"):
            continue
        n, k, r = map(int, shape.split("/"))
        for batch, cells in record["cells"]:
            tokens = int(batch.split(",")[0])
            best = min((way for way in cells if way != "auto"), key=cells.get)
            if best == "dense" and tokens >= 512:
                (columns if mixing == "projection" else pair_columns).append(n * r)
            if best == "gather" and mixing == "output":
                (narrow_pairs if n * r <= DEVICES["gpu"].columns else pairs).append(tokens * k)
    found = {"columns": columns, "pair_columns": pair_columns, "pairs": pairs, "narrow_pairs": narrow_pairs}
    return f"Crossovers({', '.join(f'{name}={max(values)}' for name, values in found.items())})"


def page(records: list[Cells]) -> str:
    lines = ["`python -m benchmarks.gpu`, by device:", ""]
    for device in dict.fromkeys(record["device"] for record in records):
        of_device = [record for record in records if record["device"] == device]
        ways = [way for way in WAYS if any(way in cells for r in of_device for _, cells in r["cells"])]
        lines += [f"## {device}", "", f"Suggested: `{suggestion(of_device)}`", ""]
        lines += [f"| one layer, mixing n/k/r | tokens | {' | '.join(ways)} |", "|---" * (2 + len(ways)) + "|"]
        others = []
        for record in of_device:
            for task, cells in record["cells"]:
                if "lora" in cells:
                    others.append(f"| {record['name']} | {task} | {', '.join(f'{m} {c}' for m, c in cells.items())} |")
                    continue
                best = min(cells.values())
                shown = [f"{cells[way] / best:.2f}" if way in cells else "–" for way in ways]
                lines.append(f"| {record['name']} | {task} ({best * 1e3:.2f} ms) | {' | '.join(shown)} |")
        lines += ["", "| 8 layers | task | multiples of LoRA |", "|---|---|---|", *others, ""]
    return "\n".join(lines)


def run(case: Case, ledger: Path, rounds: int, minutes: float, only: str = "") -> str:
    """Measure what the ledger lacks of this device, as long as there is time; returns the page."""
    start, longest = time.monotonic(), 0.0
    device = f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}, torch {torch.__version__}"
    records = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    done = {record["name"] for record in records if record["device"] == device}
    for name, job in jobs(case, rounds).items():
        began = time.monotonic()
        if name in done or only not in name or began - start + longest > 60 * minutes:
            continue
        record = {"device": device, "name": name, "cells": list(job())}
        longest = max(longest, time.monotonic() - began)
        records.append(record)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        ledger.parent.mkdir(parents=True, exist_ok=True)
        with ledger.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    ledger.with_suffix(".md").write_text(page(records))
    return page(records)


def profile(case: Case, method: str) -> str:
    """A training step by kernel: the 30 that take the most time."""
    model, ids = case.model(method), case.ids()
    job = partial(train_step, model, ids)
    for _ in range(3):
        job()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if DEVICE == "cuda" else []
    with torch.profiler.profile(activities=kinds) as profiler:
        job()
    return profiler.key_averages().table(sort_by=f"self_{DEVICE}_time_total", row_limit=30, max_name_column_width=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=8.5, help="no case begins that might end later")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose names have it, as bfloat16 or output 8")
    parser.add_argument("--profile", choices=MODELS, metavar="METHOD", help="; ".join(MODELS))
    parser.add_argument("--small", action="store_true", help="a tiny case, on any machine; it says nothing about speed")
    parser.add_argument("--ledger", type=Path, default=Path("benchmarks/results/gpu.jsonl"))
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="download packages, and measure nothing")
    args = parser.parse_args()
    case = SMALL if args.small else WIDE
    if args.wheels:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(args.wheels)]
        subprocess.run([*pip, *PACKAGES], check=True)
    elif DEVICE != "cuda" and not args.small:
        parser.error("no CUDA device; --small tests the script without one")
    elif args.profile:
        print(profile(case, args.profile))
    else:
        print(run(case, args.ledger, args.rounds, args.minutes, args.only))


if __name__ == "__main__":
    main()
