"""Help of a command. `--help` prints its usual options in groups, and an example; `--help-all` lists every option."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

ASKED = {"-h", "--help", "--help-all"}
_METAVARS = {"int": "N", "float": "X", "string_to_bool": "true|false"}  # by the name of the option's type
_LISTED = 4  # more choices than this are shown as NAME


class GroupedParser(argparse.ArgumentParser):
    """
    A parser with its options in groups.

    Args:
        groups: title → names of options.
    """

    file: Mapping[str, Any] | None = None  # values in the YAML file of `--config`, if the caller has read it

    def __init__(self, *args: Any, groups: Mapping[str, Collection[str]], **kwargs: Any) -> None:
        self.groups = groups
        super().__init__(*args, **kwargs)

    def settings_in(self, path: str | None) -> dict[str, Any]:
        """Return the settings in the YAML file of `--config`, without plugins, which `main` imports. {} for None."""
        from ..utils.validation import read_settings  # only now: `moe-peft --help` answers at once

        if path is None:
            return {}
        settings = read_settings(path) if self.file is None else self.file
        return {name: value for name, value in settings.items() if name != "plugins"}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Accept flags with dashes or underscores."""
        return super().parse_known_args(args if args is None else [*map(self._spelled, args)], namespace)

    def _spelled(self, argument: str) -> str:
        name, sign, value = argument.partition("=")
        flags = {flag for action in self._actions for flag in action.option_strings}
        if not name.startswith("--") or name in flags:
            return argument
        spellings = (f"--{name[2:].replace(*pair)}" for pair in (("-", "_"), ("_", "-")))
        return f"{next((spelling for spelling in spellings if spelling in flags), name)}{sign}{value}"

    def add_argument(self, *flags: Any, **kwargs: Any) -> argparse.Action:
        name = kwargs.get("dest") or flags[-1].lstrip("-").replace("-", "_")
        title = next((title for title, names in self.groups.items() if name in names), None)
        if title is None:
            return super().add_argument(*flags, **kwargs)
        if not any(group.title == title for group in self._action_groups):
            for each in self.groups:  # in the order of `groups`, not of the fields
                self.add_argument_group(each)
        group = next(group for group in self._action_groups if group.title == title)
        return group.add_argument(*flags, **kwargs)


def prepare_help(parser: argparse.ArgumentParser, usual: Collection[str], everything: bool) -> None:
    """
    Prepare a parser to print its help.

    Args:
        usual: names of the settings in the short help; empty: all.
        everything: whether to show every option, with its full text rather than the first sentence.
    """
    parser.add_argument("--quiet", action="store_true", help="no progress bars: only results, our warnings and errors")
    parser.add_argument("--plugins", nargs="+", metavar="MODULE", help="modules to import first, e.g. with a router")
    names = {action.dest for action in parser._actions}  # a flag has dashes or underscores
    shown = names if everything else {*usual, "help", "help_all", "quiet", "plugins"} if usual else names - {"help_all"}
    for action in parser._actions:
        if action.dest in shown:
            _describe(action, everything)
        elif action.option_strings:
            action.help = argparse.SUPPRESS
    # Options without a group come last.
    groups = parser._action_groups
    if len(groups) > 2:
        groups[1].title = "Other"
        groups.append(groups.pop(1))
    if parser.usage is None:
        required = [f"{a.option_strings[0]} {a.metavar or a.dest.upper()}" for a in parser._actions if a.required]
        parser.usage = " ".join(["%(prog)s", *required, "[options]"])
    parser.description = textwrap.fill(parser.description or "", shutil.get_terminal_size().columns - 2)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # examples keep their lines


def _describe(action: argparse.Action, everything: bool) -> None:
    """Keep one spelling of a flag, and add a short placeholder of its value and its default."""
    flags = action.option_strings
    spellings = {flag.replace("_", "-"): flag for flag in reversed(flags)}  # the first of --max-length and --max_length
    flags = action.option_strings = list(reversed(spellings.values()))
    if isinstance(action, argparse._HelpAction):
        action.help = "list every option" if "--help-all" in flags else "show this help and exit"
    text = action.help or ""
    if isinstance(action, argparse._StoreFalseAction):
        text = f"Turn {flags[0].replace('no_', '', 1).replace('no-', '', 1)} off."
    if not everything:
        text = re.split(r"(?<=\.)\s+(?=[A-Z`])", text)[0]
    choices = None if action.choices is None else list(map(str, action.choices))
    if choices is not None and len(choices) > _LISTED and action.metavar is None:
        action.metavar = "NAME"
        text += f" One of {', '.join(choices)}." if everything else ""
    elif choices is None and action.metavar is None and action.nargs != 0:
        action.metavar = _METAVARS.get(getattr(action.type, "__name__", ""), "VALUE")
    default = getattr(action.default, "value", action.default)
    if default not in (None, argparse.SUPPRESS, "", [], {}) and action.nargs != 0 and "default" not in text.lower():
        text += f" (default: {str(default).lower() if isinstance(default, bool) else default})".replace("%", "%%")
    action.help = text
