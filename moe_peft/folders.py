"""Folders that are written to: checked before any work, and held by one process at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from .checks import existing, refuse_tilde


def writable(folder: str | os.PathLike, what: object) -> Path:
    """
    A folder that can be written to, or made. It is not made here.

    Raises:
        ValueError: it cannot.
    """
    folder = Path(folder)
    refuse_tilde(folder, what)
    there = existing(folder)
    if not there.is_dir():
        raise ValueError(f"{what}: {there} is not a folder; choose another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{what}: {there} cannot be written to; choose another, or change its permissions")
    return folder


def check_space(folder: Path, needed: int, what: object) -> None:
    """
    Args:
        needed: bytes, an estimate.

    Raises:
        ValueError: the disk has less.
    """
    there = existing(folder)
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"{what}: {free / 2**30:.1f} GiB are free there, about {needed / 2**30:.1f} GiB are needed; free some, or "
            "choose another"
        )


@contextmanager
def exclusive(lock: Path, what: object) -> Iterator[None]:
    """
    Hold a lock, a file that is there as long. A process that died holds none.

    Raises:
        ValueError: another process holds it.
    """
    held = FileLock(lock, timeout=0)
    try:
        held.acquire()
    except Timeout as error:
        raise ValueError(f"{what}: another process is writing it; wait for it, or choose another") from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        held.release()


@contextmanager
def held(folder: Path, what: object) -> Iterator[None]:
    """
    Make a folder and hold it for this process; an empty one goes again.

    Raises:
        ValueError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive(folder / ".lock", what):
            yield
    finally:
        with suppress(OSError):
            folder.rmdir()  # of a run that was refused; others have left something in it
