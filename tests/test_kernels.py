"""
The Triton kernels, by Triton's interpreter, against loops in float64; and that they compile for a GPU.

`make test-kernels` runs this file, with Triton in a folder of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_llama
from peft import get_peft_model
from reference import assert_close, assert_same, reference, run
from test_numerics import D, ffn_layer, projections_of, tensors
from torch import nn

from moe_peft import MoELoraConfig, pin_dispatch
from moe_peft.adapter.fused import _name

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs triton and TRITON_INTERPRET=1: make test-kernels", allow_module_level=True)

SINGLE, HALF = 3e-6, 4e-3
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


# --- the kernels alone ------------------------------------------------------------------------------------------------


def hidden_by_hand(G, U, H, B, gates_TK, A_down, act):
    """The formulas at the head of `kernels.py`, pair by pair."""
    z, low = [], []
    for t, gates in enumerate(gates_TK):
        total = 0
        for j, gate in enumerate(gates):
            p = t * len(gates) + j
            a = ACTIVATIONS[act](G[t] if H[0] is None else G[t] + H[0][p] @ B[0])
            if U is not None:
                a = a * (U[t] if H[1] is None else U[t] + H[1][p] @ B[1])
            total = total + gate * a
            low.append(A_down @ a if A_down is not None else a[:0])
        z.append(total)
    return torch.stack(z), torch.stack(low)


def leaves_of(values):
    flat = [t for value in values.values() for t in (value if isinstance(value, tuple) else (value,))]
    return [t for t in flat if t is not None]


def in_float64(values):
    def one(x):
        return None if x is None else x.detach().double().requires_grad_()

    return {name: tuple(map(one, x)) if isinstance(x, tuple) else one(x) for name, x in values.items()}


# Sizes: one token and several tiles of them, columns and widths that fill no tile, several parts of both sums.
SIZES = [(1, 1, 3, 20), (37, 2, 24, 200), (70, 3, 64, 64), (9, 4, 100, 330)]
CASES = [("silu", without, *sizes) for without in ("", "gate", "up", "down", "inputs", "U") for sizes in SIZES]
CASES += [(act, without, *SIZES[1]) for act in ACTIVATIONS if act != "silu" for without in ("", "U")]


@pytest.mark.parametrize("act, without, tokens, k, C, f", CASES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, SINGLE), (torch.float16, HALF)], ids=["single", "half"])
def test_the_kernels_compute_the_formulas_and_their_gradients(act, without, tokens, k, C, f, dtype, tolerance):
    from moe_peft.adapter.kernels import fused_hidden

    torch.manual_seed(0)

    def make(*shape):
        return torch.randn(shape).to(dtype).requires_grad_()

    has = {"gate": without not in ("gate", "inputs"), "up": without not in ("up", "inputs", "U")}
    values = {
        "G": make(tokens, f),
        "U": None if without == "U" else make(tokens, f),
        "H": tuple(make(tokens * k, C) if has[name] else None for name in ("gate", "up")),
        "B": tuple(make(C, f) if has[name] else None for name in ("gate", "up")),
        "gates_TK": torch.rand(tokens, k).to(dtype).requires_grad_(),
        "A_down": None if without == "down" else make(C, f),
    }
    exact = in_float64(values)
    z, low = fused_hidden(**values, act=act)
    expected_z, expected_low = hidden_by_hand(**exact, act=act)
    assert_close(z, expected_z, tolerance, "z")
    d_z = torch.randn(tokens, f).to(dtype)
    outputs, seeds, expected_outputs = [z], [d_z], [expected_z]
    if low is not None:
        assert_close(low, expected_low, tolerance, "low")
        outputs, seeds, expected_outputs = [z, low], [d_z, torch.randn_like(low)], [expected_z, expected_low]
    found = torch.autograd.grad(outputs, leaves_of(values), seeds)
    expected = torch.autograd.grad(expected_outputs, leaves_of(exact), [seed.double() for seed in seeds])
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype
        assert_close(got, want, tolerance)


def test_views_of_a_fused_projection_and_of_its_gradient():
    from moe_peft.adapter.kernels import fused_hidden

    torch.manual_seed(0)
    pre, H, B = (torch.randn(*shape).requires_grad_() for shape in ((9, 80), (18, 12), (12, 80)))
    gates, cotangent = torch.rand(9, 2), torch.randn(40, 9).T  # not contiguous
    G, U = pre.chunk(2, -1)
    z, _ = fused_hidden(G, U, (H, H), tuple(B.chunk(2, -1)), gates, None, "silu")
    exact = [x.detach().double().requires_grad_() for x in (pre, H, B)]
    G, U = exact[0].chunk(2, -1)
    by_hand, _ = hidden_by_hand(G, U, (exact[1],) * 2, exact[2].chunk(2, -1), gates.double(), None, "silu")
    assert_close(z, by_hand, SINGLE)
    found = torch.autograd.grad(z, (pre, H, B), cotangent)
    for got, want in zip(found, torch.autograd.grad(by_hand, exact, cotangent.double()), strict=True):
        assert_close(got, want, SINGLE)


def test_the_same_input_gives_the_same_bits():
    layer = ffn_layer(num_experts=5, top_k=2, r=4)
    x, d_output = tensors(40)
    with pin_dispatch("triton"):
        first, second = run(layer, x, d_output), run(layer, x, d_output)
    assert torch.equal(first.output, second.output)
    assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)


# --- in layers and models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, k, r", [(2, 1, 4), (5, 2, 4), (8, 3, 8), (16, 2, 8)])
@pytest.mark.parametrize("mixing", ["output", "projection"])
@pytest.mark.parametrize("normalize_top_k", [True, False], ids=["normalized", "probabilities"])
@pytest.mark.parametrize("kind", ["gated", "gated_bias", "fused", "conv1d"])
def test_ffn_output_and_gradients_are_the_loops(kind, normalize_top_k, mixing, n, k, r):
    layer = ffn_layer(kind, num_experts=n, top_k=k, r=r, mixing=mixing, normalize_top_k=normalize_top_k)
    x, d_output = tensors(11)
    with pin_dispatch("triton"):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output), 1e-5)


@pytest.mark.parametrize(
    "kind, subset", [("gated", subset) for subset in ("down", "gate", "up", "gate+up")] + [("fused", "up")]
)
@pytest.mark.parametrize("mixing, normalize_top_k", [("output", True), ("output", False), ("projection", False)])
def test_experts_on_some_projections_are_the_loops(kind, subset, mixing, normalize_top_k):
    projections = projections_of(kind, subset)
    layer = ffn_layer(kind, mixing=mixing, normalize_top_k=normalize_top_k, target_projections=projections)
    x, d_output = tensors(5)
    with pin_dispatch("triton"):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output), 1e-5)


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_several_updates_of_a_model_are_those_of_another_method(mixing):
    ids = torch.randint(0, 128, (3, 10), generator=torch.Generator().manual_seed(0))

    def train(method):
        torch.manual_seed(1)
        model = get_peft_model(tiny_llama(), MoELoraConfig(num_experts=4, r=4, mixing=mixing, init_lora_weights=False))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model.train()
        with pin_dispatch(method):
            for _ in range(4):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    found, expected = train("triton"), train("dense-blocks")
    for name, value in expected.items():
        assert_close(found[name], value, 2e-5, name)


def test_no_tokens_and_a_single_expert_need_no_kernel():
    with pin_dispatch("triton"):
        assert ffn_layer(mixing="output")(torch.zeros(0, D)).shape == (0, D)
        assert ffn_layer(num_experts=1, top_k=1)(torch.zeros(3, D)).shape == (3, D)


@pytest.mark.parametrize(
    "settings, kind, dtype, message",
    [
        ({"num_experts": 33, "r": 4}, "gated", torch.float32, "num_experts·r is 132, and the kernels take at most 128"),
        ({}, "gated", torch.float64, "there are no kernels for torch.float64"),
        ({}, "plain", torch.float32, "there is no kernel for the block's activation"),
        ({"lora_dropout": 0.5}, "gated", torch.float32, "no kernels with dropout on the down projection's experts"),
    ],
)
def test_what_the_kernels_cannot_compute_is_said(settings, kind, dtype, message):
    layer = ffn_layer(kind, dtype, **settings).train()
    with pin_dispatch("triton"), pytest.raises(ValueError, match=f"triton.*{message}.*use 'dense-blocks'"):
        layer(torch.zeros(3, D, dtype=dtype))


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pin_dispatch("triton"), pytest.raises(ValueError, match="the tensors are on cpu, and Triton needs a GPU"):
        ffn_layer()(torch.zeros(3, D))


def test_activations_are_known_by_their_values():
    assert {name: _name(act) for name, act in ACTIVATIONS.items()} == {name: name for name in ACTIVATIONS}
    assert _name(nn.SiLU()) == "silu" and _name(nn.Hardswish()) is None and _name(nn.ELU()) is None
    assert _name(nn.PReLU(init=0.0)) is None  # ReLU as long as it is not trained


# --- on a GPU ---------------------------------------------------------------------------------------------------------

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from moe_peft.adapter import kernels

SIZES = ("tokens", "F", "C", "stride_g", "stride_u", "stride_bg", "stride_bu", "steps")
for kernel, tile in (
    (kernels._forward, kernels.FORWARD),
    (kernels._backward_tokens, kernels.BACKWARD_TOKENS),
    (kernels._backward_weights, kernels.BACKWARD_WEIGHTS),
):
    for dtype, precision in (("bf16", "tf32"), ("fp32", "ieee")):
        for whole in (True, False):
            flags = {
                "K": 2, "K2": 2, "ROWS": tile.rows, "BF": tile.columns, "BC": 64, "GATED": whole, "HAS_HG": True,
                "HAS_HU": whole, "HAS_A": whole, "ACT": "silu" if whole else "gelu_tanh", "PRECISION": precision,
            }
            single = ("LOW", "DHG", "DHU", "DW", "DBG", "DBU", "DA")
            kinds = {
                name: "constexpr" if name in flags else "i32" if name in SIZES else "*fp32" if name in single
                else "*" + dtype for name in kernel.arg_names
            }
            source = ASTSource(kernel, kinds, {(kernel.arg_names.index(name),): flags[name] for name in flags})
            made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps})
            assert made.asm["cubin"] and made.metadata.shared <= 227 * 1024, made.metadata.shared
            print("compiled", kernel.__name__, dtype, whole)
"""


def test_the_kernels_compile_for_an_h100():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("compiled") == 12, done.stderr[-2000:]
