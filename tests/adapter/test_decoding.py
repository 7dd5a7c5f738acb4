"""One token without gradients takes straight-line code: the same output as the loop's and the other code's."""

from __future__ import annotations

import pytest
import torch

from moe_peft import pin_dispatch
from moe_peft.adapter.experts import LoraExperts
from moe_peft.adapter.router_recorder import steering_block
from moe_peft.routing import Steering
from tests.helpers.close import assert_near
from tests.helpers.covering import pairs
from tests.helpers.expert_layers import add_adapter, ffn_layer, mixings, tensors
from tests.helpers.reference import reference


@pytest.fixture
def decoded(monkeypatch) -> list[torch.Tensor]:
    """What the straight-line code has returned."""
    outputs, compute = [], LoraExperts._decoded

    def seen(*args):
        outputs.append(compute(*args))
        return outputs[-1]

    monkeypatch.setattr(LoraExperts, "_decoded", seen)
    return outputs


def decode(layer, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), pin_dispatch("gather"):
        return layer(x)


@pytest.mark.parametrize(
    "kind, normalize_top_k, mixing, sizes, base_expert, num_shared_experts, target_projections, dtype",
    pairs(
        ["gated", "gated_bias", "fused", "plain", "conv1d"], [True, False], ["output", "projection"],
        [(2, 1), (4, 2), (4, 3)], [False, True], [0, 2], [None, "inputs", "down"],
        [torch.float64, torch.float32, torch.bfloat16],
    ),
)  # fmt: skip
def test_a_token_is_the_loops(
    kind, normalize_top_k, mixing, sizes, base_expert, num_shared_experts, target_projections, dtype, decoded
):
    layout = ffn_layer(kind).layout
    chosen = {"inputs": [*layout.inputs], "down": [layout.down]}.get(target_projections)
    layer = ffn_layer(
        kind, num_experts=sizes[0], top_k=sizes[1], mixing=mixing, normalize_top_k=normalize_top_k,
        base_expert=base_expert, num_shared_experts=num_shared_experts, target_projections=chosen,
    ).eval()  # fmt: skip
    layer.base_layer.to(dtype)  # PEFT keeps adapters in float32
    if dtype == torch.float64:
        layer.to(dtype)
    for seed in range(3):  # of which some go to the base
        x, d_output = tensors(1, 1, dtype=dtype, seed=seed)
        assert_near(decode(layer, x), reference(layer, x, d_output).output, dtype=dtype)
    assert len(decoded) == 3


STEERINGS = {
    "an expert": Steering(experts=torch.tensor([2])),
    "the base": Steering(experts=torch.tensor([-1]), has_base=True),
    "some": Steering(allowed=torch.tensor([[True, False, True, False]])),
    "weights": Steering(weights=torch.tensor([[0.5, 0.0, -1.0, 2.0]], dtype=torch.float64)),
}


@mixings
@pytest.mark.parametrize("kind", STEERINGS)
def test_a_steered_token(kind, mixing, decoded):
    layer, (x, _) = ffn_layer("gated", torch.float64, mixing=mixing).eval(), tensors(1, 1, dtype=torch.float64)
    with steering_block({layer: STEERINGS[kind]}):
        steered = decode(layer, x)
        assert len(decoded) == 1
        assert_near(steered, layer(x).detach())  # with gradients
    assert not torch.allclose(steered, decode(layer, x))


@mixings
def test_what_it_does_not_compute_is_left_to_the_other_code(mixing, decoded):
    layer, (x, _) = ffn_layer("gated", torch.float64, mixing=mixing).eval(), tensors(1, 1, dtype=torch.float64)
    others = {
        "two tokens": (layer, tensors(2, 1, dtype=torch.float64)[0]),
        "one matrix for all": (ffn_layer("gated", torch.float64, mixing=mixing, expert_type="hydra_lora").eval(), x),
        "dropout": (ffn_layer("gated", torch.float64, mixing=mixing, lora_dropout=0.5).train(), x),
    }
    for other, inputs in others.values():
        torch.manual_seed(0)
        decode(other, inputs)
    with torch.no_grad(), pin_dispatch("dense"):
        dense = layer(x)
    assert not decoded
    assert_near(decode(layer, x), dense)
    decoded.clear()
    add_adapter(layer, "other", mixing="projection")
    layer.double().set_adapter(["default", "other"])
    decode(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        decode(layer.float(), x.float())
    assert not decoded
