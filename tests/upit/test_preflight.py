"""What the last stage would trip over is said before the first one, by the run and by its plan."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, BloomConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, OPTConfig, XGLMConfig
from trl import SFTConfig

from moe_peft.native.base import Base
from moe_peft.training.preparation import tokenized
from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit.context import most_positions
from moe_peft.upit.evaluate import Evaluate
from moe_peft.upit.plan import plan
from moe_peft.utils.messages import InputError
from tests.helpers.models import tiny_llama
from tests.helpers.upit_case import chats, contents, make_case, run

pytestmark = pytest.mark.slow

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"


def with_sft(section: str, **sft):
    return {section: {"sft": sft}}


@pytest.fixture
def case(tmp_path, tokenizer):
    return make_case(tmp_path, tokenizer)


def merged(settings: dict, change: dict) -> dict:
    result = dict(settings)
    for key, value in change.items():
        result[key] = (
            merged(result[key], value) if isinstance(value, dict) and isinstance(result.get(key), dict) else value
        )
    return result


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            with_sft("post_train", torch_compile=True, torch_compile_backend="nope"),
            "post_train.sft.torch_compile_backend='nope': must be one of",
        ),
        (with_sft("post_train", chat_template_path="/no"), "post_train.sft.chat_template_path='/no': no tokenizer"),
        ({"sft": {"pad_to_multiple_of": 0}}, "sft.pad_to_multiple_of=0: must be at least 1"),
        (
            with_sft("post_train", dataloader_persistent_workers=True),
            "post_train.sft.dataloader_persistent_workers=True",
        ),
        (
            with_sft("post_train", gradient_checkpointing_kwargs={"foo": 1}),
            "post_train.sft.gradient_checkpointing_kwargs.foo: unknown key",
        ),
        (
            with_sft("post_train", gradient_checkpointing_kwargs={"every_n_layer": 1}),
            "post_train.sft.gradient_checkpointing_kwargs.every_n_layer: unknown key.*every_n_layers",
        ),
        (
            with_sft("router_init", lr_scheduler_type="cosine_with_min_lr"),
            "router_init.sft.lr_scheduler_kwargs={}: of 'cosine_with_min_lr': .*min_lr",
        ),
        (with_sft("router_init", loss_type="dft"), "router_init.sft.loss_type='dft': stage 3 has the paper's loss"),
        (
            with_sft("router_init", label_smoothing_factor=0.1),
            "router_init.sft.label_smoothing_factor=0.1: stage 3 has",
        ),
    ],
)
def test_it_is_said_before_the_first_stage(change, words, case, tmp_path, monkeypatch):
    """And nothing is written, not even the folder."""
    for name in ("BACKEND", "MODE"):  # which training arguments set
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "x")
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}")
    settings = merged({**case, "output_dir": str(tmp_path / "out")}, change)
    before = contents(tmp_path)
    for start in (UpIT.run, plan):
        with pytest.raises(ValueError, match=f"^{words}") as error:
            start(UpIT(recipe_from_dict(settings)))
        assert type(error.value) is InputError and "\n" not in str(error.value) and len(str(error.value)) < 400
        assert contents(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_sft("prepare", pad_token="<no>"), ".*pad_token.*<no>"),
        (with_sft("post_train", eos_token="<no>"), ".*eos_token.*<no>"),
        (with_sft("post_train", padding_free=True), ".*padding_free=True"),
        (with_sft("post_train", packing=True, pad_to_multiple_of=8), "pad_to_multiple_of=8: nothing marks"),
        (with_sft("prepare", accelerator_config={"split_batches": True}), "accelerator_config.split_batches=True: the"),
        ({"sft": {"max_length": 2}}, ".*max_length=2: no example keeps a token to learn from"),
        (with_sft("router_init", max_length=2), ".*max_length=2: no example keeps a token to learn from"),
    ],
)
def test_what_trainers_refuse_ends_a_run_with_one_line(change, words, case, tmp_path):
    """When its stage begins; what the stages before it made stays for a run with other settings."""
    with pytest.raises(InputError, match=words):
        UpIT(recipe_from_dict(merged({**case, "output_dir": str(tmp_path / "out")}, change))).run()


def test_the_context_is_at_most_the_bases_positions(case, tmp_path):
    """Of a table; rotary positions have no end. The default fits the base, and an asked one is refused."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128, n_positions=24)
    GPT2LMHeadModel(config).save_pretrained(case["model"]["name_or_path"])
    settings = {**case, "output_dir": str(tmp_path / "out"), "method": "lora", "num_train_epochs": 1}
    path = Path(case["data"]["train"])
    long = {"prompt": "w3 " * 40, "completion": "w4 " * 40, "domain": "a"}
    path.write_text("\n".join([*path.read_text().splitlines(), json.dumps(long)]))
    settings["adapter"] = {**case["adapter"], "target_projections": None}
    first = UpIT(recipe_from_dict({**settings, "data": {"train": str(path)}}))
    assert [stage.training for stage in plan(first)] == [
        "learning rate 0.005, constant; context 24; gradient checkpointing off"
    ]
    first.run()  # a row has 80 tokens
    for change, field in (({"sft": {"max_length": 25}}, "sft"), (with_sft("prepare", max_length=25), "prepare.sft")):
        with pytest.raises(ValueError, match=rf"^{field}.max_length=25: the base takes 24 tokens; use at most 24$"):
            UpIT(recipe_from_dict(merged(settings, change))).check()
    with pytest.raises(ValueError, match=r"^sft.max_length=None: the base takes 24 tokens"):
        UpIT(recipe_from_dict(merged(settings, {"sft": {"max_length": None}}))).check()
    UpIT(recipe_from_dict(merged(settings, {"sft": {"max_length": 24}}))).check()


@pytest.mark.parametrize(("config", "most"), [
    (OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=32,
               vocab_size=128, max_position_embeddings=24), 24),
    (XGLMConfig(vocab_size=128, d_model=32, ffn_dim=64, num_layers=1, attention_heads=4, max_position_embeddings=24),
     None),
    (LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                 max_position_embeddings=24), None),
    (BloomConfig(vocab_size=128, hidden_size=32, n_layer=1, n_head=4), None),
], ids=lambda value: getattr(value, "model_type", None))  # fmt: skip
def test_only_a_table_of_positions_ends_the_context(config, most, tmp_path):
    """XGLM makes its sinusoids longer, Bloom has a bias by distance."""
    config.save_pretrained(tmp_path)
    assert most_positions(Base(str(tmp_path))) == most


def test_preparing_examples_leaves_the_tokenizer_alone(tokenizer, tmp_path):
    """A template brings a token, which the examples have and the caller's tokenizer does not."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<new>"])
    other.chat_template = "{% for m in messages %}<new> {{ m['content'] }} {% endfor %}"
    other.save_pretrained(tmp_path / "other")
    args = SFTConfig(str(tmp_path), chat_template_path=str(tmp_path / "other"), bf16=False, use_cpu=True)
    before = len(tokenizer), tokenizer.chat_template, tokenizer.pad_token
    talk = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]
    rows, _ = tokenized(Dataset.from_list([{"messages": talk}]), tokenizer, args)
    assert before[0] in rows[0]["input_ids"]
    assert (len(tokenizer), tokenizer.chat_template, tokenizer.pad_token) == before


def test_a_stages_own_chat_template_decides_its_result(case, tmp_path):
    """It is read, checked and hashed as that of all stages, and the result is evaluated with it."""
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    (tmp_path / "all.jinja").write_text(TEMPLATE.replace(": ", " - "))
    settings = {**chats(case), "router_init": {"buckets": "none"}}
    settings["sft"] = {**case["sft"], "chat_template_path": str(tmp_path / "all.jinja")}
    settings = merged(settings, with_sft("post_train", chat_template_path=str(template)))
    first = run(settings, tmp_path)
    assert AutoTokenizer.from_pretrained(first.result).chat_template == TEMPLATE
    stage = first.stages[-1]
    assert isinstance(stage, Evaluate) and stage.arguments().chat_template_path == str(template)
    template.write_text(TEMPLATE.replace(": ", " = "))
    outlook = UpIT(recipe_from_dict({**settings, "output_dir": str(first.root)})).outlook()
    assert outlook["prepare"] == "done" and outlook["post_train"].startswith("again: content of chat_template")
    template.write_text(
        TEMPLATE.replace("'content'", "'nothing'").replace("{% endfor %}", "{{ raise_exception('x') }}")
    )
    with pytest.raises(ValueError, match=r"chat template does not take messages"):
        UpIT(recipe_from_dict({**settings, "output_dir": str(tmp_path / "new")})).check()


@pytest.mark.parametrize("section", ["", "post_train"])
def test_the_result_is_evaluated_with_the_end_token_of_its_training(section, case, tmp_path):
    """It ends held-out texts, too."""
    change = with_sft(section, eos_token="w5") if section else {"sft": {"eos_token": "w5"}}
    settings = {**merged(case, change), "output_dir": str(tmp_path / "out")}
    stage = UpIT(recipe_from_dict(settings)).stages[-1]
    assert isinstance(stage, Evaluate) and stage.arguments().eos_token == "w5"


def test_another_tokenizers_template_that_would_change_the_base(case, tmp_path, tokenizer):
    """Whole models may take it: their embeddings are saved with them."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<new>"])
    other.chat_template = TEMPLATE
    other.save_pretrained(tmp_path / "other")
    settings = {**case, "output_dir": str(tmp_path / "out"), "method": "loramoe_pt"}
    settings["sft"] = {**case["sft"], "chat_template_path": str(tmp_path / "other")}
    with pytest.raises(ValueError, match=r"^sft\.chat_template_path='.*other': its tokenizer adds '<new>'"):
        UpIT(recipe_from_dict(settings)).check(weights=False)
    del settings["adapter"]
    UpIT(recipe_from_dict({**settings, "mode": "ffn", "method": "sft"})).check(weights=False)


def loras(folder: Path, base: str, count: int, **own) -> list[str]:
    for i in range(count):
        torch.manual_seed(i)
        config = LoraConfig(r=6, lora_alpha=12, task_type="CAUSAL_LM", init_lora_weights=False, **own)
        model = get_peft_model(tiny_llama(vocab=128), config)
        model.peft_config["default"].base_model_name_or_path = base
        model.save_pretrained(folder / f"lora{i}")
    return [str(folder / f"lora{i}") for i in range(count)]


def test_given_adapters_say_what_experts_are(case, tmp_path):
    """The plan has their numbers, and a recipe that says otherwise is refused rather than ignored."""
    folders = loras(tmp_path, case["model"]["name_or_path"], 3, target_modules=["up_proj", "down_proj"])
    settings = {**case, "num_experts": 4, "prepare": {"adapters": folders}, "adapter": {"top_k": 2}}
    settings["output_dir"] = str(tmp_path / "out")
    planned = {stage.name: stage.trainable for stage in plan(UpIT(recipe_from_dict(settings)))}
    pipeline = run(settings, tmp_path)
    weights = (pipeline.result / "adapter_model.safetensors").stat().st_size
    assert planned["post_train"] == 2 * (4 * 6 * (64 + 128) * 2 + 4 * 64)  # layers × (experts × r × … + router)
    assert weights == pytest.approx(4 * planned["post_train"], rel=0.02)
    for own, words in (
        ({"r": 4}, "adapter.r=4: the adapters of prepare.adapters have 6"),
        ({"r": 6, "lora_alpha": 6}, "adapter.lora_alpha=6: the adapters of prepare.adapters have 12"),
        ({"target_projections": ["up_proj"]}, r"adapter.target_projections=\['up_proj'\]: .*'down_proj'"),
    ):
        changed = {**settings, "adapter": {"top_k": 2, **own}, "output_dir": str(tmp_path / "other")}
        with pytest.raises(ValueError, match=words):
            plan(UpIT(recipe_from_dict(changed)))
        with pytest.raises(ValueError, match=words):
            UpIT(recipe_from_dict(changed)).run()
    same = {"r": 6, "lora_alpha": 12, "target_projections": ["up_proj", "down_proj"]}
    plan(UpIT(recipe_from_dict({**settings, "adapter": {"top_k": 2, **same}})))


def test_given_adapters_are_compared_by_their_own_numbers(case, tmp_path):
    """Of rank-stabilized ones too, and of all that are used: the last one where experts are copies."""
    base = case["model"]["name_or_path"]
    folders = loras(tmp_path / "rs", base, 2, target_modules=["up_proj"], use_rslora=True)
    settings = {**case, "num_experts": 2, "output_dir": str(tmp_path / "out"), "prepare": {"adapters": folders}}
    for own in ({}, {"r": 6, "lora_alpha": 12, "use_rslora": True}, {"lora_alpha": 12}):
        plan(UpIT(recipe_from_dict({**settings, "adapter": {"top_k": 1, **own}})))
    narrow = loras(tmp_path / "narrow", base, 1, target_modules=["up_proj"], rank_pattern={"up_proj": 3})
    settings |= {"prepare": {"adapters": [folders[0], *narrow]}, "method": "loramoe_sft"}
    planned = plan(UpIT(recipe_from_dict({**settings, "adapter": {"top_k": 1}})))[-1]
    assert planned.trainable == 2 * (2 * 3 * (64 + 128) + 2 * 64)
    result = run({**settings, "adapter": {"top_k": 1}}, tmp_path).result
    assert json.loads((result / "adapter_config.json").read_text())["r"] == 3


def test_given_adapters_of_different_ranks_scalings_and_modules_go_through_stage_3(case, tmp_path):
    """Each is trained by itself, whatever the others are."""
    base = case["model"]["name_or_path"]
    folders = loras(tmp_path / "a", base, 1, target_modules=["up_proj", "down_proj"])
    folders += loras(tmp_path / "b", base, 1, target_modules=["up_proj"], rank_pattern={"up_proj": 3}, use_rslora=True)
    settings = {**case, "num_experts": 2, "num_train_epochs": 1, "adapter": {"top_k": 1}}
    records = run(settings, tmp_path, prepare={"adapters": folders}).records
    assert records["router_init"]["metrics"]["bucket_sizes"] == [6, 6]


def test_a_plan_needs_no_launcher(case, tmp_path, monkeypatch):
    settings = {**case, "output_dir": str(tmp_path / "out"), **with_sft("post_train", fsdp="full_shard")}
    assert plan(UpIT(recipe_from_dict(settings)))
    with pytest.raises(ValueError, match=r"^post_train.sft.fsdp=True: this is one process; start the run with"):
        UpIT(recipe_from_dict(settings)).run()
    # A machine with eight GPUs, where a trainer outside of a launcher is refused.
    gpus = property(lambda self: 8 if (self.device, self._n_gpu)[1] == 0 else self._n_gpu)
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", gpus)
    assert plan(UpIT(recipe_from_dict({**case, "output_dir": str(tmp_path / "out")})))


def test_given_adapters_with_rows_of_embeddings_are_refused(case, tmp_path):
    base = case["model"]["name_or_path"]
    folders = loras(tmp_path, base, 2, target_modules=["up_proj"], trainable_token_indices=[5])
    settings = {**case, "num_experts": 2, "output_dir": str(tmp_path / "out"), "prepare": {"adapters": folders}}
    with pytest.raises(ValueError, match=r"prepare.adapters=.*trainable_tokens_delta: is not a weight of a LoRA"):
        UpIT(recipe_from_dict({**settings, "adapter": {"top_k": 1}})).check()


def test_given_adapters_of_another_base_are_a_warning(case, tmp_path, caplog):
    base = case["model"]["name_or_path"]
    folders = [*loras(tmp_path / "own", base, 1, target_modules=["up_proj"]),
               *loras(tmp_path / "other", "someone/else", 1, target_modules=["up_proj"])]  # fmt: skip
    settings = {**case, "num_experts": 2, "output_dir": str(tmp_path / "out"), "prepare": {"adapters": folders}}
    with caplog.at_level(logging.WARNING, "moe_peft"):
        UpIT(recipe_from_dict({**settings, "adapter": {"top_k": 1}})).check()
    messages = [record.message for record in caplog.records if "prepare.adapters" in record.message]
    assert len(messages) == 1 and f"{folders[1]!r}: was trained on someone/else (main)" in messages[0]


def test_float16_on_a_cpu_is_refused_where_it_runs(case, tmp_path):
    """A plan may be for another machine."""
    change = with_sft("post_train", bf16=False, fp16=True)
    settings = merged({**case, "output_dir": str(tmp_path / "out")}, change)
    with pytest.raises(InputError, match=r"^post_train\.sft\.fp16=True: a CPU"):
        UpIT(recipe_from_dict(settings)).run()
    assert not (tmp_path / "out").exists() and plan(UpIT(recipe_from_dict(settings)))
