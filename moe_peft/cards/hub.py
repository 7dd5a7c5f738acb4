"""What is a name on the hub, and what the cards of others say."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, constants, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import HFValidationError, validate_repo_id

logger = logging.getLogger("moe_peft")

_FILES = (".json", ".jsonl", ".csv", ".parquet")  # of data


def is_repo(name: str, folder: Path, kind: str = "model") -> bool:
    """Whether it is a name on the hub and cannot be a local path, by the rule of `write_model_card`."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    if os.path.exists(name) or name.endswith(_FILES):
        return False
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)).is_dir()
    owner, slash, _ = name.partition("/")
    places = (Path.cwd(), folder.resolve(), *folder.resolve().parents)
    return cached or (bool(slash) and not any((place / owner).exists() for place in places))


def link(name: str, folder: Path, kind: str = "model") -> str:
    """A link to the hub, or the last part of a local path."""
    if not is_repo(name, folder, kind):
        return f"`{Path(name).name}`"
    return f"[{name}](https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name})"


def load_card(path: Path) -> ModelCard | None:
    """None: there is no card, or none that can be read. No card is worth a model that is not saved."""
    try:
        return ModelCard.load(path, ignore_metadata_errors=True) if path.is_file() else None
    except Exception as error:
        logger.warning("%s: ignored, it is no model card that can be read: %s", path, " ".join(str(error).split()))
        return None


def base_metadata(base: str, folder: Path) -> dict[str, Any]:
    """The metadata of a base's card, in its folder or in the hub's cache."""
    path = Path(base) / "README.md"
    if not path.is_file() and is_repo(base, folder):
        cached = try_to_load_from_cache(base, path.name)
        path = Path(cached) if isinstance(cached, str) else path
    return {} if (card := load_card(path)) is None else card.data.to_dict()


def licences(data: dict[str, Any]) -> list[str]:
    """The licences that a card's metadata name."""
    named = (data.get("license_name") if data.get("license") == "other" else None) or data.get("license") or []
    return [str(name) for name in (named if isinstance(named, list) else [named])]
