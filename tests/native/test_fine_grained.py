"""Fine-grained and shared experts (Drop-Upcycling, appendix C.6): sizes, neurons, statistics, function, files."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.native.expert_init import FFN
from tests.helpers.close import assert_near, near
from tests.helpers.native_case import dense_model, logits, saved

F, D, LAYERS = 96, 32, 2  # so that fine-grained experts in half precision have rows of 16 bytes
# N, k, m, k_s
SIZES = [(4, 2, 2, 1), (4, 2, 4, 3), (4, 2, 4, 4), (4, 2, 4, 7), (3, 1, 6, 2), (2, 2, 1, 1)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> str:
    return saved(dense_model("qwen2", intermediate_size=F), tmp_path_factory.mktemp("dense") / "qwen2")


@pytest.fixture(scope="module")
def ffns(dense) -> list[FFN]:
    tensors = load_file(f"{dense}/model.safetensors")
    return [read(tensors, f"model.layers.{layer}.mlp") for layer in range(LAYERS)]


class Block(NamedTuple):
    """A layer's block as it is on disk."""

    router: torch.Tensor
    routed: list[FFN]
    shared: FFN
    shared_gate: torch.Tensor


def read(tensors, prefix) -> FFN:
    return FFN(*(tensors[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down")))


def blocks(folder: Path) -> list[Block]:
    tensors = load_file(folder / "model.safetensors")
    n = json.loads((folder / "config.json").read_text())["num_experts"]
    return [
        Block(
            tensors[f"{mlp}.gate.weight"],
            [read(tensors, f"{mlp}.experts.{i}") for i in range(n)],
            read(tensors, f"{mlp}.shared_expert"),
            tensors[f"{mlp}.shared_expert_gate.weight"],
        )
        for mlp in (f"model.layers.{layer}.mlp" for layer in range(LAYERS))
    ]


def made(dense, tmp_path, sizes=(4, 2, 4, 3), **options) -> Path:
    names = ("num_experts", "top_k", "granularity", "num_shared_experts")
    return upcycle(dense, tmp_path / "moe", UpcycleConfig(**{**dict(zip(names, sizes, strict=True)), **options}))


def origins(part: FFN, full: FFN, down: float = 1.0) -> list[int]:
    """The neuron of `full` that each neuron of `part` is, found in gate, up and down (times `down`) alike."""
    result = []
    for i in range(len(part.gate)):
        places = [
            j
            for j in range(len(full.gate))
            if torch.equal(part.gate[i], full.gate[j])
            and torch.equal(part.up[i], full.up[j])
            and torch.equal(part.down[:, i], full.down[:, j] * down)
        ]
        assert len(places) == 1, "neurons are copied whole"
        result += places
    return result


# --- sizes and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("split", ["partition", "independent"])
@pytest.mark.parametrize("sizes", SIZES)
def test_active_width_and_parameters_are_those_of_k_whole_experts(sizes, split, dtype, dense, tmp_path):
    n, k, m, shared = sizes
    out = made(dense, tmp_path, sizes, fine_grained_split=split, dtype=dtype, init="drop")
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == getattr(torch, dtype)
    c = model.config
    assert (c.num_experts, c.num_experts_per_tok) == (m * n - shared, m * k - shared)
    assert c.shared_expert_intermediate_size == shared * F // m
    assert c.shared_expert_intermediate_size + c.num_experts_per_tok * c.moe_intermediate_size == k * F
    block = model.model.layers[0].mlp
    ffns = sum(p.numel() for name, p in block.named_parameters() if "expert" in name and "gate.weight" not in name)
    assert ffns == n * 3 * F * D, "as many parameters as N whole experts"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("split", ["partition", "independent"])
def test_a_stock_block_computes_what_is_written(split, dtype, dense, tmp_path):
    """Equation 10 as a loop over tokens and experts, in float64; the shared block's gate is one half."""
    out = made(dense, tmp_path, fine_grained_split=split, dtype=dtype, init="drop")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    x = torch.randn(7, D, generator=torch.Generator().manual_seed(3))
    for layer, block in zip(model.model.layers, blocks(out), strict=True):
        routed = [FFN(*(w.double() for w in ffn)) for ffn in block.routed]
        shared, gate = FFN(*(w.double() for w in block.shared)), block.shared_gate
        assert (
            gate.abs().max() < 1.1e-6 and len(routed) == 13 and torch.equal(layer.mlp.gate.weight, block.router.float())
        )
        with torch.no_grad():  # without the ties of a partition's gates
            router = torch.randn(13, D, generator=torch.Generator().manual_seed(4)).double()
            layer.mlp.gate.weight.copy_(router)
        expected = []
        for token in x.double():
            p = (router @ token).softmax(0)
            best = sorted(range(13), key=lambda i, p=p: -float(p[i]))[:5]
            y = 0.5 * output(shared, token)
            for i in best:
                y = y + p[i] / sum(p[j] for j in best) * output(routed[i], token)
            expected.append(y)
        actual = layer.mlp(x.unsqueeze(0)).squeeze(0)
        assert_near(actual, torch.stack(expected).float())


def output(ffn: FFN, x: torch.Tensor) -> torch.Tensor:
    return ffn.down @ (torch.nn.functional.silu(ffn.gate @ x) * (ffn.up @ x))


# --- neurons --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_partition_holds_every_neuron_once_per_whole_expert(sizes, dtype, dense, ffns, tmp_path):
    n, _, m, _ = sizes
    out = made(dense, tmp_path, sizes, weight_scaling=False, dtype=dtype)
    for block, full in zip(blocks(out), ffns, strict=True):
        full = FFN(*(w.to(getattr(torch, dtype)) for w in full))
        common = origins(block.shared, full, down=2.0)  # twice, since its gate is one half
        parts = [common[i : i + F // m] for i in range(0, len(common), F // m)]
        parts += [origins(ffn, full) for ffn in block.routed]
        assert len(parts) == m * n
        for expert in range(n):
            assert sorted(j for part in parts[expert * m : (expert + 1) * m] for j in part) == list(range(F))
        if m > 1:
            assert common[: F // m] != sorted(common[: F // m]), "in random order"
            assert len(set(common)) == min(F, len(common)), "no neuron twice"
            assert parts[:m] != parts[m : 2 * m], "each expert has a partition of its own"


def test_independent_experts_sample_their_neurons_each_on_its_own(dense, ffns, tmp_path):
    """Against the hypergeometric overlap of two random sets of f/m of f neurons, and even shares of the neurons."""
    n, m, shared = 64, 4, 3
    out = made(dense, tmp_path, (n, 2, m, shared), weight_scaling=False, fine_grained_split="independent")
    size = F // m
    for block, full in zip(blocks(out), ffns, strict=True):
        sets = [origins(ffn, full) for ffn in block.routed]
        assert len(sets) == m * n - shared and all(len(set(s)) == size for s in sets)
        common = origins(block.shared, full, down=2.0)
        assert len(set(common)) == len(common) == shared * size
        # The parts of one whole expert overlap as those of two do: they are not a partition.
        pairs = list(pairwise(sets))
        mean = sum(len(set(a) & set(b)) for a, b in pairs) / len(pairs)
        expected = size * size / F
        deviation = math.sqrt(expected * (1 - size / F) * (F - size) / (F - 1) / len(pairs))
        assert abs(mean - expected) < 5 * deviation
        counts = torch.bincount(torch.tensor(sets).flatten(), minlength=F)
        share = len(sets) * size / F
        assert (counts - share).abs().max() < 5 * math.sqrt(share)
        assert len({tuple(s) for s in sets}) == len(sets)
        assert block.router.unique(dim=0).shape[0] == len(sets), "each has a gate of its own"


@pytest.mark.parametrize("shared", [3, 4])
def test_parts_of_a_partition_share_a_gate(shared, dense, tmp_path):
    """Exactly, or, where not all parts of the last expert are active, but for what keeps them from tying."""
    generator = torch.Generator().manual_seed(5)
    routers = {str(i): torch.randn(4, D, generator=generator) for i in range(LAYERS)}
    save_file(routers, tmp_path / "routers.safetensors")
    options = {"router_init": "given", "router_weights": str(tmp_path / "routers.safetensors")}
    config = UpcycleConfig(4, 2, granularity=4, num_shared_experts=shared, **options)
    tokens = torch.randn(100, D, generator=generator)
    for i, block in enumerate(blocks(upcycle(dense, tmp_path / "given", config))):
        expected = torch.stack([routers[str(i)][(j + shared) // 4] for j in range(16 - shared)])
        # No rounding: 0.05 of weights of about 1 is what may keep gates from tying.
        torch.testing.assert_close(block.router, expected, rtol=0, atol=0.05 if shared == 3 else 0)
        last, next_best = (tokens @ block.router.T).topk(8 - shared + 1).values[:, -2:].T
        assert (last - next_best).min() > 1e-5, "no token's choice is a matter of rounding"


@pytest.mark.parametrize("split", ["partition", "independent"])
def test_given_gates_may_be_those_of_the_fine_grained_experts(split, dense, tmp_path):
    routers = {i: torch.randn(16, D) for i in range(LAYERS)}
    config = UpcycleConfig(4, 2, granularity=4, num_shared_experts=3, fine_grained_split=split)
    for i, block in enumerate(blocks(upcycle(dense, tmp_path / "moe", config, routers))):
        assert torch.equal(block.router, routers[i][3:])


def test_independent_experts_are_not_given_the_same_gates(dense, tmp_path):
    config = UpcycleConfig(4, 2, granularity=4, fine_grained_split="independent")
    message = rf"layer 0 has shape \(4, {D}\); give \(16, {D}\) for every layer"
    with pytest.raises(ValueError, match=message) as error:
        upcycle(dense, tmp_path / "moe", config, {i: torch.randn(4, D) for i in range(LAYERS)})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("split", ["partition", "independent"])
@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_drop_applies_to_the_neurons_of_each_fine_expert_and_of_the_shared_block(split, rate, dense, ffns, tmp_path):
    n, k, m, shared = 4, 2, 4, 3
    sizes = (n, k, m, shared)
    options = {"weight_scaling": False, "fine_grained_split": split}
    copied = blocks(made(dense, tmp_path / "copy", sizes, **options))
    dropped = blocks(made(dense, tmp_path / "drop", sizes, init="drop", drop_rate=rate, **options))
    for old_block, new_block in zip(copied, dropped, strict=True):
        pairs = [(old_block.shared, new_block.shared), *zip(old_block.routed, new_block.routed, strict=True)]
        for index, (old, new) in enumerate(pairs):
            width = F // m * (shared if index == 0 else 1)
            rows = [(new.gate != old.gate).any(1), (new.up != old.up).any(1), (new.down != old.down).any(0)]
            assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])
            assert int(rows[0].sum()) == math.floor(rate * width)
            for own_new, own_old in ((new.gate, old.gate), (new.up, old.up), (new.down.T, old.down.T)):
                drawn, replaced = own_new[rows[0]], own_old[rows[0]]
                error = float(replaced.std()) / math.sqrt(replaced.numel())
                assert abs(float(drawn.mean() - replaced.mean())) < 5 * error
                assert abs(float(drawn.std() / replaced.std()) - 1) < 5 / math.sqrt(2 * replaced.numel())


def test_each_checkpoint_gives_its_experts_and_its_part_of_the_shared_block(tmp_path):
    models = [dense_model("qwen2", seed, intermediate_size=F) for seed in range(2)]
    names = [saved(model, tmp_path / f"m{i}") for i, model in enumerate(models)]
    config = UpcycleConfig(3, 2, init="checkpoints", granularity=2, num_shared_experts=3, weight_scaling=False)
    out = upcycle(names, tmp_path / "moe", config)
    for layer, block in enumerate(blocks(out)):
        wholes = [read(load_file(f"{name}/model.safetensors"), f"model.layers.{layer}.mlp") for name in names]
        first = FFN(block.shared.gate[:F], block.shared.up[:F], block.shared.down[:, :F])
        rest = FFN(block.shared.gate[F:], block.shared.up[F:], block.shared.down[:, F:])
        assert sorted(origins(first, wholes[0], 2.0)) == list(range(F))
        parts = origins(rest, wholes[1], 2.0) + origins(block.routed[0], wholes[1])
        assert sorted(parts) == list(range(F))
        assert sorted(origins(block.routed[1], wholes[0]) + origins(block.routed[2], wholes[0])) == list(range(F))


# --- the function ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (2, 2, 4, 3), (2, 2, 4, 7), (3, 3, 2, 4), (1, 1, 3, 2), (4, 2, 1, 1)])
def test_a_partition_keeps_the_function_where_every_neuron_is_as_active(sizes, dense, tmp_path):
    """All experts active with equal gates; or m = 1, where every expert is the whole FFN."""
    out = made(dense, tmp_path, sizes, router_init="zeros" if sizes[2] > 1 else "normal")
    expected = logits(dense)
    assert_near(logits(out), expected)


@pytest.mark.parametrize("split", ["partition", "independent"])
@pytest.mark.parametrize("sizes", SIZES)
def test_active_experts_add_up_to_the_scale_of_the_dense_ffn(sizes, split, dense, ffns, tmp_path):
    """Each neuron's coefficient, summed over any choice of active experts with equal gates, is that of f neurons."""
    _, k, m, shared = sizes
    out = made(dense, tmp_path, sizes, fine_grained_split=split)

    def coefficients(ffn: FFN, full: FFN) -> float:
        total = 0.0
        for gate, up, down in zip(ffn.gate, ffn.up, ffn.down.T, strict=True):
            j = [torch.equal(gate, other) for other in full.gate].index(True)
            ratios = [float((a @ b) / (b @ b)) for a, b in ((up, full.up[j]), (down, full.down[:, j]))]
            total += math.prod(ratios)
        return total

    for block, full in zip(blocks(out), ffns, strict=True):
        active = m * k - shared
        for chosen in (block.routed[:active], block.routed[-active:]):
            total = coefficients(block.shared, full) / 2
            total += sum(coefficients(ffn, full) for ffn in chosen) / active
            assert total == near(F)
    without = made(dense, tmp_path / "plain", sizes, fine_grained_split=split, weight_scaling=False)
    for block, full in zip(blocks(without), ffns, strict=True):
        assert coefficients(block.shared, full) / 2 == near(shared * F / m), "equation 10: weight 1"
        assert coefficients(block.routed[0], full) == near(F / m)


def test_some_experts_must_be_routed():
    with pytest.raises(ValueError, match=r"num_shared_experts=4: must be below granularity·top_k=4"):
        UpcycleConfig(granularity=2, top_k=2, num_shared_experts=4)
