"""One token without gradients takes straight-line code: the same output as from the loop and from the other code."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from moe_peft import pin_dispatch
from moe_peft.adapter import dispatch_choice
from moe_peft.adapter.experts import LoraExperts
from moe_peft.adapter.router_recorder import steering_block
from moe_peft.routing import AllowedExperts, ForcedExperts, ForcedOrBase, WeightedExperts
from tests.helpers.close import assert_near
from tests.helpers.covering import pairs
from tests.helpers.expert_layers import add_adapter, ffn_layer, mixings, tensors
from tests.helpers.reference import reference

HYDRA = {"expert_type": "hydra_lora"}


@pytest.fixture
def decoded(monkeypatch) -> list[torch.Tensor]:
    """What the straight-line code has returned."""
    outputs, compute = [], LoraExperts._decoded

    def seen(*args):
        outputs.append(compute(*args))
        return outputs[-1]

    monkeypatch.setattr(LoraExperts, "_decoded", seen)
    return outputs


@pytest.fixture(params=["views", "copies"])
def matrices(request, monkeypatch) -> None:
    """How the experts' matrices are read: as on a CPU, or as on a GPU and in traces."""
    if request.param == "copies":
        monkeypatch.setattr(dispatch_choice, "_may_read", lambda tensor: False)


def decode(layer, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), pin_dispatch("gather"):
        return layer(x)


@pytest.mark.parametrize(
    "kind, normalize_top_k, mixing, sizes, base_expert, num_shared_experts, target_projections, settings, dtype",
    pairs(
        ["gated", "gated_bias", "fused", "plain", "conv1d"], [True, False], ["output", "projection"],
        [(2, 1), (4, 2), (4, 3)], [False, True], [0, 2], [None, "inputs", "down"],
        [{}, {"use_rslora": True}, *({"router_type": name} for name in ("top_p", "threshold")), HYDRA],
        [torch.float64, torch.float32, torch.bfloat16],
    ),
)  # fmt: skip
def test_a_token_is_the_loops(
    kind, normalize_top_k, mixing, sizes, base_expert, num_shared_experts, target_projections, settings, dtype, decoded,
    matrices,
):  # fmt: skip
    layout = ffn_layer(kind).layout
    chosen = {"inputs": [*layout.inputs], "down": [layout.down]}.get(target_projections)
    layer = ffn_layer(
        kind, num_experts=sizes[0], top_k=sizes[1], mixing=mixing, normalize_top_k=normalize_top_k,
        base_expert=base_expert, num_shared_experts=num_shared_experts, target_projections=chosen,
        **settings,
    ).eval()  # fmt: skip
    layer.base_layer.to(dtype)  # PEFT keeps adapters in float32
    if dtype == torch.float64:
        layer.to(dtype)
    for seed in range(3):  # of which some go to the base
        x, d_output = tensors(1, 1, dtype=dtype, seed=seed)
        assert_near(decode(layer, x), reference(layer, x, d_output).output, dtype=dtype)
    assert len(decoded) == 3


STEERINGS = {
    "an expert": ForcedExperts(torch.tensor([2])),
    "the base": ForcedOrBase(torch.tensor([-1])),
    "some": AllowedExperts(torch.tensor([[True, False, True, False]])),
    "weights": WeightedExperts(torch.tensor([[0.5, 0.0, -1.0, 2.0]], dtype=torch.float64)),
}


@mixings
@pytest.mark.parametrize("kind", STEERINGS)
def test_a_steered_token(kind, mixing, decoded, matrices):
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


class Products(TorchDispatchMode):
    """Records the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@mixings
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_experts": 32}, {"top_k": 1}, {"num_shared_experts": 1}, HYDRA, {"expert_type": "bottleneck"}],
    ids=str,
)
def test_a_token_on_a_cpu_has_no_batched_product(mixing, settings):
    if settings.get("expert_type") == "bottleneck":
        mixing = "output"  # unread
    layer, (x, _) = ffn_layer("gated", mixing=mixing, **settings).eval(), tensors(1, 1)
    with torch.no_grad(), Products() as products:  # each would wake all threads
        layer(x)
    assert "addmm" in products.names
    assert not products.names & {"bmm", "baddbmm", "baddbmm_"}


@mixings
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("trace", [make_fx, lambda layer: lambda x: torch.jit.trace(layer, x)], ids=["make_fx", "jit"])
def test_a_trace_keeps_no_tokens_experts(trace, mixing):
    layer = ffn_layer("gated", torch.float64, num_experts=8, mixing=mixing).eval()
    tokens = [tensors(1, 1, dtype=torch.float64, seed=seed)[0] for seed in range(4)]
    with torch.no_grad(), pin_dispatch("gather"):
        traced = trace(layer)(tokens[0])
        for x in tokens:
            assert_near(traced(x), layer(x))
