"""The models and the tokenizer that a recipe names."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..adapter.ffn_layout import find_layout
from ..adapter.model import find_ffns
from ..native.router_files import read_routed_model
from ..utils.loading import check_tokenizer, empty_model, quantization_config, read_config, read_model, read_tokenizer
from .recipe import ModelSection


def load_model(section: ModelSection) -> PreTrainedModel:
    """
    The base model.

    Raises:
        ValueError: the model cannot be found.
    """
    quantization = None
    if section.quantization is not None:
        quantization = quantization_config(section.quantization, "model.quantization=")
    return read_model(
        section.name_or_path,
        _named(section),
        revision=section.revision,
        dtype=section.dtype,
        attn_implementation=section.attn_implementation,
        quantization_config=quantization,
    )


def load_checkpoint(section: ModelSection, folder: Path) -> PreTrainedModel:
    """A model folder that a stage wrote or the user gave, with the recipe's dtype and attention implementation."""
    return read_routed_model(folder, folder, dtype=section.dtype, attn_implementation=section.attn_implementation)


def load_config(section: ModelSection) -> PreTrainedConfig:
    return read_config(section.name_or_path, _named(section), section.revision)


def load_empty(section: ModelSection) -> PreTrainedModel:
    """The base model without weights."""
    return empty_model(load_config(section), _named(section))


def most_positions(section: ModelSection) -> int | None:
    """The longest text that the base takes, where it has an embedding for each position; None for any length."""
    config = load_config(section).get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if most is None or hasattr(config, "rope_parameters"):
        return None
    model = load_empty(section)
    words = model.get_input_embeddings()
    tables = (module for module in model.modules() if isinstance(module, torch.nn.Embedding) and module is not words)
    return most if any(most <= table.num_embeddings <= most + 2 for table in tables) else None  # OPT's begins at 2


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    config = load_config(section)  # first: a model that is not there has no tokenizer either
    tokenizer = read_tokenizer(section.name_or_path, _named(section), section.revision)
    check_tokenizer(tokenizer, config, _named(section))
    return tokenizer


def _named(section: ModelSection) -> str:
    return f"model.name_or_path={section.name_or_path!r}"


def ffn_projections(model: torch.nn.Module, chosen: list[str] | set[str] | None) -> list[str]:
    """
    The FFN projections that LoRA experts adapt, as names for `LoraConfig.target_modules`: full names where short ones
    would match other modules too.

    Raises:
        ValueError: no FFN has the chosen projections.
    """
    ffns = find_ffns(model)
    names: list[str] = []
    for name, module in model.named_modules():
        if name not in ffns and name.rsplit(".", 1)[-1] not in ffns:
            continue
        layout = find_layout(module)
        of_ffn = [f"{name}.{p}" for p in layout.projections] if layout is not None else [name]  # OPT has linears only
        names += [full for full in of_ffn if chosen is None or full.rsplit(".", 1)[-1] in chosen]
    if not names:
        raise ValueError(f"adapter.target_projections={chosen}: no FFN of {type(model).__name__} has these")
    short = {name.rsplit(".", 1)[-1] for name in names}
    matched = [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in short]
    return sorted(short) if sorted(matched) == sorted(names) else names


def model_folder(section: ModelSection) -> Path:
    """Where the base model's files are."""
    folder = Path(section.name_or_path)
    return folder if folder.is_dir() else Path(snapshot_download(section.name_or_path, revision=section.revision))
