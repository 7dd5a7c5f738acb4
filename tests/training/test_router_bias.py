"""Balancing without a loss: biased choices and steps of the biases are those of plain loops, and last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from moe_peft import RouterBiasCallback, fold_routers, prune_experts, router_bias_updates
from moe_peft.adapter.layers import MoELoraLayer
from moe_peft.models.native_routers import replace_routers
from moe_peft.native import export_adapter
from moe_peft.routing import RouterSettings, load_health, sigmoid_gates, top_k_gates
from tests.helpers.adapters import adapted, adapter, batch
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.native_case import adapter as saved_adapter
from tests.helpers.native_case import dense_model, logits, saved
from tests.helpers.processes import WORLD, in_processes
from tests.helpers.routed_models import NATIVE, routers_of
from tests.helpers.trainers import arguments, make_model, make_trainer

BIAS = {"router_bias_update_rate": 0.01, "router_aux_loss_coef": 0}
WEIGHTS = "adapter_model.safetensors"


def steps(model) -> list[list[int]]:
    return [router.bias_steps.tolist() for router in routers_of(model)]


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "choose, score", [(top_k_gates, torch.softmax), (sigmoid_gates, None)], ids=["top_k", "sigmoid"]
)
def test_biases_choose_and_gates_do_not_have_them(choose, score, normalize, k):
    generator = torch.Generator().manual_seed(0)
    logits_TN = torch.randn(40, 6, dtype=torch.float64, generator=generator).requires_grad_()
    bias = torch.randn(6, dtype=torch.float64, generator=generator) * 0.3
    with torch.no_grad():
        logits_TN[:, 5] = -torch.inf  # a mask leaves it out, and its bias does not bring it back
    bias[5] = 9.0
    gates, experts = choose(logits_TN, k, normalize, bias)
    changed = 0
    for token, of_token, chosen in zip(logits_TN, gates, experts.tolist(), strict=True):
        scores = token.sigmoid() if score is None else token.softmax(-1)
        expected = sorted(range(5), key=lambda i: -(scores[i] + bias[i]).item())[:k]
        changed += expected != sorted(range(5), key=lambda i: -scores[i].item())[:k]
        assert chosen == expected
        expected_gates = scores[expected]
        if normalize:
            expected_gates = (
                1 + expected_gates - expected_gates.detach() if k == 1 else expected_gates / expected_gates.sum()
            )
        assert_near(of_token, expected_gates)
        for one, other in zip(
            *(torch.autograd.grad(g[0], logits_TN, retain_graph=True) for g in (of_token, expected_gates)), strict=True
        ):
            assert_near(one, other)
    assert changed > 10


# --- their steps ------------------------------------------------------------------------------------------------------


def counts_by_hand(model, inputs) -> torch.Tensor:
    """Real tokens of each expert, by layer, from the router logits alone."""
    with torch.no_grad():
        router_logits = model(**inputs, output_router_logits=True).router_logits
    counts = torch.zeros(len(router_logits), 4)
    for router, logits_TN, count_N in zip(routers_of(model), router_logits, counts, strict=True):
        for token, real in zip(logits_TN, inputs["attention_mask"].flatten().tolist(), strict=True):
            if real:
                count_N[(token.softmax(-1) + 0.01 * router.bias_steps).topk(2).indices] += 1
    return counts


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointing", "reentrant"])
def test_each_step_is_the_sign_of_what_is_missing(checkpointing):
    """Over two micro-batches with padding; passes without gradients do not count."""
    model = adapted(**BIAS).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    expected = torch.zeros(2, 4)
    with router_bias_updates(model) as update:
        for step in range(4):
            counts = torch.zeros(2, 4)
            for micro in range(2):
                inputs = batch()
                inputs["input_ids"] = (inputs["input_ids"] + 7 * step + 3 * micro) % 128 * inputs["attention_mask"]
                counts += counts_by_hand(model, inputs)
                model(**inputs).loss.backward()
            update()
            expected += (counts.mean(1, keepdim=True) - counts).sign()
            assert steps(model) == expected.long().tolist()
        model(**batch()).loss.backward()
        for remaining in (3, 2, 1):
            before = steps(model)
            update(remaining)
            assert steps(model) == [[int(b * (remaining - 1) / remaining) for b in of_layer] for of_layer in before]
    assert not torch.tensor(steps(model)).any() and expected.abs().max() > 1


def test_it_balances_and_the_balancing_loss_counts_the_biased_choice():
    model = adapted(router_bias_update_rate=0.01, top_k=1, lora_alpha=16).eval()
    with torch.no_grad():
        for router in routers_of(model):
            router.weight.mul_(20)  # uneven

    def load():
        with torch.no_grad():
            out = model(**batch(padded=False), output_router_logits=True)
        chosen = [
            (x.softmax(-1) + r.expert_bias).argmax(-1)
            for x, r in zip(out.router_logits, routers_of(model), strict=True)
        ]
        counts = torch.stack([torch.bincount(of_layer, minlength=4) for of_layer in chosen]).double()
        p = torch.stack([x.softmax(-1) for x in out.router_logits]).mean(1)
        assert_near(out.aux_loss, 4 * (counts.float() / 36 * p).sum(1).mean())
        return load_health(counts, [4, 4], 36).variation

    before = load()
    with router_bias_updates(model) as update:
        for _ in range(60):
            model(**batch(padded=False))
            update()
    assert before > 0.5 and load() < before / 2


@pytest.mark.parametrize("lora_alpha", [None, 16])
def test_an_adapter_begins_without_the_biases_of_another(lora_alpha):
    """The reference that TRL makes of an adapter, with the config that the model has of it, has them."""
    config = adapter(**BIAS, lora_alpha=lora_alpha)
    model = get_peft_model(tiny_llama(), config).train()
    with router_bias_updates(model) as update:
        model(**batch())
        update()
    model.add_adapter("fresh", config)
    model.add_adapter("ref", model.peft_config["default"])
    trained, fresh, ref = (
        [layer.router(name).bias_steps for layer in model.modules() if isinstance(layer, MoELoraLayer)]
        for name in ("default", "fresh", "ref")
    )
    assert any(of.any() for of in trained) and not any(of.any() for of in fresh)
    assert all(map(torch.equal, trained, ref))


def test_layers_of_different_sizes_are_balanced_by_their_own_biases():
    settings = {"num_experts": 4, "num_experts_pattern": {r"layers\.0\.mlp": 3}, "router_bias_update_rate": 0.01}
    model = adapted(**settings, router_aux_loss_coef=0.5).train()
    inputs = batch(padded=False)
    with router_bias_updates(model) as update:
        for _ in range(2):
            out = model(**inputs, output_router_logits=True)
            update()
    small, large = routers_of(model)
    assert (small.num_experts, large.num_experts) == (3, 4) and small.bias_steps.any()
    out = model(**inputs, output_router_logits=True)
    losses = []
    for logits_TN, router in zip(out.router_logits, (small, large), strict=True):
        n = router.num_experts
        p = logits_TN[:, :n].softmax(-1)
        chosen = (p + router.expert_bias).topk(2).indices
        losses.append(n * (torch.bincount(chosen.flatten(), minlength=n) / len(p) * p.mean(0)).sum())
    assert_near(out.aux_loss, sum(losses) / 2)
    out.loss.backward()


def counted(rank: int, folder: Path) -> None:
    model = adapted(**BIAS).train()
    with router_bias_updates(model) as update:
        for _ in range(3):
            inputs = batch()
            inputs["input_ids"] = (inputs["input_ids"] + 11 * rank) % 128 * inputs["attention_mask"]
            model(**inputs)
            update()
    assert dist.get_world_size() == WORLD
    torch.save(steps(model), folder / f"{rank}.pt")


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path):
    in_processes(counted, tmp_path)
    model = adapted(**BIAS).train()
    with router_bias_updates(model) as update:
        for _ in range(3):
            for rank in range(WORLD):
                inputs = batch()
                inputs["input_ids"] = (inputs["input_ids"] + 11 * rank) % 128 * inputs["attention_mask"]
                model(**inputs)
            update()
    assert torch.load(tmp_path / "0.pt") == torch.load(tmp_path / "1.pt") == steps(model)


# --- in trainers ------------------------------------------------------------------------------------------------------


def test_a_resumed_training_is_the_one_that_was_not_stopped(tokenizer, tmp_path):
    fields = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    reference = make_trainer(tmp_path / "a", tokenizer, make_model(**BIAS), **fields)
    reference.train()
    assert torch.tensor(steps(reference.model)).any()
    resumed = make_trainer(tmp_path / "b", tokenizer, make_model(**BIAS), **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    first, other = (tmp_path / name / "checkpoint-6" / WEIGHTS for name in ("a", "b"))
    assert first.read_bytes() == other.read_bytes()
    halfway = load_file(tmp_path / "a" / "checkpoint-3" / WEIGHTS)
    assert [w.tolist() for name, w in halfway.items() if "bias_steps" in name] != steps(reference.model)


class Watch(TrainerCallback):
    def __init__(self, seen: list) -> None:
        self.seen = seen

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        self.seen.append(steps(model))


def test_annealed_in_any_trainer_they_are_zero(tokenizer, tmp_path):
    trainer = make_trainer(tmp_path / "a", tokenizer, make_model(**BIAS), max_steps=8, router_bias_anneal=0.25)
    stock = SFTTrainer(
        model=make_model(**BIAS), args=arguments(tmp_path / "b", SFTConfig, max_steps=8),
        train_dataset=trainer.train_dataset, processing_class=tokenizer, callbacks=[RouterBiasCallback(anneal=0.25)],
    )  # fmt: skip
    for each in (trainer, stock):
        seen = []
        each.add_callback(Watch(seen))
        each.train()
        assert any(map(any, seen[5])) and not any(map(any, seen[7]))
    with pytest.raises(ValueError, match=r"router_bias_anneal=0\.5: no router has biases"):
        make_trainer(tmp_path / "c", tokenizer, make_model(), router_bias_anneal=0.5)


# --- kept -------------------------------------------------------------------------------------------------------------


def set_biases(model) -> None:
    for i, router in enumerate(routers_of(model)):
        router.bias_steps.copy_(torch.arange(router.num_experts) * 3 - i)


def test_saved_loaded_halved_copied_and_pruned(tmp_path):
    name = saved(dense_model("llama"), tmp_path / "base")
    model = saved_adapter(dense_model("llama"), tmp_path / "adapter", name, **BIAS)
    set_biases(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(dense_model("llama"), tmp_path / "adapter")
    assert steps(loaded) == steps(model) == [[0, 3, 6, 9], [-1, 2, 5, 8]]
    assert torch.equal(logits(loaded), logits(model))
    expected = steps(model)
    loaded.add_adapter("ref", loaded.peft_config["default"])  # as TRL makes a reference
    loaded.set_adapter("ref")
    assert steps(loaded) == expected and steps(loaded.bfloat16()) == expected
    prune_experts(tmp_path / "adapter", tmp_path / "pruned", drop=[1])
    pruned = PeftModel.from_pretrained(dense_model("llama"), tmp_path / "pruned")
    assert steps(pruned) == [[0, 6, 9], [-1, 5, 8]]


def test_export_needs_biases_of_zero(tmp_path):
    name = saved(dense_model("llama"), tmp_path / "base")
    model = saved_adapter(dense_model("llama"), tmp_path / "adapter", name, **BIAS)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("bias_steps"):
            buffer.zero_()
    model.save_pretrained(tmp_path / "adapter")
    export_adapter(tmp_path / "adapter", tmp_path / "moe")
    assert_near(logits(tmp_path / "moe"), logits(model))
    set_biases(model)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"router_bias_update_rate=0\.01: a linear gate has no biases"):
        export_adapter(tmp_path / "adapter", tmp_path / "other")
    with pytest.raises(ValueError, match=r"router_bias_update_rate=0\.01: a linear gate has no biases"):
        fold_routers(model)


def test_where_there_are_none():
    with pytest.raises(ValueError, match="no router has biases"), router_bias_updates(adapted()):
        pass
    with pytest.raises(ValueError, match=r"router_bias_update_rate=0\.1: router_type='soft' has no use for it"):
        adapted(router_type="soft", router_bias_update_rate=0.1, base=tiny_llama())
    with pytest.raises(ValueError, match=r"replace_routers: bias_update_rate=0\.1: a native MoE keeps no biases"):
        replace_routers(NATIVE["mixtral"](), RouterSettings("sigmoid", bias_update_rate=0.1))
