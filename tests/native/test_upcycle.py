"""Dense checkpoints to native MoEs: which initializations keep the function, statistics, files, refusals."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from moe_peft.cli import main
from moe_peft.cli.upcycle import parser
from moe_peft.native import ExpertInit, UpcycleConfig, upcycle
from moe_peft.native.expert_init import FFN, generator_for
from moe_peft.native.families import FAMILIES, FUSED, SEPARATE
from moe_peft.native.folders import open_dense
from moe_peft.native.moe_config import backbone_shapes, moe_config
from moe_peft.native.safetensors_io import ShardedWriter
from moe_peft.native.upcycle import Upcycled
from moe_peft.utils.io import new_folder, parse_size
from tests.helpers.close import assert_near
from tests.helpers.native_case import DENSE, IDS, MOE, dense_model, logits, saved
from tests.helpers.warm import kill_at, run_module


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """A saved model of each dense family."""
    root = tmp_path_factory.mktemp("dense")
    return {kind: saved(dense_model(kind), root / kind) for kind in DENSE}


def ffn_of(f=64, d=48, seed=0) -> FFN:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((f, d), (f, d), (d, f))
    return FFN(*(torch.randn(s, generator=generator) * (i + 1) + i for i, s in enumerate(shapes)))


def output(ffn: FFN, x: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ ffn.gate.T) * (x @ ffn.up.T)) @ ffn.down.T


# --- what keeps the function ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), [
    ("llama", {"sliding_window": 4}),  # no field of Llama's: it is not read
    ("qwen3", {"num_local_experts": 4}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 28}),  # no such layers
])  # fmt: skip
def test_settings_that_the_dense_model_does_not_follow_are_not_the_moes(kind, options, folders, tmp_path):
    shutil.copytree(folders[kind], tmp_path / "dense")
    path = tmp_path / "dense" / "config.json"
    fields = {name: value for name, value in json.loads(path.read_text()).items() if name != "layer_types"}
    path.write_text(json.dumps({**fields, **options}))
    made = upcycle(tmp_path / "dense", tmp_path / "moe", UpcycleConfig(num_experts=4))
    expected, actual = (logits(AutoModelForCausalLM.from_pretrained(folder)) for folder in (tmp_path / "dense", made))
    assert_near(actual, expected)


def test_models_may_be_named_one_by_one(folders):
    options = parser("upcycle").parse_args(["--model", "a", "--model", "b", "c", "--output", "o"])
    assert options.model == ["a", "b", "c"]


@pytest.mark.parametrize(("options", "words"), [
    (["--calibration-examples", "5"], "--calibration-examples=5: goes with calibration"),
    (["--fine-grained-split", "independent"], "--fine-grained-split='independent': --granularity=1 splits no expert"),
])  # fmt: skip
def test_an_option_without_what_it_is_for_is_refused(options, words, folders, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["upcycle", "--model", folders["llama"], "--output", str(tmp_path / "out"), *options])
    assert end.value.code == 2 and words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_every_family_is_tried():
    assert {dense.model_type for family in FAMILIES.values() for dense in family.dense} == DENSE.keys()


KEEPING = [
    {"init": "copy"}, {"init": "permute"}, {"granularity": 3}, {"granularity": 2, "init": "permute", "top_k": 1},
    {"router_init": "uniform", "top_k": 1}, {"router_init": "zeros", "num_experts": 3}, {"granularity": 4, "top_k": 4},
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, settings",
    [(kind, KEEPING[(2 * i + j) % len(KEEPING)]) for i, kind in enumerate(DENSE) for j in range(2)],
    ids=str,
)
def test_logits_are_the_dense_models(kind, settings, folders, tmp_path):
    out = upcycle(folders[kind], tmp_path / "moe", UpcycleConfig(**{"num_experts": 4, **settings}))
    config = json.loads((out / "config.json").read_text())
    family, m = FAMILIES[MOE[kind]], settings.get("granularity", 1)
    assert config["model_type"] == MOE[kind] and config[family.count] == settings.get("num_experts", 4) * m
    assert config["num_experts_per_tok"] == settings.get("top_k", 2) * m and config[family.width] == 48 // m
    expected = logits(folders[kind])
    assert_near(logits(out), expected)


def test_without_weight_scaling_the_output_is_another(folders, tmp_path):
    config = UpcycleConfig(num_experts=4, granularity=2, weight_scaling=False)
    assert (logits(upcycle(folders["llama"], tmp_path / "moe", config)) - logits(folders["llama"])).abs().max() > 0.1


def test_untied_embeddings_and_half_precision(folders, tmp_path):
    config = UpcycleConfig(num_experts=2, dtype="bfloat16")
    out = upcycle(folders["qwen3"], tmp_path / "moe", config)
    tensors = load_file(out / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    torch.testing.assert_close(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"], rtol=0, atol=0)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert not model.config.tie_word_embeddings and not model.config.output_router_logits
    assert model.dtype == torch.bfloat16


def test_an_upcycled_model_trains_with_its_balancing_loss(folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(upcycle(folders["mistral"], tmp_path / "moe")).train()
    out = model(input_ids=IDS, labels=IDS, output_router_logits=True)
    out.loss.backward()
    assert out.aux_loss > 1.5 and all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.model.layers)


# --- initial values of one expert -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rate", [0.0, 0.25, 0.5, 1.0])
def test_drop_draws_chosen_neurons_anew_and_leaves_the_rest(rate, shared):
    f, d = 400, 300
    ffn = ffn_of(f, d)
    init = ExpertInit("drop", drop_rate=rate, shared_indices=shared)
    first, second = (init.make(ffn, i, 8, generator_for(1, 0, i)) for i in (0, 1))
    changed = []
    for i, (new, old) in enumerate(zip(first, ffn, strict=True)):
        rows_new, rows_old = (new.T, old.T) if i == 2 else (new, old)
        same = (rows_new == rows_old).all(1)
        changed.append(~same)
        assert int((~same).sum()) == int(rate * f)
        torch.testing.assert_close(rows_new[same], rows_old[same], rtol=0, atol=0)
        if rate:
            drawn, replaced = rows_new[~same], rows_old[~same]
            assert (drawn != replaced).float().mean() > 0.999
            error = float(replaced.std()) / math.sqrt(replaced.numel())
            assert abs(float(drawn.mean() - replaced.mean())) < 5 * error
            assert abs(float(drawn.std() / replaced.std()) - 1) < 5 / math.sqrt(2 * replaced.numel())
    assert torch.equal(changed[0], changed[1]) == (shared or rate in (0.0, 1.0))
    assert torch.equal(changed[0], changed[2]) == (shared or rate in (0.0, 1.0))
    common = float((first.gate == second.gate).float().mean())
    deviation = math.sqrt(0.25 / f)
    assert abs(common - (1 - rate) ** 2) < 5 * deviation, "overlap of two experts"


def test_noise_has_its_size():
    ffn = ffn_of(300, 200)
    noisy = ExpertInit("noise", noise_scale=0.03).make(ffn, 0, 4, generator_for(0))
    for new, old in zip(noisy, ffn, strict=True):
        assert abs(float((new - old).std() / old.std()) - 0.03) < 5e-4
    some = ExpertInit("random_noise", noise_std=0.1, noise_share=0.25).make(ffn, 0, 4, generator_for(0))
    for new, old in zip(some, ffn, strict=True):
        changed = new != old
        assert abs(float(changed.float().mean()) - 0.25) < 0.01
        assert abs(float((new - old)[changed].std()) - 0.1) < 2e-3


def test_subsets_add_up_and_a_permutation_is_consistent():
    ffn = ffn_of(61).scaled(0.01)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    parts = [ExpertInit("subset").make(ffn, i, 4, generator_for(0)) for i in range(4)]
    assert_near(sum(output(part, x) for part in parts), output(ffn, x))
    assert sum(int((part.gate != 0).any(1).sum()) for part in parts) == 61
    permuted = ExpertInit("permute").make(ffn, 0, 4, generator_for(0))
    assert not torch.equal(permuted.gate, ffn.gate)
    assert_near(output(permuted, x), output(ffn, x))


# --- several checkpoints, given routers -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "phi3", "granite"])
def test_checkpoints_become_experts_and_the_rest_their_average(kind, tmp_path):
    models = [dense_model(kind, seed) for seed in range(3)]
    names = [saved(model, tmp_path / f"m{i}") for i, model in enumerate(models)]
    torch.manual_seed(9)
    routers = {i: torch.randn(5, 32) for i in range(2)}
    save_file({str(i): weight for i, weight in routers.items()}, tmp_path / "routers.safetensors")
    settings = {"num_experts": 5, "init": "checkpoints", "router_init": "given"}
    config = UpcycleConfig(**settings, router_weights=str(tmp_path / "routers.safetensors"))
    moe = AutoModelForCausalLM.from_pretrained(upcycle(names, tmp_path / "moe", config))
    again = upcycle(names, tmp_path / "again", config, routers)
    assert (tmp_path / "moe/model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    states = [model.state_dict() for model in models]
    for name, value in moe.state_dict().items():
        if name in states[0]:
            mean = torch.stack([state[name].double() for state in states]).mean(0).float()
            torch.testing.assert_close(value, mean, rtol=0, atol=0)
    x = torch.randn(7, 32)
    for i, layer in enumerate(moe.model.layers):
        block = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
        p = (x @ routers[i].T).softmax(-1)
        values, chosen = p.topk(2)
        ffns = [model.model.layers[i].mlp for model in models]
        expected = torch.stack([
            sum(v * ffns[int(e) % 3](x[t]) for v, e in zip(values[t] / values[t].sum(), chosen[t], strict=True))
            for t in range(7)
        ])  # fmt: skip
        actual = block(x.unsqueeze(0))
        actual = (actual[0] if isinstance(actual, tuple) else actual).squeeze(0)
        assert_near(actual, expected)


# --- families -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [SEPARATE, FUSED])
def test_an_ffn_is_stored_under_its_names_and_read_back(names):
    ffn = ffn_of(5, 3)
    names = names.under("block.")
    stored = names.join(ffn)
    assert {name: tensor.shape for name, tensor in stored.items()} == names.shapes(5, 3)
    assert all(map(torch.equal, names.split(stored.__getitem__), ffn))


@pytest.mark.parametrize("kind", DENSE)
def test_a_family_names_the_tensors_of_its_models(kind, folders):
    """FFNs by their names and shapes; the backbone is complete under the names of the MoE."""
    dense = open_dense(folders[kind])
    stored = load_file(f"{folders[kind]}/model.safetensors")
    ffns = dense.family.ffn_shapes(dense.config)
    assert ffns == {name: tensor.shape for name, tensor in stored.items() if ".mlp." in name}
    shapes = backbone_shapes(moe_config((dense.family, dense.moe), dense.config, num_experts=4, top_k=2, width=48))
    assert all(dense.backbone(name).shape == shape for name, shape in shapes.items())


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["drop", "noise"])
def test_same_seed_same_bytes_whatever_the_shards(init, folders, tmp_path):
    def tensors(name: str, **options) -> dict[str, torch.Tensor]:
        out = upcycle(folders["llama"], tmp_path / name, UpcycleConfig(num_experts=3, init=init, **options))
        files = sorted(out.glob("*.safetensors"))
        return {key: value for file in files for key, value in load_file(file).items()}

    full, shards, other = tensors("a"), tensors("b", max_shard_size="20KB"), tensors("c", seed=1)
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 3
    assert full.keys() == shards.keys() and all(torch.equal(full[key], shards[key]) for key in full)
    assert any(not torch.equal(full[key], other[key]) for key in full)
    torch.testing.assert_close(logits(tmp_path / "b"), logits(tmp_path / "a"), rtol=0, atol=0)
    index = json.loads((tmp_path / "b/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in full.values())
    for file in (tmp_path / "b").glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            assert all(index["weight_map"][key] == file.name for key in shard.keys())  # noqa: SIM118


@pytest.mark.parametrize("kind, names", [
    ("llama", "block_sparse_moe.gate block_sparse_moe.experts.0.w1 block_sparse_moe.experts.1.w2"),
    ("qwen2", "mlp.gate mlp.experts.1.gate_proj mlp.shared_expert.up_proj mlp.shared_expert_gate"),
    ("qwen3", "mlp.gate mlp.experts.0.down_proj"),
    ("granite", "block_sparse_moe.router.layer block_sparse_moe.input_linear"),
])  # fmt: skip
def test_names_on_disk_are_those_that_other_stacks_read(kind, names, folders, tmp_path):
    out = upcycle(folders[kind], tmp_path / "moe", UpcycleConfig(num_experts=2))
    result = set(load_file(out / "model.safetensors"))
    assert {f"model.layers.1.{name}.weight" for name in names.split()} <= result


def test_tokenizer_and_generation_config_come_along(folders, tokenizer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders["mistral"])
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "dense")
    tokenizer = copy.deepcopy(tokenizer)  # the other tests' has no template
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "dense")
    out = upcycle(tmp_path / "dense", tmp_path / "moe", UpcycleConfig(num_experts=2))
    assert AutoTokenizer.from_pretrained(out)("w5 w7")["input_ids"] == tokenizer("w5 w7")["input_ids"]
    assert AutoTokenizer.from_pretrained(out).chat_template == "{{ messages }}"
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.max_new_tokens == 7


def test_fields_that_a_dense_class_does_not_know_do_not_matter(folders, tmp_path):
    """Configs of real models have some (`use_mrope`, `is_llama_config`)."""
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    model.config.rope_interleaved = True
    name = saved(model, tmp_path / "dense")
    assert "rope_interleaved" in (tmp_path / "dense/config.json").read_text()
    assert_near(logits(upcycle(name, tmp_path / "moe")), logits(name))


def test_one_process_at_a_time_writes_a_folder(tmp_path):
    inner = []
    with new_folder(tmp_path / "moe") as folder:
        (folder / "model.safetensors").touch()
        with (
            pytest.raises(ValueError, match="another process is writing it"),
            new_folder(tmp_path / "moe"),
        ):
            inner.append(True)
        assert (folder / "model.safetensors").exists()
    assert not inner and [path.name for path in tmp_path.iterdir()] == ["moe"]


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_that_loads_and_the_next_one_is_complete(tmp_path):
    """SIGKILL while layers are written."""
    saved(dense_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4), tmp_path / "dense")
    command = ["upcycle", "--model", str(tmp_path / "dense"), "--output", str(tmp_path / "moe"), "--init", "drop"]
    killed = run_module("moe_peft", *command, before=partial(kill_at, ShardedWriter, "write", 50))
    assert killed.returncode == -signal.SIGKILL
    (begun,) = tmp_path.glob(".moe*")
    assert (begun / "model.safetensors").stat().st_size > 10**6 and not (begun / "config.json").exists()
    assert {path.name for path in (tmp_path / "moe").iterdir()} <= {".lock"}
    main(command)
    assert not begun.exists()
    expected = upcycle(tmp_path / "dense", tmp_path / "other", UpcycleConfig(init="drop"))
    assert (tmp_path / "moe/model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 1), (1, 1)])
def test_experts_do_not_depend_on_which_layers_came_before(order, folders):
    """A layer's are begun while the one before is written."""
    config = UpcycleConfig(num_experts=5, init="drop", granularity=2)
    sources = [open_dense(folders["llama"])]
    made = Upcycled(sources, config, None)
    next(made.experts(1))  # and left
    for layer in order:
        actual, expected = list(made.experts(layer)), list(Upcycled(sources, config, None).experts(layer))
        assert len(actual) == len(expected) == 10
        for one, other in zip(actual, expected, strict=True):
            assert all(map(torch.equal, one, other))


def drawn_by(*key) -> torch.Generator:
    """The generator of a key, written out: a file made with a seed must be the same in every version."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@pytest.mark.parametrize("split", ["partition", "independent"])
@pytest.mark.parametrize(
    ("init", "options"),
    [
        ("random_noise", {"noise_std": 0.4, "noise_share": 0.7}),
        ("drop", {"drop_rate": 0.25, "shared_indices": False}),
        ("subset", {}),
    ],
)
def test_everything_is_drawn_by_seed_layer_and_place(init, options, split, folders):
    """Gates, neurons, routed experts and the shared block, each from a generator of its own."""
    source, n, m, shared, seed = open_dense(folders["llama"]), 3, 2, 1, 7
    config = UpcycleConfig(n, 2, granularity=m, num_shared_experts=shared, fine_grained_split=split, init=init,
                           seed=seed, router_init_std=0.3, weight_scaling=False, **options)  # fmt: skip
    made, method = Upcycled([source], config, None), ExpertInit(init, **options)
    d, f = source.config.hidden_size, source.config.intermediate_size
    for layer in range(source.config.num_hidden_layers):
        ffn = source.ffn(layer)
        gates = n if split == "partition" else n * m
        drawn = torch.empty(gates, d).normal_(std=0.3, generator=drawn_by(seed, layer, "router"))
        drawn = drawn.repeat_interleave(n * m // gates, dim=0)[shared:]
        if split == "partition":  # experts that would tie, of which not all are active
            drawn += 0.01 * drawn.std() * torch.empty(drawn.shape).normal_(generator=drawn_by(seed, layer, "ties"))
        assert torch.equal(made.router(layer), drawn)
        full = torch.randperm(f, generator=drawn_by(seed, layer, 0, "shards"))
        block = method.make(ffn.neurons(full[: shared * f // m]), 0, 1, drawn_by(seed, layer, "shared"))
        for one, other in zip(made.shared(layer), (block.gate, block.up, 2 * block.down), strict=True):
            assert_near(one, other)
        experts = list(made.experts(layer))
        for index in range(shared, n * m):
            expert, part = divmod(index, m)
            if split == "partition":
                order = torch.randperm(f, generator=drawn_by(seed, layer, expert, "shards"))[part * f // m :][: f // m]
            else:
                order = torch.randperm(f, generator=drawn_by(seed, layer, expert, "neurons", part))[: f // m]
            wanted = method.make(ffn.neurons(order), index, n * m, drawn_by(seed, layer, index))
            assert all(map(torch.equal, experts[index - shared], wanted))


def test_the_backbone_of_two_models_is_their_average(folders, tmp_path):
    other = saved(dense_model("llama", seed=5), tmp_path / "other")
    sources = [open_dense(folder) for folder in (folders["llama"], other)]
    made = Upcycled(sources, UpcycleConfig(num_experts=2, init="checkpoints"), None)
    name = "model.layers.1.self_attn.q_proj.weight"
    parts = [load_file(f"{folder}/model.safetensors")[name].double() for folder in (folders["llama"], other)]
    assert_near(made.backbone(name), sum(parts) / 2)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({}, (3, 32), "router_weights: layer 0 has shape (3, 32); give (4, 32) for every layer"),
        ({"granularity": 2}, (3, 32), "layer 0 has shape (3, 32); give (4, 32) or (8, 32) for every layer"),
        (
            {"granularity": 2, "fine_grained_split": "independent"},
            (4, 32),
            "give (8, 32) for every layer",
        ),
    ],
)
def test_gates_of_another_shape(options, shape, message, folders):
    sources = [open_dense(folders["llama"])]
    config = UpcycleConfig(num_experts=4, **options)
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        Upcycled(sources, config, {layer: torch.zeros(shape) for layer in range(2)})


@pytest.mark.parametrize("field, value, remedy", [
    ("num_experts", 0, "from 1 to"), ("top_k", 9, "at most num_experts=8"), ("init", "coppy", "copy, noise"),
    ("router_init", "attentive", "normal, uniform"), ("drop_rate", 1.5, "from 0 to 1"), ("noise_std", -1, "from 0 to"),
    ("router_init", "given", "goes with"), ("granularity", 0, "from 1 to"), ("router_num_heads", 0, "from 1 to"),
    ("dtype", "bf16", "float32, bfloat16"), ("max_shard_size", "0GB", "above 0"),
    ("num_shared_experts", 2, "below .*=2"), ("fine_grained_split", "random", "partition, independent"),
    ("router_aux_loss_coef", -0.1, "from 0 to"), ("router_aux_loss_coef", math.nan, "from 0 to"),
    ("router_init_std", -1, "from 0 to"), ("noise_scale", 1e300, "1000"), ("noise_scale", 10**400, "1000"),
    ("num_shared_experts", -1, "from 0 to"), ("drop_rate", 0.3, "^drop_rate=0.3: goes with init='drop'"),
    ("noise_share", 0.1, "goes with init='random_noise'"), ("shared_indices", False, "goes with init='drop'"),
    ("router_num_heads", 2, "goes with router_init='attention'"), ("router_weights", "x", "router_init='given'"),
])  # fmt: skip
def test_wrong_settings(field, value, remedy):
    with pytest.raises(ValueError, match=remedy):
        UpcycleConfig(**{field: value})


def test_sizes_are_bytes_in_either_case():
    sizes = {"5GB": 5 * 10**9, "1.5mb": 1_500_000, "20kb": 20_000, "1000000": 10**6}
    assert {size: parse_size(size) for size in sizes} == sizes


def test_there_may_be_more_shards_than_open_files(folders, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 25, limits[1]))
    try:
        out = upcycle(folders["llama"], tmp_path / "a", UpcycleConfig(num_experts=8, max_shard_size="7KB"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list(out.glob("*.safetensors"))) > 50
    full = upcycle(folders["llama"], tmp_path / "b", UpcycleConfig(num_experts=8))
    torch.testing.assert_close(logits(out), logits(full), rtol=0, atol=0)


def changed(source: str, folder: Path, change) -> Path:
    """A copy of a model folder whose tensors a function has changed."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_head_on_disk_has_the_shape_that_the_config_says(folders, tmp_path):
    """Though the model ties it to the embeddings, and does not read it."""
    folder = changed(folders["qwen3"], tmp_path / "a", lambda t: t.update({"lm_head.weight": torch.ones(100, 32)}))
    with pytest.raises(ValueError, match=r"lm_head.weight is \[100, 32\], its config says \[128, 32\]"):
        upcycle(folder, tmp_path / "moe", UpcycleConfig(num_experts=2))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_bfloat16_overflows_float16(folders, tmp_path):
    def change(tensors):
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})
        tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e5

    folder = changed(folders["llama"], tmp_path / "a", change)
    with pytest.raises(ValueError, match=r"values up to .*e\+0[45] overflow dtype float16; use bfloat16"):
        upcycle(folder, tmp_path / "moe", UpcycleConfig(num_experts=2, dtype="float16"))


def test_a_config_without_a_dtype_leaves_that_of_the_tensors(folders, tmp_path):
    folder = changed(folders["llama"], tmp_path / "a", lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if "dtype" not in k}))
    out = upcycle(folder, tmp_path / "moe", UpcycleConfig(num_experts=2))
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "field", ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"]
)
def test_models_of_other_multipliers_are_not_averaged(field, folders, tmp_path):
    other = saved(dense_model("granite", 1, **{field: 2.5}), tmp_path / "other")
    with pytest.raises(ValueError, match=f"different architecture .*: {field}=2.5"):
        upcycle([folders["granite"], other], tmp_path / "moe", UpcycleConfig(num_experts=2))


@pytest.mark.parametrize("size", ["-1GB", "0.1", "GB", "5TB", "nanGB", "²GB", "5"])
def test_sizes_without_a_positive_number_are_refused(size):
    with pytest.raises(ValueError, match=r"max_shard_size=.*give a number above 0 with KB, MB or GB"):
        UpcycleConfig(max_shard_size=size)


def refused(tmp_path, message, models, **settings):
    with pytest.raises(ValueError, match=message) as raised:
        upcycle(models, tmp_path / "moe", UpcycleConfig(**settings))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "moe").exists() and not list(tmp_path.glob(".moe*"))


def test_folders_that_were_made_for_nothing_go_again(folders, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moe_peft.native.model_folder.ShardedWriter", full)
    with pytest.raises(OSError, match="No space"):
        upcycle(folders["llama"], tmp_path / "a" / "b" / "moe", UpcycleConfig())
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="No space"):
        upcycle(folders["llama"], tmp_path / "a" / "b" / "moe", UpcycleConfig())
    assert (tmp_path / "a").is_dir() and not (tmp_path / "a" / "b").exists()


def test_no_model_is_left_out(folders, tmp_path):
    three = [folders["llama"]] * 3
    refused(
        tmp_path,
        "num_experts=2: there are 3 models; ask for at least as many",
        three,
        num_experts=2,
        init="checkpoints",
    )


def test_what_a_family_cannot_hold_is_refused_by_name(folders, tmp_path):
    biased = saved(dense_model("llama", attention_bias=True), tmp_path / "biased")
    refused(tmp_path, "attention_bias=True of the dense model: mixtral has no such setting", biased)
    ffn = saved(dense_model("llama", mlp_bias=True), tmp_path / "mlp")
    refused(tmp_path, "mlp_bias=True of the dense model: mixtral has no such setting", ffn)
    for kind, moe in (("qwen2", "qwen2_moe"), ("olmo2", "flex_olmo"), ("granite", "granitemoe")):  # configs without it
        heads = saved(dense_model(kind, head_dim=16), tmp_path / f"heads-{kind}")
        refused(tmp_path, f"head_dim=16 of the dense model: {moe} has no such setting", heads)
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    windows = saved(dense_model("qwen3", **sliding), tmp_path / "windows")
    refused(tmp_path, "layer_types|max_window_layers|sliding", windows)
    refused(
        tmp_path, "num_shared_experts=1: mixtral has no shared experts; use 0", folders["llama"], num_shared_experts=1
    )
    refused(tmp_path, "'llama' model does not become qwen3_moe.*llama → mixtral", folders["llama"], family="qwen3_moe")
    refused(tmp_path, "granularity=5: must divide .* 48", folders["llama"], granularity=5)
    for settings in ({"granularity": 8}, {"granularity": 4, "dtype": "bfloat16"}):
        refused(tmp_path, "neurons in .* are rows of 24 bytes", folders["llama"], **settings)
    refused(tmp_path, "init='checkpoints': give two", folders["llama"], init="checkpoints")
    refused(tmp_path, "has a different architecture", [folders["llama"], folders["qwen3"]])
    other = dense_model("mistral", rope_parameters={"rope_type": "default", "rope_theta": 9.0})
    refused(
        tmp_path, "different architecture .*: rope_parameters", [folders["mistral"], saved(other, tmp_path / "rope")]
    )


@pytest.mark.parametrize("options, message", [
    ({"resid_pdrop": 0.1}, "resid_pdrop=0.1 of the dense model: mixtral has no such setting"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}},
     "partial_rotary_factor=0.5 of the dense model: a MoE rotates all of a head"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 300.0, "factor": 2.0, "short_factor": [1.0] * 4,
                          "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}},
     "rope_type='longrope' of the dense model: "),
], ids=["dropout", "partial rotary", "longrope"])  # fmt: skip
def test_what_a_mixtral_cannot_hold_of_phi3(options, message, tmp_path):
    refused(tmp_path, message, saved(dense_model("phi3", **options), tmp_path / "dense"))


@pytest.mark.parametrize("kind", ["glm", "glm4"])
def test_models_that_no_moe_holds_are_refused_with_the_reason(kind, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path / "dense")
    message = f"'{kind}' model does not become a native MoE .*no MoE has its rotary embedding.*llama → mixtral"
    refused(tmp_path, message, str(tmp_path / "dense"))


def test_broken_checkpoints_are_refused(folders, tmp_path):
    model = dense_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    refused(tmp_path, "layers.1.mlp.up_proj.weight holds NaN", saved(model, tmp_path / "nan"))
    complete = load_file(f"{folders['llama']}/model.safetensors")
    model.config.save_pretrained(tmp_path / "lacking")
    without = {k: v for k, v in complete.items() if "1.mlp.down" not in k}
    save_file(without, tmp_path / "lacking/model.safetensors")
    refused(tmp_path, "no tensor model.layers.1.mlp.down_proj.weight", str(tmp_path / "lacking"))
    save_file({**complete, "model.layers.0.extra": torch.zeros(2)}, tmp_path / "lacking/model.safetensors")
    refused(tmp_path, "extra is .*its config says nothing", str(tmp_path / "lacking"))
    data = (tmp_path / "lacking/model.safetensors").read_bytes()
    (tmp_path / "lacking/model.safetensors").write_bytes(data[: len(data) // 2])
    refused(tmp_path, "cannot be read", str(tmp_path / "lacking"))
    (tmp_path / "lacking/model.safetensors").unlink()
    refused(tmp_path, "save the model with save_pretrained", str(tmp_path / "lacking"))
    refused(tmp_path, "model='.*nothing'", str(tmp_path / "nothing"))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"output_dir=.*is not empty; choose another"):
        upcycle(folders["llama"], tmp_path / "there")
    with pytest.raises(ValueError, match="layer 0 holds NaN"):
        upcycle(folders["llama"], tmp_path / "moe", UpcycleConfig(), {0: torch.full((8, 32), torch.nan)})
    with pytest.raises(ValueError, match="layer 1 has no tensor"):
        upcycle(folders["llama"], tmp_path / "moe", UpcycleConfig(), {0: torch.zeros(8, 32)})


# --- from scratch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_from_scratch_nothing_is_the_models(kind, folders, tmp_path):
    """Router Upcycling, section 4.2: "a normal initialization (mean 0, std 0.02) is applied to all parameters"."""
    dense = load_file(Path(folders[kind], "model.safetensors"))
    made = load_file(
        upcycle(folders[kind], tmp_path / "scratch", UpcycleConfig(num_experts=4, init="scratch")) / "model.safetensors"
    )
    for name, weight in made.items():
        if weight.dim() == 1:
            assert weight.eq(float(not name.endswith("bias"))).all(), name
        elif "shared_expert" not in name:  # which is empty
            assert abs(float(weight.mean())) < 5 * 0.02 / weight.numel() ** 0.5, name
            assert float(weight.std()) == pytest.approx(0.02, rel=5 / weight.numel() ** 0.5), name
            assert name not in dense or not torch.equal(weight, dense[name])
    matrices = [weight for name, weight in made.items() if weight.dim() > 1 and "shared_expert" not in name]
    assert len({float(weight.flatten()[0]) for weight in matrices}) == len(matrices)  # no two are the same
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "scratch")
    assert model(input_ids=IDS, labels=IDS).loss.item() == pytest.approx(math.log(model.config.vocab_size), rel=0.1)


def test_random_experts_beside_the_models_other_weights(folders, tmp_path):
    dense = load_file(Path(folders["llama"], "model.safetensors"))
    config = UpcycleConfig(num_experts=4, init="random", noise_std=0.1)
    made = load_file(upcycle(folders["llama"], tmp_path / "random", config) / "model.safetensors")
    experts = [weight for name, weight in made.items() if ".experts." in name]
    assert all(float(weight.std()) == pytest.approx(0.1, rel=0.1) for weight in experts)
    for name, weight in dense.items():
        assert name not in made or torch.equal(made[name], weight)
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} <= dense.keys() & made.keys()
