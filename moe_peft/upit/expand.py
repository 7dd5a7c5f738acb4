"""Stage 2, expert expansion: merges LoRA adapter folders into further ones. No base model is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peft import LoraConfig

from ..adapter.convert import lora_scalings
from ..checks import EXPERTS, FOLDER, PATH, PATHS, SEED, check
from ..loading import read_adapter_config, read_adapter_weights
from ..merging import DROP_RATE, Descent, Expansion, Similarity, expand
from .files import copy_adapter, own_folders, write_adapter


def expand_experts(
    experts: Sequence[str | Path],
    *,
    output_dir: str | Path,
    num_experts: int,
    method: Expansion = "genetic",
    similarity: Similarity = "update",
    drop_rate: float = 0.2,
    seed: int = 0,
    initial: str | Path | None = None,
) -> tuple[list[Path], list[Descent]]:
    """
    Merge LoRA adapters into further ones until there are `num_experts` (see `moe_peft.merging.expand`).

    Args:
        experts: LoRA adapter folders, all of one configuration.
        output_dir: gets `experts/0` … `experts/n-1`, the given ones first.
        initial: the untrained adapter that they all started from, for `similarity="displacement"`.

    Returns:
        the n folders, and the descent of each new expert.

    Raises:
        ValueError: an adapter is not a LoRA or is one of the folders that would be written, adapters differ in rank,
            scaling or modules, or a setting is out of range.
    """
    check(
        "expand_experts",
        experts=(experts, PATHS),
        output_dir=(output_dir, FOLDER),
        num_experts=(num_experts, EXPERTS),
        drop_rate=(drop_rate, DROP_RATE),
        seed=(seed, SEED),
        initial=(initial, PATH.or_none()),
    )
    folders = own_folders(Path(output_dir), max(num_experts, len(experts)), experts, "expand_experts")
    config = _common_config(experts)
    weights = [read_adapter_weights(folder, f"expand_experts: {folder}") for folder in experts]
    if initial is not None:
        _config(initial)
    start = None if initial is None else read_adapter_weights(initial, f"expand_experts: {initial}")
    family, descents = expand(
        weights,
        num_experts,
        method=method,
        similarity=similarity,
        drop_rate=drop_rate,
        seed=seed,
        initial=start,
        scaling=lora_scalings(config, weights[0]),
    )
    for i, (expert, folder) in enumerate(zip(family, folders, strict=True)):
        if i < len(experts):
            copy_adapter(Path(experts[i]), folder)
        else:
            write_adapter(expert, Path(experts[0]), folder)
    return folders, descents


def _common_config(folders: Sequence[str | Path]) -> LoraConfig:
    """The first adapter's, with which the others agree in what an update is."""
    configs = [_config(folder) for folder in folders]
    for folder, config in zip(folders, configs, strict=True):
        for field in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
            first, own = getattr(configs[0], field), getattr(config, field)
            if own != first:
                raise ValueError(
                    f"expand_experts: {folder}: {field}={own!r}, but {folders[0]} has {first!r}; must agree"
                )
    return configs[0]


def _config(folder: str | Path) -> LoraConfig:
    config = read_adapter_config(folder, f"expand_experts: {folder}")
    if not isinstance(config, LoraConfig):
        raise ValueError(f"expand_experts: {folder} is not a LoRA adapter; give plain LoRA adapters")
    return config
