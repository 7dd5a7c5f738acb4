"""Rows and tokens that are forced to one expert."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from moe_peft import force_experts, lora_to_moe
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama

N, R = 4, 3
FFN = ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    """Folders of N LoRA adapters with random weights."""
    folders = []
    for i in range(N):
        config = LoraConfig(r=R, lora_alpha=6, target_modules=FFN, init_lora_weights=False, task_type="CAUSAL_LM")
        folders.append(tmp_path_factory.mktemp(f"lora-{i}"))
        base = tiny_llama()
        torch.manual_seed(i)  # after `tiny_llama`, which seeds
        model = get_peft_model(base, config)
        model.save_pretrained(folders[-1])
    return folders


def moe(loras, mixing="output", **settings):
    base = tiny_llama()
    torch.manual_seed(9)
    return lora_to_moe(base, loras, task_type="CAUSAL_LM", mixing=mixing, **settings)


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_a_row_forced_to_an_expert_gives_the_logits_of_plain_lora(mixing, loras):
    ids = torch.randint(3, 128, (6, 11), generator=torch.Generator().manual_seed(0))
    experts = [2, 0, 3, 1, 0, 2]
    model = moe(loras, mixing).eval()
    with torch.no_grad(), force_experts(model, torch.tensor(experts)):
        forced = model(input_ids=ids).logits
    for row, expert in enumerate(experts):
        plain = PeftModel.from_pretrained(tiny_llama(), loras[expert]).eval()
        with torch.no_grad():
            assert_near(forced[row], plain(input_ids=ids[row : row + 1]).logits[0])
    with torch.no_grad():  # and it is over after the block
        assert not torch.allclose(model(input_ids=ids).logits, forced, atol=1e-3)


def test_forcing_per_token_and_restoring(loras):
    model = moe(loras).eval()
    ids = torch.randint(3, 128, (2, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), force_experts(model, torch.tensor([1, 3])):
        by_row = model(input_ids=ids).logits
        with force_experts(model, torch.tensor([0])):
            pass
        assert_near(model(input_ids=ids).logits, by_row)
        with force_experts(model, torch.tensor([1] * 5 + [3] * 5)):
            assert_near(model(input_ids=ids).logits, by_row)
    with pytest.raises(ValueError, match="every layer has 0 to 3"), force_experts(model, torch.tensor([4])):
        pass
    with pytest.raises(ValueError, match="has no router"), force_experts(tiny_llama(), torch.tensor([0])):
        pass
