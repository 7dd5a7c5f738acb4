"""
`RoutedLayer`, a router with its experts: of a MoE-LoRA adapter or of a native transformers MoE.

Only `routed_layers` asks which of the two a model is. Differences are methods here, and everything else is a loop over
layers. Legend: T tokens, n experts, k active experts, d hidden size.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from peft.utils import ModulesToSaveWrapper
from torch import nn

from ..adapter.base_model import recorded_routers
from ..adapter.experts import Experts
from ..adapter.layers import MoELoraFFN, MoELoraLayer
from ..adapter.router_recorder import steering_of
from ..routing.gates import top_k_gates
from ..routing.losses import Scope
from ..routing.routers import ROUTERS, LinearRouter, Router, RouterSettings
from ..utils.distributed import shape_of
from ..utils.expert_likeness import value_gram
from ..utils.messages import InputError
from ..utils.torch_contexts import double
from .routed_gate import RoutedGate, gate_rule, put_router, take_router

Updates = Sequence[tuple[torch.Tensor, torch.Tensor]]  # A [n, r, d] and B [n, out, r] of each projection of x

# --- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RoutedLayer:
    """
    A routed layer of a model.

    Args:
        path: the path of `module` in the model.
        module: the module with the router.
    """

    default_balancing: ClassVar[Scope]  # scope of the balancing loss, unless a user sets it
    compared: ClassVar[str]  # the parts of experts compared by their similarity
    trains_reentrant: ClassVar[bool]  # whether logits have gradients under reentrant gradient checkpointing

    path: str
    module: Any

    @property
    def router(self) -> Any:
        """Module that returns logits [T, n]: a `Router` of this package, or a family's gate."""
        raise NotImplementedError

    @property
    def num_experts(self) -> int:
        """Number of experts, n."""
        raise NotImplementedError

    @property
    def top_k(self) -> int:
        """Active experts per token, k."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Device of the routing."""
        return next(self.module.parameters()).device

    @property
    def learns_at_top_1(self) -> bool:
        """True if the router learns from the language loss with k = 1 (a gate divided by itself is 1)."""
        raise NotImplementedError

    @property
    def fewest_allowed(self) -> int:
        """Number of experts a mask must leave: k, or 1 if the router may leave experts out or all n are active."""
        free = getattr(self.router, "leaves_out", False) or self.top_k == self.num_experts
        return 1 if free else self.top_k

    def steerable(self) -> Any:
        """Make the layer ask `steering_of` how to route, inside the `with` block."""
        return nullcontext()

    def with_uniform_gates(self, mixing: Literal["output", "projection"] | None) -> Any:
        """
        Set the gates of all experts to 1/n inside the `with` block.

        Args:
            mixing: mixing of an adapter inside the block; None: unchanged.
        """
        raise NotImplementedError

    def fold(self) -> torch.Tensor:
        """Return the weight [n, d] of the linear gate with the same routing."""
        raise NotImplementedError

    def grams(self) -> list[torch.Tensor]:
        """
        Return products between the layer's experts [n, n], one for each of their projections: products of their updates
        s B A. For bottlenecks and in a native MoE, return products of their weights.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class AdapterLayer(RoutedLayer):
    """A layer of a MoE-LoRA adapter: a tuner layer and the adapter's name."""

    default_balancing = "layer"
    compared = "updates B A"
    trains_reentrant = True
    learns_at_top_1 = True

    module: MoELoraLayer
    adapter: str

    @property
    def experts(self) -> Experts:
        return self.module.moe_lora_spec[self.adapter]

    @property
    def router(self) -> Router:
        return self.module.router(self.adapter)

    @property
    def num_experts(self) -> int:
        return self.experts.num_experts

    @property
    def top_k(self) -> int:
        return self.experts.top_k

    @property
    def device(self) -> torch.device:
        return next(self.module.moe_lora_A[self.adapter].parameters()).device

    @contextmanager
    def with_uniform_gates(self, mixing: Literal["output", "projection"] | None) -> Iterator[None]:
        experts, router = self.experts, self.router
        n = experts.num_updates  # the base expert has no update
        self.module.moe_lora_router[self.adapter] = _uniform(router, n).to(self.device)
        self.module.moe_lora_spec[self.adapter] = replace(
            experts, num_experts=n, base_expert=False, top_k=n, normalize_top_k=True, mixing=mixing or experts.mixing
        )
        try:
            yield
        finally:
            self.module.moe_lora_spec[self.adapter], self.module.moe_lora_router[self.adapter] = experts, router

    def fold(self) -> torch.Tensor:
        return self.router.fold(self.top_k, self.experts.normalize_top_k)

    def set_gate(self, weight_ND: torch.Tensor, router_type: str) -> bool:
        """
        Set the router's weight. A router of another kind than `router_type` is replaced, unless both are linear gates.
        Returns whether it was replaced.
        """
        old, experts, device = self.router, self.experts, self.device
        fits = experts.router.type == router_type or (ROUTERS[router_type].linear_gate and old.linear_gate)
        if not fits:
            like = [*old.parameters()] or [*self.module.moe_lora_A[self.adapter].parameters()]
            trained = all(p.requires_grad for p in like)
            settings = RouterSettings(router_type, jitter_noise=experts.router.jitter_noise)
            self.module.moe_lora_spec[self.adapter] = replace(experts, router=settings)
            self.module.put_router(self.adapter)
            self.router.to(device).requires_grad_(trained).train(old.training)
        cast(LinearRouter, self.router).weight.data.copy_(weight_ND)
        return not fits

    def updates(self) -> Updates:
        """
        Return the LoRAs of the projections of the layer's input, without their common scaling; empty for other experts.
        """
        experts, (A_all, B_all) = self.experts, self.module.expert_parameters(self.adapter)
        if experts.no_lora:
            return ()
        names = self.module.layout.inputs if isinstance(self.module, MoELoraFFN) else ("weight",)
        pairs = []
        for name in (name for name in names if name in A_all):
            loras = [experts.to_lora(A_all[name], B_all[name], i) for i in range(experts.num_updates)]
            pairs.append((torch.stack([A for A, _ in loras]), torch.stack([B for _, B in loras])))
        return pairs

    def grams(self) -> list[torch.Tensor]:
        A_all, B_all = self.module.expert_parameters(self.adapter)
        grams = [self.experts.gram(A, B_all[projection]) for projection, A in A_all.items()]
        return [F.pad(gram_NN, (0, self.experts.base_expert) * 2) for gram_NN in grams]  # the base has no update


@dataclass(frozen=True, eq=False)
class NativeLayer(RoutedLayer):
    """
    A layer of a native MoE: a gate, perhaps with a router of this package inside (`RoutedGate`).

    Args:
        block: the module around the gate, with the experts too.
        logits_index: index of the logits in the gate's output.
    """

    default_balancing = "global"  # as transformers does
    compared = "weights"
    trains_reentrant = False

    block: nn.Module
    logits_index: int

    @property
    def router(self) -> Any:
        return getattr(self.module, "moe_router", self.module)

    @property
    def num_experts(self) -> int:
        return self._size[0]

    @property
    def top_k(self) -> int:
        return self._size[1]

    @property
    def _size(self) -> tuple[int, int]:
        gate = self.module
        if isinstance(gate, RoutedGate):
            return int(gate.num_experts), int(gate.top_k)
        weight, k = getattr(gate, "weight", None), getattr(gate, "top_k", None)
        if not isinstance(weight, torch.Tensor) or k is None:
            raise InputError(
                f"{type(gate).__name__}: the size of a router without `weight` and `top_k` is unknown; use a family "
                "such as Mixtral, Qwen-MoE or OLMoE"
            )
        return int(shape_of(weight)[0]), int(k)

    @property
    def learns_at_top_1(self) -> bool:  # type: ignore[override]
        return isinstance(self.module, RoutedGate) or not getattr(self.module, "norm_topk_prob", True)

    @contextmanager
    def steerable(self) -> Iterator[None]:
        gate = self.module
        setting = getattr(gate, "norm_topk_prob", None)
        known = gate in _rules and _rules[gate][0] == setting
        if not known and not isinstance(gate, RoutedGate) and _is_whole(getattr(gate, "weight", None)):
            _rules[gate] = setting, gate_rule(gate, linear=False)  # not for a weight sharded over processes
        # Prepend the hook, so observers of the router see the new choice. All blocks and threads share one hook.
        with _lock:
            blocks, hook = _hooks.get(gate) or (0, gate.register_forward_hook(_choose_again, prepend=True))
            _hooks[gate] = blocks + 1, hook
        try:
            yield
        finally:
            with _lock:
                blocks, hook = _hooks.pop(gate)
                if blocks > 1:
                    _hooks[gate] = blocks - 1, hook
                else:
                    hook.remove()

    @contextmanager
    def with_uniform_gates(self, mixing: Literal["output", "projection"] | None) -> Iterator[None]:
        gate, top_k, n = self.module, self.top_k, self.num_experts
        if isinstance(gate, RoutedGate):
            router, normalizes = gate.moe_router, gate.normalizes
            gate.moe_router, gate.top_k, gate.normalizes = _uniform(router, n).to(self._like), n, True
            try:
                yield
            finally:
                gate.moe_router, gate.top_k, gate.normalizes = router, top_k, normalizes
            return
        weight = gate.weight.data
        gate.weight.data, gate.top_k = torch.zeros_like(weight), n
        try:
            yield
        finally:
            gate.weight.data, gate.top_k = weight, top_k

    def fold(self) -> torch.Tensor:
        return self.module.fold() if isinstance(self.module, RoutedGate) else double(self.module.weight.detach())

    def put_router(self, router: Router, top_k: int, normalizes: bool) -> None:
        """Put a router of this package into the gate. A frozen gate's router is frozen."""
        put_router(self.module, router, top_k, normalizes, self._like)

    def set_gate(self, weight_ND: torch.Tensor) -> None:
        """Restore the family's own gate, with this weight."""
        if isinstance(self.module, RoutedGate):
            take_router(self.module, weight_ND, self._like)

    @property
    def device(self) -> torch.device:
        return self._like.device  # there are routers without parameters

    @property
    def _like(self) -> torch.Tensor:
        """Floating tensor of the gate, or of the block around a gate without such tensors."""
        tensors = (p for part in (self.module, self.block) for p in part.parameters() if p.is_floating_point())
        return next(tensors).detach()

    def expert_modules(self) -> list[nn.Module]:
        """Return the gate's sibling modules that hold the n experts."""
        return [
            child
            for child in self.block.children()
            if child is not self.module
            and ((isinstance(child, nn.ModuleList) and len(child) == self.num_experts) or self._stacked(child))
        ]

    def grams(self) -> list[torch.Tensor]:
        return [value_gram(p.flatten(1)) for experts in self.expert_modules() for p in self._stacked(experts)]

    def _stacked(self, experts: nn.Module) -> list[nn.Parameter]:
        """Return the matrices of n experts, [n, …, …] each."""
        return [p for p in experts.parameters() if p.dim() == 3 and p.shape[0] == self.num_experts]


def _uniform(router: Router, n: int) -> LinearRouter:
    """Return a replacement for `router` with gates 1/n, a softmax over n experts."""
    uniform = LinearRouter(router.hidden_size, n).requires_grad_(False)
    uniform.weight.zero_()
    return uniform


# --- a model's layers ------------------------------------------------------------------------------------------------


def routed_layers(model: nn.Module, caller: str | None = None) -> list[RoutedLayer]:
    """
    Return the routed layers of a model in the model's order: the layers of its active MoE-LoRA adapters (not, say, a
    DPO trainer's reference copy), or else a native MoE's.

    Args:
        caller: name of a function that needs at least one layer, for messages. None: return an empty list if there is
            none.
    """
    layers: list[RoutedLayer] = [
        AdapterLayer(path, module, name)
        for path, module in model.named_modules()
        if isinstance(module, MoELoraLayer)
        for name in module.active_adapters
        if name in module.moe_lora_router
    ]
    if caller and layers and all(layer.module.disable_adapters for layer in layers):
        raise InputError(f"{caller}: the model's adapter is disabled; call enable_adapter_layers() first")
    layers = layers or [*native_layers(model)]
    if caller and not layers and any(isinstance(m, MoELoraLayer) and m.active_adapters for m in model.modules()):
        raise InputError(
            f"{caller}: num_experts=1: a single expert is always active and has no router; give at least 2, or train "
            "it as a LoRA, with trl sft"
        )
    if caller and not layers:
        raise InputError(f"{caller}: {type(model).__name__} has no router; add a MoELoraConfig adapter, or use a MoE")
    return layers


def router_names(model: nn.Module) -> list[str]:
    """Return the modules of a model's routed layers, e.g. "model.layers.0.mlp"."""
    return [layer.path.removeprefix("base_model.model.") for layer in routed_layers(model)]


def adapter_layers(model: nn.Module, adapter_name: str | None, caller: str) -> list[AdapterLayer]:
    """
    Return the routed layers of one adapter, active or not.

    Args:
        adapter_name: name of the adapter; None: the active one.
        caller: name of the calling function, for messages.
    """
    layers = [
        AdapterLayer(path, module, name)
        for path, module in model.named_modules()
        if isinstance(module, MoELoraLayer)
        for name in module.moe_lora_router
    ]
    names = {layer.adapter for layer in layers}
    if adapter_name is None:
        adapter_name = next((name for layer in layers for name in layer.module.active_adapters if name in names), None)
    if adapter_name not in names:
        raise InputError(
            f"{caller}: adapter_name={adapter_name!r}: no such adapter with routers; there is {sorted(names)}"
        )
    return [layer for layer in layers if layer.adapter == adapter_name]


def native_layers(model: nn.Module, caller: str | None = None) -> list[NativeLayer]:
    """
    Return the routed layers of a native MoE; none for a dense model.

    Args:
        caller: name of a function that needs at least one layer, for messages. None: return an empty list if there is
            none.
    """
    layers = [*_native_layers(model)]
    if caller and not layers:
        raise InputError(f"{caller}: {type(model).__name__} has no router; give a native MoE of transformers")
    return layers


def router_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model's routers by name."""
    ids = {id(p) for layer in routed_layers(model) for p in layer.router.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) in ids}


def idle_copies(wrapper: ModulesToSaveWrapper) -> list[nn.Module]:
    """Return the modules kept by PEFT's wrapper, except the one run by the wrapper's forward."""
    saved, active = wrapper.modules_to_save, wrapper.active_adapters
    adapted = bool(active) and not wrapper.disable_adapters and all(name in saved for name in active)
    running = saved[active[0]] if adapted else wrapper.original_module
    return [module for module in (wrapper.original_module, *saved.values()) if module is not running]


def _native_layers(model: nn.Module) -> Iterator[NativeLayer]:
    """Yield the layers with routers declared by the model's class; none in a dense model."""
    gates: dict[nn.Module, int] = {}
    idle: set[nn.Module] = set()
    for module in model.modules():
        if indices := recorded_routers(module):
            for part in module.modules():
                for kind in (kind for kind in indices if isinstance(part, kind)):
                    gates.setdefault(part, indices[kind])
        if isinstance(module, ModulesToSaveWrapper):
            idle.update(part for copy in idle_copies(module) for part in copy.modules())
    for path, gate in model.named_modules():
        if gate in gates and gate not in idle:
            yield NativeLayer(path, gate, model.get_submodule(path.rpartition(".")[0]), gates[gate])


# --- steering of transformers' gates ----------------------------------------------------------------------------------


# Gate → (its `norm_topk_prob`, whether it divides the gates of the chosen experts by their sum, found by running it).
_rules: weakref.WeakKeyDictionary[nn.Module, tuple[bool | None, bool]] = weakref.WeakKeyDictionary()
_hooks: dict[nn.Module, tuple[int, Any]] = {}  # gate → (number of blocks that steer it, its hook)
_lock = threading.Lock()


def _is_whole(weight: Any) -> bool:
    return type(getattr(weight, "data", None)) is torch.Tensor and not weight.is_meta and weight.numel() > 0


def _choose_again(gate: Any, args: tuple, output: tuple) -> tuple | None:
    """Replace the choice of a transformers router, which returns (logits, gates, experts), in a forward hook."""
    steering = steering_of(gate)
    if steering is None:  # another thread steers it
        return None
    logits_TN, gates_TK, _ = output
    if isinstance(gate, RoutedGate):
        choose, normalizes = gate.moe_router.choose, gate.normalizes
    else:
        setting = bool(getattr(gate, "norm_topk_prob", True))  # Mixtral always normalizes
        choose, normalizes = top_k_gates, _rules[gate][1] if gate in _rules else setting
    gates, experts = steering.route(logits_TN.float(), gate.top_k, normalizes, choose)
    return logits_TN, gates.to(gates_TK.dtype), experts
