"""Stacks plain LoRA adapters into a MoE adapter."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn.functional import pad
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ..utils.messages import InputError
from .base_model import behind_backbone, has_routed_experts, short_names
from .config import EXPERT_FIELDS, MoELoraConfig
from .experts import Experts
from .ffn_layout import find_layout, layout_in_layer
from .layers import MoELoraLayer, MoELoraLinear
from .plain_lora import Adapter, PlainLora, lora_scaling, read_loras

Attention: TypeAlias = Literal["route", "mean"]
logger = logging.getLogger("moe_peft")


def lora_to_moe(
    model: nn.Module,
    adapters: Sequence[Adapter],
    adapter_name: str = "default",
    *,
    attention: Attention = "route",
    always: Adapter | None = None,
    **settings: Any,
) -> PeftModel:
    """
    Build a MoE adapter with the given plain LoRA adapters as experts.

    FFN projections become FFN experts. Other linears, such as attention projections, get experts and a router of their
    own. With `attention="mean"`, they get one ordinary LoRA of rank n·r, the exact mean of the updates, and
    `export_adapter` merges it into the base. A head always gets such a mean. Smaller ranks are padded with zeros. If
    scalings differ, the difference is folded into B, and an optimizer like Adam then moves B as far as any other. If
    scalings agree, A and B are kept bit for bit. A module missing in an adapter gets a zero update in its expert.
    Routers are random; `moe_peft.init_gates` sets them without training.

    All experts share the rows of embeddings trained by adapters (`trainable_token_indices`). Each token gets the row of
    the adapter that trained it. If several adapters trained it and differ, it gets their mean, with a warning. Modules
    trained in full (`modules_to_save`: norms, embeddings, a head) must be the same in all adapters, and are shared too.

    Args:
        model: the base model, without adapters.
        adapters: folders of saved LoRA adapters, models with a LoRA adapter (the active one is taken), or return values
            of `expert_to_lora`.
        adapter_name: the new adapter's name.
        attention: how to convert the updates of linears outside FFNs: `"route"` or `"mean"`.
        always: a LoRA adapter for every token, in addition to the routed experts: the mixture's shared expert.
        settings: further `MoELoraConfig` fields, such as `top_k`, `mixing`, `task_type`.

    Returns:
        The base model with the MoE adapter, trainable.

    Raises:
        ValueError: an adapter is not a plain LoRA, does not fit the base, or holds NaN; the base has an adapter;
            `settings` has a field determined by the adapters; or, with `attention="mean"`, no adapter updates an FFN.

    Example:

    ```python
    >>> from peft import LoraConfig, get_peft_model
    >>> from transformers import AutoModelForCausalLM
    >>> from moe_peft import lora_to_moe
    >>> for name in ("math", "code"):
    ...     base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    ...     lora = get_peft_model(
    ...         base,
    ...         LoraConfig(
    ...             target_modules=["up_proj", "down_proj"], task_type="CAUSAL_LM"
    ...         ),
    ...     )
    ...     lora.save_pretrained(name)
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> model = lora_to_moe(base, ["math", "code"], top_k=1)
    >>> model.peft_config["default"].num_experts
    2
    ```
    """
    for name in settings.keys() & set(EXPERT_FIELDS):
        raise InputError(f"lora_to_moe: {name}: the adapters determine this; leave it out")
    if any(isinstance(m, BaseTunerLayer) for m in model.modules()):
        raise InputError(
            "lora_to_moe: model has an adapter, and its update would be added; unload() it, or give the base alone"
        )
    if has_routed_experts(model):
        settings.setdefault("router_aux_loss_coef", 0.0)  # it adds only the loss of its own routers

    # Read the adapters. The shared expert is the last one.
    loras, targets = read_loras(model, adapters if always is None else [*adapters, always])
    shared = None if always is None else loras.pop()
    # Take the model's task. Adapters may name another, but no weight of a LoRA depends on it.
    is_causal = type(model) in MODEL_FOR_CAUSAL_LM_MAPPING.values()
    settings.setdefault("task_type", "CAUSAL_LM" if is_causal else loras[0].config.task_type)
    settings.setdefault("revision", loras[0].config.revision)
    n = len(loras) + bool(settings.get("base_expert"))
    settings.setdefault("top_k", min(2, n))

    # Fields of the config determined by the adapters, and weights trained in full, which all experts share.
    everyone = loras if shared is None else [*loras, shared]
    determined, saved = _determined(loras, targets), _saved(everyone, model)
    if saved:
        if settings.get("base_expert"):
            raise InputError(
                f"lora_to_moe: base_expert=True: all experts would share the adapters' {next(iter(saved))}, and the "
                "base has another one; leave it out"
            )
        modules = {key.rpartition(".")[0] for key in saved}
        settings["modules_to_save"] = sorted(modules.union(settings.get("modules_to_save") or ()))
        settings["ensure_weight_tying"] = loras[0].config.ensure_weight_tying

    # Linears with one LoRA, the mean of all: heads and, with attention="mean", all linears outside FFNs.
    averaged = behind_backbone(model, targets)
    if attention == "mean":
        averaged |= outside_ffns(model, targets)
    if averaged == targets.keys():
        raise InputError(
            f"lora_to_moe: attention={attention!r}: nothing to route: all adapted linears, such as {min(averaged)}, "
            "get the mean of the LoRAs; merge the adapters with PEFT's add_weighted_adapter"
        )

    # Number of shared experts: the shared LoRA's largest rank in units of r, rounded up.
    if shared is not None:
        if mixed := sorted(averaged & shared.A.keys()):
            raise InputError(
                f"lora_to_moe: always: has a LoRA on {mixed[0]}, where attention={attention!r} makes one of all; give "
                "one without"
            )
        settings["num_shared_experts"] = -(-max(map(len, shared.A.values())) // determined["r"])
    if averaged:  # alpha / (n r) is the scaling of an expert, divided by n
        names = sorted(short_names(averaged, [name for name, _ in model.named_modules()]))
        determined["mean_loras"], determined["num_experts_pattern"] = True, dict.fromkeys(names, 1)
        determined["rank_pattern"] = dict.fromkeys(names, len(loras) * determined["r"])

    # Create the MoE adapter and fill in the experts.
    config = MoELoraConfig(num_experts=n, **determined, **settings)
    matrices = _stacked(loras, targets, config.expert_spec(""), averaged, shared)
    peft_model = get_peft_model(model, config, adapter_name=adapter_name)
    _fill_experts(peft_model, adapter_name, targets, matrices, shared)

    # Copy the weights trained in full and the trained rows of embeddings.
    inner = peft_model.get_base_model()
    for key, tensor in saved.items():
        module, _, name = key.rpartition(".")
        inner.get_submodule(f"{module}.modules_to_save.{adapter_name}").get_parameter(name).data.copy_(tensor)
    for module, rows in _token_rows(everyone).items():
        wrapper: Any = inner.get_submodule(module)
        wrapper.token_adapter.trainable_tokens_delta[adapter_name].data.copy_(_shared_rows(module, rows))
    return peft_model


def _fill_experts(
    model: PeftModel, adapter_name: str, targets: dict[str, tuple[str, str]],
    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]], shared: PlainLora | None,
) -> None:  # fmt: skip
    """
    Copy the stacked matrices into the routed experts and the shared LoRA into the shared expert. Set the rest to zero.
    """
    # Set everything to zero.
    layers = {name: m for name, m in model.get_base_model().named_modules() if isinstance(m, MoELoraLayer)}
    for layer in layers.values():
        has_shared = layer.moe_lora_spec[adapter_name].num_shared_experts
        shared_parameters = layer.shared_parameters(adapter_name) if has_shared else ()
        for of_layer in (*layer.expert_parameters(adapter_name), *shared_parameters):
            for parameter in of_layer.values():
                parameter.data.zero_()
    # The routed experts.
    for module, stacked in matrices.items():
        owner, projection = targets[module]
        for parameters, values in zip(layers[owner].expert_parameters(adapter_name), stacked, strict=True):
            parameters[projection].data.copy_(values)
    # The shared expert. A difference in scaling is folded into B. Its first rows are filled, the others stay zero.
    if shared is None:
        return
    for module, A in shared.A.items():
        owner, projection = targets[module]
        factor = lora_scaling(shared.config, module) / layers[owner].moe_lora_spec[adapter_name].scaling
        pair = (A, shared.B[module].T * factor)
        for parameters, matrix in zip(layers[owner].shared_parameters(adapter_name), pair, strict=True):
            parameters[projection].data[0, : len(matrix)].copy_(matrix)


def averaged_linears(model: PeftModel, adapter_name: str) -> dict[str, MoELoraLinear]:
    """Return the linears with one LoRA, the mean of the experts' LoRAs (`attention="mean"`), by their paths."""
    if not model.peft_config[adapter_name].mean_loras:
        return {}
    layers = ((p, m) for p, m in model.get_base_model().named_modules() if isinstance(m, MoELoraLinear))
    return {
        path: layer
        for path, layer in layers
        if (spec := layer.moe_lora_spec.get(adapter_name)) is not None and spec.num_experts == 1
    }


def outside_ffns(model: nn.Module, modules: Iterable[str]) -> set[str]:
    """Return the linears among `modules` outside any FFN of a known layout."""

    def is_outside(name: str) -> bool:
        owner, _, projection = name.rpartition(".")
        parent = model.get_submodule(owner)
        layout = find_layout(parent) or layout_in_layer(parent)
        return layout is None or projection not in layout.projections

    return {name for name in modules if is_outside(name)}


def determined_fields(model: nn.Module, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """
    Return the config fields that `lora_to_moe` takes from the adapters, without `num_experts`. The base may be on the
    meta device.
    """
    return _determined(*read_loras(model, adapters))


def _determined(loras: Sequence[PlainLora], targets: dict[str, tuple[str, str]]) -> dict[str, Any]:
    r = max(A.shape[0] for lora in loras for A in lora.A.values())
    projections = {projection for _, projection in targets.values() if projection != "weight"}
    return {
        "r": r,
        "lora_alpha": _scaling(loras) * r,
        "target_modules": sorted({owner for owner, _ in targets.values()}),
        "target_projections": sorted(projections) or None,
        "trainable_token_indices": {module: [*rows] for module, rows in _token_rows(loras).items()} or None,
    }


def _scaling(loras: Sequence[PlainLora]) -> float:
    """Return the scaling of all experts: the scaling of the first module of the first adapter."""
    return lora_scaling(loras[0].config, next(iter(loras[0].A)))


def _token_rows(loras: Sequence[PlainLora]) -> dict[str, dict[int, list[torch.Tensor]]]:
    """Return the rows [D] trained by adapters, by module and token."""
    found: dict[str, dict[int, list[torch.Tensor]]] = {}
    for lora in loras:
        for module, rows in lora.tokens.items():
            for token, row in rows.items():
                found.setdefault(module, {}).setdefault(token, []).append(row)
    return found


def _shared_rows(module: str, rows: dict[int, list[torch.Tensor]]) -> torch.Tensor:
    """
    Return one row per token, [T, D]: the row common to all adapters that trained the token, or the mean of their rows.
    """
    differing = [token for token, of_token in rows.items() if any(not of_token[0].equal(row) for row in of_token)]
    if differing:
        logger.warning(
            "%s: adapters have different rows for the tokens %s, and experts share their mean; if that harms, train "
            "the tokens first, merge them into the base, and train the adapters on that",
            module, differing[:8],
        )  # fmt: skip
    return torch.stack([
        torch.stack(of_token).float().mean(0) if token in differing else of_token[0].float()
        for token, of_token in rows.items()
    ])  # fmt: skip


def _saved(loras: Sequence[PlainLora], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors trained in full and different from the base. Raise if adapters do not agree on them."""
    base, found = dict(model.named_parameters(remove_duplicate=False)), {}
    for key in dict.fromkeys(key for lora in loras for key in lora.saved):
        # Each adapter's tensor, or the base's if the adapter has none. Skip a tensor that nobody changed.
        of_each = [lora.saved.get(key, base[key].detach()).to(base[key].dtype).cpu() for lora in loras]
        if all(tensor.equal(base[key].detach().cpu()) for tensor in of_each):
            continue
        # All adapters must have the same tensor. None may have a LoRA on its module, trained on the base's tensor.
        others = [
            lora.name
            for lora, tensor in zip(loras, of_each, strict=True)
            if not tensor.equal(of_each[0]) or lora.config.ensure_weight_tying != loras[0].config.ensure_weight_tying
        ]
        if any(key.rpartition(".")[0] in lora.A for lora in loras):
            others.append("the base")
        if others:
            raise InputError(
                f"lora_to_moe: {loras[0].name}: {key} was trained in full and differs from {others[0]}: experts share "
                "all but their LoRAs; train without it, or save the base with it"
            )
        found[key] = of_each[0]
    return found


def _stacked(
    loras: Sequence[PlainLora],
    targets: Iterable[str],
    experts: Experts,
    averaged: Collection[str],
    shared: PlainLora | None,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """
    Return the experts' A and B of each module. Smaller ranks are padded with zeros, and a difference in scaling is
    folded into B. A module missing in an adapter is zero in its expert. A module of `averaged` gets one LoRA, the sum
    of all. A module only in `shared` gets zeros.
    """
    scaling, stacked = _scaling(loras), {}
    for module in targets:
        # Any adapter with a LoRA on the module gives the sizes of zeros for the others.
        first = next(lora for lora in (*loras, shared) if lora is not None and module in lora.A)
        A: list[torch.Tensor] = []
        B: list[torch.Tensor] = []
        for lora in loras:
            if module not in lora.A:
                A.append(first.A[module].new_zeros(experts.rank, first.A[module].shape[1]))
                B.append(first.B[module].new_zeros(first.B[module].shape[0], experts.rank))
                continue
            # Pad to the experts' rank, and fold a difference in scaling into B.
            missing, factor = experts.rank - len(lora.A[module]), lora_scaling(lora.config, module) / scaling
            A.append(pad(lora.A[module], (0, 0, 0, missing)))
            B.append(pad(lora.B[module] if factor == 1 else lora.B[module].float() * factor, (0, missing)))
        # One LoRA with the concatenated ranks: the sum of the updates. Its scaling, alpha / (n r), makes it the mean.
        if module in averaged:
            A, B = [torch.cat(A)], [torch.cat(B, dim=1)]
        try:
            stacked[module] = experts.from_loras(A, B)
        except InputError as error:
            raise InputError(f"lora_to_moe: {module}: {error}") from error
    return stacked
