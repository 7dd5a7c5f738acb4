"""
Balancing without a loss (Wang et al., 2024, arXiv 2408.15664, algorithm 1). Routers choose experts by biased scores
(`router_bias_update_rate`). After each optimizer step, the biases are updated.

Legend: T tokens, n experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed, nn
from transformers import TrainerCallback

from ..models.introspection import RoutedPass, observed_routing
from ..models.layer import routed_layers
from ..utils.messages import InputError


def has_biases(model: nn.Module) -> bool:
    """Return whether an active router chooses experts by biased scores."""
    return any(getattr(layer.router, "expert_bias", None) is not None for layer in routed_layers(model))


@contextmanager
def router_bias_updates(model: nn.Module) -> Iterator[Callable[..., None]]:
    """
    Count each expert's tokens inside the block, and yield a function that updates the routers' biases. For custom
    training loops.

    Only forward passes with gradients count, without padding. Call the function after each optimizer step. It raises an
    expert's bias by `router_bias_update_rate` if the expert got fewer tokens than the mean of its layer, and lowers the
    bias if it got more. The counts are over all passes and processes since the last call.

    Called with `remaining=r`, the function moves the biases towards 0 instead. They reach 0 after r such calls, with
    r, r - 1, …, 1. Then the routers fold, and the adapter can be exported.

    Args:
        model: a model with a MoE-LoRA adapter.

    Raises:
        ValueError: no active router has biases.
    """
    if not has_biases(model):
        raise InputError("router_bias_updates: no router has biases; set router_bias_update_rate in MoELoraConfig")
    routers = [layer.router for layer in routed_layers(model)]
    sizes = [router.num_experts for router in routers]
    counts: torch.Tensor | None = None  # all layers' experts, concatenated

    def count(seen: RoutedPass) -> None:
        nonlocal counts
        if seen.trains:
            first = seen.mask.device
            real_T1 = seen.mask[:, -(len(seen.chosen[0]) // len(seen.mask)) :].reshape(-1, 1).bool()
            of_pass = [
                (real_T1 & chosen_TN[:, :n].to(first)).sum(0) for chosen_TN, n in zip(seen.chosen, sizes, strict=True)
            ]
            counts = torch.cat(of_pass) + (0 if counts is None else counts)

    @torch.no_grad()
    def update(remaining: int | None = None) -> None:
        nonlocal counts
        if remaining is None and counts is not None:
            if distributed.is_available() and distributed.is_initialized():
                distributed.all_reduce(counts)
            for router, count_N in zip(routers, counts.split(sizes), strict=True):
                if router.expert_bias is not None:
                    above_N = count_N.sum() - len(count_N) * count_N  # n times (mean - count); exact in integers
                    router.bias_steps.add_(above_N.sign().to(router.bias_steps))
        elif remaining is not None:
            for steps_N in (router.bias_steps for router in routers if router.expert_bias is not None):
                steps_N.copy_(torch.div(steps_N * (remaining - 1), remaining, rounding_mode="trunc"))
        counts = None

    with observed_routing(model, count):
        yield update


class RouterBiasCallback(TrainerCallback):
    """
    Runs `router_bias_updates` in any `Trainer`. This package's trainers add it themselves if routers have biases.

    Args:
        anneal: share of the training, at its end, for the biases to go to 0, so that the result can be exported.

    Raises:
        ValueError: when training begins: no router has biases.

    Example:

    ```python
    >>> from moe_peft import RouterBiasCallback
    >>> callback = RouterBiasCallback(anneal=0.1)  # for a trainer's `callbacks`
    ```
    """

    def __init__(self, anneal: float = 0.0) -> None:
        self.anneal, self._counting = anneal, ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._counting.close()  # from a training that ended with an error
        self._update = self._counting.enter_context(router_bias_updates(model))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        remaining = state.max_steps - state.global_step  # including this step
        self._update(remaining if remaining <= self.anneal * state.max_steps else None)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counting.close()
