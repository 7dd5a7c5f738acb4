"""Routers with a learning rate of their own, against a plain loop with parameter groups."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from moe_peft.models.layer import router_parameters
from tests.helpers.close import assert_near
from tests.helpers.trainers import LABELS, make_model, make_trainer

RATE, ROUTERS, STEPS, DECAY = 1e-2, 0.1, 5, 0.3


def trained_by_hand(trainer, model, router_rate):
    """The trainer's batches, AdamW with two times two groups, and a rate that falls linearly to 0."""
    routers = router_parameters(model)
    groups = []
    for decays in (True, False):
        for rate, of_routers in ((RATE, False), (router_rate, True)):
            names = [
                name for name, p in model.named_parameters()
                if p.requires_grad and (name in routers) == of_routers and ("norm" in name or "bias" in name) != decays
            ]  # fmt: skip
            own = [dict(model.named_parameters())[name] for name in names]
            groups.append({"params": own, "lr": rate, "weight_decay": DECAY * decays})
    optimizer = torch.optim.AdamW(groups, eps=1e-3)
    schedule = LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    batches = iter(trainer.get_train_dataloader())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.train()(**next(batches), output_router_logits=False).loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(("kind", "rate"), [("adapter", ROUTERS), ("mixtral", ROUTERS), ("mixtral", 0.0)])
def test_updates_are_those_of_a_loop_with_groups(kind, rate, tokenizer, tmp_path):
    own = {"learning_rate": RATE, "weight_decay": DECAY, "max_steps": STEPS, "lr_scheduler_type": "linear",
           "router_aux_loss_coef": 0.0, "train_sampling_strategy": "sequential", "adam_epsilon": 1e-3}  # fmt: skip
    trainer = make_trainer(tmp_path / "a", tokenizer, make_model(kind), router_learning_rate=rate, **own)
    plain = make_model(kind)
    trained_by_hand(make_trainer(tmp_path / "b", tokenizer, make_model(kind), **own), plain, rate)
    trainer.train()
    before, after = make_model(kind).state_dict(), dict(trainer.model.named_parameters())
    moved = {name for name, p in after.items() if not torch.equal(p, before[name])}
    assert moved >= set(router_parameters(plain)) if rate else not moved & set(router_parameters(plain))
    for name, p in plain.named_parameters():
        assert_near(after[name], p, name)
    rates = [record["learning_rate"] for record in trainer.state.log_history if "loss" in record]
    assert rates[0] == RATE  # the log has the rate of all others


def test_a_training_with_two_rates_resumes(tokenizer, tmp_path):
    own = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "router_learning_rate": ROUTERS, **LABELS}
    own |= {"router_schedule": "step_decay"}
    whole = make_trainer(tmp_path / "a", tokenizer, **own)
    whole.train()
    again = make_trainer(tmp_path / "b", tokenizer, **own)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    for (name, p), other in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, other), name


def test_a_stage_of_routers_has_their_rate(tokenizer, tmp_path):
    own = {"training_stage": "routers", "lr_scheduler_type": "constant", **LABELS}
    trainer = make_trainer(tmp_path, tokenizer, router_learning_rate=ROUTERS, **own)
    trainer.train()
    assert {record["learning_rate"] for record in trainer.state.log_history if "loss" in record} == {ROUTERS}
    other = make_trainer(tmp_path, tokenizer, learning_rate=ROUTERS, **own)
    other.train()
    for p, q in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_where_no_routers_train_one_line_says_so(tokenizer, tmp_path):
    own = {"router_learning_rate": ROUTERS}
    with pytest.raises(ValueError, match=r"router_learning_rate=0.1: training_stage='rest' trains no routers; set it"):
        make_trainer(tmp_path, tokenizer, training_stage="rest", **own)
    by_hash = make_model(router_type="hash", router_aux_loss_coef=0.0)
    with pytest.raises(ValueError, match=r"router_learning_rate=0.1: these routers have no parameters; leave it out"):
        make_trainer(tmp_path, tokenizer, by_hash, **own)
    frozen = make_model()
    for parameter in router_parameters(frozen).values():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="the optimizer has no parameters of routers; unfreeze them"):
        make_trainer(tmp_path, tokenizer, frozen, **own).train()
