"""
Checkpoints on disk, tensor by tensor: a lazy reader of safetensors, and a sharded writer that holds one tensor at a
time. Both are independent of models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from ..utils.io import INDEX, open_safetensors, weight_files
from ..utils.messages import InputError

# Safetensors' names of dtypes.
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Checkpoint:
    """
    Tensors of a model folder, read when asked for. Shapes and dtypes are cached.

    Args:
        folder: has `model.safetensors`, or shards and their index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, weight_files(folder, folder)
        self._headers: dict[str, dict[str, tuple[torch.Size, str]]] = {}  # by file and name

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def stored_name(self, name: str, other: str | None = None) -> str:
        """Return the name that a tensor is stored under: `name`, or else `other`, for an equal tensor."""
        stored = next((key for key in (name, other) if key in self.files), None)
        if stored is None:
            raise InputError(f"{self.folder} has no tensor {name}; is the checkpoint complete?")
        return stored

    def shape(self, name: str) -> torch.Size:
        return self._header(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        stored = self._header(name)[1]
        if stored not in _DTYPES:
            raise InputError(f"{self.folder}: {name} is {stored}; use a checkpoint of {', '.join(_DTYPES)}")
        return _DTYPES[stored]

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor from disk, anew at every call."""
        self.dtype(name)  # raises an error for a dtype outside `_DTYPES`
        tensor = open_safetensors(self.folder / self.files[name], self.folder).get_tensor(name)
        if not tensor.sum(dtype=torch.float64).isfinite():
            raise InputError(f"{self.folder}: {name} holds NaN or infinity; use another checkpoint")
        return tensor

    def _header(self, name: str) -> tuple[torch.Size, str]:
        """Return a tensor's shape, and safetensors' name of its dtype."""
        file = self.files[name]
        if file not in self._headers:  # opening a file takes milliseconds, and a MoE has thousands of tensors in one
            stored = open_safetensors(self.folder / file, self.folder)
            slices = {key: stored.get_slice(key) for key in stored.keys()}  # noqa: SIM118
            self._headers[file] = {key: (torch.Size(x.get_shape()), x.get_dtype()) for key, x in slices.items()}
        if name not in self._headers[file]:
            raise InputError(f"{self.folder / file} lacks {name}, which its index names; save the model again")
        return self._headers[file][name]


class ShardedWriter:
    """
    Writes tensors directly to their bytes in a folder's safetensors files, in full or in parts, and in any order.

    Args:
        folder: an existing folder.
        tensors: name → (dtype, shape) of all tensors to write. Shards follow this order.
        max_shard_size: in bytes.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, tuple[torch.dtype, torch.Size]], max_shard_size: int = 5 * 10**9
    ) -> None:
        self._left = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
        self._tensors = tensors
        shards = split_state_dict_into_shards_factory(
            self._left,
            get_storage_size=lambda size: size,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        self._offsets: dict[str, tuple[Path, int]] = {}  # of a tensor's first byte
        for file, names in shards.filename_to_tensors.items():
            self._begin(folder / file, names)
        if shards.is_sharded:
            index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _begin(self, path: Path, names: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in names:
            dtype, shape = self._tensors[name]
            end = offset + self._left[name]
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        for name in names:
            self._offsets[name] = (path, 8 + len(text) + header[name]["data_offsets"][0])

    def write(self, name: str, tensor: torch.Tensor, start: int = 0) -> None:
        """Write a tensor, or the part of it that begins at element `start`, converted to the planned dtype."""
        path, offset = self._offsets[name]
        dtype = self._tensors[name][0]
        data = tensor.detach().to("cpu", dtype).contiguous().flatten()
        if dtype == torch.float16 and tensor.dtype != torch.float16 and data.isinf().any():
            raise InputError(f"{name}: values up to {tensor.abs().max():.3g} overflow dtype float16; use bfloat16")
        size = data.numel() * dtype.itemsize
        if size > self._left[name]:
            raise InputError(
                f"{name}: {tuple(tensor.shape)} is more than what is left of {tuple(self._tensors[name][1])}"
            )
        with path.open("r+b") as file:  # one at a time: a process may have few files open, and a model many
            file.seek(offset + start * dtype.itemsize)
            file.write(data.view(torch.uint8).numpy().data)
        self._left[name] -= size

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        missing = [name for name, left in self._left.items() if left]
        if kind is None and missing:
            raise RuntimeError(f"not completely written: {missing[:3]} and {max(0, len(missing) - 3)} more")
