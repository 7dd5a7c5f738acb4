"""Every recipe parses and can be planned, on a model of its family built from a config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from conftest import tiny_llama
from datasets import Dataset
from transformers import LlamaConfig, Qwen3Config

from moe_peft.cli import main
from moe_peft.upit import load_recipe
from moe_peft.upit.pipeline import UpIT
from moe_peft.upit.plan import plan

RECIPES = Path(__file__).parents[1] / "recipes"
UPIT = sorted((RECIPES / "upit").glob("*.yaml"))
LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, dtype="bfloat16",
)  # fmt: skip
# Shapes as published; trainable parameters counted by hand: per layer and projection r·(in + out), per router n·hidden.
CONFIGS = {
    "quickstart": (tiny_llama().config, None),
    "llama3-8b-qlora": (LLAMA_8B, 32 * (8 * 16 * 3 * (4096 + 14336) + 8 * 4096)),
    "qwen3-8b": (
        Qwen3Config(
            hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=151936, dtype="bfloat16",
        ),
        36 * (16 * 16 * 3 * (4096 + 12288) + 16 * 4096),
    ),
    "llama2-7b-paper": (
        LlamaConfig(
            hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
            dtype="bfloat16",
        ),
        32 * (8 * 16 * 3 * (4096 + 11008) + 8 * 4096),
    ),
}  # fmt: skip
SHEARED = LlamaConfig(
    hidden_size=2560, intermediate_size=6912, num_hidden_layers=32, num_attention_heads=20, vocab_size=32000,
    dtype="bfloat16",
)  # fmt: skip
# The same model: 4 FFNs in place of one, four gates, all of it trained.
DENSE_SHEARED = 2 * 32000 * 2560 + 32 * (4 * 2560 * 2560 + 3 * 2560 * 6912 + 2 * 2560) + 2560
CONFIGS["sheared-llama-2.7b-paper-ffn"] = (SHEARED, DENSE_SHEARED + 32 * (3 * 3 * 2560 * 6912 + 4 * 2560))
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] }}{% endfor %}"


@pytest.mark.parametrize("path", UPIT, ids=lambda path: path.stem)
def test_dry_run(path, tmp_path, tokenizer, capsys, monkeypatch):
    config, trainable = CONFIGS[path.stem]
    config.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    row = {"messages": [{"role": r, "content": "w3 w4 w5"} for r in ("user", "assistant")], "domain": "code"}
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps(row)] * 3000))
    data = str(tmp_path / "data.jsonl")
    overrides = [
        f"model.name_or_path={tmp_path / 'model'}",
        f"data.train={data}",
        f"data.eval={data}",
        f"output_dir={tmp_path / 'out'}",
        f"sft.chat_template_path={tmp_path / 'template.jinja'}",
    ]
    recipe = load_recipe(path, overrides)
    main(["upit", "--config", str(path), "--dry-run", *(part for o in overrides for part in ("--set", o))])
    printed = capsys.readouterr().out
    assert "post_train" in printed and not (tmp_path / "out").exists()
    stages = {stage.name: stage for stage in plan(UpIT(recipe))}
    assert list(stages) == ["prepare", "router_init", "post_train"]
    rows = recipe.sft["per_device_train_batch_size"] * recipe.sft.get("gradient_accumulation_steps", 1)
    assert stages["prepare"].steps == round(recipe.num_train_epochs * recipe.prepare_share * 3000 / rows)
    if trainable is not None:
        assert stages["post_train"].trainable == trainable and f"{trainable:,}" in printed
        base = {"llama3-8b-qlora": 5.6e9, "qwen3-8b": 16.4e9, "llama2-7b-paper": 13.5e9}.get(path.stem, 5.4e9)
        beside = 4 * (trainable - DENSE_SHEARED) if path.stem.endswith("ffn") else 4 * trainable
        assert stages["post_train"].memory == pytest.approx(base + beside + 12 * trainable, rel=0.15)


def test_every_recipe_has_a_readme_that_names_it():
    assert len(UPIT) >= 4
    for path in UPIT:
        text = path.with_suffix(".md").read_text()
        assert path.name in text
        assert "not yet run" in text or path.stem == "quickstart"


def test_launcher_configs_parse():
    for path in (RECIPES / "accelerate").glob("*.yaml"):
        from accelerate.commands.config.config_args import ClusterConfig

        settings = yaml.safe_load(path.read_text())
        assert ClusterConfig.from_yaml_file(yaml_file=str(path)).num_processes == settings["num_processes"]


def test_paper_data_conversions(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES / "upit"))
    import paper_data

    monkeypatch.setattr(paper_data, "HELD_OUT", 2)
    talk = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rows = {
        "code": [{"instruction": f"q{i}", "response": f"a{i}"} for i in range(10)],
        "mathematics": [{"query": f"q{i}", "response": f"a{i}", "type": "x"} for i in range(10)],
        "general": [{"conversations": talk}] * 10,
    }
    for domain, (_, conversion, _) in paper_data.SOURCES.items():
        train, test = paper_data.convert(Dataset.from_list(rows[domain]), domain, conversion, 5, seed=0)
        assert (len(train), len(test)) == (5, 2) and set(train.column_names) == {"messages", "domain"}
        messages = train[0]["messages"]
        assert messages[-1]["role"] == "assistant" and messages[-2]["role"] == "user"
        if domain != "general":
            contents = [row["messages"][0]["content"] for part in (train, test) for row in part]
            assert len(set(contents)) == 7
            assert all(row["messages"][1]["content"] == "a" + row["messages"][0]["content"][1:] for row in train)
    with pytest.raises(ValueError, match="9 examples and 2 held out are wanted, there are 10"):
        paper_data.convert(Dataset.from_list(rows["code"]), "code", paper_data.SOURCES["code"][1], 9, seed=0)
