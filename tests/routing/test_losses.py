"""Losses and statistics on router logits, against plain loops in float64 and transformers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moe_peft.routing.gates import pad_logits
from moe_peft.routing.losses import balancing_loss, label_losses, z_losses
from moe_peft.routing.statistics import (
    chosen_experts,
    compliance,
    entropies,
    expert_counts,
)
from tests.helpers.close import assert_near, near

L, T, N, K = 3, 20, 5, 2


def logits(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(T, N, generator=generator, requires_grad=True) for _ in range(L)]


def mask():
    return (torch.arange(T) % 4 != 3).long()


def distributions(layers):
    return [[[math.exp(v) for v in row] for row in layer.tolist()] for layer in layers]


@pytest.mark.parametrize("masked", [False, True])
def test_global_balancing_is_that_of_transformers(masked):
    layers, ours = logits(), logits()
    reference = load_balancing_loss_func(tuple(layers), N, K, mask().view(1, T) if masked else None)
    loss = balancing_loss(ours, K, mask() if masked else None, "global")
    assert_near(loss, reference)
    for mine, theirs in zip(torch.autograd.grad(loss, ours), torch.autograd.grad(reference, layers), strict=True):
        assert_near(mine, theirs)


def test_balancing_by_layer_is_the_mean_of_the_layers():
    layers = logits()
    alone = torch.stack([balancing_loss([layer], K, mask()) for layer in layers])
    assert_near(balancing_loss(layers, K, mask(), "layer"), alone.mean())
    assert not torch.allclose(balancing_loss(layers, K, mask(), "global"), alone.mean(), rtol=1e-4)


def test_logits_of_half_precision_count_in_float32():
    half = [layer.detach().bfloat16() for layer in logits()]
    full = [layer.float() for layer in half]
    allowed = torch.arange(N) < torch.arange(T).unsqueeze(1) % N + 1
    for found, expected in (
        (balancing_loss(half, K, mask()), balancing_loss(full, K, mask())),
        (z_losses(half), z_losses(full)),
        (label_losses(half, allowed), label_losses(full, allowed)),
        (compliance(half, allowed), compliance(full, allowed)),
        (entropies(half), entropies(full)),
    ):
        assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_a_batch_of_padding_alone_has_no_balancing_loss():
    loss = balancing_loss(logits(), K, torch.zeros(T))
    assert loss.item() == 0


def test_losses_and_statistics_of_tokens_are_those_of_a_plain_loop():
    layers = logits()
    allowed = torch.rand(T, N, generator=torch.Generator().manual_seed(1)) < 0.4
    allowed[:, 0] |= ~allowed.any(1)
    exp = distributions(layers)
    z, label, comply, entropy = [], [], [], []
    for t in range(T):
        sums = [sum(exp[layer][t]) for layer in range(L)]
        p = [[value / sums[layer] for value in exp[layer][t]] for layer in range(L)]
        inside = [sum(p[layer][e] for e in range(N) if allowed[t, e]) for layer in range(L)]
        z.append(sum(math.log(s) ** 2 for s in sums) / L)
        label.append(-sum(map(math.log, inside)) / L)
        comply.append(inside)
        entropy.append([-sum(v * math.log(v) for v in p[layer]) for layer in range(L)])
    for ours, reference in (
        (z_losses(layers), torch.tensor(z)),
        (label_losses(layers, allowed), torch.tensor(label)),
        (compliance(layers, allowed), torch.tensor(comply).T),
        (entropies(layers), torch.tensor(entropy).T),
    ):
        assert_near(ours, reference)


def test_label_loss_and_its_gradient_are_finite_where_a_softmax_would_underflow():
    layer = torch.tensor([[300.0, -300.0, 0.0]], requires_grad=True)
    allowed = torch.tensor([[False, True, False]])
    loss = label_losses([layer], allowed)
    assert loss.item() == near(600)
    (gradient,) = torch.autograd.grad(loss.sum(), layer)
    assert_near(gradient, torch.tensor([[1.0, -1.0, 0.0]]))


def test_padded_experts_change_nothing():
    layers = [layer.detach() for layer in logits()]
    padded = [pad_logits(layer, N + 2) for layer in layers]
    allowed = torch.zeros(T, N, dtype=torch.bool)
    allowed[:, 1] = True
    wide = torch.nn.functional.pad(allowed, (0, 2))
    assert_near(z_losses(padded), z_losses(layers))
    assert_near(label_losses(padded, wide), label_losses(layers, allowed))
    assert_near(entropies(padded), entropies(layers))
    assert expert_counts(padded[0], None, K)[N:].sum() == 0


def test_counts_leave_padding_out():
    layer = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0], [0.0, 3.0, 2.0, 1.0], [9.0, 0.0, 0.0, 8.0]])
    assert expert_counts(layer, torch.tensor([1, 1, 1, 0]), 2).tolist() == [2, 3, 1, 0]


def test_layers_may_be_on_different_devices():
    """The device "meta" has no values, but refuses to meet tensors of another device, as a GPU does."""
    one, two = torch.ones(T, N, device="meta"), torch.ones(T, N)
    for loss in (z_losses([one, two]), balancing_loss([one, two], K, mask()), balancing_loss([one, two], K)):
        assert loss.device.type == "meta"
    assert chosen_experts(one[:, :K].long(), None, N).device.type == "meta"


def test_balancing_counts_the_tokens_of_all_workers():
    """Two processes of which one has one real token, and the other none: on average, half a token."""
    layers, one, none = logits(), torch.zeros(T), torch.zeros(T)
    one[3] = 1
    for scope in ("global", "layer"):
        of_both = [balancing_loss(layers, K, mask, scope, lambda values: values / 2) for mask in (one, none)]
        # The mean of the processes' losses is the loss of their batches taken together, whose one real token is that.
        assert_near(sum(of_both) / 2, balancing_loss(layers, K, one, scope))


def test_a_mask_of_other_tokens_is_not_broadcast():
    with pytest.raises(ValueError, match=r"^label_losses: allowed_TN: \[5, 4\]"):
        label_losses([torch.ones(6, 4)], torch.ones(5, 4).bool())


@pytest.mark.parametrize("sizes", [(4, 8), (2, 8), (8, 8), (3, 5, 7)])
def test_padding_is_no_expert_in_a_layers_balance(sizes):
    """Of each layer by itself: the mean of the layers' losses with their own n, k with even loads."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(12, n, generator=generator, dtype=torch.float64).requires_grad_() for n in sizes]
    padded = [pad_logits(layer.float(), max(sizes)) for layer in logits]
    expected = torch.zeros((), dtype=torch.float64)
    for layer in logits:
        n, p = layer.shape[1], layer.softmax(-1)
        f = torch.zeros(n, dtype=torch.float64)
        for token in range(12):
            for expert in sorted(range(n), key=lambda i, token=token, layer=layer: -layer[token, i].item())[:2]:
                f[expert] += 1 / 12
        expected = expected + n * (f * p.mean(0)).sum() / len(sizes)
    found = balancing_loss(padded, 2, scope="layer", sizes=sizes)
    assert_near(found, expected)
    for one, other in zip(torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits), strict=True):
        assert_near(one, other, dtype=torch.float32, scale=1 / 12)  # differences of a token's shares of 1/12
    even = balancing_loss([pad_logits(torch.zeros(12, n), max(sizes)) for n in sizes], 2, scope="layer", sizes=sizes)
    assert even.item() == near(2)
