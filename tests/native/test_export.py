"""Trained adapters as native MoEs: the same logits in every family; others are refused."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
)
from trl import SFTConfig, SFTTrainer

from moe_peft import MoELoraConfig, init_attention_routers
from moe_peft.adapter.experts.lora import LoraExperts as Experts
from moe_peft.cli import main
from moe_peft.native import export_adapter, verify_export
from moe_peft.native.families import FAMILIES
from moe_peft.native.folders import open_folder
from tests.helpers.close import assert_near
from tests.helpers.native_case import DENSE, IDS, MOE, adapter, dense_model, logits, saved

ROUTERS = {
    "linear": {},
    "attention": {"router_type": "attention", "router_num_heads": 2},
    "soft": {"router_type": "soft"},
    "locmoe": {"router_type": "locmoe"},
}


def assert_exported(model, adapter_folder, tmp_path, **options):
    out = export_adapter(adapter_folder, tmp_path / "moe", **options)
    expected = logits(model)
    assert_near(logits(out), expected)
    coefficient = json.loads((out / "config.json").read_text())["router_aux_loss_coef"]
    assert coefficient == model.peft_config["default"].router_aux_loss_coef
    return out


def named(settings: dict) -> str:
    """For tests: pytest finds none by a name with backslashes."""
    return str(settings).replace("\\", "")


@pytest.mark.parametrize(
    "kind, router",
    [(kind, [*ROUTERS][(i + j) % len(ROUTERS)]) for i, kind in enumerate(DENSE) for j in range(2)],
)
def test_logits_are_the_adapters(kind, router, tmp_path):
    name = saved(dense_model(kind), tmp_path / "base")
    model = adapter(dense_model(kind), tmp_path / "adapter", name, **ROUTERS[router])
    assert (logits(model) - logits(name)).abs().max() > 0.1
    out = assert_exported(model, tmp_path / "adapter", tmp_path)
    assert json.loads((out / "config.json").read_text())["model_type"] == MOE[kind]


@pytest.mark.parametrize("settings", [
    {"rank_pattern": {r"layers\.1\.mlp": 8}, "alpha_pattern": {r"layers\.0\.mlp": 3.0}, "use_rslora": True},
    {"target_projections": ["up_proj"]},
    {
        "target_modules": ["mlp", "q_proj", "o_proj"], "num_experts_pattern": {"q_proj": 1, "o_proj": 1},
        "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3.0},
    },
    {"modules_to_save": ["lm_head"]},
    {"trainable_token_indices": IDS[0, :6].tolist()},
    {"trainable_token_indices": {"embed_tokens": IDS[0, :6].tolist(), "lm_head": [5, 4]}},
    {"top_k": 1, "num_experts": 3, "router_aux_loss_coef": 0.125},
], ids=named)  # fmt: skip
@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
def test_what_else_an_adapter_may_have(kind, settings, tmp_path):
    tied = {"tie_word_embeddings": False} if "modules_to_save" in settings else {}
    name = saved(dense_model(kind, **tied), tmp_path / "base")
    model = adapter(dense_model(kind, **tied), tmp_path / "adapter", name, **settings)
    assert_exported(model, tmp_path / "adapter", tmp_path)


@pytest.mark.parametrize("settings", [
    {"target_projections": ["gate_up_proj"]},
    {"rank_pattern": {r"layers\.1\.mlp": 8}, "alpha_pattern": {r"layers\.0\.mlp": 3.0}, "use_rslora": True},
    {
        "target_modules": ["mlp", "qkv_proj", "o_proj"], "num_experts_pattern": {"qkv_proj": 1, "o_proj": 1},
        "rank_pattern": {"qkv_proj": 2}, "alpha_pattern": {"o_proj": 3.0},
    },
    {"target_modules": ["mlp"], "modules_to_save": ["layers.1.self_attn.qkv_proj", "lm_head"]},
], ids=named)  # fmt: skip
def test_updates_of_fused_weights_are_split_with_them(settings, tmp_path):
    name = saved(dense_model("phi3"), tmp_path / "base")
    model = adapter(dense_model("phi3"), tmp_path / "adapter", name, **settings)
    weights = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert any("qkv_proj" in key or "gate_up_proj" in key for key in weights), "fused weights were trained"
    assert_exported(model, tmp_path / "adapter", tmp_path)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("settings", [
    {"normalize_top_k": False},
    {"target_modules": ["mlp"], "layers_to_transform": [1]},
    {"num_experts_pattern": {r"layers\.0\.mlp": 1}},
    {"target_modules": ["layers.1.mlp", "layers.0.mlp.up_proj"], "num_experts_pattern": {"up_proj": 1}},
], ids=named)  # fmt: skip
def test_what_qwen_moes_can_hold(kind, settings, tmp_path):
    """Gates that do not sum to 1; layers without experts."""
    name = saved(dense_model(kind), tmp_path / "base")
    model = adapter(dense_model(kind), tmp_path / "adapter", name, **settings)
    assert_exported(model, tmp_path / "adapter", tmp_path)


# --- trained --------------------------------------------------------------------------------------------------------


def train(model, tokenizer, folder, **options):
    torch.manual_seed(0)
    words = torch.randint(3, 128, (16, 12), generator=torch.Generator().manual_seed(2))
    data = Dataset.from_list([{"text": " ".join(f"w{i}" for i in row)} for row in words.tolist()])
    args = SFTConfig(output_dir=str(folder), max_steps=4, learning_rate=5e-3, bf16=False, use_cpu=True,
                     report_to="none", save_strategy="no", gradient_checkpointing=False)  # fmt: skip
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_trained_on_a_quantized_base_and_exported_from_the_full_one(bits, tokenizer, tmp_path):
    name = saved(dense_model("mistral"), tmp_path / "base")
    settings = {}
    if bits is not None:
        kind = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} if bits == 4 else {"load_in_8bit": True}
        settings["quantization_config"] = BitsAndBytesConfig(**kind)
    base = AutoModelForCausalLM.from_pretrained(name, **settings)
    base = prepare_model_for_kbit_training(base) if bits else base
    config = MoELoraConfig(num_experts=4, r=4, task_type="CAUSAL_LM")
    trainer = train(base, tokenizer, tmp_path / "run", peft_config=config)
    trainer.save_model(str(tmp_path / "adapter"))
    weights = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert all(weight.abs().sum() > 0 for key, weight in weights.items() if "lora_B" in key), "it has been trained"
    full = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(name), tmp_path / "adapter")
    out = assert_exported(full, tmp_path / "adapter", tmp_path)
    assert (logits(out) - logits(name)).abs().max() > 1e-2
    for layer in AutoModelForCausalLM.from_pretrained(out).model.layers:
        assert layer.mlp.gate.weight.dtype == torch.float32


def test_an_exported_model_trains_on_with_all_its_weights(tokenizer, tmp_path):
    name = saved(dense_model("mistral"), tmp_path / "base")
    adapter(dense_model("mistral"), tmp_path / "adapter", name=name)
    model = AutoModelForCausalLM.from_pretrained(export_adapter(tmp_path / "adapter", tmp_path / "moe"))
    model.config.output_router_logits = True
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = train(model, tokenizer, tmp_path / "run")
    assert all(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert "aux_loss" in trainer.state.log_history[0]


def test_attention_routers_initialized_trained_and_exported(tokenizer, tmp_path):
    base = dense_model("mistral")
    name = saved(base, tmp_path / "base")
    model = get_peft_model(base, MoELoraConfig(num_experts=4, r=4, router_type="attention", task_type="CAUSAL_LM"))
    init_attention_routers(model, [{"input_ids": IDS}])
    trainer = train(model, tokenizer, tmp_path / "run")
    model.peft_config["default"].base_model_name_or_path = name
    trainer.save_model(str(tmp_path / "adapter"))
    assert_exported(model, tmp_path / "adapter", tmp_path)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, settings, message", [
    ("llama", {"mixing": "projection"}, "mixing='projection': .* no native MoE"),
    ("llama", {"mixing": "projection", "num_experts": 1, "num_experts_pattern": {"mlp": 4}}, "mixing='projection'"),
    ("llama", {"router_type": "sigmoid"}, "router_type='sigmoid' does not fold"),
    ("llama", {"router_type": "mlp"}, "router_type='mlp' does not fold"),
    ("llama", {"router_type": "attention", "router_mixture": "max"}, "only 'sum' folds"),
    ("llama", {"num_experts_pattern": {r"layers\.0\.mlp": 2}}, "num_experts: layer 1 has 4, another 2"),
    ("llama", {"top_k_pattern": {r"layers\.0\.mlp": 1}}, "top_k: layer 1 has 2, another 1"),
    ("llama", {"target_modules": ["mlp", "q_proj"]}, "q_proj is a single linear with 4 experts"),
    ("llama", {"target_modules": ["mlp"], "layers_to_transform": [1]}, r"layers \[0\] without experts: mixtral"),
    ("llama", {"normalize_top_k": False}, "normalize_top_k=False: mixtral always"),
    ("phi3", {"target_modules": ["mlp", "qkv_proj"]}, "qkv_proj is a single linear with 4 experts"),
    ("llama", {"target_modules": ["q_proj"], "num_experts": 1, "top_k": 1}, "no FFN with more than one expert"),
])  # fmt: skip
def test_what_a_native_moe_cannot_hold_is_refused_by_name(kind, settings, message, tmp_path):
    name = saved(dense_model(kind), tmp_path / "base")
    adapter(dense_model(kind), tmp_path / "adapter", name, **settings)
    with pytest.raises(ValueError, match=message) as raised:
        export_adapter(tmp_path / "adapter", tmp_path / "moe")
    assert "\n" not in str(raised.value) and not list(tmp_path.glob("*moe*"))


def test_wrong_adapters_and_bases(tmp_path):
    def refused(message, base=None):
        with pytest.raises(ValueError, match=message):
            export_adapter(tmp_path / "adapter", tmp_path / "moe", base)
        assert not list(tmp_path.glob("*moe*"))

    refused("adapter='.*adapter'")
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(dense_model("llama"), lora).save_pretrained(tmp_path / "adapter")
    refused("is a .*LORA adapter; give a MOE_LORA adapter")
    name = saved(dense_model("llama"), tmp_path / "base")
    adapter(dense_model("llama"), tmp_path / "adapter", name=name)
    refused("base='.*nowhere'", tmp_path / "nowhere")
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128))
    gpt2.save_pretrained(tmp_path / "gpt2")
    refused("'gpt2' model does not become", tmp_path / "gpt2")
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "quantized").mkdir()
    config["quantization_config"] = {"load_in_4bit": True, "quant_method": "bitsandbytes"}
    (tmp_path / "quantized/config.json").write_text(json.dumps(config))
    refused("is quantized; give the full-precision model", tmp_path / "quantized")
    biased = saved(dense_model("llama", mlp_bias=True), tmp_path / "biased")
    refused("mlp_bias=True of the dense model: mixtral has no such setting", biased)
    shallow = saved(dense_model("llama", num_hidden_layers=1), tmp_path / "shallow")
    refused("its config says nothing about it; use the config and the base that it was saved with", shallow)
    wide = saved(dense_model("llama", intermediate_size=80), tmp_path / "wide")
    refused(r"is \[4, 4, 48\], its config says \[4, 4, 80\]; use the config and the base", wide)
    weights = load_file(tmp_path / "adapter/adapter_model.safetensors")
    key = next(key for key in weights if "lora_B" in key)
    weights[key][0, 0, 0] = torch.inf
    save_file(weights, tmp_path / "adapter/adapter_model.safetensors")
    refused("holds NaN or infinity")


def test_experts_of_a_half_precision_base_are_merged_in_float32(tmp_path):
    base = dense_model("llama").bfloat16()
    name = saved(base, tmp_path / "base")
    model = adapter(base, tmp_path / "adapter", name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "moe_lora_" in parameter_name:
                parameter.mul_(1.0123)  # so that half precision cannot hold the updates
    model.save_pretrained(tmp_path / "adapter")
    result = load_file(export_adapter(tmp_path / "adapter", tmp_path / "moe") / "model.safetensors")
    dense, layer = load_file(tmp_path / "base/model.safetensors"), model.get_base_model().model.layers[1].mlp
    for projection, w in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        A, B = (of_all[projection].double() for of_all in layer.expert_parameters("default"))
        for i in range(4):
            exact = dense[f"model.layers.1.mlp.{projection}.weight"].double() + 4 * B[i].T @ A[i]
            exported = result[f"model.layers.1.block_sparse_moe.experts.{i}.{w}.weight"]
            assert (exported != exact.bfloat16()).double().mean() < 0.005  # rounded once


def test_what_was_trained_whole_is_exported(tmp_path):
    """The FFN of a layer without experts; the head of a model that ties it."""
    for kind, full in (("qwen3", "layers.0.mlp"), ("qwen2", "lm_head")):
        name = saved(dense_model(kind), tmp_path / kind)
        options = {"target_modules": ["mlp"], "layers_to_transform": [1], "modules_to_save": [full]}
        model = adapter(dense_model(kind), tmp_path / f"{kind}-adapter", name, **options)
        out = export_adapter(tmp_path / f"{kind}-adapter", tmp_path / f"{kind}-moe")
        expected = logits(model)
        assert_near(logits(out), expected)


def test_no_tensor_is_trusted(tmp_path):
    name = saved(dense_model("llama"), tmp_path / "base")
    folder = tmp_path / "adapter"
    adapter(dense_model("llama"), folder, name, modules_to_save=["lm_head"])
    weights = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.lm_head.weight"
    for value, message in (
        (weights[key] * torch.nan, "holds NaN"),
        (torch.zeros(136, 32), r"is \[136, 32\], its config says \[128, 32\]"),
    ):
        save_file({**weights, key: value}, folder / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            export_adapter(folder, tmp_path / "moe")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="the adapter names no base; name it with --base"):
        export_adapter(folder, tmp_path / "moe")
    assert not list(tmp_path.glob("*moe*"))


def test_companions_of_base_and_adapter(tokenizer, tmp_path):
    base = dense_model("mistral")
    base.generation_config.max_new_tokens = 7
    name = saved(base, tmp_path / "base")
    tokenizer.save_pretrained(name)
    adapter(base, tmp_path / "adapter", name)
    tokenizer = copy.deepcopy(tokenizer)  # the other tests' has no template
    tokenizer.chat_template, tokenizer.eos_token = "{{ messages }}", "w5"
    tokenizer.save_pretrained(tmp_path / "adapter", save_jinja_files=False)
    # What older versions of transformers wrote, and would win over the adapter's.
    (tmp_path / "base/special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    (tmp_path / "base/chat_template.jinja").write_text("of the base")
    for folder in ("base", "adapter"):
        (tmp_path / folder / "LICENSE").write_text(f"of the {folder}")
    out = export_adapter(tmp_path / "adapter", tmp_path / "moe")
    assert (out / "LICENSE").read_text() == "of the base"
    exported = AutoTokenizer.from_pretrained(out)
    assert (exported.chat_template, exported.eos_token) == ("{{ messages }}", "w5")
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.max_new_tokens == 7


def test_a_trained_head_of_resized_embeddings_is_exported(tokenizer, tmp_path):
    """PEFT saves such a head three times."""
    base = dense_model("llama")
    name = saved(base, tmp_path / "base")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([f"new{i}" for i in range(base.config.vocab_size - len(tokenizer) + 3)])
    base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model = adapter(base, tmp_path / "adapter", name, modules_to_save=["lm_head"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    exported = AutoModelForCausalLM.from_pretrained(export_adapter(tmp_path / "adapter", tmp_path / "moe"))
    with torch.no_grad():
        assert_near(exported(input_ids=IDS).logits, logits(model))


@pytest.mark.parametrize("generation", [True, False])
def test_the_end_token_of_the_training_ends_texts(generation, tokenizer, tmp_path):
    """Generation stops at the base's end tokens, too. The base's own tokenizer changes nothing."""
    base = dense_model("qwen3")
    base.config.eos_token_id = base.generation_config.eos_token_id = tokenizer.eos_token_id
    name = saved(base, tmp_path / "base")
    if not generation:
        (tmp_path / "base" / "generation_config.json").unlink()
    adapter(base, tmp_path / "adapter", name)
    result = {}
    for token in ("<eos>", "w5"):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.eos_token = token
        tokenizer.save_pretrained(tmp_path / "adapter")
        model = AutoModelForCausalLM.from_pretrained(export_adapter(tmp_path / "adapter", tmp_path / token.strip("<>")))
        result[token] = (model.config.eos_token_id, model.generation_config.eos_token_id)
    assert result == {"<eos>": (1, 1), "w5": (5, [5, 1])}


# --- the command ----------------------------------------------------------------------------------------------------


def test_command_exports_and_verifies(tokenizer, tmp_path, capsys):
    base = dense_model("mistral")
    name = saved(base, tmp_path / "base")
    tokenizer.save_pretrained(name)
    adapter(base, tmp_path / "adapter", name=name)
    texts = tmp_path / "texts.txt"
    texts.write_text("w5 w7 w9\n\nw3 w100 w4 w60 w8\n")
    command = ["export", "--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "moe"), "--verify"]
    for name, content in (("empty.txt", b""), ("blank.txt", b"\n \n"), ("latin.txt", b"\xe9")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SystemExit) as end:
            main([*command, str(tmp_path / name)])
        assert end.value.code == 2 and not (tmp_path / "moe").exists()
    with pytest.raises(SystemExit):
        main([*command, str(tmp_path)])
    main([*command, str(texts)])
    assert "verified: of 8 tokens, 100.0% have logits within 1e-03" in capsys.readouterr().out
    result = verify_export(tmp_path / "adapter", tmp_path / "moe", ["w5 w7 w9"])
    assert result.tokens == 3 and result.difference < 1e-5 * result.largest and result.agreement == 1 and result.passed
    weights = load_file(tmp_path / "moe/model.safetensors")
    weights["model.layers.0.block_sparse_moe.experts.1.w2.weight"] *= 1.5
    save_file(weights, tmp_path / "moe/model.safetensors", metadata={"format": "pt"})
    result = verify_export(tmp_path / "adapter", tmp_path / "moe", ["w5 w7 w9 w3"])
    assert result.difference > 1e-2 and not result.passed
    main(["export", "--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "c"), "--verify", "w5 " * 200])
    assert "200 tokens" in capsys.readouterr().out
    for arguments in (["--output", str(tmp_path / "moe")], ["--output", str(tmp_path / "b"), "--dtype", "int8"]):
        with pytest.raises(SystemExit) as ended:
            main(["export", "--adapter", str(tmp_path / "adapter"), *arguments])
        assert ended.value.code == 2 and capsys.readouterr().err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale", [1.0, 1.2])
def test_the_verdict_and_its_exit_code(dtype, scale, tokenizer, tmp_path, capsys, monkeypatch):
    """An expert that is a fifth too large is not a matter of rounding."""
    base = dense_model("mistral")
    name = saved(base, tmp_path / "base")
    tokenizer.save_pretrained(name)
    adapter(base, tmp_path / "adapter", name=name)
    merge = Experts.merge
    monkeypatch.setattr(Experts, "merge", lambda *args: scale * merge(*args))
    text = " ".join(f"w{3 + i * 7 % 120}" for i in range(60))
    arguments = ["--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "moe"), "--dtype", dtype]
    with pytest.raises(SystemExit) if scale > 1 else contextlib.nullcontext() as ended:
        main(["export", *arguments, "--verify", text])
    assert capsys.readouterr().out.splitlines()[-1].startswith("verified" if scale == 1 else "not verified")
    assert scale == 1 or ended.value.code == 1


def test_the_base_and_its_tokenizer_are_of_the_adapters_revision(tokenizer, tmp_path, monkeypatch):
    base = dense_model("mistral")
    name = saved(base, tmp_path / "base")
    tokenizer.save_pretrained(name)
    adapter(base, tmp_path / "adapter", name=name)
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "revision": "second"}))
    export_adapter(tmp_path / "adapter", tmp_path / "moe")

    def loaded(folder):
        return folder.load(), folder.tokenizer

    asked = []
    for loader in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):

        def spy(source, *args, loader=loader, usual=loader.from_pretrained, **options):
            if str(source) == name and "revision" in options:
                asked.append((loader.__name__, options["revision"]))
            return usual(source, *args, **options)

        monkeypatch.setattr(loader, "from_pretrained", spy)
    for load, tokenizers in (
        (lambda base: verify_export(tmp_path / "adapter", tmp_path / "moe", ["w5 w7 w9"], base), 0),  # the export's
        (lambda base: loaded(open_folder(tmp_path / "adapter", "adapter", base=base)), 1),
    ):
        for given, wanted in ((None, "second"), (name, "main")):
            asked.clear()
            load(given)
            assert ("AutoModelForCausalLM", wanted) in asked
            assert [revision for kind, revision in asked if kind == "AutoTokenizer"] == [wanted] * tokenizers


def test_a_family_of_the_page_on_extending_is_exported(tmp_path, capsys):
    """Which programs compute it is not known, and nothing that is asked once the model is written may fail."""
    page = Path(__file__).parents[2].joinpath("docs/extending.md").read_text(encoding="utf-8")
    try:
        exec(page.split('title="my_family.py"\n')[1].split("```")[0], {})
        base = dense_model("granite")
        model = adapter(base, tmp_path / "adapter", saved(base, tmp_path / "base"))
        command = ["export", "--adapter", str(tmp_path / "adapter"), "--family", "granitemoeshared", "--output"]
        main([*command, str(tmp_path / "moe")])
        assert "not for llama.cpp: what it computes for a 'granitemoeshared' is not known" in capsys.readouterr().out
        assert_near(logits(tmp_path / "moe"), logits(model))
        with pytest.raises(SystemExit) as end:
            main([*command, str(tmp_path / "moe.gguf"), "--format", "gguf"])
        assert end.value.code == 2 and "granitemoeshared" in capsys.readouterr().err
    finally:
        FAMILIES.pop("granitemoeshared", None)
