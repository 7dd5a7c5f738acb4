"""Files of the stages: the layout of their folders, adapters, models, and stage 3's buckets and routers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from ..native.families import FAMILIES
from ..native.model_folder import EMBEDDINGS, HEAD, add_older_names
from ..native.safetensors_io import Checkpoint, ShardedWriter
from ..utils.io import link_weights, write_json
from ..utils.messages import InputError

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MODEL_FILES = ("config.json", "generation_config.json")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def expert_folders(root: Path, count: int, sources: Sequence[str | Path] = ()) -> list[Path]:
    """Return a stage's folders for its experts. Raise a ValueError if a copy would overwrite its source."""
    folders = [root / "experts" / str(i) for i in range(count)]
    for folder in {folder.resolve() for folder in folders} & {Path(source).resolve() for source in sources}:
        raise InputError(f"output_dir={str(root)!r}: {folder} would be overwritten; choose another")
    return folders


def copy_adapter(source: Path, target: Path) -> None:
    """Copy an adapter's config and weights, without other files in its folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ADAPTER_FILES:
        shutil.copy(source / name, target / name)


def write_adapter(weights: Mapping[str, torch.Tensor], like: Path, folder: Path) -> None:
    """Write an adapter with the config of another adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = ADAPTER_FILES
    shutil.copy(like / config, folder / config)
    save_file(dict(weights), folder / tensors, metadata={"format": "pt"})


def link_model(source: Path, target: Path, weights: bool = True) -> None:
    """Link a model's config and, with `weights`, its weights to another folder; see `link_weights`."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in (*_MODEL_FILES, *(_WEIGHT_FILES if weights else ())):
        for path in source.glob(pattern):
            link_weights(str(path), str(target / path.name))


def mean_weight(models: Sequence[Checkpoint], name: str) -> torch.Tensor:
    """
    Return the mean of the models' weights with this name, in float64. A tied head may be stored as embeddings only.
    """
    tied = EMBEDDINGS if name == HEAD else None
    total, *others = (model.tensor(model.stored_name(name, tied)).double() for model in models)
    for other in others:
        total += other
    return total / len(models)


def write_buckets(folder: Path, buckets: list[list[int]], perplexity: torch.Tensor | None) -> None:
    """Write `buckets.json`: the examples of each expert and, if the rule needs them, the perplexities [S, n]."""
    scores = None if perplexity is None else perplexity.tolist()
    write_json(folder / "buckets.json", {"buckets": buckets, "perplexity": scores})


def write_routers(path: Path, routers: Sequence[torch.Tensor]) -> None:
    """Write routers' weights [n, d], named "0", "1", …, as read by `UpcycleConfig.router_weights`."""
    save_file({str(i): weight.contiguous() for i, weight in enumerate(routers)}, path)


def write_without(source: Path, prefix: str, like: Path, target: Path) -> None:
    """Write a checkpoint as a model folder with the config of another. Leave out tensors with this prefix of names."""
    checkpoint = Checkpoint(source)
    shutil.rmtree(target, ignore_errors=True)
    link_model(like, target, weights=False)
    names = [name for name in checkpoint if not name.startswith(prefix)]
    with ShardedWriter(target, {name: (checkpoint.dtype(name), checkpoint.shape(name)) for name in names}) as writer:
        for name in names:
            writer.write(name, checkpoint.tensor(name))


def finish_native(folder: Path, config: PreTrainedConfig) -> None:
    """Change a trained native MoE's config for inference, and add the field names read by older versions."""
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, "output_router_logits": False}), encoding="utf-8")
    add_older_names(path, FAMILIES[config.model_type], config)
