"""
Messages and exit codes of failed and stopped commands. An error that a user can fix is one line on stderr. A bug keeps
its traceback. Exit codes follow the conventions of shells.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import requires
from types import FrameType
from typing import Any, NoReturn

from ..utils.messages import InputError, install, one_line, out_of_memory
from .commands import COMMANDS, Command

INVALID = 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Messages about a full disk from safetensors, torch and NumPy (which writes GGUF files).
_FULL_TEXTS = ("os error 28", "os error 122", "os error 27", "file write failed", "unexpected pos", "iostream error",
               " requested and ")  # fmt: skip
_BUG = (
    "This is a bug, in moe_peft or in a module that --plugins names. Please report it where you got moe_peft, with "
    "the lines above and the output of `moe-peft env`."
)


class _Terminated(BaseException):
    """SIGTERM."""


@contextmanager
def ends_in_one_line(name: str | None) -> Iterator[None]:
    """
    Run a command inside the block. The block may itself add the command to `COMMANDS`.

    Exit codes: 2 for an `InputError`, a missing file, a text too long for a path, and a missing package of an extra; 1
    for a file that cannot be read or written, a full disk, and a lack of memory; 130 for SIGINT; 143 for SIGTERM; 141,
    without a message, for a pipe that nobody reads any more. Any other error is a bug: it keeps its traceback, a line
    says where to report it, and the exit code is 1. With MOE_PEFT_TRACEBACK=1 in the environment, all errors keep their
    traceback.
    """
    shows_all = os.environ.get("MOE_PEFT_TRACEBACK") == "1"
    try:
        with _terminable():
            yield
            sys.stdout.flush()
    except (InputError, FileNotFoundError) as error:
        if shows_all:
            raise
        _end(f"error: {error}", INVALID)
    except KeyboardInterrupt:
        _end(_stopped("stopped", _command(name)), 128 + signal.SIGINT)
    except _Terminated:
        _end(_stopped("terminated", _command(name)), 128 + signal.SIGTERM)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if shows_all:
            raise
        if isinstance(error, ImportError) and (extra := _extra_with(error.name, name)) is not None:
            _end(f"error: {error}; install the extra {extra}: {install(extra)}", INVALID)
        command = _command(name)
        remedy = _remedy(command)
        if any(map(_is_full_disk, _chain(error))):
            then = f"make room, then {remedy}" if command.resumes else f"make room and start again; {remedy}"
            _end(f"error: the disk is full; {then}", 1)
        if any(map(out_of_memory, _chain(error))):
            more = f"with more memory, {remedy}" if command.resumes else remedy
            _end(f"error: out of memory; {command.needs_less}; {more}", 1)
        if isinstance(error, OSError) and error.filename is not None:
            line = f"error: {one_line(error.filename)}: {error.strerror}"
            _end(line, INVALID if error.errno == errno.ENAMETOOLONG else 1)
        traceback.print_exc()
        print(_BUG, file=sys.stderr)
        sys.exit(1)


def _command(name: str | None) -> Command:
    return COMMANDS.get(name or "", Command("", ""))


def _remedy(command: Command) -> str:
    return command.resumes or "nothing half-written is left"


def _stopped(how: str, command: Command) -> str:
    return "stopped" if command.serves else f"{how}: {_remedy(command)}"


def _end(line: str, code: int) -> NoReturn:
    if code in (INVALID, 1) or os.environ.get("RANK", "0") == "0":  # all processes get a signal, one reports it
        print(" ".join(line.split()), file=sys.stderr)
    sys.exit(code)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _extra_with(module: str | None, command: str | None) -> str | None:
    """
    Return the extra with a module's package, preferably the extra named like the command; None if no extra has it.
    """
    package = {"yaml": "pyyaml"}.get(top := (module or "").partition(".")[0], top)
    needs = [re.fullmatch(r"([\w.-]+).*extra == \W(\w+)\W", need) for need in requires("moe-peft-hf") or ()]
    extras = [need[2] for need in needs if need and need[1].replace("-", "_") == package.replace("-", "_")]
    return command if command in extras else next(iter(extras), None)


def _is_full_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(text in str(error) for text in _FULL_TEXTS)


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that locks and half-written files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def terminate(number: int, frame: FrameType | None) -> Any:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
