"""Similarity, DARE and expansion against plain reimplementations."""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import asdict
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import load_peft_weights

from moe_peft.upit import expand_experts
from moe_peft.upit.expand import expand_checkpoints
from moe_peft.upit.expansion import dare_merge, expand, update_inner, values_inner
from moe_peft.utils.expert_likeness import similarities, update_gram, value_gram
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.upit_case import contents

MODULES = {"layers.0.up": (3, 7, 5), "layers.0.down": (3, 5, 7), "layers.1.up": (2, 7, 5)}  # r, in, out


def experts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            f"base_model.model.{name}.lora_{kind}.weight": torch.randn(shape, generator=generator)
            for name, (r, m, n) in MODULES.items()
            for kind, shape in (("A", (r, m)), ("B", (n, r)))
        }
        for _ in range(count)
    ]


def updates(expert):
    """Every B A in full, flattened into one vector."""
    names = [f"base_model.model.{name}" for name in MODULES]
    full = [expert[f"{name}.lora_B.weight"].double() @ expert[f"{name}.lora_A.weight"].double() for name in names]
    return torch.cat([matrix.flatten() for matrix in full])


def flat(expert):
    return torch.cat([expert[name].double().flatten() for name in sorted(expert)])


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def test_inner_products_are_those_of_the_full_vectors():
    a, b, c = experts(3)
    assert update_inner(a, b) == near(float(updates(a) @ updates(b)), dtype=torch.float64)
    assert values_inner(a, b) == near(float(flat(a) @ flat(b)), dtype=torch.float64)
    for name in MODULES:  # of all experts at once, one module after the other
        A, B = (torch.stack([e[f"base_model.model.{name}.lora_{half}.weight"] for e in (a, b, c)]) for half in "AB")
        full = (B.double() @ A.double()).flatten(1)
        assert_near(update_gram(A, B.mT), full @ full.T)
        values = A.double().flatten(1)
        assert_near(value_gram(A.flatten(1), chunk=4), values @ values.T)


@pytest.mark.parametrize("similarity", ["update", "values"])
@pytest.mark.parametrize("seed", range(3))
def test_genetic_expansion_is_algorithm_2(similarity, seed):
    parents = experts(3, seed)
    vector = {"update": updates, "values": flat}[similarity]
    family, descents = expand(parents, 8, similarity=similarity, drop_rate=0.3, seed=seed)
    assert len(family) == 8 and len(descents) == 5
    assert all(given is kept for given, kept in zip(parents, family, strict=False))

    generator = torch.Generator().manual_seed(seed)
    so_far = list(parents)
    for descent in descents:  # the algorithm as printed: all pairs, every time
        pairs = list(itertools.combinations(range(len(so_far)), 2))
        j, k = min(pairs, key=lambda pair: cosine(vector(so_far[pair[0]]), vector(so_far[pair[1]])))
        assert descent.parents == (j, k) and descent.expert == len(so_far)
        similarity_jk = cosine(vector(so_far[j]), vector(so_far[k]))
        assert descent.similarity == near(similarity_jk, dtype=torch.float64, scale=1.0)  # of unit vectors
        alpha = float(torch.rand((), generator=generator))
        assert descent.alpha == alpha and descent.drop_rate == 0.3
        child = {}
        for name in sorted(parents[0]):
            keep_j, keep_k = (torch.rand(so_far[j][name].shape, generator=generator) >= 0.3 for _ in range(2))
            whole = alpha * so_far[j][name] * keep_j + (1 - alpha) * so_far[k][name] * keep_k
            child[name] = whole / 0.7
        made = family[descent.expert]
        assert made.keys() == child.keys()
        for name in child:
            assert_near(made[name], child[name])
        so_far.append(made)


def test_each_step_computes_only_the_newest_experts_similarities(monkeypatch):
    calls = []
    counted = lambda *args, **own: calls.append(1) or update_inner(*args, **own)  # noqa: E731
    monkeypatch.setattr("moe_peft.upit.expansion.update_inner", counted)
    expand(experts(4), 8)
    assert len(calls) == sum(range(1, 8))  # a row of the Gram matrix per expert that was compared, each pair once


def test_dare_drops_and_rescales():
    a = {"w": torch.ones(200_000)}
    b = {"w": torch.full((200_000,), 100.0)}
    child = dare_merge(a, b, 0.25, 0.4, torch.Generator().manual_seed(0))["w"].double()
    values = {0.0: 0.16, 0.25 / 0.6: 0.24, 75 / 0.6: 0.24, 75.25 / 0.6: 0.36}  # dropped in both, in b, in a, in none
    for value, probability in values.items():
        share = (child - value).abs().lt(1e-4).double().mean()
        assert float(share) == pytest.approx(probability, abs=0.005)
    assert float(child.mean()) == pytest.approx(0.25 + 75, rel=0.01)  # unbiased
    kept = dare_merge(a, b, 0.25, 0.0, torch.Generator())["w"]
    assert_near(kept, torch.full((200_000,), 75.25))


def test_dtype_of_experts_is_kept():
    halves = [{name: tensor.bfloat16() for name, tensor in expert.items()} for expert in experts(2)]
    family, _ = expand(halves, 3)
    assert {tensor.dtype for tensor in family[2].values()} == {torch.bfloat16}


def test_half_precision_is_rounded_once():
    a, b = ({"w": torch.randn(1000, generator=torch.Generator().manual_seed(seed)).bfloat16()} for seed in (0, 1))
    made = dare_merge(a, b, 0.3, 0.2, torch.Generator().manual_seed(2))["w"]
    exact = dare_merge({"w": a["w"].float()}, {"w": b["w"].float()}, 0.3, 0.2, torch.Generator().manual_seed(2))["w"]
    assert torch.equal(made, exact.bfloat16())


def test_similarities_count_in_float64_and_a_zero_expert_is_similar_to_none():
    one, two = experts(2)
    zero = {name: torch.zeros_like(tensor) for name, tensor in one.items()}
    vectors = [flat(e) for e in (one, two, zero)]
    _, (descent,) = expand([one, two, zero], 4, similarity="values")
    wanted = min((cosine(vectors[j], vectors[k]), j, k) for k in range(3) for j in range(k))
    assert descent.parents == wanted[1:] and descent.similarity == near(wanted[0], dtype=torch.float64)
    twin = {name: 2 * tensor for name, tensor in one.items()}
    _, (descent,) = expand([one, twin, zero], 4)
    assert (descent.parents, descent.similarity) == ((0, 2), 0.0)
    updates_NRI = torch.stack([one[f"base_model.model.{next(iter(MODULES))}.lora_A.weight"], torch.zeros(3, 7)])
    assert_near(similarities(value_gram(updates_NRI.flatten(1), chunk=4)), torch.eye(2).double())


def test_random_pairs_and_seeds():
    parents = experts(4)
    first, again, other = (expand(parents, 12, method="random", seed=seed) for seed in (0, 0, 1))
    assert first[1] == again[1] != other[1]
    for one, two in zip(first[0], again[0], strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert len({descent.parents for descent in first[1]}) > 3
    assert all(descent.similarity is None and descent.parents[0] < descent.parents[1] for descent in first[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 2}, "num_experts=2: 3 experts are given"),
        ({"method": "none"}, "method='none' makes none"),
    ],
)
def test_wrong_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        expand(experts(3), **{"num_experts": 4, **arguments})


def test_experts_that_differ_are_refused():
    one, two = experts(2)
    two = dict(two)
    two.popitem()
    with pytest.raises(ValueError, match=r"experts\[1\] differs"):
        expand([one, two], 3)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"lora_alpha": 16}, "lora_alpha=16, but .*one has 8"),
        ({"r": 2}, "r=2, but .*one has 4"),
        ({"use_rslora": True}, "use_rslora=True, but .*one has False"),
        ({"rank_pattern": {"up_proj": 2}}, "rank_pattern={'up_proj': 2}, but .*one has {}"),
        ({"alpha_pattern": {"up_proj": 2}}, "alpha_pattern={'up_proj': 2}, but .*one has {}"),
    ],
)
def test_adapters_that_scale_differently_are_refused(own, message, tmp_path):
    base = tiny_llama(layers=1, hidden=16)
    for name, settings in (("one", {}), ("two", own)):
        config = LoraConfig(**{"r": 4, "lora_alpha": 8, **settings}, target_modules=["up_proj"], task_type="CAUSAL_LM")
        get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path / name)
    with pytest.raises(ValueError, match=f"two': {message}; they must agree"):
        expand_experts([tmp_path / "one", tmp_path / "two"], output_dir=tmp_path / "more", num_experts=3)
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_experts_are_not_expanded_onto_themselves(order, tmp_path):
    base = tiny_llama(layers=1, hidden=16)
    for i in (0, 1):
        config = LoraConfig(r=i + 2, target_modules=["up_proj"], task_type="CAUSAL_LM")
        get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path / "experts" / str(i))
    before = contents(tmp_path)
    given = [tmp_path / "experts" / str(i) for i in order]
    for expand_own in (expand_experts, partial(expand_checkpoints, base=tmp_path)):
        with pytest.raises(ValueError, match=r"output_dir=.*: .*experts/\d would be overwritten; choose another"):
            expand_own(given, output_dir=tmp_path, num_experts=3)
    assert contents(tmp_path) == before


def test_a_descent_as_a_record_and_the_default_seed():
    parents = experts(2)
    family, (descent,) = expand(parents, 3)
    assert asdict(descent) == {
        "expert": 2,
        "parents": (0, 1),
        "alpha": descent.alpha,
        "drop_rate": 0.2,
        "similarity": descent.similarity,
    }
    again, _ = expand(parents, 3, seed=0)
    assert all(torch.equal(family[2][name], again[2][name]) for name in family[2])


@pytest.mark.parametrize(("method", "similarity"), [("genetic", "values"), ("none", "update")])
def test_as_many_experts_as_are_given_are_given_back(method, similarity):
    for count in (1, 2):
        parents = experts(count)
        family, descents = expand(parents, count, method=method, similarity=similarity)
        assert descents == [] and len(family) == count
        assert all(one is other for one, other in zip(family, parents, strict=True))


def test_experts_of_whole_tensors_expand_by_their_values_or_at_random():
    parents = [{"w": torch.randn(3, 2), "v": torch.randn(4)} for _ in range(2)]
    for settings in ({"similarity": "values"}, {"method": "random"}):
        assert len(expand(parents, 3, **settings)[0]) == 3


A = "model.lora_A.weight"
UNLIKE = "differs from experts[0] in names, shapes or dtypes; adapt the same modules"


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ([{A: 1.0}], {}, "num_experts=2: 1 experts are given and expansion needs two parents; give more experts"),
        (
            [{A: 1.0}] * 2,
            {"num_experts": 3, "method": "none"},
            "num_experts=3: 2 experts are given and method='none' makes none; give more experts",
        ),
        ([{A: 1.0}] * 3, {}, "num_experts=2: 3 experts are given; ask for that many or more"),
        ([{A: 1.0}, {A: torch.inf}], {}, f"experts[1]: {A} holds NaN or infinity; train or save it again"),
        ([{A: torch.nan}, {A: 1.0}], {}, f"experts[0]: {A} holds NaN or infinity; train or save it again"),
        ([{A: 1.0}, {A: torch.ones(2)}], {}, f"experts[1] {UNLIKE}"),
        ([{A: 1.0}, {A: torch.ones((), dtype=torch.bfloat16)}], {}, f"experts[1] {UNLIKE}"),
        ([{A: 1.0}, {"other.lora_A.weight": 1.0}], {}, f"experts[1] {UNLIKE}"),
    ],
)
def test_what_is_refused_is_shown(given, settings, message):
    parents = [{name: torch.as_tensor(value) for name, value in expert.items()} for expert in given]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        expand(parents, **{"num_experts": 2, **settings})


@pytest.mark.parametrize("similarity", ["update", "values"])
def test_folders_are_expanded_as_their_weights_are(similarity, tmp_path):
    base = tiny_llama(layers=1, hidden=16)
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        config = LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(copy.deepcopy(base), config).save_pretrained(folder)
    own = {"similarity": similarity, "drop_rate": 0.3, "seed": 5}
    made, descents = expand_experts(folders, output_dir=tmp_path / "more", num_experts=6, **own)
    parents = [load_peft_weights(str(folder), device="cpu") for folder in folders]
    family, expected = expand(parents, 6, **own)
    assert descents == expected and len(made) == 6
    for folder, expert in zip(made, family, strict=True):
        found = load_peft_weights(str(folder), device="cpu")
        assert found.keys() == expert.keys() and all(torch.equal(found[name], expert[name]) for name in found)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_updates_are_compared_as_they_are_added_to_the_base(use_rslora, tmp_path):
    """With patterns, modules differ in scaling: the reference is what merging an adapter adds to the weights."""
    base, folders, added = tiny_llama(), [tmp_path / str(i) for i in range(3)], []
    for i, folder in enumerate(folders):
        torch.manual_seed(i)
        config = LoraConfig(
            r=2, lora_alpha=3, target_modules=["up_proj", "down_proj"], init_lora_weights=False, use_rslora=use_rslora,
            rank_pattern={r"layers\.0\.mlp\.up_proj": 4}, alpha_pattern={"down_proj": 60}, task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(copy.deepcopy(base), config)
        model.save_pretrained(folder)
        merged, start = model.merge_and_unload().double().state_dict(), base.state_dict()
        added.append(torch.cat([(merged[name] - start[name]).flatten() for name in start if ".mlp." in name]))
    full = torch.stack(added)
    expected = torch.nn.functional.cosine_similarity(full[:, None], full[None], dim=-1)
    _, descents = expand_experts(folders, output_dir=tmp_path / "stage", num_experts=4)
    off = expected + 2 * torch.eye(3)
    assert descents[0].similarity == near(off.min().item(), scale=1.0)
    assert sorted(descents[0].parents) == sorted(divmod(int(off.argmin()), 3))
    states = [load_peft_weights(str(folder), device="cpu") for folder in folders]
    alike = expand(states, 4)[1][0].similarity
    assert alike != pytest.approx(descents[0].similarity, abs=1e-3)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"use_dora": True}, "use_dora=True: DoRA rescales"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight: is not a weight of a LoRA on a linear"),
        ({"trainable_token_indices": [5]}, "trainable_tokens_delta: is not a weight"),
    ],
)
def test_what_is_more_than_loras_of_linears_is_not_merged(own, message, tmp_path):
    config = LoraConfig(r=2, target_modules=["up_proj"], task_type="CAUSAL_LM", **own)
    for name in ("one", "two"):
        get_peft_model(tiny_llama(layers=1, hidden=16), copy.deepcopy(config)).save_pretrained(tmp_path / name)
    with pytest.raises(ValueError, match=f"one': .*{message}"):
        expand_experts([tmp_path / "one", tmp_path / "two"], output_dir=tmp_path / "more", num_experts=3)
