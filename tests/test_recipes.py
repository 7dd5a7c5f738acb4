"""
Every recipe parses and can be planned, on a model of its base's shape built from a config; so can every override that
its note names.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)

from moe_peft.cli import main
from moe_peft.models.attention_init import attention_gates
from moe_peft.native.upcycle import upcycled_config
from moe_peft.upit import load_recipe
from moe_peft.upit import plan as planning
from moe_peft.upit.pipeline import UpIT
from moe_peft.upit.plan import plan
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.shapes import LLAMA_8B, QWEN_8B

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[1] / "recipes"
ALL = sorted(path for folder in ("upit", "upcycling") for path in (RECIPES / folder).glob("*.yaml"))
UPCYCLING = [path for path in ALL if path.parent.name == "upcycling"]
recipes = pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
# Shapes as published; trainable parameters counted by hand: per layer and projection r·(in + out), per router n·hidden.
CONFIGS = {
    "quickstart": (tiny_llama().config, None),
    "llama3-8b-qlora": (LLAMA_8B, 32 * (8 * 16 * 3 * (4096 + 14336) + 8 * 4096)),
    "qwen3-8b": (
        QWEN_8B,
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
DENSE_1B = LlamaConfig(
    hidden_size=2048, intermediate_size=7168, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8,
    vocab_size=48586, dtype="bfloat16",
)  # fmt: skip
QWEN_05B = Qwen2Config(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
    vocab_size=151936, tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
MISTRAL = MistralConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=32768, sliding_window=None, dtype="bfloat16",
)  # fmt: skip
# All weights of these are trained. Dense: embeddings and head, then per layer attention, FFN and norms, a last norm.
DENSE = {
    "sheared-llama-2.7b-paper-ffn": 2 * 32000 * 2560 + 32 * (4 * 2560**2 + 3 * 2560 * 6912 + 2 * 2560) + 2560,
    "drop-upcycling": 2 * 48586 * 2048 + 24 * (3 * 2048**2 + 3 * 2048 * 7168 + 2 * 2048) + 2048,
    # Tied embeddings; queries, keys and values have biases.
    "router-upcycling": 151936 * 1024 + 24 * (4 * 1024**2 + 3 * 1024 + 3 * 1024 * 2816 + 2 * 1024) + 1024,
    "three-phase": 2 * 32768 * 4096 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) + 4096,
}
# The same models with n FFNs instead of one, and n gates.
CONFIGS["sheared-llama-2.7b-paper-ffn"] = (
    SHEARED,
    DENSE["sheared-llama-2.7b-paper-ffn"] + 32 * (3 * 3 * 2560 * 6912 + 4 * 2560),
)
CONFIGS["drop-upcycling"] = (DENSE_1B, DENSE["drop-upcycling"] + 24 * (7 * 3 * 2048 * 7168 + 8 * 2048))
# An untied head, the summed queries and a key per expert of the routers, and the shared expert of 32 neurons with its
# gate that a Qwen2-MoE must have.
CONFIGS["router-upcycling"] = (
    QWEN_05B,
    DENSE["router-upcycling"] + 151936 * 1024
    + 24 * (7 * 3 * 1024 * 2816 + 1024 * 128 + 8 * 128 + 3 * 1024 * 32 + 1024),
)  # fmt: skip
CONFIGS["three-phase"] = (MISTRAL, DENSE["three-phase"] + 32 * (7 * 3 * 4096 * 14336 + 8 * 4096))
# What the sources say of these models' sizes, in billions.
PUBLISHED = {"drop-upcycling": (1.5, 8.9), "router-upcycling": (0.5, 2.1), "three-phase": (7.2, 46.7)}
# Bytes of the base in memory.
BASES = {"llama3-8b-qlora": 5.6e9, "qwen3-8b": 16.4e9, "llama2-7b-paper": 13.5e9, "router-upcycling": 4 * 0.464e9}
BASES["sheared-llama-2.7b-paper-ffn"] = 4 * DENSE["sheared-llama-2.7b-paper-ffn"]
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128, "pad_token_id": 0}
TEXT = "{{ m['role'] + ' ' + m['content'] }}"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}" + TEXT + "{% endgeneration %}"
    "{% else %}" + TEXT + "{% endif %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def any_tokenizer(monkeypatch):
    """Of Qwen2 folders, `AutoTokenizer` would make a tokenizer that does not know the words of the tests."""
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", PreTrainedTokenizerFast.from_pretrained)


def local(path, folder, config, tokenizer, row, rows):
    """Overrides that name a model of a recipe's shape, data and a template in `folder`."""
    config.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "data.jsonl").write_text("\n".join([json.dumps(row)] * rows))
    settings = {
        "model.name_or_path": folder / "model",
        "data.train": folder / "data.jsonl",
        "data.eval": folder / "data.jsonl",
        "output_dir": folder / "out",
    }
    if path not in UPCYCLING:
        settings["sft.chat_template_path"] = folder / "template.jinja"
    if "eos_token" in path.read_text():  # which the tests' tokenizer lacks
        settings["sft.eos_token"] = tokenizer.eos_token
    return [f"{key}={value}" for key, value in settings.items()]


def printed_plan(path, overrides, capsys):
    """What `--dry-run` prints, and the stages by name."""
    plans = []
    with patch.object(planning, "plan", lambda *args: plans.append(plan(*args)) or plans[0]):
        main(["upit", "--config", str(path), "--dry-run", *(part for o in overrides for part in ("--set", o))])
    return capsys.readouterr().out, {stage.name: stage for stage in plans[0]}


@recipes
def test_dry_run(path, tmp_path, tokenizer, capsys):
    config, trainable = CONFIGS[path.stem]
    row = {"messages": [{"role": r, "content": "w3 w4 w5"} for r in ("user", "assistant")], "domain": "code"}
    rows = 3000
    if path in UPCYCLING:  # whole contexts: 4095 words and the end
        row, rows = {"text": " ".join(["w3"] * 4095)}, 200
    overrides = local(path, tmp_path, config, tokenizer, row, rows)
    recipe = load_recipe(path, overrides)
    printed, stages = printed_plan(path, overrides, capsys)
    assert "post_train" in printed and not (tmp_path / "out").exists()
    batch = recipe.sft["per_device_train_batch_size"] * recipe.sft.get("gradient_accumulation_steps", 1)
    if path in UPCYCLING:
        assert list(stages) == ["post_train"]
        assert stages["post_train"].steps == -(-rows // batch) and stages["post_train"].tokens == rows * 4096
        dense, moe = PUBLISHED[path.stem]
        assert DENSE[path.stem] / 1e9 == pytest.approx(dense, rel=0.09) and trainable / 1e9 == pytest.approx(moe, 0.02)
        assert 8 * batch == 1024  # processes × rows
    else:
        assert list(stages) == ["prepare", "router_init", "post_train"]
        passes = recipe.num_train_epochs * recipe.prepare_share
        assert stages["prepare"].steps == math.ceil(passes * -(-3000 // batch))
    assert "FLOP per token" in printed and "active per token" in printed
    if trainable is not None:
        assert stages["post_train"].trainable == trainable and f"{trainable:,}" in printed
        base = BASES.get(path.stem, 2 * DENSE.get(path.stem, 0))
        half = path.stem.endswith("qlora") or (path.stem in DENSE and path.stem not in BASES)
        size = 2 if half else 4  # bytes of what is trained
        beside = size * (trainable - DENSE.get(path.stem, 0))
        held = stages["post_train"].memory.total
        assert held == pytest.approx(base + beside + 3 * size * trainable, rel=0.15)


@pytest.mark.parametrize(("mode", "rate"), [("lora", "0.0002"), ("ffn", "2e-05")])
def test_the_plan_says_how_stages_are_trained(mode, rate, tmp_path, tokenizer, capsys):
    """A recipe without rates: the papers'. Stages that differ have lines of their own."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"mode: {mode}\nmodel: {{dtype: float32}}\nsft: {{bf16: false, use_cpu: true}}\n")
    row = {"messages": [{"role": r, "content": "w3 w4 w5"} for r in ("user", "assistant")]}
    overrides = local(recipe, tmp_path, tiny_llama(vocab=128).config, tokenizer, row, 64)
    papers = f"learning rate {rate}, constant; context 2048"
    printed = printed_plan(recipe, overrides, capsys)[0].splitlines()
    assert any(line.startswith(f"prepare, router_init, post_train: {papers}") for line in printed)
    own = ["sft.lr_scheduler_type=cosine", "prepare.sft.learning_rate=0.003", "post_train.sft.max_length=64"]
    printed = printed_plan(recipe, [*overrides, *own], capsys)[0].splitlines()
    for line in (
        "prepare: learning rate 0.003, cosine; context 2048;",
        f"post_train: learning rate {rate}, cosine; context 64;",
    ):
        assert any(one.startswith(line) for one in printed)


def overrides_of(note):
    """The overrides that a note names: of each piece of code, without placeholders."""
    text = note.read_text()
    pieces = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for piece in pieces for line in piece.replace("\\\n", "").splitlines()]
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for code in (*lines, *spans):
        words = shlex.split(code) if "--set" in code else []
        overrides = [after for word, after in pairwise(words) if word == "--set"]
        if overrides:
            yield overrides


@recipes
def test_overrides_of_the_notes(path):
    """Each is a recipe, and gives a MoE that its base can become."""
    bases = {
        "llm-jp/Dense-1.5B": DENSE_1B,
        "llm-jp/Dense-152M": LlamaConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=12),
        "llm-jp/Dense-3.7B": LlamaConfig(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28),
        "Qwen/Qwen2.5-1.5B": Qwen2Config(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28),
        "Qwen/Qwen1.5-0.5B": QWEN_05B,
        "Qwen/Qwen3-0.6B-Base": Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28),
        "mistralai/Mistral-7B-v0.3": MISTRAL,
        "princeton-nlp/Sheared-LLaMA-2.7B": SHEARED,
    }
    named = list(overrides_of(path.with_suffix(".md")))
    assert len(named) >= {"drop-upcycling": 12, "three-phase": 6}.get(path.stem, path in UPCYCLING)
    default = load_recipe(path)
    for overrides in named:
        recipe = load_recipe(path, overrides)
        assert recipe != default, f"{overrides} change nothing"
        if recipe.mode == "ffn":
            upcycled_config(bases[recipe.model.name_or_path], recipe.upcycle_config())


def test_drop_upcycling_with_shared_experts():
    """Appendix C.6.2: mN - k_s experts, mk - k_s gates, and a shared block of k_s·f/m neurons."""
    path = RECIPES / "upcycling" / "drop-upcycling.yaml"
    overrides = next(o for o in overrides_of(path.with_suffix(".md")) if "moe.num_shared_experts=2" in o)
    base = Qwen2Config(hidden_size=1536, intermediate_size=8960)
    moe = upcycled_config(base, load_recipe(path, overrides).upcycle_config())[1]
    assert (moe.num_experts, moe.num_experts_per_tok) == (4 * 8 - 2, 4 * 2 - 2)
    assert (moe.moe_intermediate_size, moe.shared_expert_intermediate_size) == (8960 // 4, 2 * 8960 // 4)


def test_branch_train_mix_averages_four_models(tmp_path, tokenizer):
    """The override of the note: two experts from each of four models, everything else their mean."""
    path = RECIPES / "upcycling" / "drop-upcycling.yaml"
    overrides = next(o for o in overrides_of(path.with_suffix(".md")) if "moe.init=checkpoints" in o)
    names = ("seed", "japanese", "english", "code")
    models = [tiny_llama(seed=i) for i in range(4)]
    for name, model in zip(names, models, strict=True):
        model.save_pretrained(tmp_path / name)
    folders = ", ".join(str(tmp_path / name) for name in names * 2)
    own = [*overrides, f"prepare.checkpoints=[{folders}]", *local(path, tmp_path, models[0].config, tokenizer, {}, 1)]
    models[0].save_pretrained(tmp_path / "model")
    pipeline = UpIT(load_recipe(path, [*own, "model.dtype=float32"]))
    assert [stage.name for stage in pipeline.stages] == ["post_train", "evaluate"]
    stage = pipeline.stages[0]
    stage.kind.check_base()
    stage.kind.write_moe(tmp_path / "moe", stage.given.experts, stage.given.routers, None, stage.seed)
    moe = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    for i in range(8):
        ffn, block = models[i % 4].model.layers[1].mlp, moe.model.layers[1].mlp.experts
        assert block.down_proj[i].equal(ffn.down_proj.weight)
        assert block.gate_up_proj[i].chunk(2)[1].equal(ffn.up_proj.weight)
    mean = sum(model.model.layers[0].self_attn.q_proj.weight.double() for model in models) / 4
    assert (moe.model.layers[0].self_attn.q_proj.weight.double() - mean).abs().max() < 1e-8


@pytest.mark.parametrize("path", UPCYCLING, ids=lambda path: path.stem)
def test_upcycling_recipes_run(path, tmp_path, tokenizer):
    """At a toy size: 20 steps on packed contexts, with the recipe's losses and rates, to a native MoE."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if path.stem == "router-upcycling" else 4}
    base = AutoModelForCausalLM.from_config(type(CONFIGS[path.stem][0])(**TOY, **heads))
    overrides = local(path, tmp_path, base.config, tokenizer, {"text": "w3 w4 w5 w6 w7 w8 w9"}, 80)
    base.save_pretrained(tmp_path / "model")
    toy = {
        "max_length": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "bf16": "false",
        "logging_steps": 1,
    }
    overrides += [f"sft.{name}={value}" for name, value in toy.items()]
    folder = UpIT(load_recipe(path, overrides)).run()
    record = json.loads((tmp_path / "out" / "manifest.json").read_text())["stages"]["post_train"]
    history = [entry for entry in record["metrics"]["history"] if "learning_rate" in entry]
    assert len(history) == 20
    rates = torch.tensor([entry["learning_rate"] for entry in history], dtype=torch.float64)
    step = torch.arange(20, dtype=torch.float64)
    if path.stem == "drop-upcycling":
        expected = 2e-5 + (2e-4 - 2e-5) * (1 + (step / 20 * torch.pi).cos()) / 2
    elif path.stem == "router-upcycling":  # 1 % of 20 steps is not a warm-up
        expected = 5e-4 * 0.316 ** ((step >= 16).double() + (step >= 18).double())
    else:
        expected = 2e-5 * torch.where((step < 1) | (step >= 15), 0.1, 1.0).double()
    assert_near(rates, expected, dtype=torch.float32)
    assert all(entry["aux_loss"] > 0 and entry["router_z_loss"] > 0 for entry in history)
    moe = AutoModelForCausalLM.from_pretrained(folder)
    count = getattr(moe.config, "num_local_experts", None) or moe.config.num_experts
    assert (count, moe.config.num_experts_per_tok) == (8, 2)
    assert moe.config.router_aux_loss_coef == (0.005 if path.stem == "three-phase" else 0.02)


@pytest.mark.parametrize("rate", [0.0, 5e-4])
def test_attention_routers_in_python(rate, tmp_path, tokenizer, monkeypatch):
    """The snippet of Router Upcycling's note, on a toy model: routers from the dense model, trained and folded."""
    note = (RECIPES / "upcycling" / "router-upcycling.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", note, re.DOTALL)
    for old, new in (
        ("Qwen/Qwen1.5-0.5B", str(tmp_path / "model")),
        ("learning_rate=5e-4", f"learning_rate={rate}, max_steps=2, bf16=False, report_to='none'"),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(Qwen2Config(**TOY, num_attention_heads=8, num_key_value_heads=8))
    base.save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("runs/pretraining").mkdir(parents=True)
    Path("runs/pretraining/train.jsonl").write_text("\n".join([json.dumps({"text": "w3 w4 w5 w6 w7 w8 w9"})] * 20))
    exec(compile(code, "router-upcycling.md", "exec"), {})
    moe = AutoModelForCausalLM.from_pretrained("runs/attention-routers/model")
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 1]])  # rows are alike, so one has their mean keys
    gates = attention_gates(base, [{"input_ids": ids}], 8)
    for layer, gate in zip(moe.model.layers, gates, strict=True):
        distance = (layer.mlp.gate.weight - gate).abs().max()
        assert distance < 1e-6 if rate == 0 else 1e-5 < distance < 0.1


def test_every_recipe_has_a_note_that_names_it_and_a_row():
    every = sorted(path for path in RECIPES.glob("*/*.yaml") if path.parent.name != "accelerate")
    rows = (RECIPES.parent / "docs" / "recipes" / "index.md").read_text().splitlines()
    assert any("only the quickstart has been run" in row for row in rows)
    for path in every:
        assert path.name in path.with_suffix(".md").read_text()
        assert sum(f"(../../recipes/{path.parent.name}/{path.stem}.md)" in row for row in rows) == 1


LAUNCHERS = sorted((RECIPES / "accelerate").glob("*.yaml"))
KINDS = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "multi_node": "FSDP"}


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_launch_files_are_what_accelerate_takes(path):
    settings = yaml.safe_load(path.read_text())
    config = ClusterConfig.from_yaml_file(yaml_file=str(path))  # refuses unknown keys
    assert config.distributed_type == KINDS[path.stem] and config.num_processes == settings["num_processes"]
    parser = launch_command_parser()
    options = {action.dest for action in parser._actions}
    for section in ("fsdp_config", "deepspeed_config"):
        assert settings.get(section, {}).keys() <= options
    if path.stem.startswith("zero"):
        assert settings["deepspeed_config"]["zero_stage"] == int(path.stem[-1])


def commands_of(note):
    """The lines of its bash pieces; of a line for `srun bash -c`, the line inside."""
    for piece in re.findall(r"```bash\n(.*?)```", note.read_text(), re.DOTALL):
        for line in piece.replace("\\\n", "").splitlines():
            words = shlex.split(line)
            yield shlex.split(words[3]) if words[:2] == ["srun", "bash"] else words


def test_every_launch_file_is_used_by_a_note_in_a_command_that_accelerate_takes():
    used = set()
    for note in RECIPES.glob("*/*.md"):
        for words in commands_of(note):
            if words[:2] == ["accelerate", "launch"]:
                args = launch_command_parser().parse_args(["0" if "$" in word else word for word in words[2:]])
                used.add(Path(args.config_file).stem)
                assert (RECIPES.parent / args.config_file).exists()
                assert args.module and args.training_script == "moe_peft"
                command, flag, recipe = args.training_script_args
                assert command in ("upit", "sft", "dpo") and flag == "--config" and (RECIPES.parent / recipe).exists()
    assert used == {path.stem for path in LAUNCHERS}


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
