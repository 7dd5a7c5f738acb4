"""Each initialization of experts on the tensors of one FFN, against loops that draw what the library draws."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch.nn.functional import silu

from moe_peft.native.expert_init import (
    FFN,
    INITIALISATIONS,
    ExpertInit,
    generator_for,
    joined,
    router_weight,
    shard_indices,
    share_of,
    zero_ffn,
)
from tests.helpers.close import assert_near

D, N = 5, 3


def ffn_of(f, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(f, D), (f, D), (D, f)]
    return FFN(*((torch.randn(s, generator=generator) * (i + 1) + i).to(dtype) for i, s in enumerate(shapes)))


def output(ffn, x):
    return (silu(x @ ffn.gate.T) * (x @ ffn.up.T)) @ ffn.down.T


def same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert_near(one, other)


def test_a_generator_is_that_of_its_place():
    """Spelled out, so that a seed gives the same experts in every version."""
    for seed, key in ((0, ()), (7, (3, "router"))):
        digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
        wanted = sum(byte << 8 * i for i, byte in enumerate(digest[:8])) // 2
        assert generator_for(seed, *key).initial_seed() == wanted


def test_neurons_scaling_joining_and_zero():
    ffn, other = ffn_of(6), ffn_of(4, seed=1)
    x = torch.randn(7, D, generator=torch.Generator().manual_seed(3))
    picked = ffn.neurons(torch.tensor([4, 1]))
    same(picked, (ffn.gate[[4, 1]], ffn.up[[4, 1]], ffn.down[:, [4, 1]]))
    assert ffn.scaled(1) is ffn
    scaled = ffn.scaled(9.0)
    same(scaled, (ffn.gate, 3 * ffn.up, 3 * ffn.down))
    assert_near(output(scaled, x), 9 * output(ffn, x))
    assert_near(output(joined([ffn, other]), x), output(ffn, x) + output(other, x))
    assert [tuple(w.shape) for w in zero_ffn(6, D)] == [(6, D), (6, D), (D, 6)]
    assert not any(w.any() for w in zero_ffn(6, D))


def test_copies():
    ffn = ffn_of(6)
    assert ExpertInit().make(ffn, 1, N, generator_for(0)) is ffn
    assert INITIALISATIONS["checkpoints"](ExpertInit(), ffn, 1, N, generator_for(0)) is ffn
    assert ExpertInit("permute").make(ffn, 1, N, generator_for(0)) is not ffn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise(dtype):
    ffn = ffn_of(6, dtype)
    generator = generator_for(1)
    for settings in ({"noise_scale": 0.25}, {}):
        scale = settings.get("noise_scale", 0.01)
        result = ExpertInit("noise", **settings).make(ffn, 0, N, generator_for(1))
        generator = generator_for(1)
        wanted = []
        for w in ffn:
            values = w.float().flatten().tolist()
            mean = sum(values) / len(values)
            std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
            wanted.append(w.float() + scale * std * torch.empty(w.shape).normal_(generator=generator))
        same(result, wanted)


@pytest.mark.parametrize("settings", [{}, {"noise_std": 0.5, "noise_share": 0.25}, {"noise_share": 1.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_noise(settings, dtype):
    ffn = ffn_of(40, dtype)
    result = ExpertInit("random_noise", **settings).make(ffn, 0, N, generator_for(2))
    generator = generator_for(2)
    for one, w in zip(result, ffn, strict=True):
        chosen = torch.rand(w.shape, generator=generator)
        noise = torch.empty(w.shape).normal_(generator=generator)
        wanted = w.float().clone()
        for key in (chosen < settings.get("noise_share", 0.5)).nonzero().tolist():
            wanted[tuple(key)] += settings.get("noise_std", 0.02) * noise[tuple(key)]
        same([one], [wanted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subsets_cover_every_neuron_once(dtype):
    ffn = ffn_of(7, dtype)
    owner = [0, 0, 1, 1, 2, 2, 2]  # 7 neurons among 3 experts, from ⌊7e/3⌋
    for expert in range(N):
        result = ExpertInit("subset").make(ffn, expert, N, generator_for(0))
        rows = torch.tensor([index == expert for index in owner])
        same(result, (ffn.gate * rows[:, None], ffn.up * rows[:, None], ffn.down * rows))


def test_permutations():
    ffn = ffn_of(8)
    order = torch.randperm(8, generator=generator_for(4))
    same(ExpertInit("permute").make(ffn, 0, N, generator_for(4)), ffn.neurons(order))
    generator = generator_for(4)
    wanted = [w[torch.randperm(len(w), generator=generator)] for w in ffn]
    same(ExpertInit("permute_columns").make(ffn, 0, N, generator_for(4)), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False, None])
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0, None])
def test_drop(rate, shared, dtype):
    settings = {name: v for name, v in (("drop_rate", rate), ("shared_indices", shared)) if v is not None}
    ffn = ffn_of(9, dtype)
    before = [w.clone() for w in ffn]
    result = ExpertInit("drop", **settings).make(ffn, 0, N, generator_for(6))
    same(ffn, before)
    generator = generator_for(6)
    count = int(9 * (0.5 if rate is None else rate))
    wanted = []
    chosen = torch.randperm(9, generator=generator)[:count]
    for i, w in enumerate(ffn):
        if i and shared is False:
            chosen = torch.randperm(9, generator=generator)[:count]
        rows = (w.T if i == 2 else w).float().clone()
        if count:
            old = rows[chosen]
            shape = (D, count) if i == 2 else (count, D)
            normal = torch.empty(shape).normal_(generator=generator)
            mean = old.mean()
            new = (normal.T if i == 2 else normal) * (old - mean).square().mean().sqrt() + mean
            rows[chosen] = new
        wanted.append((rows.T if i == 2 else rows).to(dtype).contiguous())
    for one, other in zip(result, wanted, strict=True):
        assert one.dtype == dtype
        assert_near(one, other)


def test_shards_are_a_random_partition():
    assert [part.tolist() for part in shard_indices(4, 1, generator_for(0))] == [[0, 1, 2, 3]]
    order = torch.randperm(12, generator=generator_for(0)).tolist()
    assert [part.tolist() for part in shard_indices(12, 3, generator_for(0))] == [order[:4], order[4:8], order[8:]]
    assert [part.tolist() for part in shard_indices(4, 2, generator_for(1))] == torch.randperm(
        4, generator=generator_for(1)
    ).view(2, 2).tolist()
    assert share_of(7, 0.5) == 3


def test_linear_gates():
    assert torch.equal(router_weight("zeros", 3, 4, generator_for(0)), torch.zeros(3, 4))
    for std in (None, 0.1):
        settings = {} if std is None else {"std": std}
        sigma = 0.02 if std is None else std
        normal = torch.empty(3, 4).normal_(generator=generator_for(0)) * sigma
        assert_near(router_weight("normal", 3, 4, generator_for(0), **settings), normal)
        uniform = (2 * torch.empty(3, 4).uniform_(generator=generator_for(0)) - 1) * sigma * math.sqrt(3)
        assert_near(router_weight("uniform", 3, 4, generator_for(0), **settings), uniform)
