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
        if not lock.exists():
            raise ValueError(f"{what}: no file can be made in {lock.parent}; choose another") from error
        raise ValueError(f"{what}: another process is writing it; wait for it, or choose another") from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        held.release()


@contextmanager
def made(folder: Path, what: object) -> Iterator[None]:
    """
    Make a folder and those above it. The ones that were not there before go again if nothing is put into them.

    Raises:
        ValueError: it cannot be made.
    """
    there = existing(folder)
    new = [place for place in (folder.absolute(), *folder.absolute().parents) if place not in (there, *there.parents)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{what}: no folder can be made in {there}: {error.strerror}; choose another") from error
    try:
        yield
    finally:
        with suppress(OSError):  # of a run that was refused; others have left something in it
            for place in new:
                place.rmdir()


@contextmanager
def held(folder: Path, what: object) -> Iterator[None]:
    """
    Make a folder, see `made`, and hold it for this process.

    Raises:
        ValueError: it cannot be made, or another process holds it.
    """
    with made(folder, what), exclusive(folder / ".lock", what):
        yield
