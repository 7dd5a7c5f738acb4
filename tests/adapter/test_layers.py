"""The layers compute what the formulas say: outputs and all gradients against plain loops in float64."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from moe_peft import MoELoraConfig, pin_dispatch
from moe_peft.adapter import dispatch_choice
from moe_peft.adapter.dispatch import PART_SLOTS, Blocks, Dense, Dispatch, Gather, Pairs, Sorted
from moe_peft.adapter.dispatch_choice import choose_method
from moe_peft.adapter.ffn_layout import find_layout
from moe_peft.adapter.layers import MoELoraFFN, MoELoraLayer
from tests.helpers.close import assert_near
from tests.helpers.covering import pairs
from tests.helpers.expert_layers import (
    FFNS,
    D,
    F,
    GatedFFN,
    RecordedDropout,
    add_adapter,
    dense_ffn,
    ffn_layer,
    linear_layer,
    mixings,
    tensors,
)
from tests.helpers.models import tiny_llama
from tests.helpers.reference import assert_same, chosen_experts, merged_weight, reference, run

every_ffn = pytest.mark.parametrize("kind", FFNS)


def projections_of(kind: str, subset: str) -> list[str]:
    layout = find_layout(dense_ffn(kind))
    parts = {"down": [layout.down], "gate": [layout.gate], "up": [layout.up], "gate+up": [layout.gate, layout.up]}
    return parts[subset]


# --- against the loops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, normalize_top_k, mixing, sizes, method",
    pairs(
        FFNS, [True, False], ["output", "projection"],
        [(1, 3), (2, 1), (2, 2), (5, 1), (5, 2), (5, 3), (16, 1), (16, 2), (16, 3)],
        ["dense", "blocks", "gather", "dense-blocks"],
    ),
)  # fmt: skip
def test_ffn_output_and_gradients_are_the_loops_in_float64(kind, normalize_top_k, mixing, sizes, method):
    n, k = sizes
    settings = {"num_experts": n, "top_k": k, "r": 3, "mixing": mixing, "normalize_top_k": normalize_top_k}
    layer = ffn_layer(kind, torch.float64, **settings)
    x, d_output = tensors(5, dtype=torch.float64)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@pytest.mark.parametrize(
    "part, mixed, method",
    pairs(
        [(kind, subset) for kind in FFNS for subset in ("down", "up")]
        + [(kind, subset) for kind in ("gated", "gated_bias") for subset in ("gate", "gate+up")],
        [("output", True), ("output", False), ("projection", False)],
        ["dense", "blocks", "gather", "dense-blocks"],
    ),
)
def test_experts_on_some_projections_are_the_loops_in_float64(part, mixed, method):
    (kind, subset), (mixing, normalize_top_k) = part, mixed
    projections = projections_of(kind, subset)
    layer = ffn_layer(
        kind, torch.float64, mixing=mixing, normalize_top_k=normalize_top_k, target_projections=projections
    )
    assert sorted(layer.moe_lora_A["default"]) == sorted(projections)
    x, d_output = tensors(5, dtype=torch.float64)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@pytest.mark.parametrize(
    "kind, normalize_top_k, mixing, sizes, method",
    pairs(
        FFNS, [True, False], ["output", "projection"],
        [(2, 2, 4), (5, 1, 4), (16, 2, 12), (16, 3, 12)],  # 16·12 columns: not all at once
        ["dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"],
    ),
)  # fmt: skip
def test_ffn_output_and_gradients_are_the_loops_in_float32(kind, normalize_top_k, mixing, sizes, method):
    n, k, r = sizes
    layer = ffn_layer(kind, num_experts=n, top_k=k, r=r, mixing=mixing, normalize_top_k=normalize_top_k)
    x, d_output = tensors(8)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@pytest.mark.parametrize("subset", ["down", "gate", "gate+up"])
@pytest.mark.parametrize("mixing, normalize_top_k", [("output", True), ("output", False), ("projection", False)])
def test_experts_on_some_projections_are_the_loops_with_sorted_pairs(subset, mixing, normalize_top_k):
    layer = ffn_layer(
        "gated_bias",
        mixing=mixing,
        normalize_top_k=normalize_top_k,
        num_experts=16,
        r=12,
        target_projections=projections_of("gated_bias", subset),
    )
    x, d_output = tensors(8)
    with pin_dispatch("sorted"):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@mixings
def test_the_float32_router_of_a_float64_layer_costs_only_its_own_rounding(mixing):
    layer = ffn_layer(mixing=mixing).double()
    x, d_output = tensors(6, dtype=torch.float64)
    assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@mixings
def test_rslora_scales_by_alpha_over_the_root_of_r(mixing):
    x, d_output = tensors(6, dtype=torch.float64)
    layer = ffn_layer(dtype=torch.float64, mixing=mixing, use_rslora=True, lora_alpha=6, r=4)
    same = ffn_layer(dtype=torch.float64, mixing=mixing, lora_alpha=12, r=4)
    assert_same(run(layer, x, d_output), run(same, x, d_output))
    assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@mixings
@pytest.mark.parametrize("method", ["dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"])
def test_without_gradients_the_output_is_the_same(mixing, method):
    layer = ffn_layer(mixing=mixing)
    x, d_output = tensors(8)
    with pin_dispatch(method):
        with torch.no_grad():
            output = layer(x)
        assert not output.requires_grad
        assert_near(output, run(layer, x, d_output).output)


@pytest.mark.parametrize("tokens, n, r", [(2, 4, 4), (2, 16, 12), (96, 4, 4), (96, 5, 3), (96, 16, 12)])
@pytest.mark.parametrize("k", [1, 2, 3])
@mixings
def test_the_method_chosen_by_itself_is_right(tokens, n, r, k, mixing):
    layer = ffn_layer("gated_bias", num_experts=n, top_k=k, r=r, mixing=mixing, normalize_top_k=False)
    x, d_output = tensors(tokens)
    assert_same(run(layer, x, d_output), reference(layer, x, d_output))


# --- the methods among each other -------------------------------------------------------------------------------------


def steer(layer: MoELoraFFN, x: torch.Tensor, offsets: dict[int, float]) -> torch.Tensor:
    """An input whose feature 0 is 1, with the given experts' logits raised through it."""
    x = x.clone()
    x[..., 0] = 1.0
    with torch.no_grad():
        for expert, offset in offsets.items():
            layer.moe_lora_router["default"].weight[expert, 0] = offset
    return x


@pytest.mark.parametrize("n, k, r", [(5, 1, 4), (5, 2, 4), (5, 3, 4), (16, 2, 12), (16, 3, 12)])
@pytest.mark.parametrize("load", ["mixed", "one expert idle", "all to the first"])
@mixings
def test_all_methods_agree_forward_and_backward(mixing, load, n, k, r):
    layer = ffn_layer("gated_bias", num_experts=n, top_k=k, r=r, mixing=mixing, normalize_top_k=False)
    x, d_output = tensors(40)
    x = steer(layer, x, {"mixed": {}, "one expert idle": {1: -50.0}, "all to the first": {0: 50.0}}[load])
    pairs = Counter(expert for experts in chosen_experts(layer, x) for expert in experts)
    assert (pairs[1] == 0) >= (load == "one expert idle")
    assert (pairs[0] == 40) >= (load == "all to the first")
    outcomes = []
    for method in ("dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"):
        with pin_dispatch(method):
            outcomes.append(run(layer, x, d_output))
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0])
    for expert in set(range(n)) - set(pairs):
        for name, gradient in outcomes[0].gradients.items():
            if "moe_lora_A" in name or "moe_lora_B" in name:
                assert not gradient[expert].any(), f"{name}: expert {expert} got no token, but a gradient"


@pytest.mark.parametrize("method", ["dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"])
@mixings
def test_all_pairs_on_one_expert_are_the_loops(mixing, method):
    layer = ffn_layer(num_experts=5, top_k=1, mixing=mixing, normalize_top_k=False)
    x, d_output = tensors(8)
    x = steer(layer, x, {3: 50.0})
    assert chosen_experts(layer, x) == [[3]] * 8
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@pytest.mark.parametrize(
    "mixing, size, method",
    pairs(
        ["output", "projection"], [(33, 1), (35, 2), (67, 3), (70, 3)],
        ["auto", "dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"],
    ),
)  # fmt: skip
def test_any_number_of_tokens_trains(mixing, size, method):
    tokens, k = size
    # The number of pairs is not a multiple of 16 bytes, which grouped products want of a row.
    layer = ffn_layer(num_experts=2 if k < 3 else 4, top_k=k, mixing=mixing)
    x, d_output = tensors(tokens)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@pytest.mark.parametrize("tokens", [7, 8, 21])
@pytest.mark.parametrize(
    "settings",
    [{"mixing": "output"}, {"mixing": "projection"}, {"normalize_top_k": False, "num_shared_experts": 1},
     {"base_expert": True, "num_experts": 5}, {"target_projections": projections_of("gated", "up")}],
    ids=str,
)  # fmt: skip
def test_many_tokens_are_computed_some_at_a_time(settings, tokens, monkeypatch):
    """Seven at once: routed, and their logits noted, once for all."""
    few = replace(dispatch_choice.DEVICES["cpu"], tokens=7)
    monkeypatch.setitem(dispatch_choice.DEVICES, "cpu", few)
    layer = ffn_layer("gated", **{"num_experts": 4, "top_k": 2, "r": 3, **settings})
    calls = []
    layer.router("default").register_forward_hook(lambda *_: calls.append(1))
    x, d_output = tensors(tokens)
    got = run(layer, x, d_output)
    assert len(calls) == 1
    assert_same(got, reference(layer, x, d_output))


@pytest.mark.parametrize("n, r", [(4, 8), (16, 8), (16, 12)])
@pytest.mark.parametrize("width", [18, 30])
def test_ffns_of_any_width_train(width, n, r):
    torch.manual_seed(0)
    ffn = GatedFFN(False)
    ffn.gate_proj, ffn.up_proj, ffn.down_proj = nn.Linear(D, width), nn.Linear(D, width), nn.Linear(width, D)
    layer = MoELoraFFN(ffn, find_layout(ffn), "default")
    add_adapter(layer, num_experts=n, r=r)
    x, d_output = tensors(40)
    assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@pytest.mark.parametrize("n, r", [(4, 4), (16, 12)])
@pytest.mark.parametrize("out", [2, 5, 18])
def test_linears_of_any_width_train(out, n, r):
    # As a classifier's head or a vocabulary of 50257: rows of B that are not a multiple of 16 bytes.
    layer = linear_layer(out, num_experts=n, r=r)
    x, d_output = tensors(160, out=out)
    assert_same(run(layer, x, d_output), reference(layer, x, d_output))


# Compute capability → GPUs. torch has a kernel for grouped products on two generations; on all others it would wait.
# On a CPU, those in float32 are faster than blocks.
CAPABILITIES = {(7, 5): "T4", (8, 0): "A100", (8, 9): "4090", (9, 0): "H100", (10, 0): "B200", (12, 0): "5090"}


@pytest.mark.parametrize(
    "tokens, n, mixes_outputs, device",
    pairs(
        [1, 4, 5, 32, 33, 65536], [2, 5, 64], [True, False],
        ["cpu", "meta", "mps", "xpu", "hip", "cuda without a GPU", *CAPABILITIES],
    ),
)  # fmt: skip
def test_grouped_products_are_chosen_only_where_there_is_a_kernel(tokens, n, mixes_outputs, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device in CAPABILITIES or device == "hip")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0) if device == "hip" else device)
    monkeypatch.setattr(torch.version, "hip", "7.0" if device == "hip" else None)
    has_kernel = {"cpu": torch.float32, "meta": torch.float32, (9, 0): torch.bfloat16, (10, 0): torch.bfloat16}.get(
        device
    )
    place = torch.device(device if device in ("cpu", "meta", "mps", "xpu") else "cuda")
    chosen = {
        (dtype, r, width): choose_method(tokens, 1, n, r, math.gcd(r, width), dtype, mixes_outputs, device=place)
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        for r in (1, 2, 3, 4, 6, 8, 12, 16, 64)
        for width in (4096, 100, 50257)
    }
    grouped = {"sorted", "dense-sorted"}
    assert set(chosen.values()) <= {"dense", "blocks", "gather", "dense-blocks", *(grouped if has_kernel else ())}
    for (dtype, r, width), method in chosen.items():
        if dtype != has_kernel or (r * dtype.itemsize) % 16 or (width * dtype.itemsize) % 16:
            assert method not in grouped, f"r={r} and width {width} in {dtype}"
    if tokens == 33 and n == 64 and has_kernel:
        assert chosen[has_kernel, 64, 4096] == "sorted"


@pytest.mark.parametrize("method", ["dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"])
@mixings
def test_a_pinned_method_is_what_runs_also_where_columns_are_few(method, mixing, monkeypatch):
    """n·r = 32: a second decision, further down, used to take dense products whatever was pinned."""
    calls = set()

    def noted(cls, name):
        original = getattr(cls, name)
        monkeypatch.setattr(
            cls, name, lambda self, *args, **own: calls.add(cls.__name__) or original(self, *args, **own)
        )

    for cls in (Dense, Gather, Blocks, Sorted):
        noted(cls, "shrink")
    # What products with all experts' columns need.
    noted(Dispatch, "gate_columns")
    noted(Pairs, "pair_rows")
    layer = ffn_layer(mixing=mixing, num_experts=4, r=8)
    with pin_dispatch(method):
        layer(tensors(16)[0])
    by_pairs = {"dense": "Dense", "blocks": "Blocks", "sorted": "Sorted", "gather": "Gather"}[method.split("-")[-1]]
    assert calls - {"Dispatch", "Pairs"} == (
        set() if mixing == "projection" and not method.startswith(("blocks", "sorted")) else {by_pairs}
    )
    assert bool(calls & {"Dispatch", "Pairs"}) == method.startswith("dense")


def test_pins_hold_in_their_block_alone():
    def chosen():
        return choose_method(40, 2, 4, 8, 8, torch.float32, True, torch.device("cpu"))

    free = chosen()
    with pin_dispatch("sorted"):
        with contextlib.suppress(KeyError), pin_dispatch("gather"):
            assert chosen() == "gather"
            raise KeyError
        assert chosen() == "sorted"
    assert chosen() == free != "gather"


@pytest.mark.parametrize("r, dtype", [(3, torch.float32), (4, torch.bfloat16), (8, torch.float64)])
def test_pinning_grouped_products_where_there_are_none_is_an_error_that_says_so(r, dtype):
    layer = ffn_layer(dtype=dtype, r=r)
    x, _ = tensors(8, dtype=dtype)
    with pin_dispatch("sorted"), pytest.raises(ValueError, match=rf"pin_dispatch.*sorted.*{dtype}.*'blocks'"):
        layer(x)
    assert layer(x).shape == x.shape


# --- against other implementations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, k", [(4, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("tokens", [3, 64])
def test_mixing_outputs_equals_a_mixtral_block_of_the_merged_experts(tokens, n, k):
    layer = ffn_layer("gated", num_experts=n, top_k=k)
    config = MixtralConfig(
        hidden_size=D,
        intermediate_size=F,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=n,
        num_experts_per_tok=k,
    )
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(layer.moe_lora_router["default"].weight)
        for i in range(n):
            gate, up, down = (merged_weight(layer, "default", f"{p}_proj", i) for p in ("gate", "up", "down"))
            block.experts.gate_up_proj[i] = torch.cat([gate, up])
            block.experts.down_proj[i] = down
    x, d_output = tensors(1, tokens)
    ours, native = run(layer, x, d_output), run(block, x, d_output)
    assert_near(ours.output, native.output)
    router = ours.gradients["moe_lora_router.default.weight"]
    if k > 1:
        assert_near(ours.gradients["x"], native.gradients["x"])
        assert_near(router, native.gradients["gate.weight"])
    else:  # Mixtral divides the only gate by itself, and its router learns nothing; ours is straight-through
        assert router.norm() > 1e3 * native.gradients["gate.weight"].norm()


def test_a_linear_with_one_expert_equals_peft_lora():
    layer = linear_layer(out=20, num_experts=1, r=4, lora_alpha=12)
    lora = get_peft_model(
        nn.Sequential(copy.deepcopy(layer.base_layer)), LoraConfig(r=4, lora_alpha=12, target_modules=["0"])
    )
    plain = lora.base_model.model[0]
    with torch.no_grad():
        plain.lora_A["default"].weight.copy_(layer.moe_lora_A["default"]["weight"][0])
        plain.lora_B["default"].weight.copy_(layer.moe_lora_B["default"]["weight"][0].T)
    x, d_output = tensors(3, 7, out=20)
    ours, peft = run(layer, x, d_output), run(plain, x, d_output)
    assert not layer.moe_lora_router
    assert_near(ours.output, peft.output)
    assert_near(ours.gradients["x"], peft.gradients["x"])
    A, B = (f"moe_lora_{part}.default.weight" for part in "AB")
    assert_near(ours.gradients[A][0], peft.gradients["lora_A.default.weight"])
    assert_near(ours.gradients[B][0], peft.gradients["lora_B.default.weight"].T)


@pytest.mark.parametrize(
    "mixing, normalize_top_k, sizes, method",
    pairs(
        ["output", "projection"], [True, False], [(2, 1, 4), (5, 3, 4), (16, 2, 12)],
        ["dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"],
    ),
)  # fmt: skip
def test_a_linear_with_experts_mixes_their_updates_whatever_the_mixing(mixing, normalize_top_k, sizes, method):
    n, k, r = sizes
    layer = linear_layer(20, num_experts=n, top_k=k, r=r, mixing=mixing, normalize_top_k=normalize_top_k)
    x, d_output = tensors(8, out=20)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


# --- several adapters, and how often the base runs --------------------------------------------------------------------


PAIRS = [
    ({"mixing": "output"}, {"mixing": "projection", "num_experts": 5, "top_k": 3, "r": 8}),
    ({"mixing": "projection"}, {"mixing": "projection", "num_experts": 5, "top_k": 3, "r": 8}),
    ({"mixing": "projection"}, {"mixing": "output", "top_k": 1}),
    ({"mixing": "output", "normalize_top_k": False}, {"mixing": "projection", "normalize_top_k": False, "top_k": 1}),
    ({"mixing": "output"}, {"num_experts": 1}),
    ({"num_experts": 1}, {"num_experts": 1}),
    ({"mixing": "output", "target_projections": ["down_proj"]}, {"target_projections": ["gate_proj"]}),
]


def two_adapters(first: dict, second: dict, dtype: torch.dtype = torch.float64) -> MoELoraFFN:
    layer = ffn_layer("gated_bias", dtype, **first)
    add_adapter(layer, "second", **second)
    layer.set_adapter(["default", "second"])
    layer.to(dtype)
    return layer


@pytest.mark.parametrize("method", ["dense", "blocks", "gather", "dense-blocks"])
@pytest.mark.parametrize("first, second", PAIRS)
def test_updates_of_two_active_adapters_add_up(first, second, method):
    layer = two_adapters(first, second)
    x, d_output = tensors(6, dtype=torch.float64)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output, ("default", "second")))


def test_two_active_adapters_of_one_expert_are_two_active_loras():
    layer = two_adapters({"num_experts": 1}, {"num_experts": 1, "r": 8})
    merged = copy.deepcopy(layer.base_layer)
    for adapter in ("default", "second"):
        A, B = layer.expert_parameters(adapter)
        for name in A:
            getattr(merged, name).weight.data += layer.moe_lora_spec[adapter].scaling * B[name][0].T @ A[name][0]
    x, _ = tensors(6, dtype=torch.float64)
    assert_near(layer(x), merged(x))


def test_two_active_adapters_that_mix_outputs_are_refused_by_name():
    layer = two_adapters({"mixing": "output"}, {"mixing": "output"})
    with pytest.raises(ValueError, match="'default' and 'second'"):
        layer(tensors(6, dtype=torch.float64)[0])


@pytest.mark.parametrize("first, second", PAIRS)
def test_two_active_adapters_add_with_sorted_pairs(first, second):
    layer = two_adapters(first, second, torch.float32)
    x, d_output = tensors(8)
    with pin_dispatch("sorted"):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output, ("default", "second")))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["gated", "fused", "conv1d"])
@pytest.mark.parametrize(
    "adapters",
    [
        [{"mixing": "output", "top_k": 3}],
        [{"mixing": "projection", "top_k": 3}],
        [{"mixing": "projection", "top_k": 3}, {"mixing": "projection", "top_k": 3}],
        [{"mixing": "output", "top_k": 3}, {"mixing": "projection", "top_k": 3}],
    ],
    ids=["output", "projection", "two of projection", "one of each"],
)
def test_every_base_projection_runs_once_per_forward_on_each_token_once(adapters, kind, training):
    layer = ffn_layer(kind, lora_dropout=0.1, **adapters[0])
    for i, settings in enumerate(adapters[1:]):
        add_adapter(layer, f"more{i}", **settings)
    layer.set_adapter(list(layer.moe_lora_spec))
    layer.train(training)
    rows: dict[str, list[int]] = {name: [] for name in layer.layout.projections}
    for name in rows:
        getattr(layer.base_layer, name).register_forward_hook(
            lambda module, args, output, name=name: rows[name].append(args[0].shape[:-1].numel())
        )
    x, d_output = tensors(2, 5)
    layer(x).backward(d_output)
    assert rows == {name: [10] for name in layer.layout.projections}


class KeepingLinear(nn.Linear):
    """A linear that keeps what it gave, as a quantized one or a user's own may."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.kept = (output, output.clone())
        return output


def keeping(linear: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    forward = linear.forward

    def keep(x: torch.Tensor) -> torch.Tensor:
        output = forward(x)
        linear.kept = (output, output.clone())
        return output

    return keep


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("seen_by", ["hook", "class", "forward"])
@pytest.mark.parametrize("make", [ffn_layer, linear_layer])
@mixings
def test_outputs_of_the_base_that_others_hold_are_not_overwritten(mixing, make, seen_by, grad):
    layer = make(mixing=mixing)
    linears = [module for module in layer.base_layer.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        if seen_by == "hook":
            linear.register_forward_hook(lambda module, args, output: setattr(module, "kept", (output, output.clone())))
        elif seen_by == "class":
            linear.__class__ = KeepingLinear
        else:
            linear.forward = keeping(linear)
    with torch.set_grad_enabled(grad):
        layer(tensors(8)[0])
    for linear in linears:
        output, before = linear.kept
        assert torch.equal(output, before)


@pytest.mark.parametrize("make", [ffn_layer, linear_layer])
@mixings
def test_hooks_of_the_bases_backward_and_selective_checkpoints_are_borne(mixing, make):
    layer = make(mixing=mixing)
    x, d_output = tensors(8)
    expected = run(layer, x, d_output)

    def checkpointed(inputs: torch.Tensor) -> torch.Tensor:
        kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])
        return checkpoint(forward, inputs, use_reentrant=False, context_fn=kept)

    seen = []
    for linear in [module for module in layer.base_layer.modules() if isinstance(module, nn.Linear)]:
        linear.register_full_backward_hook(lambda module, d_input, d_output: seen.append(module))
    assert_same(run(layer, x, d_output), expected)
    assert seen
    forward, layer.forward = layer.forward, checkpointed
    assert_same(run(layer, x, d_output), expected)


@pytest.mark.parametrize("method", ["dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"])
@mixings
def test_an_input_without_gradient_leaves_the_experts_theirs(mixing, method):
    layer = ffn_layer("gated_bias", num_experts=16, r=12, mixing=mixing)  # 16·12 columns: not all at once
    x, d_output = tensors(8)
    with pin_dispatch(method):
        expected = run(layer, x, d_output).gradients
        layer.zero_grad()
        layer(x).backward(d_output)
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert_near(parameter.grad, expected[name], name)


@pytest.mark.parametrize("method", ["dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"])
@mixings
def test_a_graph_that_is_kept_runs_backward_twice(mixing, method):
    layer = ffn_layer("gated_bias", num_experts=16, r=12, mixing=mixing)
    x, d_output = tensors(8)
    with pin_dispatch(method):
        expected = run(layer, x, d_output).gradients
        layer.zero_grad()
        output = layer(x)
        output.backward(d_output, retain_graph=True)
        output.backward(d_output)
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert_near(parameter.grad, 2 * expected[name], name)


def test_disabled_adapters_leave_the_base():
    layer = ffn_layer()
    x, _ = tensors(6)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x))
    layer.enable_adapters(True)
    assert (layer(x) - layer.base_layer(x)).abs().max() > 0.1


# --- dropout ----------------------------------------------------------------------------------------------------------


def masks_by_projection(
    layer: MoELoraFFN, x: torch.Tensor, recorded: list[torch.Tensor], method: str
) -> dict[str, torch.Tensor]:
    """The masks as the reference takes them: in mixing "output" those of down in the order [token, slot]."""
    *names, down = layer.layout.projections
    masks, of_down = dict(zip(names, recorded, strict=False)), recorded[len(names) :]
    spec, experts = layer.moe_lora_spec["default"], chosen_experts(layer, x)
    if spec.mixing == "projection" or spec.num_experts == 1:
        (masks[down],) = of_down
    elif method == "sorted":  # part by part, its pairs in the order of their experts
        parts = []
        for part, mask in enumerate(of_down):
            slots = range(PART_SLOTS * part, min(PART_SLOTS * (part + 1), spec.top_k))
            pairs = sorted(
                ((t, j) for t in range(len(experts)) for j in slots), key=lambda pair: experts[pair[0]][pair[1]]
            )
            rows = torch.tensor([[pairs.index((t, j)) for j in slots] for t in range(len(experts))])
            parts.append(mask[rows])
        masks[down] = torch.cat(parts, dim=1)
    else:
        (mask,) = of_down
        masks[down] = mask.view(len(experts), spec.top_k, -1)
    return masks


@pytest.mark.parametrize("method, compiling", [("dense", False), ("gather", False), ("sorted", False), ("dense", True)])
@pytest.mark.parametrize("n, k, mixing", [(1, 1, "output"), (5, 2, "output"), (5, 3, "output"), (5, 2, "projection")])
@pytest.mark.parametrize("kind", ["gated_bias", "fused", "conv1d"])
def test_training_with_dropout_has_the_gradients_of_the_loops_with_the_same_masks(
    kind, n, k, mixing, method, compiling, monkeypatch
):
    dtype = torch.float32 if method == "sorted" else torch.float64
    layer = ffn_layer(kind, dtype, num_experts=n, top_k=k, mixing=mixing, lora_dropout=0.4).train()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    x, d_output = tensors(8, dtype=dtype)
    with pin_dispatch(method), RecordedDropout() as dropout:
        actual = run(layer, x, d_output)
    masks = masks_by_projection(layer, x, dropout.masks, method)
    values = {round(value, 6) for mask in masks.values() for value in mask.unique().tolist()}
    assert values == {0.0, round(1 / 0.6, 6)}
    assert_same(actual, reference(layer, x, d_output, masks=masks))


@every_ffn
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("method", ["dense", "blocks", "gather", "dense-blocks"])
def test_what_torch_compile_traces_computes_the_loops(kind, k, method, monkeypatch):
    # Compiled code goes without the autograd function of its own.
    layer = ffn_layer(kind, torch.float64, top_k=k, normalize_top_k=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x, d_output = tensors(6, dtype=torch.float64)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@mixings
def test_dropout_of_the_config_acts_in_training_only_and_by_the_seed(mixing):
    layer = ffn_layer(mixing=mixing, lora_dropout=0.5)
    x, d_output = tensors(8)
    plain = reference(layer, x, d_output)
    assert_same(run(layer.eval(), x, d_output), plain)
    layer.train()
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(run(layer, x, d_output).output)
    assert torch.equal(outputs[0], outputs[1])
    assert (outputs[0] - outputs[2]).abs().max() > 0.1
    assert (outputs[0] - plain.output).abs().max() > 0.1


# --- precision --------------------------------------------------------------------------------------------------------


def router_outputs(layer: MoELoraFFN) -> list[torch.Tensor]:
    """Filled with the router's logits whenever it runs."""
    logits: list[torch.Tensor] = []
    layer.moe_lora_router["default"].register_forward_hook(lambda module, args, output: logits.append(output))
    return logits


def exact_logits(layer: MoELoraFFN, x: torch.Tensor) -> torch.Tensor:
    return x.double().reshape(-1, x.shape[-1]) @ layer.moe_lora_router["default"].weight.double().T


@pytest.mark.parametrize("tokens", [4, 96])
@pytest.mark.parametrize("k", [2, 3])
@mixings
@pytest.mark.parametrize("kind", ["gated_bias", "fused"])
def test_bfloat16_base_with_float32_experts_is_close_to_float64(kind, mixing, k, tokens):
    layer = ffn_layer(kind, mixing=mixing, top_k=k, r=8, lora_alpha=16)
    layer.base_layer.to(torch.bfloat16)
    logits = router_outputs(layer)
    x, d_output = tensors(tokens, dtype=torch.bfloat16)
    actual = run(layer, x, d_output)
    assert actual.output.dtype == torch.bfloat16
    assert {actual.gradients[name].dtype for name in actual.gradients if "moe_lora_" in name} == {torch.float32}
    assert logits[0].dtype == torch.float32
    assert_near(logits[0], exact_logits(layer, x))
    assert_same(actual, reference(layer, x, d_output))


@pytest.mark.parametrize("tokens", [4, 96])
@mixings
def test_bfloat16_autocast_keeps_the_router_in_float32(mixing, tokens):
    layer = ffn_layer("gated_bias", mixing=mixing, r=8)
    logits = router_outputs(layer)
    x, d_output = tensors(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(layer, x, d_output)
    assert actual.output.dtype == torch.bfloat16
    assert logits[0].dtype == torch.float32
    assert_near(logits[0], exact_logits(layer, x))
    assert_same(actual, reference(layer, x, d_output))


class ReturningLinear(nn.Linear):
    """Gives back the dtype it got, whatever autocast makes of the product, as bitsandbytes' 4-bit linear does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to(x.dtype)


@pytest.mark.parametrize(
    "mixing, tokens, returning, size",
    pairs(["output", "projection"], [2, 96], ["inputs", "down", "all"], [(1, 8), (4, 8), (16, 12)]),
)
def test_autocast_over_linears_that_give_back_their_inputs_dtype(mixing, tokens, returning, size):
    n, r = size
    layer = ffn_layer("gated_bias", mixing=mixing, num_experts=n, r=r, normalize_top_k=False)
    layouts = {"inputs": layer.layout.inputs, "down": [layer.layout.down], "all": layer.layout.projections}
    for name in layouts[returning]:
        getattr(layer.base_layer, name).__class__ = ReturningLinear
    x, d_output = tensors(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        base_dtype = layer.base_layer(x).dtype
        actual = run(layer, x, d_output)
    assert actual.output.dtype == base_dtype
    assert_same(actual, reference(layer, x, d_output), torch.bfloat16)


def test_peft_keeps_experts_and_routers_of_a_bfloat16_model_in_float32():
    model = get_peft_model(tiny_llama().to(torch.bfloat16), MoELoraConfig(num_experts=4, r=8, init_lora_weights=False))
    assert {p.dtype for name, p in model.named_parameters() if "moe_lora_" in name} == {torch.float32}
    layer = next(module for module in model.modules() if isinstance(module, MoELoraFFN))
    generator = torch.Generator().manual_seed(1)
    x, d_output = (torch.randn(6, 64, generator=generator).to(torch.bfloat16) for _ in range(2))
    assert_same(run(layer, x, d_output), reference(layer, x, d_output))


# --- shapes -----------------------------------------------------------------------------------------------------------


def layers_of_both_types(**settings) -> Sequence[MoELoraLayer]:
    return ffn_layer("gated_bias", **settings), linear_layer(**settings)


@pytest.mark.parametrize("shape", [(12,), (2, 6), (1, 12), (12, 1), (2, 3, 2)])
@mixings
def test_leading_dimensions_are_kept_and_mean_nothing(mixing, shape):
    x, d_output = tensors(12)
    for layer in layers_of_both_types(mixing=mixing):
        flat = run(layer, x, d_output)
        shaped = run(layer, x.view(*shape, D), d_output.view(*shape, D))
        assert shaped.output.shape == (*shape, D)
        shaped.output = shaped.output.view(12, D)
        shaped.gradients["x"] = shaped.gradients["x"].view(12, D)
        for name, gradient in flat.gradients.items():
            assert_near(shaped.gradients[name], gradient, name)
        assert_near(shaped.output, flat.output)


def test_an_input_that_is_not_contiguous_is_taken():
    x, _ = tensors(3, 4)
    for layer in layers_of_both_types():
        expected = layer(x.transpose(0, 1).contiguous())
        assert torch.equal(layer(x.transpose(0, 1)), expected)


@pytest.mark.parametrize("n, r", [(4, 4), (16, 12)])
@pytest.mark.parametrize("method", ["auto", "dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"])
@mixings
def test_one_token_is_the_loop_though_most_experts_get_none(mixing, method, n, r):
    x, d_output = tensors(1, 1)
    for layer in layers_of_both_types(mixing=mixing, num_experts=n, r=r):
        expected = reference(layer, x, d_output)
        with pin_dispatch(method):  # the router's gradient is a difference of the experts'
            assert_same(run(layer, x, d_output), expected, scale=expected.gradients["x"])


@pytest.mark.parametrize("n, r", [(4, 4), (16, 12)])
@pytest.mark.parametrize("method", ["auto", "dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"])
@mixings
def test_no_token_at_all_gives_no_output_and_zero_gradients(mixing, method, n, r):
    x, d_output = tensors(1, 0)
    for layer in layers_of_both_types(mixing=mixing, num_experts=n, r=r):
        with pin_dispatch(method):
            outcome = run(layer, x, d_output)
        assert outcome.output.shape == (1, 0, D)
        assert all(not gradient.any() for gradient in outcome.gradients.values())


def test_an_activation_that_works_in_place_is_kept_off_what_backward_needs():
    torch.manual_seed(0)
    base = tiny_llama(layers=1)
    expected_base = tiny_llama(layers=1)
    base.model.layers[0].mlp.act_fn = torch.nn.ReLU(inplace=True)
    expected_base.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    ids = torch.arange(3, 19).view(2, 8)
    gradients = []
    for model in (base, expected_base):
        torch.manual_seed(1)
        adapted = get_peft_model(model, MoELoraConfig(num_experts=4, r=4, init_lora_weights=False))
        adapted(input_ids=ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in adapted.named_parameters() if p.requires_grad})
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=0, atol=0)
