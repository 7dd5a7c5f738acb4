"""A study's finished runs, so that a study that was stopped continues where it was; and workers that make them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from trl import SFTConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICE_NAME = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"


class Ledger:
    """A study's finished runs as lines of one file, which several processes may add to and a repository can keep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self, **values: Any) -> list[dict[str, Any]]:
        """The runs with these values."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        runs = map(json.loads, lines)
        return [run for run in runs if all(run[key] == value for key, value in values.items())]

    def add(self, record: dict[str, Any], note: str) -> None:
        """Add a run and the device that made it, and print what it was and a note."""
        values = ", ".join(str(value) for value in record.values() if not isinstance(value, list | dict))
        record = {**record, "device": DEVICE_NAME}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{json.dumps(_rounded(record))}\n".encode())  # at once: other workers add lines, too
        os.close(file)
        print(f"{time.strftime('%H:%M:%S')} {values}: {note}", flush=True)


def _rounded(value: Any) -> Any:
    """Six significant digits: learning rates may be small."""
    if isinstance(value, dict):
        return {key: _rounded(of) for key, of in value.items()}
    if isinstance(value, list):
        return [_rounded(of) for of in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def parser(description: str | None, workers: bool = False) -> argparse.ArgumentParser:
    """The options of a study, those of several workers among them."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("command", choices=("run", "report"))
    options.add_argument("--data", type=Path, default=Path(".cache/short_tasks"))
    options.add_argument("--work", type=Path, default=Path(".cache/studies"))
    if workers:
        options.add_argument("--workers", type=int, default=1)
        options.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return options


def score_answers_only() -> None:
    """
    Have TRL's fused head compute logits where there is something to learn, on a CPU, too, where it takes all positions:
    the same losses, and a few per cent of a step for a step.
    """
    from trl.trainer import utils

    utils._use_triton = lambda device: True  # what is asked there is only whether positions are chosen


def arguments(config: type[SFTConfig], folder: Path, **options: Any) -> SFTConfig:
    """What a study's training has in common: float32, batches of 8 rows, nothing saved."""
    return config(
        str(folder), per_device_train_batch_size=8, bf16=False, use_cpu=DEVICE == "cpu", gradient_checkpointing=False,
        save_strategy="no", report_to="none", disable_tqdm=True, **options,
    )  # fmt: skip


def work(study: Any) -> None:
    """
    Make runs until none is missing, beside other workers that do the same.

    Args:
        study: with `jobs()`, runs that are missing and can be made now; `run(job)`; and `work`, a folder.
    """
    while jobs := list(study.jobs()):
        for job in jobs:
            lock = FileLock(study.work / f"{'-'.join(map(str, job))}.running")
            try:
                with lock.acquire(blocking=False):
                    if job in set(study.jobs()):
                        study.run(job)
                        break  # what is most urgent may have changed
            except Timeout:
                continue  # another worker makes it
        else:
            time.sleep(1)


def start_workers(study: str, args: argparse.Namespace, *more: str) -> int:
    """
    Run the study, with more options, in several processes of one thread each, every one with its number; the greatest
    exit code.
    """
    command = [sys.executable, "-m", f"studies.{study}", "run", "--data", str(args.data), "--work", str(args.work)]
    kept = str(2**32)  # bytes that glibc does not give back: tensors of each step would fault their pages in anew
    env = {"MALLOC_MMAP_THRESHOLD_": kept, "MALLOC_TRIM_THRESHOLD_": kept, **os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen([*command, *more, "--worker", str(worker)], env=env) for worker in range(args.workers)]
    return max(process.wait() for process in started)
