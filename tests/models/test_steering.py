"""Masked and forced routing, on adapters and on native MoEs."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from moe_peft import MoELoraConfig, allow_experts, force_experts, lora_to_moe, weigh_experts
from moe_peft.models.steering import only_expert
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.routed_models import KINDS, K, N, adapter, biased, gates_of, ids, routed_model


@pytest.mark.parametrize("kind", KINDS)
def test_only_allowed_experts_are_chosen(kind):
    model = routed_model(kind)
    mask = torch.zeros(3, N, dtype=torch.bool)
    for row, experts in enumerate(([0, 1], [2, 3, 4], [1, 5])):
        mask[row, experts] = True
    with torch.no_grad():
        free = model(input_ids=ids()).logits
        with allow_experts(model, mask):
            masked = model(input_ids=ids()).logits
        for row in range(3):  # each row as if alone, with a list
            with allow_experts(model, mask[row].nonzero().flatten().tolist()):
                alone = model(input_ids=ids()[row : row + 1]).logits
            assert_near(masked[row : row + 1], alone)
        torch.testing.assert_close(model(input_ids=ids()).logits, free, rtol=0, atol=0)
        assert not torch.allclose(masked, free, atol=1e-4)
        if kind != "adapter":
            handles = biased(model, mask)
            assert_near(model(input_ids=ids()).logits, masked)
            for handle in handles:
                handle.remove()
        with allow_experts(model, list(range(N))):
            assert_near(model(input_ids=ids()).logits, free)


@pytest.mark.parametrize("kind", KINDS)
def test_masking_to_k_experts_and_generating(kind):
    """With k experts allowed, another expert's weights cannot matter, nor in generation with a cache."""
    model = routed_model(kind)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with allow_experts(model, [1, 4]):
        before = model.generate(input_ids=ids(), **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("moe_lora_A" in name or ".experts." in name) and parameter.dim() == 3:
                parameter[[0, 2, 3, 5]] = 7.0
        with allow_experts(model, [1, 4]):
            assert torch.equal(model.generate(input_ids=ids(), **settings), before)
            cached = model.generate(input_ids=ids(), use_cache=False, **settings)
        assert torch.equal(cached, before)
        assert not torch.equal(model.generate(input_ids=ids(), **settings), before)


@pytest.mark.parametrize("kind", KINDS)
def test_forcing(kind):
    model = routed_model(kind)
    with torch.no_grad():
        with force_experts(model, torch.tensor([4, 0, 4])):
            forced = model(input_ids=ids()).logits
        for name, parameter in model.named_parameters():
            if ("moe_lora_A" in name or ".experts." in name) and parameter.dim() == 3:
                parameter[[1, 2, 3, 5]] = 7.0
        with force_experts(model, torch.tensor([4, 0, 4])):
            torch.testing.assert_close(model(input_ids=ids()).logits, forced, rtol=0, atol=0)
        with force_experts(model, torch.tensor([0, 4, 4])):
            other = model(input_ids=ids()).logits
    assert not torch.allclose(other[:2], forced[:2], atol=1e-5)
    assert_near(other[2], forced[2])


def test_gradients_of_masked_experts_are_zero():
    model = routed_model("adapter").train()
    with allow_experts(model, [0, 3]):
        model(input_ids=ids(), labels=ids()).loss.backward()
    for name, parameter in model.named_parameters():
        if "moe_lora_A" in name:
            assert parameter.grad[[0, 3]].abs().sum() > 0 and not parameter.grad[[1, 2, 4, 5]].any()


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        ([1], "some row allows only 1 of the experts; allow at least top_k=2"),
        ([1, 6], "the model has experts 0 to 5"),
        (torch.ones(2, 4, dtype=torch.bool), r"give bool \[rows, 6\]"),
        (torch.ones(2, 6), r"give bool \[rows, 6\]"),
    ],
)
@pytest.mark.parametrize("kind", ["adapter", "mixtral"])
def test_wrong_masks(kind, allowed, message):
    with pytest.raises(ValueError, match=message), allow_experts(routed_model(kind), allowed):
        pass


NAN, INF = float("nan"), float("inf")
WRONG = [
    0.5, [0.5, 1, 2], [0.5, True], True, [True, False, True, True, True, True], NAN, [NAN], INF, [-INF], 1e39, -0.0,
    {0, 1, 2}, {0: [1]}, {0: NAN}, {0: INF}, {0: 1e39}, {0: True}, {0: "1"}, {0: None}, {True: 0.5}, {0.5: 1.0},
    [{0: 1.0}, {1: NAN}], b"ab", torch.tensor([True, False, True]), torch.tensor([0.5]), torch.tensor([1j]), 99, [-7],
    object(), [[0, 1]],
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda value: re.sub(" at 0x[0-9a-f]*", "", repr(value)))
@pytest.mark.parametrize("steer", [force_experts, allow_experts, weigh_experts, only_expert], ids=lambda f: f.__name__)
def test_what_is_no_expert_and_no_factor_is_one_line(steer, wrong, model):
    """It is not rounded to an expert, and no NaN gets into the logits."""
    with pytest.raises(InputError) as error, steer(model, wrong):
        pass
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def model():
    return routed_model("adapter")


def test_experts_may_be_any_integers(model):
    with torch.no_grad(), force_experts(model, [2, 2, 2]):
        expected = model(input_ids=ids()).logits
    for experts in (2, np.int64(2), torch.tensor([2]), np.array([2, 2, 2]), range(2, 3), (2,)):
        with torch.no_grad(), force_experts(model, experts):
            assert torch.equal(model(input_ids=ids()).logits, expected)
    with torch.no_grad(), weigh_experts(model, {0: np.float32(0.5), 1: 1, 2: -0.0}):
        assert model(input_ids=ids()).logits.isfinite().all()


def test_each_router_must_be_able_to_do_with_what_is_allowed():
    """One that leaves experts out can do with a single one; with another beside it, both need top_k."""
    model = adapter(router_type="top_p")
    with allow_experts(model, [1]):
        model(input_ids=ids())
    model.add_adapter("linear", MoELoraConfig(num_experts=N, top_k=K, r=4, task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "linear"])
    few = pytest.raises(ValueError, match="allows only 1 of the experts; allow at least top_k=2")
    with few, allow_experts(model, [1]):
        pass


def test_a_mask_that_does_not_fit_the_batch_or_the_model():
    model = routed_model("adapter")
    two_rows = torch.ones(2, N, dtype=torch.bool)
    with pytest.raises(ValueError, match="2 rows are steered, the batch has 3 rows"), allow_experts(model, two_rows):
        model(input_ids=ids())
    model(input_ids=ids())  # and nothing stays behind
    with pytest.raises(ValueError, match="has no router"), allow_experts(tiny_llama(), [0]):
        pass
    uneven = adapter(num_experts_pattern={r"layers\.0\.mlp": 4})
    with pytest.raises(ValueError, match=r"layers have \[4, 6\] experts"), allow_experts(uneven, [0, 1]):
        pass


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "num_local_experts": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", ["gpt_oss", "granitemoe", "flex_olmo", "minimax"])
def test_other_families_route_as_before_if_all_experts_are_allowed(name):
    config = AutoConfig.for_model(name, **{**SMALL, **({"num_experts": 4} if name == "flex_olmo" else {})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        before = model(input_ids=ids()).logits
        with allow_experts(model, [0, 1, 2, 3]):
            assert_near(model(input_ids=ids()).logits, before)
        with allow_experts(model, [1, 2]):
            assert not torch.allclose(model(input_ids=ids()).logits, before)


@pytest.mark.parametrize(
    ("name", "own", "message"),
    [
        (
            "glm4_moe",
            {"n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 0},
            "Glm4MoeTopkRouter does not choose by a softmax over its logits and the top k alone",
        ),
        ("phimoe", {}, "PhimoeTopKRouter does not choose by a softmax"),
        ("jetmoe", {"kv_channels": 8}, "JetMoeTopKGating: the size of a router without"),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}, "HunYuanMoEV1Gate: the size of a router"),
    ],
)
def test_gates_that_choose_by_another_rule_are_not_steered(name, own, message):
    """Sigmoid scores, groups, biases and scalings would silently be replaced by a softmax."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SMALL, **own}))
    with pytest.raises(ValueError, match=message) as error, allow_experts(model, [0, 1, 2, 3]):
        pass
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=message), force_experts(model, torch.zeros(3, dtype=torch.long)):
        pass
    assert not any(hasattr(module, "steering") for module in gates_of(model))


def test_adapters_that_are_not_active_do_not_count():
    config = {"num_experts": 4, "top_k": 2, "r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = get_peft_model(tiny_llama(), MoELoraConfig(router_type="top_p", **config)).eval()
    model.add_adapter("ref", MoELoraConfig(**config))
    with allow_experts(model, [0]):  # fewer than top_k, which such routers may choose
        model(input_ids=torch.arange(3, 9).unsqueeze(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steer", [
    lambda model, rows: force_experts(model, torch.zeros(rows, dtype=torch.long)),
    lambda model, rows: allow_experts(model, torch.ones(rows, N, dtype=torch.bool)),
])  # fmt: skip
def test_steering_of_other_rows_than_the_batchs(steer, kind):
    """Three rows on 2 rows of 3 tokens would steer the first row's last token as the second row."""
    model, inputs = routed_model(kind), ids(2, 3)
    with steer(model, 3), pytest.raises(ValueError, match="3 rows are steered, the batch has 2 rows of 3 tokens"):
        model(input_ids=inputs)
    for rows in (1, 2, 6):
        with steer(model, rows), torch.no_grad():
            model(inputs) if kind == "mixtral" else model(input_ids=inputs)
    with steer(model, 2), torch.no_grad():  # beams of a row stand side by side
        model.generate(input_ids=inputs, num_beams=2, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("setting", [None, True, False])
def test_gates_are_divided_by_their_sum_where_the_family_does_whatever_a_setting_says(setting, monkeypatch):
    model = routed_model("mixtral")
    gate_class = type(gates_of(model)[0])

    def forward(self, hidden_states):
        logits = hidden_states.reshape(-1, hidden_states.shape[-1]) @ self.weight.T
        gates, experts = logits.float().softmax(-1).topk(self.top_k, dim=-1)
        return logits, gates, experts  # not divided

    monkeypatch.setattr(gate_class, "forward", forward)
    for gate in gates_of(model) if setting is not None else ():
        gate.norm_topk_prob = setting
    with torch.no_grad():
        free = model(input_ids=ids()).logits
        with allow_experts(model, list(range(N))):
            assert_near(model(input_ids=ids()).logits, free)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_may_be_indices_or_names(kind):
    model = routed_model(kind)
    with pytest.raises(ValueError, match="force_experts: experts='law': the model's experts have no names"):
        force_experts(model, "law").__enter__()
    names = ["math", "code", "law", "d", "e", "f"]
    if kind == "adapter":
        model.peft_config["default"].expert_names = names
    else:
        model.config.moe_peft_expert_names = names
    with torch.no_grad():
        outputs = []
        for experts in (torch.tensor([2, 2, 2]), 2, "law", ["law", 2, "law"]):
            with force_experts(model, experts):
                outputs.append(model(input_ids=ids()).logits)
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        outputs = []
        for experts in ([1, 2], ["code", "law"]):
            with allow_experts(model, experts):
                outputs.append(model(input_ids=ids()).logits)
        assert torch.equal(*outputs)
    with pytest.raises(ValueError, match="allow_experts: experts='mth': must be one of math, code, law"):
        allow_experts(model, ["mth"]).__enter__()


def test_a_number_as_text_is_a_name_if_there_is_one():
    """As of adapters in folders 1, 2, …, on a command line."""
    model = routed_model("adapter")
    model.peft_config["default"].expert_names = ["1", "2", "3", "d", "e", "f"]
    for text, index in (("1", 0), ("3", 2), ("5", 5)):
        with torch.no_grad():
            outputs = []
            for expert in (text, index):
                with force_experts(model, expert):
                    outputs.append(model(input_ids=ids()).logits)
        assert torch.equal(*outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_each_thread_steers_its_own_passes(kind):
    """Requests of four threads, each with an expert of its own, and of two that are free, at the same time."""
    model = routed_model(kind)

    def answer(expert: int | None) -> torch.Tensor:
        with torch.no_grad(), nullcontext() if expert is None else force_experts(model, expert):
            return model(input_ids=ids()).logits

    wishes = [0, 1, None, 4, 5, None]
    alone = [answer(expert) for expert in wishes]
    with ThreadPoolExecutor(len(wishes)) as pool:
        for got, want in zip(pool.map(answer, wishes * 8), alone * 8, strict=True):
            assert torch.equal(got, want)


def test_backward_runs_checkpointed_layers_again_as_they_were_steered():
    """In a thread of its own, as CUDA's is; the loss's gradient is the one without checkpoints."""
    model = routed_model("adapter").train()

    def gradients() -> list[torch.Tensor]:
        with force_experts(model, torch.tensor([4, 0, 4])):
            loss = model(input_ids=ids(), labels=ids()).loss
            with ThreadPoolExecutor(1) as pool:
                pool.submit(loss.backward).result()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    for got, want in zip(gradients(), expected, strict=True):
        assert_near(got, want)


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_weights_are_those_of_pefts_weighted_adapter(mixing, tmp_path):
    folders = [tmp_path / name for name in ("code", "law", "style")]
    for i, folder in enumerate(folders):
        torch.manual_seed(i)
        config = LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
        get_peft_model(tiny_llama(), config).save_pretrained(folder)
    names = [folder.name for folder in folders]
    model = lora_to_moe(tiny_llama(), folders, mixing=mixing, expert_names=names).eval()
    peft = PeftModel.from_pretrained(tiny_llama(), folders[0], adapter_name="code").eval()
    for folder in folders[1:]:
        peft.load_adapter(folder, folder.name)
    wishes = [{"code": 0.7, "style": 0.3}, {"law": 1.5}, {"code": 1.0, "law": 0.5, "style": 0.25}]
    with torch.no_grad():
        with weigh_experts(model, wishes):
            by_row = model(input_ids=ids()).logits
        for i, wish in enumerate(wishes):
            peft.add_weighted_adapter([*wish], [*wish.values()], f"row {i}", "cat")
            peft.set_adapter(f"row {i}")
            expected = peft(input_ids=ids()[i : i + 1]).logits
            assert_near(by_row[i : i + 1], expected)
            with weigh_experts(model, wish):
                assert_near(model(input_ids=ids()[i : i + 1]).logits, expected)
    with pytest.raises(ValueError, match="weigh_experts: experts='prose'"), weigh_experts(model, {"prose": 1.0}):
        pass
