"""
Pure functions from router logits to gates and chosen experts.

Legend: T tokens, n experts, k active experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F

# Takes logits [T, n], k and whether to normalize; returns gates and experts, each [T, k].
Choose = Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]


def top_k_gates(
    logits_TN: torch.Tensor, k: int, normalize: bool = True, bias_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the k experts with the largest logits and their gates, as in Mixtral: softmax over all experts, keep k,
    divide by their sum (equal to the softmax over the k logits alone).

    A single gate divided by itself is 1 and has no gradient, so its router would learn only from the balancing loss.
    With k = 1, the gate is `1 + p - stop_gradient(p)`: 1, with the gradient of the probability.

    Args:
        logits_TN: router logits, float32 [T, n].
        k: experts per token.
        normalize: whether the k gates sum to 1; otherwise they are the probabilities among all n experts.
        bias_N: added to the probabilities to choose the k experts, [n]. Gates are computed without it (Wang et al.,
            2024, equation 3).

    Returns:
        gates [T, k] (differentiable) and expert indices, int64 [T, k], the best first.
    """
    check_top_k(logits_TN, k)
    if bias_N is not None:
        experts_TK = _biased_choice(logits_TN, logits_TN.softmax(-1), bias_N, k)
        if normalize and k > 1:
            return logits_TN.gather(-1, experts_TK).softmax(-1), experts_TK
        probabilities_TK = logits_TN.softmax(-1).gather(-1, experts_TK)
        return (_normalized(probabilities_TK) if normalize else probabilities_TK), experts_TK
    if not normalize or k == 1:
        probabilities_TK, experts_TK = _top_probabilities(logits_TN, k)
        return (_normalized(probabilities_TK) if normalize else probabilities_TK), experts_TK
    top_logits_TK, experts_TK = logits_TN.topk(k, dim=-1)
    return top_logits_TK.softmax(dim=-1), experts_TK


def _top_probabilities(logits_TN: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the probabilities of the k experts with the largest logits, and the experts, [T, k]. Probabilities may tie at
    0 where logits do not.
    """
    experts_TK = logits_TN.topk(k, dim=-1).indices
    # Not exp(l - logsumexp): for large logits, the difference is rounded to their precision.
    return logits_TN.softmax(-1).gather(-1, experts_TK), experts_TK


def _biased_choice(logits_TN: torch.Tensor, scores_TN: torch.Tensor, bias_N: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k experts with the largest biased scores, [T, k], without experts masked in the logits."""
    bias_N = bias_N.to(scores_TN.device)  # logits of all layers may have been moved to one device
    return (scores_TN + bias_N).masked_fill(logits_TN.isneginf(), -torch.inf).topk(k, dim=-1).indices


def _normalized(gates_TK: torch.Tensor) -> torch.Tensor:
    """Divide gates by their sum. A single gate becomes exactly 1, straight-through, with its own gradient."""
    if gates_TK.shape[1] == 1:
        return 1 + (gates_TK - gates_TK.detach())
    return gates_TK / gates_TK.sum(-1, keepdim=True)


def check_top_k(logits_TN: torch.Tensor, k: int) -> None:
    """Check the number of experts per token."""
    n = logits_TN.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"top_k={k}: use 1 to the number of experts, {n}")


def switch_gates(logits_TN: torch.Tensor, capacity: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the best expert with its probability as gate (Fedus et al., 2021, equations 1 and 2).

    Args:
        logits_TN: router logits, float32 [T, n].
        capacity: number of tokens taken by an expert, in order. Further tokens get gate 0. None: no limit.

    Returns:
        gates and expert indices, each [T, 1].
    """
    gates_T1, experts_T1 = _top_probabilities(logits_TN, 1)
    if capacity is not None:
        position_TN = F.one_hot(experts_T1.squeeze(1), logits_TN.shape[1]).cumsum(0)  # among an expert's tokens, from 1
        gates_T1 = gates_T1 * (position_TN.gather(1, experts_T1) <= capacity)
    return gates_T1, experts_T1


def sigmoid_gates(
    logits_TN: torch.Tensor, k: int, normalize: bool = True, bias_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the k best experts with sigmoids of their logits as gates.

    Args:
        logits_TN: router logits, float32 [T, n].
        k: experts per token.
        normalize: whether the k gates are divided by their sum.
        bias_N: added to the sigmoids to choose the k experts, [n] (DeepSeek-V3, equation 16). Gates are computed
            without it.

    Returns:
        gates and expert indices, each [T, k].
    """
    check_top_k(logits_TN, k)
    top_logits_TK, experts_TK = logits_TN.topk(k, dim=-1)
    if bias_N is not None:
        experts_TK = _biased_choice(logits_TN, logits_TN.sigmoid(), bias_N, k)
        top_logits_TK = logits_TN.gather(-1, experts_TK)
    if normalize and k > 1:
        return F.logsigmoid(top_logits_TK).softmax(-1), experts_TK
    gates_TK = top_logits_TK.sigmoid()
    return (_normalized(gates_TK) if normalize else gates_TK), experts_TK


def top_p_gates(logits_TN: torch.Tensor, k: int, normalize: bool, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return gates and experts like `top_k_gates`, with gate 0 for the experts after probabilities sum to `p`.

    Args:
        logits_TN: router logits, float32 [T, n].
        k: the most experts per token.
        normalize: whether the gates are divided by their sum.
        p: the sum of probabilities to reach.

    Returns:
        gates and expert indices, each [T, k].
    """
    check_top_k(logits_TN, k)
    probabilities_TK, experts_TK = _top_probabilities(logits_TN, k)
    # In integers: their cumulative sums are deterministic on every device. A float32 is not finer.
    parts_TK = (probabilities_TK.detach() * 2**24).long()
    return _kept_gates(probabilities_TK, parts_TK.cumsum(-1) - parts_TK < p * 2**24, normalize), experts_TK


def threshold_gates(logits_TN: torch.Tensor, k: int, normalize: bool, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return gates and experts like `top_k_gates`, with gate 0 for experts with a probability below `p`, except the best
    one.

    Args:
        logits_TN: router logits, float32 [T, n].
        k: the most experts per token.
        normalize: whether the gates are divided by their sum.
        p: the smallest probability of a kept expert.

    Returns:
        gates and expert indices, each [T, k].
    """
    check_top_k(logits_TN, k)
    probabilities_TK, experts_TK = _top_probabilities(logits_TN, k)
    kept_TK = probabilities_TK >= p
    kept_TK[:, 0] = True
    return _kept_gates(probabilities_TK, kept_TK, normalize), experts_TK


def _kept_gates(probabilities_TK: torch.Tensor, kept_TK: torch.Tensor, normalize: bool) -> torch.Tensor:
    gates_TK = probabilities_TK * kept_TK
    return _normalized(gates_TK) if normalize else gates_TK


@dataclass(frozen=True)
class Steering:
    """
    Base class of routing set from outside.

    Args:
        by_row: a value for each row of a batch, or for each token, [B] or [B, n].
    """

    by_row: torch.Tensor

    has_base: ClassVar[bool] = False  # whether expert -1, the base, is among the experts
    mixes_outputs: ClassVar[bool] = True  # whether an adapter with mixing "output" keeps it

    @property
    def rows(self) -> int:
        """B, the number of steered rows."""
        return len(self.by_row)

    def to(self, device: torch.device) -> Self:
        """Return the same steering on a layer's device, so it is not copied in each forward pass."""
        return type(self)(self.by_row.to(device))

    def route(
        self, logits_TN: torch.Tensor, k: int, normalize: bool, choose: Choose = top_k_gates
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gates and experts in the form of `choose`, the rule without steering."""
        raise NotImplementedError


class ForcedExperts(Steering):
    """
    One expert for each row. k is 1, and the gates are 1.

    Args:
        by_row: the experts, integers [B].

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import ForcedExperts
    >>> gates, experts = ForcedExperts(torch.tensor([2])).route(
    ...     torch.randn(5, 4), 2, True
    ... )
    >>> experts.flatten().tolist()
    [2, 2, 2, 2, 2]
    ```
    """

    def route(
        self, logits_TN: torch.Tensor, k: int, normalize: bool, choose: Choose = top_k_gates
    ) -> tuple[torch.Tensor, torch.Tensor]:
        experts_T1 = _per_token(self.by_row, logits_TN).unsqueeze(1)
        # 1, but connected to the logits: under reentrant checkpointing, their gradient comes through the output. A
        # logit that is not finite would make it NaN.
        return logits_TN.gather(1, experts_T1.clamp(min=0)).nan_to_num() * 0 + 1, experts_T1


class ForcedOrBase(ForcedExperts):
    """
    One expert for each row, or -1: no expert. In an adapter, this is the base.

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import ForcedOrBase
    >>> gates, experts = ForcedOrBase(torch.tensor([-1])).route(
    ...     torch.randn(5, 4), 2, True
    ... )
    >>> experts.flatten().tolist()
    [-1, -1, -1, -1, -1]
    ```
    """

    has_base = True


class AllowedExperts(Steering):
    """
    The experts that may be chosen.

    Args:
        by_row: whether an expert is allowed, bool [B, n].

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import AllowedExperts
    >>> allowed = torch.tensor([[True, False, True, False]])
    >>> gates, experts = AllowedExperts(allowed).route(torch.randn(5, 4), 2, True)
    ```
    """

    def route(
        self, logits_TN: torch.Tensor, k: int, normalize: bool, choose: Choose = top_k_gates
    ) -> tuple[torch.Tensor, torch.Tensor]:
        forbidden_TN = _per_token(self.by_row, logits_TN).logical_not()
        return choose(logits_TN.masked_fill(forbidden_TN, -torch.inf), k, normalize)


class WeightedExperts(Steering):
    """
    All experts, with given gates. The experts' updates add up as in LoRA.

    Args:
        by_row: the factor of each expert's update, [B, n].

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import WeightedExperts
    >>> weights = torch.tensor([[0.7, 0.0, 0.3, 0.0]])
    >>> gates, experts = WeightedExperts(weights).route(torch.randn(5, 4), 2, True)
    ```
    """

    mixes_outputs = False

    def route(
        self, logits_TN: torch.Tensor, k: int, normalize: bool, choose: Choose = top_k_gates
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gates_TN = _per_token(self.by_row, logits_TN)
        experts_N = torch.arange(gates_TN.shape[1], device=gates_TN.device)
        return logits_TN.nan_to_num() * 0 + gates_TN, experts_N.expand(gates_TN.shape)


def _per_token(rows_B: torch.Tensor, logits_TN: torch.Tensor) -> torch.Tensor:
    """Repeat a per-row tensor [B, …] for each of the T = B·S tokens."""
    rows, tokens = rows_B.shape[0], logits_TN.shape[0]
    length = tokens // max(rows, 1)
    if tokens != rows * length:
        raise ValueError(f"steered routing: {rows} rows are steered, the batch has {tokens} tokens; give one per row")
    return rows_B.to(logits_TN.device).repeat_interleave(length, dim=0)


def pad_logits(logits_TN: torch.Tensor, n: int) -> torch.Tensor:
    """
    Pad logits [T, m] to [T, n] with the dtype's minimum: the added experts have probability 0.

    Args:
        logits_TN: router logits [T, m], for example of the layer with the fewest experts.
        n: the number of experts afterwards, at least m.

    Returns:
        logits [T, n].
    """
    missing = n - logits_TN.shape[-1]
    if missing < 0:
        raise ValueError(f"pad_logits: n={n}: the logits have {logits_TN.shape[-1]} experts; give at least as many")
    if missing == 0:
        return logits_TN
    return F.pad(logits_TN, (0, missing), value=torch.finfo(logits_TN.dtype).min)


def stacked(router_logits: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """
    Return logits of several layers, one [T, n] each or [L, T, n], as float32 [L, T, n] on the first layer's device.
    """
    if isinstance(router_logits, torch.Tensor):
        return router_logits.float()
    return torch.stack([logits_TN.to(router_logits[0].device) for logits_TN in router_logits]).float()
