"""What `moe-peft export` writes. A further format is a function in a module of its own and an entry in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class Format(NamedTuple):
    """
    A way to write a native MoE.

    Args:
        export: from the folder of an adapter, an output and the adapter's base or None; with the keywords `family`,
            `dtype` and what `reads` names. It returns what it has written.
        about: for `--help`.
        dtypes: that weights may have.
        extra: the extra of this package that it needs; the function says so where it is missing.
        reads: settings of the command that not all formats have: those of `export`, "verify", and "model" if the folder
            may be a native MoE, too.
    """

    export: Callable[..., Path]
    about: str
    dtypes: Collection[str]
    extra: str = ""
    reads: Collection[str] = ()


def _lazy(name: str, module: str) -> Callable[..., Path]:
    """A function of this package, imported when it is called: `--help` needs no torch."""

    def export(*args: Any, **kwargs: Any) -> Path:
        return getattr(import_module(module, __package__), name)(*args, **kwargs)

    return export


# dtype of a GGUF file → its name there.
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0"}
FORMATS = {
    "safetensors": Format(
        _lazy("export_adapter", ".export"), "a folder for transformers", ("float32", "bfloat16", "float16"),
        reads=("max_shard_size", "verify"),
    ),
    "gguf": Format(
        _lazy("export_gguf", ".gguf"), "a file for llama.cpp", GGUF_TYPES, extra="gguf", reads=("model",)
    ),
}  # fmt: skip
