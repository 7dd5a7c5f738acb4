"""
Imported first by every Python process of `moe-peft exec`. It imports `moe_peft`, so that PEFT knows its adapters as
soon as PEFT is imported. It takes milliseconds: PEFT and torch are not imported. It also runs the `sitecustomize`
hidden by this one.
"""

import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

with suppress(ImportError):  # another environment's Python, without the package
    import moe_peft  # noqa: F401

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _here]
_hidden = PathFinder.find_spec("sitecustomize", sys.path)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(module_from_spec(_hidden))
