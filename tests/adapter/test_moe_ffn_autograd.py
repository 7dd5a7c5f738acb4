"""The hidden part of mixing "output" alone, against a plain loop over pairs; its gradients by autograd of that loop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moe_peft.adapter.ffn_layout import FFNLayout
from moe_peft.adapter.moe_ffn_autograd import PairInputs, mixed_hidden
from tests.helpers.close import assert_near
from tests.helpers.dispatches import make_dispatch

T, N, R, F, SCALING = 11, 5, 4, 6, 0.7
LAYOUTS = {
    "gated": (FFNLayout(gate="g", up="u", down="d", act="act"), [F, F]),
    "fused": (FFNLayout(up="u", down="d", act="act", fused=True), [2 * F]),
    "plain": (FFNLayout(up="u", down="d", act="act"), [F]),
}
ACTS = {"tanh": torch.tanh, "silu": nn.functional.silu, "identity": nn.Identity()}


def random(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


class Case:
    """One FFN's inputs: base outputs [T, f'], low-rank inputs of tokens and experts [T, n, r], second matrices."""

    def __init__(self, layout, k, method="blocks", act="tanh", low=True, down=True):
        self.layout, widths = LAYOUTS[layout]
        self.act = ACTS[act]
        self.dispatch = make_dispatch(method, k)
        self.pre = [random(T, width, seed=i).requires_grad_() for i, width in enumerate(widths)]
        self.h = [random(T, N, R, seed=10 + i).requires_grad_() if low else None for i in range(len(widths))]
        self.B = [random(N, R, w, seed=20 + i).requires_grad_() if low else None for i, w in enumerate(widths)]
        self.A = random(N, F, F, seed=30).requires_grad_() if down else None

    def leaves(self):
        return [self.dispatch.gates, *(t for t in (*self.pre, *self.h, *self.B, self.A) if t is not None)]

    def ours(self, dropout=0.0):
        inputs = [
            PairInputs(
                self.pre,
                [None if h is None else h[part.pair_tokens(), part.pair_experts()] for h in self.h],
                self.B,
            )
            for part in self.dispatch.parts
        ]
        return mixed_hidden(self.dispatch, self.layout, SimpleNamespace(act=self.act), inputs, self.A, dropout)

    def by_hand(self, masks=None):
        """z [T, f], and what `A_down` gives for each part's pairs."""
        hidden = []
        for t in range(T):
            hidden.append([])
            for e in range(N):
                pre = [
                    own[t] if h is None else own[t] + h[t, e] @ B[e]
                    for own, h, B in zip(self.pre, self.h, self.B, strict=True)
                ]
                gate, *up = torch.cat(pre).split(F)
                hidden[-1].append(self.act(gate) * up[0] if up else self.act(gate))
        rows = zip(self.dispatch.gates, self.dispatch.experts.tolist(), hidden, strict=True)
        z = torch.stack([sum(g * own[e] for g, e in zip(gates, es, strict=True)) for gates, es, own in rows])
        if self.A is None:
            return z, None
        low = []
        for i, part in enumerate(self.dispatch.parts):
            own = zip(part.pair_tokens().tolist(), part.pair_experts().tolist(), strict=True)
            mask = 1 if masks is None else masks[i]
            a = torch.stack([hidden[t][e] for t, e in own]) * mask
            low.append(torch.stack([self.A[e] @ y for e, y in zip(part.pair_experts().tolist(), a, strict=True)]))
        return z, low

    def compare(self, actual, wanted):
        z, low = actual
        assert_near(z, wanted[0])
        assert (low is None) == (wanted[1] is None) == (self.A is None)
        for ours, theirs in zip(low or [], wanted[1] or [], strict=True):
            assert_near(ours, theirs)

    def loss(self, actual):
        z, low = actual
        total = (z * random(T, F, seed=40)).sum()
        for part, of_part in zip(self.dispatch.parts, low or [], strict=False):  # padding has gate 0, as in training
            total = total + (of_part * part.pair_gates() * random(*of_part.shape, seed=41)).sum()
        return total

    def compare_gradients(self, *losses):
        leaves = self.leaves()
        ours, theirs = (torch.autograd.grad(self.loss(one), leaves, retain_graph=True) for one in losses)
        for one, other in zip(ours, theirs, strict=True):
            assert_near(one, other)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mixed_hidden_activation_and_its_gradients(layout, k, act):
    case = Case(layout, k, ["blocks", "gather", "parts of blocks"][k - 1], act)
    actual, wanted = case.ours(), case.by_hand()
    case.compare(actual, wanted)
    case.compare_gradients(actual, wanted)
    leaves = case.leaves()
    before = [tensor.detach().clone() for tensor in leaves]
    with torch.no_grad():
        case.compare(case.ours(), wanted)
    assert all(torch.equal(tensor, was) for tensor, was in zip(leaves, before, strict=True))


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(("low", "down"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_projections_without_experts(layout, low, down, k):
    case = Case(layout, k, "parts of blocks", low=low, down=down)
    if layout == "gated" and low:
        case.h[0] = case.B[0] = None  # experts on up alone
    actual, wanted = case.ours(), case.by_hand()
    case.compare(actual, wanted)
    case.compare_gradients(actual, wanted)


def test_only_one_of_the_tensors_is_trained():
    for trained in range(len(Case("gated", 3).leaves())):
        case = Case("gated", 3, "parts of blocks")
        leaves = case.leaves()
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i == trained)
        losses = [case.loss(one) for one in (case.ours(), case.by_hand())]
        ours, theirs = (torch.autograd.grad(one, leaves[trained], retain_graph=True) for one in losses)
        assert_near(ours[0], theirs[0])


@pytest.mark.parametrize("k", [2, 3])
def test_dropout_is_on_the_input_of_the_down_experts_alone(k):
    case = Case("gated", k, "parts of blocks")
    whole = torch.eye(F, dtype=torch.float64).expand(N, F, F)
    matrices, case.A = case.A, whole
    exact = case.ours()
    torch.manual_seed(0)
    dropped = case.ours(dropout=0.25)
    assert_near(dropped[0], exact[0])
    masks = [(ours / theirs).detach() for ours, theirs in zip(dropped[1], exact[1], strict=True)]
    values = torch.cat([mask.flatten() for mask in masks])
    kept = values != 0
    assert_near(values[kept], torch.full_like(values[kept], 1 / 0.75))
    assert abs(kept.double().mean() - 0.75) < 0.1
    case.A = matrices
    torch.manual_seed(0)
    actual, wanted = case.ours(dropout=0.25), case.by_hand(masks)
    case.compare(actual, wanted)
    case.compare_gradients(actual, wanted)
    case.A = whole
    with torch.no_grad():
        actual = case.ours(dropout=0.25)
    assert_near(actual[0], exact[0])
    values = torch.cat([(a / b).flatten() for a, b in zip(actual[1], exact[1], strict=True)])
    assert_near(values[values != 0], torch.full_like(values[values != 0], 1 / 0.75))
    assert abs((values != 0).double().mean() - 0.75) < 0.1


def test_terms_in_one_tuple_and_back():
    terms = PairInputs((1, 2), (3, None), (5, None))
    assert terms.flat() == (1, 2, 3, None, 5, None) and PairInputs.of(terms.flat()) == terms
