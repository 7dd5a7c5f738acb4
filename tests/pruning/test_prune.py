"""Pruned folders compute what the same model does with the logits of dropped experts at minus infinity."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import PeftConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM

from moe_peft import prune_experts
from moe_peft.adapter.layers import MoELoraLayer
from moe_peft.cli import main
from moe_peft.cli import prune as cli_prune
from moe_peft.cli.prune import print_pruning
from moe_peft.models.model_size import ModelSize
from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.native.families import FAMILIES
from moe_peft.native.safetensors_io import Checkpoint
from moe_peft.pruning import Pruning
from moe_peft.pruning.prune import PrunedLayer
from tests.helpers.close import assert_near
from tests.helpers.native_case import IDS, MOE, dense_model, saved
from tests.helpers.pruning_case import WEIGHTS, load_double, make_adapter, masked_logits
from tests.helpers.reference import merged_weight
from tests.helpers.routed_models import gates_of

DROP = {0: [1], 1: [0, 3]}
# name → settings of the adapter; all have six experts.
ADAPTERS = {
    "linear": {},
    "not normalized": {"normalize_top_k": False},
    "projection": {"mixing": "projection", "top_k": 3},
    "mlp": {"router_type": "mlp"},
    "sigmoid": {"router_type": "sigmoid", "normalize_top_k": False},
    "soft": {"router_type": "soft"},
    "top_p": {"router_type": "top_p", "router_threshold": 0.5},
    "threshold": {"router_type": "threshold"},
    "switch": {"router_type": "switch", "mixing": "projection"},
    "attention": {"router_type": "attention", "router_num_heads": 1},
    "hydra": {"expert_type": "hydra_lora"},
    "bottleneck": {"expert_type": "bottleneck", "bottleneck_size": 6},
    "tokens": {"trainable_token_indices": IDS[0, :3].tolist()},
    "top_k by layer": {"top_k_pattern": {r"layers\.0\.mlp": 5}},
    "linears": {
        "target_modules": ["mlp", "q_proj", "v_proj"],
        "num_experts_pattern": {"q_proj": 1, r"layers\.0\.self_attn\.v_proj": 4},
        "rank_pattern": {"v_proj": 2},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer) -> str:
    folder = tmp_path_factory.mktemp("base") / "dense"
    tokenizer.save_pretrained(folder)
    return saved(dense_model("llama"), folder)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_is_the_same_with_logits_of_minus_infinity(name: str, base: str, tmp_path: Path):
    folder = make_adapter(base, tmp_path / "adapter", **ADAPTERS[name])
    drop = {0: [1], 1: [0, 3], 3: [5]} if name == "linears" else DROP  # routers: v_proj, mlp, v_proj, mlp
    result = prune_experts(folder, tmp_path / "pruned", drop=drop)
    model, original = load_double(tmp_path / "pruned"), load_double(folder)
    with torch.no_grad():
        actual = model(input_ids=IDS).logits
    assert (actual - original(input_ids=IDS).logits).abs().max() > 1e-4
    assert_near(actual, masked_logits(original, drop))
    sizes = [layer.num_experts - len(drop.get(i, [])) for i, layer in enumerate(result.layers)]
    specs = [m.moe_lora_spec["default"] for m in model.modules() if isinstance(m, MoELoraLayer) and m.moe_lora_router]
    assert [spec.num_experts for spec in specs] == sizes == [len(layer.kept) for layer in result.layers]
    assert [layer.dropped for layer in result.layers] == [drop.get(i, []) for i in range(len(result.layers))]
    before, after = load_file(folder / WEIGHTS), load_file(tmp_path / "pruned" / WEIGHTS)
    assert before.keys() == after.keys()
    assert sum(t.numel() for t in before.values()) - sum(t.numel() for t in after.values()) == (
        result.size["before"].total - result.size["after"].total
    )
    assert (tmp_path / "pruned" / "tokenizer.json").exists() is False  # the adapter had none


def test_experts_that_stay_are_the_same_bits(base: str, tmp_path: Path):
    folder = make_adapter(base, tmp_path / "adapter")
    prune_experts(folder, tmp_path / "pruned", drop=[2])
    config = PeftConfig.from_pretrained(tmp_path / "pruned")
    assert (config.num_experts, config.num_experts_pattern, config.top_k) == (5, {}, 2)
    after = load_file(tmp_path / "pruned" / WEIGHTS)
    for name, tensor in load_file(folder / WEIGHTS).items():
        assert torch.equal(after[name], tensor[[0, 1, 3, 4, 5]]), name


@pytest.mark.parametrize("normalize", [True, False])
def test_plain_loop_and_what_normalization_changes(normalize: bool, base: str, tmp_path: Path):
    """One layer by hand: where gates are not normalized, those of other experts grow by 1/(1 - p)."""
    folder = make_adapter(base, tmp_path / "adapter", normalize_top_k=normalize)
    prune_experts(folder, tmp_path / "pruned", drop={0: [1, 4], 1: [1, 4]})
    models = [load_double(folder), load_double(tmp_path / "pruned")]
    old, new = (next(m for m in model.modules() if isinstance(m, MoELoraLayer)) for model in models)
    x = torch.randn(40, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    router = old.router("default").weight.detach()
    before, after = old(x).detach(), new(x).detach()
    grown = 0
    for t in range(len(x)):
        p = (router @ x[t]).softmax(-1)
        lost = p[[1, 4]].sum()
        masked = (router @ x[t]).index_fill(0, torch.tensor([1, 4]), -torch.inf).softmax(-1)
        y, chosen = torch.zeros(32, dtype=torch.float64), masked.topk(2)
        for gate, i in zip(chosen.values, chosen.indices.tolist(), strict=True):
            gate = gate / chosen.values.sum() if normalize else gate
            gate_proj, up, down = (merged_weight(old, "default", f"{n}_proj", i) for n in ("gate", "up", "down"))
            y = y + gate * (down @ (F.silu(gate_proj @ x[t]) * (up @ x[t])))
        assert_near(after[t], y)
        if not {1, 4} & set(p.topk(2).indices.tolist()):
            grown += 1
            assert_near(after[t], before[t] if normalize else before[t] / (1 - lost))
    assert grown > 5


NATIVE = [(kind, True) for kind in MOE] + [("qwen2", False), ("qwen3", False)]


def make_native(kind: str, folder: Path, normalize: bool = True) -> Path:
    """A native MoE with different experts and decided gates."""
    dense = saved(dense_model(kind), folder / "dense")
    config = UpcycleConfig(num_experts=5, init="noise", noise_scale=0.5, router_init_std=0.5)
    upcycle(dense, folder / "moe", config)
    if not normalize:
        values = json.loads((folder / "moe" / "config.json").read_text())
        (folder / "moe" / "config.json").write_text(json.dumps({**values, "norm_topk_prob": False}))
    return folder / "moe"


@torch.no_grad()
def looped_logits(folder: Path, dropped: dict[int, list[int]], normalize: bool) -> torch.Tensor:
    """Logits of a native MoE whose blocks are plain loops over tokens and experts, from the tensors on disk."""
    model, tensors = load_double(folder), Checkpoint(folder)
    family, k = FAMILIES[model.config.model_type], model.config.num_experts_per_tok
    n = getattr(model.config, family.count)

    def read(name):
        return tensors.tensor(name).double()

    def routed(layer, x_TD, dropped):
        ffns = [family.read_expert(layer, i, read) for i in range(n)]
        router, out = read(f"model.layers.{layer}.{family.block}.{family.router}"), torch.zeros_like(x_TD)
        for t, x in enumerate(x_TD):
            p = (router @ x).index_fill(0, torch.tensor(dropped, dtype=torch.long), -torch.inf).softmax(-1).topk(k)
            for gate, i in zip(p.values / (p.values.sum() if normalize else 1), p.indices.tolist(), strict=True):
                out[t] += gate * (ffns[i].down @ (F.silu(ffns[i].gate @ x) * (ffns[i].up @ x)))
        return out

    def hook(layer):
        def change(block, args, output):  # what is not routed (a shared expert) stays
            hidden = output[0] if isinstance(output, tuple) else output
            x_TD = args[0].reshape(-1, args[0].shape[-1])
            changed = hidden + (routed(layer, x_TD, dropped[layer]) - routed(layer, x_TD, [])).view(hidden.shape)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return change

    gates = set(gates_of(model))
    blocks = [m for m in model.modules() if gates & set(m.children())]
    assert len(blocks) == 2
    for layer, block in enumerate(blocks):
        block.register_forward_hook(hook(layer))
    return model(input_ids=IDS[:, :6]).logits


@pytest.mark.parametrize(("kind", "normalize"), NATIVE)
def test_native_moe_is_a_plain_loop_with_logits_of_minus_infinity(kind: str, normalize: bool, tmp_path: Path):
    folder = make_native(kind, tmp_path, normalize)
    dropped = {0: [1, 4], 1: [0, 2]}
    result = prune_experts(folder, tmp_path / "pruned", drop=dropped)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert getattr(model.config, FAMILIES[MOE[kind]].count) == 3 == len(result.layers[0].kept)
    assert sum(p.numel() for p in model.parameters()) == result.size["after"].total
    with torch.no_grad():
        actual, original = (load_double(path)(input_ids=IDS[:, :6]).logits for path in (tmp_path / "pruned", folder))
    assert (actual - original).abs().max() > 1e-2
    # transformers' gates are float32 in any case
    assert_near(actual, looped_logits(folder, dropped, normalize), dtype=torch.float32)


# --- which experts go -----------------------------------------------------------------------------------------------


def test_layers_of_a_native_moe_lose_as_many(base: str, tmp_path: Path):
    moe = make_native("llama", tmp_path)
    result = prune_experts(moe, tmp_path / "pruned", drop={0: [1], 1: [4]})
    assert [layer.kept for layer in result.layers] == [[0, 2, 3, 4], [0, 1, 2, 3]]
    with pytest.raises(ValueError, match="would keep 4 to 5 experts: a native MoE has the same number in every layer"):
        prune_experts(moe, tmp_path / "other", drop={0: [1]})


def test_the_command_prints_what_changed(base: str, tmp_path: Path, capsys):
    folder, out = make_adapter(base, tmp_path / "adapter"), tmp_path / "pruned"
    main(["prune", "--model", str(folder), "--output", str(out), "--drop", '{"0": [5]}'])
    printed = capsys.readouterr().out
    report = json.loads((out / "pruning.json").read_text())
    assert [layer["dropped"] for layer in report["layers"]] == [[5], []] and "6 → 5" in printed
    assert f"{report['size']['after']['total']:,}" in printed and not list(tmp_path.glob(".*"))
    card = (out / "README.md").read_text()
    assert "`moe-peft prune` of" in card and "import moe_peft" in card
    with pytest.raises(SystemExit):
        main(["prune", "--model", str(folder), "--output", str(tmp_path / "b"), "--drop", "null"])
    assert "--drop: 'null': is not a value" in capsys.readouterr().err


def test_experts_are_dropped_by_their_names(base: str, tmp_path: Path, capsys):
    names = ["math", "code", "law", "prose", "1", "news"]
    folder = make_adapter(base, tmp_path / "adapter", expert_names=names)
    for i, (drop, gone) in enumerate({"code": 1, "[1]": 1, '["1"]': 4, '{"0": [code], "1": code}': 1}.items()):
        main(["prune", "--model", str(folder), "--output", str(tmp_path / f"{i}"), "--drop", drop])
        report = json.loads((tmp_path / f"{i}" / "pruning.json").read_text())
        assert [layer["dropped"] for layer in report["layers"]] == [[gone], [gone]]
    assert PeftConfig.from_pretrained(tmp_path / "0").expert_names == ["math", "law", "prose", "1", "news"]
    with pytest.raises(SystemExit):
        main(["prune", "--model", str(folder), "--output", str(tmp_path / "x"), "--drop", "[art]"])
    assert "drop: experts='art': must be one of math, code, law, prose, 1, news" in capsys.readouterr().err


def test_many_layers_that_lost_the_same_are_one_row(capsys, monkeypatch):
    monkeypatch.setattr(cli_prune, "Console", partial(cli_prune.Console, width=160))
    names = [f"model.layers.{i}.{part}" for i in range(30) for part in ("mlp", "self_attn.q_proj", "self_attn.o_proj")]
    layers = [PrunedLayer(name, 3, [0, 2], [1]) for name in names]
    size = {"before": ModelSize(9, 9, 9), "after": ModelSize(8, 8, 8)}
    print_pruning(Pruning(layers, size))
    printed = capsys.readouterr().out
    for part in ("mlp", "self_attn.q_proj", "self_attn.o_proj"):
        (row,) = [line for line in printed.splitlines() if part in line]
        assert f"model.layers.*.{part} (30)" in row and "3 → 2" in row


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"drop": {7: [0]}}, "drop: layer 7: the model has layers 0 to 1"),
        ({}, {"drop": [6]}, r"drop=\[6\]: model.layers.0.mlp has experts 0 to 5"),
        ({}, {"drop": {"x": [0]}}, "drop: layer x: the model has layers 0 to 1"),
        ({}, {"drop": [0, 1, 2, 3, 4]}, "leaves 1 of 6 experts; keep at least 2"),
        ({}, {"drop": []}, "every expert stays; name those to drop"),
        ({"router_type": "hash"}, {"drop": [0]}, "router_type='hash': such a router has no parameters of single"),
        ({"router_type": "locmoe"}, {"drop": [0]}, "router_type='locmoe': such a router has no parameters of single"),
        (
            {"router_type": "attention", "router_num_heads": 2},
            {"drop": [0]},
            "router_type='attention' cannot have 5 experts instead of 6 .*; keep another number, or fold it first",
        ),
    ],
)
def test_what_cannot_be_pruned_is_refused_and_leaves_nothing(settings, options, message, base: str, tmp_path: Path):
    folder = make_adapter(base, tmp_path / "adapter", **settings)
    with pytest.raises(ValueError, match=message) as error:
        prune_experts(folder, tmp_path / "pruned", **options)
    assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}


def test_an_adapter_whose_base_is_gone(base: str, tmp_path: Path, capsys):
    (tmp_path / "data.jsonl").write_text('{"text": "w3 w4"}\n')
    data, folder = str(tmp_path / "data.jsonl"), make_adapter(base, tmp_path / "adapter")
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    commands: dict[str, list[str]] = {
        "prune": ["--drop", "[1]", "--model"], "inspect": ["--data", data, "--model"], "export": ["--adapter"],
    }  # fmt: skip
    for source, words in ((None, "=None: the adapter names no base; name"), ("gone", "='gone': no folder seen from ")):
        path.write_text(json.dumps({**settings, "base_model_name_or_path": source}))
        for command, options in commands.items():
            with pytest.raises(SystemExit) as end:
                main([command, "--output", str(tmp_path / "out"), *options, str(folder)])
            line = capsys.readouterr().err.splitlines()[-1]
            assert end.value.code == 2 and str(folder) in line and line.endswith("name it with --base"), line
            assert f": base_model_name_or_path{words}" in line
    main(["prune", *commands["prune"], str(folder), "--output", str(tmp_path / "out"), "--base", base])
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == base


def test_other_folders_are_refused(base: str, tmp_path: Path):
    config = OlmoeConfig(
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_experts=4,
        vocab_size=64,
        num_experts_per_tok=2,
    )
    OlmoeForCausalLM(config).save_pretrained(tmp_path / "olmoe")
    for folder, message in (
        (tmp_path / "olmoe", "a 'olmoe' model; give a native MoE of mixtral, qwen2_moe"),
        (base, "is a dense model; give a MOE_LORA adapter or a native MoE"),
        (tmp_path, "no adapter_config.json and no config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            prune_experts(folder, tmp_path / "pruned", drop=[0])


def test_threshold_keeps_its_meaning(base: str, tmp_path: Path):
    folder = make_adapter(base, tmp_path / "adapter", router_type="threshold")
    prune_experts(folder, tmp_path / "pruned", drop=[0])
    assert PeftConfig.from_pretrained(tmp_path / "pruned").router_threshold == 1 / 6
