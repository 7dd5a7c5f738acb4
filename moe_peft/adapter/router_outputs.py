"""
Gives an adapted model the config fields and outputs of transformers' MoE models.

The model's config has `num_experts`, `num_experts_per_tok`, `output_router_logits` and `router_aux_loss_coef`. With
`output_router_logits` the backbone's output has `router_logits`, a tuple of float32 [tokens, n], one per router in the
order of the forward pass. TRL's trainers read these and add the balancing loss themselves. For all other code (the
plain `Trainer`, a custom loop) the model adds the balancing loss to `outputs.loss` and sets `outputs.aux_loss`, like a
native MoE.

Forward hooks do all of this. They are module-level functions, so models can be deep-copied and pickled.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..routing.gates import pad_logits
from ..routing.losses import balancing_loss
from ..routing.statistics import counted_experts
from ..utils.messages import InputError
from .base_model import has_routed_experts, is_encoder_decoder
from .layers import MoELoraLayer
from .router_recorder import Collection, arguments, begin, notify, outer_collection, state

IGNORED = ("router_logits", "aux_loss")  # outputs to keep out of `Trainer`'s predictions
FIELDS = ("num_experts", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")


# --- the config's fields ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Installed:
    """
    The hooks on a model, and the fields that they set in its config.

    Args:
        layers: the model's MoE-LoRA layers.
        handles: handles of the hooks.
        base_fields: the config's own values of `FIELDS`, to be restored.
        written: the values set here. A field with another value was set by a user or a trainer.
        routers: the active routers for which the fields were last set; None: not yet.
    """

    layers: list[MoELoraLayer]
    handles: list[RemovableHandle]
    base_fields: dict[str, Any]
    written: dict[str, Any] = dataclasses.field(default_factory=dict)
    routers: list[tuple[str, int, int]] | None = None

    def active_routers(self) -> list[tuple[str, int, int]]:
        """Return (adapter, n, k) of every active router, in the model's order."""
        return [
            (name, layer.moe_lora_spec[name].num_experts, layer.moe_lora_spec[name].top_k)
            for layer in self.layers
            for name in layer.active_adapters
            if name in layer.moe_lora_router
        ]

    def ks(self, routers: Sequence[nn.Module], k: int) -> list[int]:
        """Return the experts per token of each router. Several active adapters may have different numbers."""
        if len({top_k for _, _, top_k in self.routers or ()}) == 1:
            return [k] * len(routers)
        ks = {
            id(router): layer.moe_lora_spec[name].top_k
            for layer in self.layers
            for name, router in layer.moe_lora_router.items()
        }
        return [ks[id(router)] for router in routers]

    def set(self, config: Any, name: str, value: Any) -> None:
        """Set a field, unless a user or a trainer has set it."""
        if getattr(config, name, None) == self.written.get(name, getattr(type(config), name, None)):
            self.written[name] = value
            setattr(config, name, value)

    def restore(self, config: Any) -> None:
        """Restore the config's own fields."""
        for key in _keys(config):
            config.__dict__.pop(key, None)
        config.__dict__.update(self.base_fields)
        self.written = {}


def installed(model: nn.Module) -> Installed | None:
    """Return what `install_hooks` has put on the model, if anything."""
    return model.__dict__.get("_moe_lora")


def sync_config(model: nn.Module, configs: dict[str, Any]) -> None:
    """
    Set the model config's fields for the active adapters. Restore the base's fields if no router is left.

    The adapters determine `output_router_logits` and `router_aux_loss_coef`, unless a user or a trainer has set a
    field, before or after an adapter was added. A field counts as set if its value is neither the default of the config
    class nor a value written here.
    """
    here = installed(model)
    if here is None or (routers := here.active_routers()) == here.routers:
        return
    before = {name for name, _, _ in here.routers or ()}
    here.routers, config = routers, language_config(model)
    _ignore_at_inference(model, bool(routers))
    if not routers:
        here.restore(config)
        return
    config.num_experts = max(n for _, n, _ in routers)
    config.num_experts_per_tok = routers[0][2]
    if before == {name for name, _, _ in routers}:
        return
    here.set(config, "router_aux_loss_coef", max(configs[name].router_aux_loss_coef for name, _, _ in routers))
    here.set(config, "output_router_logits", config.router_aux_loss_coef > 0)


def _keys(config: Any) -> list[str]:
    """
    Return a config's names for the fields. Dense models of MoE families (Jamba, Llama 4) have some under other names.
    """
    return [config.attribute_map.get(name, name) for name in FIELDS]


def _ignore_at_inference(model: Any, ignored: bool) -> None:
    """Keep the outputs of `IGNORED` out of `Trainer`'s predictions, or stop keeping them out."""
    field = "keys_to_ignore_at_inference"
    usual = getattr(type(model.config), field, ["past_key_values"])  # the default of `Trainer`, too
    kept = [name for name in getattr(model.config, field, usual) if name not in IGNORED]
    setattr(model.config, field, [*kept, *IGNORED] if ignored else kept)
    if kept == usual and not ignored:
        delattr(model.config, field)


def language_config(model: nn.Module) -> Any:
    """Return the config of a model's language part, or None."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


# --- the hooks ----------------------------------------------------------------------------------------------------


def install_hooks(model: nn.Module) -> None:
    """
    Register the hooks on a transformers model, once, and note its MoE-LoRA layers. Other modules are left unchanged. So
    are models with routed experts of their own: their fields and outputs describe their own experts.

    Some causal LMs call only a part of their backbone (OPT its decoder), and some trainers call only the backbone. So
    both model and backbone have hooks, and the first to run collects for both.
    """
    if not isinstance(model, PreTrainedModel) or has_routed_experts(model):
        return
    layers = [m for m in model.modules() if isinstance(m, MoELoraLayer)]
    if (here := installed(model)) is not None:
        here.layers = layers
        return
    config = language_config(model)
    handles = [
        handle
        for module in dict.fromkeys((model, model.base_model))
        for handle in (
            module.register_forward_pre_hook(functools.partial(_begin, overrides=_overrides(module)), with_kwargs=True),
            module.register_forward_hook(_end, with_kwargs=True, always_call=True),
        )
    ]
    base_fields = {key: config.__dict__[key] for key in _keys(config) if key in config.__dict__}
    model.__dict__["_moe_lora"] = Installed(layers, handles, base_fields)


def uninstall_hooks(model: nn.Module) -> None:
    """Remove the hooks and restore the config's own fields."""
    here = installed(model)
    if here is None:
        return
    for handle in here.handles:
        handle.remove()
    _ignore_at_inference(model, False)
    here.restore(language_config(model))
    del model.__dict__["_moe_lora"]


def _begin(module: nn.Module, args: tuple, kwargs: dict, overrides: dict[str, bool]) -> tuple[tuple, dict]:
    """Start a collection, unless the model around this backbone has started one."""
    # A backbone inside its model: the model collects.
    outer = outer_collection(module)
    if outer is not None and module is getattr(outer.owner, "base_model", None):
        # A dense backbone does not know the argument. If a caller passes it only to the backbone, the backbone's output
        # gets the router logits. The outer model's output and loss stay unchanged.
        outer.of_backbone |= bool(kwargs.pop("output_router_logits", False))
        return args, {**kwargs, **overrides}

    # The config's fields follow the active adapters. transformers' own `set_adapter` and `delete_adapter` only change
    # the layers, so compare with them each time.
    sync_config(module, getattr(module, "peft_config", {}))

    # The call's argument, or else the config, decides on router logits. A dense model does not know the argument. TRL's
    # fused forward does, and adds transformers' balancing loss, which is NaN for a batch of padding alone.
    config, fused = language_config(module), kwargs.get("fused_lm_head")
    asked = kwargs.pop("output_router_logits", None)
    # `torch.export` can store outputs of transformers' own classes only, so an exported program has no router logits.
    by_config = getattr(config, "output_router_logits", False) and not torch.compiler.is_exporting()
    kwargs = {**kwargs, **({"output_router_logits": False} if fused else overrides)}

    begin(module, args, kwargs, attached=by_config if asked is None else bool(asked), explicit=bool(asked))
    return args, kwargs


def _overrides(module: nn.Module) -> dict[str, bool]:
    """Return arguments to keep a dense model of a MoE family from looking for router logits and adding its own loss."""
    records = "router_logits" in (getattr(module, "_can_record_outputs", None) or {})
    knows = hasattr(type(language_config(module)), "output_router_logits")
    return {"output_router_logits": False} if records or knows else {}


def _end(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
    """Add the router logits to the output and, if the model computes a loss, the balancing loss."""
    # Handle only the pass of this model or its backbone. The owner's pass ends here, even if its forward raised.
    collection = state.current.collection
    if collection is None or module not in (collection.owner, getattr(collection.owner, "base_model", None)):
        return None
    if module is collection.owner:
        state.current.collection = collection.outer
    if output is None:  # the forward raised
        return None

    # Call the observers of this pass.
    if collection.logits and collection.observers:
        notify(collection)

    # The router logits, if the model's or the backbone's caller wants them, padded to one number of experts.
    if not (collection.attached or (collection.of_backbone and module is module.base_model)):
        return None
    n = max([logits.shape[-1] for logits in collection.logits] or [0])  # torch.compile rejects `default`
    router_logits = tuple(pad_logits(logits, n) for logits in collection.logits) or None
    if kwargs.get("fused_lm_head") and module is not module.base_model:
        output["aux_loss"] = output["loss"].new_zeros(())  # also without a router; TRL's class has no `router_logits`
    elif isinstance(output, dict):
        output = _with_router_logits(output, router_logits)
    if router_logits is None:
        return output

    # Add the balancing loss to the model's own loss. If there is no loss, the caller may have forgotten to balance.
    if _has_loss(module):
        output = _with_aux_loss(module, args, kwargs, output, router_logits, collection)
    forgotten = isinstance(output, dict) and output.get("loss") is None and not collection.explicit
    if forgotten and module is collection.owner and module.training and any(x.requires_grad for x in router_logits):
        _warn_unbalanced(type(module).__name__)
    return output


@torch.compiler.assume_constant_result  # runs while torch.compile traces, too
def _warn_unbalanced(name: str) -> None:
    """Warn if a trainer computes its own loss from an output without a loss and does not ask for the balancing loss."""
    warnings.warn(
        f"MoE-LoRA: {name} trains with its caller's own loss, which lacks the balancing loss; add RouterLossesMixin to "
        "the trainer (docs/training.md), or pass output_router_logits=True and add router_aux_loss_coef * aux_loss",
        UserWarning,
        stacklevel=1,  # one place, so that it is shown once
    )


def _with_router_logits(output: Any, router_logits: tuple[torch.Tensor, ...] | None) -> Any:
    """
    Return the output in a class with the field `router_logits`. It is the same object, because creating a new one takes
    long compared with a token.
    """
    cls = _moe_output_class(type(output))
    if torch.compiler.is_compiling():  # it cannot change the class of an object
        return cls(**{**output, "router_logits": router_logits})
    output.__class__ = cls
    if router_logits is not None:  # like the constructor, leave None out
        output["router_logits"] = router_logits
    return output


@torch.compiler.assume_constant_result
def _moe_output_class(cls: Any) -> Any:
    """
    Return a dense model's output class with the additional fields of a MoE. Keys without fields would suffice for most
    readers, but not for code that takes outputs apart and rebuilds them (DistributedDataParallel).
    """
    return _extended(cls)


@functools.cache
def _extended(cls: Any) -> Any:
    missing = [name for name in ("router_logits", "aux_loss") if name not in {f.name for f in dataclasses.fields(cls)}]
    if not missing:
        return cls
    fields = [(name, Any, None) for name in missing]
    namespace = {"__module__": cls.__module__, "__reduce__": lambda output: (_rebuilt, (cls, dict(output)))}
    return dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), namespace=namespace)


def _rebuilt(cls: Any, items: dict[str, Any]) -> Any:
    """Rebuild an output from a pickle, because pickle does not find a class made here."""
    return _extended(cls)(**items)


def _has_loss(model: Any) -> bool:
    """
    Return whether a model computes a language model's loss: it has a backbone, or a head of its own (Llama 4's causal
    model does not name its backbone). Encoder-decoders have logits of two lengths, so they have no common loss.
    """
    if is_encoder_decoder(model):
        return False
    return model is not model.base_model or model.get_output_embeddings() is not None


def _with_aux_loss(
    model: nn.Module,
    args: tuple,
    kwargs: dict,
    output: Any,
    router_logits: tuple[torch.Tensor, ...],
    collection: Collection,
) -> Any:
    is_dict = isinstance(output, dict)
    loss = output.get("loss") if is_dict else None
    if isinstance(output, tuple) and arguments(model, args, kwargs).get("labels") is not None:
        loss = output[0]
    if loss is None and not (is_dict and collection.explicit):
        return output
    if any(logits.shape[0] != router_logits[0].shape[0] for logits in router_logits):
        lengths = sorted({len(logits) for logits in router_logits})
        raise InputError(
            f"MoELoraConfig: router_aux_loss_coef: routers saw different numbers of tokens ({lengths}), which make no "
            "balancing loss; set it to 0, or target modules that read every token once"
        )
    config = language_config(model)
    mask = collection.attention_mask
    if mask is not None:
        mask = mask[:, -(router_logits[0].shape[0] // mask.shape[0]) :].flatten()  # with a cache, its tokens come first
    k, here = config.num_experts_per_tok, cast(Installed, installed(model))
    chosen = counted_experts(collection.routers, router_logits, here.ks(collection.routers, k))
    sizes = [logits.shape[-1] for logits in collection.logits]
    aux_loss = balancing_loss(router_logits, k, mask, sizes=sizes, chosen=chosen)
    if loss is not None:
        loss = loss + config.router_aux_loss_coef * aux_loss.to(loss.device)
    if not is_dict:
        return (loss, *output[1:])
    if loss is not None:
        output["loss"] = loss
    output["aux_loss"] = aux_loss
    return output
