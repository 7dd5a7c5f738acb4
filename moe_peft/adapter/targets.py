"""
The rules of what may be adapted, applied in order before anything is changed: `RULES_OF_MODEL`, then `RULES_OF_ONE` to
each target, then `RULES_OF_ALL` to all targets together. A rule returns why it refuses, or None.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..routing.routers import make_router
from ..utils.distributed import shape_of
from ..utils.messages import InputError
from .base_model import (
    behind_backbone,
    embeddings_name,
    has_routed_experts,
    is_encoder_decoder,
    layout_of,
    name_endings,
)
from .config import MoELoraConfig
from .experts import EXPERTS, Experts
from .ffn_layout import probe_ffn
from .layers import MoELoraFFN, linear_features, without_adapters
from .router_outputs import language_config

_OF_PEFT = {"classifier", "score", "qa_outputs"}  # added to modules_to_save by PEFT itself
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


@dataclass(frozen=True)
class Targets:
    """
    The modules of a model that a config targets.

    Args:
        config: the adapter's config.
        model: the model.
        modules: the targeted modules by name.
    """

    config: MoELoraConfig
    model: nn.Module
    modules: dict[str, nn.Module]

    def spec(self, name: str) -> Experts:
        """Return the settings of the experts of one target."""
        return self.config.expert_spec(name, language_config(self.model))

    @cached_property
    def is_moe(self) -> bool:
        """True if the model has routed experts of its own."""
        return has_routed_experts(self.model)


def check_model(config: MoELoraConfig, model: nn.Module) -> None:
    """Raise an `InputError` if a rule refuses the model, whatever the targets."""
    for rule in RULES_OF_MODEL:
        _refuse_if(rule(config, model))


def check_targets(targets: Targets) -> None:
    """Raise an `InputError` if a rule refuses the targets."""
    for name in targets.modules:
        for rule in RULES_OF_ONE:
            _refuse_if(rule(targets, name))
    for rule_of_all in RULES_OF_ALL:
        _refuse_if(rule_of_all(targets))


def _refuse_if(reason: str | None) -> None:
    if reason:
        raise InputError(f"MoELoraConfig: {reason}")


# --- of the model -----------------------------------------------------------------------------------------------------


def _native_moe(config: MoELoraConfig, model: nn.Module) -> str | None:
    if config.target_modules is not None or not has_routed_experts(model):
        return None
    return (
        f"{type(model).__name__} already has routed experts; adapt it with a plain LoraConfig, name linears beside "
        "them (target_modules), such as those of attention, or start from a dense model"
    )


def _tensor_parallel(config: MoELoraConfig, model: nn.Module) -> str | None:
    if (getattr(model, "tp_size", None) or 1) == 1:
        return None
    return (
        f"tp_size={model.tp_size}: experts need complete projections, not those of tensor parallelism; load the base "
        "without tp_plan, and shard it by FSDP2 or DeepSpeed"
    )


RULES_OF_MODEL: tuple[Callable[[MoELoraConfig, nn.Module], str | None], ...] = (_native_moe, _tensor_parallel)


# --- of one target ----------------------------------------------------------------------------------------------------


def _offloaded(targets: Targets, name: str) -> str | None:
    """Experts would be created on the meta device."""
    module = targets.modules[name]
    hooked = any(getattr(getattr(part, "_hf_hook", None), "offload", False) for part in module.modules())
    is_dispatched = hasattr(targets.model, "hf_device_map")  # PEFT removes its hooks before it loads an adapter
    if not hooked and not (is_dispatched and any(p.is_meta for p in module.parameters())):
        return None
    return (
        f"target module {name!r} is offloaded to the CPU or to disk; load the base with a device_map of GPUs only, "
        "quantize it, or shard it by FSDP2 or DeepSpeed"
    )


def _inside_another(targets: Targets, name: str) -> str | None:
    """A linear inside another target would have experts twice."""
    outer = next((other for other in targets.modules if name.startswith(f"{other}.")), None)
    if outer is not None:
        return f"target_modules matches both {outer!r} and {name!r} inside it; name one of them"
    if ".base_layer." in name:
        return (
            f"target_modules: {name.replace('.base_layer', '')!r} lies inside an FFN that another adapter wraps; "
            "target the FFN, or add this adapter first"
        )
    return None


def _attention_router(targets: Targets, name: str) -> str | None:
    """Attention routers take their sizes from the base's attention, and their values from the layer of an FFN."""
    config, spec = targets.config, targets.spec(name)
    if not config.router_class.needs_attention or spec.num_experts == 1:
        return None
    if layout_of(targets.modules[name]) is None:
        return (
            f"router_type={config.router_type!r}: {name!r} is a single linear, and such routers need an FFN; target "
            "FFNs, or give that linear one expert with num_experts_pattern"
        )
    with torch.device("meta"):
        make_router(1, spec.num_experts, spec.router)  # raises if sizes do not fit
    return None


def _unused_linear(targets: Targets, name: str) -> str | None:
    """A kernel uses the weight of a linear without running the linear: an adapter would have no effect."""
    if layout_of(targets.modules[name]) is not None:
        return None
    parent, _, ending = name.rpartition(".")
    mixer = targets.model.get_submodule(parent.replace(".base_layer", ""))
    if ending == "out_proj" and hasattr(mixer, "A_log") and "self.out_proj.weight" in inspect.getsource(type(mixer)):
        return (
            f"target module {name!r}: a state-space mixer's kernel takes its weight without running it; choose "
            "another, such as in_proj"
        )
    return None


def _no_linear(targets: Targets, name: str) -> str | None:
    """
    Neither an FFN nor a linear, perhaps quantized or already adapted. PEFT knows the sizes of linears. Embeddings and
    convolutions have sizes, too, but compute something else.
    """
    if layout_of(targets.modules[name]) is not None:
        return None
    base = without_adapters(targets.modules[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        is_linear = isinstance(base, nn.Module) and None not in linear_features(base)
    if is_linear and not isinstance(base, (nn.Embedding, nn.modules.conv._ConvNd, nn.MultiheadAttention)):
        return None
    return (
        f"target module {name!r} ({type(base).__name__}) is neither an FFN of a known layout nor a linear layer; "
        "choose another, or describe it with moe_peft.register_ffn_layout"
    )


def _other_ffn(targets: Targets, name: str) -> str | None:
    """An FFN has no such projection, or does not compute on random tokens what its layout says."""
    module, layout = targets.modules[name], layout_of(targets.modules[name])
    if layout is None:
        return None
    unknown = set(targets.spec(name).target_projections or ()) - set(layout.projections)
    if unknown:
        return f"target_projections={sorted(unknown)}: {name!r} has only {list(layout.projections)}"
    if isinstance(module, MoELoraFFN):  # it has an adapter, so this is checked already
        return None
    weight = next(chain(module.parameters(), module.buffers()))  # GPTQ's and AWQ's linears have only buffers
    floating = (p.dtype for p in targets.model.parameters() if p.is_floating_point())
    features, dtype = linear_features(getattr(module, layout.up))[0], next(floating, torch.float32)
    if probe_ffn(layout, module, features, weight.device, dtype):
        return None
    return (
        f"target module {name!r}: the forward of {type(module).__name__} does not compute what {layout} does; name its "
        f"linears instead, target_modules={list(layout.projections)}, or describe it with moe_peft.register_ffn_layout"
    )


def _in_an_expert(targets: Targets, name: str) -> str | None:
    if not targets.is_moe or ".experts." not in name:
        return None
    return (
        f"target module {name!r}: it is in a routed expert of the base, which has no others in it; adapt it with a "
        "plain LoraConfig"
    )


RULES_OF_ONE: tuple[Callable[[Targets, str], str | None], ...] = (
    _offloaded, _inside_another, _attention_router, _unused_linear, _no_linear, _other_ffn, _in_an_expert,
)  # fmt: skip


# --- of all targets ---------------------------------------------------------------------------------------------------


def _no_ffn(targets: Targets) -> str | None:
    """A setting of FFNs has no effect, because no target is one."""
    config = targets.config
    if not targets.modules or any(map(layout_of, targets.modules.values())):
        return None
    projections, wrong = config.target_projections, ""
    if projections is not None:
        wrong = f"target_projections={sorted(projections)}"
    if EXPERTS[config.expert_type].needs_ffn:
        wrong = f"expert_type={config.expert_type!r}"
    endings = ", ".join(sorted(name_endings(targets.modules)))
    return wrong and f"{wrong}: target_modules matches no FFN, only {endings}; name FFNs too, or leave it out"


def _unknown_tokens(targets: Targets) -> str | None:
    """Tokens to train are not rows of the named modules, or are rows of modules trained in full."""
    config, model = targets.config, targets.model
    tokens = config.trainable_token_indices or {}
    for name, ids in (tokens if isinstance(tokens, dict) else {embeddings_name(model): tokens}).items():
        named: dict[str, Any] = {path: module for path, module in model.named_modules() if path.endswith(name)}
        field = f"trainable_token_indices: {name!r}"
        if not named:
            return f"{field} is not a module of the model; name embeddings or a head"
        if max(ids) >= (rows := min(shape_of(module.weight)[0] for module in named.values())):
            return f"{field} has {rows} rows, and none for token {max(ids)}; call resize_token_embeddings first"
        if any(getattr(module, "bias", None) is not None for module in named.values()):
            return f"{field} has a bias, which PEFT drops where rows are trained; name only embeddings"
        if any(path.endswith(saved) for path in named for saved in config.modules_to_save or ()):
            return f"{field} is in modules_to_save, too, which trains all its rows; name it in one of them"
    return None


def _unbalanced(targets: Targets) -> str | None:
    """A router would not be recorded, or would be trained without balancing."""
    config, model = targets.config, targets.model
    routed = [name for name in targets.modules if targets.spec(name).num_experts > 1]
    for name in behind_backbone(model, routed):
        return (
            f"target module {name!r} runs after the layers, where nothing is recorded or balanced; give it one LoRA "
            f"(num_experts_pattern={{{name!r}: 1}}), or leave it out"
        )
    has_two_halves = is_encoder_decoder(model)
    if config.inference_mode or not routed or not (has_two_halves or targets.is_moe):
        return None
    kind = f"{type(model).__name__} {'is an encoder-decoder' if has_two_halves else 'has routers of its own'}"
    if config.router_aux_loss_coef:
        return (
            f"router_aux_loss_coef={config.router_aux_loss_coef}: {kind}, and gets no balancing loss; set it to 0, or "
            "use num_experts=1"
        )
    if config.router_bias_update_rate and has_two_halves:
        return (
            f"router_bias_update_rate={config.router_bias_update_rate}: {kind}, whose routers see other tokens in each "
            "half; set it to 0"
        )
    return None


def _unmatched(targets: Targets) -> str | None:
    """A field names modules missing in the model, which PEFT ignores, or the task of another model."""
    config, model, names = targets.config, targets.model, list(targets.modules)
    if not names or config.inference_mode:
        return None
    for field in ("num_experts_pattern", "top_k_pattern", "rank_pattern", "alpha_pattern"):
        for key in getattr(config, field):
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in names):  # as PEFT matches rank_pattern
                return f"{field}: {key!r} matches no targeted module; leave it out"
    every = [name for name, _ in model.named_modules()]
    excluded, layers, patterns = config.exclude_modules, config.layers_to_transform, config.layers_pattern
    if isinstance(excluded, str) and not any(re.fullmatch(excluded, name) for name in every):
        return f"exclude_modules={excluded!r}: matches no module of the model; leave it out"
    named = {
        "target_modules": () if isinstance(config.target_modules, str) else config.target_modules or (),
        "exclude_modules": () if isinstance(excluded, str) else excluded or (),
        "modules_to_save": set(config.modules_to_save or ()) - _OF_PEFT,
    }
    for field, wanted in named.items():
        for wrong in wanted:
            if not any(name == wrong or name.endswith(f".{wrong}") for name in every):
                return f"{field}: {wrong!r} is not a module of the model; leave it out"
    for layer in [layers] if isinstance(layers, int) else layers or ():
        if not any(f".{layer}." in f".{name}." for name in names):
            return f"layers_to_transform: layer {layer!r} has no targeted module; leave it out"
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        if not any(re.match(rf".*\.{pattern}\.\d+\.", name) for name in names):
            return f"layers_pattern: {pattern!r} matches no list of layers; leave it out"
    of_model = next((task for ending, task in _TASKS.items() if type(model).__name__.endswith(ending)), None)
    task = getattr(config.task_type, "value", config.task_type)
    if of_model is not None and task not in (None, "FEATURE_EXTRACTION", of_model):
        return f"task_type={task!r}: the model is a {type(model).__name__}; use task_type={of_model!r}"
    return None


RULES_OF_ALL: tuple[Callable[[Targets], str | None], ...] = (_no_ffn, _unknown_tokens, _unbalanced, _unmatched)


def likely_targets(config: MoELoraConfig, model: nn.Module) -> str:
    """Return a hint with likely names, for `target_modules` without a match."""
    wanted = {config.target_modules} if isinstance(config.target_modules, str) else set(config.target_modules or ())
    if "all" in wanted:
        return " Did you mean 'all-linear'?"
    modules = dict(model.named_modules())
    if wanted & {*modules, *name_endings(modules)}:
        return ""  # the modules are there, but another setting excludes them
    linears = name_endings(name for name, module in modules.items() if isinstance(module, nn.Linear))
    return f" Its linears are {', '.join(sorted(linears))}; without target_modules, every FFN gets experts."
