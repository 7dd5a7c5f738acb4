"""GGUF files: llama.cpp, another implementation, computes and tokenizes what transformers does; the rest is refused."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.smollm2 import smollm2_folder
from moe_peft.cli import main
from moe_peft.native import UpcycleConfig, export_adapter, export_gguf, upcycle
from tests.helpers.close import assert_near
from tests.helpers.llama_cpp import SPLITS, TEXTS, LlamaCpp, bytes_tokenizer, letters, sentencepiece_tokenizer
from tests.helpers.native_case import IDS, adapter, dense_model, logits, saved
from tests.helpers.pruning_case import load_double

llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp has no wheel for this machine"
)
NO_WINDOW = {
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
}
PLAIN_ROPE = {"head_dim": None, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
LINEAR_ROPE = {"rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0}}


def made(kind: str, folder: Path, settings: dict | None = None, tokenizer=None, **adapter_settings):
    """An adapter on its base; returns its model."""
    dense = dense_model(kind, **{**NO_WINDOW.get(kind, {}), **(settings or {})})
    name = saved(dense, folder / "base")
    (tokenizer or letters()).save_pretrained(name)
    return adapter(dense, folder / "adapter", name, **adapter_settings)


def assert_computes(file: Path, expected: torch.Tensor) -> None:
    """Compare log-probabilities after every token of a text with those of logits [S, V] in float64."""
    actual = LlamaCpp(file).log_probs(IDS[0, : len(expected)].tolist(), expected.shape[-1])
    expected = expected.log_softmax(-1)
    assert_near(actual, expected)


@llama_cpp
@pytest.mark.parametrize("kind, settings, of_adapter", [
    ("llama", {}, {}),  # scaled rotations, a head size of its own
    ("llama", PLAIN_ROPE, {"num_experts": 3, "top_k": 1}),
    ("llama", LINEAR_ROPE, {"num_experts": 8, "top_k": 3}),
    ("mistral", {}, {"num_experts": 5}),
    ("phi3", {}, {"modules_to_save": ["lm_head"]}),
    ("qwen2", {}, {}),  # as a Llama with biases
    ("qwen2", {}, {"normalize_top_k": False}),
    ("qwen3", {}, {"router_type": "attention", "router_num_heads": 2}),
    ("granite", {}, {}),
])  # fmt: skip
def test_llama_cpp_computes_what_the_adapter_does(kind, settings, of_adapter, tmp_path):
    model = made(kind, tmp_path, settings, **of_adapter)
    assert_computes(export_gguf(tmp_path / "adapter", tmp_path / "moe.gguf"), logits(model.double())[0])


@llama_cpp
@pytest.mark.parametrize("kind", ["llama", "granite"])  # experts each in tensors of its own, or all in one
def test_llama_cpp_computes_what_a_folder_does(kind, tmp_path):
    made(kind, tmp_path)
    moe = upcycle(tmp_path / "base", tmp_path / "moe", UpcycleConfig(4, 2, init="drop"))
    main(["export", "--model", str(moe), "--format", "gguf", "--output", str(tmp_path / "moe.gguf")])
    assert_computes(tmp_path / "moe.gguf", logits(load_double(moe))[0])


@llama_cpp
@pytest.mark.parametrize("trained", [False, True])
def test_shared_experts_with_gates_that_do_not_sum_to_1(trained, tmp_path):
    made("qwen2", tmp_path)
    moe = upcycle(tmp_path / "base", tmp_path / "moe", UpcycleConfig(4, 2, num_shared_experts=1, init="drop"))
    config = json.loads((moe / "config.json").read_text())
    (moe / "config.json").write_text(json.dumps({**config, "norm_topk_prob": False}))
    if trained:
        weights = load_file(moe / "model.safetensors")
        weights = {name: torch.randn_like(w) if "shared_expert_gate" in name else w for name, w in weights.items()}
        save_file(weights, moe / "model.safetensors", metadata={"format": "pt"})
    assert_computes(export_gguf(moe, tmp_path / "moe.gguf"), logits(load_double(moe))[0])


@pytest.mark.parametrize("kind, settings, of_adapter, message", [
    ("olmo2", {}, {}, "llama.cpp does not compute this: its OLMo2 has no experts"),
    ("qwen3", {}, {"normalize_top_k": False}, "gates sum to 1 in its Qwen3-MoE, norm_topk_prob=False"),
    ("qwen3", {}, {"target_modules": ["mlp"], "layers_to_transform": [1]}, r"every layer .* layers \[0\] have none"),
    ("qwen3", LINEAR_ROPE, {}, "rope_type='linear': exact in its qwen3moe are"),
    ("llama", {"hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
    ("qwen3", {"attention_bias": True}, {}, "its Qwen3-MoE has no biases of attention"),
])  # fmt: skip
def test_what_llama_cpp_would_compute_otherwise_is_refused_by_name(kind, settings, of_adapter, message, tmp_path):
    made(kind, tmp_path, settings, **of_adapter)
    with pytest.raises(ValueError, match=message) as error:
        export_gguf(tmp_path / "adapter", tmp_path / "moe.gguf")
    assert "\n" not in str(error.value) and not list(tmp_path.glob("*moe*"))


def test_shared_experts_with_gates_that_sum_to_1_are_refused(tmp_path):
    made("qwen2", tmp_path)
    moe = upcycle(tmp_path / "base", tmp_path / "moe", UpcycleConfig(4, 2, num_shared_experts=1))
    with pytest.raises(ValueError, match="gates do not sum to 1 beside its shared experts, norm_topk_prob=True"):
        export_gguf(moe, tmp_path / "moe.gguf")


@pytest.mark.parametrize("arguments, message", [
    (["--model", "base"], "model='base': goes with --format gguf"),
    (["--model", "base", "--format", "gguf"], "is a dense model; give a MOE_LORA adapter or a native MoE"),
    (["--model", "base", "--format", "gguf", "--family", "mixtral"], "base and family go with adapter"),
    (["--adapter", "adapter", "--format", "gguf", "--dtype", "float16"], "dtype='float16': must be one of float32"),
    (["--adapter", "adapter", "--format", "gguf", "--verify", "a"], "verify='a': goes with --format safetensors"),
    (["--adapter", "adapter", "--format", "gguf", "--output", "base"], "output='base': already exists"),
    (["--adapter", "adapter", "--format", "gguf", "--output", "link"], "output='link': already exists"),
])  # fmt: skip
def test_commands_that_cannot_be_right(arguments, message, tmp_path, monkeypatch, capsys):
    made("llama", tmp_path)
    (tmp_path / "link").symlink_to("out")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["export", "--output", "out", *arguments])
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "q8_0"])
def test_weights_are_rounded_once_and_gates_not_at_all(dtype, tmp_path):
    gguf = pytest.importorskip("gguf")
    made("llama", tmp_path)
    exact = load_file(export_adapter(tmp_path / "adapter", tmp_path / "moe") / "model.safetensors")
    reader = gguf.GGUFReader(export_gguf(tmp_path / "adapter", tmp_path / "moe.gguf", dtype=dtype))
    tensors = {
        t.name: (t.tensor_type.name, torch.tensor(gguf.dequantize(t.data, t.tensor_type))) for t in reader.tensors
    }
    block = "model.layers.1.block_sparse_moe"
    kind, gates = tensors["blk.1.ffn_gate_inp.weight"]
    assert kind == "F32" and torch.equal(gates, exact[f"{block}.gate.weight"])
    assert tensors["blk.1.attn_norm.weight"][0] == "F32"
    for name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        kind, actual = tensors[f"blk.1.ffn_{name}_exps.weight"]
        expected = torch.stack([exact[f"{block}.experts.{i}.{w}.weight"] for i in range(4)])
        if dtype == "bfloat16" or name == "down":  # 48 is not a multiple of q8_0's 32
            assert kind == "BF16" and torch.equal(actual, expected.bfloat16().float())
        else:
            assert kind == "Q8_0"
            step = expected.abs().amax(-1, keepdim=True) / 127  # of a row, which is one block; its scale is float16
            assert ((actual - expected).abs() <= 0.6 * step).all()


def test_a_sliding_window_is_as_long_as_texts_may_be(tmp_path):
    gguf = pytest.importorskip("gguf")
    made("mistral", tmp_path, {"sliding_window": 5})
    reader = gguf.GGUFReader(export_gguf(tmp_path / "adapter", tmp_path / "moe.gguf"))
    assert reader.get_field("llama.context_length").contents() == 5


# --- tokenizers -------------------------------------------------------------------------------------------------------


@llama_cpp
@pytest.mark.parametrize("split", [*SPLITS, "sentencepiece"])
def test_llama_cpp_tokenizes_as_the_tokenizer_does(split, tmp_path):
    tokenizer = sentencepiece_tokenizer() if split == "sentencepiece" else bytes_tokenizer(split)
    tokenizer.add_tokens([AddedToken("<tag>", normalized=False)])
    made("llama", tmp_path, {"vocab_size": 400}, tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    server = LlamaCpp(export_gguf(tmp_path / "adapter", tmp_path / "moe.gguf"))
    for text in [*TEXTS, "", "a<tag>b"]:
        assert server.tokens(text) == tokenizer(text)["input_ids"], text


@llama_cpp
@pytest.mark.parametrize("stem", ["moe", "my-Phi-3"])
@pytest.mark.parametrize("rstrip", [True, False])
def test_spaces_after_special_tokens_stay_or_go_whatever_the_file_is_called(rstrip, stem, tmp_path):
    """llama.cpp decides that by the model's name."""
    tokenizer = sentencepiece_tokenizer()
    names = ("</s>", "<eos>", "<|user|>", "<|end|>")
    marks = [AddedToken(name, special=True, normalized=False, rstrip=rstrip) for name in names]
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|endoftext|>", special=True), *marks]})
    tokenizer.chat_template = "{% for m in messages %}<|user|>\n{{ m.content }}<|end|>\n{% endfor %}"
    made("llama", tmp_path, {"vocab_size": len(tokenizer)}, tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    server = LlamaCpp(export_gguf(tmp_path / "adapter", tmp_path / f"{stem}.gguf"))
    messages = [{"role": "user", "content": "Hello world"}]
    assert server.chat_tokens(messages) == tokenizer.apply_chat_template(messages)["input_ids"]


CHATS = {
    "[INST] Hi[/INST]": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}",
    "[INST]Hi[/INST]": "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}",
    "user: Hi": "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}",
}


@llama_cpp
@pytest.mark.parametrize(
    ("scheme", "chat", "same"),
    [
        ("always", "[INST] Hi[/INST]", True),
        ("always", "[INST]Hi[/INST]", True),
        ("always", "user: Hi", True),
        ("first", "[INST] Hi[/INST]", True),
        ("first", "[INST]Hi[/INST]", True),
        ("first", "user: Hi", False),  # a space before the first word, none after <eos>
        ("always", None, True),
        ("first", None, True),
    ],
)
def test_chats_decide_where_llama_cpp_puts_spaces(scheme, chat, same, tmp_path, caplog):
    """`Metaspace`, as transformers reads Llama's tokenizers, has rules of its own; a warning says what differs."""
    tokenizer = sentencepiece_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.normalizer, backend.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    marks = [AddedToken(name, special=True, normalized=False) for name in ("[INST]", "[/INST]")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = CHATS.get(chat)
    made("llama", tmp_path, {"vocab_size": len(tokenizer)}, tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    server = LlamaCpp(export_gguf(tmp_path / "adapter", tmp_path / "moe.gguf"))
    (line,) = [record.getMessage() for record in caplog.records if "a space before" in record.getMessage()]
    assert line.endswith("have the same tokens, others may not" if same else "chats have other tokens")
    assert (tokenizer.backend_tokenizer.pre_tokenizer.prepend_scheme, tokenizer.chat_template) == (
        scheme,
        CHATS.get(chat),
    )
    if chat is None:
        assert server.tokens("Hello world") == tokenizer("Hello world")["input_ids"]
        return
    messages = [{"role": role, "content": "Hello world"} for role in ("user", "assistant", "user")]
    for end in (1, 3):
        expected = tokenizer.apply_chat_template(messages[:end])["input_ids"]
        assert (server.chat_tokens(messages[:end])[-len(expected) :] == expected) is same


def test_a_chat_template_that_refuses_a_chat_stops_no_export(tmp_path, caplog):
    tokenizer = sentencepiece_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.normalizer, backend.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.chat_template = "{{ raise_exception('one turn') if messages[1:] else messages[0].content }}"
    made("llama", tmp_path, {"vocab_size": len(tokenizer)}, tokenizer)
    assert export_gguf(tmp_path / "adapter", tmp_path / "moe.gguf").is_file()
    assert "chats have other tokens" in caplog.text


def test_other_tokens_that_take_spaces_away_are_refused(tmp_path):
    tokenizer = letters()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<mask>", special=True, lstrip=True)]})
    made("llama", tmp_path, {"vocab_size": len(tokenizer)}, tokenizer)
    with pytest.raises(ValueError, match=r"takes spaces beside '<mask>' away; llama\.cpp does not"):
        export_gguf(tmp_path / "adapter", tmp_path / "moe.gguf")


def test_added_tokens_that_are_found_only_where_a_word_begins_are_refused(tmp_path):
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_tokens(["<call>"])
    made("llama", tmp_path, {"vocab_size": len(tokenizer)}, tokenizer)
    with pytest.raises(ValueError, match=r"add it as AddedToken\('<call>', normalized=False\)"):
        export_gguf(tmp_path / "adapter", tmp_path / "moe.gguf")


@pytest.mark.parametrize("damage, message", [
    ({"pre_tokenizer": {"type": "Whitespace"}}, "llama.cpp has no name for how its tokenizer splits text"),
    ({"normalizer": {"type": "Lowercase"}}, "llama.cpp has no name for how its tokenizer splits text"),
    (None, "no tokenizer"),
])  # fmt: skip
def test_tokenizers_that_llama_cpp_lacks_are_refused(damage, message, tmp_path):
    made("llama", tmp_path)
    file = tmp_path / "base" / "tokenizer.json"
    if damage is None:
        file.unlink()
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    with pytest.raises(ValueError, match=message):
        export_gguf(tmp_path / "adapter", tmp_path / "moe.gguf")
    assert not list(tmp_path.glob("*moe*"))


# --- the real one -----------------------------------------------------------------------------------------------------


@llama_cpp
@pytest.mark.slow
def test_a_pretrained_chat_model(tmp_path):
    try:
        base = smollm2_folder()
    except ValueError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = adapter(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter", str(base))
    file = tmp_path / "moe.gguf"
    main(["export", "--adapter", str(tmp_path / "adapter"), "--format", "gguf", "--output", str(file)])
    server = LlamaCpp(file)
    messages = [{"role": "user", "content": "What is the capital of France? It's 1 of 195."}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert server.chat_tokens(messages) == chat
    with torch.no_grad():
        expected = model.double()(input_ids=torch.tensor([chat])).logits[0, -1:].log_softmax(-1)
    actual = server.log_probs(chat, expected.shape[-1], last=1)
    assert_near(actual, expected, terms=model.config.hidden_size)
