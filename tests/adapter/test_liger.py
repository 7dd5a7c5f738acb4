"""Liger kernels on a model with an adapter, whichever comes first: its FFN kernel gives way, the others stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from moe_peft import MoELoraConfig, MoESFTTrainer
from tests.fakes import liger as stand_in
from tests.helpers.close import WIDTH, assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.upit_case import rows

ROOT = Path(__file__).parents[2]

IDS = torch.randint(3, 128, (4, 12), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture
def apply():
    with stand_in.installed() as function:
        yield function


def adapt(base, mixing="output", **own):
    torch.manual_seed(1)
    config = MoELoraConfig(num_experts=4, r=4, init_lora_weights=False, mixing=mixing, task_type="CAUSAL_LM", **own)
    return get_peft_model(base, config)


def step(model):
    output = model.train()(**BATCH)
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("mixing", ["output", "projection"])
@pytest.mark.parametrize("order", ["before", "after", "both"])
def test_the_ffn_is_ours_the_rest_is_ligers_and_the_balancing_loss_counts_once(order, mixing, apply):
    want, want_gradients = step(adapt(tiny_llama(hidden=32), mixing, router_aux_loss_coef=0.5))
    base = tiny_llama(hidden=32)
    if order != "after":
        apply(base)
    model = adapt(base, mixing, router_aux_loss_coef=0.5)
    if order != "before":
        apply(model.get_base_model())
    output, gradients = step(model)
    assert output.logits is None and isinstance(output, stand_in.LigerCausalLMOutputWithPast)
    assert_near(output.loss, want.loss)
    assert_near(output.aux_loss, want.aux_loss)
    logits = adapt(tiny_llama(hidden=32), mixing).eval()(input_ids=IDS).logits
    plain = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert_near(output.loss, plain + 0.5 * output.aux_loss)
    for name, gradient in want_gradients.items():
        assert_near(gradients[name], gradient, name)
    for layer in model.get_base_model().model.layers:
        assert "forward" not in layer.mlp.__dict__ and repr(layer.mlp).startswith("MoELoraFFN")
        assert layer.input_layernorm.forward.__func__ is stand_in.rms_norm


@pytest.mark.parametrize(
    ("block", "act"),
    [
        (stand_in.LigerSwiGLUMLP, nn.functional.silu),
        (stand_in.LigerGEGLUMLP, lambda x: nn.functional.gelu(x, approximate="tanh")),
        (stand_in.LigerPhi3SwiGLUMLP, nn.functional.silu),
    ],
)
def test_blocks_of_ligers_classes_are_known_layouts(block, act, apply):
    base = tiny_llama(hidden=32)
    blocks = [block(base.config) for _ in base.model.layers]
    for layer, ffn in zip(base.model.layers, blocks, strict=True):
        layer.mlp = ffn
    torch.manual_seed(1)
    model = get_peft_model(base, MoELoraConfig(num_experts=4, r=4, task_type="CAUSAL_LM"))  # experts add zero
    x = torch.randn(2, 5, 32)
    for layer, ffn in zip(model.get_base_model().model.layers, blocks, strict=True):
        if block is stand_in.LigerPhi3SwiGLUMLP:
            gate, up = ffn.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = ffn.gate_proj(x), ffn.up_proj(x)
        assert_near(layer.mlp(x), ffn.down_proj(act(gate) * up))


def test_a_block_of_ligers_that_no_layout_describes_is_refused(apply):
    base = tiny_llama(hidden=32)
    for layer in base.model.layers:
        layer.mlp = stand_in.LigerFalconH1SwiGLUMLP(base.config)
    with pytest.raises(ValueError, match="no FFN block of a known layout"):
        adapt(base)


def test_a_block_that_liger_has_patched_is_still_compared_with_its_layout(apply):
    """By its class's forward, which runs on a CPU."""

    class Odd(type(tiny_llama(layers=1).model.layers[0].mlp)):
        def forward(self, x):
            return super().forward(x) + 1

    base = tiny_llama(hidden=32)
    base.model.layers[1].mlp.__class__ = Odd
    apply(base)
    with pytest.raises(ValueError, match="the forward of Odd does not compute what"):
        adapt(base)


def arguments(folder, cls, **own):
    common = {"max_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True, "report_to": "none"}
    common |= {"save_strategy": "no", "disable_tqdm": True, "bf16": False}
    return cls(output_dir=str(folder), **common, **own)


@pytest.mark.parametrize("trainer_class", [SFTTrainer, MoESFTTrainer, Trainer])
def test_use_liger_kernel_trains_as_without(trainer_class, apply, tokenizer, tmp_path):
    """`Trainer` patches the model when it is made, after TRL has put the adapter in."""

    def train(liger: bool):
        model, more = adapt(tiny_llama(hidden=32)), {}
        if trainer_class is Trainer:
            data = Dataset.from_dict({"input_ids": IDS.tolist(), "labels": IDS.tolist()})
            args = arguments(tmp_path, TrainingArguments, use_liger_kernel=liger)
        else:
            data, more = Dataset.from_list(rows(8)), {"processing_class": tokenizer}
            args = arguments(tmp_path, SFTConfig, use_liger_kernel=liger, gradient_checkpointing=False)
        trainer = trainer_class(model=model, args=args, train_dataset=data, **more)
        trainer.train()
        norm = model.get_base_model().model.layers[0].input_layernorm
        assert ("forward" in norm.__dict__) == liger
        return [r for r in trainer.state.log_history if "loss" in r], model.state_dict()

    (plain, want), (fused, got) = train(False), train(True)
    for one, other in zip(plain, fused, strict=True):
        assert one["loss"] == near(other["loss"])
        assert ("aux_loss" in one) == (trainer_class is not Trainer)
        assert one.get("aux_loss", 0) == near(other.get("aux_loss", 0))
    for name, value in want.items():
        assert_near(got[name], value, name, terms=2 * WIDTH * len(plain))  # forward and backward passes


REAL = """
import sys, types
import torch
from tests.helpers.models import tiny_llama
from peft import get_peft_model
from moe_peft import MoELoraConfig
model = get_peft_model(tiny_llama(hidden=32), MoELoraConfig(num_experts=4, r=4))
from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply
for own in (model, tiny_llama(hidden=32)):
    apply(model=getattr(own, "get_base_model", lambda: own)())
layers = model.get_base_model().model.layers
assert all("forward" not in layer.mlp.__dict__ and "forward" in layer.input_layernorm.__dict__ for layer in layers)
assert all("forward" in layer.mlp.__dict__ for layer in own.model.layers)
get_peft_model(own, MoELoraConfig(num_experts=4, r=4))
"""


def test_the_real_liger_spares_our_layers():
    """In a process of its own, since Liger also changes transformers' modules."""
    pytest.importorskip("liger_kernel.transformers", reason="Liger needs Triton", exc_type=ImportError)
    result = subprocess.run([sys.executable, "-c", REAL], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
