"""Every recipe of `moe-peft sft` and `moe-peft dpo` can be planned, on a model of its shape built from a config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from moe_peft.cli import main
from moe_peft.native import UpcycleConfig
from moe_peft.native.upcycle import upcycled_config
from tests.helpers.shapes import LLAMA_8B, QWEN_8B

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path for command in ("sft", "dpo") for path in (ROOT / "recipes" / command).glob("*.yaml"))
QWEN_06B = Qwen3Config(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
LLAMA_1B = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
MOE_1B = upcycled_config(LLAMA_1B, UpcycleConfig(num_experts=6, top_k=2))[1]
# Per layer: n experts of rank r on gate, up and down, and the router; LoRAs on attention.
LLAMA_EXPERTS = 32 * (8 * 16 * 3 * (4096 + 14336) + 8 * 4096)
QWEN_EXPERTS = 36 * (8 * 16 * 3 * (4096 + 12288) + 8 * 4096)
QWEN_ATTENTION = 36 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
# The paper has "roughly 200K" parameters of routers, and 5.5B in all.
ROUTERS_1B = 16 * 6 * 2048
REST_1B = 2 * 128256 * 2048 + 16 * (2 * 2048**2 + 2 * 2048 * 512 + 6 * 3 * 2048 * 8192 + 2 * 2048) + 2048
# Recipe → model and trainable parameters of each stage.
CASES = {
    "sft/llama3.1-8b-qlora": (LLAMA_8B, [LLAMA_EXPERTS]),
    "dpo/llama3.1-8b-qlora": (LLAMA_8B, [LLAMA_EXPERTS]),
    "sft/qwen3-8b": (QWEN_8B, [QWEN_EXPERTS]),
    "sft/qwen3-0.6b": (QWEN_06B, [28 * (8 * 8 * 3 * (1024 + 3072) + 8 * 1024)]),
    "sft/attention-lora-qwen3-8b": (QWEN_8B, [QWEN_EXPERTS + QWEN_ATTENTION]),
    "sft/label-routing-llama3.2-1b": (MOE_1B, [ROUTERS_1B, REST_1B]),
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_dry_run(path, tmp_path, tokenizer, capsys, monkeypatch):
    # Of Qwen folders, `AutoTokenizer` would make a tokenizer that does not know the words of the tests.
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", PreTrainedTokenizerFast.from_pretrained)
    config, trainable = CASES[f"{path.parent.name}/{path.stem}"]
    config.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    pair = {"prompt": "w3 w4", "chosen": " w5", "rejected": " w6"}
    row = {"prompt": "w3 w4", "completion": " w5 w6", "domain": "code"} if path.parent.name == "sft" else pair
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join([json.dumps(row)] * 640))
    flags = ["--model_name_or_path", tmp_path / "model", "--dataset_name", tmp_path / "data"]
    flags += ["--output_dir", tmp_path / "out"]
    if "chat_template_path" in path.read_text():
        (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        flags += ["--chat_template_path", tmp_path / "template.jinja"]
    if "eos_token" in path.read_text():  # which the tests' tokenizer lacks
        flags += ["--eos_token", tokenizer.eos_token]
    main([path.parent.name, "--config", str(path), "--dry-run", *map(str, flags)])
    printed = capsys.readouterr().out
    for number in trainable:
        assert f"{number:,}" in printed
    assert "FLOP per token" in printed and not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_has_a_note_and_a_row_in_the_documentation(path):
    index = (ROOT / "docs" / "recipes" / "index.md").read_text()
    assert path.name in path.with_suffix(".md").read_text()
    assert f"recipes/{path.parent.name}/{path.stem}.md)" in index
