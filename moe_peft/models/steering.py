"""Steers the routing of a MoE-LoRA adapter or a native transformers MoE from outside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from types import NoneType
from typing import Any, SupportsIndex

import torch
from torch import nn

from ..adapter.lora_conversion import averaged_linears
from ..adapter.router_recorder import Steered, arguments, state, steering_block
from ..routing.gates import AllowedExperts, ForcedExperts, ForcedOrBase, Steering, WeightedExperts
from ..utils.messages import InputError, choice_error
from ..utils.settings import FACTOR
from .introspection import backbone, expert_names
from .layer import AdapterLayer, routed_layers

Expert = int | str  # an index, or a name
ExpertsPerRow = torch.Tensor | Expert | Sequence[Expert | None] | None


@contextmanager
def force_experts(model: nn.Module, experts_B: ExpertsPerRow) -> Iterator[None]:
    """
    Send every row of a batch through one expert, with gate 1, in all MoE layers, inside the `with` block.

    Routers still run, and `router_logits` are recorded as usual. The model is steered in this thread only: other
    threads may run it with other experts, or without steering. With gradient checkpointing, run the backward pass
    inside the block too, because it runs the layers again.

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE.
        experts_B: the expert of all rows, an index or a name. Or the expert of each row, [B], or of each token, [B·S],
            if the batch has no rows (padding-free): a tensor of integers, or a list. For an adapter, None is the base:
            its rows get only the updates that serve every token, from shared experts and from averaged LoRAs on
            attention (`mix --attention mean`).

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
    layers = routed_layers(model, "force_experts")
    lowest = 0
    if not isinstance(experts_B, torch.Tensor):
        named = [None] if experts_B is None else _listed(experts_B, "force_experts")
        lowest = -1 if None in named and isinstance(layers[0], AdapterLayer) else 0
        indices = iter(expert_indices(model, [each for each in named if each is not None], "force_experts"))
        experts_B = torch.tensor([-1 if each is None else next(indices) for each in named], dtype=torch.long)
    if experts_B.dtype is torch.bool or experts_B.is_floating_point() or experts_B.is_complex():
        raise InputError(f"force_experts: a tensor {experts_B.dtype}; give integers")
    smallest = min(layer.num_experts for layer in layers)
    if experts_B.numel() and not lowest <= int(experts_B.min()) <= int(experts_B.max()) < smallest:
        raise InputError(f"force_experts: experts {experts_B.unique().tolist()}: every layer has 0 to {smallest - 1}")
    kind = ForcedOrBase if lowest < 0 else ForcedExperts
    with steered(model, kind(experts_B.long())):
        yield


@contextmanager
def allow_experts(model: nn.Module, allowed: torch.Tensor | Expert | Sequence[Expert]) -> Iterator[None]:
    """
    Restrict the choice of routers to some of the experts inside the `with` block, in training and in `generate`.

    The logits of the other experts count as minus infinity. `router_logits` are recorded without the mask. The model is
    steered in this thread only. With gradient checkpointing, run the backward pass inside the block too.

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE.
        allowed: the experts for all rows, indices or names. Or a mask for each row (for each token if the batch has no
            rows), bool [B, n].

    Raises:
        ValueError: the model has no router, the mask's n is not the model's, or fewer experts are allowed than a token
            gets (top_k; if a token gets all experts, any number is enough).

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
        allowed = expert_indices(model, allowed, "allow_experts")
        if not all(0 <= i < n for i in allowed):
            raise InputError(f"allow_experts: allowed={allowed}: the model has experts 0 to {n - 1}")
        mask = torch.zeros(1, n, dtype=torch.bool)
        mask[0, allowed] = True
        allowed = mask
    if allowed.dim() != 2 or allowed.shape[1] != n or allowed.dtype != torch.bool:
        raise InputError(f"allow_experts: a mask {allowed.dtype} {tuple(allowed.shape)}; give bool [rows, {n}]")
    allowed_B, k = allowed.sum(1), fewest_allowed(model)
    if (allowed_B < k).any():
        raise InputError(
            f"allow_experts: some row allows only {int(allowed_B.min())} of the experts; allow at least top_k={k}"
        )
    with steered(model, AllowedExperts(allowed)):
        yield


@contextmanager
def weigh_experts(
    model: nn.Module, weights: Mapping[Expert, float] | Sequence[Mapping[Expert, float]]
) -> Iterator[None]:
    """
    Set the factors of the experts' updates inside the `with` block, in all MoE layers: `W x + s Σ_i w_i B_i A_i x` on
    each projection with a router, as in PEFT's `add_weighted_adapter`, whatever the adapter's mixing.

    Args:
        model: a model with a MoE-LoRA adapter.
        weights: expert, an index or a name, → its factor, for all rows. Or one such mapping for each row of the batch.
            Experts not named have 0.

    Raises:
        ValueError: the model has no router, or no such expert.

    Example:

    ```python
    >>> from peft import get_peft_model
    >>> from transformers import AutoModelForCausalLM
    >>> from moe_peft import MoELoraConfig, weigh_experts
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> names = ["code", "law", "style"]
    >>> config = MoELoraConfig(
    ...     num_experts=3, expert_names=names, task_type="CAUSAL_LM"
    ... )
    >>> model = get_peft_model(base, config)
    >>> with weigh_experts(model, {"code": 0.7, "style": 0.3}):
    ...     outputs = model(**base.dummy_inputs)
    ```
    """
    n = common_size(model, "weigh_experts")
    by_row = [weights] if isinstance(weights, Mapping) else weights
    if not isinstance(by_row, Sequence) or not all(isinstance(of_row, Mapping) for of_row in by_row):
        raise InputError(
            f"weigh_experts: weights={weights!r}: give a mapping of experts to factors, or one for each row"
        )
    for of_row in by_row:
        for expert, weight in of_row.items():
            if weight not in FACTOR:
                raise InputError(f"weigh_experts: weights={{{expert!r}: {weight!r}}}: must be a number {FACTOR}")
    weights_BN = torch.zeros(len(by_row), n)
    for row_N, of_row in zip(weights_BN, by_row, strict=True):
        experts = expert_indices(model, [*of_row], "weigh_experts")
        row_N[experts] = torch.tensor([*of_row.values()], dtype=row_N.dtype)
    with steered(model, WeightedExperts(weights_BN)):
        yield


@contextmanager
def only_expert(model: Any, expert: Expert | None) -> Iterator[None]:
    """
    Turn the model into one adapter of its mixture, or into the base (except shared experts), inside the `with` block.
    Rows go through the expert as in `force_experts`. Averaged LoRAs have only this expert's part, or no part for the
    base.

    Args:
        model: a model with a MoE-LoRA adapter.
    """
    name, before = model.active_adapters[0], {}
    config = model.peft_config[name]
    part = slice(0, 0)
    if expert is not None:
        (index,) = expert_indices(model, expert, "only_expert")
        part = slice(index * config.r, (index + 1) * config.r)
    for layer in averaged_linears(model, name).values():
        B_1RO = layer.expert_parameters(name)[1]["weight"]
        before[B_1RO] = B_1RO.data
        B_1RO.data = torch.zeros_like(B_1RO)
        B_1RO.data[:, part] = config.num_updates * before[B_1RO][:, part]
    try:
        with force_experts(model, [expert]):
            yield
    finally:
        for B_1RO, data in before.items():
            B_1RO.data = data


def expert_indices(model: nn.Module, experts: Expert | Sequence[Expert], caller: str) -> list[int]:
    """Return experts as indices. A text is a name or, if there is no such name, an index."""
    indices = [*map(int, indices_of(experts, expert_names(model) or [], caller))]
    n = max(layer.num_experts for layer in routed_layers(model, caller))
    if wrong := [i for i in indices if not 0 <= i < n]:
        raise InputError(f"{caller}: experts {wrong}: the model has experts 0 to {n - 1}")
    return indices


def indices_of(experts: Expert | Sequence[Expert], names: Sequence[str], caller: str) -> list[int]:
    """Return experts as indices among `names`, which may be empty."""
    experts = _listed(experts, caller)
    experts = [int(e) if isinstance(e, str) and e not in names and e.isdecimal() else e for e in experts]
    for expert in experts:
        if isinstance(expert, str) and expert not in names:
            raise InputError(
                f"{caller}: {choice_error('experts', expert, names)}"
                if names
                else f"{caller}: experts={expert!r}: the model's experts have no names; give an index"
            )
    return [names.index(expert) if isinstance(expert, str) else expert for expert in experts]


def _listed(experts: Any, caller: str) -> list[Any]:
    """Return experts as a list. Each must be an index, a name or None."""
    experts = experts.tolist() if hasattr(experts, "tolist") else experts
    several = not isinstance(experts, (str, Mapping, Set, bytes)) and isinstance(experts, Iterable)
    listed = [*experts] if several else [experts]
    for expert in listed:
        if isinstance(expert, bool) or not isinstance(expert, (str, SupportsIndex, NoneType)):
            raise InputError(f"{caller}: experts={experts!r}: must be indices or names")
    return listed


def common_size(model: nn.Module, caller: str) -> int:
    """Return n, the number of experts of every router."""
    sizes = sorted({layer.num_experts for layer in routed_layers(model, caller)})
    if len(sizes) > 1:
        raise InputError(f"{caller}: layers have {sizes} experts; one mask needs the same number in all")
    return sizes[0]


def fewest_allowed(model: nn.Module) -> int:
    """
    Return the number of experts a mask must allow at least: top_k, or 1 if routers may leave experts out or top_k is n.
    """
    return max(layer.fewest_allowed for layer in routed_layers(model, "allow_experts"))


@contextmanager
def steered(model: nn.Module, steering: Steering) -> Iterator[None]:
    """Route by `steering` in all MoE layers, without checking it. Of nested blocks, the inner one counts."""
    layers = routed_layers(model)
    by_device: dict[torch.device, Steering] = {}
    blocks: Steered = {}
    for layer in layers:
        device = layer.device
        if device not in by_device:  # "meta": offloaded
            by_device[device] = steering if device.type == "meta" else steering.to(device)
        blocks[layer.module] = by_device[device]
    with ExitStack() as stack:
        check = partial(_check_rows, blocks, steering)
        stack.callback(backbone(model).register_forward_pre_hook(check, with_kwargs=True).remove)
        for layer in layers:
            stack.enter_context(layer.steerable())
        stack.enter_context(steering_block(blocks))
        yield


def _check_rows(blocks: Steered, steering: Steering, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """
    Raise if steering is for other rows than the batch's, in a forward pre-hook of a backbone (routers see only tokens).
    """
    if not any(mine is blocks for mine in state.current.steered):  # another thread's pass
        return
    rows = steering.rows
    call = arguments(module, args, kwargs)
    batch = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    if batch is not None and rows != batch.shape[0] * batch.shape[1] and (rows == 0 or batch.shape[0] % rows):
        raise InputError(
            f"steered routing: {rows} rows are steered, the batch has {batch.shape[0]} rows of {batch.shape[1]} "
            "tokens; give one for each row, or for each token"
        )
