"""
Access to a routed model: its backbone and config, and the router logits of its forward passes.

No other module knows how to get router logits. Legend: B rows, S positions, T = B·S tokens, n experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import GenerationConfig

from ..adapter import router_outputs
from ..adapter.router_recorder import Choice, Collection, observing
from ..routing.gates import pad_logits
from ..routing.statistics import chosen_experts, effective_experts
from ..utils.torch_contexts import evaluating
from .layer import NativeLayer, routed_layers


def base_model(model: Any) -> Any:
    """Return the transformers model inside a `PeftModel`. Any other model is returned unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone(model: Any) -> Any:
    """Return the transformers model without its head."""
    return base_model(model).base_model


def text_config(model: Any) -> Any:
    """Return the config of the language part, with the MoE's fields (`num_experts_per_tok`, …)."""
    return router_outputs.language_config(base_model(model))


NAMES_FIELD = "moe_peft_expert_names"  # of a native MoE's config


def end_tokens(model: Any, tokenizer: Any = None) -> list[int]:
    """Return the tokens that end an answer: the model's, and the tokenizer's, which training may have changed."""
    ends = base_model(model).generation_config.eos_token_id
    return sorted({*(ends if isinstance(ends, list) else [ends]), getattr(tokenizer, "eos_token_id", None)} - {None})


@contextmanager
def greedy_decoding(model: Any) -> Iterator[None]:
    """
    Decode greedily inside the block. `model.generate` reads only the special tokens of the checkpoint's generation
    config: no beams, penalties or sampling.
    """
    inner = base_model(model)
    usual = inner.generation_config
    tokens = {name: getattr(usual, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    inner.generation_config = GenerationConfig(do_sample=False, num_beams=1, **tokens)
    try:
        yield
    finally:
        inner.generation_config = usual


def expert_names(model: Any) -> list[str] | None:
    """Return the names of the experts of the active adapter, or of a native MoE; None without names."""
    active = model.active_adapters if isinstance(model, PeftModel) else []
    names = next((own for name in active if (own := getattr(model.peft_config[name], "expert_names", None))), None)
    return names or getattr(text_config(model), NAMES_FIELD, None)


_ADAPTED = (BaseTunerLayer, ModulesToSaveWrapper)


def base_passes(
    model: Any,
    batches: Iterable[Mapping[str, Any]],
    modules: Sequence[nn.Module],
    observe: Callable[[int, Mapping[str, Any], torch.Tensor, torch.Tensor, torch.Tensor], None],
    only: bool = False,
) -> None:
    """
    Run batches through the backbone, with adapters disabled.

    Args:
        batches: each with `input_ids` [B, S]; with padding, `attention_mask` [B, S]; to continue P tokens, their
            `past_key_values`, and an `attention_mask` [B, P + S].
        only: whether to end each pass after the last of the modules, if the rest of the pass is not needed.
        observe: called when one of the modules runs, with its index, the batch, the batch's mask on the module's
            device, 1 for real tokens [B, S], and the module's input and output.
    """

    def hook(module: nn.Module, args: tuple, output: torch.Tensor, index: int) -> None:
        observe(index, batch, mask_BS.to(args[0].device), args[0], output)
        if only and index == len(modules) - 1:
            raise _Done

    device = next(backbone(model).parameters()).device
    adapters = [(layer, layer._disable_adapters) for layer in model.modules() if isinstance(layer, _ADAPTED)]
    handles = [module.register_forward_hook(partial(hook, index=i)) for i, module in enumerate(modules)]
    try:
        for layer, _ in adapters:
            layer._disable_adapters = True
        for batch in batches:
            arguments = {k: batch[k].to(device) for k in ("input_ids", "attention_mask", "position_ids") if k in batch}
            length = arguments["input_ids"].shape[1]
            mask_BS = arguments.get("attention_mask", torch.ones_like(arguments["input_ids"]))[:, -length:]
            if "past_key_values" in batch:
                arguments["past_key_values"] = batch["past_key_values"]
            with evaluating(model), suppress(_Done):
                backbone(model)(**arguments, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        for layer, disabled in adapters:
            layer._disable_adapters = disabled


class _Done(Exception):
    """Ends a pass early."""


def counted_tokens(batch: Mapping[str, Any], mask_BS: torch.Tensor) -> torch.Tensor:
    """
    Return the tokens of texts that tell their topic, bool [B, S]: the tokens marked by `counted`, or the tokens without
    a label. In a text without such tokens, all real tokens count.
    """
    real_BS = mask_BS.bool()
    if "counted" in batch:
        counted_BS = real_BS & batch["counted"].to(mask_BS.device).bool()
    elif "labels" in batch:
        counted_BS = real_BS & (batch["labels"].to(mask_BS.device) == -100)
    else:
        return real_BS
    return torch.where(counted_BS.any(1, keepdim=True), counted_BS, real_BS)


@dataclass(frozen=True)
class RoutedPass:
    """
    One forward pass of a backbone.

    Args:
        router_logits: one [T, n] per router, in the order of `routed_layers`, whatever the order in which they ran.
        chosen: the experts that served each token, bool [T, n] per router. Slots with a gate of 0 are left out. Forced
            or masked routing is included.
        experts: the experts by slot, int64 [T, k] per router, including slots with a gate of 0.
        gates: the gates of the slots, [T, k] per router; None if they were not seen.
        mask: 1 for real tokens, [B, S]. Longer than S if the pass continues a cache: the cache's tokens come first.
        input_ids: the tokens [B, S], if they were passed by keyword.
        trains: whether gradients were enabled.
    """

    router_logits: tuple[torch.Tensor, ...]
    chosen: tuple[torch.Tensor, ...]
    experts: tuple[torch.Tensor, ...]
    gates: tuple[torch.Tensor | None, ...]
    mask: torch.Tensor
    input_ids: torch.Tensor | None
    trains: bool

    def effective(self) -> list[torch.Tensor]:
        """Return the effective number of experts of each token (`effective_experts`), [T] per router."""
        return [
            effective_experts(logits_TN.detach().float().softmax(-1) * chosen_TN if gates_TK is None else gates_TK)
            for logits_TN, chosen_TN, gates_TK in zip(self.router_logits, self.chosen, self.gates, strict=True)
        ]


@contextmanager
def observed_routing(model: Any, observe: Callable[[RoutedPass], None]) -> Iterator[None]:
    """
    Call `observe` after each forward pass of the model's backbone inside the block. Outputs, losses and configs do not
    change. Passes without a router run (adapters may be disabled) are skipped.
    """
    order: list[nn.Module] = []  # the model's routers

    def on_pass(collection: Collection) -> None:
        nonlocal order
        ran = collection.routers
        if {*ran} != {*order}:
            order = [layer.router for layer in routed_layers(model)]
        # Use the model's order, unless other routers ran, or one of them ran more than once.
        positions = {router: i for i, router in enumerate(ran)}
        in_order = len(ran) == len(order) and positions.keys() == {*order}
        indices = [positions[router] for router in order] if in_order else range(len(ran))
        n = max(logits_TN.shape[-1] for logits_TN in collection.logits)
        logits = [pad_logits(collection.logits[i], n) for i in indices]
        choices = [collection.choices[i] for i in indices]
        mask = collection.attention_mask
        if mask is None:
            rows = collection.rows
            mask = torch.ones(rows, len(logits[0]) // rows, dtype=torch.long, device=logits[0].device)
        k = int(getattr(text_config(model), "num_experts_per_tok", 1))
        chosen, experts, gates = _chosen(logits, choices, k)
        observe(RoutedPass(tuple(logits), chosen, experts, gates, mask, collection.token_ids, torch.is_grad_enabled()))

    # An adapter's layers record by themselves, in passes begun by the adapter's hooks. There are no such hooks on a MoE
    # with routers of its own.
    layers = routed_layers(model)
    gates = {layer.module: layer.logits_index for layer in layers if isinstance(layer, NativeLayer)}
    begun = not layers or router_outputs.installed(base_model(model)) is not None
    with observing(backbone(model), on_pass, None if begun else gates):
        yield


def _chosen(
    logits: Sequence[torch.Tensor], choices: Sequence[Choice | None], k: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    """
    Return the routers' choices: masks, bool [T, n], slots [T, k], and the gates of the slots [T, k] or None. A choice
    that was not seen is the top k.
    """
    full = [choice for choice in choices if choice is not None and choice[1] is not None]
    kinds = {(x.shape, x.device) for choice in full for x in choice if x is not None}
    if len(full) == len(choices) and len(kinds) == 1:
        # The usual case, in a few operations for all layers.
        experts_LTK, gates_LTK = (torch.stack(of_layers) for of_layers in zip(*full, strict=True))
        chosen_LTN = chosen_experts(experts_LTK, gates_LTK, logits[0].shape[-1])
        return chosen_LTN.unbind(), experts_LTK.unbind(), gates_LTK.unbind()
    chosen, experts, gates = [], [], []
    for logits_TN, choice in zip(logits, choices, strict=True):
        experts_TK, gates_TK = (logits_TN.topk(k, dim=-1).indices, None) if choice is None else choice
        if gates_TK is not None and gates_TK.shape != experts_TK.shape:  # gates of all experts, not of the slots
            gates_TK = None
        chosen.append(chosen_experts(experts_TK, gates_TK, logits_TN.shape[-1]))
        experts.append(experts_TK)
        gates.append(gates_TK)
    return tuple(chosen), tuple(experts), tuple(gates)
