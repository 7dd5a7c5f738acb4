"""Settings of pruning that nobody could mean are refused, and what is written loads."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_peft import force_experts, lora_to_moe, prune_experts, put_expert
from moe_peft.adapter.layers import MoELoraLayer
from moe_peft.models.steering import only_expert
from moe_peft.native.folders import open_folder
from moe_peft.pruning.routed_folders import PrunableAdapter
from tests.helpers.close import assert_near
from tests.helpers.native_case import IDS, dense_model, saved
from tests.helpers.pruning_case import WEIGHTS, load_double, make_adapter, masked_logits


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer) -> str:
    folder = tmp_path_factory.mktemp("base") / "dense"
    tokenizer.save_pretrained(folder)
    return saved(dense_model("llama"), folder)


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("adapter") / "adapter")


@pytest.mark.parametrize(
    ("settings", "default"),
    [
        ({"num_experts": 1, "num_experts_pattern": {"mlp": 4}}, 1),
        ({"num_experts": 4, "num_experts_pattern": {"[qv]_proj": 1}}, 3),
        ({"num_experts": 1, "num_experts_pattern": {"mlp": 4, r"layers\.0\.self_attn\.v_proj": 3}}, 1),
    ],
)
def test_modules_with_a_single_expert_keep_it(settings: dict, default: int, base: str, tmp_path: Path):
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["mlp", "q_proj", "v_proj"], **settings)
    prune_experts(adapter, tmp_path / "pruned", drop=[1])
    config = PeftConfig.from_pretrained(tmp_path / "pruned")
    assert config.num_experts == default
    model, original = load_double(tmp_path / "pruned"), load_double(adapter)
    before, after = (
        [m.moe_lora_spec["default"].num_experts for m in each.modules() if isinstance(m, MoELoraLayer)]
        for each in (original, model)
    )
    assert 1 in before and after == [n if n == 1 else n - 1 for n in before]
    with torch.no_grad():
        actual = model(input_ids=IDS).logits
    assert_near(actual, masked_logits(original, {i: [1] for i in range(9)}))


@pytest.fixture(scope="module")
def loras(base: str, tmp_path_factory) -> list[str]:
    """Four, on all linears."""
    folders = [str(tmp_path_factory.mktemp("loras") / name) for name in "abcd"]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folders


@torch.no_grad()
@pytest.mark.parametrize("gone", [0, 2])
def test_what_is_left_of_a_mean_is_the_mean_of_what_is_left(gone: int, base: str, loras: list[str], tmp_path: Path):
    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(base).eval()

    def logits(model: Any, steering: Any) -> torch.Tensor:
        with steering(model):
            return model(input_ids=IDS).logits

    lora_to_moe(model(), loras[:3], attention="mean", top_k=1).save_pretrained(tmp_path / "mixture")
    prune_experts(tmp_path / "mixture", tmp_path / "pruned", drop=[gone])
    pruned = PeftModel.from_pretrained(model(), tmp_path / "pruned").eval()
    left = [folder for i, folder in enumerate(loras[:3]) if i != gone]
    mixture = lora_to_moe(model(), left, attention="mean", top_k=1).eval()
    for i, folder in enumerate(left):
        forced = partial(force_experts, experts_B=[i])
        assert_near(logits(pruned, forced), logits(mixture, forced))
        alone = PeftModel.from_pretrained(model(), folder).eval()
        assert_near(logits(pruned, partial(only_expert, expert=i)), logits(alone, nullcontext))
    # Another expert can join.
    joined = put_expert(model(), tmp_path / "pruned", loras[3]).eval()
    alone = PeftModel.from_pretrained(model(), loras[3]).eval()
    assert_near(logits(joined, partial(only_expert, expert=2)), logits(alone, nullcontext))


def test_a_lora_of_as_many_parameters_as_the_experts_is_no_mean(base: str, tmp_path: Path):
    """Nothing is cut from it."""
    single = {"num_experts_pattern": {"q_proj": 1}, "rank_pattern": {"q_proj": 16}}
    folder = make_adapter(base, tmp_path / "adapter", target_modules=["mlp", "q_proj"], num_experts=4, r=4, **single)
    prune_experts(folder, tmp_path / "pruned", drop=[1])
    before, after = (load_file(path / WEIGHTS) for path in (folder, tmp_path / "pruned"))
    assert all(after[key].equal(before[key]) for key in before if "q_proj" in key)


@pytest.mark.parametrize("change", ["shape", "missing", "unexpected"])
def test_a_folder_that_does_not_load_is_found(change: str, base: str, tmp_path: Path):
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["mlp"])
    open_folder(adapter, "model").check_tensors()
    state = load_file(adapter / WEIGHTS)
    name = next(key for key in state if "moe_lora_A" in key)
    if change == "shape":
        state[name] = state[name][1:].clone()
    elif change == "missing":
        del state[name]
    else:
        state[name.replace("layers.0", "layers.7")] = state[name].clone()
    save_file(state, adapter / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="its config says"):
        open_folder(adapter, "model").check_tensors()


def test_what_would_not_load_is_not_published(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(PrunableAdapter, "_pruned_config", lambda self, *args: self.config)
    monkeypatch.setattr(PrunableAdapter, "_check_router", lambda *args: None)
    with pytest.raises(ValueError, match="its config says"):
        prune_experts(folder, tmp_path / "pruned", drop=[1])
    assert not list(tmp_path.iterdir())


def test_a_native_folder_that_does_not_load_is_found(tmp_path: Path):
    moe = sparse(tmp_path / "moe")
    open_folder(moe, "model").check_tensors()
    text = (moe / "config.json").read_text()
    assert 'experts": 5,' in text
    name, state = "model.layers.1.mlp.experts.4.up_proj.weight", load_file(moe / "model.safetensors")
    for kept, experts in ((state, 4), (state, 6), ({key: state[key] for key in state if key != name}, 5)):
        save_file(kept, moe / "model.safetensors", metadata={"format": "pt"})
        (moe / "config.json").write_text(text.replace('experts": 5,', f'experts": {experts},'))
        with pytest.raises(ValueError, match="its config says"):
            open_folder(moe, "model").check_tensors()


def sparse(folder: Path, **options) -> Path:
    """A Qwen3-MoE of four layers, of which the second and the fourth have experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=128, num_experts=5, num_experts_per_tok=2, pad_token_id=0,
        norm_topk_prob=True, **{"decoder_sparse_step": 2, **options},
    )  # fmt: skip
    saved(Qwen3MoeForCausalLM(config), folder)
    return folder


def test_layers_between_those_of_decoder_sparse_step_are_dense(tmp_path: Path):
    result = prune_experts(sparse(tmp_path / "moe"), tmp_path / "pruned", drop={0: [1], 1: [4]})
    assert [layer.name for layer in result.layers] == ["model.layers.1.mlp", "model.layers.3.mlp"]
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("moe", "pruned"))
    for layer, kept in ((1, [0, 2, 3, 4]), (3, [0, 1, 2, 3])):
        start = f"model.layers.{layer}.mlp."
        assert torch.equal(after[f"{start}gate.weight"], before[f"{start}gate.weight"][kept])
        for new, old in enumerate(kept):
            name = ".down_proj.weight"
            assert torch.equal(after[f"{start}experts.{new}{name}"], before[f"{start}experts.{old}{name}"])
    with pytest.raises(ValueError, match="no layer has experts"):
        prune_experts(sparse(tmp_path / "dense", decoder_sparse_step=5), tmp_path / "none", drop=[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": [1.7]}, r"drop: experts=\[1.7\]: must be indices or names"),
        ({"drop": [-1]}, r"drop=\[-1\]: .* has experts 0 to 5"),
        ({"drop": {"-1": [1]}}, "drop: layer -1: the model has layers 0 to 1 with routers"),
    ],
)
def test_what_nobody_could_mean_is_refused(options: dict, message: str, folder: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=message) as error:
        prune_experts(folder, tmp_path / "pruned", **options)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_models_name_is_no_markup_in_the_card(folder, tmp_path):
    named = tmp_path / "a`<img src=x> --> [b](c)"
    shutil.copytree(folder, named)
    prune_experts(named, tmp_path / "pruned", drop=[1])
    card = (tmp_path / "pruned" / "README.md").read_text()
    assert "`moe-peft prune` of `a__img src_x_ --_ _b_(c)`" in card and "<img" not in card and card.count("-->") == 1
