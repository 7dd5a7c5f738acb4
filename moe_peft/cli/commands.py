"""Table of commands."""

from __future__ import annotations

import shlex
from typing import NamedTuple


class Command(NamedTuple):
    """
    A command: a module with `parser(prog)` and `run(options)`. A module with many options also has `USUAL`, the options
    of its short help. The module is imported only when the command runs, so that `--help` and `--version` answer at
    once.

    Args:
        module: name of the module; a relative name is in this package.
        about: description for `moe-peft --help`.
        once: whether only the first of a launcher's processes runs the command.
        resumes: advice to resume a killed run; empty: nothing half-written is left.
        needs_less: advice to use less memory.
        serves: whether the command serves until it is stopped, and so has no result to be half-written.
    """

    module: str
    about: str
    once: bool = False
    resumes: str = ""
    needs_less: str = "use a machine with more"
    serves: bool = False


PLUGINS: list[str] = []  # modules imported first in this run


def to_run(command: str) -> str:
    """Return a command for the user to run next: it imports the same plugins."""
    return f"moe-peft {command}" + (f" --plugins {shlex.join(PLUGINS)}" if PLUGINS else "")


_LAST = "--resume_from_checkpoint true resumes from the last checkpoint, if one was saved (save_steps)"
_SMALLER = "lower per_device_train_batch_size or max_length, or set load_in_4bit, and start anew"
_BATCHES = "lower --batch-size or --max-length"

# Name → `Command`. A user's module adds a command in one line.
COMMANDS: dict[str, Command] = {
    "sft": Command(".sft", "fine-tune a MoE-LoRA adapter or a native MoE", resumes=_LAST, needs_less=_SMALLER),
    "dpo": Command(".dpo", "tune one on preferences", resumes=_LAST, needs_less=_SMALLER),
    "upit": Command(
        ".upit",
        "run a recipe: UpIT or one of its baselines",
        resumes="the same command resumes from the last checkpoint, if one was saved (save_steps)",
        needs_less="lower sft.per_device_train_batch_size or sft.max_length, or set model.quantization, and start anew",
    ),
    "chat": Command(
        ".chat",
        "talk with a model, and see and steer which experts answer",
        once=True,
        needs_less="set --load-in-4bit, or lower --max-new-tokens",
        serves=True,
    ),
    "inspect": Command(".inspect", "report where a model's tokens go", once=True, needs_less=_BATCHES),
    "mix": Command(
        ".mix", "make one mixture of LoRA adapters or dense models, without training", once=True, needs_less=_BATCHES
    ),
    "pick": Command(
        ".pick", "answer each request with the LoRA that it is for: a proxy before vLLM", once=True, serves=True
    ),
    "upcycle": Command(".upcycle", "make a native MoE from dense models", once=True),
    "prune": Command(".prune", "drop experts of an adapter or a native MoE", once=True),
    "export": Command(".export", "make a native MoE from a MoE-LoRA adapter and its base", once=True),
    "recipes": Command(".recipes", "list the recipes that come with the package, or copy one"),
    "exec": Command(".exec", "run another program, such as lm_eval, so that it can load adapters"),
    "env": Command(".env", "print the versions that a bug report needs"),
}
