"""
Routers are listed in the order of the model's modules, and may run in another one; a call may end without its hooks.
Whatever is said of a router is of that router all the same.
"""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Llama4ForCausalLM, Llama4TextConfig
from trl import SFTConfig, SFTTrainer

from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from moe_peft.analysis import record_routing
from moe_peft.analysis.load_callback import LoadCallback
from moe_peft.analysis.routing_report import write_report
from moe_peft.models.introspection import observed_routing
from tests.helpers.adapters import adapted, batch
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama, tiny_opt
from tests.helpers.routed_models import routers_of, tuner_layers
from tests.helpers.upit_case import rows

IDS = torch.randint(3, 60, (3, 8), generator=torch.Generator().manual_seed(0))


def of_opt():
    """Each attention of OPT has k before q, and calls q first. q uses the experts 0 and 1, k the others."""
    config = {"num_experts": 4, "top_k": 2, "r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = get_peft_model(tiny_opt(), MoELoraConfig(target_modules=["q_proj", "k_proj"], **config))
    for name, module in model.named_modules():
        if name.endswith("moe_lora_router.default"):
            first = 0 if "q_proj" in name else 2
            with torch.no_grad():
                module.weight.zero_()
            module.register_forward_hook(lambda m, args, logits, first=first: logits.index_add(
                1, torch.tensor([first, first + 1]), logits.new_ones(len(logits), 2)
            ))  # fmt: skip
    return model


def test_a_pass_has_the_routers_in_the_models_order():
    model, seen, own = of_opt(), [], {}
    routers = routers_of(model)
    for router in routers:
        router.register_forward_hook(lambda m, args, logits: own.update({m: logits}))
    with torch.no_grad(), observed_routing(model, seen.append):
        model(input_ids=IDS)
    assert list(own) != routers  # they did run in another one
    for router, logits, chosen in zip(routers, seen[0].router_logits, seen[0].chosen, strict=True):
        n = own[router].shape[-1]
        assert_near(logits[:, :n], own[router])
        expected = torch.zeros_like(own[router], dtype=torch.bool)
        expected.scatter_(1, own[router].topk(2).indices, True)
        assert torch.equal(chosen[:, :n], expected)


def test_loads_are_the_layers_own():
    model = of_opt()
    with torch.no_grad(), record_routing(model) as statistics:
        model(input_ids=IDS)
    names = [name for name, module in model.named_modules() if module in tuner_layers(model)]
    for name, load in zip(names, statistics.shares()["all"], strict=True):
        expected = [0.5, 0.5, 0, 0] if "q_proj" in name else [0, 0, 0.5, 0.5]
        assert load.tolist() == near(expected), name


class Interrupted(BaseException):
    """Like KeyboardInterrupt, which would end the tests."""


def interrupt(model, whole: bool = True) -> None:
    """Ctrl-C in the middle of a forward pass."""
    target = model if whole else model.get_base_model().base_model

    def stop(module, args):
        raise Interrupted

    handle = tuner_layers(model)[1].register_forward_pre_hook(stop)
    with pytest.raises(Interrupted):
        target(input_ids=IDS + 1)
    handle.remove()


def gradients(model, inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("whole", [True, False], ids=["model", "backbone"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_an_interrupted_pass_leaves_nothing_behind(reentrant, whole):
    model = adapted().train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    other, inputs = copy.deepcopy(model), batch()
    interrupt(model, whole)
    for _ in range(2):
        found, expected = gradients(model, inputs), gradients(other, inputs)
        assert found.keys() == expected.keys() and any("router" in name for name in found)
        for name, value in expected.items():
            assert_near(found[name], value, name)
    for again in (model, other):
        again.gradient_checkpointing_disable()
        again.eval()
    with torch.no_grad():
        for _ in range(2):
            outputs = model.get_base_model().base_model(input_ids=IDS, output_router_logits=True)
            assert len(outputs.router_logits) == 2
        assert_near(outputs[0], other.get_base_model().base_model(input_ids=IDS)[0])


def test_a_loss_behind_a_cache_has_the_balancing_loss_of_its_own_tokens():
    """Perplexity in pieces: the mask is longer than the tokens of the pass."""
    model = adapted().eval()
    ids = torch.randint(3, 128, (2, 10), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask[1, 9] = 0
    with torch.no_grad():
        cache = model(input_ids=ids[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
        rest = {"input_ids": ids[:, 6:], "attention_mask": mask, "past_key_values": cache}
        found = model(**rest, labels=ids[:, 6:])
    logits = torch.stack(found.router_logits).double()
    real = mask[:, 6:].flatten().bool()
    p = logits.softmax(-1)[:, real]
    f = torch.zeros_like(p).scatter(2, logits[:, real].topk(2).indices, 1.0)
    by_layer = 4 * (f.mean(1) * p.mean(1)).sum(1)
    assert_near(found.aux_loss, by_layer.mean())


def test_a_router_of_an_adapter_that_comes_later_evaluates():
    config = MoELoraConfig(num_experts=4, r=4, router_jitter_noise=0.5, init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), config).eval()
    model.add_adapter("later", config)
    model.set_adapter("later")
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=0)
    assert not any(router.training for router in routers_of(model))


def test_losses_on_routers_where_the_causal_model_calls_its_decoder(tokenizer, tmp_path):
    """OPT's causal model does not call its backbone, whose outputs others observe."""
    settings = {"max_steps": 2, "bf16": False, "use_cpu": True, "report_to": "none", "logging_steps": 1}
    args = MoESFTConfig(str(tmp_path), router_z_loss_coef=0.1, per_device_train_batch_size=4, **settings)
    config = MoELoraConfig(num_experts=4, r=2, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_opt(), config)
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    data = Dataset.from_list(rows(8))
    trainer = MoESFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    seen, original = [], trainer.compute_loss

    def compute_loss(model, inputs, **kwargs):
        with torch.no_grad():
            given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            logits = model(**given, output_router_logits=True).router_logits
            real = given["attention_mask"].flatten().bool()
            z = torch.stack([of_router[real].double().logsumexp(-1).square().mean() for of_router in logits])
            seen.append(z.mean().item())
        return original(model, inputs, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    logged = [record["router_z_loss"] for record in trainer.state.log_history if "router_z_loss" in record]
    assert logged == near(seen) and len(logged) == 2


def test_statistics_without_a_mask_where_the_output_has_no_hidden_state():
    """Llama 4's causal model does not name its backbone."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "moe_layers": []}
    base = Llama4ForCausalLM(Llama4TextConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes, **heads))
    model = get_peft_model(base, MoELoraConfig(num_experts=4, r=2, task_type="CAUSAL_LM")).eval()
    counts = []
    for own in ({}, {"attention_mask": torch.ones_like(IDS)}):
        with torch.no_grad(), record_routing(model) as statistics:
            model(input_ids=IDS, **own)
        counts.append(statistics.counts)
    assert torch.equal(*counts) and counts[0].sum() == 2 * 2 * IDS.numel()


def test_a_report_of_token_classes_without_ids(tmp_path):
    model = adapted().eval()
    embeddings = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), record_routing(model, token_classes=torch.zeros(128, dtype=torch.long)) as statistics:
        model(inputs_embeds=embeddings)
    assert write_report(statistics, tmp_path) and not statistics.class_counts.any()


def test_a_recording_ends_when_the_next_training_begins(tokenizer, tmp_path):
    """A training that ends with an error does not say so to its callbacks."""
    callback, model = LoadCallback(tmp_path / "load", every=1), adapted()
    settings = {"max_steps": 2, "bf16": False, "use_cpu": True, "report_to": "none", "gradient_checkpointing": False}

    def train(fails: bool) -> None:
        args = SFTConfig(str(tmp_path / "out"), per_device_train_batch_size=4, **settings)
        data = Dataset.from_list(rows(8))
        trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[callback])
        if fails:
            trainer.training_step = lambda *args, **kwargs: 1 / 0
        trainer.train()

    hooks = len(model.get_base_model().base_model._forward_hooks)
    with pytest.raises(ZeroDivisionError):
        train(True)
    train(False)
    assert [point["step"] for point in callback.points] == [1, 2] and len(
        model.get_base_model().base_model._forward_hooks
    ) == hooks


def test_a_model_that_gives_its_backbone_ids_by_position():
    """Rows, ids and the mask of GPT-2 are those of its batch."""
    dense = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64))
    model = get_peft_model(dense, MoELoraConfig(num_experts=4, top_k=2, r=2, task_type="CAUSAL_LM")).eval()
    seen, classes = [], torch.arange(64) % 3
    with torch.no_grad(), observed_routing(model, seen.append):
        model(input_ids=IDS)
    assert seen[0].mask.shape == IDS.shape and torch.equal(seen[0].input_ids, IDS)
    with record_routing(model, domains=["a", "b"], token_classes=classes) as statistics:
        statistics.current = ["a", "b", "a"]
        model(input_ids=IDS)
    two_each = 2.0 * torch.bincount(classes[IDS.flatten()], minlength=len(statistics.class_counts))
    assert_near(statistics.class_counts.sum((1, 2)), two_each.double())
    assert statistics.tokens.tolist() == [16, 8]
