"""Adds an expert to a MoE-LoRA adapter, or replaces one. To remove experts, see `moe_peft.prune_experts`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel

from ..adapter.base_model import behind_backbone
from ..adapter.config import EXPERT_FIELDS, MoELoraConfig
from ..adapter.layers import MoELoraLayer
from ..adapter.lora_conversion import averaged_linears, lora_to_moe
from ..adapter.lora_extraction import lora_of_expert
from ..native.folders import MoELoraFolder, open_folder
from ..utils.loading import read_adapter_weights
from ..utils.messages import InputError

# Config fields copied from the mixture. `lora_to_moe` sets `num_shared_experts` from the shared LoRA.
_KEPT = {field.name for field in fields(MoELoraConfig)} - {
    *EXPERT_FIELDS, "num_shared_experts", "peft_type", "auto_mapping", "inference_mode",
}  # fmt: skip


def put_expert(
    base: Any,
    mixture: str | os.PathLike,
    adapter: str | os.PathLike,
    expert: int | None = None,
    name: str | None = None,
) -> PeftModel:
    """
    Add an expert to a mixture, or replace one. The other experts, including shared experts, keep their LoRAs and gates.
    The gate of the new expert is random. `moe_peft.init_gates` sets all gates anew.

    Args:
        base: the base model, without adapters.
        mixture: folder of a MoE-LoRA adapter.
        adapter: the new expert: a LoRA adapter of the same base, on modules with experts in the mixture.
        expert: the index of the expert to replace; None: add one.
        name: name of the new expert, if the mixture's experts have names; None: the last part of the path `adapter`.

    Returns:
        the base with the new mixture, trainable.

    Raises:
        ValueError: the adapters do not fit the base or each other; the mixture has no expert `expert`, has modules
            trained in full, or has one LoRA for all experts that is not their mean; or its router has no parameters of
            single experts.

    Example:

    ```python
    >>> from peft import LoraConfig, get_peft_model
    >>> from transformers import AutoModelForCausalLM
    >>> from moe_peft import lora_to_moe, put_expert
    >>> def base():
    ...     return AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> for name in ("math", "code", "law"):
    ...     lora = get_peft_model(
    ...         base(),
    ...         LoraConfig(target_modules=["up_proj"], task_type="CAUSAL_LM"),
    ...     )
    ...     lora.save_pretrained(name)
    >>> lora_to_moe(base(), ["math", "code"]).save_pretrained("mixed")
    >>> model = put_expert(base(), "mixed", "law")
    >>> model.peft_config["default"].num_experts
    3
    ```
    """
    return join_expert(base, open_folder(mixture, "mixture", MoELoraFolder), adapter, expert, name)


@torch.no_grad()
def join_expert(
    base: Any, folder: MoELoraFolder, adapter: str | os.PathLike, expert: int | None = None, name: str | None = None
) -> PeftModel:
    """Add an expert to an opened mixture, or replace one. For the arguments see `put_expert`."""
    config = folder.config
    if not config.router_class.expert_rows:
        raise InputError(f"{folder}: router_type={config.router_type!r} has no parameters of single experts")
    if expert is not None and not 0 <= expert < config.num_updates:
        raise InputError(f"replace={expert}: {folder} has experts 0 to {config.num_updates - 1}")
    if config.modules_to_save:
        raise InputError(
            f"{folder}: modules_to_save={config.modules_to_save}: they belong to its experts, so no other can join"
        )
    read_adapter_weights(folder.path, folder)  # raises for a pickled file, which PEFT would load
    model: Any = PeftModel.from_pretrained(base, folder.path)
    gates = _routers(model)
    settings = {name: getattr(config, name) for name in _KEPT} | folder.sized_settings(gates.values())
    if config.expert_names is not None:
        names, position = list(config.expert_names), config.num_updates if expert is None else expert
        names[position : position + (expert is not None)] = [Path(adapter).name if name is None else name]
        settings["expert_names"] = names
    averaged = _averaged(model, folder)
    shared = lora_of_expert(model, None, "default") if config.num_shared_experts else None
    loras = [adapter if i == expert else _own_lora(model, i, averaged) for i in range(config.num_updates)]
    loras += [adapter] if expert is None else []
    unloaded = model.unload()
    routes = behind_backbone(unloaded, averaged) == {*averaged}  # heads get a mean in either case
    result = lora_to_moe(unloaded, loras, attention="route" if routes else "mean", always=shared, **settings)
    new = _routers(result)
    if new.keys() != gates.keys():
        path = min(new.keys() ^ gates.keys())
        raise InputError(
            f"adapter {os.fspath(adapter)!r}: {path} has experts and a router in only one of it and {folder}; mix "
            "all adapters anew"
        )
    kept = [i for i in range(config.num_experts) if i != expert]
    rows_of = [i + (expert is None and i == config.num_updates) for i in kept]  # the base stays last
    for path, router in new.items():
        for (name, value), old in zip(router.state_dict().items(), gates[path].state_dict().values(), strict=True):
            of_experts = name in (*config.router_class.expert_rows, "bias_steps")
            value[rows_of if of_experts else slice(None)] = old[kept if of_experts else slice(None)].to(value)
    return result


def _averaged(model: Any, folder: MoELoraFolder) -> list[str]:
    """
    Return the linears with one LoRA, the mean of the experts' LoRAs. Raise if a linear has another single LoRA
    for all experts: an expert's part cannot be extracted from it.
    """
    averaged = averaged_linears(model, "default")
    for path, layer in model.get_base_model().named_modules():
        if isinstance(layer, MoELoraLayer) and not layer.moe_lora_router and path not in averaged:
            raise InputError(
                f"{folder}: {path} has one LoRA for all experts, and it is not the mean of one LoRA for each (as with "
                "attention='mean' of lora_to_moe); no expert can join"
            )
    return [*averaged]


def _own_lora(model: Any, expert: int, averaged: Sequence[str]) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Return an expert as a LoRA. From averaged LoRAs, it gets only its own part."""
    config, state = lora_of_expert(model, expert, "default", shared=False)
    moe = model.peft_config["default"]
    own = slice(expert * moe.r, (expert + 1) * moe.r)
    for path in averaged:
        A, B = f"base_model.model.{path}.lora_A.weight", f"base_model.model.{path}.lora_B.weight"
        state[A], state[B] = state[A][own], state[B][:, own]
        config.rank_pattern[path], config.alpha_pattern[path] = moe.r, moe.lora_alpha
    return config, state


def _routers(model: Any) -> dict[str, Any]:
    """Return the routers by the paths of their layers."""
    layers = model.get_base_model().named_modules()
    return {
        path: layer.router("default")
        for path, layer in layers
        if isinstance(layer, MoELoraLayer) and layer.moe_lora_router
    }
