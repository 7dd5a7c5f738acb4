"""The objectives of stage 3 on logits, against plain loops in float64."""

from __future__ import annotations

import math

import pytest
import torch

from moe_peft.routing.gates import pad_logits
from moe_peft.upit.router_init import OBJECTIVES, routing_loss

L, B, S, N = 2, 5, 5, 3


def by_hand(objective, row, own):
    sigmoid = [1 / (1 + math.exp(-value)) for value in row]
    if objective == "positive":
        return -math.log(sigmoid[own])
    if objective == "softmax":
        return -math.log(math.exp(row[own]) / sum(map(math.exp, row)))
    return -sum(math.log(p if i == own else 1 - p) for i, p in enumerate(sigmoid)) / len(row)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_of_rows_is_that_of_a_plain_loop(objective):
    generator = torch.Generator().manual_seed(0)
    logits = [3 * torch.randn(B * S, N, generator=generator, dtype=torch.float64) for _ in range(L)]
    experts = torch.tensor([2, 0, 1, 2, 1])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1], [0, 0, 1, 0, 0]])
    wanted = []
    for b in range(B):
        real = [s for s in range(S) if mask[b, s]]
        losses = [by_hand(objective, layer[b * S + s].tolist(), int(experts[b])) for layer in logits for s in real]
        wanted.append(sum(losses) / L)
    found = routing_loss(logits, experts, mask, objective)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_that_read_the_own_logit_alone_say_so(objective):
    logits = torch.randn(1, N, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = routing_loss([logits], torch.tensor([1]), torch.ones(1, 1), objective)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert (gradient[0, [0, 2]] == 0).all() == OBJECTIVES[objective].own_logit_only


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_padding_is_no_expert(objective):
    """Where layers differ in n, logits are padded; the loss is that of the layer's own."""
    logits, experts, mask = (
        torch.randn(6, 2, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0]),
        torch.ones(1, 6),
    )
    own = routing_loss([logits], experts, mask, objective)
    torch.testing.assert_close(routing_loss([pad_logits(logits, 8)], experts, mask, objective), own)
