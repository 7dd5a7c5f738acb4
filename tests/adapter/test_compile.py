"""torch.compile and torch.export: the same results, in one graph."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounter
from transformers import Trainer, TrainingArguments
from trl import SFTConfig
from trl.trainer.utils import add_fused_lm_head

from moe_peft import MoELoraConfig, MoESFTTrainer, pin_dispatch
from moe_peft.adapter.router_recorder import state
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.warm import run_module
from tests.helpers.words import word_tokenizer

pytestmark = pytest.mark.slow

IDS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))


def model(mixing: str):
    base = tiny_llama(layers=1)
    torch.manual_seed(1)
    return get_peft_model(base, MoELoraConfig(num_experts=4, r=4, mixing=mixing, init_lora_weights=False))


@pytest.mark.parametrize(
    ("mixing", "method"),
    [("output", "auto"), ("output", "blocks"), ("projection", "dense"), ("projection", "gather"),
     ("output", "dense-blocks")],
)  # fmt: skip
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
            assert_near(got, want)


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_a_compiled_model_is_one_graph_and_trains_with_the_same_loss_and_gradients(mixing: str):
    plain = model(mixing).train()
    batch = {"input_ids": IDS, "labels": IDS}
    outputs = plain(**batch)
    outputs.loss.backward()
    expected = {n: p.grad.clone() for n, p in plain.named_parameters() if p.requires_grad}
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the second pass runs the compiled code
        plain.zero_grad()
        again = compiled(**batch)
        again.loss.backward()
        assert_near(again.loss, outputs.loss)
        assert_near(again.aux_loss, outputs.aux_loss)
        assert len(again.router_logits) == 1
        assert_near(again.router_logits, outputs.router_logits)
    assert state.current.collection is None  # else later passes of this process would record into it
    for name, want in expected.items():
        got = dict(plain.named_parameters())[name].grad
        assert_near(got, want)


def test_a_compiled_model_follows_changes_of_its_config_and_adapters():
    plain = model("output").eval()
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    batch = {"input_ids": IDS, "labels": IDS}
    with_loss = compiled(**batch)
    plain.config.output_router_logits = False
    without = compiled(**batch)
    assert "router_logits" not in without and "aux_loss" not in without
    balance = plain.config.router_aux_loss_coef * with_loss.aux_loss
    assert_near(with_loss.loss, without.loss + balance)
    with plain.disable_adapter():
        assert_near(compiled(**batch).logits, tiny_llama(layers=1).eval()(**batch).logits)


def test_trls_fused_head_has_the_balancing_loss_though_it_breaks_the_graph():
    plain = model("output").train()
    add_fused_lm_head(plain.get_base_model())
    batch = {"input_ids": IDS[:, :8], "labels": IDS[:, :8], "fused_lm_head": True}
    expected = plain(**batch)
    torch._dynamo.reset()
    actual = torch.compile(plain, backend="aot_eager")(**batch)
    assert expected.aux_loss > 1
    assert_near(actual.aux_loss, expected.aux_loss)
    assert_near(actual.loss, expected.loss)


SHAPES = [(2, 24), (2, 31), (4, 31), (8, 64), (5, 5), (1, 40)]


def graphs(model, train: bool) -> int:
    """How many graphs batches of many shapes take, with a balancing loss and padding where the model is trained."""
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model.train(train), backend=counter)
    for rows, length in SHAPES:
        ids = torch.full((rows, length), 5)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        with torch.set_grad_enabled(train):
            outputs = compiled(input_ids=ids, attention_mask=mask, labels=ids if train else None, use_cache=False)
        if train:
            outputs.loss.backward()
    return counter.frame_count


@pytest.mark.parametrize("train", [False, True], ids=["evaluated", "trained"])
def test_batches_of_many_shapes_take_as_many_graphs_as_with_lora(train: bool):
    lora = LoraConfig(r=8, target_modules=["gate_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
    most = graphs(get_peft_model(tiny_llama(layers=1), lora), train)
    assert graphs(model("output"), train) <= most
    assert graphs(model("projection"), train) <= most


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_an_exported_program_takes_batches_of_other_shapes(mixing: str):
    plain, auto = model(mixing).eval().get_base_model(), torch.export.Dim.AUTO
    shapes = {"input_ids": {0: auto, 1: auto}, "use_cache": None}
    program = torch.export.export(plain, (), {"input_ids": IDS, "use_cache": False}, dynamic_shapes=shapes).module()
    for rows, length in SHAPES[1:5]:
        ids = torch.arange(3, 3 + rows * length).reshape(rows, length) % 128
        expected = plain(input_ids=ids, use_cache=False).logits
        assert_near(program(input_ids=ids, use_cache=False).logits, expected)


FRESH = """
import sys, torch
import transformers.modeling_outputs
torch.manual_seed(0)
outputs = torch.export.load(sys.argv[1]).module()(input_ids=torch.load(sys.argv[2]), use_cache=False)
torch.save(outputs.logits, sys.argv[3])
assert "moe_peft" not in sys.modules and list(outputs) == ["logits"]
"""


def test_an_exported_model_runs_without_this_package(tmp_path):
    plain = model("output").eval()
    program = torch.export.export(plain, (), {"input_ids": IDS, "use_cache": False})
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save(IDS, tmp_path / "ids.pt")
    files = [str(tmp_path / name) for name in ("model.pt2", "ids.pt", "logits.pt")]
    (tmp_path / "fresh.py").write_text(FRESH)
    assert run_module("fresh", *files, cwd=tmp_path).returncode == 0
    assert_near(torch.load(files[2]), plain(input_ids=IDS).logits)
    assert "router_logits" in plain(input_ids=IDS)


def trained(model, batch) -> tuple[torch.Tensor, ...]:
    """The loss, the balancing loss and all gradients."""
    outputs = model(**batch)
    outputs.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return (outputs.loss.detach(), outputs.aux_loss.detach(), *gradients)


@pytest.mark.parametrize(("mixing", "reentrant"), [("output", False), ("projection", True)])
def test_a_compiled_model_with_checkpoints_has_the_same_loss_and_gradients_though_its_graph_breaks(mixing, reentrant):
    plain, batch = model(mixing).train(), {"input_ids": IDS, "labels": IDS}
    expected = trained(plain, batch)
    plain.gradient_checkpointing_enable({"use_reentrant": reentrant})
    plain.enable_input_require_grads()
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend="aot_eager")
    for _ in range(2):
        assert_near(trained(compiled, batch), expected)
    assert state.current.collection is None


@pytest.mark.parametrize("trainer", [Trainer, MoESFTTrainer])
def test_compiled_trainers_with_checkpoints_log_the_same_loss(trainer, tmp_path):
    def first_step(**options) -> dict[str, float]:
        torch._dynamo.reset()
        made = trainer(
            model=model("output"),
            args=(TrainingArguments if trainer is Trainer else SFTConfig)(
                str(tmp_path), max_steps=1, logging_steps=1, use_cpu=True, bf16=False, report_to="none",
                disable_tqdm=True, save_strategy="no", **options,
            ),
            train_dataset=Dataset.from_dict({"input_ids": IDS.tolist(), "labels": IDS.tolist()}),
            **({} if trainer is Trainer else {"processing_class": word_tokenizer(128)}),
        )  # fmt: skip
        made.train()
        log = made.state.log_history[0]
        assert trainer is Trainer or log["aux_loss"] > 1
        return {name: log[name] for name in ("loss", "aux_loss", "grad_norm") if name in log}

    compiled = {"gradient_checkpointing": True, "torch_compile": True, "torch_compile_backend": "eager"}
    assert first_step(**compiled) == near(first_step(gradient_checkpointing=False))
