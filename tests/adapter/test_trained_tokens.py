"""Rows of embeddings that an adapter trains (`trainable_token_indices`), as plain LoRA of PEFT has them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from examples.demo.smollm2 import smollm2_folder
from moe_peft import MoELoraConfig, expert_to_lora, force_experts, lora_to_moe
from moe_peft.native import export_adapter
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama

TOKENS = [7, 120, 30]
OTHERS = [i for i in range(128) if i not in TOKENS]
IDS = torch.tensor([[7, 8, 9, 120, 10, 11], [12, 30, 7, 13, 120, 14]])
FFN = ["gate_proj", "up_proj", "down_proj"]
ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def base(tied: bool) -> Any:
    return tiny_llama(tie_word_embeddings=tied)


def moe(tied: bool = False, **settings: Any) -> PeftModel:
    torch.manual_seed(1)
    config = {"num_experts": 4, "r": 2, "init_lora_weights": False, "trainable_token_indices": TOKENS, **settings}
    return get_peft_model(base(tied), MoELoraConfig(**config, task_type="CAUSAL_LM"))


def lora(seed: int = 0, tied: bool = False, tokens: Any = TOKENS, **settings: Any) -> PeftModel:
    """With random rows for the tokens."""
    model = base(tied)
    torch.manual_seed(100 + seed)
    config = {"r": 2, "target_modules": FFN, "init_lora_weights": False, **settings}
    model = get_peft_model(model, LoraConfig(**config, trainable_token_indices=tokens, task_type="CAUSAL_LM")).eval()
    for name, parameter in model.named_parameters():
        if "trainable_tokens" in name:
            parameter.data.normal_()
    return model


def rows(model: PeftModel, name: str = "default") -> torch.Tensor:
    return model.get_base_model().get_input_embeddings().token_adapter.trainable_tokens_delta[name].detach()


def train(model: PeftModel, only: str = "") -> PeftModel:
    """A few updates, of the parameters with `only` in their names."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and only in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(4):
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("tied", [False, True])
def test_the_rows_are_those_that_plain_lora_learns(tied):
    """Experts that are frozen and zero leave the base as it is, and so do those of the LoRA."""
    config = LoraConfig(r=2, target_modules=FFN, trainable_token_indices=TOKENS, task_type="CAUSAL_LM")
    expected = train(get_peft_model(base(tied), config), only="trainable_tokens")
    model = train(moe(tied, num_experts=1, top_k=1, init_lora_weights=True), only="trainable_tokens")
    torch.testing.assert_close(rows(model), rows(expected), rtol=0, atol=0)
    assert not torch.isclose(rows(model), base(tied).model.embed_tokens.weight[TOKENS]).all(1).any()


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_rows_change_and_experts_learn_beside_them(tied):
    model, before = moe(tied), base(tied).eval()
    routers = {name: p.detach().clone() for name, p in model.named_parameters() if "moe_lora_" in name}
    train(model)
    inner = model.get_base_model()
    heads = [inner.get_input_embeddings(), *([inner.get_output_embeddings()] if tied else [])]
    for wrapper in heads:
        torch.testing.assert_close(wrapper.weight[OTHERS], before.model.embed_tokens.weight[OTHERS], rtol=0, atol=0)
        torch.testing.assert_close(wrapper.weight[TOKENS], rows(model), rtol=0, atol=0)
        assert not torch.isclose(wrapper.weight[TOKENS], before.model.embed_tokens.weight[TOKENS]).all(1).any()
    assert all(not p.equal(routers[name]) for name, p in model.named_parameters() if name in routers)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(before), rtol=0, atol=0)
    torch.testing.assert_close(logits(model.unload()), logits(before), rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_that_trl_fuses_with_the_loss_gives_the_same_gradients(tied):
    gradients = []
    for fused in ({}, {"fused_lm_head": True}):
        model = moe(tied, router_aux_loss_coef=0)
        add_fused_lm_head(model.get_base_model())
        model(input_ids=IDS, labels=IDS, **fused).loss.backward()
        delta = model.get_base_model().get_input_embeddings().token_adapter.trainable_tokens_delta
        gradients.append(delta["default"].grad)
    assert_near(gradients[1], gradients[0])
    assert gradients[0].abs().amax(1).min() > 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_one_model_have_rows_of_their_own(tied, tmp_path):
    model = train(moe(tied))
    first = logits(model)
    model.add_adapter("other", MoELoraConfig(num_experts=2, r=2, trainable_token_indices=[8], task_type="CAUSAL_LM"))
    torch.testing.assert_close(logits(model), first, rtol=0, atol=0)
    model.set_adapter("other")
    rows(model, "other").normal_()
    second = logits(model)
    assert not torch.isclose(first, second).all(-1).any()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(tied), tmp_path).eval()
    loaded.load_adapter(tmp_path / "other", "other")
    for name, expected in (("default", first), ("other", second), ("default", first)):
        loaded.set_adapter(name)
        torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_added_tokens_are_saved_with_the_resized_embeddings(tied, tmp_path):
    base(tied).save_pretrained(tmp_path / "base")

    def resized():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model.resize_token_embeddings(136)
        return model

    config = MoELoraConfig(num_experts=2, r=2, trainable_token_indices=[130, 131], task_type="CAUSAL_LM")
    model = get_peft_model(resized(), config).eval()
    rows(model).normal_()
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[3, 130, 4, 131, 135]])
    loaded = PeftModel.from_pretrained(resized(), tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_a_tied_head_saved_whole_is_one_copy_with_ensure_weight_tying(tmp_path):
    settings = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, "trainable_token_indices": None}
    model = train(moe(tied=True, **settings))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(tied=True), tmp_path).eval()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
    for adapted in (model, loaded):
        inner = adapted.get_base_model()
        assert inner.get_input_embeddings().weight is inner.get_output_embeddings().weight
    assert not loaded.get_base_model().lm_head.weight.equal(base(tied=True).lm_head.weight)


@pytest.mark.parametrize("value", [[], [3, 3], [-1], [True], (3, 4), "3", {"embed_tokens": 3}, [3.0]], ids=str)
def test_what_are_no_tokens(value):
    with pytest.raises(ValueError, match=r"MoELoraConfig: trainable_token_indices=.*: give different token ids"):
        MoELoraConfig(trainable_token_indices=value)


@pytest.mark.parametrize("settings, message", [
    ({"trainable_token_indices": [128]}, "'model.embed_tokens' has 128 rows, and none for token 128"),
    ({"trainable_token_indices": {"wte": [3]}}, "'wte' is not a module of the model"),
    ({"modules_to_save": ["embed_tokens"]}, "'model.embed_tokens' is in modules_to_save, too"),
    ({"trainable_token_indices": {"lm_head": [3]}, "modules_to_save": ["lm_head"]}, "'lm_head' is in modules_to_save"),
])  # fmt: skip
def test_tokens_that_the_model_cannot_train_leave_it_as_it_was(settings, message):
    model = base(tied=False)
    before = [*map(str, model.modules())]
    with pytest.raises(ValueError, match=message):
        get_peft_model(model, MoELoraConfig(**{"trainable_token_indices": [3], **settings}, task_type="CAUSAL_LM"))
    assert [*map(str, model.modules())] == before


@pytest.mark.slow
def test_a_pretrained_model_with_tied_embeddings_from_training_to_export(tmp_path):
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_tokens_to_ids(["<repo_name>", "<file_sep>"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.tie_word_embeddings
    torch.manual_seed(0)
    config = MoELoraConfig(num_experts=2, top_k=1, r=4, trainable_token_indices=tokens, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    batch = tokenizer("<repo_name>moe_peft<file_sep>README.md\nExperts for PEFT.", return_tensors="pt")
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3), []
    for _ in range(6):
        losses.append(model.train()(**batch, labels=batch["input_ids"]).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    model.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(**batch).logits
        loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
        torch.testing.assert_close(loaded(**batch).logits, expected, rtol=0, atol=0)
        del model, loaded
        native = AutoModelForCausalLM.from_pretrained(export_adapter(tmp_path / "adapter", tmp_path / "moe"))
        assert_near(native(**batch).logits, expected)
    change = native.get_input_embeddings().weight != AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    assert sorted(change.any(1).nonzero().flatten().tolist()) == sorted(tokens)


# --- LoRAs with such rows as experts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_loras_that_have_the_same_rows_become_experts_that_compute_the_same(tied, tmp_path):
    sources = [lora(seed, tied) for seed in range(2)]
    rows(sources[1]).copy_(rows(sources[0]))
    sources[0].save_pretrained(tmp_path / "0", save_embedding_layers=True)  # which holds the whole embeddings, too
    model = lora_to_moe(base(tied), [tmp_path / "0", sources[1]]).eval()
    for i, source in enumerate(sources):
        with force_experts(model, i):
            assert_near(logits(model), logits(source))
        _, state = expert_to_lora(model, i, tmp_path / f"lora{i}")
        torch.testing.assert_close(state[ROWS], rows(source), rtol=0, atol=0)
        again = PeftModel.from_pretrained(base(tied), tmp_path / f"lora{i}").eval()
        torch.testing.assert_close(logits(again), logits(source), rtol=0, atol=0)


def test_experts_share_the_rows_that_one_has_and_the_mean_of_those_that_differ(caplog):
    sources = [lora(0, tokens=[7, 8]), lora(1, tokens={"embed_tokens": [9, 8], "lm_head": [3]}), lora(2, tokens=None)]
    a, b = rows(sources[0]), rows(sources[1])
    with caplog.at_level(logging.WARNING, "moe_peft"):
        model = lora_to_moe(base(False), sources)
    weight = model.get_base_model().get_input_embeddings().weight
    expected = torch.stack([a[0], (a[1] + b[1]) / 2, b[0]])
    assert_near(weight[[7, 8, 9]], expected)
    head = sources[1].get_base_model().lm_head.weight
    torch.testing.assert_close(model.get_base_model().lm_head.weight, head, rtol=0, atol=0)
    assert [r.message for r in caplog.records if "different rows for the tokens [8]" in r.message]


def test_a_tied_head_with_rows_of_its_own_is_no_expert():
    source = lora(tied=True, tokens={"embed_tokens": [3], "lm_head": [4]})
    with pytest.raises(ValueError, match="lm_head has rows of its own, but the base ties it to"):
        lora_to_moe(base(tied=True), [source, lora(1, tied=True)])


def test_rows_that_do_not_fit_are_refused(tmp_path):
    lora().save_pretrained(tmp_path)
    path = Path(tmp_path, "adapter_model.safetensors")
    state = load_file(path)
    for value, message in ((state[ROWS][:2], "rows of the shape"), (state[ROWS] * torch.nan, "holds NaN or infinity")):
        save_file({**state, ROWS: value.contiguous()}, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            lora_to_moe(base(False), [tmp_path, lora(1)])
