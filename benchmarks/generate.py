"""
Generation with a static cache and a compiled forward pass, beside the usual one: seconds a token, against plain LoRA.

    python -m benchmarks.generate            # 8 layers of an 8B model's widths on a GPU, two minutes; a page
    python -m benchmarks.generate --small    # a tiny model on any machine: tests the script, says nothing about speed

`generate(cache_implementation="static")` of transformers compiles the forward pass of a token; with `reduce-overhead`
it replays CUDA graphs, and launches no longer count. Prompts of three lengths show whether a length compiles anew.
Random weights; the ways run interleaved, cells are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

from .adapter import DEVICE, Case, synchronize
from .timing import interleave

WIDE = Case(4096, layers=8, intermediate=14336, vocab=8192)
SMALL = Case(64, layers=2, intermediate=160, vocab=64)
METHODS = ("base", "lora", "output", "projection")
LENGTHS, NEW = (64, 200, 333), 64


@torch.no_grad()
def generate(model: Any, length: int, new: int, compiled: bool, mode: str) -> float:
    """Seconds of a new token, of a prompt of so many tokens."""
    ids = torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(length)).to(DEVICE)
    more = {}
    if compiled:
        config = CompileConfig(mode=mode, fullgraph=False)
        config._compile_all_devices = True
        more = {"cache_implementation": "static", "compile_config": config}
    start = time.perf_counter()
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        pad_token_id=0, **more,
    )  # fmt: skip
    synchronize()
    return (time.perf_counter() - start) / new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    case, new = (SMALL, 8) if args.small else (WIDE, NEW)
    mode = "reduce-overhead" if DEVICE == "cuda" else "default"
    jobs: dict[str, Callable[[], float]] = {}
    compiled: dict[str, str] = {}
    for method in METHODS:
        model: Any = case.model(method).eval()
        model.generation_config.eos_token_id = None
        graphs: list[int] = []
        torch._dynamo.reset()
        for length in LENGTHS:
            before = counters["stats"]["unique_graphs"]
            generate(model, length, new, True, mode)
            graphs.append(counters["stats"]["unique_graphs"] - before)
        compiled[method] = ", ".join(map(str, graphs))
        jobs[f"{method}, as usual"] = partial(generate, model, LENGTHS[0], new, False, mode)
        jobs[f"{method}, static and compiled"] = partial(generate, model, LENGTHS[0], new, True, mode)
    seconds = interleave(jobs, args.rounds, warmup=2)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    lines = [
        f"`python -m benchmarks.generate`, {torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}, "
        f"torch {torch.__version__}:",
        "",
        f"| | ms a token | of LoRA's as usual | of LoRA's compiled | graphs for prompts of {LENGTHS} tokens |",
        "|---|---|---|---|---|",
    ]
    for name, median in medians.items():
        of = [f"{median / medians[other]:.2f}" for other in ("lora, as usual", "lora, static and compiled")]
        graphs_of = compiled[name.split(",")[0]] if "static" in name else ""
        lines.append(f"| {name} | {1e3 * median:.2f} | {' | '.join(of)} | {graphs_of} |")
    print(page := "\n".join(lines))
    if not args.small:
        Path("benchmarks/results/generate.md").write_text(f"{page}\n")


if __name__ == "__main__":
    main()
