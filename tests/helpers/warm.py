"""
Python programs in processes that begin with torch, transformers, trl and the like imported: importing takes a fresh
process ten seconds. They import moe_peft by themselves, as a user's plugins may have to come before it.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import tests.helpers.templates  # noqa: F401

ROOT = Path(__file__).parents[2]
# Of all tests, as a process has one server that such processes are forked from. What is not installed is left out.
multiprocessing.get_context("forkserver").set_forkserver_preload([
    "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "peft", "datasets", "pydantic", "pytest", "deepspeed",
    "scipy.io", "matplotlib.figure", "matplotlib.backends.backend_agg", "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
])  # fmt: skip


def start(function: Callable[..., None], *args: Any) -> multiprocessing.Process:
    """Call a function in a process of its own."""
    process = multiprocessing.get_context("forkserver").Process(target=_call, args=(function, args))
    process.start()
    return process


def _call(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    gc.freeze()  # trainers collect garbage many times, and all modules would be looked through
    function(*args)


def run_module(
    module: str,
    *arguments: object,
    cwd: str | Path = ROOT,
    env: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`python -m module …`; `before` is called first, when `sys.argv` is set. `env`: None is this process's."""
    argv, env = list(map(str, arguments)), dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = start(_run_module, module, argv, str(cwd), env, files, before)
        process.join()
        return subprocess.CompletedProcess([module, *argv], process.exitcode, *(file.read_text() for file in files))


def _run_module(
    module: str, arguments: list[str], cwd: str, env: dict[str, str], files: list[Path], before: Callable | None
) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [cwd, *env.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv[1:] = arguments
    if before is not None:
        before()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def kill_at(owner: Any, name: str, n: int) -> None:
    """Have this process send itself SIGKILL just before the n-th call of a function."""
    original: Callable = getattr(owner, name)
    calls = 0

    def killing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, killing)


# --- for shell scripts ----------------------------------------------------------------------------------------------

_PROGRAM = """\
#!{python} -IS
import json, os, socket, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
if name == "python" and arguments[:1] != ["-m"]:
    os.execv({python!r}, [{python!r}, *arguments])
module, *arguments = arguments[1:] if name == "python" else ["moe_peft", *arguments]
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    with asked.makefile("rw") as file:
        print(json.dumps([module, arguments, os.getcwd(), dict(os.environ)]), file=file, flush=True)
        code, out, err = json.loads(file.readline())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


@contextmanager
def programs(folder: Path, before: Callable[[], None] | None = None) -> Iterator[None]:
    """Have `folder` hold the programs `python` and `moe-peft`, which run modules by `run_module`."""
    folder.mkdir()
    with tempfile.TemporaryDirectory() as temporary, socket.socket(socket.AF_UNIX) as server:
        server.bind(address := f"{temporary}/socket")  # pytest's own folders have names too long for one
        server.listen()
        for name in ("python", "moe-peft"):
            (folder / name).write_text(_PROGRAM.format(python=sys.executable, address=address))
            (folder / name).chmod(0o755)
        Thread(target=_serve, args=(server, before), daemon=True).start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket, before: Callable | None) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # it is closed
            return
        with connection, connection.makefile("rw") as file:
            module, arguments, cwd, env = json.loads(file.readline())
            done = run_module(module, *arguments, cwd=cwd, env=env, before=before)
            print(json.dumps([done.returncode, done.stdout, done.stderr]), file=file, flush=True)
