"""
MoE-LoRA against plain LoRA of the same active rank at the width of a 7B model, on a GPU.

    python -m benchmarks.gpu                       # the table, in benchmarks/results/gpu.md; about ten minutes
    python -m benchmarks.gpu --cases 0 --compiled  # one of the cases, with torch.compile
    python -m benchmarks.gpu --profile output      # where the time of a step goes, kernel by kernel
    python -m benchmarks.gpu --tiles               # the Triton kernels alone, with tiles of several sizes

Cases: hidden 4096, 8 layers, 4×2048 tokens, gradient checkpointing, 8 experts, top 2; f = 11008 and 14336, rank 8 and
16, bf16 and 4-bit NF4. Models are random: times do not depend on the weights. All methods run interleaved in an order
that changes every round; rows give the median of the per-round ratios to LoRA, with quartiles. "triton" is the
method's own kernels pinned, for comparison with what the library chooses. Memory is the peak of a training step above
what was allocated before it. `--small` runs the script on any machine, to test it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from moe_peft import pin_dispatch

from .adapter import DEVICE, DTYPE, TASKS, Case, compile_for, synchronize, train_step
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
PINNED = {"output, triton": "output", "projection, triton": "projection"}

Job = Callable[[], float]


def pinned(run: Callable[..., float], model: torch.nn.Module, ids: torch.Tensor, kernels: bool) -> float:
    with pin_dispatch("triton") if kernels else nullcontext():
        return run(model, ids)


def rows(case: Case, rounds: int, compiled: bool, kernels: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Each task's cells, by method."""
    models = {name: case.model(name) for name in MODELS}
    ids = case.ids()
    runs = {name: (model, False) for name, model in models.items()}
    if kernels:
        runs |= {name: (models[of], True) for name, of in PINNED.items()}
    for task, run in TASKS.items():
        jobs: dict[str, Job] = {name: partial(pinned, run, model, ids, own) for name, (model, own) in runs.items()}
        if compiled:
            jobs |= {f"{name}, compiled": partial(run, fast, ids) for name, fast in compile_for(task, models)}
        seconds = interleave(jobs, rounds)
        yield task, {name: str(ratio(times, seconds["lora"])) for name, times in seconds.items()}
    if DEVICE == "cuda":  # a process's resident memory has one peak, whoever made it
        peaks = {name: peak_growth(partial(pinned, train_step, model, ids, own)) for name, (model, own) in runs.items()}
        yield "peak memory", {name: f"{peak / peaks['lora']:.2f}" for name, peak in peaks.items()}


def table(cases: list[Case], rounds: int, compiled: bool, kernels: bool) -> Iterator[str]:
    """The lines of the table, as they are measured."""
    methods = [*MODELS, *(PINNED if kernels else ()), *([f"{m}, compiled" for m in MODELS] if compiled else ())]
    yield f"| case | task | {' | '.join(methods)} |"
    yield "|---" * (2 + len(methods)) + "|"
    for case in cases:
        name = f"f = {case.intermediate}, r = {case.r}, {'4-bit' if case.quantized else str(DTYPE)[6:]}"
        for task, cells in rows(case, rounds, compiled, kernels):
            yield f"| {name} | {task} | {' | '.join(cells.get(method, '–') for method in methods)} |"
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def profile(case: Case, method: str) -> str:
    """A training step by kernel: the 30 that take the most time."""
    model, ids = case.model(PINNED.get(method, method)), case.ids()
    job = partial(pinned, train_step, model, ids, method in PINNED)
    for _ in range(3):
        job()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if DEVICE == "cuda" else []
    with torch.profiler.profile(activities=kinds) as found:
        job()
    return found.key_averages().table(sort_by=f"self_{DEVICE}_time_total", row_limit=30, max_name_column_width=80)


def tiles(case: Case, rounds: int) -> Iterator[str]:
    """Milliseconds of the kernels' forward and backward at a case's size, by tile."""
    from triton.runtime.errors import OutOfResources

    from moe_peft.adapter import kernels

    tokens, f, columns = case.batch * case.length, int(case.intermediate or case.hidden), case.experts * case.r

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=DTYPE, requires_grad=True)

    G, U, gates = make(tokens, f), make(tokens, f), make(tokens, case.k)
    H = make(tokens * case.k, columns), make(tokens * case.k, columns)
    B, A = (make(columns, f), make(columns, f)), make(columns, f)

    def run() -> float:
        start = time.perf_counter()
        z, low = kernels.fused_hidden(G, U, H, B, gates, A, "silu")
        torch.autograd.backward([z, low], [z.detach(), low.detach()])
        synchronize()
        return time.perf_counter() - start

    yield "| kernel | rows | columns | warps | ms, forward and backward, others unchanged |\n|---|---|---|---|---|"
    for name in ("FORWARD", "BACKWARD_TOKENS", "BACKWARD_WEIGHTS"):
        own = getattr(kernels, name)
        for rows_, columns_, warps in itertools.product((16, 32, 64), (32, 64, 128), (4, 8)):
            setattr(kernels, name, kernels.Tile(rows_, columns_, warps))
            try:
                cell = f"{1e3 * min(interleave({'': run}, rounds)['']):.2f}"
            except OutOfResources:
                cell = "too much shared memory"
            yield f"| {name} | {rows_} | {columns_} | {warps} | {cell} |"
        setattr(kernels, name, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="+", choices=range(len(CASES)), default=list(range(len(CASES))))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action="store_true", help="also with torch.compile; minutes of compilation")
    parser.add_argument("--no-kernels", action="store_true", help="leave out the Triton kernels")
    parser.add_argument("--profile", choices=[*MODELS, *PINNED], metavar="METHOD", help="; ".join([*MODELS, *PINNED]))
    parser.add_argument("--tiles", action="store_true", help="try tiles of the Triton kernels")
    parser.add_argument("--small", action="store_true", help="a tiny case, on any machine; it says nothing about speed")
    parser.add_argument(
        "--output", type=Path, help="file for the result; default: benchmarks/results/gpu.md, the table's"
    )
    args = parser.parse_args()
    if DEVICE != "cuda" and not args.small:
        parser.error("no CUDA device; --small tests the script without one")
    cases = [SMALL] if args.small else [CASES[i] for i in args.cases]
    kernels = DEVICE == "cuda" and not args.no_kernels
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    head = [f"`python -m benchmarks.gpu`, {device}, torch {torch.__version__}, multiples of LoRA of rank k·r", ""]
    output = args.output
    if args.profile:
        found: Iterator[str] = iter([profile(cases[0], args.profile)])
    elif args.tiles:
        found = tiles(cases[0], 5)
    else:
        found = table(cases, args.rounds, args.compiled, kernels)
        output = output or (None if args.small else Path("benchmarks/results/gpu.md"))
    written = ""
    for line in itertools.chain(head, found):
        print(line, flush=True)
        written += line + "\n"
        if output:  # with every line, so that a run that is cut off leaves what it has measured
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(written)


if __name__ == "__main__":
    main()
