"""UpIT for whole FFNs: full fine-tuning checkpoints to a native MoE, its baselines, and killed runs."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from moe_peft.models.layer import router_parameters
from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit.expand import expand_checkpoints
from moe_peft.upit.plan import plan
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.native_case import dense_model, saved
from tests.helpers.upit_case import (
    contents,
    make_ffn_case,
    run,
    run_as_two_processes,
    run_in_process,
    stage_of,
)

pytestmark = pytest.mark.slow

# Stage 1 has 24 steps; stage 3's four buckets of three seeds have 2 each; stage 4 has 18.
STEPS = 24 + 8 + 24


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    return make_ffn_case(tmp_path_factory.mktemp("case"), tokenizer)


@pytest.fixture(scope="module")
def upit(case, tmp_path_factory):
    return run(case, tmp_path_factory.mktemp("upit"))


def weights(folder):
    return load_file(folder / "model.safetensors")


# --- the stages -----------------------------------------------------------------------------------------------------


def test_result_is_a_native_moe_with_its_tokenizer(upit, case):
    assert list(upit.records) == ["prepare", "expand", "router_init", "post_train", "evaluate"]
    folder = upit.root / "model"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.model_type == "mixtral" and model.config.num_local_experts == 4
    assert not model.config.output_router_logits and model.config.router_aux_loss_coef == 0.02
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 10000.0
    assert AutoTokenizer.from_pretrained(folder)("w5 w6")["input_ids"] == [5, 6]
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in weights(folder)
    losses = upit.records["evaluate"]["metrics"]["loss"]
    assert losses["adapted"]["mean"] < losses["base"]["mean"] - 0.1
    history = upit.records["post_train"]["metrics"]["history"]
    assert all("aux_loss" in record for record in history if "loss" in record)
    card = (upit.root / "model" / "README.md").read_text()
    assert "- Base model: `base`" in card and "- Training data: `train.jsonl`" in card
    assert not list(upit.root.rglob("state")) and not list(upit.root.glob(".*.partial"))


@pytest.mark.parametrize(("own", "moved"), [({}, 0.99), ({"dtype": "bfloat16"}, 0.4)])
def test_weights_of_a_bfloat16_base_are_trained_in_float32(own, moved, case, tmp_path, caplog):
    """At the method's rate most steps are too small to change a bfloat16 weight: whoever asks for them is told."""
    base = AutoModelForCausalLM.from_pretrained(case["model"]["name_or_path"], dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    shutil.copytree(case["model"]["name_or_path"], tmp_path / "base")
    base.save_pretrained(tmp_path / "base")
    settings = {**case, "method": "sft", "moe": {}, "num_train_epochs": 1, "prepare": {}, "router_init": {}}
    settings["sft"] = {name: value for name, value in case["sft"].items() if name != "learning_rate"}
    result = run(settings, tmp_path, model={"name_or_path": str(tmp_path / "base"), **own}).result
    trained = AutoModelForCausalLM.from_pretrained(result)
    assert str(trained.dtype) == ("torch.bfloat16" if own else "torch.float32")
    changed = [
        (p != before.to(p.dtype)).float().mean()
        for (name, p), before in zip(trained.named_parameters(), base.parameters(), strict=True)
        if ".mlp." in name
    ]
    share = torch.stack(changed).mean()
    assert share < moved if own else share > moved
    assert ("are trained in bfloat16, where a weight changes by no less than a 256th" in caplog.text) == bool(own)


def test_stage_1_keeps_whole_models(upit):
    steps = upit.records["prepare"]["metrics"]["checkpoint_steps"]
    assert steps == [16, 20, 24]
    base = weights(Path(upit.recipe.model.name_or_path))
    first, last = (weights(upit.root / "prepare/experts" / i) for i in ("0", "2"))
    assert set(last) == set(base)
    assert all(not torch.equal(last[name], base[name]) for name in last)
    assert all(not torch.equal(last[name], first[name]) for name in last)


def test_expansion_is_dare_of_displacements_and_an_average(upit):
    base = weights(Path(upit.recipe.model.name_or_path))
    experts = [weights(upit.root / "expand/experts" / str(i)) for i in range(4)]
    for i in range(3):
        prepared = weights(upit.root / "prepare/experts" / str(i))
        assert all(torch.equal(prepared[name], experts[i][name]) for name in prepared)
    ffn = sorted(name for name in base if ".mlp." in name)

    def moved(i):
        return torch.cat([(experts[i][name] - base[name]).double().flatten() for name in ffn])

    cosine = {(j, k): torch.cosine_similarity(moved(j), moved(k), dim=0) for k in range(3) for j in range(k)}
    (descent,) = upit.records["expand"]["metrics"]["descents"]
    j, k = min(cosine, key=cosine.get)
    assert descent["parents"] == [j, k] or descent["parents"] == (j, k)
    assert abs(descent["similarity"] - float(cosine[j, k])) < 1e-6 and descent["drop_rate"] == 0.9
    generator = torch.Generator().manual_seed(1)  # the recipe's seed + 1
    alpha = float(torch.rand((), generator=generator))
    assert alpha == descent["alpha"]
    for name in ffn:
        total = base[name].clone()
        for weight, parent in ((alpha, j), (1 - alpha, k)):
            kept = torch.rand(base[name].shape, generator=generator) >= 0.9
            total += (experts[parent][name] - base[name]) * kept * weight / 0.1
        assert_near(experts[3][name], total)
    for name in set(base) - set(ffn):
        assert_near(experts[3][name], (experts[j][name] + experts[k][name]) / 2)


def test_stage_3_trains_ffns_and_vectors_of_each_expert_by_itself(upit):
    buckets = json.loads((upit.root / "router_init/buckets.json").read_text())
    assert sorted(i for bucket in buckets["buckets"] for i in bucket) == list(range(12))
    for i in range(4):
        before, after = (weights(upit.root / stage / "experts" / str(i)) for stage in ("expand", "router_init"))
        assert before.keys() == after.keys()
        for name in before:
            assert torch.equal(before[name], after[name]) != (".mlp." in name), name
    vectors = load_file(upit.root / "router_init/routers.safetensors")
    assert {name: tuple(v.shape) for name, v in vectors.items()} == {"0": (4, 64), "1": (4, 64)}


def test_perplexities_are_each_models(upit):
    perplexity = torch.tensor(json.loads((upit.root / "router_init/buckets.json").read_text())["perplexity"])
    tokenizer = AutoTokenizer.from_pretrained(upit.root / "model")
    seeds = stage_of(upit, "router_init").seed_data()
    for i in (0, 3):
        model = AutoModelForCausalLM.from_pretrained(upit.root / "expand/experts" / str(i))
        for example in (0, 7):
            row = seeds[example]
            prompt = tokenizer(row["prompt"])["input_ids"]
            ids = torch.tensor([tokenizer(row["prompt"] + row["completion"])["input_ids"] + [1]])
            logits = model(input_ids=ids).logits[0, :-1]
            loss = cross_entropy(logits[len(prompt) - 1 :], ids[0, len(prompt) :])
            assert_near(perplexity[example, i], loss.exp())


def write_moe(stage, folder):
    """What stage 4 begins with."""
    stage.kind.write_moe(folder, stage.given.experts, stage.given.routers, None, stage.seed)


def test_assembly_stacks_experts_and_averages_the_rest(upit, tmp_path):
    write_moe(stage_of(upit, "post_train"), tmp_path / "moe")
    moe = weights(tmp_path / "moe")
    experts = [weights(upit.root / "router_init/experts" / str(i)) for i in range(4)]
    vectors = load_file(upit.root / "router_init/routers.safetensors")
    for layer in range(2):
        block = f"model.layers.{layer}.block_sparse_moe"
        torch.testing.assert_close(moe[f"{block}.gate.weight"], vectors[str(layer)], rtol=0, atol=0)
        for i in range(4):
            for ours, theirs in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
                own = experts[i][f"model.layers.{layer}.mlp.{theirs}.weight"]
                torch.testing.assert_close(moe[f"{block}.experts.{i}.{ours}.weight"], own, rtol=0, atol=0)
    name = "model.layers.1.self_attn.q_proj.weight"
    mean = torch.stack([expert[name] for expert in experts]).double().mean(0).float()
    torch.testing.assert_close(moe[name], mean, rtol=0, atol=0)


# --- methods --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, own, stages", [
    ("sft", {}, ["prepare"]),
    ("upcycle_sft", {}, ["prepare", "post_train"]),
    ("self_moe", {"prepare": {}}, ["prepare", "post_train"]),
    ("upit", {"prepare": {}, "router_init": {
        "buckets": "random", "seed_fraction": 0.25, "train_experts": False, "within_budget": True}},
     ["prepare", "router_init", "post_train"]),
])  # fmt: skip
def test_methods_share_a_budget(method, own, stages, case, tmp_path):
    pipeline = run(case, tmp_path, method=method, **own)
    assert list(pipeline.records) == [*stages, "evaluate"]
    assert method != "upit" or pipeline.records["router_init"]["metrics"]["steps"] == 4 * 4
    steps = sum(pipeline.records[name]["metrics"]["steps"] for name in stages if name != "router_init")
    assert steps == (48 if method != "upit" else 36)  # 4 passes over 12 seeds are taken from stage 4's
    model = AutoModelForCausalLM.from_pretrained(pipeline.root / "model")
    assert model.config.model_type == ("llama" if method == "sft" else "mixtral")
    base = AutoModelForCausalLM.from_pretrained(case["model"]["name_or_path"]).state_dict()
    if method == "self_moe":
        write_moe(stage_of(pipeline, "post_train"), tmp_path / "moe")
        before = weights(tmp_path / "moe")
        after = weights(pipeline.root / "model")
        assert {name for name in after if not torch.equal(after[name], before[name])} == {
            f"model.layers.{i}.block_sparse_moe.gate.weight" for i in range(2)
        }
    if method == "upit":
        after = weights(pipeline.root / "router_init/experts/1")
        first = weights(pipeline.root / "prepare/experts/1")
        assert all(torch.equal(after[name], first[name]) for name in first)
    assert any(not torch.equal(value, base[name]) for name, value in model.state_dict().items() if name in base)


def test_given_checkpoints_of_linked_files(upit, case, tmp_path):
    """As a hub's cache has them."""
    folders = []
    for i in range(3):
        snapshot = tmp_path / f"models--{i}" / "snapshots" / "revision"
        folders.append(str(snapshot))
        snapshot.mkdir(parents=True)
        shutil.copytree(upit.root / "prepare/experts" / str(i), blobs := snapshot.parents[1] / "blobs")
        for path in blobs.iterdir():
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    pipeline = run(case, tmp_path, **{"prepare": {"checkpoints": folders}})
    assert list(pipeline.records) == ["expand", "router_init", "post_train", "evaluate"]
    assert not any(path.is_symlink() for path in pipeline.root.rglob("*"))
    wide = LlamaForCausalLM(LlamaConfig(**{**tiny_llama().config.to_dict(), "intermediate_size": 96}))
    wide.save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"has a different architecture from .*: intermediate_size=96 and 128"):
        run(case, tmp_path / "b", **{"prepare": {"checkpoints": [folders[0], str(tmp_path / "wide")]}})


def test_a_changed_moe_redoes_stage_4_alone(upit, case, tmp_path):
    shutil.copytree(upit.root, tmp_path / "out")
    before = (tmp_path / "out/router_init/stage.json").stat().st_mtime_ns
    pipeline = run(case, tmp_path, redo=True, moe={"top_k": 1, "dtype": "float32", "router_init_std": 0.5})
    assert (tmp_path / "out/router_init/stage.json").stat().st_mtime_ns == before
    assert AutoModelForCausalLM.from_pretrained(pipeline.result).config.num_experts_per_tok == 1


def test_the_plan_counts_gradients_in_the_dtype_of_the_models(case, tmp_path):
    held = {}
    for dtype in ("float32", "bfloat16"):
        own = {**case, "output_dir": str(tmp_path / "out"), "model": {**case["model"], "dtype": dtype}}
        held[dtype] = plan(UpIT(recipe_from_dict(own)))[-1].memory
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(held["bfloat16"], name) == getattr(held["float32"], name) / 2


def test_plan_counts_what_is_trained(case, upit):
    stages = {stage.name: stage for stage in plan(UpIT(upit.recipe))}
    base = AutoModelForCausalLM.from_pretrained(case["model"]["name_or_path"])
    moe = AutoModelForCausalLM.from_pretrained(upit.root / "model")
    ffns = sum(p.numel() for name, p in base.named_parameters() if ".mlp." in name)
    assert stages["prepare"].trainable == base.num_parameters()
    assert stages["router_init"].trainable == ffns + 2 * 64 and stages["router_init"].steps == 8
    assert stages["post_train"].trainable == moe.num_parameters()
    assert asdict(stages["post_train"].moe) == upit.records["post_train"]["metrics"]["size"]
    assert {name: stage.steps for name, stage in stages.items() if name != "router_init"} == {
        name: upit.records[name]["metrics"]["steps"] for name in ("prepare", "post_train")
    }
    own = UpIT(recipe_from_dict({**case, "method": "self_moe", "prepare": {}}))
    assert plan(own)[-1].trainable == sum(p.numel() for p in router_parameters(moe).values())


@pytest.mark.parametrize("settings, message", [
    ({"adapter": {"r": 4}}, r"adapter=\{'r': 4\}: must be left out in the mode 'ffn'"),
    ({"moe": {"num_expert": 4}}, "moe.num_expert: unknown key"),
    ({"moe": {"init": "copied"}}, "init='copied': must be one of"),
    ({"method": "loramoe_sft"}, "method='loramoe_sft': must be one of sft, upcycle_pt"),
    ({"router_init": {"objective": "softmax"}}, "router_init.objective: unknown key"),
    ({"model": {"name_or_path": "x", "quantization": {"load_in_4bit": True}}}, "model.quantization"),
    ({"prepare": {"adapters": ["x"]}}, r"prepare.adapters=\['x'\]: must be left out"),
    ({"moe": {"dtype": "bf16"}}, "dtype='bf16': must be one of float32"),
    ({"moe": {"top_k": "two"}}, "moe.top_k='two': must be a valid integer"),
    ({"moe": {"router_aux_loss_coef": -1}}, "router_aux_loss_coef=-1: must be from 0"),
    ({"mode": "lora", "moe": {"top_k": 2}}, r"moe=\{'top_k': 2\}: must be left out"),
    ({"mode": "lora", "moe": {}, "prepare": {"checkpoints": ["x"]}}, r"prepare.checkpoints=\['x'\]: must be left out"),
])  # fmt: skip
def test_wrong_recipes(settings, message, case):
    with pytest.raises(ValueError, match=message):
        recipe_from_dict({**case, **settings})


@pytest.mark.parametrize(("name", "value"), [("loss_type", "dft"), ("label_smoothing_factor", 0.5)])
def test_stage_3_has_the_papers_loss_here_too(name, value, case, tmp_path):
    own = {**case, "output_dir": str(tmp_path / "out"), "router_init": {"sft": {name: value}}}
    with pytest.raises(ValueError, match=f"^router_init.sft.{name}={value!r}: stage 3 has the paper's loss"):
        recipe_from_dict(own)


def test_a_recipe_says_how_much_its_routers_are_calibrated_on(case, tmp_path):
    data = {**case["data"], "calibration_examples": 10, "calibration_length": 4}
    settings = {**case, "method": "upcycle_pt", "moe": {**case["moe"], "router_init": "attention"}, "data": data}
    stage = stage_of(UpIT(recipe_from_dict({**settings, "output_dir": str(tmp_path / "out")})), "post_train")
    batches = stage.kind.calibration(stage.given.experts, stage.context.train_data, stage.arguments(), stage.seed)
    assert [batch["input_ids"].shape for batch in batches] == [(8, 4), (2, 4)]
    assert stage.settings()["data.calibration_examples"] == 10


def test_experts_whose_rows_no_grouped_product_takes_are_refused_before_any_training(case, tokenizer, tmp_path):
    """Rows of 24 float32 values are 96 bytes, of 6 they are 24."""
    saved(dense_model("llama", intermediate_size=48), tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for granularity in (2, 8):
        moe = {**case["moe"], "granularity": granularity}
        settings = {**case, "model": {"name_or_path": str(tmp_path / "base")}, "moe": moe}
        pipeline = UpIT(recipe_from_dict({**settings, "output_dir": str(tmp_path / "out")}))
        words = r"granularity=8: an expert's 6 neurons in float32 are rows of 24 bytes"
        with pytest.raises(ValueError, match=words) if granularity == 8 else nullcontext():
            pipeline.check()


def test_a_base_that_no_native_moe_holds_is_refused_before_any_training(case, tokenizer, tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="'gpt2' model does not become a native MoE"):
        run(case, tmp_path, model={"name_or_path": str(tmp_path / "gpt2")})
    assert not (tmp_path / "out").exists()


def test_several_processes_do_what_one_does(case, tmp_path):
    """Half the batch each: the same batches, so the same result up to rounding."""
    # SGD: Adam blows rounding up where gradients are near zero. All experts at once: rounding may choose other ones.
    sft = {**case["sft"], "per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}
    # Buckets of four: full batches, as accelerate fills the last one up with rows from the first.
    init = {**case["router_init"], "seed_fraction": 1 / 3}
    settings = {**case, "sft": sft, "router_init": init, "moe": {"top_k": 4}, "output_dir": str(tmp_path / "two/out")}
    run_as_two_processes(settings, tmp_path)
    one = run(settings, tmp_path / "one", sft={**sft, "per_device_train_batch_size": 4})
    for stage in ("prepare/experts/2", "expand/experts/3", "router_init/experts/1", "post_train/model"):
        alone, two = weights(one.root / stage), weights(tmp_path / "two/out" / stage)
        assert two.keys() == alone.keys()
        for name, value in alone.items():
            assert_near(two[name], value)


# --- killed ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("undisturbed")
    settings = make_ffn_case(folder, tokenizer)
    assert run_in_process(settings, folder) == 0
    assert len((folder / "steps").read_bytes()) == STEPS
    return settings, contents(folder / "out")


@pytest.mark.parametrize(("point", "n"), [
    ("before a checkpoint is marked", 6), ("step", 29), ("marking a stage", 3),
])  # fmt: skip
def test_killed_run_goes_on_to_the_same_bytes(point, n, undisturbed, tmp_path):
    settings, files = undisturbed
    assert run_in_process(settings, tmp_path, (point, n)) == -9
    assert run_in_process(settings, tmp_path) == 0
    resumed = contents(tmp_path / "out")
    assert resumed.keys() == files.keys()
    assert [name for name in files if resumed[name] != files[name]] == []
    assert STEPS <= len((tmp_path / "steps").read_bytes()) <= STEPS + 5


def test_fused_ffns_are_merged_as_they_lie_on_disk(tmp_path):
    """Phi-3 has gate and up in one tensor."""
    config = Phi3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, pad_token_id=0,
    )  # fmt: skip
    for seed, name in enumerate(("base", "one", "two")):
        torch.manual_seed(seed)
        Phi3ForCausalLM(config).save_pretrained(tmp_path / name)
    folders = expand_checkpoints(
        [tmp_path / "one", tmp_path / "two"], tmp_path / "base", output_dir=tmp_path, num_experts=3, drop_rate=0.0
    )[0]
    base, one, two, made = (weights(folder) for folder in (tmp_path / "base", *folders))
    name = "model.layers.1.mlp.gate_up_proj.weight"
    a, b, c = ((x[name] - base[name]).flatten().double() for x in (one, two, made))
    alpha = torch.linalg.lstsq(torch.stack([a, b], 1), c).solution
    assert alpha.sum() == near(1)
    assert_near(alpha[0] * a + alpha[1] * b, c, dtype=torch.float32)  # on disk
    other = "model.layers.1.self_attn.qkv_proj.weight"
    assert_near(made[other], (one[other] + two[other]) / 2)


@pytest.mark.parametrize("first", [0, 1])
def test_checkpoints_of_which_one_stores_the_tied_head(first, tmp_path):
    """And an old one's frequencies, which are computed anew."""
    folders = [saved(dense_model("qwen3", seed), tmp_path / str(seed)) for seed in range(3)]
    stored = load_file(Path(folders[first]) / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(stored, Path(folders[first]) / "model.safetensors", metadata={"format": "pt"})
    made = expand_checkpoints(folders[:2], folders[2], output_dir=tmp_path / "out", num_experts=3, seed=first)[0][-1]
    one, two, merged = (weights(Path(folder)) for folder in (*folders[:2], made))
    name = "model.embed_tokens.weight"
    assert_near(merged[name], (one[name] + two[name]) / 2)
    assert "lm_head.weight" not in merged or torch.equal(merged["lm_head.weight"], merged[name])
    assert not any(name.endswith("inv_freq") for name in merged)
