"""`moe-peft COMMAND …`; the table `COMMANDS` lists the commands."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from .. import __version__
from ..utils.lazy_imports import when_imported
from ..utils.messages import InputError, choice_error
from ..utils.plugins import load_plugins
from .commands import COMMANDS as COMMANDS
from .commands import PLUGINS
from .commands import Command as Command
from .errors import ends_in_one_line
from .help import ASKED, prepare_help


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. `ends_in_one_line` sets the message and exit code of failed and stopped commands."""
    options, rest = _parser().parse_known_args(arguments)
    rest = [*options.arguments, *rest]
    if options.command is None and rest in ([], ["--help-all"]):
        _parser().print_help()
        return
    if options.command != "exec":  # shells do not expand --output=~/folder
        rest = [re.sub(r"^(--[\w-]+=)?~(?=/)", lambda flag: (flag[1] or "") + os.path.expanduser("~"), a) for a in rest]
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # not every terminal can show all characters
    quiet = options.quiet
    with ends_in_one_line(options.command):
        if options.command != "exec":  # exec's options and environment are another program's
            os.environ["MPLBACKEND"] = "agg"  # figures are files; a notebook's backend may not be installed here
            _check_launcher()
            _hide_noise()
            common, rest = _common().parse_known_args(rest)
            quiet = quiet or common.quiet
            plugins = load_plugins(common.plugins)
            file = None
            if common.config is not None:
                from ..utils.validation import read_settings

                # Before the command is imported: plugins may register values that become fields of its options.
                file = read_settings(common.config)
                plugins += load_plugins(file.get("plugins", []))
                rest += ["--config", common.config]
            PLUGINS[:] = dict.fromkeys(plugins)
        if options.command is None:
            raise InputError(f"{' '.join(rest)}: name a command first; `moe-peft --help` lists them")
        if options.command not in COMMANDS:
            raise InputError(choice_error("command", options.command, COMMANDS))
        command = COMMANDS[options.command]
        if not isinstance(command, Command):
            raise InputError(f"COMMANDS[{options.command!r}]={command!r}: must be a moe_peft.cli.Command")
        if command.once:
            if int(os.environ.get("RANK", "0")) > 0:
                return
            for name in _LAUNCH:  # the other processes end: nothing may wait for them
                os.environ.pop(name, None)
        module = import_module(command.module, __name__)
        if quiet:
            _hide_progress()  # before training arguments are created, as they read it
        logging.basicConfig(format="%(message)s")
        logging.getLogger("moe_peft").setLevel(logging.WARNING if quiet else logging.INFO)
        parser = module.parser(f"moe-peft {options.command}")
        parser.error = _raise  # one line, without the usage
        if options.command != "exec":
            parser.file = file
            parser.add_argument("--help-all", action="help")
            if ASKED & {*rest}:
                prepare_help(parser, getattr(module, "USUAL", ()), "--help-all" in rest)
        try:
            module.run(parser.parse_args(rest))
        except InputError as error:
            from .settings import as_flags

            raise InputError(as_flags(str(error), parser, rest)) from error


def _raise(message: str) -> NoReturn:
    raise InputError(message)


def _common() -> argparse.ArgumentParser:
    """Create a parser for the options of every command, and for `--config`: its YAML file may name plugins."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--plugins", nargs="+", default=[])
    parser.add_argument("--config")
    parser.error = _raise  # type: ignore[method-assign]
    return parser


_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")  # set by launchers in each process
_LAUNCH = (*_NUMBERS, "MASTER_ADDR", "ACCELERATE_USE_DEEPSPEED")


def _check_launcher() -> None:
    for name in _NUMBERS:
        value = os.environ.get(name, "0")
        if not re.fullmatch(r"-?\d+", value):
            raise InputError(f"{name}={value!r} in the environment: must be an integer; a launcher sets it")


# Logger → text of its messages to hide.
_NOISE = {
    "torchao": "Failed to load",
    "torchao.kernel.intmm": "Detected no triton",
    "torch.utils._pytree": "is an Enum subclass",
    "datasets.packaged_modules.json.json": "Failed to load JSON",  # our error names the file
    "DeepSpeed": "Setting accelerator to CPU",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}


def _hide_noise() -> None:
    """
    Hide messages for other packages' developers, and short progress bars, unless the user has set `PYTHONWARNINGS` or
    the packages' own variables. Errors and all other warnings are shown.
    """
    for name in _NOISE:
        logging.getLogger(name).addFilter(_is_news)
    if not sys.warnoptions:
        for category in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator")
    if "HF_DATASETS_DISABLE_PROGRESS_BARS" not in os.environ:
        when_imported("datasets", lambda datasets: datasets.disable_progress_bars())
    if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:  # also transformers' bars; downloads keep theirs
        when_imported("transformers.utils.logging", lambda module: module.set_tqdm_hook(_bar))


def _is_news(record: logging.LogRecord) -> bool:
    return _NOISE[record.name] not in record.getMessage()


def _bar(kind: Any, args: Any, kwargs: Any) -> Any:
    """Create a progress bar of transformers. Disable it for short work: loading and writing weights."""
    if kwargs.get("desc") in ("Loading weights", "Writing model shards"):
        kwargs = {**kwargs, "disable": True}
    return kind(*args, **kwargs)


def _hide_progress() -> None:
    """Hide transformers' progress bars and warnings."""
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()  # also hides `Trainer`'s bar by default


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:9} {command.about}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="moe-peft",
        description="Mixture-of-Experts for PEFT and TRL: build it, look inside, serve it, leave when you like.",
        usage="%(prog)s COMMAND [options]",
        epilog=f"commands:\n{listed}\n\n`moe-peft COMMAND --help` shows a command's options and an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"moe-peft {__version__}")
    parser.add_argument("--quiet", action="store_true", help="no progress bars: only results, our warnings and errors")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help=argparse.SUPPRESS)
    return parser
