"""The user's modules that extend this package, e.g. by adding a router to `ROUTERS`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from .messages import InputError, one_line


def load_plugins(names: Sequence[str] | str) -> None:
    """
    Import modules, from the current folder too. What they register is known when options and recipes are read.

    Args:
        names: of modules, dotted.
    """
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        raise InputError(f"plugins={names!r}: must be a list of modules")
    if names and "" not in sys.path:
        sys.path.insert(0, "")
    for name in names:
        try:
            import_module(name)
        except (Exception, SystemExit) as error:
            raise InputError(
                f"plugins={name!r}: cannot be imported: {type(error).__name__}: {one_line(error)}; name a module that "
                "is installed, or a file in the current folder without its .py"
            ) from error
