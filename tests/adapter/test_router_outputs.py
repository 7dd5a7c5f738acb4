"""Every trainer trains an adapted model's routers with the balancing loss, added once and without padding."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from compatibility.families import tiny
from moe_peft import MoELoraConfig
from moe_peft.models.gates import uniform_gates
from moe_peft.models.introspection import observed_routing
from moe_peft.routing.losses import balancing_loss
from tests.helpers.adapters import COEF, adapted, adapter, batch
from tests.helpers.balance import layer_balancing_loss
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.routed_models import tuner_layers


def router_logits_by_hand(model, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Logits from the routers' own inputs, gathered by hooks of the test's."""
    logits, handles = [], []
    for name, module in model.named_modules():
        if name.endswith("moe_lora_router.default"):
            handles.append(
                module.register_forward_hook(lambda m, args, out: logits.append(args[0].reshape(-1, 64) @ m.weight.T))
            )
    model(**{k: v for k, v in inputs.items() if k != "labels"}, output_router_logits=False)
    for handle in handles:
        handle.remove()
    return tuple(logits)


def router_gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and "router" in n}


def all_gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a
    assert_near(a, b)


# --- what the outputs hold ------------------------------------------------------------------------------------------


def test_backbone_output_has_one_tensor_of_router_logits_per_layer():
    model = adapted()
    inputs = batch()
    out = model.get_base_model().model(inputs["input_ids"], inputs["attention_mask"], output_router_logits=True)
    expected = router_logits_by_hand(model, inputs)
    assert len(out.router_logits) == len(expected) == 2
    for got, want in zip(out.router_logits, expected, strict=True):
        assert got.dtype == torch.float32
        assert_near(got, want)


@pytest.mark.parametrize("padded", [False, True])
def test_loss_is_language_loss_plus_coefficient_times_balance_without_padding(padded: bool):
    model = adapted().eval()
    inputs = batch(padded)
    out = model(**inputs)
    plain = model(**inputs, output_router_logits=False)
    logits = router_logits_by_hand(model, inputs)
    aux = layer_balancing_loss(logits, 4, 2, inputs["attention_mask"])
    assert_near(out.aux_loss, aux)
    assert_near(out.loss, plain.loss + COEF * aux)
    assert not hasattr(plain, "aux_loss") or plain.get("aux_loss") is None


def test_padding_content_changes_neither_loss():
    model = adapted().eval()
    inputs = batch()
    other = {**inputs, "input_ids": torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], 77)}
    assert_near(model(**inputs).aux_loss, model(**other).aux_loss)
    assert_near(model(**inputs).loss, model(**other).loss)


def test_positional_attention_mask_is_understood():
    model = adapted().get_base_model().eval()
    inputs = batch()
    by_position = model(inputs["input_ids"], inputs["attention_mask"], labels=inputs["labels"])
    assert_near(by_position.aux_loss, model(**inputs).aux_loss)


def test_a_mask_of_pairs_says_nothing_of_padding():
    model, inputs = adapted().eval(), batch(padded=False)
    causal = torch.ones(12, 12, dtype=torch.bool).tril().expand(3, 1, 12, 12)
    out = model(**{**inputs, "attention_mask": causal})
    with observed_routing(model, lambda collection: None):
        of_all_rows = model(**{**inputs, "attention_mask": causal[:1]})
    assert_near(of_all_rows.aux_loss, out.aux_loss)
    assert_near(out.loss, model(**inputs).loss)
    assert_near(out.aux_loss, layer_balancing_loss(out.router_logits, 4, 2))


def test_return_dict_false_has_the_whole_loss_first():
    model = adapted().eval()
    inputs = batch()
    loss, *rest = model(**inputs, return_dict=False)
    out = model(**inputs)
    assert_near(loss, out.loss)
    assert_near(rest[0], out.logits)
    inputs.pop("labels")
    assert_near(model(**inputs, return_dict=False)[0], out.logits)  # nothing to add a loss to


def test_without_labels_there_is_a_balancing_loss_on_request_alone():
    model, inputs = adapted().eval(), batch()
    inputs.pop("labels")
    plain = model(**inputs)
    assert plain.get("aux_loss") is None and len(plain.router_logits) == 2
    asked = model(**inputs, output_router_logits=True)
    expected = layer_balancing_loss(plain.router_logits, 4, 2, inputs["attention_mask"])
    assert_near(asked.aux_loss, expected)
    assert asked.get("loss") is None


def test_router_logits_that_nobody_asked_for_are_nowhere():
    """Not in the backbone's output either, which others may look at."""
    model, seen = adapted().eval(), []
    handle = model.get_base_model().model.register_forward_hook(lambda module, args, output: seen.append(output))
    out = model(**batch(), output_router_logits=False)
    handle.remove()
    assert out.get("router_logits") is None and out.get("aux_loss") is None
    assert seen[0].get("router_logits") is None


def test_a_head_has_one_lora():
    """Its router would run after the pass that is recorded, and on fewer tokens where few logits are asked for."""
    with pytest.raises(ValueError, match=r"'lm_head' runs after the layers, .*num_experts_pattern=\{'lm_head'"):
        adapted(target_modules=["q_proj", "lm_head"])
    model = adapted(target_modules=["q_proj", "lm_head"], num_experts_pattern={"lm_head": 1}).eval()
    output = model(batch()["input_ids"], logits_to_keep=1, output_router_logits=True)
    assert len(output.router_logits) == 2 and output.logits.shape[1] == 1


def test_the_plain_trainers_predictions_leave_router_logits_out():
    """Only while there are routers; what a config says of its own stays."""
    usual = ["past_key_values"]
    model = adapted()
    assert model.config.keys_to_ignore_at_inference == [*usual, "router_logits", "aux_loss"]
    base = model.unload()
    assert "keys_to_ignore_at_inference" not in base.config.__dict__
    assert getattr(base.config, "keys_to_ignore_at_inference", usual) == usual
    own = tiny_llama()
    own.config.keys_to_ignore_at_inference = ["past_key_values", "hidden_states"]
    model = adapted(base=own)
    assert model.config.keys_to_ignore_at_inference == [*usual, "hidden_states", "router_logits", "aux_loss"]
    assert model.unload().config.keys_to_ignore_at_inference == [*usual, "hidden_states"]


def test_coefficient_zero_turns_the_balancing_loss_off():
    model = adapted(router_aux_loss_coef=0.0)
    assert model.config.output_router_logits is False
    assert model(**batch()).get("aux_loss") is None


def test_disabled_adapters_leave_the_base_loss():
    base = tiny_llama().eval()
    expected = copy.deepcopy(base)(**batch())
    model = adapted(base=base).eval()
    with model.disable_adapter():
        out = model(**batch())
    assert_near(out.loss, expected.loss)
    assert out.keys() == expected.keys() and len(out.to_tuple()) == len(expected.to_tuple())


def test_a_raised_error_in_the_forward_leaves_no_collection_behind():
    model = adapted().eval()
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[5000]]))
    assert len(model(**batch()).router_logits) == 2


# --- trainers -------------------------------------------------------------------------------------------------------


def text_dataset(n: int = 8) -> Dataset:
    g = torch.Generator().manual_seed(3)
    rows = [[f"w{i}" for i in torch.randint(3, 128, (5 + 2 * j,), generator=g).tolist()] for j in range(n)]
    return Dataset.from_dict({"text": [" ".join(row) for row in rows]})


def arguments(tmp_path, cls=TrainingArguments, **kwargs):
    defaults = {
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.0,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "max_grad_norm": 0.0,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return cls(**{**defaults, **kwargs})


class KeepsGradients:
    """Mixed into a trainer: keeps the batch and the gradients of its step."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen = {k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.gradients = all_gradients(model)
        return loss


def expected_gradients(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of cross-entropy + COEF · balance, both computed here from logits and router logits."""
    model.zero_grad()
    inputs = {k: v for k, v in inputs.items() if k in ("input_ids", "attention_mask", "position_ids", "labels")}
    labels = inputs.pop("labels")
    out = model(**inputs, output_router_logits=True)
    loss = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].reshape(-1, 128), labels[:, 1:].reshape(-1), ignore_index=-100
    )
    aux = layer_balancing_loss(tuple(out.router_logits), 4, 2, inputs.get("attention_mask"))
    (loss + COEF * aux).backward()
    return all_gradients(model)


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_sft_trainer_adds_and_logs_the_balancing_loss_once(tmp_path, tokenizer, mixing):
    class Kept(KeepsGradients, SFTTrainer):
        pass

    torch.manual_seed(0)
    trainer = Kept(
        model=tiny_llama(),
        args=arguments(tmp_path, SFTConfig, max_length=32, gradient_checkpointing=False, bf16=False),
        train_dataset=text_dataset(),
        processing_class=tokenizer,
        peft_config=adapter(mixing=mixing),
    )
    trainer.train()
    assert_same(trainer.gradients, expected_gradients(trainer.model, trainer.seen))
    logged = [row["aux_loss"] for row in trainer.state.log_history if "aux_loss" in row]
    out = trainer.model(**trainer.seen)
    assert logged and logged[0] == near(out.aux_loss.item())


def test_plain_trainer_trains_with_the_balancing_loss_once(tmp_path):
    class Kept(KeepsGradients, Trainer):
        pass

    rows = {k: v.tolist() for k, v in batch().items()}
    trainer = Kept(
        model=adapted(),
        args=arguments(tmp_path, per_device_train_batch_size=3),
        train_dataset=Dataset.from_dict(rows),
    )
    trainer.train()
    assert_same(trainer.gradients, expected_gradients(trainer.model, trainer.seen))


def test_handwritten_loop_trains_with_the_balancing_loss_once():
    model = adapted().train()
    expected = expected_gradients(model, batch())
    model.zero_grad()
    model(**batch()).loss.backward()
    assert_same(all_gradients(model), expected)


def test_dpo_trainer_adds_and_logs_the_balancing_loss(tmp_path, tokenizer):
    def run(coef: float) -> tuple[dict[str, torch.Tensor], list[float]]:
        class Kept(KeepsGradients, DPOTrainer):
            pass

        texts = text_dataset(12)["text"]
        data = Dataset.from_dict({"prompt": texts[:4], "chosen": texts[4:8], "rejected": texts[8:12]})
        torch.manual_seed(0)
        trainer = Kept(
            model=tiny_llama(),
            args=arguments(tmp_path, DPOConfig, gradient_checkpointing=False, bf16=False),
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=adapter(router_aux_loss_coef=coef),
        )
        trainer.train()
        return trainer.gradients, [row["aux_loss"] for row in trainer.state.log_history if "aux_loss" in row]

    zero, none = run(0.0)
    half, logged = run(0.5)
    whole, _ = run(1.0)
    assert not none and logged and logged[0] > 1.0
    # The gradient is linear in the coefficient, and the balancing loss reaches every router.
    for n in zero:
        assert_near(half[n] - zero[n], (whole[n] - zero[n]) / 2, n, scale=whole[n])
    assert all((half[n] - zero[n]).abs().max() > 1e-6 for n in zero if "router" in n)


def test_packed_and_padding_free_training_counts_every_token(tmp_path, tokenizer):
    class Kept(KeepsGradients, SFTTrainer):
        pass

    torch.manual_seed(0)
    trainer = Kept(
        model=tiny_llama(),
        args=arguments(
            tmp_path,
            SFTConfig,
            max_length=32,
            packing=True,
            packing_strategy="bfd",
            gradient_checkpointing=False,
            bf16=False,
        ),
        train_dataset=text_dataset(16),
        processing_class=tokenizer,
        peft_config=adapter(),
    )
    trainer.train()
    assert trainer.seen["input_ids"].shape[0] == 1 and "attention_mask" not in trainer.seen
    assert_same(trainer.gradients, expected_gradients(trainer.model, trainer.seen))


# --- gradient checkpointing -----------------------------------------------------------------------------------------


def checkpointed(model, use_reentrant: bool):
    model = copy.deepcopy(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_gradient_checkpointing_changes_no_gradient(use_reentrant: bool, mixing: str):
    plain = adapted(mixing=mixing).train()
    with_checkpoints = checkpointed(plain, use_reentrant)
    plain(**batch()).loss.backward()
    with_checkpoints(**batch()).loss.backward()
    assert_same(all_gradients(with_checkpoints), all_gradients(plain))


def test_reentrant_checkpointing_gives_each_of_two_passes_its_own_balancing_gradient():
    plain = adapted().train()
    with_checkpoints = checkpointed(plain, use_reentrant=True)
    one, two = batch(), {k: v[:2, :6] for k, v in batch(padded=False).items()}
    for model in (plain, with_checkpoints):
        model(**one)  # a pass that never sees a backward
        first, second = model(**one).loss, model(**two).loss
        first.backward()
        second.backward()
        (model(**two).loss + 2 * model(**one).loss).backward()
    assert_same(all_gradients(with_checkpoints), all_gradients(plain))


def test_reentrant_checkpointing_gives_each_of_two_passes_its_part_of_one_balancing_loss():
    """As in a trainer that runs a model several times for one loss: all leaves have gradients before any layer runs."""
    plain = adapted().train()
    with_checkpoints = checkpointed(plain, use_reentrant=True)
    one = batch(padded=False)
    for model in (plain, with_checkpoints):
        passes = [model(**one, output_router_logits=True), model(one["input_ids"].flip(0), output_router_logits=True)]
        logits = [torch.cat(of_layer) for of_layer in zip(*(seen.router_logits for seen in passes), strict=True)]
        (passes[0].logits.mean() + 2 * passes[1].logits.mean() + balancing_loss(logits, 2)).backward()
    assert_same(all_gradients(with_checkpoints), all_gradients(plain))


def test_sft_trainer_with_reentrant_checkpointing_trains_the_routers_alike(tmp_path, tokenizer):
    def run(**kwargs) -> dict[str, torch.Tensor]:
        class Kept(KeepsGradients, SFTTrainer):
            pass

        torch.manual_seed(0)
        trainer = Kept(
            model=tiny_llama(),
            args=arguments(tmp_path, SFTConfig, max_length=32, bf16=False, **kwargs),
            train_dataset=text_dataset(),
            processing_class=tokenizer,
            peft_config=adapter(),
        )
        trainer.train()
        return trainer.gradients

    plain = run(gradient_checkpointing=False)
    for use_reentrant in (False, True):
        other = run(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        assert_same(other, plain)


# --- autocast, several adapters, other PEFT types -------------------------------------------------------------------


def test_bf16_autocast_keeps_router_logits_in_float32_and_trains_every_parameter():
    model = adapted().train()
    exact = model(**batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(**batch())
        seen = router_logits_by_hand(model, batch())
    out.loss.backward()
    assert all(logits.dtype == torch.float32 for logits in out.router_logits)
    assert seen[0].dtype == torch.bfloat16  # under autocast a plain product would not be float32
    assert_near(out.loss, exact.loss, dtype=torch.bfloat16)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_layers_that_differ_in_their_experts_are_balanced_apart():
    """Pooled by index, the first experts of the larger layer would look overloaded, and be starved."""
    model = adapted(num_experts_pattern={"layers.0.mlp": 2}).eval()
    out = model(**batch())
    assert [tuple(logits.shape) for logits in out.router_logits] == [(36, 4), (36, 4)]
    small, large = out.router_logits[0][:, :2], out.router_logits[1]
    assert (out.router_logits[0].softmax(-1)[:, 2:] == 0).all()
    mask = batch()["attention_mask"]
    own = [layer_balancing_loss((logits,), logits.shape[-1], 2, mask) for logits in (small, large)]
    assert_near(out.aux_loss, sum(own) / 2)
    assert model.config.num_experts == 4
    for scope in ("global", "layer"):
        even = (torch.eye(8).roll(1, 0) + torch.eye(8)).repeat(4, 1).mul(3).requires_grad_()
        two = torch.nn.functional.pad(torch.zeros(32, 2), (0, 6), value=torch.finfo(torch.float32).min)
        loss = balancing_loss((two, even), 2, scope=scope, sizes=[2, 8])
        loss.backward()
        assert_near(loss, torch.tensor(2.0))
        assert_near(even.grad.sum(0), torch.zeros(8), scale=1 / 32)  # differences of a token's shares of 1/32


def test_the_k_of_each_active_adapters_routers_counts():
    model = adapted(num_experts=4, top_k=1, normalize_top_k=False, mixing="projection")
    config = MoELoraConfig(
        num_experts=4, top_k=3, r=2, mixing="projection", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model.add_adapter("other", config)
    model.base_model.set_adapter(["default", "other"])
    out = model.eval()(**batch())
    real = batch()["attention_mask"].flatten().bool()
    losses = []
    routers = [layer.moe_lora_spec[name].top_k for layer in tuner_layers(model) for name in ("default", "other")]
    for k, logits in zip(routers, out.router_logits, strict=True):
        f, p = torch.zeros(4), torch.zeros(4)
        for token in logits[real]:
            f[token.topk(k).indices] += 1 / real.sum()
            p += token.softmax(-1) / real.sum()
        losses.append(4 * (f * p).sum())
    assert_near(out.aux_loss, torch.stack(losses).mean())


def test_the_k_of_each_layers_router_counts():
    model = adapted(top_k_pattern={"layers.1.mlp": 3}).eval()
    out = model(**batch())
    real = batch()["attention_mask"].flatten().bool()
    losses = []
    for k, logits in zip((2, 3), out.router_logits, strict=True):
        f = torch.zeros_like(logits[real]).scatter(1, logits[real].topk(k).indices, 1.0).mean(0)
        losses.append(4 * (f * logits[real].softmax(-1).mean(0)).sum())
    assert_near(out.aux_loss, torch.stack(losses).mean())


def test_switching_adapters_switches_the_protocols_numbers():
    model = adapted()
    model.add_adapter("wide", adapter(num_experts=6, top_k=3, router_aux_loss_coef=0.25))
    for name, n, k, coef in (("wide", 6, 3, 0.25), ("default", 4, 2, COEF)):
        model.set_adapter(name)
        out = model.eval()(**batch())
        assert out.router_logits[0].shape[-1] == n == model.config.num_experts
        aux = layer_balancing_loss(out.router_logits, n, k, batch()["attention_mask"])
        plain = model(**batch(), output_router_logits=False).loss
        assert_near(out.loss, plain + coef * aux)


@pytest.mark.parametrize("coefficients", [(0.25, 0.75), (0.75, 0.25)])
def test_adapters_active_together_are_balanced_by_the_largest_coefficient(coefficients):
    """Each with its own top_k: one sparse router does not make the others' experts count for less."""
    model = adapted(router_aux_loss_coef=coefficients[0], top_k=3, mixing="projection")
    wide = adapter(num_experts=6, router_aux_loss_coef=coefficients[1], top_k=1, mixing="projection")
    model.add_adapter("wide", wide)
    model.base_model.set_adapter(["default", "wide"])
    out = model.eval()(**batch())
    assert (len(out.router_logits), model.config.num_experts, model.config.num_experts_per_tok) == (4, 6, 3)
    mask = batch()["attention_mask"]
    first = layer_balancing_loss(tuple(x[:, :4] for x in out.router_logits[::2]), 4, 3, mask)
    second = layer_balancing_loss(out.router_logits[1::2], 6, 1, mask)
    plain = model(**batch(), output_router_logits=False).loss
    assert_near(out.loss, plain + 0.75 * (first + second) / 2)


def test_an_adapter_of_single_experts_has_no_router_and_no_balancing_loss():
    model = adapted(num_experts=1, top_k=1)
    assert not hasattr(model.config, "num_experts")
    assert model(**batch()).get("aux_loss") is None


def test_what_a_trainer_sets_in_the_config_stays():
    model = adapted()
    model.config.router_aux_loss_coef = 0.125
    out = model.eval()(**batch())
    plain = model(**batch(), output_router_logits=False).loss
    assert_near(out.loss, plain + 0.125 * out.aux_loss)


@pytest.mark.parametrize("when", ["before the adapter", "with the first", "with the second"])
def test_what_a_user_sets_in_the_config_holds_whatever_the_adapters_say(when: str):
    base = tiny_llama()

    def set_by_user(moment: str) -> None:
        if moment == when:
            base.config.router_aux_loss_coef, base.config.output_router_logits = 0.125, True

    set_by_user("before the adapter")
    model = get_peft_model(base, adapter(router_aux_loss_coef=0.0)).eval()
    set_by_user("with the first")
    model.add_adapter("wide", adapter(num_experts=6, top_k=3, router_aux_loss_coef=0.25))
    model.set_adapter("wide")
    set_by_user("with the second")
    for name, n, k in (("wide", 6, 3), ("default", 4, 2)):
        model.set_adapter(name)
        out, plain = model(**batch()), model(**batch(), output_router_logits=False).loss
        aux = layer_balancing_loss(out.router_logits, n, k, batch()["attention_mask"])
        assert_near(out.loss, plain + 0.125 * aux)


def test_router_logits_that_a_user_turned_off_before_the_adapter_stay_off():
    base = tiny_llama()
    base.config.output_router_logits = False
    model = get_peft_model(base, adapter())
    assert model(**batch()).get("router_logits") is None
    model.unload()
    assert base.config.output_router_logits is False and "router_aux_loss_coef" not in vars(base.config)


def test_a_familys_default_is_nothing_that_a_user_set():
    """Of a dense model of Qwen3-MoE: 0.001, and no router logits."""
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=128, mlp_only_layers=[0],
    )  # fmt: skip
    for coefficient in (config.router_aux_loss_coef, 0.5):
        base = Qwen3MoeForCausalLM(copy.deepcopy(config))
        base.config.router_aux_loss_coef = coefficient
        get_peft_model(base, MoELoraConfig(r=2, router_aux_loss_coef=0.25, task_type="CAUSAL_LM"))
        wanted = 0.25 if coefficient == config.router_aux_loss_coef else 0.5
        assert (base.config.router_aux_loss_coef, base.config.output_router_logits) == (wanted, True)


def test_what_a_user_sets_in_the_config_outlasts_uniform_gates():
    model = adapted().eval()
    model.config.router_aux_loss_coef, model.config.output_router_logits = 0.125, False
    before = model.config.to_dict()
    with uniform_gates(model):
        model(**batch())
        assert (model.config.router_aux_loss_coef, model.config.output_router_logits) == (0.125, False)
        assert model.config.num_experts_per_tok == 4
    assert model.config.to_dict() == before
    model(**batch())
    assert model.config.to_dict() == before


@pytest.mark.parametrize("labels", [True, False])
def test_outputs_can_be_pickled(labels):
    out = adapted().eval()(**{k: v for k, v in batch().items() if labels or k != "labels"}, output_router_logits=True)
    again = pickle.loads(pickle.dumps(out))
    assert type(again) is type(out) and again.keys() == out.keys()
    assert_near(again.logits, out.logits)
    assert_near(again.router_logits, out.router_logits)


def test_plain_lora_models_are_untouched_by_the_import():
    model = get_peft_model(tiny_llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    assert model(**batch()).get("aux_loss") is None


# --- what is easily lost ----------------------------------------------------------------------------------------------


def test_fields_that_a_family_calls_otherwise_come_back():
    """A dense model of Qwen3-MoE, whose `num_experts` is stored as `num_local_experts`."""
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=128, num_experts=16, num_experts_per_tok=3, mlp_only_layers=[0, 1],
    )  # fmt: skip
    base = Qwen3MoeForCausalLM(config)
    before = dict(vars(base.config))
    assert before["num_local_experts"] == 16
    model = get_peft_model(base, MoELoraConfig(num_experts=6, top_k=2, r=2, task_type="CAUSAL_LM"))
    assert (base.config.num_experts, base.config.num_experts_per_tok) == (6, 2)
    model.unload()
    assert dict(vars(base.config)) == before and "num_experts" not in vars(base.config)


def test_what_predictions_leave_out_of_a_family_comes_back():
    """XLNet's predictions are without `mems`."""
    base = tiny("xlnet")
    kind = type(base.config)
    assert kind.keys_to_ignore_at_inference == ["mems"]
    model = get_peft_model(base, adapter(target_modules=["layer_1"]))
    assert base.config.keys_to_ignore_at_inference == ["mems", "router_logits", "aux_loss"]
    model.unload()
    assert "keys_to_ignore_at_inference" not in vars(base.config)


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_who_watches_routing_leaves_outputs_as_they_are(coefficient):
    config = MoELoraConfig(num_experts=4, r=2, router_aux_loss_coef=coefficient, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), config)
    ids = torch.arange(3, 15).view(2, 6)
    plain, seen = model(input_ids=ids, labels=ids), []
    with observed_routing(model, seen.append):
        watched = model(input_ids=ids, labels=ids)
    assert len(seen) == 1 and len(seen[0].router_logits) == 2
    assert watched.keys() == plain.keys() and ("router_logits" in watched) == bool(coefficient)
    assert_near(watched.loss, plain.loss)


@pytest.mark.parametrize("return_dict", [True, False])
def test_arguments_count_however_they_are_passed(return_dict):
    """By position, by name, or some so and some so: the balancing loss is of the same tokens."""
    config = MoELoraConfig(num_experts=4, r=2, router_aux_loss_coef=0.5, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), config).get_base_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.moe_lora_router["default"].weight.normal_(generator=torch.Generator().manual_seed(0))
    ids, mask = torch.arange(3, 15).view(2, 6), torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, -100)
    names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
    arguments = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    by_position = [arguments.get(name) for name in names[: names.index("labels") + 1]]
    more = {} if return_dict else {"return_dict": False}
    calls = [((), arguments), ((ids,), {"attention_mask": mask, "labels": labels}), (by_position, {})]
    losses = [model(*args, **kwargs, **more)[0] for args, kwargs in calls]
    unmasked = model(input_ids=ids, labels=labels, **more)[0]
    for loss in losses[1:]:
        assert_near(loss, losses[0])
    assert (unmasked - losses[0]).abs() > 1e-4


def test_an_adapter_may_be_called_experts():
    model = get_peft_model(tiny_llama(), MoELoraConfig(task_type="CAUSAL_LM"), adapter_name="experts")
    ids = torch.arange(3, 13).view(1, -1)
    assert model(ids, labels=ids).aux_loss > 0 and model.config.num_experts == 8
