"""
`moe-peft exec`: another program, with `moe_peft` imported in each of its Python processes.

PEFT's loaders know the adapter type only after `import moe_peft`, and other programs do not import it. This command
puts a folder with a `sitecustomize` module first on `PYTHONPATH` and becomes the program. Processes started by the
program (`accelerate launch`, `torchrun`) inherit the path. Exit codes and signals are the program's own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..utils.messages import InputError
from . import on_start
from .help import ASKED


class ProgramParser(argparse.ArgumentParser):
    """A parser that leaves all arguments to the program, even `-m`. It reads only a help option in the first place."""

    def parse_args(self, arguments: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        if arguments and arguments[0] in ASKED:
            return super().parse_args(["--help"])
        return argparse.Namespace(program=list(arguments[arguments[:1] == ["--"] :]))


def parser(prog: str) -> ProgramParser:
    return ProgramParser(
        prog,
        usage=f"{prog} -- PROGRAM …",
        description="Run another Python program so that it can load MoE-LoRA adapters.",
        epilog="PROGRAM is a command (lm_eval, accelerate launch, …), a .py file, or -m and a\nmodule.\n\nexample:\n"
        "  moe-peft exec -- lm_eval --tasks arc_easy --limit 100 --model hf \\\n"
        "    --model_args pretrained=HuggingFaceTB/SmolLM2-135M-Instruct,peft=adapter",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(options: argparse.Namespace) -> None:
    command = _command(options.program)
    folder = str(Path(on_start.__file__).parent)
    path = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        os.execve(command[0], command, {**os.environ, "PYTHONPATH": os.pathsep.join(path)})
    except OSError as error:
        raise InputError(
            f"exec: {command[0]!r}: {error.strerror}; does its first line name a program (#!…)?"
        ) from error


def _command(program: list[str]) -> list[str]:
    """Return the program's file and its arguments. Programs in this Python's environment take precedence."""
    if not program:
        raise InputError("exec: name a program, e.g. moe-peft exec -- lm_eval --help")
    name = program[0]
    if name == "-m" or (name.endswith(".py") and Path(name).is_file()):
        return [sys.executable, *program]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    executable = shutil.which(name, path=path)
    if executable is None:
        raise InputError(f"exec: {name!r}: no such program; give a command, a .py file, or -m and a module")
    return [executable, *program[1:]]
