"""torch.compile: the same results, and no graph breaks in the layers."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_llama
from peft import get_peft_model

from moe_peft import MoELoraConfig, pin_dispatch
from moe_peft.adapter.recording import state

IDS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))


def model(mixing: str):
    base = tiny_llama(layers=1)
    torch.manual_seed(1)
    return get_peft_model(base, MoELoraConfig(num_experts=4, r=4, mixing=mixing, init_lora_weights=False))


@pytest.mark.parametrize("method", ["auto", "dense", "blocks", "gather", "dense-blocks"])
@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_a_compiled_layer_has_no_graph_break_and_the_same_output_and_gradients(mixing: str, method: str):
    layer = model(mixing).get_base_model().model.layers[0].mlp
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(2))
    weights = {n: p for n, p in layer.named_parameters() if p.requires_grad}

    def run(function) -> tuple[torch.Tensor, ...]:
        inputs = x.clone().requires_grad_()
        output = function(inputs)
        output.square().mean().backward()
        gradients = [inputs.grad, *(p.grad.clone() for p in weights.values())]
        layer.zero_grad()
        return (output.detach(), *gradients)

    with pin_dispatch(method):
        expected = run(layer)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for got, want in zip(run(compiled), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_compiled_model_trains_with_the_same_loss_and_gradients():
    plain = model("output").train()
    batch = {"input_ids": IDS, "labels": IDS}
    loss = plain(**batch).loss
    loss.backward()
    expected = {n: p.grad.clone() for n, p in plain.named_parameters() if p.requires_grad}
    plain.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend="aot_eager")
    for _ in range(2):  # the second pass runs the compiled code
        plain.zero_grad()
        again = compiled(**batch).loss
        again.backward()
        torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-6)
    assert state.collection is None  # else later passes of this process would record into it
    for name, want in expected.items():
        got = dict(plain.named_parameters())[name].grad
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
