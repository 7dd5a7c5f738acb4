"""Loads and co-activation count what routers did, whatever kind of router it is and however it is steered."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from peft import get_peft_model
from transformers import TrainerCallback

from moe_peft import MoELoraConfig, allow_experts, force_experts, record_routing
from moe_peft.routing.routers import ROUTERS
from moe_peft.routing.statistics import chosen_experts
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.routed_models import KINDS, K, N, ids, routed_model
from tests.helpers.trainers import LABELS, MASKED, logged, make_model, make_trainer

MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]])
ALLOWED = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 1, 0, 0, 0, 1]], dtype=torch.bool)
SETTINGS = {
    "attention": {"router_num_heads": 2},
    "switch": {"router_capacity_factor": 0.7, "mixing": "projection", "top_k": 1, "normalize_top_k": False},
    "soft": {"top_k": N},
    "top_p": {"top_k": 4, "router_threshold": 0.5},
    "threshold": {"top_k": 4},
}


def by_rule(kind: str, logits: torch.Tensor, k: int) -> list[list[int]]:
    """Each token's experts, by the router's rule and one by one."""
    served, taken = [], [0] * N
    for token in logits:
        p, order = token.softmax(-1), token.argsort(descending=True).tolist()
        chosen = [i for i in order[:k] if p[i] > 0]
        if kind == "switch":
            taken[chosen[0]] += 1
            chosen = chosen if taken[chosen[0]] <= math.ceil(0.7 * len(logits) / N) else []
        if kind == "top_p":
            while len(chosen) > 1 and sum(p[i] for i in chosen[:-1]) >= 0.5:
                chosen.pop()
        if kind == "threshold":
            chosen = chosen[:1] + [i for i in chosen[1:] if p[i] >= 1 / N]
        served.append(chosen)
    return served


@pytest.mark.parametrize("steering", ["free", "allowed", "forced"])
@pytest.mark.parametrize("kind", ROUTERS)
def test_every_router_is_counted_as_it_routed(kind, steering):
    settings = {"top_k": K, **SETTINGS.get(kind, {})}
    config = MoELoraConfig(num_experts=N, r=4, router_type=kind, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(tiny_llama(vocab=64), config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "moe_lora_router" in name:
                parameter.normal_(std=0.5)
    block = {
        "free": lambda: nullcontext(),
        "allowed": lambda: allow_experts(model, ALLOWED),
        "forced": lambda: force_experts(model, torch.tensor([4, 0, 4])),
    }[steering]
    with torch.no_grad(), block(), record_routing(model) as statistics:
        outputs = model(input_ids=ids(), attention_mask=MASK, output_router_logits=True)
    counts = torch.zeros(2, N)
    for layer, logits in enumerate(outputs.router_logits):
        if steering == "allowed":
            logits = logits.masked_fill(~ALLOWED.repeat_interleave(7, 0), -torch.inf)
        served = by_rule(kind, logits, settings["top_k"])
        if steering == "forced":
            served = [[(4, 0, 4)[t // 7]] for t in range(21)]
        for real, experts in zip(MASK.flatten().tolist(), served, strict=True):
            for i in experts if real else []:
                counts[layer, i] += 1
    assert_near(statistics.counts[0], counts.double())
    if kind in ("switch", "top_p", "threshold") and steering == "free":
        assert counts.sum() < 2 * settings["top_k"] * MASK.sum()  # slots were really left out


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_steering_is_counted_wherever_the_recorder_stands(kind, outside):
    model = routed_model(kind)
    with torch.no_grad():
        if outside:
            with record_routing(model) as statistics:
                model(input_ids=ids())
                free = statistics.counts.clone()
                with force_experts(model, torch.tensor([4, 0, 4])):
                    model(input_ids=ids())
        else:
            forcing = force_experts(model, torch.tensor([4, 0, 4]))
            with allow_experts(model, [1, 2, 3]), forcing, record_routing(model) as statistics:
                model(input_ids=ids())
            free = torch.zeros_like(statistics.counts)
    forced = (statistics.counts - free)[0]
    assert forced.tolist() == [[7.0, 0.0, 0.0, 0.0, 14.0, 0.0]] * 2


@pytest.mark.parametrize("kind", ["adapter", "mixtral"])
def test_the_trainers_log_counts_masked_routing(kind, tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, tokenizer, make_model(kind), **MASKED)
    batch = next(iter(trainer.get_train_dataloader()))
    with record_routing(trainer.model) as statistics:
        trainer.model.train()
        trainer.compute_loss(trainer.model, batch)
    counts = statistics.counts[0]
    assert not counts[:, 4:].any() and counts.sum() == 2 * 2 * batch["attention_mask"].sum()
    share = counts / counts.sum(1, keepdim=True)
    variation = (share.std(1, correction=0) / share.mean(1)).mean().item()
    found = logged(trainer)
    assert found["load_cv"] == near(variation)
    assert found["dead_experts"] == near((share < 0.01).double().mean().item())


def test_slots_without_a_gate_do_not_count():
    experts = torch.tensor([[0, 2], [1, 0]])
    assert chosen_experts(experts, torch.tensor([[0.7, 0.0], [1.0, 1e-20]]), 3).int().tolist() == [[1, 0, 0], [1, 1, 0]]
    assert chosen_experts(experts, None, 3).int().tolist() == [[1, 0, 1], [1, 1, 0]]


# --- the logged load -------------------------------------------------------------------------------------------------


def test_loads_of_training_and_evaluation_are_apart(tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, tokenizer, make_model(router_aux_loss_coef=0.3), **LABELS)
    assert trainer._coefficients["aux"] == 0.3  # the model's own
    batches = list(trainer.get_train_dataloader())
    trainer.compute_loss(trainer.model.train(), batches[0])
    with record_routing(trainer.model) as statistics:
        for batch in batches[1:3]:
            trainer.compute_loss(trainer.model.eval(), batch)
    share = statistics.counts[0] / statistics.counts[0].sum(1, keepdim=True)
    variation = (share.std(1, correction=0) / share.mean(1)).mean().item()
    assert logged(trainer)["load_cv"] == near(variation)


def test_the_logged_load_is_that_of_all_steps_since_the_last_log(tokenizer, tmp_path):
    """And not the mean of the variations of small batches, which is large for even routing too."""
    own = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer, seen = make_trainer(tmp_path, tokenizer, make_model(), **own, **LABELS), [0]

    class Noting(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append(statistics.counts[0].clone())

    trainer.add_callback(Noting())
    with record_routing(trainer.model) as statistics:
        trainer.train()
    for record, counts in zip(trainer.state.log_history, (seen[2] - seen[0], seen[4] - seen[2]), strict=False):
        share = counts / counts.sum(1, keepdim=True)
        assert record["load_cv"] == near((share.std(1, correction=0) / share.mean(1)).mean().item())
        assert record["load_cv_by_chance"] == near((5 / counts[0].sum().item()) ** 0.5)
        assert record["dead_experts"] == near((share < 0.01).double().mean().item())
