"""
Stage 2, expert expansion: merges experts into further ones (UpIT, section 2.2, Algorithm 2). LoRA adapters are loaded
completely, and no base model is needed. Dense checkpoints are read and written tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ..adapter.plain_lora import check_only_linears, lora_scalings
from ..native.families import find_families
from ..native.folders import LoraFolder, open_folder
from ..native.model_folder import NOT_WEIGHTS
from ..native.safetensors_io import Checkpoint, ShardedWriter
from ..utils.loading import NO_CODE
from ..utils.messages import InputError
from .expansion import Descent, Expansion, Similarity, dare_tensor, expand
from .files import copy_adapter, expert_folders, link_model, mean_weight, write_adapter

# --- LoRA adapters ---------------------------------------------------------------------------------------------------


def expand_experts(
    experts: Sequence[str | Path],
    *,
    output_dir: str | Path,
    num_experts: int,
    method: Expansion = "genetic",
    similarity: Similarity = "update",
    drop_rate: float = 0.2,
    seed: int = 0,
) -> tuple[list[Path], list[Descent]]:
    """
    Merge LoRA adapters into further ones until there are `num_experts` (see `moe_peft.upit.expansion.expand`).

    Args:
        experts: LoRA adapter folders, all of one configuration.
        output_dir: gets `experts/0` … `experts/n-1`, the given ones first.
        num_experts: number of experts afterwards.
        method: selection of the parents: `"genetic"`: the least similar pair; `"random"`: a random pair; `"none"`: no
            expansion; raises an error if it is needed.
        similarity: parameters to compare for `"genetic"`: the LoRAs' `"update"` B A, or their `"values"`.
        drop_rate: share of values dropped by merging (DARE).
        seed: seed of all random choices.

    Returns:
        the n folders, and the descent of each new expert.

    Raises:
        ValueError: an adapter is not a LoRA, or adapters differ in rank, scaling or modules.
    """
    folders = expert_folders(Path(output_dir), max(num_experts, len(experts)), experts)
    adapters = [open_folder(folder, "expand_experts", LoraFolder) for folder in experts]
    _check_alike(adapters)
    weights = [adapter.tensors for adapter in adapters]
    family, descents = expand(
        weights,
        num_experts,
        method=method,
        similarity=similarity,
        drop_rate=drop_rate,
        seed=seed,
        scaling=lora_scalings(adapters[0].config, weights[0]),
    )
    for i, (expert, folder) in enumerate(zip(family, folders, strict=True)):
        if i < len(experts):
            copy_adapter(Path(experts[i]), folder)
        else:
            write_adapter(expert, Path(experts[0]), folder)
    return folders, descents


def _check_alike(adapters: Sequence[LoraFolder]) -> None:
    """Raise an `InputError` if adapters are more than LoRAs of linears, or differ in rank or scaling."""
    for adapter in adapters:
        check_only_linears(adapter.config, adapter.tensors, str(adapter))
        for field in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
            first, value = getattr(adapters[0].config, field), getattr(adapter.config, field)
            if value != first:
                raise InputError(f"{adapter}: {field}={value!r}, but {adapters[0].path} has {first!r}; they must agree")


# --- dense checkpoints -----------------------------------------------------------------------------------------------


class _Displacements(Mapping[str, torch.Tensor]):
    """A checkpoint's FFN weights minus the base's, in float32. Each is computed when it is read."""

    def __init__(self, folder: Path, base: Checkpoint, names: list[str]) -> None:
        self.folder, self.base, self.names = folder, base, names
        self.checkpoint = Checkpoint(folder)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(name).float() - self.base.tensor(name).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def expand_checkpoints(
    experts: Sequence[str | Path],
    base: str | Path,
    *,
    output_dir: str | Path,
    num_experts: int,
    method: Expansion = "genetic",
    drop_rate: float = 0.9,
    seed: int = 0,
) -> tuple[list[Path], list[Descent]]:
    """
    Merge dense checkpoints into further ones until there are `num_experts`. FFNs are merged by DARE of their
    displacements from the base's FFNs, all other weights by averaging the parents'. The similarity of two experts is
    the cosine of the displacements of all FFNs.

    Args:
        experts: model folders, fine-tuned from `base`.
        output_dir: gets `experts/0` … `experts/n-1`, the given ones first.

    Returns:
        the n folders, and the descent of each new expert.
    """
    folders = expert_folders(Path(output_dir), num_experts, experts)
    origin, config = Checkpoint(Path(base)), AutoConfig.from_pretrained(base, **NO_CODE)
    names = sorted(find_families(config.model_type)[0].ffn_shapes(config))
    displacements = [_Displacements(Path(folder), origin, names) for folder in experts]
    new_folders = iter(folders[len(experts) :])

    def merge(a: Any, b: Any, alpha: float, rate: float, generator: torch.Generator) -> _Displacements:
        folder = next(new_folders)
        link_model(a.folder, folder, weights=False)
        checkpoint = a.checkpoint
        others = [name for name in checkpoint if name not in a.names and not name.endswith(NOT_WEIGHTS)]
        plan = {name: (checkpoint.dtype(name), checkpoint.shape(name)) for name in (*a.names, *others)}
        with ShardedWriter(folder, plan) as writer:
            for name in a.names:
                moved = dare_tensor(a[name], b[name], alpha, rate, generator)
                writer.write(name, origin.tensor(name).float() + moved)
            for name in others:
                writer.write(name, mean_weight([checkpoint, b.checkpoint], name))
        return _Displacements(folder, origin, names)

    for folder, target in zip(experts, folders, strict=False):
        link_model(Path(folder), target)
    descents = expand(
        displacements, num_experts, method=method, similarity="values", drop_rate=drop_rate, seed=seed, merge=merge
    )[1]
    return folders, descents
