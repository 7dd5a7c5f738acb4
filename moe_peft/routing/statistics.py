"""
Statistics of routing: compliance, entropy, load and how healthy it is.

Legend: T tokens, L layers, n experts, k active experts. Where layers differ in n, logits are padded (`pad_logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .gates import check_top_k


def compliance(router_logits: Sequence[torch.Tensor], allowed_TN: torch.Tensor) -> torch.Tensor:
    """
    `Σ_e m_e p_e`, the probability that routers give to the experts of a token's label, [L, T].

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import compliance
    >>> allowed = torch.tensor([True, True, False, False]).expand(10, 4)
    >>> compliance([torch.randn(10, 4)], allowed).shape
    torch.Size([1, 10])
    ```
    """
    shapes = {logits_TN.shape for logits_TN in router_logits}
    if shapes != {allowed_TN.shape}:
        raise ValueError(f"compliance: allowed_TN has shape {list(allowed_TN.shape)}; give that of each layer's logits")
    return torch.stack([(logits_TN.float().softmax(-1) * allowed_TN).sum(-1) for logits_TN in router_logits])


def entropies(router_logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """
    Entropy in nats of the routers' distributions, [L, T].

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import entropies
    >>> entropies([torch.randn(10, 4)]).shape
    torch.Size([1, 10])
    ```
    """
    return torch.stack([torch.special.entr(logits_TN.float().softmax(-1)).sum(-1) for logits_TN in router_logits])


def expert_counts(logits_TN: torch.Tensor, mask_T: torch.Tensor | None, k: int) -> torch.Tensor:
    """
    Number of (token, slot) assignments per expert of a top-k choice without steering, float64 [n]; they sum to k times
    the number of real tokens. `chosen_experts` has what a router really did.

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import expert_counts
    >>> expert_counts(torch.tensor([[0.0, 2.0, 1.0]]), None, 2).tolist()
    [0.0, 1.0, 1.0]
    ```
    """
    check_top_k(logits_TN, k)
    if mask_T is not None and mask_T.shape != logits_TN.shape[:1]:
        raise ValueError(f"expert_counts: mask_T has shape {list(mask_T.shape)}; give one entry per token")
    chosen_TN = torch.zeros_like(logits_TN, dtype=torch.float64).scatter_(1, logits_TN.topk(k, dim=-1).indices, 1.0)
    return chosen_TN.sum(0) if mask_T is None else (chosen_TN * mask_T.unsqueeze(1)).sum(0)


def chosen_experts(experts_TK: torch.Tensor, gates_TK: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """
    The experts that serve each token, bool [T, n]: those that were chosen with a gate other than 0.

    Args:
        experts_TK: the chosen experts, int64 [T, k].
        gates_TK: their gates; None: none is 0.
        num_experts: n.

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import chosen_experts
    >>> chosen_experts(torch.tensor([[2, 0]]), torch.tensor([[0.7, 0.3]]), 3).tolist()
    [[True, False, True]]
    ```
    """
    chosen_TN = torch.zeros(experts_TK.shape[0], num_experts, dtype=torch.bool, device=experts_TK.device)
    kept_TK = torch.ones_like(experts_TK, dtype=torch.bool) if gates_TK is None else gates_TK != 0
    return chosen_TN.scatter_(1, experts_TK, kept_TK)


def effective_experts(gates_TK: torch.Tensor) -> torch.Tensor:
    """
    How many experts a token's gates amount to, `(Σg)² / Σg²`, [T]: k if they are equal, near 1 if one has almost all.
    It is 0 for a token without experts.

    Args:
        gates_TK: gates or probabilities [T, k]; a common factor does not matter.

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import effective_experts
    >>> effective_experts(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [2.0, 1.0]
    ```
    """
    share_TK = gates_TK.float() / gates_TK.float().sum(-1, keepdim=True)
    return share_TK.square().sum(-1).reciprocal().nan_to_num(0)


def counted_experts(
    routers: Sequence[Any], router_logits: Sequence[torch.Tensor], ks: Sequence[int]
) -> list[torch.Tensor] | None:
    """
    The experts that the balancing loss counts, bool [T, n] per layer: without those that a router's own rule leaves
    out, as "top_p" does, and with its biases, but before the capacity of "switch". None if all routers choose the k
    best of one k.

    Args:
        routers: one per layer, of this package or a native MoE's gate.
        router_logits: theirs, [T, n] per layer.
        ks: active experts per token, per layer.
    """
    if len(set(ks)) == 1 and not any(map(_has_rule, routers)):
        return None
    counted = []
    for router, logits_TN, k in zip(routers, router_logits, ks, strict=True):
        if _has_rule(router):
            gates_TK, experts_TK = router.choose(logits_TN.detach(), k, True)
        else:
            gates_TK, experts_TK = None, logits_TN.topk(k, dim=-1).indices
        counted.append(chosen_experts(experts_TK, gates_TK, logits_TN.shape[-1]))
    return counted


def _has_rule(router: Any) -> bool:
    """Whether a router may choose others than those with the k largest logits."""
    return getattr(router, "leaves_out", False) or getattr(router, "expert_bias", None) is not None


# A layer's load is judged only if it varies by more than this many times what even routing gives by chance; in other
# layers, an expert that is this many standard deviations of its count, √(A/n) of A assignments, below the even one.
_CLEARLY, _CLEARLY_BELOW = 3.0, 4.0
# What is healthy. With more than 25 experts even loads come near 2 %, so both limits shrink with the even load 1/n.
HEALTHY_VARIATION = 0.3
_DEAD, _DEAD_OF_EVEN = 0.01, 0.25
_NEARLY_ALL, _MANY_SERVE = 0.9, 0.6  # shares of the tokens that an expert serves
_SMALL, _SMALL_OF_EVEN = 0.02, 0.5
REMEDY = (
    "raise router_aux_loss_coef, lower the learning rate of the routers, or try router_jitter_noise or "
    "router_z_loss_coef=0.001"
)


@dataclass(frozen=True)
class LoadHealth:
    """
    How evenly experts are used, over all layers' experts.

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import load_health
    >>> load_health(torch.tensor([[50.0, 50.0], [90.0, 10.0]]), [2, 2]).dead
    0
    ```
    """

    coefficient_of_variation: float  # of the loads in a layer, averaged over layers; healthy below 0.3
    smallest: float  # share of a layer's assignments; healthy above 2 %
    largest: float
    dead: int  # experts with less than 1 % of their layer's assignments (a quarter of the even load, if that is less)
    by_chance: float = 0.0  # the coefficient of variation that even routing of as many assignments would have


def load_health(counts_LN: torch.Tensor, sizes: Sequence[int]) -> LoadHealth:
    """
    How evenly the assignments are spread over experts.

    Args:
        counts_LN: assignments per layer and expert, [L, n], on the CPU.
        sizes: experts of each layer; the rest of a row is padding.

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import load_health
    >>> health = load_health(torch.tensor([[500.0, 480.0, 510.0, 510.0]]), [4])
    >>> health.coefficient_of_variation < 0.3
    True
    ```
    """
    shares = [_shares(counts_N[:n]) for counts_N, n in zip(counts_LN, sizes, strict=True)]
    variations = [_variation(share_N) for share_N in shares]
    return LoadHealth(
        sum(variations) / len(variations),
        min(float(share_N.min()) for share_N in shares),
        max(float(share_N.max()) for share_N in shares),
        sum(_dead(share_N, len(share_N)) for share_N in shares if share_N.any()),
        sum(_by_chance(counts_N, n) for counts_N, n in zip(counts_LN, sizes, strict=True)) / len(sizes),
    )


def load_verdicts(counts_LN: torch.Tensor, sizes: Sequence[int], tokens: float | None = None) -> list[str]:
    """
    One line for each layer whose load is not healthy: a coefficient of variation above 0.3, an expert with less than
    2 % of the assignments (half the even load, if that is less), or one or two experts with most of them: more than
    half, and more than 2 or 1.5 times their even share; or two that each serve nine of ten tokens, where evenly used
    ones would serve six at most. `REMEDY` says what to try.

    There is no verdict on a layer with too few assignments to tell it from even routing: its coefficient of variation
    must be three times what A random assignments to n experts have, √((n - 1)/A). `load_doubt` says so. Of many experts
    one may be unused without that; it is named if it is 4·√(A/n) assignments below the even number A/n.

    Args:
        counts_LN: assignments per layer and expert, [L, n], on the CPU.
        sizes: experts of each layer; the rest of a row is padding.
        tokens: whose assignments they are. With a top_k above 2, two experts that serve all of them have but a small
            share of the assignments.

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import load_verdicts
    >>> load_verdicts(torch.tensor([[500.0, 480.0, 510.0, 510.0]]), [4])
    []
    ```
    """
    verdicts = []
    for layer, (counts_N, n) in enumerate(zip(counts_LN, sizes, strict=True)):
        share_N, by_chance = _shares(counts_N[:n]), _by_chance(counts_N, n)
        if is_clear(_variation(share_N), by_chance):
            collapsed, facts = _facts(share_N, by_chance, float(counts_N[:n].sum()) / tokens if tokens else None)
        else:
            even = float(counts_N[:n].sum()) / n
            collapsed, facts = _unused(share_N, even - counts_N[:n] > _CLEARLY_BELOW * even**0.5)
        if facts:
            verdicts.append(f"layer {layer}: {'collapsed' if collapsed else 'uneven'}: {'; '.join(facts)}")
    return verdicts


def is_clear(variation: float, by_chance: float) -> bool:
    """Whether a load is clearly not that of even routing: it varies three times as much as that does by chance."""
    return variation > _CLEARLY * by_chance


def load_doubt(counts_LN: torch.Tensor, sizes: Sequence[int]) -> str:
    """
    Why the absence of verdicts says little: with so few assignments, a layer's load may vary by more than 0.3 and not
    be told from even routing. "" if there are enough.

    Args:
        counts_LN: assignments per layer and expert, [L, n], on the CPU.
        sizes: experts of each layer; the rest of a row is padding.

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.routing import load_doubt
    >>> load_doubt(torch.tensor([[500.0, 480.0, 510.0, 510.0]]), [4])
    ''
    ```
    """
    chances = [_by_chance(counts_N, n) for counts_N, n in zip(counts_LN, sizes, strict=True)]
    layer = max(range(len(sizes)), key=chances.__getitem__)
    if not is_clear(HEALTHY_VARIATION, chances[layer]):
        return (
            f"layer {layer} has {int(counts_LN[layer].sum()):,} assignments to {sizes[layer]} experts, too few to judge"
            f" its load: by chance alone the coefficient of variation is {chances[layer]:.2f}; use more data"
        )
    idle = [layer for layer, counts_N in enumerate(counts_LN) if not counts_N.any()]
    if idle:
        return f"layer {idle[0]} has no assignments to its {sizes[idle[0]]} experts, so there is no load; use more data"
    return ""


def verdict_line(verdicts: Sequence[str], most: int = 3) -> str:
    """The first verdicts of `load_verdicts`, how many more there are, and what to try, on one line; "" without any."""
    if not verdicts:
        return ""
    more = [f"{len(verdicts) - most} more layers like that"] if len(verdicts) > most else []
    return ". ".join([*verdicts[:most], *more, f"Try this: {REMEDY}"])


def _facts(share_N: torch.Tensor, by_chance: float, k: float | None) -> tuple[bool, list[str]]:
    """Whether a layer has collapsed, and what is not healthy about its loads; of `k` assignments for each token."""
    n, facts, variation = len(share_N), [], _variation(share_N)
    top, experts = share_N.topk(min(2, n))
    one = float(top[0]) > max(0.5, 2 / n)
    two = float(top.sum()) > max(0.5, 3 / n)
    if one:
        facts.append(f"expert {int(experts[0])} gets {_percent(float(top[0]))} of the assignments")
    elif two:
        names = " and ".join(map(str, sorted(experts.tolist())))
        facts.append(f"experts {names} get {_percent(float(top.sum()))} of the assignments")
    elif k is not None and k <= _MANY_SERVE * n and float(top[1]) * k > _NEARLY_ALL:
        two, names = True, " and ".join(map(str, sorted(experts.tolist())))
        facts.append(f"experts {names} serve {_percent(float(top[1]) * k)} of the tokens or more")
    dead, unused = _unused(share_N, torch.ones_like(share_N, dtype=torch.bool))
    facts += unused
    if variation > HEALTHY_VARIATION:
        limits = f"healthy below {HEALTHY_VARIATION}, by chance {by_chance:.2f}"
        facts.append(f"coefficient of variation {variation:.2f}, {limits}")
    return one or two or dead, facts


def _unused(share_N: torch.Tensor, judged_N: torch.Tensor) -> tuple[bool, list[str]]:
    """Whether there are dead experts among those that can be judged, and what to say of these or of the smallest."""
    n, judged = len(share_N), share_N[judged_N]
    dead, limit = _dead(judged, n), _percent(min(_DEAD, _DEAD_OF_EVEN / n))
    if dead:
        return True, [f"{dead} of {n} experts get less than {limit} of the assignments"]
    if len(judged) and float(judged.min()) < min(_SMALL, _SMALL_OF_EVEN / n):
        return False, [f"expert {int(share_N.argmin())} gets {_percent(float(judged.min()))} of the assignments"]
    return False, []


def _percent(share: float) -> str:
    return f"{share * 100:.3g} %"


def _shares(counts_N: torch.Tensor) -> torch.Tensor:
    return counts_N.double() / counts_N.sum().clamp(min=1)


def _variation(share_N: torch.Tensor) -> float:
    return float(share_N.std(correction=0) / share_N.mean()) if share_N.any() else 0.0


def _by_chance(counts_N: torch.Tensor, n: int) -> float:
    """The coefficient of variation that random assignments, as many as there are, have on average; 0 without any."""
    assignments = float(counts_N.sum())
    return ((n - 1) / assignments) ** 0.5 if assignments else 0.0


def _dead(shares: torch.Tensor, n: int) -> int:
    """How many of these shares of n experts are next to nothing."""
    return int((shares < min(_DEAD, _DEAD_OF_EVEN / n)).sum())
