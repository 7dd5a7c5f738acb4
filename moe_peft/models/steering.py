"""Steers the routing of a MoE-LoRA adapter or a native transformers MoE from outside."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..adapter.router_recorder import arguments
from ..routing.gates import Steering, top_k_gates
from ..utils.messages import InputError
from .introspection import active_routers, adapter_layers, backbone, native_routers, router_sizes
from .routed_gate import RoutedGate


@contextmanager
def force_experts(model: nn.Module, experts_B: torch.Tensor) -> Iterator[None]:
    """
    A context manager: inside the block, every row of a batch goes through one expert, with gate 1, in all MoE layers.

    Routers still run, and `router_logits` are recorded as usual. With gradient checkpointing, run the backward pass
    inside the block too, because it runs the layers again.

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE.
        experts_B: the expert of each row, integers [B]; or of each token, [B·S], if the batch has no rows
            (padding-free).

    Raises:
        ValueError: the model has no router, or fewer experts than `experts_B` asks for.

    Example:

    ```python
    >>> import torch
    >>> from peft import get_peft_model
    >>> from transformers import AutoModelForCausalLM
    >>> from moe_peft import MoELoraConfig, force_experts
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> model = get_peft_model(base, MoELoraConfig(task_type="CAUSAL_LM"))
    >>> inputs = base.dummy_inputs["input_ids"]
    >>> with force_experts(model, torch.zeros(len(inputs), dtype=torch.long)):
    ...     outputs = model(inputs)
    ```
    """
    smallest = min(n for n, _ in router_sizes(model, "force_experts"))
    if experts_B.numel() and not 0 <= int(experts_B.min()) <= int(experts_B.max()) < smallest:
        raise InputError(f"force_experts: experts {experts_B.unique().tolist()}: every layer has 0 to {smallest - 1}")
    with steered(model, Steering(experts=experts_B.long())):
        yield


@contextmanager
def allow_experts(model: nn.Module, allowed: torch.Tensor | Sequence[int]) -> Iterator[None]:
    """
    A context manager: inside the block, routers choose among some of the experts only, in training and in `generate`.

    The logits of the other experts count as minus infinity; `router_logits` are recorded without the mask. With
    gradient checkpointing, run the backward pass inside the block too.

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE.
        allowed: a list of experts for all rows; or a mask for each row (for each token if the batch has no rows), bool
            [B, n].

    Raises:
        ValueError: the model has no router, the mask's n is not the model's, or fewer experts are allowed than a token
            gets (top_k; any number serves where a token gets all).

    Example:

    ```python
    >>> from peft import get_peft_model
    >>> from transformers import AutoModelForCausalLM
    >>> from moe_peft import MoELoraConfig, allow_experts
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> model = get_peft_model(base, MoELoraConfig(task_type="CAUSAL_LM"))
    >>> with allow_experts(model, [0, 1, 2]):
    ...     outputs = model(**base.dummy_inputs)
    ```
    """
    n = common_size(model, "allow_experts")
    if not isinstance(allowed, torch.Tensor):
        if not all(0 <= i < n for i in allowed):
            raise InputError(f"allow_experts: allowed={list(allowed)}: the model has experts 0 to {n - 1}")
        mask = torch.zeros(1, n, dtype=torch.bool)
        mask[0, list(allowed)] = True
        allowed = mask
    if allowed.dim() != 2 or allowed.shape[1] != n or allowed.dtype != torch.bool:
        raise InputError(f"allow_experts: a mask {allowed.dtype} {tuple(allowed.shape)}; give bool [rows, {n}]")
    allowed_B, k = allowed.sum(1), fewest_allowed(model)
    if (allowed_B < k).any():
        raise InputError(
            f"allow_experts: some row allows only {int(allowed_B.min())} of the experts; allow at least top_k={k}"
        )
    with steered(model, Steering(allowed=allowed)):
        yield


def common_size(model: nn.Module, caller: str) -> int:
    """
    n, the number of experts that all routers have.

    Raises:
        ValueError: the model has no router, or layers with different numbers of experts.
    """
    sizes = sorted({n for n, _ in router_sizes(model, caller)})
    if len(sizes) > 1:
        raise InputError(f"{caller}: layers have {sizes} experts; one mask needs the same number in all")
    return sizes[0]


def fewest_allowed(model: nn.Module) -> int:
    """
    How many experts a mask must allow at least: top_k, or 1 where every router may leave experts out, or where top_k is
    n, so that the gates of the others are 0.
    """
    routers = [getattr(router, "moe_router", router) for router in active_routers(model)]
    if routers and all(getattr(router, "leaves_out", False) for router in routers):
        return 1
    return max((k for n, k in router_sizes(model, "allow_experts") if k < n), default=1)


@contextmanager
def steered(model: nn.Module, steering: Steering) -> Iterator[None]:
    """
    Route by `steering` in all MoE layers, without checks of it. Of nested blocks the inner one counts.

    Raises:
        ValueError: a native MoE's router chooses by another rule.
    """
    layers = adapter_layers(model)
    steered_modules: list[Any] = [*layers] or native_routers(model)
    before = [getattr(module, "steering", None) for module in steered_modules]
    for router in () if layers else steered_modules:
        _check_rule(router)
    with ExitStack() as stack:
        check = partial(_check_rows, steering)
        stack.callback(backbone(model).register_forward_pre_hook(check, with_kwargs=True).remove)
        for module, outer in zip(steered_modules, before, strict=True):
            if not layers and outer is None:  # else the hook of the block around this one reads the steering
                # First, so that whoever observes the router sees the new choice.
                stack.callback(module.register_forward_hook(_choose_again, prepend=True).remove)
            stack.callback(setattr, module, "steering", outer)
            module.steering = steering
        yield


def _check_rows(steering: Steering, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a backbone: raise if steering is for other rows than the batch's (routers see tokens)."""
    rows = len(steering.experts if steering.experts is not None else steering.allowed)  # type: ignore[arg-type]
    call = arguments(module, args, kwargs)
    batch = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    if batch is not None and rows != batch.shape[0] * batch.shape[1] and (rows == 0 or batch.shape[0] % rows):
        raise InputError(
            f"steered routing: {rows} rows are steered, the batch has {batch.shape[0]} rows of {batch.shape[1]} "
            "tokens; give one for each row, or for each token"
        )


def _choose_again(router: Any, args: tuple, output: tuple) -> tuple:
    """Forward hook that replaces the choice of a transformers router, which returns (logits, gates, experts)."""
    logits_TN, gates_TK, _ = output
    gates, experts = _choice(router, logits_TN, router.steering)
    return logits_TN, gates.to(gates_TK.dtype), experts


def _choice(router: Any, logits_TN: torch.Tensor, steering: Steering) -> tuple[torch.Tensor, torch.Tensor]:
    normalize = bool(getattr(router, "norm_topk_prob", True))  # Mixtral always does
    choose = router.moe_router.choose if isinstance(router, RoutedGate) else top_k_gates
    return steering.route(logits_TN.float(), router.top_k, normalize, choose)


_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@torch.no_grad()
def _check_rule(router: Any) -> None:
    """
    Raises:
        ValueError: without a restriction, choosing again would change what a native router chooses.
    """
    weight: Any = getattr(router, "weight", None)
    checked = isinstance(router, RoutedGate) or router in _checked
    if checked or type(getattr(weight, "data", None)) is not torch.Tensor or weight.is_meta or not weight.numel():
        return  # of several processes, each has a part
    x_TD = torch.randn(32, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        logits_TN, gates_TK, experts_TK = type(router).forward(router, x_TD)
        everything = torch.ones(1, logits_TN.shape[1], dtype=torch.bool)
        choices = ((gates_TK, experts_TK), _choice(router, logits_TN, Steering(allowed=everything)))
        actual_TN, expected_TN = (
            torch.zeros_like(logits_TN, dtype=torch.float32).scatter(1, experts, gates.float())
            for gates, experts in choices
        )
        exact = torch.allclose(actual_TN, expected_TN, rtol=0, atol=8 * torch.finfo(gates_TK.dtype).eps)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # other arguments, or other outputs
        exact = False
    if not exact:
        raise InputError(
            f"{type(router).__name__} does not choose by a softmax over its logits and the top k alone, so its choice "
            "cannot be recomputed; use a family such as Mixtral, Qwen-MoE or OLMoE"
        )
    _checked.add(router)
