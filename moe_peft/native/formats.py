"""What `moe-peft export` writes. A further format is a function in a module of its own and an entry in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from .export import export_adapter
from .gguf import TYPES, export_gguf


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


FORMATS = {
    "safetensors": Format(
        export_adapter, "a folder for transformers", ("float32", "bfloat16", "float16"),
        reads=("max_shard_size", "verify"),
    ),
    "gguf": Format(export_gguf, "a file for llama.cpp", TYPES, extra="gguf", reads=("model",)),
}  # fmt: skip
