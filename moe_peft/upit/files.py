"""What stages write: the layout of their folders, and files that are there as a whole or not at all."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from ..native.families import FAMILIES
from ..native.model_folder import add_older_names
from ..native.safetensors_io import Checkpoint, ShardedWriter
from ..training.checkpointing import link_folder, link_weights
from ..utils.io import read_object, reading

logger = logging.getLogger("moe_peft")

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MODEL_FILES = ("config.json", "generation_config.json")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def expert_folders(root: Path, count: int) -> list[Path]:
    """Where a stage puts its experts."""
    return [root / "experts" / str(i) for i in range(count)]


def own_folders(root: Path, count: int, sources: Sequence[str | Path], what: str) -> list[Path]:
    """
    As `expert_folders`, of which none is a source.

    Raises:
        ValueError: one is.
    """
    folders = expert_folders(root, count)
    own = {folder.resolve() for folder in folders}
    for source in sources:
        if Path(source).resolve() in own:
            raise ValueError(f"{what}: output_dir={str(root)!r}: {source} would be overwritten; choose another folder")
    return folders


def copy_adapter(source: Path, target: Path) -> None:
    """An adapter's config and weights, without what else is in its folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ADAPTER_FILES:
        shutil.copy(source / name, target / name)


def write_adapter(weights: Mapping[str, torch.Tensor], like: Path, folder: Path) -> None:
    """An adapter with the config of another one."""
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = ADAPTER_FILES
    shutil.copy(like / config, folder / config)
    save_file(dict(weights), folder / tensors, metadata={"format": "pt"})


def link_model(source: Path, target: Path, weights: bool = True) -> None:
    """A model folder's config and, if asked for, its weights in another folder; see `link_weights`."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in (*_MODEL_FILES, *(_WEIGHT_FILES if weights else ())):
        for path in source.glob(pattern):
            link_weights(str(path), str(target / path.name))


def publish(source: Path, target: Path, written: Collection[str]) -> None:
    """
    A stage's folder under the name of the result; see `link_folder`. Whenever it is stopped, the next call goes on.

    Args:
        written: the files of an earlier result that are not needed any more; all others stay.
    """
    partial, former = (target.with_name(f"{target.name}.{word}") for word in ("partial", "former"))
    if former.exists() and not target.exists():
        former.rename(target)  # with the files of others
    shutil.rmtree(partial, ignore_errors=True)
    link_folder(source, partial)
    there = [path.relative_to(target) for path in target.rglob("*") if path.is_file()]
    for name in there:
        if str(name) not in written and not (partial / name).exists():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(target / name, partial / name)
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        target.rename(former)
    partial.rename(target)
    shutil.rmtree(former, ignore_errors=True)


def write_buckets(folder: Path, buckets: list[list[int]], perplexity: torch.Tensor | None) -> None:
    """`buckets.json`: the examples of each expert and, where a rule needed them, the perplexities [S, n]."""
    scores = None if perplexity is None else perplexity.tolist()
    write_json(folder / "buckets.json", {"buckets": buckets, "perplexity": scores})


def write_vectors(path: Path, vectors: dict[int, torch.Tensor]) -> None:
    """Routing vectors [n, d] by layer, as `UpcycleConfig.router_weights` takes them."""
    save_file({str(layer): weight.contiguous() for layer, weight in vectors.items()}, path)


def read_perplexity(path: Path) -> torch.Tensor | None:
    """What `write_perplexity` wrote, if it did and the file is not damaged."""
    if not path.exists():
        return None
    try:
        with reading(path):
            return load_file(path)["perplexity"]
    except ValueError as error:
        logger.warning("%s; scored again", error)
        return None


def write_perplexity(path: Path, perplexity: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({"perplexity": perplexity.contiguous()}, partial)
    partial.rename(path)


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    """One tensor of a checkpoint."""
    return Checkpoint(folder).tensor(name)


def write_without(source: Path, left_out: str, like: Path, target: Path) -> None:
    """A checkpoint as a model folder without one of its tensors, with the config of another folder."""
    trained = Checkpoint(source)
    shutil.rmtree(target, ignore_errors=True)
    link_model(like, target, weights=False)
    names = [name for name in trained if name != left_out]
    with ShardedWriter(target, {name: (trained.dtype(name), trained.shape(name)) for name in names}) as writer:
        for name in names:
            writer.write(name, trained.tensor(name))


def finish_native(folder: Path, config: PreTrainedConfig) -> None:
    """Make a trained native MoE's config one for inference, with the names that older versions read."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "output_router_logits": False}))
    add_older_names(path, FAMILIES[config.model_type], config)


def write_json(path: Path, value: Any) -> None:
    """Written under a temporary name first, so that a reader never meets half a file."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """
    The contents, or None if there is no such file.

    Raises:
        ValueError: it is damaged.
    """
    return read_object(path) if path.is_file() else None
