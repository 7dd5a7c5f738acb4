"""
LoRA experts that serve every token (num_shared_experts): outputs and gradients are those of plain loops in which the
base's weights have this LoRA, and they fold into every expert at export and extraction.
"""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from moe_peft import MoELoraConfig, expert_to_lora, force_experts, pin_dispatch, prune_experts
from moe_peft.models.model_size import model_size
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
from tests.helpers.native_case import adapter, dense_model, logits, saved
from tests.helpers.reference import assert_same, reference, run


@pytest.mark.parametrize(
    "kind, normalize_top_k, mixing, shared, method",
    pairs(
        ["gated_bias", "fused", "conv1d"], [True, False], ["output", "projection"],
        [(1, {}), (2, {"expert_type": "hydra_lora"}), (1, {"use_rslora": True})], ["dense", "blocks"],
    ),
)  # fmt: skip
def test_output_and_gradients_are_the_loops_in_float64(kind, normalize_top_k, mixing, shared, method):
    m, more = shared
    settings = {"num_experts": 5, "r": 3, "mixing": mixing, "normalize_top_k": normalize_top_k, **more}
    layer = ffn_layer(kind, torch.float64, num_shared_experts=m, **settings)
    assert {tuple(A.shape[:2]) for A in layer.shared_parameters("default")[0].values()} == {(1, m * 3)}
    x, d_output = tensors(2, 5, dtype=torch.float64)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@mixings
def test_a_part_of_the_projections_and_other_active_adapters(mixing):
    layer = ffn_layer("gated_bias", num_shared_experts=1, target_projections=["up_proj"], mixing=mixing)
    add_adapter(layer, "other", num_experts=3, num_shared_experts=2, mixing="projection")
    add_adapter(layer, "single", num_experts=1, top_k=1)
    layer.double()
    layer.set_adapter(["default", "other", "single"])
    layer.requires_grad_(True)
    x, d_output = tensors(6, dtype=torch.float64)
    assert_same(run(layer, x, d_output), reference(layer, x, d_output, ["default", "other", "single"]))


def test_a_single_linear_without_gradients():
    layer = linear_layer(num_experts=4, num_shared_experts=1).double()
    x, d_output = tensors(9, dtype=torch.float64)
    expected = reference(layer, x, d_output)
    assert_same(run(layer, x, d_output), expected)
    with torch.no_grad():
        assert_near(layer(x), expected.output)


def test_dropout_has_a_mask_of_its_own():
    layer = linear_layer(num_experts=4, num_shared_experts=1, lora_dropout=0.4).double().train()
    x, d_output = tensors(9, dtype=torch.float64)
    with RecordedDropout() as dropout:
        y = layer(x)
    shared_mask, mask = dropout.masks
    A, B = (of["weight"][0].detach() for of in layer.shared_parameters("default"))
    shared = layer.moe_lora_spec["default"].scaling * (x * shared_mask) @ A.T @ B
    routed = linear_layer(num_experts=4).double()
    routed.load_state_dict({n: w for n, w in layer.state_dict().items() if "shared" not in n})
    assert_near(y, reference(routed, x, d_output, masks={"weight": mask}).output + shared)


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("llama", {}),
        ("qwen2", {"normalize_top_k": False, "num_shared_experts": 2}),
        ("mistral", {"expert_type": "hydra_lora", "target_projections": ["up_proj", "down_proj"]}),
    ],
    ids=str,
)
def test_the_export_computes_what_the_adapter_computes(kind, settings, tmp_path):
    name = saved(dense_model(kind), tmp_path / "base")
    model = adapter(dense_model(kind), tmp_path / "adapter", name, **{"num_shared_experts": 1, **settings})
    export_adapter(tmp_path / "adapter", tmp_path / "moe")
    assert_near(logits(tmp_path / "moe"), logits(model))
    again = PeftModel.from_pretrained(dense_model(kind), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    with torch.no_grad():
        for layer in again.get_base_model().model.layers:
            for B in layer.mlp.shared_parameters("default")[1].values():
                B.zero_()
    assert (logits(again) - logits(model)).abs().max() > 1e-2


@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_expert_and_the_shared_ones_are_a_lora(use_rslora, tmp_path):
    settings = {"target_modules": ["mlp", "q_proj", "v_proj"], "num_experts_pattern": {"q_proj": 1}}
    model = adapter(
        dense_model("llama"), tmp_path / "adapter", num_shared_experts=2, use_rslora=use_rslora,
        rank_pattern={"v_proj": 2}, **settings,
    )  # fmt: skip
    expert_to_lora(model, 3, tmp_path / "lora")
    lora = PeftModel.from_pretrained(dense_model("llama"), tmp_path / "lora")
    with force_experts(model, torch.tensor([3, 3, 3])):
        assert_near(logits(lora), logits(model))


def test_pruning_keeps_them_and_the_size_counts_them_for_every_token(tmp_path):
    torch.manual_seed(0)
    name = saved(dense_model("llama"), tmp_path / "base")
    adapter(dense_model("llama"), tmp_path / "adapter", name, num_shared_experts=1)
    prune_experts(tmp_path / "adapter", tmp_path / "pruned", drop=[0])
    before, after = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("adapter", "pruned"))
    shared = [key for key in before if "shared" in key]
    assert len(shared) == 2 * 2 * 3 and all(torch.equal(before[key], after[key]) for key in shared)
    with_them, without = (
        model_size(get_peft_model(tiny_llama(), MoELoraConfig(num_experts=4, r=4, num_shared_experts=m)))
        for m in (1, 0)
    )
    one = 2 * 3 * 4 * (64 + 128)
    assert (with_them.total - without.total, with_them.active - without.active) == (one, one)


def test_the_model_is_the_base_at_first():
    model = get_peft_model(tiny_llama(), MoELoraConfig(num_experts=4, num_shared_experts=1, task_type="CAUSAL_LM"))
    ids = torch.arange(3, 13).unsqueeze(0)
    with torch.no_grad():
        assert_near(model.eval()(input_ids=ids).logits, tiny_llama().eval()(input_ids=ids).logits)


@pytest.mark.parametrize("settings", [{"expert_type": "bottleneck"}, {"num_experts": 1, "top_k": 1}], ids=str)
def test_where_they_would_not_be_read(settings):
    with pytest.raises(ValueError, match="num_shared_experts=1: "):
        MoELoraConfig(num_shared_experts=1, **settings)
