"""The method `mean`: what stage 1's checkpoints average to, as one LoRA or one dense model."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import AdaLoraConfig, AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit.lora_experts import LoraStageKind
from moe_peft.upit.plan import plan
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.upit_case import make_case, make_ffn_case, run

pytestmark = pytest.mark.slow


def merged(base, folder):
    model = PeftModel.from_pretrained(copy.deepcopy(base), folder).merge_and_unload()
    return {name: value.double() for name, value in model.state_dict().items()}


def check_mean(base, experts, result):
    of_experts, found = [merged(base, folder) for folder in experts], merged(base, result)
    for name, value in found.items():
        assert_near(value, torch.stack([own[name] for own in of_experts]).mean(0), dtype=torch.float32)


def test_of_loras_it_is_one_lora_of_the_sum_of_their_ranks(tokenizer, tmp_path):
    case = make_case(tmp_path, tokenizer)
    pipeline = run({**case, "method": "mean", "num_experts": 3, "prepare": {}}, tmp_path)
    assert list(pipeline.records) == ["prepare", "mean", "evaluate"]
    assert [stage.epochs for stage in plan(pipeline)] == [2]  # stage 1's share, as UpIT's
    base = AutoModelForCausalLM.from_pretrained(case["model"]["name_or_path"])
    check_mean(base, [pipeline.root / "prepare/experts" / str(i) for i in range(3)], pipeline.result)
    model = AutoPeftModelForCausalLM.from_pretrained(pipeline.result)
    assert model.peft_config["default"].r == 3 * 4
    assert AutoTokenizer.from_pretrained(pipeline.result).get_vocab() == tokenizer.get_vocab()
    losses = pipeline.records["evaluate"]["metrics"]["loss"]
    assert losses["adapted"]["mean"] < losses["base"]["mean"]


def test_given_loras_may_differ_in_rank_scaling_modules_and_type(tmp_path):
    base, folders = tiny_llama(), [tmp_path / str(i) for i in range(4)]
    settings = [
        {"r": 2, "lora_alpha": 6, "target_modules": ["up_proj", "q_proj"], "use_rslora": True},
        {"r": 3, "lora_alpha": 2, "target_modules": ["up_proj"], "rank_pattern": {r"layers\.0\.mlp": 5}},
        {"r": 2, "lora_alpha": 8, "target_modules": ["up_proj", "down_proj"], "alpha_pattern": {"down_proj": 30}},
    ]
    configs = [LoraConfig(**own, init_lora_weights=False, task_type="CAUSAL_LM") for own in settings]
    configs.append(AdaLoraConfig(init_r=3, total_step=9, target_modules=["up_proj"], task_type="CAUSAL_LM"))
    for i, (folder, config) in enumerate(zip(folders, configs, strict=True)):
        torch.manual_seed(i)
        model = get_peft_model(copy.deepcopy(base), config)
        for name, parameter in model.named_parameters():
            if isinstance(config, AdaLoraConfig) and "lora_" in name:
                torch.nn.init.normal_(parameter)
        model.save_pretrained(folder)
    LoraStageKind(None).mean(folders, tmp_path / "mean")
    check_mean(base, folders, tmp_path / "mean")


def test_of_dense_models_it_is_the_mean_of_all_weights(tokenizer, tmp_path):
    case = make_ffn_case(tmp_path, tokenizer, num_train_epochs=2)
    pipeline = run({**case, "method": "mean", "num_experts": 2, "prepare": {}}, tmp_path)
    own = [load_file(pipeline.root / f"prepare/experts/{i}/model.safetensors") for i in range(2)]
    found = AutoModelForCausalLM.from_pretrained(pipeline.result).state_dict()
    for name in own[0]:
        assert_near(found[name], (own[0][name] + own[1][name]) / 2)
    assert AutoTokenizer.from_pretrained(pipeline.result).get_vocab() == tokenizer.get_vocab()


def test_models_of_unlike_architectures_have_no_mean(tokenizer, tmp_path):
    case = make_ffn_case(tmp_path, tokenizer, method="mean", num_experts=2)
    tiny_llama(vocab=128, rms_norm_eps=0.1).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    checkpoints = [case["model"]["name_or_path"], str(tmp_path / "other")]
    recipe = {**case, "output_dir": str(tmp_path / "out"), "prepare": {"checkpoints": checkpoints}}
    with pytest.raises(ValueError, match=r"other has a different architecture from .*rms_norm_eps=0.1"):
        UpIT(recipe_from_dict(recipe)).check()
