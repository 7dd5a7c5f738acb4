"""What a recipe names: base model, tokenizer, data sets; and their hashes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..adapter.ffn import find_layout
from ..adapter.model import find_ffns
from .config import ModelSection, PrepareSection, Recipe


def load_model(section: ModelSection) -> PreTrainedModel:
    """The base model; a quantized one on this process's device."""
    quantization = None
    if section.quantization is not None:
        quantization = BitsAndBytesConfig(**section.quantization)
    try:
        return AutoModelForCausalLM.from_pretrained(
            section.name_or_path,
            revision=section.revision or "main",
            dtype=section.dtype,
            attn_implementation=section.attn_implementation,
            quantization_config=quantization,
            device_map={"": PartialState().device} if quantization is not None else None,
        )
    except OSError as error:
        raise ValueError(_missing(section, error)) from error


def load_config(section: ModelSection) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(section.name_or_path, revision=section.revision or "main")
    except OSError as error:
        raise ValueError(_missing(section, error)) from error


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(section.name_or_path, revision=section.revision or "main")
    except OSError as error:
        raise ValueError(_missing(section, error)) from error


def _missing(section: ModelSection, error: OSError) -> str:
    reason = " ".join(str(error).split())[:160]
    return f"model.name_or_path={section.name_or_path!r}: no model folder, nor a model of a hub in reach ({reason})"


def ffn_projections(model: torch.nn.Module, chosen: list[str] | set[str] | None) -> list[str]:
    """The FFN projections that LoRA experts adapt: names for `LoraConfig.target_modules`, whole ones where short ones
    would match other modules too."""
    ffns = find_ffns(model)
    names: list[str] = []
    for name, module in model.named_modules():
        layout = find_layout(module) if name in ffns or name.rsplit(".", 1)[-1] in ffns else None
        if layout is not None:
            names += [f"{name}.{p}" for p in layout.projections if chosen is None or p in chosen]
    if not names:
        raise ValueError(f"adapter.target_projections={chosen}: no FFN of {type(model).__name__} has these")
    short = {name.rsplit(".", 1)[-1] for name in names}
    matched = [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in short]
    return sorted(short) if sorted(matched) == sorted(names) else names


def model_folder(section: ModelSection) -> Path:
    """Where the base model's files are."""
    folder = Path(section.name_or_path)
    return folder if folder.is_dir() else Path(snapshot_download(section.name_or_path, revision=section.revision))


# --- hashes -----------------------------------------------------------------------------------------------------------


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def hash_folder(folder: Path, leave_out: tuple[str, ...] = ()) -> dict[str, str]:
    """File (relative) → sha256, in order of names."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    relative = ((path.relative_to(folder), path) for path in files)
    return {str(name): hash_file(path) for name, path in relative if name.parts[0] not in leave_out}


def hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def hash_model(section: ModelSection) -> str:
    """The contents of a model folder; of a hub's model, its commit."""
    folder = Path(section.name_or_path)
    if folder.is_dir():
        return hash_json(hash_folder(folder))
    return str(getattr(load_config(section), "_commit_hash", None) or section.revision)


def hash_data(dataset: Dataset) -> str:
    """The rows, in order."""
    digest = hashlib.sha256(json.dumps(dataset.column_names).encode())
    for row in dataset:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def hash_template(path: str | None) -> str | None:
    """Of a chat template's file; a model's name is in the settings already."""
    return hash_file(Path(path)) if path is not None and Path(path).is_file() else path


def hash_experts(section: PrepareSection) -> list[str]:
    """One hash for each of the given adapter or model folders."""
    for field, name in (("adapters", "adapter_config.json"), ("checkpoints", "config.json")):
        for folder in getattr(section, field) or []:
            if not (Path(folder) / name).is_file():
                raise ValueError(f"prepare.{field}: {folder!r} is no folder with {name}")
    return [hash_json(hash_folder(Path(folder))) for folder in section.given or []]


# --- orders -----------------------------------------------------------------------------------------------------------


def seed_count(recipe: Recipe, rows: int) -> int:
    """Examples of the seed set: its share of the data, and one per expert at least."""
    return min(rows, max(recipe.num_experts, round(recipe.router_init.seed_fraction * rows)))


def seed_set(dataset: Dataset, count: int, seed: int) -> Dataset:
    """Some of the examples, drawn at random."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    return dataset.select(sorted(order[:count].tolist()))


def stage_seed(recipe: Recipe, stage: str) -> int:
    """A stage's own seed, else the recipe's plus the stage's number."""
    own = getattr(recipe, stage).seed
    return recipe.seed + ("prepare", "expand", "router_init", "post_train").index(stage) if own is None else own
