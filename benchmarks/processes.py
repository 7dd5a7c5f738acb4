"""Measurements that need a process of their own."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

import psutil
import torch


def run_module(module: str, *arguments: object) -> str:
    """The last line that `python -m module` prints."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]


def peak_growth(action: Callable[[], object]) -> int:
    """
    Bytes by which `action` raises a peak of memory above what was held before: what torch has allocated on the GPU, or
    without one the process's resident memory.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - held
    before = psutil.Process().memory_info().rss
    action()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
