"""The memory that a plan names, against sums made by hand; its rows and steps, against a trainer's."""

from __future__ import annotations

import copy

import pytest
from datasets import Dataset
from peft import get_peft_model
from trl import DPOConfig, SFTConfig, SFTTrainer

from moe_peft import MoEDPOConfig, MoEDPOTrainer, MoELoraConfig, MoESFTConfig
from moe_peft.training.estimate import RowCount, count_rows, memory, training_line
from moe_peft.training.schedule import steps_and_rows
from moe_peft.training.trainable import on_quantized
from tests.helpers.models import ATTENTION, FFN, tiny_llama

LAYER = ATTENTION + FFN + 2 * 64
OUTSIDE = 2 * 128 * 64 + 64  # embeddings, head, norm
BASE = 4 * (2 * LAYER + OUTSIDE)


TRAINED = 64


def trained():
    """A base of which the last norm is trained."""
    model = tiny_llama().requires_grad_(False)
    model.model.norm.requires_grad_(True)
    return model


def arguments(folder, **fields):
    return SFTConfig(str(folder), **{"bf16": False, "use_cpu": True, "report_to": "none", **fields})


def test_weights_gradients_and_moments(tmp_path):
    planned = memory(trained(), arguments(tmp_path))
    assert (planned.weights, planned.gradients, planned.optimizer) == (BASE, 4 * TRAINED, 8 * TRAINED)
    assert planned.total == BASE + 12 * TRAINED


def test_an_optimizer_of_eight_bits(tmp_path):
    planned = memory(trained(), arguments(tmp_path, optim="adamw_bnb_8bit"))
    assert (planned.gradients, planned.optimizer) == (4 * TRAINED, 2 * TRAINED)


def test_a_tied_head_counts_once(tmp_path):
    untied, tied = (memory(tiny_llama(tie_word_embeddings=tie), arguments(tmp_path)).weights for tie in (False, True))
    assert untied - tied == 4 * 128 * 64


# --- quantized weights, rows, steps -----------------------------------------------------------------------------------


def test_half_the_bytes_where_bfloat16_weights_train(tmp_path):
    model = on_quantized(trained())
    planned = memory(model, arguments(tmp_path), quantization={"load_in_8bit": True})
    assert (planned.gradients, planned.optimizer) == (2 * TRAINED, 4 * TRAINED)


@pytest.mark.parametrize(
    ("quantization", "size"),
    [
        ({}, 4),
        ({"load_in_8bit": True}, 1),
        ({"load_in_4bit": True}, 0.5 + 4 / 64),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 0.5 + 1 / 64),
    ],
)
def test_frozen_linears_but_the_head_are_quantized(quantization, size, tmp_path):
    planned = memory(trained(), arguments(tmp_path), quantization=quantization)
    assert planned.weights == round(size * 2 * (ATTENTION + FFN) + 4 * (2 * 2 * 64 + OUTSIDE))


def test_a_tied_head_with_trained_rows_is_not_quantized(tmp_path):
    def weights(**tokens):
        model = tiny_llama(tie_word_embeddings=True)
        model = get_peft_model(model, MoELoraConfig(num_experts=2, r=2, task_type="CAUSAL_LM", **tokens))
        return memory(model, arguments(tmp_path), quantization={"load_in_4bit": True}).weights

    assert weights(trainable_token_indices=[3, 4]) == weights() + 4 * 2 * 64


@pytest.mark.parametrize(
    ("row", "length"),
    [
        ({"text": "w3 w4 w5"}, 4),
        ({"prompt": "w3 w4", "completion": " w5 w6"}, 5),
        ({"input_ids": [3, 4, 5, 6, 7, 8]}, 6),
        ({"prompt": "w3 w4", "chosen": " w5", "rejected": " w6 w7 w8"}, 4 + 6),
        ({"chosen": "w3 w5", "rejected": "w6 w7 w8"}, 3 + 4),
    ],
)
def test_tokens_of_a_row_count_its_end_and_both_answers(row, length, tmp_path, tokenizer):
    kind = DPOConfig if "chosen" in row else SFTConfig
    args = kind(str(tmp_path), bf16=False, use_cpu=True, report_to="none", max_length=None)
    assert count_rows(Dataset.from_list([row] * 3), tokenizer, args) == RowCount(3, length)
    if "chosen" not in row:
        trainer = SFTTrainer(
            tiny_llama(hidden=8, layers=1), args, train_dataset=Dataset.from_list([row]), processing_class=tokenizer
        )
        assert len(trainer.train_dataset[0]["input_ids"]) == length


def test_rows_whose_answer_is_cut_away_are_not_counted(tmp_path, tokenizer):
    args = SFTConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", max_length=4)
    rows = [{"prompt": " ".join(["w3"] * n), "completion": " w5"} for n in (2, 9, 1, 9, 9)]
    data = Dataset.from_list(rows * 400)
    counted = count_rows(data, tokenizer, args)
    trainer = SFTTrainer(
        tiny_llama(hidden=8, layers=1), args, train_dataset=data, processing_class=copy.deepcopy(tokenizer)
    )
    assert counted == RowCount(len(trainer.train_dataset), 3.5) and counted.count == 800
    args.max_length = 1
    with pytest.raises(ValueError, match="max_length=1: no example keeps a token to learn from"):
        count_rows(data, tokenizer, args)


def test_pairs_whose_prompt_fills_the_context_are_not_counted(tmp_path, tokenizer):
    args = MoEDPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", max_length=6)
    pairs = [{"prompt": " ".join(["w3"] * n), "chosen": " w5", "rejected": " w6 w7"} for n in (2, 9, 6, 4)]
    data = Dataset.from_list(pairs)
    config = MoELoraConfig(num_experts=2, r=2, task_type="CAUSAL_LM")

    def trainer() -> MoEDPOTrainer:
        model = get_peft_model(tiny_llama(hidden=8, layers=1), config)
        return MoEDPOTrainer(model, args=args, train_dataset=data, processing_class=copy.deepcopy(tokenizer))

    assert count_rows(data, tokenizer, args) == RowCount(len(trainer().train_dataset), (4 + 5 + 6 + 6) / 2)
    args.max_length = 2
    with pytest.raises(ValueError, match="max_length=2: no example keeps a token to learn from"):
        count_rows(data, tokenizer, args)
    with pytest.raises(ValueError, match="max_length=2: no example keeps a token to learn from"):
        trainer()


def test_tokens_are_those_of_the_chat_template_that_the_stage_names(tmp_path, tokenizer):
    (tmp_path / "long.jinja").write_text("{% for m in messages %}w3 w4 w5 {{ m['content'] }} {% endfor %}")
    talk = [{"role": "user", "content": "w6"}, {"role": "assistant", "content": "w7 w8"}]
    data = Dataset.from_list([{"messages": talk}] * 2)
    lengths = []
    for path in (None, str(tmp_path / "long.jinja")):
        args = SFTConfig(
            str(tmp_path), bf16=False, use_cpu=True, report_to="none", max_length=None, chat_template_path=path
        )
        tokenizer_of_its_own = copy.deepcopy(tokenizer)
        tokenizer_of_its_own.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
        rows = count_rows(data, tokenizer_of_its_own, args)
        lengths.append(rows.length)
        assert tokenizer_of_its_own.chat_template.count("w3") == 0
        model = tiny_llama(hidden=8, layers=1)
        trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer_of_its_own)
        assert len(trainer.train_dataset[0]["input_ids"]) == rows.length and rows.count == 2
    assert lengths[1] == lengths[0] + 6


def test_each_answer_of_a_preference_is_cut(tmp_path, tokenizer):
    args = DPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", max_length=6)
    row = {"prompt": "w3 w4", "chosen": " w5", "rejected": " w6 w7 w8 w9 w10"}
    assert count_rows(Dataset.from_list([row] * 3), tokenizer, args) == RowCount(3, 4 + 6)


@pytest.mark.parametrize("precomputed", [False, True])
def test_dpo_holds_a_second_native_model(precomputed, tmp_path):
    args = DPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", precompute_ref_log_probs=precomputed)
    adapter = get_peft_model(tiny_llama(), MoELoraConfig(num_experts=2, r=2, task_type="CAUSAL_LM"))
    assert memory(adapter, args).reference == 0
    needed = memory(tiny_llama(), args)
    assert needed.reference == needed.weights * (not precomputed)
    assert ("reference" in str(needed)) == (not precomputed)


@pytest.mark.parametrize(
    ("fields", "processes", "expected"),
    [
        ({"per_device_train_batch_size": 2, "num_train_epochs": 0.5}, 1, (3, 6)),
        ({"per_device_train_batch_size": 4, "dataloader_drop_last": True, "num_train_epochs": 1}, 1, (2, 8)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_train_epochs": 1}, 1, (1, 10)),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_train_epochs": 3}, 2, (9, 30)),
        ({"per_device_train_batch_size": 2, "max_steps": 7}, 1, (7, 14)),
    ],
)
def test_steps_are_the_trainers(fields, processes, expected, tmp_path, tokenizer):
    args = SFTConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", save_strategy="no", **fields)
    assert steps_and_rows(args, 10, processes) == expected
    if processes == 1:
        rows = Dataset.from_list([{"text": f"w{i} w5"} for i in range(10)])
        trainer = SFTTrainer(tiny_llama(hidden=8, layers=1), args, train_dataset=rows, processing_class=tokenizer)
        assert trainer.train().global_step == expected[0]


@pytest.mark.parametrize(("strategy", "rows"), [("bfd", 10), ("wrapped", 80)])
def test_packing_cuts_or_splits_long_rows(strategy, rows, tmp_path, tokenizer):
    args = SFTConfig(str(tmp_path), bf16=False, use_cpu=True, packing=True, packing_strategy=strategy, max_length=64)
    data = Dataset.from_list([{"text": " ".join(["w5"] * 511)}] * 10)  # 512 with the end
    assert count_rows(data, tokenizer, args) == RowCount(rows, 64.0)


def test_the_schedule_is_named_as_it_is(tmp_path):
    fields = {"learning_rate": 2e-5, "bf16": False, "use_cpu": True, "max_length": 512, "gradient_checkpointing": False}
    plain = MoESFTConfig(str(tmp_path), lr_scheduler_type="constant", **fields)
    assert training_line(plain) == "learning rate 2e-05, constant; context 512; gradient checkpointing off"
    phases = MoESFTConfig(str(tmp_path), router_schedule="three_phase", lr_scheduler_type="constant", **fields)
    assert training_line(phases) == "learning rate 2e-05, in three phases; context 512; gradient checkpointing off"
