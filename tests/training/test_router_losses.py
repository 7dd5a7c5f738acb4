"""`RouterLossesMixin` on TRL's trainers: what it adds, and that it adds it once, however a step is split."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import LlamaForSequenceClassification
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import RewardConfig, RewardTrainer, SFTConfig

from moe_peft import MoELoraConfig, replace_routers
from moe_peft.models.introspection import observed_routing
from moe_peft.models.layer import router_parameters
from moe_peft.training.preparation import tokenized
from moe_peft.training.router_config import RouterLossConfig
from moe_peft.training.router_losses import RouterLossesMixin
from moe_peft.training.trainers import MoEDPOConfig, MoEDPOTrainer, MoESFTConfig, MoESFTTrainer
from tests.helpers.balance import layer_balancing_loss
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.routed_models import NATIVE
from tests.helpers.trainers import MoEKTOConfig, MoEKTOTrainer, arguments, logged, preferences, words
from tests.helpers.trainers import make_model as trainable_model
from tests.helpers.trainers import make_trainer as make_sft_trainer

N, K = 6, 2


@dataclass
class MoERewardConfig(RouterLossConfig, RewardConfig):
    pass


class MoERewardTrainer(RouterLossesMixin, RewardTrainer):
    pass


TRAINERS = {
    "dpo": (MoEDPOTrainer, MoEDPOConfig),
    "kto": (MoEKTOTrainer, MoEKTOConfig),
    "reward": (MoERewardTrainer, MoERewardConfig),
}


def make_model(kind: str, native: bool = False):
    torch.manual_seed(0)
    if native:
        model = NATIVE["mixtral"]()
        model.resize_token_embeddings(128)
        return model
    base = tiny_llama()
    if kind == "reward":
        base.config.num_labels = 1
        base = LlamaForSequenceClassification(base.config)
    torch.manual_seed(1)
    return get_peft_model(base, MoELoraConfig(num_experts=N, top_k=K, r=4, init_lora_weights=False))


def make_trainer(kind, folder, tokenizer, native=False, **own):
    trainer_class, config_class = TRAINERS[kind]
    reference = {"ref_model": make_model(kind, native)} if native else {}
    return trainer_class(
        model=make_model(kind, native),
        args=arguments(folder, config_class, **own),
        train_dataset=preferences(kind),
        processing_class=tokenizer,
        **reference,
    )


@pytest.mark.parametrize(("kind", "native"), [("dpo", False), ("dpo", True), ("kto", False), ("reward", False)])
def test_losses_are_those_of_the_trained_passes_and_counted_once(kind, native, tokenizer, tmp_path):
    trainer = make_trainer(kind, tmp_path, tokenizer, native, router_aux_loss_coef=0.3, router_z_loss_coef=0.02)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.model.train()
    with_them = trainer.compute_loss(trainer.model, dict(batch))
    trainer._coefficients = dict.fromkeys(trainer._coefficients, 0.0)
    without = trainer.compute_loss(trainer.model, dict(batch))

    own = {name: batch[name] for name in ("input_ids", "attention_mask")}
    outputs = trainer.model.base_model(**own, output_router_logits=True) if native else None
    logits = (outputs or trainer.model(**own, output_router_logits=True)).router_logits
    n = logits[0].shape[-1]
    aux = (load_balancing_loss_func if native else layer_balancing_loss)(logits, n, K, own["attention_mask"])
    mask = own["attention_mask"].flatten().bool()
    z = torch.stack([layer[mask].double().logsumexp(-1) ** 2 for layer in logits]).mean()
    expected = 0.3 * aux.double() + 0.02 * z
    assert_near(with_them - without, expected)
    assert logged(trainer)["aux_loss"] == near(aux.item())
    # An evaluation has no pass with gradients, and KTO's first one is of other rows.
    trainer.model.eval()
    trainer.prediction_step(trainer.model, dict(batch), prediction_loss_only=True)
    assert logged(trainer)["aux_loss"] == near(aux.item())


@pytest.mark.parametrize("kind", TRAINERS)
def test_accumulated_steps_are_those_of_one_batch(kind, tokenizer, tmp_path):
    common = {
        "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "router_aux_loss_coef": 0.0,
        "router_z_loss_coef": 0.5, "max_steps": 3,
    }  # fmt: skip
    big = make_trainer(kind, tmp_path / "big", tokenizer, per_device_train_batch_size=8, **common)
    cut = make_trainer(
        kind, tmp_path / "cut", tokenizer, per_device_train_batch_size=2, gradient_accumulation_steps=4, **common
    )
    for trainer in (big, cut):
        before = {name: p.detach().clone() for name, p in router_parameters(trainer.model).items()}
        if kind == "kto":  # its loss depends on the micro-batch (the KL term); routers then learn from the z-loss alone
            trainer.compute_loss = alone(trainer)
        trainer.train()
        after = router_parameters(trainer.model)
        assert all((after[name] - before[name]).abs().max() > 1e-5 for name in after if ".default." in name)
    for (name, one), other in zip(big.model.state_dict().items(), cut.model.state_dict().values(), strict=True):
        assert_near(one, other, name)


def alone(trainer):
    """A `compute_loss` without the trainer's own loss."""
    trainer.args.training_stage = "routers"
    return trainer.compute_loss


def test_a_reward_model_learns_to_balance(tokenizer, tmp_path):
    """TRL's RewardTrainer adds no balancing loss of its own."""

    def last(coefficient: float) -> float:
        folder = tmp_path / str(coefficient)
        own = {"max_steps": 25, "router_aux_loss_coef": coefficient, "learning_rate": 2e-2, "seed": 1}
        trainer = make_trainer("reward", folder, tokenizer, **own)
        trainer.train()
        return [r["load_cv"] for r in trainer.state.log_history if "load_cv" in r][-1]

    assert last(1.0) < 0.7 * last(0.0)


def test_logs_are_means_over_tokens_however_batches_are_cut(tokenizer, tmp_path):
    """With a learning rate of 0, so that every batch sees the same model."""
    data = Dataset.from_list([{"text": words(i, 3 + 4 * (i % 3)), "domain": i % 2} for i in range(12)])
    labels = {"label_column": "domain", "expert_map": {0: [0, 1, 2], 1: [3, 4, 5]}, "router_z_loss_coef": 0.1}
    found = []
    for i, (rows, steps) in enumerate(((12, 1), (1, 12), (3, 4))):
        args = arguments(
            tmp_path / str(i), MoESFTConfig, per_device_train_batch_size=rows, gradient_accumulation_steps=steps,
            per_device_eval_batch_size=rows, learning_rate=0.0, max_steps=1, **labels,
        )  # fmt: skip
        trainer = MoESFTTrainer(
            make_model("sft"), args, train_dataset=data, eval_dataset=data, processing_class=tokenizer
        )
        trainer.train()
        log = {**trainer.state.log_history[0], **trainer.evaluate()}
        found.append({name: log[name] for of in ("router_z_loss", "router_label_loss", "compliance", "router_entropy")
                      for name in (of, f"eval_{of}")})  # fmt: skip
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-3)  # TRL rounds what it logs
    assert found[0]["compliance"] == pytest.approx(found[0]["eval_compliance"], rel=1e-3)  # so too


@pytest.mark.parametrize("kind", TRAINERS)
def test_each_evaluation_set_has_metrics_of_its_own(kind, tokenizer, tmp_path):
    """Those of one set alone, under its name, and in the log of training none of them."""
    own = {"router_z_loss_coef": 0.1, "max_steps": 1, "learning_rate": 0.0}
    trainer = make_trainer(kind, tmp_path, tokenizer, **own)
    trainer.train()
    data = trainer.train_dataset
    sets = {"a": data.select(range(4)), "b": data.select(range(4, 8))}
    alone = {name: trainer.evaluate(rows) for name, rows in sets.items()}
    both = trainer.evaluate(sets)
    names = ["router_z_loss", "router_entropy", "load_cv", "load_cv_by_chance", "dead_experts"]
    for name in names:
        for of in sets:
            assert both[f"eval_{of}_{name}"] == pytest.approx(alone[of][f"eval_{name}"], rel=1e-4), name
        assert f"eval_{name}" not in both and f"eval_{name}" not in trainer.state.log_history[0]
    assert both["eval_a_router_entropy"] != both["eval_b_router_entropy"]


def test_labels_may_be_numbers_and_a_plain_config_will_do(tokenizer, tmp_path):
    data = Dataset.from_list([{"text": words(i, 6), "domain": i % 2} for i in range(8)])
    own = {"label_column": "domain", "expert_map": {0: [0, 1, 2], 1: [3, 4, 5]}}
    numbered = MoESFTTrainer(
        make_model("sft"), arguments(tmp_path / "a", MoESFTConfig, **own), train_dataset=data,
        processing_class=tokenizer,
    )  # fmt: skip
    assert numbered._allowed.tolist() == [[True] * 3 + [False] * 3, [False] * 3 + [True] * 3]
    numbered.train()
    plain = MoESFTTrainer(
        make_model("sft"), arguments(tmp_path / "b", SFTConfig), train_dataset=data, processing_class=tokenizer
    )
    plain.train()
    assert plain.args.output_dir == str(tmp_path / "b") and "aux_loss" in plain.state.log_history[0]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "reentrant"), [("rest", None), ("routers", False), ("rest", True)])
def test_a_stage_stays_frozen_through_reference_passes(stage, reentrant, tokenizer, tmp_path):
    """
    PEFT unfreezes an adapter when it is disabled for the reference's log-probabilities and enabled again. Checkpointed
    layers run after that.
    """
    own = {"training_stage": stage, "router_z_loss_coef": 0.1, "weight_decay": 0.1, "max_steps": 3}
    if reentrant is not None:
        own |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trainer = make_trainer("dpo", tmp_path, tokenizer, **own)
    trainer.eval_dataset = trainer.train_dataset
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if ".default." in n}
    routers = router_parameters(trainer.model)
    trainer.evaluate()
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if n in before and not torch.equal(p, before[n])}
    assert moved and all((n in routers) == (stage == "routers") for n in moved)
    if reentrant is not None:
        plain = {name: value for name, value in own.items() if "checkpointing" not in name}
        other = make_trainer("dpo", tmp_path / "plain", tokenizer, **plain)
        other.train()
        norms = [[r["grad_norm"] for r in t.state.log_history if "grad_norm" in r] for t in (trainer, other)]
        assert norms[0] == near(norms[1])


def test_a_model_keeps_its_own_balancing_loss(tokenizer, tmp_path):
    """The trainer switches it off for its own passes alone."""
    trainer = make_trainer("dpo", tmp_path, tokenizer, max_steps=1)
    ids = torch.randint(3, 120, (2, 8), generator=torch.Generator().manual_seed(0))
    before = trainer.model.eval()(input_ids=ids, labels=ids)
    trainer.args.learning_rate = 0.0
    trainer.train()
    after = trainer.model.eval()(input_ids=ids, labels=ids)
    assert before.aux_loss > 0
    assert_near(after.loss, before.loss)
    native = make_trainer("dpo", tmp_path / "native", tokenizer, native=True, max_steps=1)
    native.model.config.output_router_logits = True
    native.train()
    assert native.model.config.output_router_logits


def test_a_native_moe_without_a_graph_of_its_logits_is_refused(tokenizer, tmp_path):
    own = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match=r"use_reentrant=True: router losses need gradients"):
        make_trainer("dpo", tmp_path, tokenizer, native=True, **own)


def test_a_loss_before_training_begins(tokenizer, tmp_path):
    trainer = make_trainer("dpo", tmp_path, tokenizer)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.model.train()
    assert trainer.compute_loss(trainer.model, dict(batch)).isfinite()


def test_the_config_that_a_moe_was_trained_with_prepares_data_too(tokenizer, tmp_path):
    args = arguments(tmp_path, MoESFTConfig, router_aux_loss_coef=0.1)
    rows, collator = tokenized(Dataset.from_list([{"text": words(i, 5)} for i in range(4)]), tokenizer, args)
    assert collator([rows[0], rows[1]])["input_ids"].shape == (2, 6)  # with the end of the text
    assert args.router_aux_loss_coef == 0.1


def test_a_step_whose_routing_nobody_saw_is_an_error(tokenizer, tmp_path, monkeypatch):
    trainer = make_trainer("dpo", tmp_path, tokenizer)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    monkeypatch.setattr("moe_peft.training.router_losses.observed_routing", lambda model, observe: nullcontext())
    with pytest.raises(RuntimeError, match=r"MoEDPOTrainer: .* no router logits"):
        trainer.compute_loss(trainer.model, dict(batch))


def test_several_passes_of_one_loss_count_as_one_batch(tokenizer, tmp_path, monkeypatch):
    trainer = make_trainer("dpo", tmp_path, tokenizer, router_aux_loss_coef=0.0, router_z_loss_coef=0.5)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.model.train()
    trainer._step_tokens = batch["attention_mask"].sum()
    once = trainer.compute_loss(trainer.model, dict(batch))
    monkeypatch.setattr(
        "moe_peft.training.router_losses.observed_routing",
        lambda model, observe: observed_routing(model, lambda seen: (observe(seen), observe(seen))),
    )
    assert_near(trainer.compute_loss(trainer.model, dict(batch)), once)


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_with_one_active_expert_routers_learn_from_the_language_loss(mixing):
    torch.manual_seed(1)
    config = MoELoraConfig(num_experts=4, top_k=1, r=4, mixing=mixing, init_lora_weights=False, router_aux_loss_coef=0)
    model = get_peft_model(tiny_llama(), config)
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(weight.grad.norm() > 1e-4 for weight in router_parameters(model).values())


def test_with_one_active_expert_a_native_gate_warns_and_its_replacement_learns(tokenizer, tmp_path, caplog):
    model = trainable_model("mixtral")
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = 1
    model.config.num_experts_per_tok, model.config.router_aux_loss_coef = 1, 0.0
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [weight.grad.norm() for weight in router_parameters(model).values()]

    assert max(gradients()) < 1e-6
    make_sft_trainer(tmp_path / "stock", tokenizer, model)
    assert "num_experts_per_tok=1" in caplog.text and "replace_routers(model, 'linear')" in caplog.text
    caplog.clear()
    replace_routers(model, "linear")
    make_sft_trainer(tmp_path / "routed", tokenizer, model)
    assert "num_experts_per_tok=1" not in caplog.text
    assert min(gradients()) > 1e-4


def test_an_adapter_on_a_moe_is_balanced_by_its_own_coefficient_and_top_k(tokenizer, tmp_path):
    config = MoELoraConfig(num_experts=4, top_k=1, target_modules=["q_proj"], router_aux_loss_coef=0)
    trainer = MoEDPOTrainer(
        model=get_peft_model(make_model("dpo", native=True), config),
        args=arguments(tmp_path, MoEDPOConfig, max_steps=1, logging_steps=1),
        train_dataset=preferences("dpo"),
        processing_class=tokenizer,
    )
    trainer.train()
    assert trainer._coefficients["aux"] == 0
    # The balancing loss of k even loads is k. The base has k = 2, and its own loss stays.
    log = trainer.state.log_history[0]
    assert log["router_aux_loss"] == pytest.approx(1, abs=0.2) and log["aux_loss"] == pytest.approx(2, abs=0.2)
