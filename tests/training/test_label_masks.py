"""Labels in training: losses on answers alone, and rows that may only go to the experts of their label."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy

from moe_peft import MoEDPOConfig
from moe_peft.training.trainers import MoESFTConfig
from tests.helpers.close import assert_near, near
from tests.helpers.routed_models import biased, tuner_layers
from tests.helpers.trainers import EXPERTS, LABELS, MASKED, arguments, logged, make_model, make_trainer, one_batch
from tests.helpers.upit_case import rows

ALLOWED = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0]], dtype=torch.bool)
SGD = {
    "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
}  # fmt: skip
KINDS = ["adapter", "mixtral", "qwen2_moe"]


def expert_slices(model):
    """Every stacked parameter of the experts, [n, …]."""
    return {
        name: p
        for name, p in model.named_parameters()
        if p.dim() == 3 and ("moe_lora_A" in name or "moe_lora_B" in name or ".experts." in name)
    }


def out_of_reach(model, allowed_BN):
    """Hooks of the test's own, by which other experts' logits are far below."""
    layers = tuner_layers(model)
    if not layers:
        return biased(model, allowed_BN)

    def hook(router, args, logits):
        return logits + torch.where(allowed_BN.repeat_interleave(logits.shape[0] // len(allowed_BN), 0), 0, -1e9)

    return [layer.router("default").register_forward_hook(hook) for layer in layers]


@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_those_of_a_plain_loop(kind, tokenizer, tmp_path):
    own = {"router_label_loss_coef": 0.0, "router_aux_loss_coef": 0.0, **MASKED, **SGD}
    trainer = make_trainer(tmp_path, tokenizer, make_model(kind), **own)
    reference, batches, step = make_model(kind), [], trainer.training_step
    trainer.training_step = lambda model, inputs, *rest: batches.append(inputs) or step(model, inputs, *rest)
    trainer.train()

    optimizer = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    reference.train()
    for batch in batches:
        handles = out_of_reach(reference, ALLOWED[batch["token_labels"].max(1).values])
        logits = reference(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        for parameter in expert_slices(reference).values():
            assert not parameter.grad[4:].any()
        optimizer.step()
        optimizer.zero_grad()
        for handle in handles:
            handle.remove()
    assert len(batches) == 3
    for (name, one), other in zip(trainer.model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert_near(one, other, name)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("adapter", {}),
        ("mixtral", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}),
        ("qwen2_moe", {"gradient_checkpointing": True}),
        ("adapter", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ("adapter", {"packing": True, "max_length": 16}),
        ("mixtral", {"padding_free": True, "max_length": None}),
    ],
    ids=["plain", "accumulation", "checkpointing", "reentrant", "packing", "padding-free"],
)
def test_experts_of_no_label_never_move(kind, own, tokenizer, tmp_path):
    """Bit by bit, with AdamW, whichever way a step is computed; all others move."""
    trainer = make_trainer(tmp_path, tokenizer, make_model(kind), **own, **MASKED)
    before = {name: p.detach().clone() for name, p in expert_slices(trainer.model).items()}
    trainer.train()
    for name, parameter in expert_slices(trainer.model).items():
        assert torch.equal(parameter[4:], before[name][4:]), name
        assert all(not torch.equal(parameter[i], before[name][i]) for i in range(4)), name
    assert trainer.state.log_history[0]["dead_experts"] >= 4 / 12  # two of six in each of two layers


@pytest.mark.parametrize(("kind", "reentrant"), [("adapter", False), ("adapter", True), ("mixtral", False)])
def test_checkpointing_trains_as_without_it(kind, reentrant, tokenizer, tmp_path):
    """The layers' second runs route as their first ones did."""
    common = {"router_label_loss_coef": 0.0, "router_aux_loss_coef": 0.0, **MASKED, **SGD}
    kept = make_trainer(tmp_path / "a", tokenizer, make_model(kind), **common)
    again = make_trainer(
        tmp_path / "b", tokenizer, make_model(kind), gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant}, **common,
    )  # fmt: skip
    for trainer in (kept, again):
        trainer.train()
    for (name, one), other in zip(again.model.state_dict().items(), kept.model.state_dict().values(), strict=True):
        assert_near(one, other, name)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_masked_and_nothing_stays(kind, tokenizer, tmp_path):
    data = Dataset.from_list(rows(12))
    own = {"router_label_loss_coef": 0.0, "router_aux_loss_coef": 0.0, **MASKED}
    trainer = make_trainer(tmp_path, tokenizer, make_model(kind), eval_data=data, per_device_eval_batch_size=12, **own)
    measured = trainer.evaluate()["eval_loss"]
    model = make_model(kind).eval()
    batch = trainer.data_collator([trainer.eval_dataset[i] for i in range(12)])

    def loss():
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100).item()

    free = loss()
    handles = out_of_reach(model, ALLOWED[batch["token_labels"].max(1).values])
    assert measured == near(loss()) and abs(measured - free) > 1e-5
    for handle in handles:
        handle.remove()
    model = trainer.model.eval()
    assert loss() == near(free)


@pytest.mark.parametrize(
    ("own", "settings", "message"),
    [
        ({"expert_map": {"a": [0], "b": [2, 3], "c": [4, 5]}}, {}, r"'a' has 1 of the experts, .* top_k=2; give it"),
        ({}, {"num_experts_pattern": {r"layers\.0\.mlp": 4}}, r"router_label_mask=True: layers have \[4, 6\] experts"),
    ],
)
def test_masks_that_cannot_be(own, settings, message, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, tokenizer, make_model(**settings), **{**MASKED, **own})


def test_a_router_that_may_leave_experts_out_needs_one(tokenizer, tmp_path):
    model = make_model(router_type="top_p")
    make_trainer(tmp_path, tokenizer, model, **{**MASKED, "expert_map": {"a": [0], "b": [1], "c": [2]}}).train()


@pytest.mark.parametrize("own", [{"router_label_mask": True}, {"router_label_tokens": "completion"}])
@pytest.mark.parametrize("config", [MoEDPOConfig, MoESFTConfig])
def test_labels_are_needed(own, config, tmp_path):
    """Preference pairs have none."""
    message = f"{next(iter(own))}=.* needs label_column and expert_map, which MoESFTConfig has"
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, config, **own)


def test_unknown_label_tokens(tmp_path):
    with pytest.raises(ValueError, match=r"router_label_tokens='answers': must be one of all, completion"):
        arguments(tmp_path, router_label_tokens="answers", **LABELS)


# --- losses on answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adapter", "mixtral"])
@pytest.mark.parametrize("tokens", ["all", "completion"])
def test_the_label_loss_is_on_the_tokens_that_were_asked_for(kind, tokens, tokenizer, tmp_path):
    own = {"router_label_tokens": tokens, "router_label_loss_coef": 0.7, "router_aux_loss_coef": 0.0}
    trainer = make_trainer(tmp_path, tokenizer, make_model(kind), Dataset.from_list(rows(12)), **own, **LABELS)
    batch = one_batch(trainer, 6)
    assert ((batch["labels"] == -100) & (batch["attention_mask"] == 1)).any()
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    model = make_model(kind).eval()
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True)
    lm = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    counted = batch["attention_mask"] if tokens == "all" else (batch["labels"] != -100)
    label, inside, length = [], [], batch["input_ids"].shape[1]
    for layer in outputs.router_logits:
        p = layer.double().softmax(-1)
        for token in counted.flatten().nonzero().flatten().tolist():
            served = p[token, EXPERTS["abc"[token // length % 3]]].sum()
            label.append(-served.log())
            inside.append(served)
    assert_near(loss, lm.double() + 0.7 * sum(label) / len(label))
    assert logged(trainer)["compliance"] == near((sum(inside) / len(inside)).item())


def test_accumulated_steps_average_over_answers(tokenizer, tmp_path):
    common = {"router_label_tokens": "completion", "router_aux_loss_coef": 0.0, **SGD, **LABELS}
    big = make_trainer(tmp_path / "a", tokenizer, per_device_train_batch_size=8, **common)
    cut = make_trainer(
        tmp_path / "b", tokenizer, per_device_train_batch_size=2, gradient_accumulation_steps=4,
        **common,
    )  # fmt: skip
    for trainer in (big, cut):
        trainer.train()
    for (name, one), other in zip(cut.model.state_dict().items(), big.model.state_dict().values(), strict=True):
        assert_near(one, other, name)


def test_a_masked_adapter_of_a_tiny_base_learns(tokenizer, tmp_path):
    """Routers that comply by themselves: the label loss sees the logits without the mask."""
    own = {"max_steps": 60, "learning_rate": 3e-2, "lr_scheduler_type": "constant", **MASKED}
    trainer = make_trainer(tmp_path, tokenizer, **own)
    trainer.train()
    compliance = [record["compliance"] for record in trainer.state.log_history if "compliance" in record]
    assert compliance[0] < 0.6 and sum(compliance[-5:]) / 5 > 0.85
