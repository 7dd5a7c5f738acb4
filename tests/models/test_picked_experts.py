"""`pick_experts`: the expert whose gates, over a prompt's tokens and all layers of the base's pass, are the largest."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model

from moe_peft import MoELoraConfig, pick_experts
from moe_peft.adapter.layers import MoELoraLayer
from tests.helpers.models import tiny_llama, tiny_opt


@pytest.mark.parametrize("base", [tiny_llama, tiny_opt])
def test_a_prompt_gets_the_expert_of_its_mean_gates(base):
    """Without padding and answers. OPT's FFNs read flattened tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (6, 9), generator=generator)
    mask, labels = torch.ones_like(ids), torch.full_like(ids, -100)
    for i in range(6):
        mask[i, 9 - i // 2 :] = 0
    labels[:, 5:] = ids[:, 5:]
    config = MoELoraConfig(num_experts=4, r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base(), config).eval()
    inputs = {}
    layers = [module for module in model.modules() if isinstance(module, MoELoraLayer)]
    with torch.no_grad():
        for layer in layers:
            layer.router("default").weight.normal_(std=0.5, generator=generator)
            layer.register_forward_pre_hook(lambda module, args: inputs.update({module: args[0]}))
        with model.disable_adapter():
            model(input_ids=ids, attention_mask=mask)
        gates = [layer.router("default")(inputs[layer]).softmax(-1).view(6, 9, 4) for layer in layers]
    expected = []
    for i in range(6):
        tokens = [t for t in range(5) if mask[i, t]]
        expected.append(int(sum(sum(of_layer[i, t] for t in tokens) for of_layer in gates).argmax()))
    assert len(set(expected)) > 1
    assert pick_experts(model, {"input_ids": ids, "attention_mask": mask, "labels": labels}).tolist() == expected
