"""
Access to a routed model, either a MoE-LoRA adapter on its base or a native transformers MoE: its backbone and config,
its routers and their sizes, and the router logits of its forward passes.

No other module knows where router logits come from. Legend: B rows, S positions, T = B·S tokens, n experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from ..adapter import router_outputs
from ..adapter.base_model import recorded_routers
from ..adapter.layers import MoELoraLayer
from ..adapter.router_recorder import Choice, Collection, observing
from ..routing.gates import pad_logits
from ..routing.statistics import chosen_experts, effective_experts
from ..utils.distributed import shape_of
from ..utils.messages import InputError
from ..utils.torch_contexts import evaluating
from .routed_gate import RoutedGate


def base_model(model: Any) -> Any:
    """The transformers model inside a `PeftModel`; any other model is returned as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone(model: Any) -> Any:
    """The transformers model without its head."""
    return base_model(model).base_model


def text_config(model: Any) -> Any:
    """The config of the language part, which has the MoE's fields (`num_experts_per_tok`, …)."""
    return router_outputs.text_config(base_model(model))


_ADAPTED = (BaseTunerLayer, ModulesToSaveWrapper)


def base_passes(
    model: Any,
    batches: Iterable[Mapping[str, Any]],
    modules: Sequence[nn.Module],
    observe: Callable[[int, Mapping[str, Any], torch.Tensor, torch.Tensor, torch.Tensor], None],
) -> None:
    """
    Run batches through the backbone, with adapters disabled.

    Args:
        observe: called as each of the modules runs, with its index, the batch, the batch's mask, 1 for real tokens
            [B, S], on the module's device, and the module's input and output.
    """

    def hook(module: nn.Module, args: tuple, output: torch.Tensor, index: int) -> None:
        observe(index, batch, mask_BS.to(args[0].device), args[0], output)

    device = next(backbone(model).parameters()).device
    adapters = [(layer, layer._disable_adapters) for layer in model.modules() if isinstance(layer, _ADAPTED)]
    handles = [module.register_forward_hook(partial(hook, index=i)) for i, module in enumerate(modules)]
    try:
        for layer, _ in adapters:
            layer._disable_adapters = True
        for batch in batches:
            arguments = {k: batch[k].to(device) for k in ("input_ids", "attention_mask", "position_ids") if k in batch}
            mask_BS = arguments.get("attention_mask", torch.ones_like(arguments["input_ids"]))
            with evaluating(model):
                backbone(model)(**arguments, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        for layer, disabled in adapters:
            layer._disable_adapters = disabled


@dataclass(frozen=True)
class RoutedPass:
    """
    One forward pass of a backbone.

    Args:
        router_logits: one [T, n] per router, in the order of `router_sizes`, whatever the order in which they ran.
        chosen: the experts that served each token, bool [T, n] per router. Slots with a gate of 0 are left out, and
            forced or masked routing is seen as it happened.
        gates: those of the chosen experts, [T, k] per router; None where they were not seen.
        mask: 1 for real tokens, [B, S]; longer than S if the pass continues a cache, whose tokens come first.
        input_ids: the tokens [B, S], if they were passed by keyword.
        trains: whether gradients were enabled.
    """

    router_logits: tuple[torch.Tensor, ...]
    chosen: tuple[torch.Tensor, ...]
    gates: tuple[torch.Tensor | None, ...]
    mask: torch.Tensor
    input_ids: torch.Tensor | None
    trains: bool

    def effective(self) -> list[torch.Tensor]:
        """The effective number of experts of each token (`effective_experts`), [T] per router."""
        return [
            effective_experts(logits_TN.detach().float().softmax(-1) * chosen_TN if gates_TK is None else gates_TK)
            for logits_TN, chosen_TN, gates_TK in zip(self.router_logits, self.chosen, self.gates, strict=True)
        ]


@contextmanager
def observed_routing(model: Any, observe: Callable[[RoutedPass], None]) -> Iterator[None]:
    """
    Call `observe` after each forward pass of the model's backbone inside the block. Outputs, losses and configs do not
    change. Passes in which no router ran (adapters may be disabled) are skipped.
    """
    order: list[nn.Module] = []  # the model's active routers

    def on_pass(collection: Collection) -> None:
        nonlocal order
        ran = collection.routers
        if {*ran} != {*order}:
            order = active_routers(model)
        # In the model's order, unless others ran, or one more than once.
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
        chosen, gates = zip(*(_chosen(*each, k) for each in zip(logits, choices, strict=True)), strict=True)
        observe(RoutedPass(tuple(logits), chosen, gates, mask, collection.token_ids, torch.is_grad_enabled()))

    with observing(backbone(model), on_pass, {} if adapter_layers(model) else _native_gates(model)):
        yield


def _chosen(logits_TN: torch.Tensor, choice: Choice | None, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A router's choice as a mask, bool [T, n], the top k if it was not seen; and its gates [T, k], if they were."""
    experts_TK, gates_TK = (logits_TN.topk(k, dim=-1).indices, None) if choice is None else choice
    if gates_TK is not None and gates_TK.shape != experts_TK.shape:  # of all experts, not of the slots
        gates_TK = None
    return chosen_experts(experts_TK, gates_TK, logits_TN.shape[-1]), gates_TK


def native_routers(model: nn.Module) -> list[nn.Module]:
    """The router modules of a native transformers MoE, as its class declares them; none in a dense model."""
    return list(_native_gates(model))


def _native_gates(model: nn.Module) -> dict[nn.Module, int]:
    """The routers of a native MoE, and the index of the logits in what each returns."""
    gates: dict[nn.Module, int] = {}
    idle: set[nn.Module] = set()
    for module in model.modules():
        if indices := recorded_routers(module):
            for part in module.modules():
                for kind in (kind for kind in indices if isinstance(part, kind)):
                    gates.setdefault(part, indices[kind])
        if isinstance(module, ModulesToSaveWrapper):
            idle.update(part for copy in idle_copies(module) for part in copy.modules())
    return {gate: index for gate, index in gates.items() if gate not in idle}


def idle_copies(wrapper: ModulesToSaveWrapper) -> list[nn.Module]:
    """The modules that PEFT keeps beside the one that its wrapper's forward runs."""
    saved, active = wrapper.modules_to_save, wrapper.active_adapters
    adapted = bool(active) and not wrapper.disable_adapters and all(name in saved for name in active)
    running = saved[active[0]] if adapted else wrapper.original_module
    return [module for module in (wrapper.original_module, *saved.values()) if module is not running]


def adapter_layers(model: nn.Module) -> list[MoELoraLayer]:
    """The MoE-LoRA layers that have a router."""
    return [m for m in model.modules() if isinstance(m, MoELoraLayer) and m.moe_lora_router]


def router_sizes(model: nn.Module, caller: str) -> list[tuple[int, int]]:
    """
    (n, k) of every active router, in the order of a pass's router logits.

    Raises:
        ValueError: the model has no router, or its adapter is disabled; the message begins with `caller`.
    """
    layers = adapter_layers(model)
    if layers and all(layer.disable_adapters for layer in layers):
        raise InputError(f"{caller}: the model's adapter is disabled; call enable_adapter_layers() first")
    specs = [layer.moe_lora_spec[name] for layer, name in routed_adapters(model)]
    sizes = [(spec.num_experts, spec.top_k) for spec in specs] or list(map(gate_size, native_routers(model)))
    if not sizes:
        raise InputError(f"{caller}: {type(model).__name__} has no router; add a MoELoraConfig adapter, or use a MoE")
    return sizes


def active_routers(model: nn.Module) -> list[nn.Module]:
    """The routers that `router_sizes` counts, in its order: of this package, or a native MoE's gates."""
    routers: list[nn.Module] = [layer.router(name) for layer, name in routed_adapters(model)]
    return routers or [getattr(gate, "moe_router", gate) for gate in native_routers(model)]


def routed_adapters(model: nn.Module) -> Iterator[tuple[MoELoraLayer, str]]:
    """Each layer with its active adapters that have a router: not, say, a DPO trainer's reference copy."""
    for layer in adapter_layers(model):
        for name in layer.active_adapters:
            if name in layer.moe_lora_router:
                yield layer, name


def gate_size(gate: Any) -> tuple[int, int]:
    """
    (n, k)

    Raises:
        ValueError: a router of a kind that does not tell.
    """
    if isinstance(gate, RoutedGate):
        return int(gate.num_experts), int(gate.top_k)
    weight, k = getattr(gate, "weight", None), getattr(gate, "top_k", None)
    if not isinstance(weight, torch.Tensor) or k is None:
        raise InputError(
            f"{type(gate).__name__}: a router without `weight` and `top_k`, whose size is not known; use a family such "
            "as Mixtral, Qwen-MoE or OLMoE"
        )
    return int(shape_of(weight)[0]), int(k)


def router_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The routers' parameters by name: those of the MoE-LoRA adapters, or else of the native MoE."""
    if adapter_layers(model):
        return {name: p for name, p in model.named_parameters() if ".moe_lora_router." in name}
    ids = {id(p) for router in native_routers(model) for p in router.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) in ids}
