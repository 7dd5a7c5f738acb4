"""
Read text, JSON and safetensors from outside, and write files. `loading` reads adapters and models.

Any error in a file, found here or in a library, becomes a `ValueError` with one line that names the file and a remedy.
Weights are read only from safetensors: pickled weights could run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.utils import EntryNotFoundError, WeakFileLock, get_session
from safetensors import safe_open

from .messages import InputError, one_line, out_of_memory

# --- reading ---------------------------------------------------------------------------------------------------------

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLED = ("pytorch_model*.bin", "adapter_model.bin", "*.pt", "*.pth", "*.ckpt")


@contextmanager
def reading(source: object, remedy: str = "") -> Iterator[None]:
    """
    Convert any error of a library that opens or parses a file to an `InputError` with one line. To create models, or to
    run code of this package or a plugin, use `refused_by_libraries`.

    Args:
        source: the field with its value, or the file.
        remedy: what to do.
    """
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        text = one_line(error)
        if "trust_remote_code" in text:  # transformers advises to run the code
            text = "comes with code of its own, which is never run; use a model of transformers' own classes"
        if not isinstance(error, (OSError, ValueError)) or not text:
            text = f"{type(error).__name__}: {text}".rstrip(": ")
        raise InputError(f"{source}: {text}" + (f"; {remedy}" if remedy else "")) from error


# Libraries; an error raised in their code means that they refuse an input.
_LIBRARIES = ("peft", "transformers", "torch", "safetensors", "accelerate", "huggingface_hub", "trl", "datasets")


@contextmanager
def refused_by_libraries(source: object, remedy: str = "") -> Iterator[None]:
    """
    Convert an `InputError`, or an error raised by a library itself, to an `InputError` with one line that names the
    input. Other errors, such as from code of this package or of a plugin, are bugs and stay unchanged.

    Args:
        source: the field with its value, or the file.
        remedy: what to do.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        raised_in = str(place.tb_frame.f_globals.get("__name__")) if place is not None else ""
        if out_of_memory(error) or not (isinstance(error, InputError) or raised_in.split(".")[0] in _LIBRARIES):
            raise
        kind = "lacks " if isinstance(error, KeyError) else ""
        raise InputError(f"{source}: {kind}{one_line(error)}" + (f"; {remedy}" if remedy else "")) from error


# --- the hub ----------------------------------------------------------------------------------------------------------


def check_on_hub(name: str, source: object, revision: str | None = None) -> None:
    """
    Raise if a model or an adapter is neither in the hub's cache nor on the hub.

    Args:
        source: the field and its value, for messages.
    """
    with reading(f"{source}: neither a model folder nor a model on a reachable hub"):
        files = ("config.json", "adapter_config.json")
        if any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files):
            return
        get_session().head(constants.ENDPOINT, timeout=10)  # once; a download tries each file six times
        try:
            hf_hub_download(name, files[0], revision=revision)
        except EntryNotFoundError:
            hf_hub_download(name, files[1], revision=revision)


# --- text -------------------------------------------------------------------------------------------------------------


def read_text(path: str | os.PathLike, source: object = None) -> str:
    """
    Read a file in UTF-8, with or without a byte order mark.

    Args:
        source: the field and its value, for messages; None: the path.
    """
    path, source = Path(path), source or path
    if not path.is_file():  # reading an empty pipe would wait for ever
        raise InputError(f"{source}: " + ("not a file" if path.exists() else "no such file"))
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise InputError(f"{source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not UTF-8 text at byte {error.start}; save it as UTF-8") from error


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read a file with a JSON object."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({one_line(error, 80)}); write or download it again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must be a JSON object, not {one_line(repr(value), 40)}")
    return value


# --- weights ----------------------------------------------------------------------------------------------------------


def weight_files(folder: Path, source: object) -> dict[str, str]:
    """Return the tensors of a model folder: name → file."""
    if (folder / SINGLE).is_file():  # before the index, like transformers
        with open_safetensors(folder / SINGLE, source) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    if (folder / INDEX).is_file():
        files = read_json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise InputError(f"{source}: {folder / INDEX}: no weight_map of names and files; save the model again")
        for file in sorted(set(files.values())):
            if PurePosixPath(file).name != file or file in ("", ".", "..") or "\\" in file:
                raise InputError(f"{source}: {folder / INDEX} names {file!r}, which is not a file in its folder")
            if not (folder / file).is_file():
                raise InputError(f"{source}: {folder} lacks {file}, which its index names; download or save it again")
        return files
    raise InputError(f"{source}: {no_weights(folder, SINGLE)}")


def check_weights(folder: Path, source: object) -> None:
    """Raise if a model folder's safetensors file is missing or damaged, or lacks a tensor named in the index."""
    files = weight_files(folder, source)
    for file in sorted(set(files.values())):
        inside = set(open_safetensors(folder / file, source).keys())
        lacking = [name for name, holder in files.items() if holder == file and name not in inside]
        if lacking:
            raise InputError(
                f"{source}: {folder / file} lacks {lacking[0]}, which its index names; save the model again"
            )


def open_safetensors(path: Path, source: object) -> Any:
    """Open a safetensors file and check its header against its length."""
    with reading(f"{source}: {path} cannot be read", "download or save it again"):
        return safe_open(path, framework="pt")


def no_weights(folder: Path, wanted: str) -> str:
    """Return the message for a folder without the file `wanted`."""
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        return (
            f"{folder} has {pickled[0]}, but no {wanted}; only safetensors are read, because a pickled file can run "
            "code: load it where you trust it and save it with save_pretrained"
        )
    others = sorted(path.name for path in folder.glob(wanted.replace(".", ".*.")))
    if others:
        return f"{folder} has {others[0]}, but no {wanted}; save the model with save_pretrained, without a variant"
    return f"{folder} has no {wanted}; save the model with save_pretrained first"


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """
    Write a file or a folder completely or not at all.

    Yields a hidden path in the folder of `path`, to write to. It is renamed to `path` when the block ends, and removed
    if the block raises. Until then, the previous content of `path` stays. If several processes write to `path`, each
    has a different hidden path, and the last to end wins.
    """
    path = Path(path)
    _clean_up(path)
    partial, former = (_hidden(path, word) for word in ("partial", "former"))
    try:
        yield partial
        while True:  # a folder can only be renamed to a free name; another process may take it first
            if partial.is_dir() and path.exists():
                with suppress(FileNotFoundError):
                    path.rename(former)
            try:
                partial.replace(path)
                break
            except OSError:
                if not (partial.is_dir() and path.is_dir()):
                    raise
            finally:
                remove(former)
    finally:
        remove(partial)


_HOST = f"{zlib.crc32(platform.node().encode()):08x}"


def _hidden(path: Path, word: str) -> Path:
    """Return a name in the folder of `path` that no other running process uses."""
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}.{word}")


def _clean_up(path: Path) -> None:
    """
    Remove the hidden paths in the folder of `path` left by killed processes of this machine. Put back a renamed folder.
    """
    left = re.compile(rf"\.{re.escape(path.name)}\.{_HOST}-(\d+)\.(partial|former)")
    for entry in list(path.parent.iterdir()) if path.parent.is_dir() else ():
        match = left.fullmatch(entry.name)
        if match is None or (int(match[1]) != os.getpid() and psutil.pid_exists(int(match[1]))):
            continue
        if match[2] == "former" and not path.exists():  # killed between the two renames
            entry.rename(path)
        else:
            remove(entry)


@contextmanager
def new_folder(path: str | os.PathLike, field: str = "output_dir") -> Iterator[Path]:
    """
    Write a folder completely or not at all. It is new, or an empty folder that may be a link or a mount point.

    Args:
        field: the field that names it, for messages.
    """
    with output_folder(path, field) as folder:
        folder = folder.resolve()  # a link stays, and its target is replaced
        if not os.path.ismount(folder):
            with atomic_write(folder) as partial:
                partial.mkdir()
                yield partial
            return
        partial = folder / _PARTIAL  # a mount point cannot be renamed
        try:
            remove(partial)
            partial.mkdir()
            yield partial
            for entry in sorted(partial.iterdir(), key=lambda entry: entry.name.endswith("config.json")):  # these last
                entry.rename(folder / entry.name)
        finally:
            remove(partial)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write a JSON file completely or not at all. Values that JSON lacks become strings."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def hash_file(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file's content."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(size: str) -> int:
    """
    Return the bytes of a size like `"5GB"` or `"200MB"`, with units in upper or lower case (accelerate's parser takes
    "5gb" for gigabits). A bare number is bytes, at least a million: `"5"` is refused, as hardly anyone means five
    bytes.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([KMG]B|)", size.upper())
    count = int(float(match[1]) * _UNITS[match[2]]) if match and len(size) < 20 else 0
    if count < (1 if match and match[2] else 10**6):
        raise InputError(f"max_shard_size={size!r}: give a number above 0 with KB, MB or GB")
    return count


def link_weights(source: str, target: str) -> None:
    """Copy a file. Weights may be large and are not edited, so they are linked if the file system allows it."""
    Path(target).unlink(missing_ok=True)  # never write into a file that may be linked from elsewhere
    if source.endswith(".safetensors"):
        try:
            os.link(os.path.realpath(source), target)
            return
        except OSError:
            pass
    shutil.copy2(source, target)


def link_folder(source: Path, target: Path) -> None:
    """Copy a folder; see `link_weights`."""
    shutil.copytree(source, target, copy_function=link_weights)


_LOCK, _PARTIAL = ".lock", ".partial"


@contextmanager
def output_folder(
    path: str | os.PathLike,
    field: str,
    is_ours: Callable[[Path], bool] | None = None,
    remedy: str = "choose another",
) -> Iterator[Path]:
    """
    Create a folder and lock it for this process. If it stays empty, it is removed.

    Args:
        path: the folder; `~` is expanded.
        field: the field that names it, for messages.
        is_ours: returns whether a folder with content belongs to a run to resume. None: it must be empty.
        remedy: what to do if it is not empty.
    """
    folder, setting = Path(path).expanduser(), f"{field}={os.fspath(path)!r}"
    if not os.fspath(path).strip():
        raise InputError(f"{setting}: name a folder")
    parents = (folder.absolute(), *folder.absolute().parents)
    new = [parent for parent in parents if not os.path.lexists(parent)]
    parent = parents[len(new)]
    if not parent.is_dir():
        raise InputError(f"{setting}: {parent} is not a folder; choose another")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{setting}: {parent} cannot be written to; choose another, or change its permissions")
    with reading(setting, "choose another"):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder / _LOCK, setting):
            if any(entry.name not in (_LOCK, _PARTIAL) for entry in folder.iterdir()) and not (
                is_ours and is_ours(folder)
            ):
                raise InputError(f"{setting}: is not empty; {remedy}")
            before = {*folder.iterdir()}
            try:
                yield folder
            finally:
                for made in {*folder.iterdir()} - before:  # a trainer creates its folder before it refuses
                    if made.is_dir() and not any(path.is_file() for path in made.rglob("*")):
                        remove(made)
    finally:
        with suppress(OSError):  # not empty
            for made in new:
                made.rmdir()


@contextmanager
def _locked(lock: Path, setting: str) -> Iterator[None]:
    """Hold a lock, a file that exists meanwhile. If the process dies, the lock is released."""
    held = WeakFileLock(lock, timeout=0.1)
    try:
        held.__enter__()
    except TimeoutError as error:
        raise InputError(f"{setting}: another process is writing it; wait for it, or choose another") from error
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        held.__exit__(None, None, None)
