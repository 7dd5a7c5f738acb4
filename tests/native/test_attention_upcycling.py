"""Upcycling with gates from the dense model's attention: values, independence of the experts, commands, recipes."""

from __future__ import annotations

import json
import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM

from moe_peft.cli import main
from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.routing.attention_heads import attention_weights, fitting_heads
from moe_peft.training.preparation import calibration_batches
from moe_peft.upit import dense_experts, recipe_from_dict
from tests.helpers.attention_case import BATCHES, mean_keys
from tests.helpers.attention_case import IDS as ROWS
from tests.helpers.close import assert_near
from tests.helpers.native_case import DENSE, IDS, MOE, dense_model, logits, saved
from tests.helpers.routed_models import gates_of
from tests.helpers.upit_case import make_ffn_case, run, stage_of

READABLE = [kind for kind in DENSE if kind != "phi3"]


def gates(folder) -> list[torch.Tensor]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return [gate.weight.detach() for gate in gates_of(model)]


def expected_gates(dense, n: int) -> list[torch.Tensor]:
    """From the dense model alone, as the paper says, for 4 heads with keys of their own: by loops."""
    result = []
    for layer, (key, _) in zip(dense.model.layers, mean_keys(dense), strict=True):
        w = layer.self_attn.head_dim
        K = [key[h * w : (h + 1) * w].double() for h in range(4)]
        W = [layer.self_attn.q_proj.weight.detach()[h * w : (h + 1) * w].double() for h in range(4)]
        groups = [[0], [1], [2], [3]]
        if n == 2:  # the most similar pair, then what is left
            pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
            best = max(pairs, key=lambda pair: torch.cosine_similarity(K[pair[0]], K[pair[1]], dim=0).item())
            groups = [list(best), [h for h in range(4) if h not in best]]
        total = sum(torch.cat([W[h] for h in group]) for group in groups)
        result.append(torch.stack([torch.cat([K[h] for h in group]) @ total for group in groups]) / len(total) ** 0.5)
    return result


@pytest.mark.parametrize("n", [4, 2])
@pytest.mark.parametrize("init", ["copy", "noise", "drop"])
def test_gates_are_the_dense_models_whatever_the_experts(init, n, tmp_path):
    dense = dense_model("llama", num_key_value_heads=4)
    options = {"copy": {}, "noise": {"noise_scale": 0.5}, "drop": {"drop_rate": 0.9}}[init]
    config = UpcycleConfig(num_experts=n, top_k=1, init=init, router_init="attention", **options)
    made = upcycle(saved(dense, tmp_path / "dense"), tmp_path / "moe", config, calibration=BATCHES)
    for actual, expected in zip(gates(made), expected_gates(dense, n), strict=True):
        assert_near(actual, expected)
    model = AutoModelForCausalLM.from_pretrained(made)
    difference = (model(input_ids=IDS).logits - dense(input_ids=IDS).logits).abs().max()
    assert (difference < 1e-4) == (init == "copy")


@pytest.mark.parametrize("kind", READABLE)
def test_every_family_with_keys_of_its_own_gets_them(kind, tmp_path):
    """Shared key heads and fine-grained experts: the parts of one have its gate."""
    dense = dense_model(kind)
    config = UpcycleConfig(num_experts=4, granularity=2, router_init="attention", top_k=4)
    made = upcycle(saved(dense, tmp_path / "dense"), tmp_path / "moe", config, calibration=iter(BATCHES))
    assert json.loads((made / "config.json").read_text())["model_type"] == MOE[kind]
    for actual, layer, mean in zip(gates(made), dense.model.layers, means_of(dense), strict=True):
        width = layer.self_attn.head_dim
        query, key = attention_weights(layer.self_attn.q_proj.weight.detach(), *mean, width, 4, 4)
        expected = (key[:, 0] @ query.sum(0) / width**0.5).repeat_interleave(2, 0)
        assert_near(actual, expected)
    assert_near(logits(made), logits(dense))


@pytest.mark.parametrize("n, split, num_heads, m", [
    (4, "independent", None, 8), (3, "independent", None, 2), (3, "partition", None, 1), (12, "partition", None, 4),
    (8, "partition", 2, 2), (4, "independent", 4, 4),
])  # fmt: skip
def test_as_many_gates_as_the_split_has_from_as_many_heads_as_fit(n, split, num_heads, m, tmp_path):
    """4 heads of 16, of which 2 share a key: 8, 6, 3, 12, 8 and 8 gates for n experts of 2 parts each."""
    dense = dense_model("llama")
    options = {"fine_grained_split": split, "granularity": 2, "router_init": "attention", "router_num_heads": num_heads}
    config = UpcycleConfig(num_experts=n, top_k=2, **options)
    made = upcycle(saved(dense, tmp_path / "dense"), tmp_path / "moe", config, calibration=BATCHES)
    count = n if split == "partition" else 2 * n
    for actual, layer, mean in zip(gates(made), dense.model.layers, means_of(dense), strict=True):
        query, key = attention_weights(layer.self_attn.q_proj.weight.detach(), *mean, 16, m, count)
        expected = key[:, 0] @ query.sum(0) / (64 / m) ** 0.5
        assert_near(actual, expected.repeat_interleave(2 * n // count, 0))
        assert actual.unique(dim=0).shape[0] == count


@pytest.mark.parametrize("heads, width, n, m", [
    (4, 16, 8, 8), (4, 16, 6, 2), (4, 15, 6, 6), (32, 128, 8, 8), (28, 128, 8, 8), (24, 128, 16, 16), (4, 5, 7, 1),
    (1, 9, 6, 3),
])  # fmt: skip
def test_the_most_heads_that_fit(heads, width, n, m):
    assert fitting_heads(heads, width, n) == m
    weights = torch.randn(heads * width, 8), torch.randn(heads * width), torch.randn(8)
    for other in range(1, n + 1):
        if other > m:
            with pytest.raises(ValueError, match=f"num_heads={other}: must divide"):
                attention_weights(*weights, width, other, n)
    query, key = attention_weights(*weights, width, m, n)
    assert query.shape == (m, heads * width // m, 8) and key.shape == (n, 1, heads * width // m)


@pytest.mark.parametrize("settings, options, message", [
    ({}, {"calibration": BATCHES}, "router_init='normal': calibration data .* go with router_init='attention'"),
    ({"router_num_heads": 4}, {}, "router_num_heads=4: goes with router_init='attention'"),
    ({"router_init": "attention", "router_num_heads": 0}, {"calibration": BATCHES}, "router_num_heads=0: must be"),
])  # fmt: skip
def test_arguments_without_a_use_are_refused(settings, options, message, tmp_path):
    folder = saved(dense_model("llama"), tmp_path / "dense")
    with pytest.raises(ValueError, match=f"^{message}") as error:
        upcycle(folder, tmp_path / "moe", UpcycleConfig(**{"num_experts": 4, **settings}), **options)
    assert "\n" not in str(error.value)


@torch.no_grad()
def means_of(dense) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Mean keys and mean inputs, where a layer may have no norm before its attention: from the attention's input."""
    sums = [[0.0, 0.0] for _ in dense.model.layers]
    tokens = 0
    for batch in BATCHES:
        seen: list[torch.Tensor] = []
        keep = partial(lambda kept, module, args: kept.append(args[0]), seen)
        handles = [layer.self_attn.k_proj.register_forward_pre_hook(keep) for layer in dense.model.layers]
        dense(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        for handle in handles:
            handle.remove()
        real = batch["attention_mask"].bool()
        tokens += int(real.sum())
        for total, layer, x in zip(sums, dense.model.layers, seen, strict=True):
            total[0] = total[0] + layer.self_attn.k_proj(x)[real].double().sum(0)
            total[1] = total[1] + x[real].double().sum(0)
    return [((key / tokens).float(), (x / tokens).float()) for key, x in sums]


@pytest.mark.parametrize("kind, settings, calibration, message", [
    ("llama", {}, None, r"router_init='attention': calibration data \(calibration=…, --calibration FILE\) go with"),
    ("llama", {}, [], "router_init='attention', .*: batches: no tokens"),
    ("llama", {"num_experts": 3, "router_num_heads": 3}, BATCHES,
     "router_num_heads=3: .*: must divide the attention's size 64, .* num_experts=3; try 1"),
    ("llama", {"router_num_heads": 8}, BATCHES, "num_heads=8: a linear gate takes at most num_experts=4"),
    ("phi3", {}, BATCHES, "Phi3ForCausalLM has no attention with q_proj, k_proj and head_dim"),
])  # fmt: skip
def test_what_cannot_work_is_refused_and_leaves_nothing(kind, settings, calibration, message, tmp_path):
    folder = saved(dense_model(kind), tmp_path / "dense")
    config = UpcycleConfig(router_init="attention", **{"num_experts": 4, **settings})
    with pytest.raises(ValueError, match=message) as error:
        upcycle(folder, tmp_path / "moe", config, calibration=calibration)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_several_models_have_no_one_attention(tmp_path):
    folders = [saved(dense_model("llama", seed=i), tmp_path / str(i)) for i in range(2)]
    config = UpcycleConfig(num_experts=2, router_init="attention", init="checkpoints")
    with pytest.raises(ValueError, match="router_init='attention': takes one dense model"):
        upcycle(folders, tmp_path / "moe", config, calibration=BATCHES)


def test_the_command_reads_a_data_file(tokenizer, tmp_path, capsys):
    folder = saved(dense_model("llama"), tmp_path / "dense")
    tokenizer.save_pretrained(folder)
    texts = [" ".join(f"w{i}" for i in row.tolist()) for row in ROWS]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [*texts, "w3 w4 w5"]))
    out = tmp_path / "moe"
    main([
        "upcycle", "--model", folder, "--output", str(out), "--num-experts", "4", "--init", "drop",
        "--router-init", "attention", "--calibration", str(tmp_path / "data.jsonl"), "--calibration-examples", "4",
        "--seed", "7",
    ])  # fmt: skip
    assert str(out) in capsys.readouterr().out
    data = load_dataset("json", data_files=str(tmp_path / "data.jsonl"), split="train")
    data = data.select(torch.randperm(5, generator=torch.Generator().manual_seed(7))[:4].tolist())
    rows = [tokenizer(text)["input_ids"] + [1] for text in data["text"]]  # TRL ends every text
    batches = [{"input_ids": torch.tensor([row])} for row in rows]
    config = UpcycleConfig(num_experts=4, init="drop", router_init="attention", seed=7)
    upcycle(folder, tmp_path / "again", config, calibration=batches)
    for actual, expected in zip(gates(out), gates(tmp_path / "again"), strict=True):
        assert_near(actual, expected)
    with pytest.raises(SystemExit):
        main(["upcycle", "--model", folder, "--output", str(tmp_path / "no"), "--router-init", "attention"])
    assert not (tmp_path / "no").exists()


def test_calibration_draws_examples_and_limits_their_length(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": "w3 " * (i + 1)}) for i in range(20)))
    data = load_dataset("json", data_files=str(tmp_path / "data.jsonl"), split="train")

    def lengths(**options) -> list[int]:
        batches = calibration_batches(data, tokenizer, max_examples=5, batch_size=2, **options)
        assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
        return [int(row.sum()) for batch in batches for row in batch["attention_mask"]]

    for seed in (0, 3):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:5].tolist()
        assert order != list(range(5))
        assert lengths(seed=seed) == [i + 2 for i in order]  # with the end of the text
        assert lengths(seed=seed, max_length=6) == [min(i + 2, 6) for i in order]
    assert lengths() == lengths(seed=0)
    assert len(calibration_batches(data, tokenizer, max_examples=50, batch_size=20)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_an_empty_file_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text("")
    folder = saved(dense_model("llama"), tmp_path / "dense")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([
            "upcycle", "--model", folder, "--output", str(tmp_path / "moe"), "--num-experts", "4",
            "--router-init", "attention", "--calibration", str(tmp_path / "data.jsonl"),
        ])  # fmt: skip
    error = capsys.readouterr().err.strip()
    assert error.endswith("data.jsonl': no examples; name a split that has some") and "\n" not in error


# --- recipes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method, options", [("upcycle_pt", {}), ("upcycle_sft", {"router_init": {"buckets": "none"}})])
def test_a_recipe_starts_from_attention_gates(method, options, tokenizer, tmp_path, monkeypatch):
    drawn = Mock(side_effect=calibration_batches)
    monkeypatch.setattr(dense_experts, "calibration_batches", drawn)
    case = make_ffn_case(tmp_path, tokenizer)
    moe = {**case["moe"], "router_init": "attention", "init": "drop"}
    case = {**case, "method": method, **options, "moe": moe, "num_train_epochs": 1, "seed": 11}
    pipeline = run(case, tmp_path / "out")
    assert (pipeline.root / "model" / "model.safetensors").exists()
    stage = stage_of(pipeline, "post_train")
    assert drawn.call_args.kwargs["seed"] == stage.seed > 11
    batches = calibration_batches(pipeline.context.train_data, pipeline.context.base.tokenizer, seed=stage.seed)
    stage.kind.write_moe(tmp_path / "moe", stage.given.experts, stage.given.routers, batches, stage.seed)
    source = stage.given.experts[0] if stage.given.experts else pipeline.recipe.model.name_or_path
    config = UpcycleConfig(num_experts=4, top_k=2, router_init="attention")
    upcycle(source, tmp_path / "copies", config, calibration=batches)
    for actual, expected in zip(gates(tmp_path / "moe"), gates(tmp_path / "copies"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert math.isfinite(float(actual.sum()))


def test_recipes_with_stage_3_refuse_them(tokenizer, tmp_path):
    case = make_ffn_case(tmp_path, tokenizer)
    with pytest.raises(ValueError, match=r"moe.router_init='attention': must be left out: stage 3 makes the gates"):
        recipe_from_dict({**case, "moe": {**case["moe"], "router_init": "attention"}})


def test_recipes_refuse_independent_parts_where_stage_3_makes_their_gates(tokenizer, tmp_path):
    case = make_ffn_case(tmp_path, tokenizer)
    moe = {**case["moe"], "fine_grained_split": "independent"}
    with pytest.raises(ValueError, match=r"moe.fine_grained_split='independent': must be .*: stage 3 makes the gates"):
        recipe_from_dict({**case, "moe": {**moe, "granularity": 2}})
    with pytest.raises(ValueError, match="fine_grained_split='independent': granularity=1 splits no expert"):
        recipe_from_dict({**case, "moe": moe})
    recipe_from_dict({**case, "moe": {**moe, "granularity": 2}, "router_init": {"buckets": "none"}})
