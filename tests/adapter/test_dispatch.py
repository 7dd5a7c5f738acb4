"""The linear maps of every dispatch, against a plain loop over pairs; their gradients by autograd of that loop."""

from __future__ import annotations

import pytest
import torch

from moe_peft.adapter.dispatch import Blocks, _block_size, _ShrinkTokens
from tests.helpers.close import assert_near
from tests.helpers.dispatches import DTYPES, IN, METHODS, OUT, SCALING, N, R, make_dispatch

CASES = [(name, k, False) for name in METHODS for k in (1, 2, 3)]
CASES += [(name, k, True) for name in METHODS if name not in ("blocks", "sorted") for k in (1, 3)]


def random(name, *shape, seed=1):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[name])


def update_by_hand(dispatch, x, A, B, base):
    rows = []
    for t, experts in enumerate(dispatch.experts.tolist()):
        rows.append(
            base[t]
            + SCALING * sum(g * (B[e].T @ (A[e] @ x[t])) for g, e in zip(dispatch.gates[t], experts, strict=True))
        )
    return torch.stack(rows)


@pytest.mark.parametrize(("name", "k"), [(name, k) for name in METHODS for k in (1, 2, 3)])
def test_maps_of_pairs(name, k):
    whole = make_dispatch(name, k)
    assert (whole.tokens, whole.k, whole.n, whole.scaling) == (11, k, N, SCALING)
    covered = []
    for part in whole.parts:
        tokens, experts, gates = part.pair_tokens(), part.pair_experts(), part.pair_gates()
        pairs = len(tokens)
        assert experts.shape == (pairs,) and gates.shape == (pairs, 1)
        assert all(e in part.experts[t] for t, e in zip(tokens.tolist(), experts.tolist(), strict=True))
        assert torch.equal(part.pair_rows(), tokens * N + experts)
        real = {(int(tokens[p]), int(experts[p])): p for p in range(pairs) if gates[p] != 0}
        assert sorted(real) == sorted((t, e) for t, row in enumerate(part.experts.tolist()) for e in row)
        covered += real
        slots = torch.tensor([[real[t, e] for e in row] for t, row in enumerate(part.experts.tolist())])
        assert torch.equal(gates[slots].squeeze(-1), part.gates)
        assert_near(part.scaled_gates(), SCALING * gates)
        values = random(name, pairs)
        assert torch.equal(part.to_slots(values), values[slots])
        x, y, h = random(name, 11, IN), random(name, pairs, IN), random(name, pairs, R)
        A, B = random(name, N, R, IN), random(name, N, R, OUT)
        assert torch.equal(part.spread(x), x[tokens])
        assert_near(part.collect(y), y[slots].sum(1))
        assert_near(part.collect(y, gated=True), (y[slots] * part.gates[..., None]).sum(1))
        assert_near(part.shrink(y, A), torch.stack([A[e] @ y[p] for p, e in enumerate(experts)]))
        expanded = torch.stack([h[p] @ B[e] for p, e in enumerate(experts)])
        assert_near(part.expand(h, B), expanded)
        onto = random(name, pairs, OUT, seed=2)
        before = onto.clone()
        assert part.expand(h, B, onto) is onto
        assert_near(onto, before + expanded)
        h = h * (gates.detach() != 0)  # as in training, where padding has gate 0
        outer = torch.zeros(N, R, IN, dtype=y.dtype)
        for p, e in enumerate(experts):
            outer[e] += torch.outer(h[p], y[p])
        assert_near(part.outer(h, y), outer)
    assert len(covered) == len(set(covered)) == 11 * k


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize(("name", "k", "all_columns"), CASES)
def test_an_update_and_its_gradients(name, k, all_columns, with_grad):
    dispatch = make_dispatch(name, k, all_columns)
    x = [random(name, 11, IN, seed=3).requires_grad_() for _ in range(2)]
    A = [random(name, N, R, IN, seed=4 + i).requires_grad_() for i in range(2)]
    B = [random(name, N, R, out, seed=7).requires_grad_() for out in (OUT, IN)]
    base = [random(name, 11, out, seed=9).requires_grad_() for out in (OUT, IN)]
    for inputs in (x, x[:1] * 2):  # of their own, and shared
        wanted = [update_by_hand(dispatch, *of_one) for of_one in zip(inputs, A, B, base, strict=True)]
        with torch.set_grad_enabled(with_grad):
            actual = dispatch.update(inputs, A, B, base)
        for ours, theirs, untouched in zip(actual, wanted, base, strict=True):
            assert_near(ours, theirs)
            assert torch.equal(untouched, random(name, *untouched.shape, seed=9))
        if not with_grad:
            continue
        leaves = [dispatch.gates, *inputs, *A, *B, *base]
        loss = [sum((y * random(name, *y.shape, seed=11)).sum() for y in ys) for ys in (actual, wanted)]
        gradients = [torch.autograd.grad(one, leaves, retain_graph=True) for one in loss]
        for ours, theirs in zip(*gradients, strict=True):
            assert_near(ours, theirs)


@pytest.mark.parametrize(("name", "k", "all_columns"), CASES)
def test_the_form_whose_backward_autograd_derives(name, k, all_columns, monkeypatch):
    """Without backward passes of our own: autograd derives them. The maps are those of the loop all the same."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    dispatch = make_dispatch(name, k, all_columns)
    tensors = [random(name, 11, IN), random(name, N, R, IN), random(name, N, R, OUT), random(name, 11, OUT)]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    ours, theirs = dispatch.update(*([leaf] for leaf in leaves))[0], update_by_hand(dispatch, *leaves)
    assert_near(ours, theirs)
    weights = random(name, 11, OUT, seed=5)
    gradients = [torch.autograd.grad((y * weights).sum(), leaves, retain_graph=True) for y in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        assert_near(one, other)
    for part in dispatch.parts:
        y = random(name, len(part.pair_tokens()), OUT)
        real = [p for p, gate in enumerate(part.pair_gates()) if gate != 0]
        for gated in (False, True):
            sums = torch.zeros(11, OUT, dtype=y.dtype)
            for p in real:
                sums[part.pair_tokens()[p]] += y[p] * (part.pair_gates()[p].detach() if gated else 1)
            assert_near(part.collect(y, gated).detach(), sums)


@pytest.mark.parametrize(("name", "k", "all_columns"), CASES)
def test_an_update_in_steps(name, k, all_columns):
    dispatch = make_dispatch(name, k, all_columns)
    x, A, B = random(name, 11, IN), random(name, N, R, IN), random(name, N, R, OUT)
    base = random(name, 11, OUT, seed=9)
    (h,) = dispatch.shrink_tokens([x], [A])
    for part, h_PR in zip(dispatch.parts, h, strict=True):
        own = zip(part.pair_tokens(), part.pair_experts(), strict=True)
        assert_near(h_PR, torch.stack([A[e] @ x[t] for t, e in own]))
    wanted = update_by_hand(dispatch, x, A, B, base).detach()
    assert_near(dispatch.expand_collect(h, B, base).detach(), wanted)
    assert torch.equal(base, random(name, 11, OUT, seed=9))
    assert_near(dispatch.expand_collect(h, B, base.clone(), in_place=True).detach(), wanted)
    (actual,) = dispatch.update([x], [A], [B], [base.clone()], in_place=True)
    assert_near(actual.detach(), wanted)
    if all_columns:  # one tensor less of memory
        with torch.no_grad():
            own = base.clone()
            assert dispatch.expand_collect(h, B, own, in_place=True) is own
            own = base.clone()
            assert dispatch.update([x], [A], [B], [own], in_place=True)[0] is own
    assert dispatch.shrink_tokens([], []) == []


@pytest.mark.parametrize(("name", "k", "all_columns"), CASES)
def test_frozen_inputs_and_matrices_get_no_gradient(name, k, all_columns):
    dispatch = make_dispatch(name, k, all_columns)
    tensors = [random(name, 11, IN), random(name, N, R, IN), random(name, N, R, OUT), random(name, 11, OUT)]
    for trained in range(3):
        own = [tensor.clone().requires_grad_(i == trained) for i, tensor in enumerate(tensors)]
        weights = random(name, 11, OUT, seed=5)
        ours = torch.autograd.grad((dispatch.update(*([t] for t in own))[0] * weights).sum(), own[trained])
        theirs = torch.autograd.grad((update_by_hand(dispatch, *own) * weights).sum(), own[trained])
        assert_near(ours[0], theirs[0])


@pytest.mark.parametrize(("name", "k", "all_columns"), [case for case in CASES if case[1] == 1])
def test_an_expert_without_tokens_may_overflow(name, k, all_columns):
    dispatch = make_dispatch(name, k, all_columns)
    assert 3 not in dispatch.experts
    x, A, B, base = random(name, 11, IN), random(name, N, R, IN), random(name, N, R, OUT), random(name, 11, OUT)
    if name == "dense" and not all_columns:
        return  # its products of pairs need finite matrices
    if all_columns:  # only float16 has so small a range
        dispatch = make_dispatch(name, k, all_columns, dtype=torch.float16)
        x, A, B, base = (tensor.half() for tensor in (x, A, B, base))
    A[3] = torch.inf
    (actual,) = dispatch.update([x], [A], [B], [base])
    wanted = update_by_hand(dispatch, x, A, B, base).detach()
    assert_near(actual, wanted)


@pytest.mark.parametrize("name", ["dense", "gather", "parts of blocks"])
def test_what_projections_share_is_computed_once(name):
    dispatch = make_dispatch(name, 2, True)
    assert dispatch.gate_columns(3) is dispatch.gate_columns(3)
    table = torch.zeros(11, N, dtype=torch.float64)
    for t, row in enumerate(dispatch.experts.tolist()):
        for j, e in enumerate(row):
            table[t, e] = SCALING * dispatch.gates[t, j].detach()
    gates = dispatch.gate_columns(3)
    for column in range(3 * N):
        assert_near(gates[:, column].detach(), table[:, column // 3])
    for part in dispatch.parts:
        assert part.pair_rows() is part.pair_rows() and part.scaled_gates() is part.scaled_gates()


def test_blocks_are_a_power_of_two_and_their_number_is_that_of_the_sizes_alone():
    edges = {1: 8, 31: 8, 32: 16, 255: 16, 256: 32, 511: 32, 512: 64, 1023: 64, 1024: 128, 10**6: 128}
    for pairs, n, size in [*((pairs, 1, size) for pairs, size in edges.items()), (255, 8, 8), (1024, 8, 16)]:
        assert _block_size(pairs, n) == size, (pairs, n)
    one = [torch.zeros(40, 1), torch.arange(40).view(-1, 1) % N, torch.arange(40).view(-1, 1).clamp(max=4)]
    for experts in one:  # all to one expert, evenly, and nearly all to one
        blocks = Blocks(experts.long(), torch.ones(40, 1), N, 1.0)
        assert len(blocks.pair_tokens()) == (40 + N * 7) // 8 * 8


@pytest.mark.parametrize(("name", "k", "all_columns"), [case for case in CASES if case[1] == 3])
def test_everything_is_on_the_inputs_device(name, k, all_columns):
    """The device "meta" has no values, but refuses to meet tensors of another device, as a GPU does."""
    dispatch = make_dispatch(
        name, k, all_columns, device="meta", dtype=torch.bfloat16
    )  # grouped products take no other there
    shapes = (11, 8), (N, 8, 8), (N, 8, 16), (11, 16)
    with torch.no_grad():
        (actual,) = dispatch.update(*([torch.ones(shape, dtype=torch.bfloat16, device="meta")] for shape in shapes))
    assert actual.device.type == "meta" and actual.shape == (11, 16)
    assert all(part.pair_rows().device.type == "meta" for part in dispatch.parts)


def test_only_passes_with_gradients_take_our_backward(monkeypatch):
    """It saves memory; the others need none of it."""
    dispatch = make_dispatch("blocks", 2)
    x, A = torch.randn(dispatch.tokens, 6, dtype=torch.float64), torch.randn(N, 4, 6, dtype=torch.float64)
    ((low,),) = dispatch.shrink_tokens([x], [A.requires_grad_()])
    assert low.grad_fn.name() == "_ShrinkTokensBackward"
    monkeypatch.setattr(_ShrinkTokens, "apply", None)
    with torch.no_grad():
        ((again,),) = dispatch.shrink_tokens([x], [A])
    assert_near(again, low.detach())


@pytest.mark.parametrize("name", ["sorted", "parts of sorted"])
def test_experts_without_tokens_have_no_gradient_where_the_kernel_leaves_theirs_undefined(name, monkeypatch):
    """As CUDA's does on compute capability 10 (pytorch/pytorch#172439)."""
    kernel = torch.nn.functional.grouped_mm

    def undefined(a, b, *, offs):
        product = kernel(a, b, offs=offs)
        if product.dim() == 3:
            product[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return product

    dispatch = make_dispatch(name, 1)
    x, A = random(name, 11, IN), random(name, N, R, IN).requires_grad_()
    B, base = random(name, N, R, OUT).requires_grad_(), random(name, 11, OUT)
    wanted = torch.autograd.grad(dispatch.update([x], [A], [B], [base])[0].sum(), [A, B])
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", undefined)
    gradients = torch.autograd.grad(make_dispatch(name, 1).update([x], [A], [B], [base])[0].sum(), [A, B])
    assert all(map(torch.equal, gradients, wanted)) and not gradients[0][3].any()
