"""
Experts that share their first matrix (HydraLoRA): outputs, gradients and trainings are those of plain loops and of LoRA
experts whose A matrices are tied, and every export is exact.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from torch import nn

from moe_peft import MoELoraConfig, expert_to_lora, lora_to_moe, pin_dispatch
from moe_peft.adapter.experts import EXPERTS
from moe_peft.adapter.layers import MoELoraFFN, MoELoraLayer
from moe_peft.models.layer import router_parameters
from moe_peft.models.model_size import expert_similarity, model_size
from moe_peft.native import export_adapter
from tests.helpers.close import assert_near
from tests.helpers.covering import pairs
from tests.helpers.expert_layers import (
    RecordedDropout,
    add_adapter,
    ffn_layer,
    linear_layer,
    mixings,
    tensors,
)
from tests.helpers.models import tiny_llama
from tests.helpers.native_case import adapter as saved_adapter
from tests.helpers.native_case import dense_model, saved
from tests.helpers.native_case import logits as native_logits
from tests.helpers.reference import assert_same, reference, run

HYDRA = {"expert_type": "hydra_lora"}
IDS = torch.randint(3, 128, (2, 10), generator=torch.Generator().manual_seed(1))


def make(**settings: Any) -> PeftModel:
    """A tiny model with random experts and routers that are sure of their choice."""
    torch.manual_seed(1)
    defaults = {"num_experts": 4, "r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **HYDRA}
    model = get_peft_model(tiny_llama(), MoELoraConfig(**{**defaults, **settings}))
    for parameter in router_parameters(model).values():
        nn.init.normal_(parameter, std=0.4)
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize(
    "kind, normalize_top_k, mixing, sizes, method",
    pairs(
        ["gated", "gated_bias", "fused", "plain", "conv1d"],
        [True, False],
        ["output", "projection"],
        [(1, 1), (2, 1), (5, 2), (16, 3)],
        ["dense", "blocks", "gather", "dense-blocks"],
    ),
)
def test_output_and_gradients_are_the_loops_in_float64(kind, normalize_top_k, mixing, sizes, method):
    n, k = sizes
    settings = {"num_experts": n, "top_k": k, "r": 3, "mixing": mixing, "normalize_top_k": normalize_top_k, **HYDRA}
    layer = ffn_layer(kind, torch.float64, **settings)
    assert all(len(A) == 1 for A in layer.expert_parameters("default")[0].values())
    x, d_output = tensors(2, 5, dtype=torch.float64)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@pytest.mark.parametrize("tokens", [2, 3, 96])
@pytest.mark.parametrize("method", ["auto", "sorted", "dense-sorted"])
@pytest.mark.parametrize("n, k, r", [(4, 2, 8), (16, 3, 16)])
@mixings
def test_output_and_gradients_are_the_loops_in_float32(mixing, n, k, r, method, tokens):
    layer = ffn_layer("gated_bias", seed=3, num_experts=n, top_k=k, r=r, mixing=mixing, **HYDRA)
    x, d_output = tensors(tokens)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@pytest.mark.parametrize("method", ["auto", "dense", "blocks", "gather"])
@pytest.mark.parametrize("n", [1, 5])
def test_a_single_linear_computes_the_loops(n, method):
    layer = linear_layer(num_experts=n, mixing="projection", **HYDRA).double()
    x, d_output = tensors(9, dtype=torch.float64)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@pytest.mark.parametrize("autocast", [True, False])
@mixings
def test_bfloat16_is_close_to_float64_and_keeps_gradients_in_float32(mixing, autocast):
    layer = ffn_layer("gated_bias", mixing=mixing, **HYDRA)
    if not autocast:
        layer.base_layer.to(torch.bfloat16)
    x, d_output = tensors(96, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual = run(layer, x, d_output)
    assert {value.dtype for name, value in actual.gradients.items() if "moe_lora_" in name} == {torch.float32}
    assert_same(actual, reference(layer, x, d_output))


def test_each_projection_has_its_own_dropout_mask():
    layer = ffn_layer("gated_bias", torch.float64, lora_dropout=0.4, mixing="projection", **HYDRA).train()
    x, d_output = tensors(8, dtype=torch.float64)
    with RecordedDropout() as dropout:
        actual = run(layer, x, d_output)
    masks = dict(zip(("gate_proj", "up_proj", "down_proj"), dropout.masks, strict=True))
    assert_same(actual, reference(layer, x, d_output, masks=masks))


@mixings
def test_updates_of_active_adapters_of_two_kinds_add_up_before_a_bottleneck(mixing):
    layer = ffn_layer("gated_bias", mixing=mixing, **HYDRA)
    add_adapter(layer, "lora", num_experts=3, mixing="projection")
    add_adapter(layer, "bottleneck", expert_type="bottleneck", bottleneck_size=4)
    layer.double()
    names = ["default", "lora", "bottleneck"]
    layer.set_adapter(names)
    layer.requires_grad_(True)
    x, d_output = tensors(6, dtype=torch.float64)
    assert_same(run(layer, x, d_output), reference(layer, x, d_output, names))


@pytest.mark.slow
@pytest.mark.parametrize(("mixing", "method"), [("output", "auto"), ("projection", "gather")])
def test_a_compiled_layer_has_no_graph_break_and_the_same_output_and_gradients(mixing, method):
    layer = ffn_layer("gated_bias", mixing=mixing, **HYDRA)
    x, d_output = tensors(24)
    with pin_dispatch(method):
        expected = run(layer, x, d_output)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        inputs = x.clone().requires_grad_()
        output = compiled(inputs)
        output.backward(d_output)
    assert_near(output, expected.output)
    assert_near(inputs.grad, expected.gradients["x"])
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert_near(parameter.grad, expected.gradients[name], name)


def layers(model: nn.Module) -> list[MoELoraFFN]:
    return [module for module in model.modules() if isinstance(module, MoELoraFFN)]


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointing", "reentrant"])
@mixings
def test_updates_are_those_of_lora_experts_with_a_tied_A(mixing, checkpointing):
    """A tied A gets the sum of the experts' gradients, and all copies take the step of that sum."""
    model, tied = make(mixing=mixing), make(mixing=mixing, expert_type="lora")
    model, tied = model.double().train(), tied.double().train()
    tied.load_state_dict({
        name: tensor.expand(4, -1, -1) if "moe_lora_A" in name else tensor
        for name, tensor in model.state_dict().items()
    })  # fmt: skip
    if checkpointing is not None:
        for one in (model, tied):
            one.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            one.enable_input_require_grads()
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, tied)]
    for step in range(5):
        ids = torch.randint(3, 128, (3, 12), generator=torch.Generator().manual_seed(step))
        losses = []
        for one, optimizer in zip((model, tied), optimizers, strict=True):
            optimizer.zero_grad()
            loss = one(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
        for layer in layers(tied):
            for A in layer.expert_parameters("default")[0].values():
                A.grad = A.grad.sum(0, keepdim=True).expand_as(A).clone()
        for optimizer in optimizers:
            optimizer.step()
        assert_near(*losses, dtype=torch.float32)  # the balancing loss is
    for layer, other in zip(layers(model), layers(tied), strict=True):
        for own, theirs in zip(layer.expert_parameters("default"), other.expert_parameters("default"), strict=True):
            for name, parameter in own.items():
                assert_near(parameter.expand_as(theirs[name]), theirs[name], name, dtype=torch.float32)


@pytest.mark.parametrize("targets", [None, ["mlp", "q_proj"]], ids=str)
def test_it_is_saved_once_and_loads(targets, tmp_path):
    model = make(target_modules=targets)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    shapes = {parameter.shape[0] for name, parameter in loaded.named_parameters() if "moe_lora_A" in name}
    assert shapes == {1} and loaded.peft_config["default"].expert_type == "hydra_lora"
    if targets:
        linear = model.get_base_model().model.layers[0].self_attn.q_proj
        assert isinstance(linear, MoELoraLayer) and linear.moe_lora_A["default"]["weight"].shape == (1, 4, 64)


def test_the_size_counts_the_shared_matrix_for_every_token():
    d, f, r, n, k, layers_ = 64, 128, 4, 4, 2, 2
    size, dense = model_size(make()), model_size(tiny_llama())
    A, B, router = (2 * d + f) * r, (2 * f + d) * r, n * d
    assert size.total - dense.total == layers_ * (A + n * B + router)
    assert size.active - dense.active == layers_ * (A + k * B + router)


def test_experts_are_as_alike_as_their_updates():
    model = make()
    total = torch.zeros(4, 4, dtype=torch.float64)
    for layer in layers(model):
        for name, A in layer.moe_lora_A["default"].items():
            updates = torch.stack([(B.T @ A[0]).flatten().double() for B in layer.moe_lora_B["default"][name]])
            total += updates @ updates.T
    norms = total.diagonal().sqrt()
    assert_near(expert_similarity(model), total / torch.outer(norms, norms), dtype=torch.float32)


def test_an_expert_is_a_lora_and_loras_with_one_A_become_experts(tmp_path):
    model = make()
    for expert in range(4):
        expert_to_lora(model, expert, tmp_path / str(expert))
    again = lora_to_moe(tiny_llama(), [tmp_path / str(i) for i in range(4)], **HYDRA)
    for layer, other in zip(layers(model), layers(again), strict=True):
        for own, theirs in zip(layer.expert_parameters("default"), other.expert_parameters("default"), strict=True):
            assert all(torch.equal(parameter, theirs[name]) for name, parameter in own.items())


def test_loras_with_an_A_each_cannot_share_one(tmp_path):
    base = tiny_llama()
    for seed in range(2):
        other = tiny_llama()
        torch.manual_seed(seed)
        config = LoraConfig(r=2, target_modules=["up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        get_peft_model(other, config).save_pretrained(tmp_path / str(seed))
    with pytest.raises(ValueError, match=r"lora_to_moe: .*up_proj: the LoRAs differ in A"):
        lora_to_moe(base, [tmp_path / "0", tmp_path / "1"], **HYDRA)
    assert not any("lora" in name for name, _ in base.named_modules())


def test_the_export_computes_what_the_adapter_computes(tmp_path):
    name = saved(dense_model("llama"), tmp_path / "base")
    model = saved_adapter(dense_model("llama"), tmp_path / "adapter", name, **HYDRA)
    export_adapter(tmp_path / "adapter", tmp_path / "moe")
    assert_near(native_logits(tmp_path / "moe"), native_logits(model))
    plain = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(native_logits(plain), native_logits(model), rtol=0, atol=0)


def test_the_share_that_a_token_uses_is_that_of_stacked_matrices():
    for kind, experts in EXPERTS.items():
        spec = MoELoraConfig(num_experts=4, top_k=1, expert_type=kind).expert_spec("mlp")
        shapes = spec.shapes({"up": (8, 16), "down": (16, 8)})
        for A, B in shapes.values():
            for matrix, shape in (("A", A), ("B", B)):
                assert spec.used_share(matrix) == (Fraction(1, 4) if shape[0] == 4 else 1), experts
