"""Functions that tests run in several processes at once, over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.warm import start

WORLD = 2


def in_processes(function: Callable[..., None], folder: Path, *args: Any, code: int = 0) -> None:
    """Call `function(rank, folder, *args)` in `WORLD` processes that have met; each must end with the exit code."""
    (folder / "meeting").unlink(missing_ok=True)
    processes = [start(_enter, rank, function, folder, args) for rank in range(WORLD)]
    # One that fails leaves the others waiting for it. They are given the time that gloo gives them.
    while None in (codes := {process.exitcode for process in processes}) <= {None, code}:
        wait([process.sentinel for process in processes if process.exitcode is None])
    for process in processes:
        process.kill()
    assert codes == {code}


def _enter(rank: int, function: Callable[..., None], folder: Path, args: tuple[Any, ...]) -> None:
    # What torch's launcher tells; the address is not used.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    # A file to meet at: a port that is free now may be another's a moment later.
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=WORLD)
    function(rank, folder, *args)
    if dist.is_initialized():  # a command leaves by itself
        dist.destroy_process_group()
