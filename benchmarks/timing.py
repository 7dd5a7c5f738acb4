"""Times that can be compared on a machine whose speed changes."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import psutil
import torch

T = TypeVar("T")


def clock() -> float:
    """Seconds: on a CPU with one thread those of this process alone, to which no other program adds."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time() if alone else time.perf_counter()


def machine() -> str:
    """Where a table was measured, as a line of JSON: torch, threads, processor, and how many programs ran."""
    processor = platform.processor()
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        processor = next((line.split(": ")[1].strip() for line in lines if line.startswith("model name")), processor)
    return json.dumps({
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": f"{processor}, {os.cpu_count()} cores",
        "load": round(psutil.getloadavg()[0], 1),
    })  # fmt: skip


def interleave(jobs: Mapping[str, Callable[[], T]], rounds: int, warmup: int = 3) -> dict[str, list[T]]:
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
    seconds: dict[str, list[T]] = {name: [] for name in jobs}
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
