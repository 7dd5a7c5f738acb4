"""Extracts one expert of a MoE adapter as a plain LoRA adapter."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors.torch import save_file

from ..utils.io import atomic_write
from ..utils.messages import InputError, choice_error
from ..utils.model_card import write_model_card
from .base_model import short_names
from .config import TOKEN_ROWS, MoELoraConfig
from .experts import EXPERTS, Experts
from .layers import MoELoraLayer, MoELoraLinear
from .plain_lora import BASE_PREFIX


def expert_to_lora(
    model: PeftModel,
    expert: int | str,
    save_directory: str | os.PathLike | None = None,
    adapter_name: str | None = None,
    tokenizer: Any = None,
) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """
    Extract one expert of a MoE adapter as a plain LoRA adapter.

    Every expert's LoRA includes what all experts share: modules with a single, always active expert, the shared
    experts, the modules of `modules_to_save` and the rows of `trainable_token_indices`.

    Args:
        model: the model with the MoE adapter.
        expert: its index, from 0, or its name.
        save_directory: a folder to write, for `PeftModel.from_pretrained`; it must not exist yet.
        adapter_name: the MoE adapter; the active one if None.
        tokenizer: the MoE adapter's tokenizer, to write to the folder: its chat template and tokens may differ from the
            base's.

    Returns:
        The LoRA's config and its state dict, with PEFT's key names.

    Raises:
        ValueError: the adapter has no such expert, or its experts are bottlenecks.
        FileExistsError: `save_directory` already exists.

    Example:

    ```python
    >>> from peft import get_peft_model
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from moe_peft import MoELoraConfig, expert_to_lora
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> model = get_peft_model(base, MoELoraConfig(task_type="CAUSAL_LM"))
    >>> tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
    >>> config, state = expert_to_lora(model, 0, "expert-0", tokenizer=tokenizer)
    >>> base = AutoModelForCausalLM.from_pretrained("expert-0")
    ```
    """
    adapter_name = model.active_adapters[0] if adapter_name is None else adapter_name
    source = model.peft_config.get(adapter_name)
    if not isinstance(source, MoELoraConfig):
        names = [name for name, config in model.peft_config.items() if isinstance(config, MoELoraConfig)]
        raise InputError(f"expert_to_lora: adapter_name={adapter_name!r}: no such MoE adapter; there is {names}")
    if isinstance(expert, str):
        names = source.expert_names or []
        if expert not in names:
            raise InputError(choice_error("expert_to_lora: expert", expert, names))
        expert = names.index(expert)
    most = max([source.num_experts, *source.num_experts_pattern.values()])
    if not 0 <= expert < most:
        raise InputError(f"expert_to_lora: expert={expert}: the adapter has experts 0 to {most - 1}")
    config, state = lora_of_expert(model, expert, adapter_name)
    if save_directory is not None:
        if os.path.lexists(save_directory):
            raise FileExistsError(f"expert_to_lora: save_directory={str(save_directory)!r} exists; choose another name")
        with atomic_write(save_directory) as folder:
            config.save_pretrained(str(folder))
            if tokenizer is not None:
                tokenizer.save_pretrained(str(folder))
            write_model_card(folder, made="`moe_peft.expert_to_lora`: one expert of a MoE-LoRA adapter")
            save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return config, state


def lora_of_expert(
    model: PeftModel, expert: int | None, adapter_name: str, shared: bool = True
) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """
    Return an expert as a LoRA, in the form of `expert_to_lora`.

    Args:
        expert: its index; None: only the shared experts, without trained tokens and the modules of `modules_to_save`.
        shared: whether to include the shared experts.

    Raises:
        ValueError: the experts are bottlenecks, or some module has no such expert.
    """
    source = cast(MoELoraConfig, model.peft_config[adapter_name])
    if reason := EXPERTS[source.expert_type].no_lora:
        raise InputError(f"expert_to_lora: expert_type={source.expert_type!r}: {reason}")
    state, ranks, alphas = _matrices_of(model, expert, adapter_name, shared)
    every = [n.replace(".base_layer", "") for n, _ in model.get_base_model().named_modules() if "moe_lora" not in n]
    r, lora_alpha = _lora_size(source.expert_spec(""), expert is not None, shared)
    config = LoraConfig(
        r=r,
        lora_alpha=lora_alpha,
        lora_dropout=source.lora_dropout,
        use_rslora=source.use_rslora,
        target_modules=sorted(short_names(ranks, every)),
        rank_pattern={name: of_one for name, of_one in ranks.items() if of_one != r},
        alpha_pattern={name: alpha for name, alpha in alphas.items() if alpha != lora_alpha},
        modules_to_save=None if expert is None else source.modules_to_save,
        trainable_token_indices=None if expert is None else source.trainable_token_indices,
        ensure_weight_tying=source.ensure_weight_tying,
        task_type=source.task_type,
        base_model_name_or_path=source.base_model_name_or_path,
        revision=source.revision,
        inference_mode=True,
    )
    return config, state


def _lora_size(source: Experts, routed: bool, shared: bool) -> tuple[int, float]:
    """Return rank and alpha of a LoRA of one routed expert, the shared experts, or both, with an expert's scaling."""
    parts = routed + shared * source.num_shared_experts
    return source.r * parts, source.lora_alpha * (parts**0.5 if source.use_rslora else parts)


def _matrices_of(
    model: PeftModel, expert: int | None, adapter_name: str, shared: bool
) -> tuple[dict[str, torch.Tensor], dict[str, int], dict[str, float]]:
    """
    Return the tensors of `lora_of_expert` under PEFT's names, A and B and everything shared, and rank and alpha by
    module.
    """
    state: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for owner, layer in model.get_base_model().named_modules():
        # Shared by all experts: modules trained in full and trained rows of embeddings. A tied head has the same rows.
        if expert is not None and isinstance(layer, ModulesToSaveWrapper) and adapter_name in layer.modules_to_save:
            module = layer.modules_to_save[adapter_name].state_dict()
            state |= {f"{BASE_PREFIX}{owner}.{name}": tensor.cpu().clone() for name, tensor in module.items()}
        if expert is not None and isinstance(layer, TrainableTokensWrapper) and not layer.token_adapter.tied_adapter:
            rows = layer.token_adapter.trainable_tokens_delta.items()
            state |= {
                f"{BASE_PREFIX}{owner}{TOKEN_ROWS}": p.detach().cpu().clone() for n, p in rows if n == adapter_name
            }
        if not isinstance(layer, MoELoraLayer) or adapter_name not in layer.moe_lora_spec:
            continue
        spec = layer.moe_lora_spec[adapter_name]
        if expert is not None and not 0 <= expert < spec.num_updates and spec.num_experts > 1:
            raise InputError(f"expert_to_lora: expert={expert}: {owner} has LoRAs 0 to {spec.num_updates - 1}")

        # A and B of each projection: the routed expert's, the shared experts', or both, concatenated along the rank.
        has_shared = shared and spec.num_shared_experts > 0
        A_all, B_all = layer.expert_parameters(adapter_name)
        for projection in A_all:
            name = owner if isinstance(layer, MoELoraLinear) else f"{owner}.{projection}"
            name = name.replace(".base_layer", "")
            parts = []
            if expert is not None:
                index = expert if spec.num_experts > 1 else 0
                parts.append(spec.to_lora(A_all[projection].detach(), B_all[projection].detach(), index))
            if has_shared:
                A_shared, B_shared = (of[projection][0].detach() for of in layer.shared_parameters(adapter_name))
                parts.append((A_shared, B_shared.T))
            if not parts:
                continue
            A_RI, B_OR = torch.cat([A for A, _ in parts]), torch.cat([B for _, B in parts], dim=1)
            state[f"{BASE_PREFIX}{name}.lora_A.weight"] = A_RI.cpu().clone(memory_format=torch.contiguous_format)
            state[f"{BASE_PREFIX}{name}.lora_B.weight"] = B_OR.cpu().clone(memory_format=torch.contiguous_format)
            ranks[name], alphas[name] = _lora_size(spec, expert is not None, shared)
    return state, ranks, alphas
