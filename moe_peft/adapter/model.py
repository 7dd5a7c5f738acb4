"""`MoELoraModel`, the tuner that puts MoE-LoRA layers into a model."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, cast

import torch
from peft import NoMatchingPeftModuleError, PeftModel
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import TrainableTokensWrapper
from torch import nn

from ..routing.routers import make_router
from ..utils.compat import private, require
from ..utils.distributed import shape_of
from ..utils.messages import InputError, one_line
from ..utils.model_card import TAGS
from . import liger, router_outputs
from .base_model import (
    behind_backbone,
    embeddings_name,
    find_ffns,
    has_routed_experts,
    is_encoder_decoder,
    layout_of,
    name_endings,
)
from .config import MoELoraConfig, by_pattern, usual_alpha
from .experts import EXPERTS, Experts
from .ffn_layout import find_layout, probe_ffn
from .layers import MERGE_REFUSAL, MoELoraFFN, MoELoraLayer, MoELoraLinear, linear_features, without_adapters

require(
    "peft.tuners.tuners_utils.BaseTuner", "peft.tuners.tuners_utils.BaseTunerLayer", "peft.tuners.lora.LoraModel",
    "transformers.PreTrainedModel",
)  # fmt: skip
_maybe_include_all_linear_layers = private("peft.tuners.tuners_utils", "_maybe_include_all_linear_layers")


_OF_PEFT = {"classifier", "score", "qa_outputs"}  # added to modules_to_save by PEFT itself
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


class MoELoraModel(BaseTuner):
    """
    Puts LoRA experts and routers into the FFNs (or single linears) of a model; see `MoELoraConfig`.

    Args:
        model: the model to adapt.
        peft_config: the adapter's configuration.
        adapter_name: its name.

    Example:

    ```python
    >>> from peft import get_peft_model
    >>> from transformers import AutoModelForCausalLM
    >>> from moe_peft import MoELoraConfig, MoELoraModel
    >>> model = get_peft_model(
    ...     AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"), MoELoraConfig()
    ... )
    >>> isinstance(model.base_model, MoELoraModel)
    True
    ```
    """

    prefix = "moe_lora_"
    tuner_layer_cls = MoELoraLayer
    target_module_mapping: ClassVar[dict[str, list[str]]] = {}
    _add_modules_to_save_to_tie = private("peft.tuners.lora.LoraModel", "_add_modules_to_save_to_tie")

    def __init__(self, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(m, MoELoraLayer) and adapter_name in m.moe_lora_spec for m in model.modules()):
            raise InputError(
                f"MoELoraConfig: adapter_name={adapter_name!r}: the model has an adapter of this name; choose another"
            )
        if isinstance(model, PeftModel):
            raise InputError(
                "MoELoraConfig: the model is a PeftModel; give its base, merge its adapter first (merge_and_unload), "
                "or use add_adapter for a second adapter of this type"
            )
        # transformers opens a LoRA's folder as its base with the LoRA in it. This adapter, saved, names only the base.
        kinds = (MoELoraLayer, TrainableTokensLayer)
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer) and not isinstance(layer, kinds):
                kind = type(layer).__module__.split(".")[-2]
                raise InputError(
                    f"MoELoraConfig: the model holds the {kind} adapter {', '.join(layer.active_adapters)!r}, which is "
                    "not saved with this one: merge it into the base (PeftModel.merge_and_unload), save that, and "
                    "start from it"
                )
        super().__init__(model, peft_config, adapter_name, *args, **kwargs)

    # --- checks before anything is changed --------------------------------------------------------------------------

    def _prepare_adapter_config(self, peft_config: MoELoraConfig, model_config: dict) -> MoELoraConfig:
        return peft_config  # `_prepare_model` has the model and resolves `target_modules=None`

    def _prepare_model(self, peft_config: MoELoraConfig, model: nn.Module) -> None:
        is_moe = has_routed_experts(model)
        if is_moe and peft_config.target_modules is None:
            raise InputError(
                f"MoELoraConfig: {type(model).__name__} already has routed experts; adapt it with a plain LoraConfig, "
                "name linears beside them (target_modules), such as those of attention, or start from a dense model"
            )
        liger.name_activations(model)

        # Find the targets as PEFT will find them.
        if peft_config.target_modules is None:
            ffns = find_ffns(model)
            # PEFT checks the layer of a module matched by an ending, but not of a module matched by its full name.
            by_ending = copy.copy(peft_config)
            by_ending.target_modules = name_endings(ffns)
            peft_config.target_modules = {name for name in ffns if self._check_target_module_exists(by_ending, name)}
        _maybe_include_all_linear_layers(peft_config, model)
        targets = {
            name: module
            for name, module in model.named_modules()
            if self._check_target_module_exists(peft_config, name) and not name.endswith(".base_layer")
        }
        _refuse_placement(model, targets)

        # Check each target. A linear inside another target would have experts twice.
        names = list(targets)
        for name, module in targets.items():
            outer = next((n for n in names if name.startswith(f"{n}.")), None)
            if outer is not None:
                raise InputError(
                    f"MoELoraConfig: target_modules matches both {outer!r} and {name!r} inside it; name one of them"
                )
            if ".base_layer." in name:
                raise InputError(
                    f"MoELoraConfig: target_modules: {name.replace('.base_layer', '')!r} lies inside an FFN that "
                    "another adapter wraps; target the FFN, or add this adapter first"
                )
            _check_target(name, module, peft_config, model)
            if is_moe and ".experts." in name:
                raise InputError(
                    f"MoELoraConfig: target module {name!r}: it is in a routed expert of the base, which has no others "
                    "in it; adapt it with a plain LoraConfig"
                )

        # Check all targets together: refuse settings without an effect.
        if targets and not any(map(layout_of, targets.values())):
            projections = peft_config.target_projections
            wrong = f"target_projections={sorted(projections)}" if projections is not None else ""
            if EXPERTS[peft_config.expert_type].needs_ffn:
                wrong = f"expert_type={peft_config.expert_type!r}"
            if wrong:
                raise InputError(
                    f"MoELoraConfig: {wrong}: target_modules matches no FFN, only "
                    f"{', '.join(sorted(name_endings(names)))}; name FFNs too, or leave it out"
                )
        _refuse_tokens(peft_config, model)
        _refuse_unbalanced(peft_config, model, names)
        if names and not peft_config.inference_mode:
            _refuse_unmatched(peft_config, names, model)

    # --- injection --------------------------------------------------------------------------------------------------

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if "." in adapter_name:  # PEFT finds an adapter's tensors by the parts of their names
            raise InputError(f"MoELoraConfig: adapter_name={adapter_name!r}: use a name without dots")
        path = next((name for name, _ in model.named_modules() if adapter_name in name.split(".")), None)
        if path is not None:  # github.com/huggingface/peft/issues/3584
            warnings.warn(
                f"adapter_name={adapter_name!r} is a part of {path!r}: PEFT leaves the tensors there out when it saves "
                "another adapter of this model; choose another name if there will be several",
                stacklevel=2,
            )
        config = self.peft_config[adapter_name]
        original = next((name for name, other in self.peft_config.items() if other is config), adapter_name)
        # Copy the config of a new adapter: it may be used again for another one. A loaded adapter's config is its own.
        if not config.inference_mode:
            # Without a task type, the caller may use PEFT's class for one of these tasks.
            if config.modules_to_save is None and config.task_type in (None, "TOKEN_CLS", "QUESTION_ANS"):
                config.modules_to_save = []  # shared with the copy; PEFT adds the head to it after the injection
            self.peft_config[adapter_name] = copy.copy(config)
        try:
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        except NoMatchingPeftModuleError as error:
            raise _NoTarget(f"MoELoraConfig: {one_line(error)}{_likely_targets(config, model)}") from error
        if original != adapter_name:  # TRL's reference adapter: the same config and a copy of the parameters
            for module in model.modules():
                if isinstance(module, MoELoraLayer):
                    module.copy_buffers(original, adapter_name)
        self._set_alpha(adapter_name)
        for module in model.modules():
            if isinstance(module, TrainableTokensWrapper):
                module.bias = None  # TRL's fused head reads it
        # Not in `_post_injection_hook`: a second `add_adapter` does not call it.
        router_outputs.install_hooks(model)
        router_outputs.sync_config(model, self.peft_config)
        if hasattr(model, "add_model_tags"):  # for the model card of any trainer
            cast(Any, model).add_model_tags(list(TAGS))

    def _set_alpha(self, adapter_name: str) -> None:
        """
        Write an alpha left out by the user into the adapter's config. Scalings then stay when `top_k` or the experts
        change.
        """
        config = cast(MoELoraConfig, self.peft_config[adapter_name])
        if config.lora_alpha is not None or "lora_alpha" in EXPERTS[config.expert_type].unread:
            return
        config.alpha_pattern = {**config.alpha_pattern}
        config.lora_alpha = usual_alpha(config.r, config.top_k, config.use_rslora)
        alphas = {
            name.replace(".base_layer", ""): layer.moe_lora_spec[adapter_name].lora_alpha
            for name, layer in self.model.named_modules()
            if isinstance(layer, MoELoraLayer) and adapter_name in layer.moe_lora_spec
        }
        for key in (*config.num_experts_pattern, *config.top_k_pattern, *config.rank_pattern):
            of_key = {alpha for name, alpha in alphas.items() if by_pattern({key: True}, name, False)}
            if len(of_key) == 1:
                config.alpha_pattern.setdefault(key, of_key.pop())
        for name, alpha in alphas.items():
            if by_pattern(config.alpha_pattern, name, config.lora_alpha) != alpha:
                config.alpha_pattern = {name: alpha, **config.alpha_pattern}

    def _create_and_replace(
        self,
        peft_config: MoELoraConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        spec = _spec(peft_config, current_key, self.model)
        if isinstance(target, MoELoraLayer):
            target.update_layer(adapter_name, spec, peft_config.inference_mode)
            return
        layout = find_layout(target)
        layer = MoELoraLinear(target, adapter_name) if layout is None else MoELoraFFN(target, layout, adapter_name)
        layer.update_layer(adapter_name, spec, peft_config.inference_mode)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        packed = isinstance(new_module, MoELoraFFN) and next(child.parameters(), None) is None
        unwraps = isinstance(child, (MoELoraFFN, TrainableTokensWrapper))
        if unwraps or packed:  # packed: only buffers. PEFT would look for the child's weight, or set it
            setattr(parent, child_name, new_module)
        else:
            super()._replace_module(parent, child_name, new_module, child)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        super().set_adapter(adapter_name, inference_mode=inference_mode)
        router_outputs.sync_config(self.model, self.peft_config)

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        if not self.active_adapters and self.peft_config:
            # PEFT takes the active adapter from the first layer, but the deleted adapter may have been its only one.
            self.set_adapter(sorted(self.peft_config)[0])
        router_outputs.sync_config(self.model, self.peft_config)

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> nn.Module:
        model = super()._unload_and_optionally_merge(merge, *args, **kwargs)
        router_outputs.uninstall_hooks(model)
        # Keep only the model's own tags. Without any, remove the attribute, as in the model's class.
        kept = [tag for tag in getattr(model, "model_tags", None) or [] if tag not in TAGS]
        model.__dict__.pop("model_tags", None)
        if kept:
            cast(Any, model).model_tags = kept
        return model

    # --- not supported with token-routed experts --------------------------------------------------------------------

    def _check_merge_allowed(self) -> None:
        raise ValueError(MERGE_REFUSAL)

    def unmerge_adapter(self) -> None:
        raise InputError(f"There is nothing to unmerge. {MERGE_REFUSAL}")

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(
            "MoE-LoRA cannot add weighted adapters: the routers of two adapters choose differently. Make one of their "
            "experts (moe_peft.expert_to_lora, then moe_peft.lora_to_moe); or activate both "
            "(model.base_model.set_adapter([...])), which needs mixing='projection' in all but one"
        )

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("adapter_names", None) is not None:
            raise InputError("MoE-LoRA cannot mix adapters within a batch: run one batch per adapter (adapter_names)")
        yield

    # --- the state dict ---------------------------------------------------------------------------------------------

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        # Save an adapter on a linear inside another adapter's FFN under its name without the other adapter.
        key = super()._remove_adapter_name_from_key(key, adapter_name)
        return key.replace(".base_layer.", ".") if f".{cls.prefix}" in key else key

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: MoELoraConfig, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        remapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        expected = {
            f"{path}.{name}": tensor
            for path, layer in model.named_modules()
            if isinstance(layer, MoELoraLayer)
            for name, tensor in chain(layer.named_parameters(), layer.named_buffers())
            if name.startswith(cls.prefix) and name.split(".")[1] == adapter_name
        }
        saved = {key: tensor for key, tensor in remapped.items() if f".{cls.prefix}" in key}
        for key in sorted(expected.keys() | saved.keys()):
            shapes = [str(list(of[key].shape)) if key in of else "no such weight" for of in (saved, expected)]
            if shapes[0] != shapes[1]:
                raise InputError(
                    f"{key}: the adapter has {shapes[0]}, this model has {shapes[1]}; give it another name if "
                    f"{adapter_name!r} is another adapter's, else load it on the base that it was trained on"
                )
            if saved[key].is_floating_point() != expected[key].is_floating_point():
                raise InputError(f"{key}: the adapter has {saved[key].dtype}; save it in float32, bfloat16 or float16")
            if not saved[key].isfinite().all():
                raise InputError(f"{key}: the adapter's weights hold NaN or infinity; save or download it again")
        return remapped


class _NoTarget(InputError, NoMatchingPeftModuleError):
    """No module matches the targets: PEFT's error, and an `InputError` too, because the user gave the targets."""


def _likely_targets(config: MoELoraConfig, model: nn.Module) -> str:
    """Return a hint with likely names, for `target_modules` without a match."""
    wanted = {config.target_modules} if isinstance(config.target_modules, str) else set(config.target_modules or ())
    if "all" in wanted:
        return " Did you mean 'all-linear'?"
    modules = dict(model.named_modules())
    if wanted & {*modules, *name_endings(modules)}:
        return ""  # the modules are there, but another setting excludes them
    linears = name_endings(name for name, module in modules.items() if isinstance(module, nn.Linear))
    return f" Its linears are {', '.join(sorted(linears))}; without target_modules, every FFN gets experts."


def _refuse_placement(model: nn.Module, targets: dict[str, nn.Module]) -> None:
    """Raise if experts would compute with a part of a projection, or be created on the meta device."""
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise InputError(
            f"MoELoraConfig: tp_size={model.tp_size}: experts need complete projections, not those of tensor "
            "parallelism; load the base without tp_plan, and shard it by FSDP2 or DeepSpeed"
        )
    is_dispatched = hasattr(model, "hf_device_map")  # PEFT removes its hooks before it loads an adapter
    for name, module in targets.items():
        hooked = any(getattr(getattr(part, "_hf_hook", None), "offload", False) for part in module.modules())
        if hooked or (is_dispatched and any(p.is_meta for p in module.parameters())):
            raise InputError(
                f"MoELoraConfig: target module {name!r} is offloaded to the CPU or to disk; load the base with a "
                "device_map of GPUs only, quantize it, or shard it by FSDP2 or DeepSpeed"
            )


def _refuse_tokens(config: MoELoraConfig, model: nn.Module) -> None:
    """Raise if tokens to train are not rows of the named modules, or are rows of modules trained in full."""
    tokens = config.trainable_token_indices or {}
    for name, ids in (tokens if isinstance(tokens, dict) else {embeddings_name(model): tokens}).items():
        named: dict[str, Any] = {path: module for path, module in model.named_modules() if path.endswith(name)}
        field = f"MoELoraConfig: trainable_token_indices: {name!r}"
        if not named:
            raise InputError(f"{field} is not a module of the model; name embeddings or a head")
        if max(ids) >= (rows := min(shape_of(module.weight)[0] for module in named.values())):
            raise InputError(
                f"{field} has {rows} rows, and none for token {max(ids)}; call resize_token_embeddings first"
            )
        if any(getattr(module, "bias", None) is not None for module in named.values()):
            raise InputError(f"{field} has a bias, which PEFT drops where rows are trained; name only embeddings")
        if any(path.endswith(saved) for path in named for saved in config.modules_to_save or ()):
            raise InputError(f"{field} is in modules_to_save, too, which trains all its rows; name it in one of them")


def _refuse_unbalanced(config: MoELoraConfig, model: nn.Module, names: list[str]) -> None:
    """Raise if a router would not be recorded, or would be trained without balancing."""
    routed = [name for name in names if _spec(config, name, model).num_experts > 1]
    for name in behind_backbone(model, routed):
        raise InputError(
            f"MoELoraConfig: target module {name!r} runs after the layers, where nothing is recorded or balanced; give "
            f"it one LoRA (num_experts_pattern={{{name!r}: 1}}), or leave it out"
        )
    has_two_halves = is_encoder_decoder(model)
    if config.inference_mode or not routed or not (has_two_halves or has_routed_experts(model)):
        return
    kind = "is an encoder-decoder" if has_two_halves else "has routers of its own"
    if config.router_aux_loss_coef:
        raise InputError(
            f"MoELoraConfig: router_aux_loss_coef={config.router_aux_loss_coef}: {type(model).__name__} {kind}, and "
            "gets no balancing loss; set it to 0, or use num_experts=1"
        )
    if config.router_bias_update_rate and has_two_halves:
        raise InputError(
            f"MoELoraConfig: router_bias_update_rate={config.router_bias_update_rate}: {type(model).__name__} {kind}, "
            "whose routers see other tokens in each half; set it to 0"
        )


def _refuse_unmatched(config: MoELoraConfig, names: list[str], model: nn.Module) -> None:
    """Raise if a field names modules missing in the model, which PEFT ignores, or the task of another model."""
    for field in ("num_experts_pattern", "top_k_pattern", "rank_pattern", "alpha_pattern"):
        for key in getattr(config, field):
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in names):  # as PEFT matches rank_pattern
                raise InputError(f"MoELoraConfig: {field}: {key!r} matches no targeted module; leave it out")
    every = [name for name, _ in model.named_modules()]
    excluded, layers, patterns = config.exclude_modules, config.layers_to_transform, config.layers_pattern
    if isinstance(excluded, str) and not any(re.fullmatch(excluded, name) for name in every):
        raise InputError(f"MoELoraConfig: exclude_modules={excluded!r}: matches no module of the model; leave it out")
    named = {
        "target_modules": () if isinstance(config.target_modules, str) else config.target_modules or (),
        "exclude_modules": () if isinstance(excluded, str) else excluded or (),
        "modules_to_save": set(config.modules_to_save or ()) - _OF_PEFT,
    }
    for field, wanted in named.items():
        for wrong in wanted:
            if not any(name == wrong or name.endswith(f".{wrong}") for name in every):
                raise InputError(f"MoELoraConfig: {field}: {wrong!r} is not a module of the model; leave it out")
    for layer in [layers] if isinstance(layers, int) else layers or ():
        if not any(f".{layer}." in f".{name}." for name in names):
            raise InputError(
                f"MoELoraConfig: layers_to_transform: layer {layer!r} has no targeted module; leave it out"
            )
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        if not any(re.match(rf".*\.{pattern}\.\d+\.", name) for name in names):
            raise InputError(f"MoELoraConfig: layers_pattern: {pattern!r} matches no list of layers; leave it out")
    of_model = next((task for ending, task in _TASKS.items() if type(model).__name__.endswith(ending)), None)
    task = getattr(config.task_type, "value", config.task_type)
    if of_model is not None and task not in (None, "FEATURE_EXTRACTION", of_model):
        raise InputError(
            f"MoELoraConfig: task_type={task!r}: the model is a {type(model).__name__}; use task_type={of_model!r}"
        )


def _spec(config: MoELoraConfig, name: str, model: nn.Module) -> Experts:
    """Return the settings of the module `name` of `model`."""
    return config.expert_spec(name, router_outputs.language_config(model))


def _refuse_kernels(name: str, model: nn.Module) -> None:
    """Raise if a kernel uses the weight of a linear without running the linear: an adapter would have no effect."""
    parent, _, ending = name.rpartition(".")
    mixer = model.get_submodule(parent.replace(".base_layer", ""))
    if ending == "out_proj" and hasattr(mixer, "A_log") and "self.out_proj.weight" in inspect.getsource(type(mixer)):
        raise InputError(
            f"MoELoraConfig: target module {name!r}: a state-space mixer's kernel takes its weight without running "
            "it; choose another, such as in_proj"
        )


def _check_target(name: str, module: nn.Module, config: MoELoraConfig, model: nn.Module) -> None:
    """Raise if `module` is neither a linear nor an FFN with a layout that computes the same as its forward."""
    spec = _spec(config, name, model)
    layout = layout_of(module)

    # Attention routers take their sizes from the base's attention, and their values from the layer of an FFN.
    if config.router_class.needs_attention and spec.num_experts > 1:
        if layout is None:
            raise InputError(
                f"MoELoraConfig: router_type={config.router_type!r}: {name!r} is a single linear, and such routers "
                "need an FFN; target FFNs, or give that linear one expert with num_experts_pattern"
            )
        with torch.device("meta"):
            make_router(1, spec.num_experts, spec.router)  # raises if sizes do not fit

    # A single linear, perhaps quantized or already adapted: PEFT knows its sizes. Embeddings and convolutions have
    # sizes, too, but compute something else.
    if layout is None:
        _refuse_kernels(name, model)
        base = without_adapters(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_linear = isinstance(base, nn.Module) and None not in linear_features(base)
        if not is_linear or isinstance(base, (nn.Embedding, nn.modules.conv._ConvNd, nn.MultiheadAttention)):
            raise InputError(
                f"MoELoraConfig: target module {name!r} ({type(base).__name__}) is neither an FFN of a known layout "
                "nor a linear layer; choose another, or describe it with moe_peft.register_ffn_layout"
            )
        return

    # An FFN. The target projections must be in its layout …
    unknown = set(spec.target_projections or ()) - set(layout.projections)
    if unknown:
        raise InputError(
            f"MoELoraConfig: target_projections={sorted(unknown)}: {name!r} has only {list(layout.projections)}"
        )

    # … and its forward must agree with the layout on random tokens. If it has an adapter, this is checked already.
    if isinstance(module, MoELoraFFN):
        return
    weight = next(chain(module.parameters(), module.buffers()))  # GPTQ's and AWQ's linears have only buffers
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    features, dtype = linear_features(getattr(module, layout.up))[0], next(floating, torch.float32)
    if not probe_ffn(layout, module, features, weight.device, dtype):
        raise InputError(
            f"MoELoraConfig: target module {name!r}: the forward of {type(module).__name__} does not compute what "
            f"{layout} does; name its linears instead, target_modules={list(layout.projections)}, or describe it with "
            "moe_peft.register_ffn_layout"
        )
