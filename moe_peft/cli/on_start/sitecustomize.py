"""
Imported by every Python that `moe-peft exec` starts, before anything else: `moe_peft`, so that PEFT knows its adapters
as soon as it is imported. That takes milliseconds; PEFT and torch are not imported. Another `sitecustomize`, which this
one hides, is run as well.
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
