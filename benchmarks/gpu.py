"""
MoE-LoRA against plain LoRA of the same active rank at the width of a 7B model, on a GPU.

    python -m benchmarks.gpu                       # the table, in benchmarks/results/gpu.md; about ten minutes
    python -m benchmarks.gpu --cases 0 --compiled  # one of the cases, with torch.compile
    python -m benchmarks.gpu --profile output      # where the time of a step goes, kernel by kernel

Cases: hidden 4096, 8 layers, 4×2048 tokens, gradient checkpointing, 8 experts, top 2; f = 11008 and 14336, rank 8 and
16, bf16 and 4-bit NF4. Models are random: times do not depend on the weights. All methods run interleaved in an order
that changes every round; rows give the median of the per-round ratios to LoRA, with quartiles. Memory is the peak of a
training step above what was allocated before it. `--small` runs the script on any machine, to test it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from .adapter import DEVICE, DTYPE, TASKS, Case, compile_for, train_step
from .processes import peak_growth
from .timing import interleave, ratio

WIDE = Case(4096, layers=8, intermediate=11008, length=2048, vocab=8192, checkpointing=True)
CASES = [
    WIDE,
    dataclasses.replace(WIDE, r=16),
    dataclasses.replace(WIDE, intermediate=14336),
    dataclasses.replace(WIDE, intermediate=14336, r=16),
    dataclasses.replace(WIDE, intermediate=14336, quantized=True),
]
SMALL = Case(64, layers=1, intermediate=160, length=80, batch=2, vocab=64, checkpointing=True)
MODELS = ("lora", "output", "projection")

Job = Callable[[], float]


def rows(case: Case, rounds: int, compiled: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Each task's cells, by method."""
    models = {name: case.model(name) for name in MODELS}
    ids = case.ids()
    for task, run in TASKS.items():
        jobs: dict[str, Job] = {name: partial(run, model, ids) for name, model in models.items()}
        if compiled:
            jobs |= {f"{name}, compiled": partial(run, fast, ids) for name, fast in compile_for(task, models)}
        seconds = interleave(jobs, rounds)
        yield task, {name: str(ratio(times, seconds["lora"])) for name, times in seconds.items()}
    if DEVICE == "cuda":  # a process's resident memory has one peak, whoever made it
        peaks = {name: peak_growth(partial(train_step, model, ids)) for name, model in models.items()}
        yield "peak memory", {name: f"{peak / peaks['lora']:.2f}" for name, peak in peaks.items()}


def table(cases: list[Case], rounds: int, compiled: bool) -> Iterator[str]:
    """The lines of the table, as they are measured."""
    methods = [*MODELS, *([f"{m}, compiled" for m in MODELS] if compiled else ())]
    yield f"| case | task | {' | '.join(methods)} |"
    yield "|---" * (2 + len(methods)) + "|"
    for case in cases:
        name = f"f = {case.intermediate}, r = {case.r}, {'4-bit' if case.quantized else str(DTYPE)[6:]}"
        for task, cells in rows(case, rounds, compiled):
            yield f"| {name} | {task} | {' | '.join(cells.get(method, '–') for method in methods)} |"
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


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
    parser.add_argument("--cases", type=int, nargs="+", choices=range(len(CASES)), default=list(range(len(CASES))))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action="store_true", help="also with torch.compile; minutes of compilation")
    parser.add_argument("--profile", choices=MODELS, metavar="METHOD", help="; ".join(MODELS))
    parser.add_argument("--small", action="store_true", help="a tiny case, on any machine; it says nothing about speed")
    parser.add_argument(
        "--output", type=Path, help="file for the result; default: benchmarks/results/gpu.md, the table's"
    )
    args = parser.parse_args()
    if DEVICE != "cuda" and not args.small:
        parser.error("no CUDA device; --small tests the script without one")
    cases = [SMALL] if args.small else [CASES[i] for i in args.cases]
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    head = [f"`python -m benchmarks.gpu`, {device}, torch {torch.__version__}, multiples of LoRA of rank k·r", ""]
    output = args.output
    if args.profile:
        body: Iterator[str] = iter([profile(cases[0], args.profile)])
    else:
        body = table(cases, args.rounds, args.compiled)
        output = output or (None if args.small else Path("benchmarks/results/gpu.md"))
    written = ""
    for line in itertools.chain(head, body):
        print(line, flush=True)
        written += line + "\n"
        if output:  # with every line, so that a run that is cut off leaves what it has measured
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(written)


if __name__ == "__main__":
    main()
