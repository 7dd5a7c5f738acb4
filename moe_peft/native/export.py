"""A MoE-LoRA adapter and its base to a native MoE checkpoint that computes the same."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import get_peft_model, get_peft_model_state_dict

from .. import loading
from ..adapter.config import MoELoraConfig
from ..checks import FOLDER, PATH, check
from ..reading import reading
from .adapted import adapted_content
from .moe_config import moe_config
from .writing import DenseModel, open_dense, parse_dtype, parse_size, write_moe

_PREFIX = "base_model.model."


def export_adapter(
    adapter: str | os.PathLike,
    output_dir: str | os.PathLike,
    base: str | os.PathLike | None = None,
    *,
    family: str | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """
    Write the native MoE that computes what an adapter on its base computes. The base may have been quantized in
    training; the export reads its full-precision weights.

    The result is exact in exact arithmetic. In float32 it is exact up to rounding, in half precision up to the rounding
    of the weights and the gate.

    Args:
        adapter: folder of a MoE-LoRA adapter with mixing "output", on FFNs with the same number of experts in every
            layer and a router that folds. LoRAs on single linears with one expert are merged.
        output_dir: a folder that does not exist yet. A killed run leaves none.
        base: the base model's folder or name; None takes the one that the adapter names.
        family: the MoE's model type; None takes the one that fits.
        dtype: of the weights, by name; None keeps the base's.
        max_shard_size: of the output's files.

    Raises:
        ValueError: the adapter or the base has something that a native MoE cannot hold; the message names it, and
            nothing is written.
    """
    check("export", adapter=(adapter, PATH), output_dir=(output_dir, FOLDER))
    config = read_adapter_config(adapter)
    source = base_name(config, base)
    dense = open_dense(source, family, "export", None if base else config.revision)
    content = adapted_content(_read_adapter(adapter), config, dense)
    _check_complete(content.state, config, dense)
    moe = moe_config(
        (dense.family, dense.moe),
        dense.config,
        num_experts=content.spec.num_experts,
        top_k=content.spec.top_k,
        width=dense.config.intermediate_size,
        normalises=content.spec.normalize_top_k,
        router_aux_loss_coef=config.router_aux_loss_coef,
        dense_layers=[layer for layer in range(dense.config.num_hidden_layers) if layer not in content.routers],
        caller="export",
    )
    return write_moe(
        dense.moe,
        moe,
        content,
        [dense.folder, Path(adapter)],
        Path(output_dir),
        parse_dtype(dtype, dense, "export"),
        parse_size(max_shard_size, "export"),
        "export",
        [source],
        "`moe-peft export` from a MoE-LoRA adapter on the base; expert i is the FFN with LoRA i merged",
        _end(adapter),
    )


def _end(adapter: str | os.PathLike) -> int | None:
    """The end token of the tokenizer beside the adapter, which the training may have changed."""
    if not Path(adapter, "tokenizer_config.json").is_file():
        return None
    return loading.read_tokenizer(adapter, f"export: adapter {str(adapter)!r}").eos_token_id


def _check_complete(state: Mapping[str, torch.Tensor], config: MoELoraConfig, dense: DenseModel) -> None:
    """Raise if the adapter's file lacks a tensor that its config asks for: the base's would stand in its place."""
    empty = loading.empty_model(dense.config, f"export: model {str(dense.folder)!r}")
    with reading("export: adapter_config.json does not fit the base"), torch.device("meta"):
        model = get_peft_model(empty, copy.deepcopy(config))
    for key in get_peft_model_state_dict(model, save_embedding_layers=False):
        name = key.removeprefix(_PREFIX)
        if name not in state and ".moe_lora_router." not in name:  # which are read by now
            raise ValueError(f"export: the adapter lacks {name}, which its config asks for; save it again")


def read_adapter_config(adapter: str | os.PathLike, caller: str = "export") -> MoELoraConfig:
    """
    Raises:
        ValueError: the folder holds no config, or that of another adapter type.
    """
    check(caller, adapter=(adapter, PATH))
    config = loading.read_adapter_config(adapter, f"{caller}: adapter {str(adapter)!r}")
    if not isinstance(config, MoELoraConfig):
        raise ValueError(f"{caller}: adapter {str(adapter)!r} is a {config.peft_type} adapter; give a MOE_LORA adapter")
    return config


def base_name(config: MoELoraConfig, base: str | os.PathLike | None) -> str:
    """
    The given base model, or the one that the adapter names.

    Raises:
        ValueError: there is neither.
    """
    check("export", base=(base, PATH.or_none()))
    name = config.base_model_name_or_path if base is None else base
    if not name:
        raise ValueError("export: base=None: the adapter names no base model; give it")
    return os.fspath(name)


def _read_adapter(adapter: str | os.PathLike) -> dict[str, torch.Tensor]:
    """The adapter's tensors, by their names below the base model."""
    loaded = loading.read_adapter_weights(adapter, f"export: adapter {str(adapter)!r}")
    return {key.removeprefix(_PREFIX): tensor for key, tensor in loaded.items()}
