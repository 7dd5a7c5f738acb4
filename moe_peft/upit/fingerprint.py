"""Hashes of everything that decides the result of a stage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..training.checkpointing import hash_file
from ..utils.loading import chat_template
from .inputs import load_config
from .recipe import ModelSection, PrepareSection

CARD = "README.md"


def hash_folder(folder: Path, leave_out: Callable[[Path], bool] = lambda name: False) -> dict[str, str]:
    """Relative path → sha256, sorted by path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    relative = ((path.relative_to(folder), path) for path in files)
    return {str(name): hash_file(path) for name, path in relative if not leave_out(name)}


def hash_source(folder: Path) -> str:
    """Of a model's or an adapter's files; what tools and people leave beside them, hidden files and a card, is none."""
    return hash_json(hash_folder(folder, lambda n: n.name == CARD or any(part.startswith(".") for part in n.parts)))


def damage(folder: Path, files: dict[str, str]) -> str | None:
    """The first of a folder's files that is not there any more, or not as it was; a model card may be edited."""
    for name, digest in files.items():
        path = folder / name
        if path.name != CARD and (not path.is_file() or hash_file(path) != digest):
            return name
    return None


def hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def hash_model(section: ModelSection) -> str:
    """Of a model folder the hash of its files; of a hub's model the commit."""
    folder = Path(section.name_or_path)
    if folder.is_dir():
        return hash_source(folder)
    return str(getattr(load_config(section), "_commit_hash", None) or section.revision)


def hash_data(dataset: Dataset) -> str:
    """Hash of the rows, in order."""
    digest = hashlib.sha256(json.dumps(dataset.column_names).encode())
    for row in dataset:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def hash_template(path: str | None) -> str | None:
    """Hash of a chat template's file, or of that of a tokenizer's folder; a name on the hub stands for itself."""
    if path is not None and Path(path).is_dir():
        return hash_json(chat_template(path, "chat_template_path"))
    return hash_file(Path(path)) if path is not None and Path(path).is_file() else path


def check_experts(section: PrepareSection) -> None:
    """
    Raises:
        ValueError: a folder lacks its config.
    """
    for field, name in (("adapters", "adapter_config.json"), ("checkpoints", "config.json")):
        for folder in getattr(section, field) or []:
            if not (Path(folder) / name).is_file():
                raise ValueError(f"prepare.{field}: {folder!r} is not a folder with {name}")


def hash_experts(section: PrepareSection) -> list[str]:
    """One hash for each of the given adapter or model folders."""
    return [hash_source(Path(folder)) for folder in section.given or []]
