"""The memory that a plan names, against sums made by hand, under every strategy."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from moe_peft import MoESFTConfig
from moe_peft.training.estimate import (  # fmt: skip
    _TILE_TOKENS,
    _TILE_WORDS,
    STRATEGIES,
    Launch,
    memory,
    planned_launch,
    rows_and_length,
    steps_and_rows,
    training_line,
)
from tests.helpers.models import ATTENTION, FFN, tiny_llama

LAYER = ATTENTION + FFN + 2 * 64
OUTSIDE = 2 * 128 * 64 + 64  # embeddings, head, norm
BASE = 4 * (2 * LAYER + OUTSIDE)
HELD, TRAINED = 3000, 2000
# Of 4 rows of 10 tokens in float32: both layers' activations, as nothing is computed again, and a tile of the logits.
ACTIVATIONS = 4 * 10 * 4 * (2 * (10 * 64 + 8 * 128) + 128)


@pytest.fixture(scope="module")
def needed(tmp_path_factory):
    args = SFTConfig(
        str(tmp_path_factory.mktemp("out")), per_device_train_batch_size=4, bf16=False, use_cpu=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    return lambda launch: memory(tiny_llama(), args, 10, HELD, TRAINED, half=False, launch=launch)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_process_holds_everything(strategy, needed):
    found = needed(Launch(1, strategy))
    assert (found.parameters, found.gradients, found.optimizer) == (BASE + 4 * HELD, 4 * TRAINED, 8 * TRAINED)
    assert found.activations == ACTIVATIONS
    assert found.total == BASE + 4 * HELD + 12 * TRAINED + ACTIVATIONS


def test_an_optimizer_of_eight_bits(tmp_path):
    args = SFTConfig(str(tmp_path), optim="adamw_bnb_8bit", bf16=False, use_cpu=True)
    found = memory(tiny_llama(), args, 10, HELD, TRAINED, half=False)
    assert (found.gradients, found.optimizer) == (4 * TRAINED, 2 * TRAINED)


@pytest.mark.parametrize("processes", [2, 8, 64])
def test_what_is_sharded(processes, needed):
    ddp, zero2, zero3, fsdp2 = (needed(Launch(processes, name)) for name in ("ddp", "zero2", "zero3", "fsdp2"))
    assert (ddp.parameters, ddp.gradients, ddp.optimizer) == (BASE + 4 * HELD, 2 * 4 * TRAINED, 8 * TRAINED)
    assert (zero2.parameters, zero2.gradients) == (BASE + 4 * HELD, -(-4 * TRAINED // processes))
    assert zero2.optimizer == 8 * TRAINED // processes
    whole = 4 * (2 * LAYER + OUTSIDE) + 2 * (4 * HELD // 2)  # this model has but two layers
    assert zero3 == fsdp2
    assert zero3.parameters == min(-(-(BASE + 4 * HELD) // processes) + whole, BASE + 4 * HELD)
    assert {found.activations for found in (ddp, zero2, zero3)} == {ACTIVATIONS}


def test_many_layers_shrink_with_the_processes():
    args = SFTConfig("unused", per_device_train_batch_size=1, bf16=False, use_cpu=True)
    model = tiny_llama(layers=12)
    one, many = (memory(model, args, 10, 0, 0, half=False, launch=Launch(n, "fsdp2")) for n in (1, 8))
    assert one.parameters == 4 * (12 * LAYER + OUTSIDE)
    assert many.parameters == one.parameters // 8 + 4 * (2 * LAYER + OUTSIDE)


def test_wrong_launches_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"strategy='zero4': .*zero3"):
        Launch(2, "zero4")
    with pytest.raises(ValueError, match="processes=0: must be 1 or more"):
        Launch(0)
    with pytest.raises(ValueError, match=r"processes=8: is for --dry-run; a run takes it from its launcher"):
        planned_launch(8, None, dry_run=False)
    with pytest.raises(ValueError, match=r"strategy='ddp': is for --dry-run"):
        planned_launch(None, "ddp", dry_run=False)
    assert planned_launch(None, None, dry_run=True) == Launch(1, "ddp")


def test_half_the_bytes_where_bfloat16_weights_train(tmp_path):
    args = SFTConfig(str(tmp_path), bf16=False, use_cpu=True)
    found = memory(tiny_llama(), args, 10, 0, 1000, half=False, trained=torch.bfloat16)
    assert (found.gradients, found.optimizer) == (2 * 1000, 4 * 1000)


@pytest.mark.parametrize(
    ("quantization", "size"), [({}, 4), ({"load_in_8bit": True}, 1), ({"load_in_4bit": True}, 0.55)]
)
def test_linears_but_the_head_are_quantized(quantization, size, tmp_path):
    args = SFTConfig(str(tmp_path), bf16=False, use_cpu=True)
    found = memory(tiny_llama(), args, 10, 0, 0, half=False, quantization=quantization)
    assert found.parameters == round(size * 2 * (ATTENTION + FFN) + 4 * (2 * 2 * 64 + OUTSIDE))


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
    args = SFTConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", max_length=None)
    assert rows_and_length(Dataset.from_list([row] * 3), tokenizer, args) == (3, length)
    if "chosen" not in row:
        trainer = SFTTrainer(
            tiny_llama(hidden=8, layers=1), args, train_dataset=Dataset.from_list([row]), processing_class=tokenizer
        )
        assert len(trainer.train_dataset[0]["input_ids"]) == length


def test_tokens_are_those_of_the_stages_own_chat_template(tmp_path, tokenizer):
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
        rows, length = rows_and_length(data, tokenizer_of_its_own, args)
        lengths.append(length)
        assert tokenizer_of_its_own.chat_template.count("w3") == 0
        model = tiny_llama(hidden=8, layers=1)
        trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer_of_its_own)
        assert len(trainer.train_dataset[0]["input_ids"]) == length and rows == 2
    assert lengths[1] == lengths[0] + 6


def test_logits_count_by_tiles(tmp_path):
    args = SFTConfig(str(tmp_path), per_device_train_batch_size=8, bf16=False, use_cpu=True)
    small, large = (memory(tiny_llama(vocab=n), args, 1024, 0, 0, half=True).activations for n in (128, 100_000))
    assert large - small == 2 * 4096 * (32768 - 128)


def test_tiles_are_those_that_trl_computes():
    kernel = pytest.importorskip("trl.kernels.chunked_logprob")
    utils = pytest.importorskip("trl.trainer.utils")
    assert (_TILE_TOKENS, _TILE_WORDS) == (kernel.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE)


@pytest.mark.parametrize(
    ("own", "processes", "expected"),
    [
        ({"per_device_train_batch_size": 2, "num_train_epochs": 0.5}, 1, (3, 6)),
        ({"per_device_train_batch_size": 4, "dataloader_drop_last": True, "num_train_epochs": 1}, 1, (2, 8)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_train_epochs": 1}, 1, (1, 10)),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_train_epochs": 3}, 2, (9, 30)),
        ({"per_device_train_batch_size": 2, "max_steps": 7}, 1, (7, 14)),
    ],
)
def test_steps_are_the_trainers(own, processes, expected, tmp_path, tokenizer):
    args = SFTConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", save_strategy="no", **own)
    assert steps_and_rows(args, 10, processes) == expected
    if processes == 1:
        rows = Dataset.from_list([{"text": f"w{i} w5"} for i in range(10)])
        trainer = SFTTrainer(tiny_llama(hidden=8, layers=1), args, train_dataset=rows, processing_class=tokenizer)
        assert trainer.train().global_step == expected[0]


@pytest.mark.parametrize(("strategy", "rows"), [("bfd", 10), ("wrapped", 80)])
def test_packing_cuts_or_splits_long_rows(strategy, rows, tmp_path, tokenizer):
    args = SFTConfig(str(tmp_path), bf16=False, use_cpu=True, packing=True, packing_strategy=strategy, max_length=64)
    data = Dataset.from_list([{"text": " ".join(["w5"] * 511)}] * 10)  # 512 with the end
    assert rows_and_length(data, tokenizer, args) == (rows, 64.0)


def test_the_schedule_is_named_as_it_is(tmp_path):
    own = {"learning_rate": 2e-5, "bf16": False, "use_cpu": True, "max_length": 512}
    plain = MoESFTConfig(str(tmp_path), lr_scheduler_type="constant", **own)
    assert training_line(plain) == "learning rate 2e-05, constant; context 512"
    phases = MoESFTConfig(str(tmp_path), router_schedule="three_phase", lr_scheduler_type="constant", **own)
    assert training_line(phases) == "learning rate 2e-05, in three phases; context 512"
