"""Output formats of `moe-peft export`. A further format is a function in its own module and an entry in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class Format(NamedTuple):
    """
    A format for native MoEs.

    Args:
        export: function of an adapter's folder, an output and the adapter's base model or None, with the keywords
            `family`, `dtype` and the names in `reads`. It returns the path it has written.
        about: text for `--help`.
        dtypes: dtypes that weights may have.
        extra: the extra of this package that the format needs; the function reports if it is missing.
        reads: settings of the command that not all formats have: keywords of `export`, "verify", and "model" if the
            folder may also be a native MoE.
    """

    export: Callable[..., Path]
    about: str
    dtypes: Collection[str]
    extra: str = ""
    reads: Collection[str] = ()


def _lazy(name: str, module: str) -> Callable[..., Path]:
    """Return a function of this package that is imported when called: `--help` needs no torch."""

    def export(*args: Any, **kwargs: Any) -> Path:
        return getattr(import_module(module, __package__), name)(*args, **kwargs)

    return export


# dtype of a GGUF file → its name in GGUF.
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
