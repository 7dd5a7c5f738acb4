"""Training that resumes: what it counts, what it refuses, and what it takes for another training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from trl import SFTConfig

from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from moe_peft.models.layer import router_parameters
from moe_peft.training.checkpointing import base_values
from moe_peft.upit import prepare_experts
from moe_peft.upit.post_train import post_train
from tests.helpers.models import tiny_llama
from tests.helpers.trainers import arguments as trainer_arguments
from tests.helpers.upit_case import rows

arguments = partial(trainer_arguments, cls=SFTConfig, max_steps=-1, logging_steps=500, seed=0)


def adapted(seed=0, adapter_name="default"):
    base = tiny_llama(seed=seed)
    torch.manual_seed(1)
    config = MoELoraConfig(num_experts=4, r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, config, adapter_name=adapter_name)


def test_passes_over_the_data_read_every_row(tokenizer, tmp_path):
    """9 rows by 8: two steps in each pass, as `Trainer` counts."""
    read = []

    data = Dataset.from_list(rows(9))
    args = arguments(tmp_path / "state", per_device_train_batch_size=8, num_train_epochs=4)
    model = adapted()
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    trained = post_train(model, data, args, tokenizer, output_dir=tmp_path / "adapter")
    handle.remove()
    assert trained.metrics()["steps"] == 8 and read == [8, 1] * 4


def test_only_routers_train_even_after_a_stage_that_froze_the_rest(tokenizer, tmp_path):
    model, data = adapted(), Dataset.from_list(rows(8))
    settings = {"per_device_train_batch_size": 4, "max_steps": 1, "bf16": False, "use_cpu": True, "report_to": "none"}
    own = {"label_column": "domain", "expert_map": {"a": [0], "b": [1], "c": [2, 3]}}
    args = MoESFTConfig(str(tmp_path / "first"), training_stage="routers", **own, **settings)
    MoESFTTrainer(model, args, train_dataset=data, processing_class=tokenizer).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = arguments(tmp_path / "state", max_steps=2)
    post_train(model, data, own, tokenizer, output_dir=tmp_path / "adapter", train_experts=False)
    moved = {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}
    assert moved == set(router_parameters(model))


def test_the_log_ends_with_what_is_wrong_with_the_load(tokenizer, tmp_path):
    """A collapsed layer, which the mean of all layers' variations hides."""
    model, data = adapted(), Dataset.from_list(rows(8))
    *others, last = router_parameters(model).values()
    with torch.no_grad():
        last.zero_()  # all tokens go to the same two of the four experts
        for other in others:
            other.normal_(std=0.01)
    for steps in (1, 2):
        args = arguments(tmp_path / f"state {steps}", max_steps=steps, logging_steps=1, learning_rate=1e-9)
        trained = post_train(model, data, args, tokenizer, output_dir=tmp_path / "adapter")
        assert ["load_warning" in record for record in trained.history] == [False] * (steps - 1) + [True]
        if steps == 1:
            warning = trained.history[-1]["load_warning"]
            assert warning.startswith("collapsed, ") and "monopolies: " in warning
            again = post_train(adapted(), data, args, tokenizer, output_dir=tmp_path / "adapter")
            assert again.history == trained.history  # also of a training that is done already


def test_another_base_is_another_training(tokenizer, tmp_path):
    data, args = Dataset.from_list(rows(8)), arguments(tmp_path / "state", max_steps=2)
    first = post_train(adapted(0), data, args, tokenizer, output_dir=tmp_path / "a")
    again = post_train(adapted(0), data, args, tokenizer, output_dir=tmp_path / "a")
    assert again.history == first.history
    with pytest.raises(ValueError, match="belongs to another training, with base "):
        post_train(adapted(5), data, args, tokenizer, output_dir=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_base_is_told_by_what_every_process_has(monkeypatch):
    """Of an offloaded base nothing, and nothing where only the first process reads the weights."""
    model = adapted()
    values = base_values(model)
    assert len(values) == 4 * sum("moe_lora" not in name for name, _ in model.named_parameters())
    torch.nn.init.zeros_(next(p for name, p in model.named_parameters() if "moe_lora_A" in name))
    assert base_values(model) == values != base_values(adapted(seed=3))
    config = MoELoraConfig(trainable_token_indices=[5], task_type="CAUSAL_LM")
    with_rows = get_peft_model(adapted().unload(), config)
    with_rows.get_base_model().get_input_embeddings().token_adapter.trainable_tokens_delta["default"].data.zero_()
    assert base_values(with_rows) == values
    assert base_values(model.to("meta")) == base_values(tiny_llama()) == []
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    assert base_values(adapted()) == []


def test_an_adapter_of_another_name_is_saved_and_found_again(tokenizer, tmp_path):
    data, args, result = Dataset.from_list(rows(8)), arguments(tmp_path / "state", max_steps=2), tmp_path / "adapter"
    model = adapted(adapter_name="mine")
    post_train(model, data, args, tokenizer, output_dir=result)
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert not (result / "mine").exists() and not (result / "training.json").exists()
    loaded = PeftModel.from_pretrained(tiny_llama(), result)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, wanted[name.replace(".default", ".mine")]), name
    again = adapted(adapter_name="mine")
    post_train(again, data, args, tokenizer, output_dir=result)  # done already
    for name, p in again.named_parameters():
        assert torch.equal(p, wanted[name]), name


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True: the steps and their rows are counted beforehand"),
        ({"save_total_limit": 1}, "save_total_limit=1: checkpoints that are not needed are removed anyway"),
        ({"save_only_model": True}, "save_only_model=True: a stopped training resumes from its optimizer's state"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps",
             "save_steps": 1},
            "load_best_model_at_end=True: the last step is the result",
        ),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches=True: the steps"),
    ],
)  # fmt: skip
def test_arguments_that_it_cannot_follow_are_refused(own, message, tokenizer, tmp_path):
    args, data = arguments(tmp_path / "state", max_steps=2, **own), Dataset.from_list(rows(8))
    with pytest.raises(ValueError, match=message):
        post_train(adapted(), data, args, tokenizer, output_dir=tmp_path / "adapter", eval_dataset=data)
    assert not (tmp_path / "adapter").exists()


def test_a_share_of_the_steps_between_saves(tokenizer, tmp_path):
    args = arguments(tmp_path / "state", max_steps=4, save_strategy="steps", save_steps=0.5)
    prepared = prepare_experts(
        tiny_llama(), Dataset.from_list(rows(16)), args, None, tokenizer, output_dir=tmp_path / "out", num_experts=2
    )
    assert prepared.steps and max(prepared.trained.checkpoints) == 4
    assert load_file(prepared.trained.last / "model.safetensors")
