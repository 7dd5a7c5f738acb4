"""Times that can be compared on a machine whose speed changes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


def clock() -> float:
    """Seconds: on a CPU with one thread those of this process alone, to which no other program adds."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time() if alone else time.perf_counter()


def interleave(jobs: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """
    What each job returns (its seconds), round by round. Every round runs all jobs, in an order of its own, so that
    whatever slows the machine down affects them alike.

    Args:
        jobs: name → what to run.
        rounds: runs of each job that count.
        warmup: runs of each job before them.
    """
    for job in jobs.values():
        for _ in range(warmup):
            job()
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for seed in range(rounds):
        for name in random.Random(seed).sample(list(jobs), len(jobs)):
            seconds[name].append(jobs[name]())
    return seconds


@dataclass(frozen=True)
class Ratio:
    """The median of ratios and their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def ratio(seconds: Sequence[float], others: Sequence[float]) -> Ratio:
    """One job's time as a multiple of another's in the same round."""
    low, median, high = statistics.quantiles([a / b for a, b in zip(seconds, others, strict=True)], n=4)
    return Ratio(median, low, high)
