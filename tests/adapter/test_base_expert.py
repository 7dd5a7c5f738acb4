"""The base as the last expert: no update, no weights, and everything else as with any other expert."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model

from moe_peft import MoELoraConfig, expert_to_lora, force_experts, pin_dispatch, record_routing
from tests.helpers.close import assert_near
from tests.helpers.covering import pairs
from tests.helpers.expert_layers import ffn_layer, linear_layer, tensors
from tests.helpers.models import tiny_llama
from tests.helpers.reference import assert_same, chosen_experts, reference, run

IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
BASE = 3


@pytest.mark.parametrize(
    "kind, normalize_top_k, mixing, sizes, method",
    pairs(
        ["gated_bias", "fused", "plain"], [True, False], ["output", "projection"],
        [(2, 1), (2, 2), (4, 1), (4, 2), (4, 3)], ["dense", "blocks", "gather", "dense-blocks"],
    ),
)  # fmt: skip
def test_ffn_output_and_gradients_are_the_loops_in_float64(kind, normalize_top_k, mixing, sizes, method):
    n, k = sizes
    layer = ffn_layer(
        kind, torch.float64, num_experts=n, top_k=k, base_expert=True, mixing=mixing, normalize_top_k=normalize_top_k
    )
    assert {len(B) for B in layer.expert_parameters("default")[1].values()} == {n - 1}
    x, d_output = tensors(12, dtype=torch.float64)
    assert any(n - 1 in experts for experts in chosen_experts(layer, x))  # some tokens go to the base
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@pytest.mark.parametrize(
    "more", [{"expert_type": "hydra_lora"}, {"expert_type": "bottleneck"}, {"num_shared_experts": 1}]
)
def test_other_experts_beside_the_base(more):
    layer = ffn_layer("gated", torch.float64, num_experts=4, base_expert=True, **more)
    x, d_output = tensors(12, dtype=torch.float64)
    assert_same(run(layer, x, d_output), reference(layer, x, d_output))


def test_grouped_products_and_single_linears():
    layer = ffn_layer("gated", num_experts=4, base_expert=True, r=8)
    x, d_output = tensors(12)
    with pin_dispatch("sorted"):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))
    linear = linear_layer(num_experts=4, base_expert=True).double()
    x, d_output = tensors(12, dtype=torch.float64)
    assert_same(run(linear, x, d_output), reference(linear, x, d_output))


def adapted() -> PeftModel:
    torch.manual_seed(1)
    config = MoELoraConfig(
        num_experts=BASE + 1, base_expert=True, top_k=1, init_lora_weights=False, task_type="CAUSAL_LM",
        expert_names=["a", "b", "c", "base"],
    )  # fmt: skip
    return get_peft_model(tiny_llama(), config).eval()


@torch.no_grad()
def test_whoever_goes_to_the_base_gets_the_bases_answer():
    model = adapted()
    with force_experts(model, "base"):
        assert torch.equal(model(input_ids=IDS).logits, tiny_llama().eval()(input_ids=IDS).logits)
    with force_experts(model, ["base", "a"]):
        by_row = model(input_ids=IDS).logits
    with force_experts(model, "a"):
        assert_near(by_row[1], model(input_ids=IDS).logits[1])


@torch.no_grad()
@pytest.mark.parametrize("base_expert", [False, True])
@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_rows_for_which_no_expert_is_forced_get_the_bases_answer(mixing, base_expert):
    """In one batch with rows that have one; as `RequestGate.pick` says it."""
    torch.manual_seed(1)
    config = MoELoraConfig(
        num_experts=4, base_expert=base_expert, mixing=mixing, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = get_peft_model(tiny_llama(), config).eval()
    with force_experts(model, [None, 2]), record_routing(model) as statistics:
        by_row = model(input_ids=IDS).logits
    assert_near(by_row[:1], tiny_llama().eval()(input_ids=IDS[:1]).logits)
    with force_experts(model, 2):
        assert_near(by_row[1:], model(input_ids=IDS[1:]).logits)
    with force_experts(model, None):
        assert_near(model(input_ids=IDS).logits, tiny_llama().eval()(input_ids=IDS).logits)
    with (
        pytest.raises(ValueError, match=r"force_experts: a tensor torch.float32; give integers"),
        force_experts(model, torch.tensor([0.9, 1.2])),
    ):
        pass
    shares_LN = next(iter(statistics.shares().values()))
    assert (shares_LN[:, 2] == 1).all() and shares_LN.sum() == 2


def test_it_is_saved_and_loaded_and_has_no_lora(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert torch.equal(loaded.eval()(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert expert_to_lora(model, BASE - 1)
    with pytest.raises(ValueError, match="has LoRAs 0 to 2"):
        expert_to_lora(model, BASE)


def test_it_needs_another_expert():
    with pytest.raises(ValueError, match="base_expert=True: needs a second expert"):
        MoELoraConfig(num_experts=1, top_k=1, base_expert=True)
