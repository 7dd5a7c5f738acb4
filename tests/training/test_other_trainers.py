"""TRL's trainers beside SFT and DPO: the example scripts, cells of the table of trainers, and who adds what loss."""

from __future__ import annotations

import importlib
import json
import warnings

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, KTOConfig, RewardConfig, RewardTrainer, SFTConfig

from compatibility import trainers as table
from moe_peft import MoEDPOTrainer, MoELoraConfig, MoESFTTrainer, RouterLossesMixin
from moe_peft.training.rollouts import rollouts_of_adapters
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.trainers import MoEKTOTrainer, arguments, preferences
from tests.helpers.upit_case import rows

pytestmark = pytest.mark.slow
TABLE = table.RESULTS / "trainers.md"

IDS = torch.randint(3, 128, (6, 8), generator=torch.Generator().manual_seed(0))


def adapt(base, **own):
    torch.manual_seed(1)
    return get_peft_model(base, MoELoraConfig(**{"num_experts": 4, "r": 4, "task_type": "CAUSAL_LM", **own}))


# --- the examples -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_llama(hidden=32, eos_token_id=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def examples_data(kind: str) -> list[dict]:
    if kind != "grpo":
        return list(preferences(kind))
    everything = " ".join(f"w{i}" for i in range(3, 128, 2))
    return [{"prompt": f"w{3 + i} w{9 + i}", "answer": everything} for i in range(16)]


@pytest.fixture
def examples_run(base, tmp_path, monkeypatch):
    """Runs an example with flags, up to the training; gives its trainer."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, examples_data("kto"))))
    (tmp_path / "data" / "test.jsonl").write_text("\n".join(map(json.dumps, examples_data("kto")[:4])))
    flags = {"model_name_or_path": base, "dataset_name": tmp_path / "data", "output_dir": tmp_path / "out"}
    flags |= {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 4}
    monkeypatch.setattr(Trainer, "train", lambda self, **own: None)
    main = importlib.import_module("examples.trainers.kto").main
    return lambda **own: main([t for name, value in (flags | own).items() for t in (f"--{name}", str(value))])


def test_the_examples_flags_count(examples_run):
    trainer = examples_run(
        load_in_4bit=True, attn_implementation="eager", lora_target_modules="up_proj", lora_dropout=0.2,
        use_rslora=True, eval_strategy="steps", eval_steps=1, model_revision="main",
    )  # fmt: skip
    base, config = trainer.model.get_base_model(), trainer.model.peft_config["default"]
    assert base.is_loaded_in_4bit and base.config._attn_implementation == "eager"
    assert (config.target_modules, config.lora_dropout, config.use_rslora) == ({"up_proj"}, 0.2, True)
    assert config.revision == "main" and len(trainer.eval_dataset) == 4


@pytest.mark.parametrize("name", ["use_dora", "trust_remote_code"])
def test_a_flag_that_the_examples_do_not_read(name, examples_run):
    with pytest.raises(ValueError, match=f"^{name}=True: is not read here; "):
        examples_run(**{name: True})


@pytest.mark.parametrize("kind", ["grpo", "kto", "reward"])
def test_the_example_trains_routers_and_experts_and_saves_them(kind, base, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, examples_data(kind))))
    flags = {
        "model_name_or_path": base, "dataset_name": tmp_path / "data", "output_dir": tmp_path / "out", "max_steps": 3,
        "per_device_train_batch_size": 4, "learning_rate": 1e-2, "use_cpu": True, "bf16": False, "report_to": "none",
        "logging_steps": 1, "lora_r": 4, "router_z_loss_coef": 0.01, "disable_tqdm": True, "save_strategy": "no",
        "dtype": "float32", **({"num_generations": 4, "max_completion_length": 8} if kind == "grpo" else {}),
    }  # fmt: skip
    initial, train = {}, Trainer.train

    def spy(self, *args, **kwargs):
        initial.update((n, p.detach().clone()) for n, p in self.model.named_parameters() if "moe_lora_" in n)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", spy)
    module = importlib.import_module(f"examples.trainers.{kind}")
    trainer = module.main([text for name, value in flags.items() for text in (f"--{name}", str(value))])
    records = [record for record in trainer.state.log_history if "loss" in record]
    assert len(records) == 3
    assert all(r["aux_loss"] > 0.9 and r["router_z_loss"] > 0 and "load_cv" in r for r in records)
    after = dict(trainer.model.named_parameters())
    trained = {name for name in initial if ".ref." not in name}  # the reference of KTO stays
    assert {part for part in ("moe_lora_A", "moe_lora_B", "moe_lora_router") for n in trained if part in n} == {
        "moe_lora_A", "moe_lora_B", "moe_lora_router"
    }  # fmt: skip
    assert not [name for name in trained if torch.equal(after[name], initial[name])]
    auto = type(trainer.model.get_base_model())
    loaded = PeftModel.from_pretrained(auto.from_pretrained(base, num_labels=1), tmp_path / "out")
    for name, parameter in loaded.named_parameters():
        if "moe_lora_" in name:
            assert_near(parameter, after[name])


def test_the_reward_of_the_example_reads_strings_and_chats():
    from examples.trainers.grpo import shared_words

    chat = [[{"role": "assistant", "content": "w3 w5"}], [{"role": "assistant", "content": "w9"}]]
    assert shared_words(["w3 w5", "w9"], ["w3 w4", "w8"]) == shared_words(chat, ["w3 w4", "w8"]) == [0.5, 0.0]


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "setting", "adapter"),
    [
        ("SFT", "packing", "output"),
        ("SFT", "padding-free", "projection"),
        ("SFT", "eval, best model", "output"),
        ("DPO", "streaming", "output"),
        ("KTO", "plain", "projection"),
        ("RLOO", "plain", "output"),
        ("Reward", "resume", "output"),
        ("Trainer", "Liger", "output"),
        ("accelerate loop", "resume", "output"),
        ("accelerate loop", "plain", "LoRA"),
    ],
)
def test_a_cell_of_the_table_is_what_a_run_gives(trainer, setting, adapter):
    shown = TABLE.read_text()
    row = next(line for line in shown.splitlines() if line.startswith(f"| {trainer} | {setting} |"))
    column = [text.strip() for text in row.strip("|").split("|")][2 + list(table.ADAPTERS).index(adapter)]
    assert table.cell(trainer, setting, adapter) == column == "yes"


def test_a_cell_says_why_not(monkeypatch):
    assert table.cell("KTO", "packing", "output") == "not with this trainer"
    monkeypatch.setattr(table, "reward", lambda completions, **kwargs: [0.0] * len(completions))
    assert table.cell("GRPO", "plain", "LoRA").startswith("no: AssertionError: did not move: ")


# --- who adds the balancing loss --------------------------------------------------------------------------------------


def stock_reward(folder, tokenizer, cls=RewardTrainer, coefficient=1.0):
    base = tiny_llama(hidden=32)
    base.config.num_labels = 1
    torch.manual_seed(0)
    model = adapt(LlamaForSequenceClassification(base.config), task_type="SEQ_CLS", router_aux_loss_coef=coefficient)
    args = arguments(folder, RewardConfig, max_steps=1)
    return cls(model=model, args=args, train_dataset=preferences("reward"), processing_class=tokenizer)


UNBALANCED = "LlamaForSequenceClassification trains with its caller's own loss, which lacks the balancing loss"


def test_a_trainer_that_leaves_the_balancing_loss_out_is_told(tokenizer, tmp_path):
    with pytest.warns(UserWarning, match=UNBALANCED):
        stock_reward(tmp_path, tokenizer).train()

    class MoERewardTrainer(RouterLossesMixin, RewardTrainer):
        pass

    for make in (
        lambda: stock_reward(tmp_path, tokenizer, coefficient=0.0),
        lambda: stock_reward(tmp_path, tokenizer, MoERewardTrainer),
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="MoE-LoRA")
            make().train()


def test_who_adds_the_loss_or_asks_for_it_is_told_nothing():
    model = adapt(tiny_llama(hidden=32)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=IDS, labels=IDS)
        assert model(input_ids=IDS, output_router_logits=True).aux_loss.requires_grad
        with torch.no_grad():
            model(input_ids=IDS)
        model.eval()(input_ids=IDS)
    with pytest.warns(UserWarning, match="LlamaForCausalLM trains with its caller's own loss"):
        model.train()(input_ids=IDS)
    with pytest.warns(UserWarning, match="LlamaModel trains with its caller's own loss"):
        model.get_base_model().model(input_ids=IDS)


def test_the_mixin_takes_a_trainers_own_config(tokenizer, tmp_path):
    for cls, config, data in (
        (MoEKTOTrainer, KTOConfig, preferences("kto")),
        (MoEDPOTrainer, DPOConfig, preferences("dpo")),
        (MoESFTTrainer, SFTConfig, Dataset.from_list(rows(8))),
    ):
        args = arguments(tmp_path, config, max_steps=1)
        trainer = cls(model=adapt(tiny_llama(hidden=32)), args=args, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        record = trainer.state.log_history[0]
        assert record["aux_loss"] > 0.9 and "router_z_loss" in record


def test_without_a_config_the_mixin_trains_with_the_defaults(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    for cls, data in ((MoESFTTrainer, Dataset.from_list(rows(8))), (MoEDPOTrainer, preferences("dpo"))):
        trainer = cls(model=adapt(tiny_llama(hidden=32)), train_dataset=data, processing_class=tokenizer)
        assert trainer.args.training_stage == "joint" and trainer._coefficients["aux"] == 0.01


def test_a_trainer_without_compute_loss_is_refused(tokenizer, tmp_path):
    class OwnStep(RewardTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = model(inputs["input_ids"]).logits.mean()
            self.accelerator.backward(loss)
            return loss.detach()

    class MoEOwnStep(RouterLossesMixin, OwnStep):
        pass

    with pytest.raises(RuntimeError, match="MoEOwnStep: the trainer's training_step does not call compute_loss"):
        stock_reward(tmp_path, tokenizer, MoEOwnStep).train()


def test_trainers_that_would_merge_an_adapter_for_vllm_refuse():
    class Trainer: ...

    with pytest.raises(ValueError, match=r"^use_vllm=True: Trainer merges an adapter .*; leave it out$"):
        rollouts_of_adapters(Trainer).__enter__()


def test_orpo_logs_what_the_mixin_adds(tokenizer, tmp_path):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    class MoEORPOTrainer(RouterLossesMixin, ORPOTrainer):
        pass

    first = {}
    for coefficient in (0.0, 1.0):
        args = arguments(tmp_path, ORPOConfig, max_steps=1, max_length=32)
        args.remove_unused_columns = False
        model = adapt(tiny_llama(hidden=32), router_aux_loss_coef=coefficient)
        data = preferences("dpo")
        MoE = MoEORPOTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
        MoE._coefficients["z"] = 0.0
        MoE.train()
        first[coefficient] = MoE.state.log_history[0]
    added = first[1.0]["loss"] - first[0.0]["loss"]
    assert first[1.0]["aux_loss"] > 0.9
    assert added == pytest.approx(first[1.0]["aux_loss"], rel=1e-3)  # what is logged is rounded


def test_predictions_of_the_plain_trainer_are_those_with_lora(tmp_path):
    """`compute_metrics` sees logits, not a tuple with router logits."""
    data = Dataset.from_dict({"input_ids": IDS.tolist(), "labels": IDS.tolist()})
    seen = []
    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=2, use_cpu=True, report_to="none")
    lora = get_peft_model(tiny_llama(hidden=32), LoraConfig(target_modules=["up_proj"]))
    model = adapt(tiny_llama(hidden=32))
    for own in (lora, model):
        Trainer(own, args, eval_dataset=data, compute_metrics=lambda p: seen.append(p) or {}).evaluate()
    assert isinstance(seen[1].predictions, np.ndarray) and seen[1].predictions.shape == seen[0].predictions.shape
    config = model.get_base_model().config
    kept = tiny_llama().config.keys_to_ignore_at_inference
    assert config.keys_to_ignore_at_inference == [*kept, "router_logits", "aux_loss"]
    model.unload()
    assert config.keys_to_ignore_at_inference == kept and "keys_to_ignore_at_inference" not in config.__dict__


class MoETrainer(RouterLossesMixin, Trainer):
    """A trainer of one's own."""


def test_a_moe_keeps_its_own_balancing_loss_beside_experts_on_its_attention(tmp_path):
    losses, sizes = [], {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    for trainer in (Trainer, MoETrainer):
        torch.manual_seed(0)
        moe = MixtralForCausalLM(MixtralConfig(
            **sizes, vocab_size=128, num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
            router_aux_loss_coef=0.5,
        ))  # fmt: skip
        model = adapt(moe, target_modules=["q_proj"], top_k=1, router_aux_loss_coef=0)
        args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
        data = Dataset.from_list([{"input_ids": row, "labels": row} for row in IDS.tolist()])
        losses.append(trainer(model=model, args=args, train_dataset=data).train().training_loss)
        assert model.config.output_router_logits is True
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_router_losses_of_an_encoder_decoder_are_refused(tmp_path):
    config = T5Config(d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, d_model=32, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    model = adapt(model, target_modules=["wi", "wo"], router_aux_loss_coef=0, task_type="SEQ_2_SEQ_LM")
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder, whose routers see other"):
        MoETrainer(model=model, args=TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
