"""Routers of the table that replace native MoEs' gates: outputs, gradients, training, saving, loading, folding."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import asdict
from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, MixtralForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_peft import (
    MoELoraConfig,
    allow_experts,
    fold_routers,
    force_experts,
    init_attention_routers,
    init_gates,
    replace_routers,
)
from moe_peft.analysis import inspect
from moe_peft.analysis.inspect_settings import InspectSettings
from moe_peft.analysis.recorder import record_routing
from moe_peft.models.gates import CONFIG_FIELD, uniform_gates
from moe_peft.models.layer import router_parameters
from moe_peft.models.model_size import model_size
from moe_peft.models.routed_gate import RoutedGate
from moe_peft.native import UpcycleConfig, load_routers, upcycle
from moe_peft.routing import ROUTERS, RouterSettings
from moe_peft.routing.attention_heads import attention_weights
from moe_peft.training.trainers import MoESFTConfig, MoESFTTrainer
from moe_peft.utils.messages import InputError
from tests.helpers.attention_case import BATCHES, IDS, mean_keys
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.native_case import dense_model, saved
from tests.helpers.reference import routed
from tests.helpers.routed_models import COMMON, gates_of, sizes_of

N, K = 4, 2
FAMILIES = {
    "mixtral": {"num_local_experts": N},
    "qwen2_moe": {"num_experts": N, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": N, "moe_intermediate_size": 16},
    "olmoe": {"num_experts": N},
    "granitemoe": {"num_local_experts": N},
    "flex_olmo": {"num_experts": N},
}
KINDS = {
    "linear": RouterSettings(),
    "mlp": RouterSettings("mlp"),
    "attention": RouterSettings("attention"),
    "attention-max": RouterSettings("attention", num_heads=2, mixture="max"),
    "attention-keys": RouterSettings("attention", num_heads=8),
    "attention-keys-max": RouterSettings("attention", num_heads=8, mixture="max"),
    "switch": RouterSettings("switch", capacity_factor=1.0),
    "sigmoid": RouterSettings("sigmoid"),
    "arrow": RouterSettings("arrow"),
    "soft": RouterSettings("soft"),
    "top_p": RouterSettings("top_p", threshold=0.5),
    "threshold": RouterSettings("threshold"),
    "locmoe": RouterSettings("locmoe"),
}
SAVING_SETS = {"architectures", "dtype", "_name_or_path", "transformers_version"}
FOLD = ("linear", "attention", "soft", "locmoe")  # and "switch", where the family does not divide gates by their sum


def moe(family: str = "mixtral", seed: int = 0, **own):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**COMMON, **FAMILIES[family], **own}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    return model.eval()


def with_router(kind: str, family: str = "mixtral", **own):
    model = moe(family, **own)
    replace_routers(model, KINDS[kind], seed=1)
    torch.manual_seed(2)
    for parameter in router_parameters(model).values():
        nn.init.normal_(parameter, std=0.4)
    return model


def test_every_router_is_tried():
    seen = {name for name, router in ROUTERS.items() if not router.needs_token_ids}
    assert {settings.type for settings in KINDS.values()} == seen


def test_routing_by_token_ids(tmp_path):
    """Hash Layers (Roller et al., 2021): a token's experts follow from its id alone, with gates 1/k, in every pass."""
    model = moe()
    replace_routers(model, "hash", seed=3)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    chosen: list[torch.Tensor] = []
    gates = [m for m in model.modules() if isinstance(m, RoutedGate)]
    for gate in gates:
        gate.register_forward_hook(lambda gate, args, output: chosen.append(output[2].sort(-1).values))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        model(ids.flip(1))
    for layer, gate in enumerate(gates):
        for tokens, experts in ((ids, chosen[layer]), (ids.flip(1), chosen[len(gates) + layer])):
            scores = gate.moe_router(torch.zeros(tokens.numel(), 4), tokens.flatten())
            assert torch.equal(experts, scores.topk(2).indices.sort(-1).values)
    assert not torch.equal(chosen[0], chosen[1])  # layers differ

    # It trains, without gradient checkpointing.
    ids_and_labels = {"input_ids": ids, "labels": ids, "use_cache": False}
    model.train()(**ids_and_labels).loss.backward()
    assert next(p for name, p in model.named_parameters() if "experts" in name).grad.abs().max() > 0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="router_type='hash': gradient_checkpointing=True"):
        model(**ids_and_labels)

    # It saves and loads, does not fold, and another router takes its place.
    model.save_pretrained(tmp_path)
    loaded = MixtralForCausalLM.from_pretrained(tmp_path)
    load_routers(loaded, tmp_path)
    with torch.no_grad():
        assert_near(loaded.eval()(input_ids=ids).logits, logits)
        with pytest.raises(ValueError, match="no input_ids for 18 hidden states; call the model itself with"):
            loaded(inputs_embeds=torch.zeros(2, 9, loaded.config.hidden_size))
        with pytest.raises(ValueError, match="router_type='hash' does not fold"):
            fold_routers(loaded)
        replace_routers(loaded, "linear")
        loaded(inputs_embeds=torch.zeros(2, 9, loaded.config.hidden_size))
    assert not loaded.model._forward_pre_hooks


# --- outputs and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_block_and_its_gradients_are_the_loops(kind, family):
    """A whole MoE block: the router, its gates, and the family's own experts, token by token and expert by expert."""
    model = with_router(kind, family, experts_implementation="eager").double()
    block = next(m for m in model.modules() if type(m).__name__.endswith("SparseMoeBlock"))
    gate, generator = block.gate, torch.Generator().manual_seed(3)
    x = torch.randn(7, 32, generator=generator, dtype=torch.float64)
    d_output = torch.randn(7, 32, generator=generator, dtype=torch.float64)
    own = {"x": x.clone().requires_grad_(), **dict(block.named_parameters())}
    output = block(own["x"].unsqueeze(0)).squeeze(0)
    gradients = torch.autograd.grad(output, list(own.values()), d_output, allow_unused=True)

    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in own.items()}
    router = {name.partition("moe_router.")[2]: p for name, p in leaves.items() if "moe_router." in name}
    normalize = family == "mixtral" and kind != "switch"
    _, gates = routed(KINDS[kind], {**router, "n": torch.tensor(N)}, leaves["x"], gate.top_k, normalize)
    rows = []
    for token, chosen in zip(leaves["x"], gates, strict=True):
        row = 0
        for expert, g in chosen.items():
            a, b = (leaves["experts.gate_up_proj"][expert] @ token).chunk(2)
            row = row + g * (leaves["experts.down_proj"][expert] @ (F.silu(a) * b))
        rows.append(row)
    expected = torch.stack(rows)
    wanted = torch.autograd.grad(expected, list(leaves.values()), d_output, allow_unused=True)
    assert_near(output, expected, "output")
    for name, found, right in zip(own, gradients, wanted, strict=True):
        assert (found is None) == (right is None), name
        if found is not None:
            assert_near(found, right, f"gradient of {name}")
    assert {name for name, g in zip(own, gradients, strict=True) if g is not None} >= {"x"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gate_returns_what_the_familys_own_returns(family):
    """The same linear router before and after: logits, gates and experts of the family's own gate, and the model's."""
    model = moe(family)
    other = copy.deepcopy(model)
    replace_routers(other, "linear")
    assert sizes_of(other) == sizes_of(model) == [(N, K)] * 2
    for gate, old in zip(gates_of(other), gates_of(model), strict=True):
        gate.moe_router.weight.data = old.weight.data.clone()
        x = torch.randn(9, 32)
        for found, expected in zip(gate(x), old(x), strict=True):
            assert found.shape == expected.shape and found.dtype == expected.dtype
            assert_near(found, expected)
    ours, theirs = (m(input_ids=IDS, labels=IDS, output_router_logits=True) for m in (other, model))
    assert_near(ours.logits, theirs.logits)
    assert_near(ours.router_logits, theirs.router_logits)
    assert_near(ours.aux_loss, theirs.aux_loss)


def test_half_precision_and_autocast_route_like_float32():
    model = with_router("mlp")
    expected = model(input_ids=IDS).logits
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert (half(input_ids=IDS).logits.float() - expected).abs().mean() < 0.1 * expected.abs().mean()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(input_ids=IDS, output_router_logits=True)
    assert all(logits.dtype == torch.float32 for logits in out.router_logits)
    made = moe().to(torch.bfloat16)
    replace_routers(made, "mlp")
    assert {p.dtype for p in router_parameters(made).values()} == {torch.bfloat16}


def test_switch_drops_tokens_over_the_capacity_in_training_alone():
    model = with_router("switch").train()
    assert model.config.num_experts_per_tok == 1 and model.num_experts_per_tok == 1
    gate = gates_of(model)[0]
    x = torch.randn(10, 32)
    logits, gates, experts = (found.detach() for found in gate(x))
    taken = [0] * N
    for token, expert in enumerate(logits.argmax(1).tolist()):
        taken[expert] += 1
        kept = taken[expert] <= math.ceil(10 / N)
        assert experts[token].tolist() == [expert]
        assert float(gates[token]) == (near(float(logits[token].softmax(0)[expert])) if kept else 0)
    assert max(taken) > math.ceil(10 / N)
    assert bool((gate.eval()(x)[1] > 0).all())


def test_the_same_seed_gives_the_same_values_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    found = []
    for seed in (0, 0, 1):
        model = moe()
        torch.set_rng_state(state)
        replace_routers(model, "mlp", seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        found.append([p.detach() for p in router_parameters(model).values()])
    assert all(map(torch.equal, found[0], found[1])) and not any(map(torch.equal, found[0], found[2]))
    assert not torch.equal(found[0][0], found[0][2])  # layers differ


# --- the attention's values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["attention", "attention-max", "attention-keys", "attention-keys-max", "linear"])
def test_routers_in_place_get_the_layers_heads(kind):
    model = with_router(kind, "qwen3_moe")
    means = mean_keys(model)
    init_attention_routers(model, BATCHES)
    m = KINDS[kind].num_heads or N
    for gate, layer, mean in zip(gates_of(model), model.model.layers, means, strict=True):
        query, key = attention_weights(layer.self_attn.q_proj.weight.detach(), *mean, 8, m, N)
        own = gate.moe_router
        if kind == "linear":
            assert_near(own.weight.data, key[:, 0] @ query.sum(0) / (32 / m) ** 0.5)
            continue
        assert_near(own.key.data, key)
        assert_near(
            own.query.data if "max" in kind else own.mean_query.data[0] * m, query if "max" in kind else query.sum(0)
        )


def test_more_heads_than_experts_need_no_settings():
    model = moe()
    init_attention_routers(model, BATCHES, num_heads=8)
    assert all(gate.moe_router.key.shape == (N, 2, 4) for gate in gates_of(model))
    with pytest.raises(ValueError, match=r"fold_routers: .*the best of an expert's 2 keys counts"):
        fold_routers(model)


@pytest.mark.parametrize("init", [{"init": "drop"}, {"init": "noise", "noise_scale": 1.0}])
def test_keys_of_the_dense_model_do_not_depend_on_the_experts(init, tmp_path):
    dense = dense_model("llama")
    folder = saved(dense, tmp_path / "dense")
    made = upcycle(folder, tmp_path / "moe", UpcycleConfig(num_experts=4, top_k=2, **init))
    model, own = (AutoModelForCausalLM.from_pretrained(made) for _ in range(2))
    replace_routers(model, RouterSettings("attention", num_heads=8, mixture="max"))
    init_attention_routers(model, BATCHES, dense=dense)
    means = mean_keys(dense)
    for gate, layer, mean in zip(gates_of(model), dense.model.layers, means, strict=True):
        query, key = attention_weights(layer.self_attn.q_proj.weight.detach(), *mean, 16, 8, 4)
        assert_near(gate.moe_router.query.data, query)
        assert_near(gate.moe_router.key.data, key)
    replace_routers(own, RouterSettings("attention", num_heads=8, mixture="max"))
    init_attention_routers(own, BATCHES)
    pairs = list(zip(gates_of(own), gates_of(model), strict=True))
    moved = [((a.moe_router.key - b.moe_router.key).norm() / b.moe_router.key.norm()).item() for a, b in pairs]
    assert moved[0] < 1e-4 and moved[1] > 0.1
    with pytest.raises(ValueError, match="dense: Qwen3ForCausalLM has no attention like that"):
        init_attention_routers(model, BATCHES, dense=dense_model("qwen3", num_attention_heads=2))


# --- training, saving, loading --------------------------------------------------------------------------------------


def trainer(model, tokenizer, folder, **own):
    data = Dataset.from_list([{"text": f"w{3 + i} w5 w7 w{9 + i}"} for i in range(16)])
    args = MoESFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", learning_rate=1e-2, logging_steps=1,
        per_device_train_batch_size=4, router_z_loss_coef=0.01, router_aux_loss_coef=0.1,
        **{"max_steps": 4, "save_strategy": "no", **own},
    )  # fmt: skip
    return MoESFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize("kind", ["mlp", "attention-keys-max", "switch", "soft", "locmoe"])
def test_trainer_trains_them_with_their_losses(kind, tokenizer, tmp_path):
    model = with_router(kind, vocab_size=128)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = trainer(model, tokenizer, tmp_path)
    made.train()
    log = made.state.log_history[0]
    n, k = N, model.config.num_experts_per_tok
    assert k == {"switch": 1, "soft": n}.get(kind, K)
    assert log["aux_loss"] >= k * 0.9 and log["router_z_loss"] > 0
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert set(router_parameters(model)) <= moved and any("experts" in name for name in moved)


@pytest.mark.parametrize("kind", ["mlp", "attention", "attention-max"])
def test_resumed_training_is_the_one_that_was_not_stopped(kind, tokenizer, tmp_path):
    own = {"save_strategy": "steps", "save_steps": 2}
    whole = trainer(with_router(kind, vocab_size=128), tokenizer, tmp_path / "a", **own)
    whole.train()
    again = trainer(with_router(kind, vocab_size=128), tokenizer, tmp_path / "b", **own)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["mlp", "attention", "attention-keys-max", "switch", "soft", "top_p"])
def test_a_saved_model_is_loaded_with_its_routers(kind, family, tmp_path):
    model = with_router(kind, family)
    expected = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    load_routers(again, tmp_path)
    assert_near(again.eval()(input_ids=IDS).logits, expected)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_in_float64_can_be_replaced(family):
    """Their probabilities are in float32 in some families."""
    model = moe(family, experts_implementation="eager").double()
    logits = model(input_ids=IDS).logits
    replace_routers(model, "linear")
    assert not torch.equal(model(input_ids=IDS).logits, logits)


@pytest.mark.parametrize("changed", [
    {CONFIG_FIELD: []}, {CONFIG_FIELD: {"type": "mlp", "x": 1}}, {"moe_peft_stock_gate": "x"},
    {"num_experts_per_tok": 99},
])  # fmt: skip
def test_settings_in_a_config_that_cannot_be_are_refused_in_one_line(changed, tmp_path):
    model = with_router("mlp")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ValueError, match=f"{CONFIG_FIELD} in its config: [^\n]*; save the model again$"):
        load_routers(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path)


def test_what_names_no_routers_or_lacks_their_weights_is_refused(tmp_path):
    model = moe()
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="its config names no routers"):
        load_routers(model, tmp_path / "plain")
    setattr(model.config, CONFIG_FIELD, {"type": "mlp"})
    with pytest.raises(ValueError, match=r"has no model.layers.0.mlp.gate.moe_router.hidden; is it complete\?"):
        load_routers(model, tmp_path / "plain")


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_reads_a_saved_model_with_its_routers(kind, tokenizer, tmp_path, monkeypatch):
    """The size that it reports and the experts that it counts are those of the model that was saved."""
    model = with_router(kind, vocab_size=128)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [[3 + i, 9, 17 + i, 5, 60 - i] for i in range(6)]
    texts = [json.dumps({"text": " ".join(f"w{i}" for i in row)}) for row in rows]
    (tmp_path / "data.jsonl").write_text("\n".join(texts))
    reported = {}
    monkeypatch.setattr(inspect, "write_report", lambda *args: reported.update(args[3]) or [])  # figures take long
    found = inspect.inspect_model(
        InspectSettings(model=str(tmp_path / "model"), data=str(tmp_path / "data.jsonl"), output=str(tmp_path / "out"))
    )
    assert reported["size"] == asdict(model_size(model))
    ids = torch.tensor([tokenizer(json.loads(text)["text"])["input_ids"] + [1] for text in texts])
    with record_routing(model, ["all"]) as expected, torch.no_grad():
        model(input_ids=ids)
    assert torch.equal(found.counts, expected.counts) and found.counts.sum() > 0


def test_copies_and_pickles_compute_the_same():
    model = with_router("attention-max")
    expected = model(input_ids=IDS).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(input_ids=IDS).logits, expected, rtol=0, atol=0)


# --- folding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [*FOLD, "switch"])
def test_what_folds_saves_to_a_stock_checkpoint(kind, family, tmp_path):
    model = with_router(kind, family)
    names = list(moe(family).state_dict())
    expected = model(input_ids=IDS).logits
    if kind == "switch" and not hasattr(model.config, "norm_topk_prob"):
        with pytest.raises(ValueError, match=r"router_type='switch' does not fold .* divides gates by their sum"):
            fold_routers(model)
        return
    model.save_pretrained(tmp_path / "unfolded")  # the stock gate's weight goes with it
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "unfolded").eval()
    assert_near(stock(input_ids=IDS).logits, expected)
    fold_routers(model)
    assert sorted(model.state_dict()) == sorted(names)
    assert not hasattr(model.config, CONFIG_FIELD)
    assert_near(model(input_ids=IDS).logits, expected)
    model.save_pretrained(tmp_path / "folded")
    stock, info = AutoModelForCausalLM.from_pretrained(tmp_path / "folded", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_near(stock.eval()(input_ids=IDS).logits, expected)


@pytest.mark.parametrize("kind, reason", [
    ("mlp", "there is a non-linearity"), ("attention-max", "only 'sum' folds"), ("attention-keys", "2 keys counts"),
    ("sigmoid", "its gates are sigmoids"), ("top_p", "varies from token to token"), ("threshold", "varies"),
])  # fmt: skip
def test_what_does_not_fold_says_why_and_stays(kind, reason):
    model = with_router(kind)
    expected, names = model(input_ids=IDS).logits, list(model.state_dict())
    assert not any(name.endswith("gate.weight") for name in names)
    with pytest.raises(ValueError, match=f"^fold_routers: router_type=.* does not fold .*{reason}") as error:
        fold_routers(model)
    assert "\n" not in str(error.value)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("first", ["soft", "switch", "locmoe"])
def test_routers_can_be_replaced_again(first):
    model = with_router(first)
    model.requires_grad_(True)
    replace_routers(model, "mlp", top_k=2)
    assert sizes_of(model) == [(N, 2)] * 2 and model.config.num_experts_per_tok == 2
    assert all(p.requires_grad for p in router_parameters(model).values())
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in router_parameters(model).values())


@pytest.mark.parametrize("reloaded, own", [(False, {}), (False, {"top_k": 2}), (True, {})])
@pytest.mark.parametrize("first", ["switch", "soft", "mlp"])
@pytest.mark.parametrize("family, normalizes", [("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", True)])
def test_a_second_replacement_goes_back_to_the_stock_gates_rule(family, normalizes, first, reloaded, own, tmp_path):
    """The model with its own weights in a linear router again is the model of before."""
    model = moe(family, **({} if family == "mixtral" else {"norm_topk_prob": normalizes}))
    other = copy.deepcopy(model)
    replace_routers(other, first, top_k=3 if first == "mlp" else None)
    if reloaded:
        other.save_pretrained(tmp_path)
        other = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        load_routers(other, tmp_path)
        assert sizes_of(other) == [(N, {"switch": 1, "soft": N, "mlp": 3}[first])] * 2
    replace_routers(other, "linear", **own)
    for gate, old in zip(gates_of(other), gates_of(model), strict=True):
        gate.moe_router.weight.data = old.weight.data.clone()
    assert_near(other(input_ids=IDS).logits, model(input_ids=IDS).logits)
    fold_routers(other)
    before, after = (m.config.to_dict() for m in (model, other))
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} <= SAVING_SETS
    assert_near(other(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_frozen_gates_give_frozen_routers():
    model = moe().requires_grad_(False)
    replace_routers(model, "mlp")
    assert not any(p.requires_grad for p in model.parameters())


# --- steering, and what cannot work -----------------------------------------------------------------------------------


def test_steering_reaches_them():
    model = with_router("top_p")
    with allow_experts(model, [2]):  # such a router can do with one expert
        one = model(input_ids=IDS).logits
    with force_experts(model, torch.full((4,), 2)):
        assert_near(model(input_ids=IDS).logits, one)
    with pytest.raises(ValueError, match="allow at least top_k=2"), allow_experts(with_router("mlp"), [2]):
        pass


def test_steering_reaches_a_router_without_parameters():
    model, alone = with_router("locmoe"), with_router("mlp")
    with force_experts(model, 1), force_experts(alone, 1):
        assert_near(model(input_ids=IDS).logits, alone(input_ids=IDS).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_uniform_gates_are_those_of_the_stock_gate_and_leave_the_routers_as_they_were(kind):
    stock, model = moe("mixtral"), with_router(kind)
    with torch.no_grad():
        before, config = model(IDS).logits, model.config.to_dict()
        with uniform_gates(stock), uniform_gates(model):
            assert_near(model(IDS).logits, stock(IDS).logits)
        assert torch.equal(model(IDS).logits, before) and model.config.to_dict() == config


@pytest.mark.parametrize("make, settings, message", [
    (moe, "liner", "router_type='liner': must be one of linear, mlp"),
    (moe, RouterSettings("top_p", threshold=2.0), "router_threshold=2.0"),
    (moe, RouterSettings("attention", num_heads=3), "router_num_heads=3: must divide"),
    (lambda: dense_model("llama"), "mlp", "replace_routers: LlamaForCausalLM has no router"),
    (
        lambda: GptOssForCausalLM(GptOssConfig(**COMMON, num_local_experts=N, head_dim=8)), "mlp",
        "replace_routers: GptOssTopKRouter is not a linear gate with a softmax over the top k",
    ),
])  # fmt: skip
def test_what_cannot_be_replaced_says_so(make, settings, message):
    model = make()
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=message) as error:
        replace_routers(model, settings)
    assert "\n" not in str(error.value)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("mark", ["ds_shape", "placements"])
@pytest.mark.parametrize(
    "write", [fold_routers, partial(init_gates, gates="ridge", batches=[]), partial(init_attention_routers, batches=[])]
)
def test_routers_of_a_sharded_model_are_not_written(write, mark):
    model = get_peft_model(tiny_llama(), MoELoraConfig(num_experts=2, task_type="CAUSAL_LM"))
    setattr(next(model.parameters()), mark, ())  # as ZeRO-3 and FSDP2 mark weights
    with pytest.raises(InputError, match="weights are sharded"):
        write(model)
