"""`MoESFTTrainer`: what it adds to TRL's loss, however a step is split."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import SFTConfig, SFTTrainer

from moe_peft import MoELoraConfig, fold_routers, init_attention_routers
from moe_peft.models.layer import router_parameters
from moe_peft.routing.losses import ROUTER_LOSSES
from moe_peft.training.labels import COLUMN
from moe_peft.training.router_config import RouterLossConfig
from moe_peft.training.router_losses import RouterLossesMixin
from moe_peft.training.schedule import phase_at
from moe_peft.training.trainers import MoEDPOConfig, MoESFTConfig, MoESFTTrainer
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.processes import in_processes
from tests.helpers.trainers import EXPERTS, LABELS, arguments, logged, make_model, make_trainer, one_batch
from tests.helpers.upit_case import rows
from tests.helpers.words import word_tokenizer

N, K = 6, 2


@pytest.mark.parametrize("given", ["both", "no tokenizer", "names"])
@pytest.mark.parametrize("adapted", ["config", "model"])
def test_another_tokenizers_template_with_new_tokens(given, adapted, tokenizer, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<new>"])
    other.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    other.save_pretrained(tmp_path / "other")
    model, config = str(tmp_path / "base"), MoELoraConfig(task_type="CAUSAL_LM")
    if given != "names" or adapted == "model":
        model = AutoModelForCausalLM.from_pretrained(model)
    if adapted == "model":
        model, config = get_peft_model(model, config), None
    args, data = arguments(tmp_path, chat_template_path=str(tmp_path / "other")), Dataset.from_list(rows(24))
    processing = {"processing_class": tokenizer} if given == "both" else {}
    with pytest.raises(ValueError, match=r"^chat_template_path='.*other': its tokenizer adds '<new>'"):
        MoESFTTrainer(model=model, args=args, train_dataset=data, peft_config=config, **processing)


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adapter", "mixtral", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_joint_loss_is_the_sum_of_its_parts(kind, scope, tokenizer, tmp_path):
    coefficients = {"router_label_loss_coef": 0.7, "router_z_loss_coef": 0.03, "router_aux_loss_coef": 0.2}
    model = make_model(kind)
    trainer = make_trainer(tmp_path, tokenizer, model, router_balancing=scope, **coefficients, **LABELS)
    batch = one_batch(trainer)
    assert (batch["attention_mask"] == 0).any()
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, dict(batch))

    reference = make_model(kind).eval()
    outputs = reference(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True)
    lm = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    mask = batch["attention_mask"].flatten().bool()
    if scope == "global":
        balance = load_balancing_loss_func(outputs.router_logits, N, K, batch["attention_mask"])
    else:
        each = [load_balancing_loss_func((layer,), N, K, batch["attention_mask"]) for layer in outputs.router_logits]
        balance = sum(each) / len(each)
    label, z = [], []
    for layer in outputs.router_logits:
        p = layer.double().softmax(-1)
        for token in mask.nonzero().flatten().tolist():
            row = token // batch["input_ids"].shape[1]
            own = EXPERTS["abc"[row % 3]]
            label.append(-p[token, own].sum().log())
            z.append(layer[token].double().logsumexp(-1) ** 2)
    expected = lm + 0.2 * balance + 0.03 * sum(z) / len(z) + 0.7 * sum(label) / len(label)
    assert_near(loss, expected)
    noted = logged(trainer)
    assert noted["router_label_loss"] == near(float(sum(label) / len(label)))
    assert noted["aux_loss"] == near(balance.item())


def test_without_labels_and_z_loss_it_is_trls_loss(tokenizer, tmp_path):
    data = Dataset.from_list(rows(24))
    ours = make_trainer(tmp_path / "ours", tokenizer, data=data, max_steps=4)
    theirs = SFTTrainer(
        model=make_model(), args=arguments(tmp_path / "trl", SFTConfig, max_steps=4), train_dataset=data,
        processing_class=tokenizer,
    )  # fmt: skip
    for trainer in (ours, theirs):
        trainer.train()
    mine, reference = ([r for r in t.state.log_history if "loss" in r] for t in (ours, theirs))
    for one, other in zip(mine, reference, strict=True):
        assert one["loss"] == near(other["loss"])
        assert one["aux_loss"] == near(other["aux_loss"])
    for (name, one), other in zip(ours.model.state_dict().items(), theirs.model.state_dict().values(), strict=True):
        assert_near(one, other, name)


def test_everything_is_logged(tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, tokenizer, **LABELS)
    trainer.train()
    record = trainer.state.log_history[0]
    names = (
        "aux_loss",
        "router_z_loss",
        "router_entropy",
        "router_label_loss",
        "compliance",
        "load_cv",
        "dead_experts",
    )
    assert all(isinstance(record[name], float) for name in names)
    assert 0 < record["compliance"] < 1 and 0 < record["router_entropy"] < 1.8


# --- how a step is cut up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("adapter", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
        ("mixtral", {"gradient_checkpointing": True, "per_device_train_batch_size": 8}),
        (
            "adapter",
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
                "per_device_train_batch_size": 8,
            },
        ),
    ],
    ids=["accumulation", "checkpointing", "reentrant"],
)
def test_same_steps_however_they_are_cut(kind, own, tokenizer, tmp_path):
    """Rows of different lengths, so that means of means would differ. Balancing, no mean over tokens, is off."""
    common = {
        "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "router_aux_loss_coef": 0.0,
        "router_z_loss_coef": 0.1, **LABELS,
    }  # fmt: skip
    big = make_trainer(tmp_path / "big", tokenizer, make_model(kind), per_device_train_batch_size=8, **common)
    cut = make_trainer(tmp_path / "cut", tokenizer, make_model(kind), **{**common, **own})
    for trainer in (big, cut):
        trainer.train()
    # Another number of tokens in a batch may be computed in another way, and rounded otherwise.
    for (name, one), other in zip(cut.model.state_dict().items(), big.model.state_dict().values(), strict=True):
        assert_near(one, other, name)


def test_accumulated_batches_count_as_one_in_the_balancing_loss(tokenizer, tmp_path):
    """Twice the same rows, in two batches of a step, train as these rows do alone."""
    common = {
        "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "router_aux_loss_coef": 0.5, "max_steps": 1,
        "train_sampling_strategy": "sequential", "router_z_loss_coef": 0.1,
    }  # fmt: skip
    one = make_trainer(tmp_path / "one", tokenizer, data=Dataset.from_list(rows(4)), **common)
    two = make_trainer(
        tmp_path / "two", tokenizer, data=Dataset.from_list(rows(4) * 2), gradient_accumulation_steps=2, **common
    )
    before = {name: p.detach().clone() for name, p in router_parameters(one.model).items()}
    for trainer in (one, two):
        trainer.train()
    for (name, found), expected in zip(two.model.named_parameters(), one.model.parameters(), strict=True):
        assert_near(found, expected, name)
    assert all((p - before[name]).abs().max() > 1e-4 for name, p in router_parameters(one.model).items())
    loss, expected = (trainer.compute_loss(trainer.model.eval(), one_batch(trainer)).item() for trainer in (two, one))
    assert loss == near(expected)  # in evaluation there are no steps


def train_in_processes(rank: int, folder: Path) -> None:
    trainer = make_trainer(
        folder, word_tokenizer(model_max_length=256), per_device_train_batch_size=4, optim="sgd", learning_rate=0.05,
        max_grad_norm=0.0, router_aux_loss_coef=0.0, router_z_loss_coef=0.1, **LABELS,
    )  # fmt: skip
    trainer.train()
    if rank == 0:
        torch.save((trainer.model.state_dict(), trainer.state.log_history), folder / "trained.pt")


@pytest.mark.slow
def test_two_processes_train_as_one(tokenizer, tmp_path):
    in_processes(train_in_processes, tmp_path)
    weights, history = torch.load(tmp_path / "trained.pt", weights_only=False)
    one = make_trainer(
        tmp_path / "one", tokenizer, per_device_train_batch_size=8, optim="sgd", learning_rate=0.05, max_grad_norm=0.0,
        router_aux_loss_coef=0.0, router_z_loss_coef=0.1, **LABELS,
    )  # fmt: skip
    one.train()
    for name, value in one.model.state_dict().items():
        assert_near(weights[name], value, name)
    assert history[0]["load_cv"] == near(one.state.log_history[0]["load_cv"])


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["padded", "padding-free", "bfd", "wrapped", "bfd_split", "truncated"])
def test_every_token_keeps_its_label(how, tokenizer, tmp_path):
    own = {
        "padded": {},
        "padding-free": {"padding_free": True, "max_length": None},
        "bfd": {"packing": True, "max_length": 32},
        "wrapped": {"packing": True, "max_length": 16, "packing_strategy": "wrapped"},
        "bfd_split": {"packing": True, "max_length": 8, "packing_strategy": "bfd_split"},
        "truncated": {"max_length": 6},
    }[how]
    trainer = make_trainer(tmp_path, tokenizer, **own, **LABELS)
    batches = list(trainer.get_train_dataloader())
    assert {"token_labels", "input_ids"} <= batches[0].keys()
    first_words, seen = {3: 0, 4: 1, 5: 2}, 0  # a row's first word is its domain
    for batch in batches:
        for ids, labels in zip(batch["input_ids"].tolist(), batch["token_labels"].tolist(), strict=True):
            current = None
            for position, (token, label) in enumerate(zip(ids, labels, strict=True)):
                starts = position == 0 or ids[position - 1] in (tokenizer.eos_token_id,)
                if how == "truncated" or how == "bfd_split":
                    starts = position == 0
                if token in first_words and starts and how in ("padded", "padding-free", "bfd", "truncated"):
                    current = first_words[token]
                if token == tokenizer.pad_token_id:
                    assert label == -1
                elif current is not None:
                    assert label == current
                    seen += 1
    if how in ("padded", "padding-free", "bfd"):
        assert seen == sum(len(row["input_ids"]) for row in trainer.train_dataset)
    # Whatever the cut: as many tokens of each label as the rows have.
    plain = make_trainer(tmp_path / "plain", tokenizer, **LABELS, **({"max_length": 6} if how == "truncated" else {}))
    count = [sum(row["token_labels"].count(i) for row in trainer.train_dataset) for i in range(3)]
    whole = [sum(row["token_labels"].count(i) for row in plain.train_dataset) for i in range(3)]
    assert count == whole and min(count) > 0
    trainer.train()
    assert trainer.state.log_history[0]["router_label_loss"] > 0


def test_padding_of_padding_free_batches_has_no_label(tokenizer, tmp_path):
    noted = []
    for name, own in (("padded", {}), ("free", {"padding_free": True, "max_length": None, "pad_to_multiple_of": 16})):
        trainer = make_trainer(tmp_path / name, tokenizer, **own, **LABELS)
        batch = one_batch(trainer)
        assert (batch["token_labels"] == -1).any() and ("attention_mask" in batch) == (name == "padded")
        trainer.model.eval()
        trainer.compute_loss(trainer.model, batch)
        names = ("router_label_loss", "aux_loss", "compliance", "router_entropy")
        found = logged(trainer)
        noted.append({key: found[key] for key in names})
        assert trainer._token_counts(batch).tolist() == [int((batch["token_labels"] != -1).sum())] * 2
    assert noted[0] == near(noted[1])


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"label_column": "topic"}, "label_column='topic': the train dataset has"),
        ({"expert_map": {"a": [0], "b": [1]}}, r"no experts for the labels \['c'\] of the train dataset"),
        ({"expert_map": {**EXPERTS, "c": [6]}}, "'c': \\[6\\]: name experts from 0 to 5"),
        ({"expert_map": {**EXPERTS, "c": []}}, "'c': \\[\\]: name experts from 0 to 5"),
        ({"expert_map": None}, "set both or neither"),
        ({"expert_map": None, "label_column": None, "training_stage": "routers"}, "needs label_column and expert_map"),
        ({"training_stage": "all"}, "training_stage='all': must be one of"),
        ({"router_balancing": "token"}, "router_balancing='token'"),
        (
            {"router_schedule": "three_phase", "lr_scheduler_type": "cosine"},
            "lr_scheduler_type='cosine': router_schedule='three_phase' sets the learning rate",
        ),
        ({"router_aux_loss_coef": math.nan}, "router_aux_loss_coef=nan: must be a finite number, at least 0"),
        ({"router_z_loss_coef": -1.0}, "router_z_loss_coef=-1.0: must be a finite number, at least 0"),
        ({"router_learning_rate": math.inf}, "router_learning_rate=inf: must be a finite number, at least 0"),
        ({"router_bias_anneal": 25}, "router_bias_anneal=25: must be a share of the steps, 0 to 1"),
        ({"router_schedule": "three_phase", "warmup_steps": 5}, "warmup_steps=5: router_schedule='three_phase' sets"),
    ],
)
def test_wrong_settings(own, message, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, tokenizer, **{**LABELS, **own})


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("label_loss", [0.0, 0.5])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_stage_of_routers_needs_a_loss_that_counts_in_it(labels, label_loss, z_loss, tmp_path):
    """The label loss counts only with labels, the balancing loss not at all."""
    own = {"training_stage": "routers", "router_z_loss_coef": z_loss, "router_aux_loss_coef": 0.5}
    own |= {"router_label_loss_coef": label_loss, **LABELS} if labels else {}
    cls = MoESFTConfig if labels else MoEDPOConfig
    if z_loss or (labels and label_loss):
        assert arguments(tmp_path, cls, **own).training_stage == "routers"
    else:
        with pytest.raises(ValueError, match="no loss trains the routers"):
            arguments(tmp_path, cls, **own)


def test_a_layer_that_has_none_of_a_labels_experts(tokenizer, tmp_path):
    model = make_model(num_experts_pattern={r"layers\.0\.mlp": 4})
    own = {"label_column": "domain", "expert_map": {"a": [0, 1], "b": [3, 5], "c": [4, 5]}}
    with pytest.raises(ValueError, match=r"expert_map: 'c' has experts \[4, 5\], but a layer has only 4; give"):
        make_trainer(tmp_path, tokenizer, model, **own)
    trainer = make_trainer(tmp_path, tokenizer, model, **{**own, "expert_map": {**own["expert_map"], "c": [0, 5]}})
    trainer.train()
    losses = [record["router_label_loss"] for record in trainer.state.log_history if "router_label_loss" in record]
    assert losses and all(0 < loss < 20 for loss in losses)


@pytest.mark.parametrize("own", [{"packing": True, "max_length": 32}, {"padding_free": True, "max_length": None}])
def test_padding_that_nothing_marks_is_refused(own, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="pad_to_multiple_of=64: nothing marks this padding in packed"):
        make_trainer(tmp_path, tokenizer, pad_to_multiple_of=64, **own)
    make_trainer(tmp_path, tokenizer, pad_to_multiple_of=64, **own, **LABELS)  # whose labels mark it


def test_missing_labels_and_models_without_routers(tokenizer, tmp_path):
    broken = [{**row, "domain": None if i == 5 else row["domain"]} for i, row in enumerate(rows(12))]
    with pytest.raises(ValueError, match=r"no experts for the labels \['None'\]"):
        make_trainer(tmp_path, tokenizer, data=Dataset.from_list(broken), **LABELS)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no router;"):
        make_trainer(tmp_path, tokenizer, tiny_llama())


# --- stages -----------------------------------------------------------------------------------------------------------


def changed(model, before):
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "mixtral"])
def test_two_stages(kind, tokenizer, tmp_path):
    """Routers alone learn to comply; then all else learns, and they stay as they are."""
    model = make_model(kind)
    before = copy.deepcopy(model.state_dict())
    routers = set(router_parameters(model))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    own = {"max_steps": 80, "learning_rate": 1e-1, "lr_scheduler_type": "constant"}
    first = make_trainer(tmp_path / "1", tokenizer, model, training_stage="routers", **own, **LABELS)
    first.train()
    assert changed(model, before) == routers
    compliance = [record["compliance"] for record in first.state.log_history if "compliance" in record]
    assert compliance[0] < 0.45 and sum(compliance[-5:]) / 5 > 0.85
    before = copy.deepcopy(model.state_dict())
    own |= {"max_steps": 20, "learning_rate": 3e-3}
    second = make_trainer(tmp_path / "2", tokenizer, model, training_stage="rest", **own, **LABELS)
    second.train()
    touched = changed(model, before)
    assert touched and not touched & routers
    losses = [record["loss"] for record in second.state.log_history if "loss" in record]
    assert sum(losses[-5:]) < sum(losses[:5])
    make_trainer(tmp_path / "3", tokenizer, model, **own, **LABELS)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable


def test_the_rest_is_trained_by_the_language_loss_alone(tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, tokenizer, training_stage="rest", router_z_loss_coef=5.0, **LABELS)
    batch = one_batch(trainer)
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    logits = make_model().eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    lm = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    assert_near(loss, lm)


def test_routers_alone_are_trained_by_their_losses_without_the_balancing_one(tokenizer, tmp_path):
    own = {"router_z_loss_coef": 0.03, "router_aux_loss_coef": 0.2, **LABELS}  # the label loss counts 1 by default
    trainer = make_trainer(tmp_path, tokenizer, training_stage="routers", **own)
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, one_batch(trainer)).item()
    noted = logged(trainer)
    assert noted["aux_loss"] > 1  # it is logged all the same
    assert loss == near(0.03 * noted["router_z_loss"] + noted["router_label_loss"])


@pytest.mark.parametrize("tokens", ["all", "completion"])
def test_the_label_loss_of_a_step_is_a_mean_over_its_own_tokens(tokens, tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, tokenizer, router_label_tokens=tokens, **LABELS)
    batch = one_batch(trainer)
    assert (batch["labels"][batch["attention_mask"].bool()] == -100).any()  # prompts
    _, items = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    losses = []
    for trainer._coefficients["label"] in (1.0, 0.0):
        losses.append(trainer.compute_loss(trainer.model.train(), dict(batch), num_items_in_batch=items).item())
    assert losses[0] - losses[1] == near(logged(trainer)["router_label_loss"])


def test_three_phases(tokenizer, tmp_path):
    assert [phase_at(step, 100) for step in (0, 4, 5, 74, 75, 100)] == [0, 0, 1, 1, 2, 2]
    assert ROUTER_LOSSES["aux"].phases == (5.0, 1.0, 0.5) and ROUTER_LOSSES["z"].phases == (2.0, 1.0, 0.5)
    own = {"router_schedule": "three_phase", "max_steps": 20, "router_aux_loss_coef": 0.5, "learning_rate": 1e-3}
    trainer = make_trainer(tmp_path, tokenizer, router_z_loss_coef=0.25, **own)
    trainer.train()
    rates = [record["learning_rate"] for record in trainer.state.log_history if "loss" in record]
    assert rates == near([1e-4] + [1e-3] * 14 + [1e-4] * 5)
    json.dumps(trainer.state.log_history)
    trainer._step_tokens = None  # of the last step
    for mode, step, factors in (
        ("train", 0, (5.0, 2.0)), ("train", 10, (1.0, 1.0)), ("train", 19, (0.5, 0.5)),
        ("eval", 0, (1.0, 1.0)), ("eval", 19, (1.0, 1.0)),  # or the best checkpoint would be one of the last phase
    ):  # fmt: skip
        trainer.state.global_step = step
        trainer.model.train(mode == "train")
        with_both = trainer.compute_loss(trainer.model, one_batch(trainer))
        for name, name_in_log, coefficient, factor in zip(
            ("aux", "z"), ("aux_loss", "router_z_loss"), (0.5, 0.25), factors, strict=True
        ):
            trainer._coefficients[name] = 0.0
            without = trainer.compute_loss(trainer.model, one_batch(trainer))
            trainer._coefficients[name] = coefficient
            value = logged(trainer)[name_in_log]
            assert (with_both - without).item() == near(coefficient * factor * value, scale=with_both)


def test_step_decay(tokenizer, tmp_path):
    """Router Upcycling, section 4.1: from 0 in the first 1 % of the steps, times 0.316 at 80 % and at 90 %."""
    fields = {"router_schedule": "step_decay", "max_steps": 200, "learning_rate": 1e-3}
    trainer = make_trainer(tmp_path, tokenizer, **fields)
    trainer.create_optimizer_and_scheduler(200)
    rates = []
    for _ in range(200):
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    expected = [0.0, 5e-4] + [1e-3] * 158 + [3.16e-4] * 20 + [0.99856e-4] * 20
    assert rates == near(expected)
    trainer.model.train()
    trainer.state.global_step, trainer.state.max_steps = 0, 200
    assert trainer._coefficient("aux") == trainer._coefficients["aux"]  # losses have no phases


@pytest.mark.parametrize("reentrant", [False, True])
def test_routers_alone_learn_under_checkpointing(reentrant, tokenizer, tmp_path):
    own = {"training_stage": "routers", "router_z_loss_coef": 0.1, **LABELS}
    plain, other = (make_trainer(tmp_path / str(i), tokenizer, **own, **more) for i, more in enumerate((
        {}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}},
    )))  # fmt: skip
    before = {name: p.detach().clone() for name, p in router_parameters(plain.model).items()}
    for trainer in (plain, other):
        trainer.train()
    for (name, one), two in zip(
        router_parameters(plain.model).items(), router_parameters(other.model).values(), strict=True
    ):
        assert not torch.equal(one, before[name])
        assert_near(two, one)


def test_three_phases_of_a_training_that_was_prolonged(tokenizer, tmp_path):
    """Learning rate and losses are of one schedule, that of all its steps."""
    own = {"router_schedule": "three_phase", "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 4}
    make_trainer(tmp_path, tokenizer, max_steps=4, **own).train()
    trainer = make_trainer(tmp_path, tokenizer, max_steps=8, **own)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    rates = {record["step"]: record["learning_rate"] for record in trainer.state.log_history if "loss" in record}
    assert [rates[step] for step in (6, 7, 8)] == near([1e-3, 1e-4, 1e-4])  # step 5 has that of the checkpoint


@pytest.mark.parametrize("kind", ["adapter", "mixtral", "attention gates"])
def test_resumed_training_is_the_one_that_was_not_stopped(kind, tokenizer, tmp_path):
    def model():
        made = make_model(kind.replace("attention gates", "mixtral"))
        if kind == "attention gates":
            init_attention_routers(made, [{"input_ids": torch.arange(3, 60).view(3, -1)}], num_heads=1)
        return made

    own = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2, **LABELS}
    whole = make_trainer(tmp_path / "a", tokenizer, model(), **own)
    whole.train()
    again = make_trainer(tmp_path / "b", tokenizer, model(), **own)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert not changed(again.model, whole.model.state_dict())


def test_the_best_of_a_native_moe_is_loaded_completely(tokenizer, tmp_path):
    own = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
        "learning_rate": 0.5, "load_best_model_at_end": True, **LABELS,
    }  # fmt: skip
    trainer = make_trainer(tmp_path, tokenizer, make_model("mixtral"), eval_data=Dataset.from_list(rows(6)), **own)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert not best.endswith("-4")
    assert not changed(trainer.model, type(trainer.model).from_pretrained(best).state_dict())


@pytest.mark.parametrize("first, second", [("routers", "joint"), ("routers", "rest"), ("rest", "routers")])
def test_stages_survive_folding_and_copying(first, second, tokenizer, tmp_path):
    model = get_peft_model(
        tiny_llama(), MoELoraConfig(num_experts=6, router_type="attention", router_num_heads=2, task_type="CAUSAL_LM")
    )
    make_trainer(tmp_path / "1", tokenizer, model, training_stage=first, **LABELS)
    fold_routers(model)
    model = copy.deepcopy(model)
    make_trainer(tmp_path / "2", tokenizer, model, training_stage=second, **LABELS)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    routers = set(router_parameters(model))
    assert bool(trained & routers) == (second != "rest") and bool(trained - routers) == (second != "routers")


def test_nothing_to_train_is_said(tokenizer, tmp_path):
    model = make_model("adapter").requires_grad_(False)
    with pytest.raises(ValueError, match="training_stage='joint': nothing is left to train"):
        make_trainer(tmp_path, tokenizer, model, **LABELS)


# --- what is easily lost ----------------------------------------------------------------------------------------------


def test_a_plain_config_gets_the_fields_of_the_losses(tokenizer, tmp_path):
    class Trainer(RouterLossesMixin, SFTTrainer):
        pass

    args = arguments(tmp_path, SFTConfig)
    trainer = Trainer(make_model(), args, train_dataset=Dataset.from_list(rows(24)), processing_class=tokenizer)
    found = {f.name: getattr(trainer.args, f.name) for f in dataclasses.fields(RouterLossConfig)}
    assert found == {f.name: f.default for f in dataclasses.fields(RouterLossConfig)}
    trainer.train()
    assert "aux_loss" in trainer.state.log_history[0]


def test_a_schedule_is_of_the_optimizer_that_is_given(tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, tokenizer)
    own = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    assert trainer.create_scheduler(10, own).optimizer is own
    trainer = make_trainer(tmp_path, tokenizer, router_schedule="three_phase")
    assert trainer.create_scheduler(10, own).optimizer is own


@pytest.mark.parametrize("training", [True, False])
def test_outputs_come_with_the_loss_if_asked_for(training, tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, tokenizer, router_z_loss_coef=0.1)
    trainer.model.train(training)
    batch = one_batch(trainer)
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert_near(loss, trainer.compute_loss(trainer.model, batch))
    plain = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert_near(outputs.logits, trainer.model(**plain).logits)
    assert isinstance(trainer.compute_loss(trainer.model, batch), torch.Tensor)


def test_labels_in_a_batch_of_a_trainer_without_an_expert_map_are_left_alone(tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, tokenizer, router_z_loss_coef=0.1)
    batch = one_batch(trainer)
    labels = torch.zeros_like(batch["input_ids"])
    assert_near(
        trainer.compute_loss(trainer.model, {**batch, COLUMN: labels}), trainer.compute_loss(trainer.model, batch)
    )


def test_a_loss_that_is_off_does_not_hide_those_after_it(tokenizer, tmp_path):
    """Without labels the label loss is left out, and one that comes after it in the table counts."""
    trainer = make_trainer(tmp_path, tokenizer, router_aux_loss_coef=0.0)
    batch = one_batch(trainer)
    with torch.no_grad(), registered("late", lambda given: given.router_logits[0].square().mean()):
        losses = []
        for coefficient in (2.0, 0.0):
            trainer._coefficients["late"] = coefficient
            losses.append(trainer.compute_loss(trainer.model, batch))
        logits = trainer.model(**batch, output_router_logits=True).router_logits[0]
    assert_near(losses[0] - losses[1], 2 * logits.float().square().mean())


@contextlib.contextmanager
def registered(name, function):
    ROUTER_LOSSES[name] = dataclasses.replace(ROUTER_LOSSES["aux"], function=function, coefficient=0.0)
    try:
        yield
    finally:
        del ROUTER_LOSSES[name]


def test_the_loss_of_one_token_is_its_own(tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, tokenizer, router_z_loss_coef=0.5, router_aux_loss_coef=0.0)
    trainer.model.eval()
    batch = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[-100, 6]])}
    batch["attention_mask"] = torch.tensor([[0, 1]])
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, batch)
        logits = trainer.model(**batch, output_router_logits=True).router_logits
        found = logged(trainer)["router_z_loss"]
        trainer._coefficients["z"] = 0.0
        without = trainer.compute_loss(trainer.model, batch)
    wanted = sum(one[1].float().logsumexp(-1).square() for one in logits).item() / 2
    assert found == near(wanted)
    assert (loss - without).item() == near(0.5 * wanted)


def test_the_scale_of_a_micro_batch(tokenizer, tmp_path):
    """A loss that the trainer divides by the accumulated batches is not divided before."""
    trainer = make_trainer(tmp_path, tokenizer)
    trainer.current_gradient_accumulation_steps = 4
    trainer.model.train()
    assert (trainer._scales(of_step=True), trainer._scales(of_step=False)) == ((0.25, 0.25), (1.0, 1.0))
    trainer._step_tokens = torch.tensor(10)
    assert (trainer._scales(of_step=True), trainer._scales(of_step=False)) == ((1.0, 0.25), (4.0, 1.0))
    trainer.model.eval()
    assert trainer._scales(of_step=False) == (1.0, 1.0)


def test_phases_before_training_are_none(tokenizer, tmp_path):
    """An evaluation, or a loss of one's own, before a number of steps is known."""
    trainer = make_trainer(tmp_path, tokenizer, router_schedule="three_phase", router_z_loss_coef=0.1)
    assert trainer.state.max_steps == 0
    trainer.model.train()
    assert trainer._coefficient("z") == 0.1
    assert trainer.compute_loss(trainer.model, one_batch(trainer)).isfinite()


def test_a_column_of_the_users_own_is_not_taken_for_labels_of_tokens(tokenizer, tmp_path):
    data = Dataset.from_list([{**row, "token_labels": [0]} for row in rows(6)])
    with pytest.raises(ValueError, match="token_labels: the train dataset has this column, which label_column creates"):
        make_trainer(tmp_path, tokenizer, data=data, **LABELS)


def test_rows_that_are_not_prepared_have_no_labels_of_tokens(tokenizer, tmp_path):
    ids = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5], "domain": "a"}] * 6
    skipped = {"dataset_kwargs": {"skip_prepare_dataset": True}, **LABELS}
    with pytest.raises(ValueError, match="skip_prepare_dataset, no token gets the label of its row"):
        make_trainer(tmp_path, tokenizer, data=Dataset.from_list(ids), **skipped)
    own = Dataset.from_list([{**row, "token_labels": [0, 1, 2]} for row in ids])
    trainer = make_trainer(tmp_path, tokenizer, data=own, **skipped)
    trainer.train()
    assert "router_label_loss" in trainer.state.log_history[0]


def test_what_a_stage_freezes_is_not_in_its_optimizer(tokenizer, tmp_path):
    """PEFT makes adapters trainable again whenever it switches them on, also before the optimizer is made."""
    trainer = make_trainer(tmp_path, tokenizer, training_stage="rest")
    routers = list(router_parameters(trainer.model).values())
    trainer.model.base_model.set_adapter("default")
    assert all(p.requires_grad for p in routers)
    optimizer = trainer.create_optimizer()
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert optimized and not optimized & {id(p) for p in routers} and not any(p.requires_grad for p in routers)


def test_evaluation_balances_each_process_by_itself(tokenizer, tmp_path, monkeypatch):
    """Processes may have different numbers of evaluation batches, so none can wait for the others."""
    trainer = make_trainer(tmp_path, tokenizer, router_global_batch=True, router_aux_loss_coef=0.5)
    batch, asked = one_batch(trainer), []
    monkeypatch.setattr(trainer, "_mean_over_processes", lambda values: asked.append(values) or values)
    trainer.model.eval()
    trainer.compute_loss(trainer.model, dict(batch))
    assert not asked
    trainer.model.train()
    trainer.compute_loss(trainer.model, dict(batch))
    assert asked


def test_lora_plus_gives_b_matrices_their_rate_and_routers_that_of_a():
    model = make_model()
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    rates = {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates == {name: 16e-3 if "moe_lora_B" in name else 1e-3 for name in names.values()}
    assert any("moe_lora_router" in name for name in rates)
