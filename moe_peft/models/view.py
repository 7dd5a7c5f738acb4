"""The routed parts of a model, adapter or native MoE alike: layers, routers, sizes."""

from __future__ import annotations

from peft.utils import ModulesToSaveWrapper
from torch import nn

from ..adapter.layer import MoELoraLayer


def native_routers(model: nn.Module) -> list[nn.Module]:
    """The router modules of a native MoE of transformers, as its class declares them; none in a dense model."""
    found: dict[nn.Module, None] = {}
    idle: set[nn.Module] = set()  # what PEFT keeps beside the module that runs
    for module in model.modules():
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if recorder is not None:
            found.update((m, None) for m in module.modules() if isinstance(m, recorder.target_class))
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
    (n, k) of every router.

    Raises:
        ValueError: the model has none; `caller` is named in the message.
    """
    sizes = [
        (layer.moe_lora_spec[name].num_experts, layer.moe_lora_spec[name].top_k)
        for layer in adapter_layers(model)
        for name in layer.moe_lora_router
    ]
    sizes = sizes or [(int(r.weight.shape[0]), int(r.top_k)) for r in native_routers(model)]  # type: ignore[arg-type,index,union-attr]
    if not sizes:
        raise ValueError(f"{caller}: {type(model).__name__} has no router; add a MoELoraConfig adapter, or use a MoE")
    return sizes


def router_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The routers' parameters by name: of the MoE-LoRA adapters, else of the native MoE."""
    if adapter_layers(model):
        return {name: p for name, p in model.named_parameters() if ".moe_lora_router." in name}
    own = {id(p) for router in native_routers(model) for p in router.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) in own}
