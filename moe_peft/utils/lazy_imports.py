"""Delay imports: of a package's names until first use, and of actions until a module is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    Return a package's `__getattr__`, `__dir__` and `__all__`, from the imports in its stub, `__init__.pyi` in the
    folder of `file`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: f"{'.' * node.level}{node.module}" for node in imports for alias in node.names}

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    class Package(ModuleType):
        """Module class that keeps an exported name if a submodule has the same name, whenever the two are imported."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in modules or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Package
    return __getattr__, lambda: sorted(modules), sorted(modules)


def when_imported(name: str, act: Callable[[ModuleType], Any]) -> None:
    """Call `act` with a module: at once if the module is loaded, otherwise as soon as it is imported."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watcher(name, act))


class _Watcher(MetaPathFinder):
    """Finds a module as the other finders do, and calls `act` after the module has run."""

    def __init__(self, name: str, act: Callable[[ModuleType], Any]) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]  # earlier finders were asked already
        finders = (finder for finder in later if hasattr(finder, "find_spec"))
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, path, target)) is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = run
            run(module)
            sys.meta_path.remove(self)
            self.act(module)

        loader.exec_module = exec_module
        return spec
