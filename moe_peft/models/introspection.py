"""
Access to a routed model, either a MoE-LoRA adapter on its base or a native transformers MoE: its backbone and config,
its routers and their sizes, and the router logits of its forward passes.

No other module knows where router logits come from. Legend: B rows, S positions, T = B·S tokens, n experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import nn

from ..adapter import router_outputs, router_recorder
from ..adapter.base_model import recorded_routers
from ..adapter.layers import MoELoraLayer
from ..routing.gates import pad_logits
from ..routing.statistics import chosen_experts
from ..utils.distributed import shape_of
from ..utils.validation import check, is_a
from .routed_gate import RoutedGate


def base_model(model: Any) -> Any:
    """The transformers model inside a `PeftModel`; any other model is returned as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone(model: Any) -> Any:
    """The transformers model without its head."""
    return base_model(model).base_model


def _decoder(model: Any) -> Any:
    """What a causal LM calls, if that is not its backbone; else its backbone."""
    base = base_model(model)
    found = base.get_decoder() if hasattr(base, "get_decoder") else None
    return backbone(model) if found is None or found is base else found


def text_config(model: Any) -> Any:
    """The config of the language part, which has the MoE's fields (`num_experts_per_tok`, …)."""
    return router_outputs.text_config(base_model(model))


@dataclass(frozen=True)
class RoutedPass:
    """
    One forward pass of a backbone.

    Args:
        router_logits: one [T, n] per router, in the order of `router_sizes`, whatever the order in which they ran.
        chosen: the experts that served each token, bool [T, n] per router. Slots with a gate of 0 are left out, and
            forced or masked routing is seen as it happened.
        mask: 1 for real tokens, [B, S]; longer than S if the pass continues a cache, whose tokens come first.
        input_ids: the tokens [B, S], if they were passed by keyword.
        trains: whether gradients were enabled.
    """

    router_logits: tuple[torch.Tensor, ...]
    chosen: tuple[torch.Tensor, ...]
    mask: torch.Tensor
    input_ids: torch.Tensor | None
    trains: bool


@contextmanager
def observed_routing(model: Any, observe: Callable[[RoutedPass], None]) -> Iterator[None]:
    """
    Call `observe` after each forward pass of the model's backbone inside the block. Outputs, losses and configs do not
    change. Passes in which no router ran (adapters may be disabled) are skipped.
    """
    module, observer = backbone(model), _Observer(observe, int(getattr(text_config(model), "num_experts_per_tok", 1)))
    handles = [
        # First, so that the adapter's own hook finds the argument.
        module.register_forward_pre_hook(observer.begin, with_kwargs=True, prepend=True),
        module.register_forward_hook(observer.end, with_kwargs=True, always_call=True),
    ]
    if not adapter_layers(model):
        handles += [router.register_forward_hook(observer.see) for router in native_routers(model)]
    elif (decoder := _decoder(model)) is not module:
        handles += [
            decoder.register_forward_pre_hook(observer.begin_part),
            decoder.register_forward_hook(observer.end_part, with_kwargs=True, always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Observer:
    """
    The hooks of one observer.

    Args:
        observe: called with each pass.
        k: experts per token, where a router's choice cannot be seen (in a compiled model).
    """

    def __init__(self, observe: Callable[[RoutedPass], None], k: int) -> None:
        self.observe, self.k = observe, k
        # Of native routers; None outside the backbone's forward.
        self.choices: list[router_recorder.Choice] | None = None
        self.routers: list[nn.Module] = []  # which made them
        self.order: list[nn.Module] = []  # of the model's active routers
        self.part: tuple[router_recorder.Collection, int] | None = None  # and the logits that it had before

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Before the backbone."""
        self.choices, self.routers = [], []
        return args, {**kwargs, "output_router_logits": True}

    def see(self, router: nn.Module, args: tuple, output: Any) -> None:
        """After a native router, which returns (logits, gates, experts); in the forward pass only, not if run again."""
        if self.choices is not None and isinstance(output, tuple) and len(output) == 3:
            _, gates, experts = output
            self.choices.append((experts, gates.detach()))
            self.routers.append(getattr(router, "moe_router", router))

    @torch.compiler.disable
    def end(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        """After the backbone."""
        choices, self.choices = self.choices or [], None
        router_logits = getattr(outputs, "router_logits", None)
        if not router_logits:
            return
        choices = getattr(outputs, router_outputs.CHOICES, choices)
        self._tell(
            module,
            args,
            kwargs,
            outputs,
            router_logits,
            choices,
            getattr(outputs, router_outputs.ROUTERS, self.routers),
        )

    @torch.compiler.disable
    def begin_part(self, module: nn.Module, args: tuple) -> None:
        """Before the decoder of a causal LM that does not call its backbone as a whole (OPT)."""
        collection = router_recorder.state.collection
        if self.choices is None and collection is not None:
            collection.enabled = True
            self.part = collection, len(collection.logits)

    @torch.compiler.disable
    def end_part(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        """After it."""
        part, self.part = self.part, None
        if part is None or outputs is None:  # the forward raised
            return
        collection, start = part
        logits = collection.logits[start:]
        if logits:
            n = max(of_router.shape[-1] for of_router in logits)
            padded = [pad_logits(of_router, n) for of_router in logits]
            self._tell(module, args, kwargs, outputs, padded, collection.choices[start:], collection.routers[start:])

    def _tell(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any,
        router_logits: Sequence[torch.Tensor], choices: Sequence[router_recorder.Choice], routers: Sequence[nn.Module],
    ) -> None:  # fmt: skip
        mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids", next(iter(args), None))
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:  # packed, padding-free, or no padding
            mask = torch.ones(outputs[0].shape[:2], dtype=torch.long, device=router_logits[0].device)
        chosen = tuple(_chosen(router_logits, choices, self.k))
        order = self._in_order(module, routers)
        if len(order) == len(router_logits):
            router_logits, chosen = (tuple(of[i] for i in order) for of in (router_logits, chosen))
        self.observe(RoutedPass(tuple(router_logits), chosen, mask, ids, torch.is_grad_enabled()))

    def _in_order(self, module: nn.Module, ran: Sequence[nn.Module]) -> Sequence[int]:
        """Where the model's routers are among those that ran; nothing if others ran, or one more than once."""
        if len(ran) == len(self.order) and all(a is b for a, b in zip(ran, self.order, strict=True)):
            return range(len(ran))
        place = {router: i for i, router in enumerate(ran)}
        if place.keys() != set(self.order):
            self.order = active_routers(module)
        return [place[router] for router in self.order] if place.keys() == set(self.order) else []


def _chosen(
    router_logits: Sequence[torch.Tensor], choices: Sequence[router_recorder.Choice], k: int
) -> Iterator[torch.Tensor]:
    """Each router's choice as a mask, bool [T, n]; the top k where the choices were not seen."""
    if len(choices) != len(router_logits):
        choices = [(logits_TN.topk(k, dim=-1).indices, None) for logits_TN in router_logits]
    for logits_TN, (experts_TK, gates_TK) in zip(router_logits, choices, strict=True):
        if gates_TK is not None and gates_TK.shape != experts_TK.shape:  # of all experts, not of the slots
            gates_TK = None
        yield chosen_experts(experts_TK, gates_TK, logits_TN.shape[-1])


def native_routers(model: nn.Module) -> list[nn.Module]:
    """The router modules of a native transformers MoE, as its class declares them; none in a dense model."""
    found: dict[nn.Module, None] = {}
    idle: set[nn.Module] = set()  # copies that PEFT keeps beside the active module
    for module in model.modules():
        classes = recorded_routers(module)
        if classes:
            found.update((m, None) for m in module.modules() if isinstance(m, classes))
        if isinstance(module, ModulesToSaveWrapper):
            copies = {**module.modules_to_save, "": module.original_module}
            running = "" if module.disable_adapters or not module.active_adapters else module.active_adapters[0]
            idle.update(m for name, part in copies.items() if name != running for m in part.modules())
    return [router for router in found if router not in idle]


def adapter_layers(model: nn.Module) -> list[MoELoraLayer]:
    """The MoE-LoRA layers that have a router."""
    return [m for m in model.modules() if isinstance(m, MoELoraLayer) and m.moe_lora_router]


def router_sizes(model: nn.Module, caller: str) -> list[tuple[int, int]]:
    """
    (n, k) of every active router, in the order of a pass's router logits.

    Raises:
        ValueError: the model has no router, or its adapter is disabled; the message begins with `caller`.
    """
    check(caller, model=(model, is_a(nn.Module, remedy="give a model")))
    layers = adapter_layers(model)
    if layers and all(layer.disable_adapters for layer in layers):
        raise ValueError(f"{caller}: the model's adapter is disabled; call enable_adapter_layers() first")
    sizes = [(spec.num_experts, spec.top_k) for spec in (layer.moe_lora_spec[name] for layer, name in _active(model))]
    sizes = sizes or [gate_size(router) for router in native_routers(model)]
    if not sizes:
        raise ValueError(f"{caller}: {type(model).__name__} has no router; add a MoELoraConfig adapter, or use a MoE")
    return sizes


def active_routers(model: nn.Module) -> list[nn.Module]:
    """The routers that `router_sizes` counts, in its order: of this package, or a native MoE's gates."""
    own: list[nn.Module] = [layer.router(name) for layer, name in _active(model)]
    return own or [getattr(gate, "moe_router", gate) for gate in native_routers(model)]


def _active(model: nn.Module) -> Iterator[tuple[MoELoraLayer, str]]:
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
        raise ValueError(
            f"{type(gate).__name__}: a router without `weight` and `top_k`, whose size is not known; use a family such "
            "as Mixtral, Qwen-MoE or OLMoE"
        )
    return int(shape_of(weight)[0]), int(k)


def router_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The routers' parameters by name: those of the MoE-LoRA adapters, or else of the native MoE."""
    if adapter_layers(model):
        return {name: p for name, p in model.named_parameters() if ".moe_lora_router." in name}
    own = {id(p) for router in native_routers(model) for p in router.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) in own}
