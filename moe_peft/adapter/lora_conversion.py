"""Stacks plain PEFT LoRA adapters into a MoE adapter, and extracts an expert as a plain LoRA adapter."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import pad
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ..utils.compat import private
from ..utils.distributed import shape_of
from ..utils.io import atomic_write
from ..utils.loading import as_lora, read_adapter_config, read_adapter_weights, way_to_lora, with_scaled_rows
from ..utils.messages import InputError, choice_error
from ..utils.model_card import write_model_card
from .base_model import behind_backbone, embeddings_name, has_routed_experts, short_names
from .config import EXPERT_FIELDS, TOKEN_ROWS, MoELoraConfig, by_pattern, name_in_base, trained_tokens
from .experts import EXPERTS, Experts
from .ffn_layout import find_layout, layout_in_layer
from .layers import MoELoraLayer, MoELoraLinear

Adapter: TypeAlias = str | os.PathLike | PeftModel | tuple[LoraConfig, dict[str, torch.Tensor]]
Attention: TypeAlias = Literal["route", "mean"]
logger = logging.getLogger("moe_peft")
_maybe_include_all_linear_layers = private("peft.tuners.tuners_utils", "_maybe_include_all_linear_layers")
_PREFIX = "base_model.model."
# Features of a LoRA that an expert cannot have: field → (value without the feature, besides None and empty ones; why).
_REFUSED: dict[str, tuple[Any, str]] = {
    "use_dora": (False, "DoRA rescales the whole weight; train a LoRA without it"),
    "bias": ("none", "biases of the base were trained; train a LoRA without them"),
    "lora_bias": (False, "an expert has no bias; train a LoRA without it"),
    "target_parameters": (
        None,
        "the experts of a MoE cannot hold experts; train LoRAs on its attention (target_modules=['q_proj', …]), or "
        "serve these as they are with moe-peft pick",
    ),
    "alora_invocation_tokens": (None, "it is active only after certain tokens; train an ordinary LoRA"),
    "layer_replication": (None, "its base repeats some layers; train a LoRA of the base as it is"),
    "use_qalora": (False, "its A reads means of inputs; train an ordinary LoRA"),
    "use_bdlora": (None, "its matrices are block-diagonal; train an ordinary LoRA"),
    "kasa_config": (None, "it changes the base's weights; train an ordinary LoRA"),
    "monteclora_config": (None, "it has weights besides A and B; train an ordinary LoRA"),
    "arrow_config": (None, "it routes between LoRAs itself; give these"),
}
# Values of `init_lora_weights` that do not change the base's weights.
_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")


def lora_rank(config: LoraConfig, module: str) -> int:
    """Return r of one module of a plain LoRA, with `rank_pattern` applied."""
    return by_pattern(config.rank_pattern, module, config.r)


def lora_scaling(config: LoraConfig, module: str) -> float:
    """Return the factor of one module's update B A in a plain LoRA, with `rank_pattern` and `alpha_pattern` applied."""
    alpha = by_pattern(config.alpha_pattern, module, config.lora_alpha)
    r = lora_rank(config, module)
    return alpha / (r**0.5 if config.use_rslora else r)


def lora_scalings(config: LoraConfig, names: Iterable[str]) -> dict[str, float]:
    """Return `lora_scaling` by the names of the A matrices in a saved adapter."""
    modules = {name: name.removeprefix(_PREFIX).partition(".lora_A.")[0] for name in names if ".lora_A." in name}
    return {name: lora_scaling(config, module) for name, module in modules.items()}


@dataclass(frozen=True)
class PlainLora:
    """
    A plain LoRA adapter: A [r, in] and B [out, r] of each linear module, trained rows [D] of embeddings by module and
    token, and complete tensors of the base, by their names in the base.
    """

    name: str
    config: LoraConfig
    A: dict[str, torch.Tensor]
    B: dict[str, torch.Tensor]
    tokens: dict[str, dict[int, torch.Tensor]]
    saved: dict[str, torch.Tensor]


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
            "lora_to_moe: model holds an adapter, whose update would count too; give a base without one, or unload() it"
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
                f"lora_to_moe: base_expert=True: all experts would share the adapters' {next(iter(saved))}, which is "
                "not the base's; leave it out"
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
            f"lora_to_moe: attention={attention!r}: adapters update {min(averaged)} and the like alone, which get one "
            "LoRA, so there is nothing to route; merge them with PEFT's add_weighted_adapter"
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
                f"lora_to_moe: {loras[0].name}: {key} is not that of {others[0]}: it was trained in full, and experts "
                "share all but their LoRAs; train without it, or save the base with it"
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
            state |= {f"{_PREFIX}{owner}.{name}": tensor.cpu().clone() for name, tensor in module.items()}
        if expert is not None and isinstance(layer, TrainableTokensWrapper) and not layer.token_adapter.tied_adapter:
            rows = layer.token_adapter.trainable_tokens_delta.items()
            state |= {f"{_PREFIX}{owner}{TOKEN_ROWS}": p.detach().cpu().clone() for n, p in rows if n == adapter_name}
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
            state[f"{_PREFIX}{name}.lora_A.weight"] = A_RI.cpu().clone(memory_format=torch.contiguous_format)
            state[f"{_PREFIX}{name}.lora_B.weight"] = B_OR.cpu().clone(memory_format=torch.contiguous_format)
            ranks[name], alphas[name] = _lora_size(spec, expert is not None, shared)
    return state, ranks, alphas


def read_loras(model: nn.Module, adapters: Sequence[Adapter]) -> tuple[list[PlainLora], dict[str, tuple[str, str]]]:
    """
    Read adapters and check them with the base model. Return them, and the target of each module: MoE layer and
    projection.
    """
    loras = [_read_lora(adapter, i, model) for i, adapter in enumerate(adapters)]
    for lora in loras:
        _check_fits(lora, model)
    return loras, {module: _target(model, module) for lora in loras for module in lora.A}


def _read_lora(source: Adapter, index: int, model: nn.Module) -> PlainLora:
    """Read a LoRA adapter. Raise if it is not a plain LoRA or not complete."""
    name = f"adapters[{index}]" if isinstance(source, PeftModel | tuple) else str(source)
    if isinstance(source, PeftModel):
        active = source.active_adapters[0]
        state = with_scaled_rows(get_peft_model_state_dict(source, adapter_name=active))
        source = as_lora(source.peft_config[active]), state
    config = source[0] if isinstance(source, tuple) else read_adapter_config(source, f"lora_to_moe: {name}")
    if not isinstance(config, LoraConfig):
        way = way_to_lora(config.peft_type)
        raise InputError(
            f"lora_to_moe: {name} is an adapter of type {config.peft_type.value}; give plain LoRA adapters{way}"
        )
    _check_plain(config, f"lora_to_moe: {name}")
    state = source[1] if isinstance(source, tuple) else read_adapter_weights(source, f"lora_to_moe: {name}")

    # Sort the tensors: A and B by module, rows by module and token, and complete tensors of the base by name.
    A: dict[str, torch.Tensor] = {}
    B: dict[str, torch.Tensor] = {}
    tokens: dict[str, dict[int, torch.Tensor]] = {}
    saved: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        if not tensor.isfinite().all():
            raise InputError(f"lora_to_moe: {name}: {key} holds NaN or infinity; train the adapter again")
        module, _, kind = name_in_base(key).partition(".lora_")
        if module.endswith(TOKEN_ROWS):
            module = module.removesuffix(TOKEN_ROWS)
            tokens[module] = _rows_by_token(name, config, module, tensor, model)
            continue
        if kind not in ("A.weight", "B.weight", ""):
            raise InputError(f"lora_to_moe: {name}: {key}: not a weight of a plain LoRA on a linear layer")
        if not kind:
            _check_saved(name, module, tensor, model)
        {"A.weight": A, "B.weight": B, "": saved}[kind][module] = tensor

    # Ignore LoRAs on modules outside `target_modules`, like PEFT.
    ignored = _untargeted(config, [*A, *B], model)
    if ignored:
        logger.warning(
            "%s: target_modules=%s leaves out %s, whose LoRA is in the file; like PEFT, the mixture does not use it",
            name, config.target_modules, ", ".join(sorted(ignored)),
        )  # fmt: skip
    A, B = ({module: tensor for module, tensor in of.items() if module not in ignored} for of in (A, B))

    # Each A needs its B, weights named by the config must be there, and ranks must be the config's.
    lora = PlainLora(name, config, A, B, tokens, saved)
    if not A or A.keys() != B.keys():
        module = next(iter(A.keys() ^ B.keys()), "any module")
        raise InputError(f"lora_to_moe: {name}: lacks a matrix of {module}; save the adapter again")
    for field, found in (("trainable_token_indices", tokens), ("modules_to_save", saved)):
        if (value := getattr(config, field)) and not found:
            raise InputError(f"lora_to_moe: {name}: lacks the weights of {field}={value!r}; save the adapter again")
    for module in A:
        ranks, stated = (A[module].shape[0], B[module].shape[-1]), lora_rank(config, module)
        if ranks != (stated, stated):
            raise InputError(
                f"lora_to_moe: {name}: {module} has the ranks {ranks}, its config says {stated}; save the adapter again"
            )
    return lora


def _check_plain(config: LoraConfig, source: str) -> None:
    for field, (plain, why) in _REFUSED.items():
        if (value := getattr(config, field, None)) and value != plain:
            raise InputError(f"{source}: {field}={value!r}: {why}")
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights not in _KEEP_THE_BASE:
        raise InputError(
            f"{source}: init_lora_weights={config.init_lora_weights!r}: it fits only a base that this has changed; "
            "save it for the plain base, with path_initial_model_for_weight_conversion"
        )


def check_only_linears(config: LoraConfig, names: Iterable[str], source: str) -> None:
    """
    Raise an `InputError` if a LoRA adapter is more than A and B of linears. Only these are merged.

    Args:
        names: names of its tensors.
        source: name of the adapter, for messages.
    """
    _check_plain(config, source)
    for name in names:
        if name_in_base(name).partition(".lora_")[2] not in ("A.weight", "B.weight"):
            raise InputError(f"{source}: {name}: is not a weight of a LoRA on a linear; train LoRAs without it")


def _untargeted(config: LoraConfig, modules: Sequence[str], model: nn.Module) -> set[str]:
    """Return the modules without a LoRA in PEFT under this config, such as a head with "all-linear"."""
    if config.target_modules is None:
        return set()
    config = copy.copy(config)
    _maybe_include_all_linear_layers(config, model)
    return {module for module in modules if not check_target_module_exists(config, module)}


def _rows_by_token(
    name: str, config: LoraConfig, module: str, rows: torch.Tensor, model: nn.Module
) -> dict[int, torch.Tensor]:
    """
    Return the trained rows [D] of embeddings or a head, by token, from the adapter's `rows` [T, D]. A tied head has
    none.
    """
    ids = trained_tokens(config, module)
    weight = dict(model.named_parameters(remove_duplicate=False)).get(f"{module}.weight")
    if weight is None or not isinstance(ids, list) or rows.shape != (len(ids), shape_of(weight)[-1]):
        raise InputError(
            f"lora_to_moe: {name}: {module}: rows of the shape {list(rows.shape)} do not fit the base and "
            f"trainable_token_indices={config.trainable_token_indices}; was it trained on a different base?"
        )
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if tied and module != (embeddings := embeddings_name(model)):
        if ids != trained_tokens(config, embeddings):
            raise InputError(
                f"lora_to_moe: {name}: {module} has rows of its own, but the base ties it to {embeddings}; train both "
                "for the same tokens"
            )
        return {}  # a copy of the embeddings' rows
    return dict(zip(ids, rows, strict=True))


def _check_saved(name: str, key: str, tensor: torch.Tensor, model: nn.Module) -> None:
    """
    Raise if a complete tensor does not fit the base: trained in full, or of embeddings or a head saved after tokens
    were added.
    """
    base = dict(model.named_parameters(remove_duplicate=False)).get(key)
    if base is None:
        raise InputError(f"lora_to_moe: {name}: {key}: the base model has no such weight; is it the adapter's base?")
    if shape_of(base) != tensor.shape:
        raise InputError(
            f"lora_to_moe: {name}: {key} has {len(tensor)} rows, the base's {len(base)}: tokens were added, and "
            "experts share embeddings; save the base with these, and train on that"
        )


def _check_fits(lora: PlainLora, model: nn.Module) -> None:
    modules = dict(model.named_modules())
    for name, A in lora.A.items():
        if name not in modules:
            raise InputError(
                f"lora_to_moe: {lora.name}: the base model has no module {name!r}; was it trained on a different base?"
            )
        module = modules[name]
        features = (getattr(module, "in_features", A.shape[1]), getattr(module, "out_features", lora.B[name].shape[0]))
        if features != (A.shape[1], lora.B[name].shape[0]):
            shape = (A.shape[1], lora.B[name].shape[0])
            raise InputError(
                f"lora_to_moe: {lora.name}: {name} has in and out features {shape}, the base model's has {features}; "
                "was it trained on a different base?"
            )


def _target(model: nn.Module, module: str) -> tuple[str, str]:
    """Return the MoE layer for the LoRA of a linear module, and the projection's name in the layer."""
    owner, _, projection = module.rpartition(".")
    layout = find_layout(model.get_submodule(owner))
    if layout is not None and projection in layout.projections:
        return owner, projection
    return module, "weight"
