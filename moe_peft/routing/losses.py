"""
Losses on router logits, and the table of losses added by trainers.

A new loss is one function of a `RouterBatch` and one line in `ROUTER_LOSSES`. Training configs then have the field
`router_<name>_loss_coef`, recipes and commands accept it, and trainers log `router_<name>_loss`.

Legend: T tokens, L layers, n experts, k active experts. Where layers differ in n, logits are padded (`pad_logits`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch

from .gates import check_top_k, stacked

Scope = Literal["global", "layer"]
ProcessMean = Callable[[torch.Tensor], torch.Tensor]


def balancing_loss(
    router_logits: Sequence[torch.Tensor] | torch.Tensor,
    k: int,
    mask_T: torch.Tensor | None = None,
    scope: Scope = "layer",
    mean: ProcessMean | None = None,
    sizes: Sequence[int] | None = None,
    chosen: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """
    Return `n Σ_i f_i P_i`, where f_i is expert i's share of assignments times k and P_i its mean probability (Fedus et
    al., 2021, equation 4, summed over the k slots as in transformers). With even loads it is the mean number of experts
    per token: k, or less if routers leave some out.

    Args:
        router_logits: one [T, n] per layer, or [L, T, n].
        k: active experts per token.
        mask_T: 1 for tokens that count; all if None.
        scope: `"layer"` averages the layers' losses. `"global"` pools the tokens of all layers, as in transformers. In
            a deep model, the imbalances of pooled layers cancel, and the loss is near its minimum whatever they are.
            Layers with different n are pooled apart and their losses averaged: their experts do not correspond.
        mean: the mean of a tensor over processes. Then f_i counts the tokens of all processes (Qiu et al., 2025). The
            mean of this loss over processes is the loss of their batches taken together.
        sizes: each layer's n, if logits are padded; None: none are.
        chosen: the experts counted by f_i, bool [T, n] per layer (`counted_experts`); None: the k best.

    Returns:
        the loss, a scalar.
    """
    mean = mean or (lambda values: values)  # of a single process
    logits_LTN = stacked(router_logits)
    check_top_k(logits_LTN, k)
    probabilities_LTN, n = logits_LTN.softmax(-1), logits_LTN.shape[-1]
    if chosen is None:  # by logits, as routers choose: several probabilities may be 0
        chosen_LTN = torch.zeros_like(probabilities_LTN).scatter_(-1, logits_LTN.topk(k, dim=-1).indices, 1.0)
    else:
        chosen_LTN = stacked(chosen)
    weights_T = _weights(probabilities_LTN, mask_T, mean)
    f_LN = mean(torch.einsum("ltn,t->ln", chosen_LTN, weights_T))
    P_LN = torch.einsum("ltn,t->ln", probabilities_LTN, weights_T)
    sizes, pooled = sizes or [n] * len(f_LN), []
    for size in sorted(set(sizes)):
        layers = [i for i, other in enumerate(sizes) if other == size]
        f_MN, P_MN = _rows(f_LN, layers), _rows(P_LN, layers)
        products = (f_MN * P_MN).sum() if scope == "layer" else len(layers) * (f_MN.mean(0) * P_MN.mean(0)).sum()
        pooled.append(size / len(f_LN) * products)
    return torch.stack(pooled).sum()


def _rows(x_LN: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """
    Return the rows of some layers. A list as an index would be copied to the device, and the CPU would wait for it.
    """
    return x_LN if len(layers) == len(x_LN) else torch.stack([x_LN[i] for i in layers])


def z_losses(router_logits: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """
    Return `logsumexp(l)²` of each token, averaged over layers (Zoph et al., 2022, equation 5).

    Args:
        router_logits: one [T, n] per layer, or [L, T, n].

    Returns:
        one loss per token, [T].
    """
    return stacked(router_logits).logsumexp(-1).square().mean(0)


def label_losses(router_logits: Sequence[torch.Tensor] | torch.Tensor, allowed_TN: torch.Tensor) -> torch.Tensor:
    """
    Return `-log Σ_e m_e p_e` of each token, averaged over layers: label-supervised routing.

    Args:
        router_logits: one [T, n] per layer, or [L, T, n].
        allowed_TN: m, bool [T, n], true for the experts of the token's label.

    Returns:
        one loss per token, [T].
    """
    logits_LTN = stacked(router_logits)
    if allowed_TN.shape != logits_LTN.shape[1:]:  # else it would be broadcast
        raise ValueError(f"label_losses: allowed_TN: {list(allowed_TN.shape)}; give {list(logits_LTN.shape[1:])}")
    log_p_LTN = logits_LTN.log_softmax(-1)  # precise however large the logits are
    return -log_p_LTN.masked_fill(~allowed_TN, -torch.inf).logsumexp(-1).mean(0)


def _weights(probabilities_LTN: torch.Tensor, mask_T: torch.Tensor | None, mean: ProcessMean) -> torch.Tensor:
    """Return each token's weight in a mean, [T]."""
    tokens = probabilities_LTN.shape[1]
    if mask_T is not None and mask_T.shape != (tokens,):  # else it would be broadcast
        raise ValueError(f"balancing_loss: mask_T has shape {list(mask_T.shape)}; give one entry per token, [{tokens}]")
    mask_T = probabilities_LTN.new_ones(tokens) if mask_T is None else mask_T.to(probabilities_LTN)
    count = mean(mask_T.sum())
    return mask_T / torch.where(count > 0, count, 1)


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RouterBatch:
    """
    Inputs of a loss on routers.

    Args:
        router_logits: of all layers, float32 [L, T, n].
        mask: 1 for real tokens, 0 for padding, [T].
        k: active experts per token.
        scope: the scope of the balancing loss, see `balancing_loss`.
        allowed: the experts allowed for each token by its label, bool [T, n]; None without labels.
        label_mask: 1 for the tokens counted by losses that need labels, [T]; None: all real tokens.
        mean: the mean of a tensor over the processes with batches balanced together; None: each process is by itself.
        sizes: each layer's n, if logits are padded; None: none are.
        chosen: the experts counted by the balancing loss, bool [T, n] per layer; None: the k best.
    """

    router_logits: torch.Tensor
    mask: torch.Tensor
    k: int
    scope: Scope = "layer"
    allowed: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    mean: ProcessMean | None = None
    sizes: Sequence[int] | None = None
    chosen: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True)
class RouterLoss:
    """
    One entry of `ROUTER_LOSSES`.

    Args:
        function: returns the loss of each token [T], to be averaged by trainers over the real tokens of an optimizer
            step; or a scalar, the loss of a complete micro-batch.
        help: its purpose in a few words.
        coefficient: the default coefficient; None takes it from the trainer's own config or the model's.
        stages: the values of `training_stage` with this loss.
        phases: its factors in the three phases of `router_schedule="three_phase"`.
        needs_labels: whether it is skipped if tokens have no labels.
        always_logged: whether it is computed and logged even while its coefficient is 0.
    """

    function: Callable[[RouterBatch], torch.Tensor]
    help: str
    coefficient: float | None = 0.0
    stages: tuple[str, ...] = ("joint", "routers")
    phases: tuple[float, float, float] = (1.0, 1.0, 1.0)
    needs_labels: bool = False
    always_logged: bool = False


ROUTER_LOSSES: dict[str, RouterLoss] = {
    "aux": RouterLoss(
        lambda batch: balancing_loss(
            batch.router_logits, batch.k, batch.mask, batch.scope, batch.mean, batch.sizes, batch.chosen
        ),
        "Load-balancing loss. None: the model's own coefficient.",
        coefficient=None,
        stages=("joint",),
        phases=(5.0, 1.0, 0.5),
        always_logged=True,
    ),
    "z": RouterLoss(
        lambda batch: z_losses(batch.router_logits),
        "z-loss: keeps router logits small.",
        phases=(2.0, 1.0, 0.5),
        always_logged=True,
    ),
    "label": RouterLoss(
        lambda batch: label_losses(batch.router_logits, cast(torch.Tensor, batch.allowed)),
        "Label-supervised routing; needs expert_map.",
        coefficient=1.0,
        needs_labels=True,
        always_logged=True,
    ),
}


def coefficient_field(name: str) -> str:
    """Return the config field of a loss's coefficient."""
    return f"router_{name}_loss_coef"
