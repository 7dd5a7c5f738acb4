"""Import a user's modules that extend this package, e.g. with a router in `ROUTERS`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from .messages import InputError, one_line


def load_plugins(names: Sequence[str] | str) -> list[str]:
    """
    Import modules, also from the current folder, before options and recipes are read: these may name what the modules
    register.

    Args:
        names: dotted names of modules.

    Returns:
        The names.
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
                f"plugins={name!r}: cannot be imported: {type(error).__name__}: {one_line(error)}{_place(error)}; name "
                "a module that is installed, or a file in the current folder without its .py"
            ) from error
    return [*names]


def load_function(path: str, field: str) -> Callable[..., Any]:
    """
    Return a user's function.

    Args:
        path: `module:name`; the module may be a file in the current folder.
        field: names the path in messages.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise InputError(f"{field}={path!r}: must be module:function")
    load_plugins(module)
    function = getattr(sys.modules[module], name, None)
    if not callable(function):
        raise InputError(f"{field}={path!r}: {module} has no function {name!r}")
    return function


def names_for(texts: Sequence[str], choose: Callable[[Sequence[str]], Any], path: str) -> Sequence[str | None]:
    """
    Return the names that a user's function gives to texts, None for the base.

    Args:
        choose: texts → a name for each.
        path: names the function in messages.

    Raises:
        ValueError: the function does not return as many names.
    """
    names = choose(texts)
    if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != len(texts):
        answer = one_line(repr(names), 80)
        raise InputError(f"choose={path!r}: must return {len(texts)} names for as many texts, not {answer}")
    return names


def _place(error: BaseException) -> str:
    """Return the last line that ran in the module's file or in files of its folder. "" if the module was not found."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename][1:]
    own = [frame for frame in frames if os.path.dirname(frame.filename) == os.path.dirname(frames[0].filename)]
    return "".join(f" ({frame.filename}, line {frame.lineno})" for frame in own[-1:])
