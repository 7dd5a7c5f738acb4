"""Dense checkpoints to a native MoE checkpoint, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from ..checks import FOLDER, PATH, Rule, check, is_a
from ..loading import read_model
from ..models.attention_routers import attention_gates
from ..reading import reading
from .config import UpcycleConfig
from .families import MoEFamily, find_families
from .moe_config import moe_config
from .upcycled import Upcycled
from .writing import DenseModel, open_dense, parse_dtype, parse_size, write_moe

# What models must have in common for their average to make sense.
_SAME = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "rope_parameters", "rms_norm_eps", "hidden_act", "sliding_window", "tie_word_embeddings",
    "layer_types", "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip


def upcycle(
    models: str | os.PathLike | Sequence[str | os.PathLike],
    output_dir: str | os.PathLike,
    config: UpcycleConfig | None = None,
    router_weights: Mapping[int, torch.Tensor] | None = None,
    calibration: Iterable[Mapping[str, Any]] | None = None,
) -> Path:
    """
    Write the MoE that dense models become: weights, config, tokenizer and generation config.

    Memory: a few times one FFN and the largest other tensor, whatever the models' size; with
    `router_init="attention"` the dense model is loaded first.

    Args:
        models: a dense model's folder (or name on the hub), or several of one architecture. With several, expert i
            comes from the i-th (in turn, where there are fewer than experts), and all other weights are averaged.
        output_dir: a folder that does not exist yet. A killed run leaves none.
        config: see `UpcycleConfig`.
        router_weights: layer → given gates, in the shapes of `UpcycleConfig.router_weights` and in place of that file.
        calibration: for `router_init="attention"`, batches of `input_ids` [B, S] and, if there is padding,
            `attention_mask` [B, S]. They run through the dense model, so the gates do not depend on the experts.

    Raises:
        ValueError: no family holds the models, a setting does not fit, an argument has no use, a checkpoint is broken,
            or `output_dir` exists.
    """
    config = UpcycleConfig() if config is None else config
    paths: Any = models if isinstance(models, (list, tuple)) else [models]
    check(
        "upcycle",
        models=(models, Rule(lambda _: all(map(PATH.allows, paths)), "give a model's folder, or a list of them")),
        output_dir=(output_dir, FOLDER),
        config=(config, is_a(UpcycleConfig)),
        router_weights=(router_weights, is_a(Mapping, remedy="give a dict of layer to tensor").or_none()),
    )
    names = [os.fspath(path) for path in paths]
    if config.init == "checkpoints" and len(names) < 2:
        raise ValueError("upcycle: init='checkpoints': give two models or more, or use init='copy'")
    if not names:
        raise ValueError("upcycle: models=[]: give at least one dense model")
    if len(paths) > config.num_experts:
        raise ValueError(
            f"upcycle: num_experts={config.num_experts}: there are {len(paths)} models; ask for as many or more"
        )
    sources = [open_dense(name, config.family, "upcycle") for name in names]
    for source in sources[1:]:
        check_same_architecture(source, sources[0], "upcycle: models")
    dense = sources[0].config
    family, moe = upcycled_config(dense, config)
    _check_arguments(config, router_weights, calibration)
    given = router_weights if router_weights is not None else _read_routers(config)
    if config.router_init == "attention":
        given = _attention_gates(sources, config, calibration)
    return write_moe(
        family,
        moe,
        Upcycled(sources, config, given),
        [sources[0].folder],
        Path(output_dir),
        parse_dtype(config.dtype, sources[0], "upcycle"),
        parse_size(config.max_shard_size, "upcycle"),
        "upcycle",
        names,
        f"`moe-peft upcycle` (initial experts: `{config.init}`, initial gates: `{config.router_init}`); "
        "it is meant to be trained",
    )


def upcycled_config(dense: PreTrainedConfig, config: UpcycleConfig) -> tuple[MoEFamily, PreTrainedConfig]:
    """
    The MoE's family and config, from a dense model's config.

    Raises:
        ValueError: no family holds it, or a setting does not fit.
    """
    families = find_families(dense.model_type, config.family, "upcycle")
    m, f = config.granularity, dense.intermediate_size
    if f % m:
        raise ValueError(f"upcycle: granularity={m}: must divide the dense model's intermediate_size {f}")
    for name in ("num_shared_experts", "num_added_shared_experts"):
        if getattr(config, name) and families[1].shared is None:
            raise ValueError(
                f"upcycle: {name}={getattr(config, name)}: {families[1].model_type} has no shared experts; use 0, or a "
                "Qwen2 model"
            )
    shared = config.num_shared_experts
    moe = moe_config(
        families,
        dense,
        num_experts=config.num_experts * m - shared,
        top_k=config.top_k * m - shared,
        width=f // m,
        shared_width=shared * f // m + config.num_added_shared_experts * f,
        router_aux_loss_coef=config.router_aux_loss_coef,
    )
    return families[1], moe


def check_same_architecture(model: DenseModel, other: DenseModel, what: str) -> None:
    """
    Check that two models' weights can be averaged.

    Raises:
        ValueError: their configs differ in a field that matters.
    """
    ours, theirs = model.config.to_dict(), other.config.to_dict()
    for name in _SAME:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{what}: {model.folder} has another architecture than {other.folder}: {name}={ours.get(name)!r} and "
                f"{theirs.get(name)!r}; give models of one architecture"
            )


def _check_arguments(config: UpcycleConfig, router_weights: Any, calibration: Any) -> None:
    """Refuse what would be ignored."""
    init = config.router_init
    if init != "attention" and calibration is not None:
        raise ValueError(f"upcycle: calibration: router_init={init!r} has no use for it; set router_init='attention'")
    if init not in ("given", UpcycleConfig.router_init) and router_weights is not None:
        raise ValueError(f"upcycle: router_weights: router_init={init!r} has no use for it; leave router_init out")
    if router_weights is not None and config.router_init_std != UpcycleConfig.router_init_std:
        raise ValueError(f"upcycle: router_init_std={config.router_init_std}: the gates are given; leave it out")


def _attention_gates(
    sources: Sequence[DenseModel], config: UpcycleConfig, calibration: Iterable[Mapping[str, Any]] | None
) -> dict[int, torch.Tensor]:
    """The gates that the dense model's attention gives, by layer."""
    if calibration is None:
        raise ValueError("upcycle: router_init='attention': give calibration data (calibration=…, --calibration FILE)")
    if len(sources) > 1:
        raise ValueError("upcycle: router_init='attention': takes one dense model; use another with several")
    dense: Any = read_model(sources[0].folder, "upcycle: models", dtype="auto")
    if torch.accelerator.is_available():
        dense.to(torch.accelerator.current_accelerator())
    try:
        return dict(enumerate(attention_gates(dense, calibration, config.num_gates, config.router_num_heads)))
    except ValueError as error:
        own = "" if config.router_num_heads is None else f", router_num_heads={config.router_num_heads}"
        raise ValueError(f"upcycle: router_init='attention'{own}: {error}") from error


def _read_routers(config: UpcycleConfig) -> dict[int, torch.Tensor] | None:
    if config.router_weights is None:
        return None
    what = f"upcycle: router_weights={config.router_weights!r}"
    if not Path(config.router_weights).is_file():
        raise ValueError(f"{what}: no such file")
    with reading(what, "give a safetensors file with tensors named by their layer"):
        return {int(name): tensor for name, tensor in load_file(config.router_weights).items()}
