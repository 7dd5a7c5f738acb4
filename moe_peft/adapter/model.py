"""`MoELoraModel`, the tuner that puts MoE-LoRA layers into a model."""

from __future__ import annotations

import copy
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

from ..utils.compat import private, require
from ..utils.messages import InputError, one_line
from ..utils.model_card import TAGS
from . import liger, router_outputs
from .base_model import find_ffns, name_endings
from .config import MoELoraConfig, by_pattern, usual_alpha
from .experts import EXPERTS
from .ffn_layout import find_layout
from .layers import MERGE_REFUSAL, MoELoraFFN, MoELoraLayer, MoELoraLinear
from .targets import Targets, check_model, check_targets, likely_targets

require(
    "peft.tuners.tuners_utils.BaseTuner", "peft.tuners.tuners_utils.BaseTunerLayer", "peft.tuners.lora.LoraModel",
    "transformers.PreTrainedModel",
)  # fmt: skip
_maybe_include_all_linear_layers = private("peft.tuners.tuners_utils", "_maybe_include_all_linear_layers")


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
        check_model(peft_config, model)
        liger.name_activations(model)

        # Find the targets as PEFT will find them.
        if peft_config.target_modules is None:
            ffns = find_ffns(model)
            # PEFT checks the layer of a module matched by an ending, but not of a module matched by its full name.
            by_ending = copy.copy(peft_config)
            by_ending.target_modules = name_endings(ffns)
            peft_config.target_modules = {name for name in ffns if self._check_target_module_exists(by_ending, name)}
        _maybe_include_all_linear_layers(peft_config, model)
        modules = {
            name: module
            for name, module in model.named_modules()
            if self._check_target_module_exists(peft_config, name) and not name.endswith(".base_layer")
        }
        check_targets(Targets(peft_config, model, modules))

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
            raise _NoTarget(f"MoELoraConfig: {one_line(error)}{likely_targets(config, model)}") from error
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
        spec = peft_config.expert_spec(current_key, router_outputs.language_config(self.model))
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
