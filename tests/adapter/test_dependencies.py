"""The plain adapter, its conversions and exports work where only the core's dependencies are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# What the extras bring. Packages that PEFT or transformers need themselves are not ours to leave out.
OF_EXTRAS = ("trl", "datasets", "pydantic", "pydantic_core", "rich", "matplotlib", "scipy", "deepspeed")

SCRIPT = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {OF_EXTRAS} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import torch
from peft import PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from moe_peft import MoELoraConfig, allow_experts, expert_to_lora, fold_routers, force_experts, lora_to_moe

def base():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    return LlamaForCausalLM(LlamaConfig(**sizes))

model = get_peft_model(base(), MoELoraConfig(num_experts=4, router_type="attention", task_type="CAUSAL_LM"))
ids = torch.arange(3, 13).view(1, 10)
model(input_ids=ids, labels=ids).loss.backward()
fold_routers(model)
with force_experts(model, torch.tensor([1])), allow_experts(model, [0, 1]):
    model(input_ids=ids)
model.save_pretrained("adapter")
PeftModel.from_pretrained(base(), "adapter")
for expert in range(2):
    expert_to_lora(model, expert, f"expert-{{expert}}")
lora_to_moe(base(), ["expert-0", "expert-1"])
base().save_pretrained("base")
from moe_peft.native import UpcycleConfig, export_adapter, upcycle
export_adapter("adapter", "moe", "base")
upcycle("base", "upcycled", UpcycleConfig(num_experts=4, init="drop"))
"""


@pytest.mark.slow
def test_the_plain_adapter_needs_no_extra(tmp_path: Path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(root)})
    assert run.returncode == 0, run.stderr


def test_the_package_itself_imports_no_torch():
    command = "import sys, moe_peft; assert not {'torch', 'peft', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", command], check=True)
