"""
A few tokens of different texts through one FFN, as in decoding: MoE-LoRA against PEFT LoRA of the same active rank,
with one thread and with torch's default.

    python -m benchmarks.one_token             # hidden 256, 576 and 768, 8 experts; and 64 experts at hidden 256
    python -m benchmarks.one_token --threads 2 --hidden 256 --rounds 400
    python -m benchmarks.one_token --rows 2 4 8            # so many texts at once

float32 on the CPU. All methods run interleaved in one process, four tokens at a time. A row has the median of the
per-round ratios to LoRA, of wall time and of the process's CPU time. Threads that wait spin, so on a busy machine both
differ from an idle one's.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch

from .adapter import METHODS, Case
from .timing import interleave, machine, ratio

TOKENS = 4  # at once: fewer than fill a time slice of the scheduler


def seconds(ffn: torch.nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Wall and CPU seconds of a few tokens, one after another."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(TOKENS):
        ffn(x)
    return time.perf_counter() - wall, time.process_time() - cpu


@torch.no_grad()
def measure(hidden: int, experts: int, rows: int, rounds: int) -> str:
    """The table's row of one size."""
    case, ffns = Case(hidden, experts, layers=1, vocab=64), {}
    for method in METHODS:
        model = case.model(method).eval()
        ffns[method] = (model if method == "base" else model.get_base_model()).model.layers[0].mlp
    x = torch.randn(rows, 1, hidden, generator=torch.Generator().manual_seed(0))
    of = interleave({method: partial(seconds, ffn, x) for method, ffn in ffns.items()}, rounds, warmup=20)
    cells = [
        " / ".join(
            f"{ratio(times, others).median:.2f}"
            for times, others in zip(zip(*of[m], strict=True), zip(*of["lora"], strict=True), strict=True)
        )
        for m in METHODS[1:]
    ]
    return f"| {torch.get_num_threads()} | {hidden} | {experts} | {rows} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 576, 768])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="texts at once")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, help="this number alone")
    args = parser.parse_args()
    print("| threads | hidden | experts | rows | output, wall / CPU | projection | base alone |")
    print("|---|---|---|---|---|---|---|")
    for threads in [args.threads] if args.threads else sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for hidden in args.hidden:
            for rows in args.rows:
                print(measure(hidden, args.experts, rows, args.rounds), flush=True)
        if 256 in args.hidden and args.experts != 64:
            for rows in args.rows:
                print(measure(256, 64, rows, args.rounds), flush=True)
    print(machine())


if __name__ == "__main__":
    main()
