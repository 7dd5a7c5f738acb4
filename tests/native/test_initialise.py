"""Initial experts and gates against plain loops; the balancing coefficient that a checkpoint carries."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe_peft.cli import main
from moe_peft.native import ExpertInit, UpcycleConfig, export_adapter, upcycle
from moe_peft.native.expert_init import FFN, generator_for, router_weight, share_of
from moe_peft.upit import recipe_from_dict
from tests.helpers.close import assert_near, near
from tests.helpers.native_case import DENSE, IDS, adapter, dense_model, logits, saved


def ffn_of(f: int, d: int, seed: int = 0) -> FFN:
    """Gate, up and down differ in mean and deviation, and so do their neurons."""
    generator = torch.Generator().manual_seed(seed)
    gate, up, down = (torch.randn(s, generator=generator) * (i + 1) + i for i, s in enumerate([(f, d), (f, d), (d, f)]))
    scale = torch.linspace(0.2, 3, f)
    return FFN(gate * scale[:, None], up * scale[:, None] + scale[:, None], down * scale)


# --- drop -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [1, 7, 48, 100, 1000, 11_008, 14_336])
def test_a_share_of_neurons_is_rounded_down_exactly(f):
    for percent in range(101):
        assert share_of(f, percent / 100) == percent * f // 100
    assert share_of(100, 0.29) == 29 != int(0.29 * 100)
    assert share_of(f, 1) == f and share_of(10**6, 1e-05) == 10


@pytest.mark.parametrize("rate", [0.29, 0.57, 0.58])
def test_drop_replaces_that_many_neurons(rate):
    old = ffn_of(100, 6)
    new = ExpertInit("drop", drop_rate=rate).make(old, 0, 4, generator_for(0))
    assert int((new.gate != old.gate).any(1).sum()) == round(100 * rate)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("f, d, rate", [(6, 3, 0.5), (5, 2, 0.4), (9, 4, 1.0), (8, 5, 0.13)])
def test_drop_has_the_mean_and_deviation_of_exactly_the_replaced_entries(f, d, rate, shared):
    """
    With few entries, so that statistics of whole matrices, of all three together, of the kept entries, or with
    Bessel's correction are far off. The loop draws what the library draws, then computes in Python's floats.
    """
    old = ffn_of(f, d)
    new = ExpertInit("drop", drop_rate=rate, shared_indices=shared).make(old, 1, 4, generator_for(5, 0, 1))
    generator = generator_for(5, 0, 1)
    count = math.floor(round(rate * 100) * f / 100)
    chosen = torch.randperm(f, generator=generator)[:count].tolist()
    for i, (actual, before) in enumerate(zip(new, old, strict=True)):
        if i and not shared:
            chosen = torch.randperm(f, generator=generator)[:count].tolist()
        entries = [(row, col) for row in (range(d) if i == 2 else chosen) for col in (chosen if i == 2 else range(d))]
        values = [float(before[entry]) for entry in entries]
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        z = torch.empty((d, count) if i == 2 else (count, d)).normal_(generator=generator).flatten().tolist()
        expected = before.clone()
        for entry, normal in zip(entries, z, strict=True):
            expected[entry] = mean + deviation * normal
        assert_near(actual, expected)


def test_every_place_draws_for_itself():
    places = [
        (0, 1, 2),
        (0, 2, 1),
        (0, 12),
        (0, 1),
        (1, 1),
        (0, 1, "shards"),
        (0, 2, "shards"),
        (0, "router"),
        (1, "router"),
    ]
    first = {key: torch.randint(2**40, (1,), generator=generator_for(*key)).item() for key in places}
    assert len(set(first.values())) == len(places)
    assert first == {key: torch.randint(2**40, (1,), generator=generator_for(*key)).item() for key in reversed(places)}


# --- permutations ---------------------------------------------------------------------------------------------------


def test_permuted_columns_are_the_outputs_of_each_matrix_in_an_order_of_its_own():
    old = ffn_of(40, 30)
    new = ExpertInit("permute_columns").make(old, 0, 4, generator_for(0))
    generator = generator_for(0)
    for result, before in zip(new, old, strict=True):
        # Stored [out, in], a matrix has its outputs, the columns of x W, as rows.
        order = torch.randperm(len(before), generator=generator).tolist()
        assert order != list(range(len(before)))
        assert torch.equal(result, torch.stack([before[i] for i in order]))
    x = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))

    def output(ffn: FFN) -> torch.Tensor:
        return (torch.nn.functional.silu(x @ ffn.gate.T) * (x @ ffn.up.T)) @ ffn.down.T

    assert (output(new) - output(old)).abs().mean() > 0.5 * output(old).abs().mean()


def trained(folder, steps: int = 5) -> torch.Tensor:
    """Logits in float64 after some updates of all weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS, output_router_logits=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return logits(model)


def test_permuted_neurons_train_as_copies_do_and_permuted_columns_do_not(tmp_path):
    name = saved(dense_model("llama"), tmp_path / "dense")
    options = {"num_experts": 4, "router_init_std": 0.3}
    out = {
        init: upcycle(name, tmp_path / init, UpcycleConfig(init=init, **options))
        for init in ("copy", "permute", "permute_columns")
    }
    before, after = ({init: run(folder) for init, folder in out.items()} for run in (logits, trained))
    dense = logits(name)
    assert_near(before["permute"], dense)
    assert (before["permute_columns"] - dense).abs().max() > 0.1
    assert (after["copy"] - dense).abs().max() > 0.1, "it has learnt"
    assert_near(after["permute"], after["copy"])
    assert (after["permute_columns"] - after["copy"]).abs().max() > 0.1
    weights = [load_file(out[init] / "model.safetensors") for init in ("copy", "permute")]
    key = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    assert not torch.equal(weights[0][key], weights[1][key])


# --- gates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.005, 0.02, 0.1])
def test_initial_gates_have_the_deviation_that_is_asked_for(std):
    normal = router_weight("normal", 64, 500, generator_for(0), std)
    uniform = router_weight("uniform", 64, 500, generator_for(0), std)
    for gates in (normal, uniform):
        assert abs(float(gates.std()) / std - 1) < 0.02 and abs(float(gates.mean())) < 0.03 * std
    assert 0.995 < float(uniform.abs().max()) / (math.sqrt(3) * std) <= 1
    assert float(normal.abs().max()) > 3.5 * std
    assert not router_weight("zeros", 64, 500, generator_for(0), std).any()


def test_the_deviation_reaches_the_checkpoint_and_is_002_by_default(tmp_path):
    name = saved(dense_model("llama"), tmp_path / "dense")
    key = "model.layers.1.block_sparse_moe.gate.weight"
    weights = load_file(upcycle(name, tmp_path / "a", UpcycleConfig(8, init="drop")) / "model.safetensors")
    plain = weights[key]
    assert abs(float(plain.std()) / 0.02 - 1) < 0.2
    assert not torch.equal(plain, weights[key.replace("layers.1", "layers.0")])
    dense, drawn = load_file(tmp_path / "dense/model.safetensors"), set()
    for layer in range(2):  # every expert of every layer has replaced neurons of its own
        old = dense[f"model.layers.{layer}.mlp.gate_proj.weight"]
        for expert in range(8):
            new = weights[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight"]
            drawn.add(tuple((new != old).any(1).nonzero().flatten().tolist()))
    assert len(drawn) == 16 and {len(neurons) for neurons in drawn} == {len(old) // 2}
    wide = load_file(upcycle(name, tmp_path / "b", UpcycleConfig(8, router_init_std=0.04)) / "model.safetensors")[key]
    assert_near(wide, 2 * plain)
    uniform = UpcycleConfig(8, router_init="uniform")
    bound = float(load_file(upcycle(name, tmp_path / "c", uniform) / "model.safetensors")[key].abs().max())
    assert 0.033 < bound <= 0.0347


# --- the balancing coefficient --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DENSE)
def test_a_checkpoint_carries_its_balancing_coefficient(kind, tmp_path):
    name = saved(dense_model(kind), tmp_path / "dense")
    for folder, options, coefficient in (("a", {}, 0.02), ("b", {"router_aux_loss_coef": 0.0}, 0.0)):
        out = upcycle(name, tmp_path / folder, UpcycleConfig(num_experts=2, **options))
        assert json.loads((out / "config.json").read_text())["router_aux_loss_coef"] == coefficient
    adapter(dense_model(kind), tmp_path / "adapter", name, router_aux_loss_coef=0.07)
    exported = export_adapter(tmp_path / "adapter", tmp_path / "exported")
    assert json.loads((exported / "config.json").read_text())["router_aux_loss_coef"] == 0.07


def test_the_command_takes_every_setting(tmp_path):
    name = saved(dense_model("qwen2"), tmp_path / "dense")
    main([
        "upcycle", "--model", name, "--output", str(tmp_path / "moe"), "--num-experts", "4", "--granularity", "2",
        "--fine-grained-split", "independent", "--num-shared-experts", "1", "--router-aux-loss-coef", "0.05",
        "--router-init-std", "0.03", "--init", "drop", "--drop-rate", "0.29",
    ])  # fmt: skip
    config = UpcycleConfig(
        4, 2, granularity=2, fine_grained_split="independent", num_shared_experts=1, router_aux_loss_coef=0.05,
        router_init_std=0.03, init="drop", drop_rate=0.29,
    )  # fmt: skip
    again = upcycle(name, tmp_path / "again", config)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "moe" / file).read_bytes() == (again / file).read_bytes()
    assert json.loads((again / "config.json").read_text())["router_aux_loss_coef"] == 0.05


@pytest.mark.parametrize("options, coefficient", [({}, 0.02), ({"router_aux_loss_coef": 0.3}, 0.3)])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "granite"])
def test_plain_transformers_adds_the_coefficient_times_the_loss(kind, options, coefficient, tmp_path):
    """After training, saving and loading, with the Switch loss as a loop over layers, tokens and experts."""
    name = saved(dense_model(kind), tmp_path / "dense")
    config = UpcycleConfig(num_experts=4, top_k=2, router_init_std=0.3, **options)
    model = AutoModelForCausalLM.from_pretrained(upcycle(name, tmp_path / "moe", config)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS, output_router_logits=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "trained")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").eval()
    with torch.no_grad():
        out = model(input_ids=IDS, labels=IDS, output_router_logits=True)
        plain = model(input_ids=IDS, labels=IDS).loss
    chosen, probability, tokens = [0] * 4, [0.0] * 4, 0
    for layer_logits in out.router_logits:
        for token in layer_logits.reshape(-1, 4).double():
            p = token.softmax(0).tolist()
            for i in sorted(range(4), key=lambda i, p=p: -p[i])[:2]:
                chosen[i] += 1
            probability = [total + value for total, value in zip(probability, p, strict=True)]
            tokens += 1
    assert tokens == 2 * IDS.numel()
    aux = 4 * sum(f / tokens * P / tokens for f, P in zip(chosen, probability, strict=True))
    assert aux > 2 and float(out.aux_loss) == near(aux)
    assert float(out.loss) == near(float(plain) + coefficient * aux)


def test_a_recipe_takes_it_as_a_field_of_upcycling_with_its_own_default():
    case = {"output_dir": "o", "model": {"name_or_path": "m"}, "data": {"train": "t.jsonl"}, "mode": "ffn"}
    assert recipe_from_dict(case).upcycle_config().router_aux_loss_coef == 0.01
    recipe = recipe_from_dict({**case, "moe": {"router_aux_loss_coef": 0.3}})
    assert recipe.upcycle_config().router_aux_loss_coef == 0.3
