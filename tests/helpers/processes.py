"""Functions that tests run in several processes at once, over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def in_processes(function: Callable[..., None], folder: Path, *args: Any) -> None:
    """Call `function(rank, folder, *args)` in `WORLD` processes that have met."""
    mp.spawn(_enter, (function, folder, args), nprocs=WORLD)


def _enter(rank: int, function: Callable[..., None], folder: Path, args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # accelerate wants them; they are not used
    torch.set_num_threads(1)
    # A file to meet at: a port that is free now may be another's a moment later.
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=WORLD)
    function(rank, folder, *args)
    dist.destroy_process_group()
