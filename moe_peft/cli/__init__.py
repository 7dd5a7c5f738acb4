"""
`moe-peft COMMAND …`. Each command is a module with `parser(prog)` and `run(options)`. It is imported only when it runs,
so that `--help` and `--version` answer at once. A user's module adds one by a line in `COMMANDS`.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from .. import __version__
from ..utils.messages import choice_error
from ..utils.plugins import load_plugins
from .errors import ends_in_one_line

# Name → the command's module, and what it does.
COMMANDS: dict[str, tuple[str, str]] = {
    "sft": (".sft", "fine-tune a MoE-LoRA adapter or a native MoE"),
    "dpo": (".dpo", "tune one by preferences"),
    "upit": (".upit", "run a recipe: UpIT or one of its baselines"),
    "inspect": (".inspect", "report where a model's tokens go"),
    "eval": (".eval", "evaluate a model on tasks of lm-evaluation-harness"),
    "mix": (".mix", "make one mixture of LoRA adapters or dense models, with gates that need no training"),
    "upcycle": (".upcycle", "make a native MoE from dense models"),
    "prune": (".prune", "drop and merge experts of an adapter or a native MoE"),
    "export": (".export", "make a native MoE from a MoE-LoRA adapter and its base"),
    "demo": (".demo", "see it work in ten minutes: SmolLM2-135M learns, and is exported"),
    "exec": (".exec", "run another Python program, such as lm_eval, that can then load the adapters"),
}
ONCE = ("inspect", "mix", "upcycle", "prune", "export")  # of a launcher's processes, the first alone does the work


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; see `ends_in_one_line` for how it ends that does not finish."""
    options, rest = _parser().parse_known_args(arguments)
    rest = [*options.arguments, *rest]
    if options.command != "exec":  # shells leave that of --output=~/folder
        rest = [re.sub(r"^(--[\w-]+=)?~(?=/)", lambda flag: (flag[1] or "") + os.path.expanduser("~"), a) for a in rest]
    rank = os.environ.get("RANK", "")
    if options.command in ONCE and rank.isdigit() and int(rank):
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # results have signs that not every terminal has
    quiet = options.quiet
    with ends_in_one_line(options.command):
        try:
            if options.command != "exec":  # whose options and environment are another program's
                os.environ["MPLBACKEND"] = "agg"  # figures are files; a notebook's backend may not be installed here
                _check_launcher()
                common, rest = _common().parse_known_args(rest)
                quiet = quiet or common.quiet
                load_plugins(common.plugins)
                if common.config is not None:
                    from ..utils.validation import read_settings

                    # Before the command is imported: what the modules register may become fields of its options.
                    load_plugins(read_settings(common.config).get("plugins", []))
                    rest += ["--config", common.config]
            if options.command not in COMMANDS:
                raise ValueError(choice_error("command", options.command, COMMANDS))
            command = import_module(COMMANDS[options.command][0], __name__)
        except ImportError as error:
            raise ValueError(f"{error}; install the training extra: pip install 'moe-peft-hf[train]'") from error
        if quiet:
            _hide_progress()  # before training arguments are made, which look
        logging.basicConfig(format="%(message)s")
        logging.getLogger("moe_peft").setLevel(logging.WARNING if quiet else logging.INFO)
        parser = command.parser(f"moe-peft {options.command}")
        parser.error = _raise  # in one line, without the usage
        command.run(parser.parse_args(rest))


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _common() -> argparse.ArgumentParser:
    """Options that every command has, and the file of those that train, which may name plugins."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--plugins", nargs="+", default=[])
    parser.add_argument("--config")
    parser.error = _raise  # type: ignore[method-assign]
    return parser


def _check_launcher() -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        value = os.environ.get(name, "0")
        if not re.fullmatch(r"-?\d+", value):
            raise ValueError(f"{name}={value!r} in the environment: must be an integer; a launcher sets it")


def _hide_progress() -> None:
    """No bars, of ours or of other packages, and of these no warnings."""
    import transformers

    with suppress(ImportError):
        import datasets

        datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()  # with which `Trainer` has no bar by default


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:9} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="moe-peft",
        description="Mixture-of-Experts from dense language models.",
        epilog=f"commands:\n{listed}\n\n`moe-peft COMMAND --help` lists a command's options. Each also takes\n"
        "  --plugins MODULE …  modules to import first, also of the current folder, which add routers, say",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"moe-peft {__version__}")
    parser.add_argument("--quiet", action="store_true", help="no progress: results, our warnings and errors alone")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="the command's options")
    return parser
