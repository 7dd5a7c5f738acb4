"""Routers from attention heads, on adapters and native MoEs, against independent computations."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from moe_peft import MoELoraConfig, fold_routers, init_attention_routers
from moe_peft.adapter.layers import MoELoraFFN
from moe_peft.routing.attention_heads import attention_weights, group_heads, share_keys
from moe_peft.routing.routers import RouterSettings, make_router
from moe_peft.training.trainers import MoESFTConfig, MoESFTTrainer
from tests.helpers.attention_case import BATCHES, IDS, mean_keys
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.routed_models import NATIVE, gates_of

W, H, D = 4, 8, 12  # head width, heads, hidden size of the loops


def adapter(router_type: str = "attention", base=None, **settings):
    settings = {"num_experts": 4, "r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **settings}
    return get_peft_model(base or tiny_llama(vocab=64), MoELoraConfig(router_type=router_type, **settings)).eval()


def native(kind: str):
    torch.manual_seed(0)
    return NATIVE[kind]().eval()


def ffns(model):
    return [m for m in model.modules() if isinstance(m, MoELoraFFN)]


# --- queries and keys -----------------------------------------------------------------------------------------------


def test_heads_are_grouped_with_those_they_resemble():
    directions = torch.eye(W)
    keys = torch.stack([directions[i] + 0.1 * directions[(i + 1) % W] for i in (2, 0, 1, 2, 1, 0)])
    keys[3] *= 5  # cosine: length does not matter
    assert sorted(sorted(group) for group in group_heads(keys, 3)) == [[0, 3], [1, 5], [2, 4]]
    assert group_heads(keys, 6) == [[0], [1], [2], [3], [4], [5]]
    both = group_heads(torch.stack([directions[i // 3] + 0.01 * torch.randn(W) for i in range(6)]), 2)
    assert sorted(sorted(group) for group in both) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("groups", [2, 3, 4, 6])
@pytest.mark.parametrize("seed", range(3))
def test_groups_grow_by_their_mean_cosine(groups, seed):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(12, 5, generator=generator) * torch.rand(12, 1, generator=generator) * 9
    cosine = torch.nn.functional.cosine_similarity(
        keys.double().unsqueeze(0), keys.double().unsqueeze(1), dim=2
    ).tolist()
    free, expected = set(range(12)), []
    for _ in range(groups):
        group = list(max(((i, j) for i in free for j in free if i < j), key=lambda pair: cosine[pair[0]][pair[1]]))
        free -= set(group)
        while len(group) < 12 // groups:
            group.append(max(free, key=lambda head: sum(cosine[head][own] for own in group) / len(group)))
            free.remove(group[-1])
        expected.append(group)
    assert group_heads(keys, groups) == expected


@pytest.mark.parametrize("mixture", ["sum", "max"])
@pytest.mark.parametrize("m, n", [(4, 4), (2, 4), (1, 8), (8, 8), (8, 4), (8, 2), (16, 4), (32, 8), (2, 2), (8, 1)])
def test_scores_are_those_of_the_paper(m, n, mixture):
    """`S_i^j = (W^j x)·K_i / √d'`, summed or maximal over j, the best of an expert's keys; by loops."""
    generator = torch.Generator().manual_seed(m * n)
    weight = torch.randn(H * W, D, generator=generator, dtype=torch.float64)
    keys = torch.randn(H, W, generator=generator, dtype=torch.float64)
    mean_input = torch.randn(D, generator=generator, dtype=torch.float64)
    query, key = attention_weights(weight, keys.flatten(), mean_input, W, m, n)
    settings = RouterSettings("attention", num_heads=m, mixture=mixture, attention_size=H * W)
    router = make_router(D, n, settings).double()
    router.set_heads(query, key)
    pieces = max(1, m // H)  # a head is split where there are more routers than heads
    W_pieces = [weight[i * W // pieces : (i + 1) * W // pieces] for i in range(H * pieces)]
    K_pieces = list(keys.view(H * pieces, -1))
    routers = [torch.cat([W_pieces[h] for h in group]) for group in group_heads(torch.stack(K_pieces), m)]
    width = H * W // m
    if m < n:
        K_pieces = K_pieces * (n // m)
    K = [torch.cat([K_pieces[h] for h in group]) for group in group_heads(torch.stack(K_pieces), max(m, n))]
    assert all(R.shape == (width, D) for R in routers) and all(k.shape == (width,) for k in K)
    if m < n:  # heads were repeated; keys that several groups have are divided
        K = list(key.flatten(0, 1))
    x = torch.randn(D, generator=generator, dtype=torch.float64)
    per_key = torch.stack([torch.stack([(R @ x) @ k / width**0.5 for R in routers]) for k in K])
    per_key = per_key.sum(1) if mixture == "sum" else per_key.amax(1)
    expected = per_key.view(n, -1).amax(1)
    assert_near(router(x).squeeze(0), expected)


# --- keys that several groups of heads have -------------------------------------------------------------------------


def test_a_shared_key_is_divided_by_what_matters_to_each_groups_queries():
    key, other = torch.tensor([1.0, -2.0, 3.0, 4.0, 0.5]), torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    mean_queries = torch.tensor([
        [5.0, 1.0, 1.0, 1.0, 1.0],  # gains 5, -2, 3, 4, 0.5
        [9.0, 9.0, 9.0, 9.0, 9.0],
        [1.0, -4.0, 0.0, 2.0, 4.0],  # gains 1, 8, 0, 8, 2
    ])  # fmt: skip
    actual = share_keys(torch.stack([key, other, key]), mean_queries)
    first = torch.tensor([1.0, 0.0, 3.0, 0.0, 0.0])  # its gains of 5 and 3
    last = torch.tensor([0.0, -2.0, 0.0, 4.0, 0.5])  # its gains of 8 and 8, and the odd entry, where it gains more
    scale = key.norm()
    expected = torch.stack([first / first.norm() * scale, other, last / last.norm() * scale])
    assert_near(actual, expected)


@pytest.mark.parametrize("width", [6, 7, 8])
@pytest.mark.parametrize("seed", range(3))
def test_a_shared_key_is_dealt_out_by_gain(width, seed):
    """The largest gain first, to its group, until that has an even share; odd entries go where they gain the most."""
    generator = torch.Generator().manual_seed(seed)
    key, mean_queries = torch.randn(width, generator=generator), torch.randn(3, width, generator=generator)
    gains = (mean_queries * key).tolist()
    owner, room = {}, [width // 3] * 3
    for row, column in sorted(((r, c) for r in range(3) for c in range(width)), key=lambda at: -gains[at[0]][at[1]]):
        if column not in owner and room[row]:
            owner[column] = row
            room[row] -= 1
    for column in set(range(width)) - owner.keys():
        owner[column] = max(range(3), key=lambda row: gains[row][column])
    expected = torch.stack([
        torch.stack([key[c] if owner[c] == row else torch.tensor(0.0) for c in range(width)]) for row in range(3)
    ])  # fmt: skip
    expected *= key.norm() / expected.norm(dim=1, keepdim=True)
    assert_near(share_keys(key.expand(3, -1), mean_queries), expected)


def test_keys_are_twins_by_their_own_size():
    """Small keys that differ are none beside a large one; keys of zeros are, and stay zeros."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    keys *= torch.tensor([1e-8, 1e-8, 1e4, 0, 0], dtype=torch.float64).unsqueeze(1)
    assert torch.equal(share_keys(keys, queries), keys)


def test_twins_may_come_last_and_have_as_many_entries_as_there_are_of_them():
    key, other = torch.tensor([3.0, 4.0]), torch.tensor([1.0, -7.0])
    queries = torch.tensor([[9.0, 9.0], [2.0, 1.0], [1.0, 1.0]])
    # Gains 6 and 4 of the first twin, 3 and 4 of the second: the first takes entry 0, and the second has the other.
    expected = torch.stack([other, torch.tensor([5.0, 0.0]), torch.tensor([0.0, 5.0])])
    assert_near(share_keys(torch.stack([other, key, key]), queries), expected)


@pytest.mark.parametrize("m, n", [(8, 8), (16, 16), (32, 32), (32, 16), (4, 8)])
def test_shared_keys_become_orthogonal_parts_of_the_key_and_others_stay(m, n):
    heads, key_heads, width, d = 32, 8, 8, 24
    generator = torch.Generator().manual_seed(n)
    weight = torch.randn(heads * width, d, generator=generator, dtype=torch.float64)
    keys = torch.randn(key_heads, width, generator=generator, dtype=torch.float64)
    mean_input = torch.randn(d, generator=generator, dtype=torch.float64)
    key = attention_weights(weight, keys.flatten(), mean_input, width, m, n)[1].flatten(0, 1)
    repeated = keys.repeat_interleave(heads // key_heads, 0)
    repeated = repeated.repeat(max(1, n // m), 1)
    whole = torch.stack([repeated[group].flatten() for group in group_heads(repeated, max(m, n))])
    same = (whole.unsqueeze(0) - whole.unsqueeze(1)).abs().amax(-1) < 1e-12
    unit = torch.nn.functional.normalize(key, dim=1)
    cosine = (unit @ unit.T).masked_fill(torch.eye(len(unit), dtype=torch.bool), 0)
    assert cosine[same].abs().max() < 1e-12
    assert_near(key.norm(dim=1), whole.norm(dim=1))
    alone = same.sum(1) == 1
    assert bool(alone.all()) == (max(m, n) <= key_heads)
    torch.testing.assert_close(key[alone], whole[alone], rtol=0, atol=0)
    ratio = key / whole
    assert all(len(row[row != 0].round(decimals=9).unique()) == 1 for row in ratio)  # a part of the key, scaled


@pytest.mark.parametrize("n, limit", [(16, 0.1), (32, 0.15)])
def test_top_two_choices_are_seldom_experts_of_one_key(n, limit, monkeypatch):
    """32 query heads, 8 key heads: about as seldom as by chance (0.07, 0.10)."""
    assert _twin_choices(n) < limit
    noise = lambda keys_GW, _: keys_GW * (1 + 0.01 * torch.randn_like(keys_GW))  # noqa: E731
    monkeypatch.setattr("moe_peft.routing.attention_heads.share_keys", noise)
    assert _twin_choices(n) > 0.9  # what the measure says of keys that are a hundredth apart


def _twin_choices(n: int) -> float:
    """The share of tokens, in all layers, whose two best experts have the same key heads."""
    torch.manual_seed(0)
    size = {"hidden_size": 256, "head_dim": 8, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    base = LlamaForCausalLM(
        LlamaConfig(**size, num_attention_heads=32, num_key_value_heads=8, pad_token_id=0, initializer_range=0.05)
    )
    means = mean_keys(base)
    model = adapter(base=base, num_experts=n)
    init_attention_routers(model, BATCHES)
    ids = torch.randint(3, 64, (16, 32), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, output_router_logits=True).router_logits
    actual = []
    for (keys, _), logits_TN in zip(means, logits, strict=True):
        groups = group_heads(keys.view(8, 8).repeat_interleave(4, 0), n)
        shared = [tuple(head // 4 for head in group) for group in groups]  # the key heads of each expert
        pairs = torch.tensor([shared.index(own) for own in shared])[logits_TN.topk(2).indices]
        actual.append((pairs[:, 0] == pairs[:, 1]).float().mean())
    return float(torch.stack(actual).mean())


@pytest.mark.parametrize("m, n", [(8, 64)])
def test_more_experts_than_a_key_has_entries_are_refused(m, n):
    keys = torch.ones(H, W)  # all heads alike
    with pytest.raises(ValueError, match="64 experts share a key of 4 entries; use fewer routers"):
        attention_weights(torch.ones(H * W, D), keys.flatten(), torch.ones(D), W, m, n)


@pytest.mark.parametrize("m, n", [(3, 3), (4, 6), (5, 4)])
def test_sizes_that_do_not_fit_are_refused(m, n):
    with pytest.raises(ValueError, match=f"num_heads={m}: must divide the attention's size 32"):
        attention_weights(torch.zeros(H * W, D), torch.zeros(H * W), torch.zeros(D), W, m, n)


# --- adapters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {}, {"router_num_heads": 2}, {"router_num_heads": 8}, {"router_mixture": "max"}, {"num_experts": 2},
])  # fmt: skip
def test_adapter_gets_its_layers_heads(settings):
    model = adapter(**settings).train()
    modes = [m.training for m in model.modules()]
    experts = {name: p.clone() for name, p in model.named_parameters() if "lora_A" in name or "lora_B" in name}
    init_attention_routers(model, BATCHES)
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks for name, m in model.named_modules() if name.endswith("k_proj"))
    torch.testing.assert_close({n: p for n, p in model.named_parameters() if n in experts}, experts, rtol=0, atol=0)
    base = tiny_llama(vocab=64).eval()
    n, mixture = settings.get("num_experts", 4), settings.get("router_mixture", "sum")
    for layer, attention, means in zip(
        ffns(model), (layer.self_attn for layer in base.model.layers), mean_keys(base), strict=True
    ):
        m = settings.get("router_num_heads", n)
        query, key = attention_weights(attention.q_proj.weight.detach(), *means, 16, m, n)
        router = layer.router("default")
        own = router.query if mixture == "max" else router.mean_query * m
        assert_near(own.data, query if mixture == "max" else query.sum(0, keepdim=True))
        assert_near(router.key.data, key)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_what_an_adapter_saves_whole_does_not_count_as_the_base():
    """As with the adapters' updates: queries and keys are the base's."""
    plain, model = adapter(), adapter(modules_to_save=["embed_tokens", "k_proj"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    for each in (plain, model):
        init_attention_routers(each, BATCHES)
    for a, b in zip(ffns(plain), ffns(model), strict=True):
        torch.testing.assert_close(a.router("default").state_dict(), b.router("default").state_dict(), rtol=0, atol=0)


def test_a_linear_gate_gets_what_the_attention_router_folds_into():
    attention, linear = adapter(), adapter("linear")
    init_attention_routers(attention, BATCHES)
    init_attention_routers(linear, iter(BATCHES))
    for a, b in zip(ffns(attention), ffns(linear), strict=True):
        assert_near(b.router("default").weight, a.router("default").fold())
        b.moe_lora_A.load_state_dict(a.moe_lora_A.state_dict())
        b.moe_lora_B.load_state_dict(a.moe_lora_B.state_dict())
    assert_near(linear(input_ids=IDS).logits, attention(input_ids=IDS).logits)
    fold_routers(attention)
    assert_near(linear(input_ids=IDS).logits, attention(input_ids=IDS).logits)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_projections_are_read(bits, tmp_path):
    plain = tiny_llama(vocab=64)
    plain.save_pretrained(tmp_path)
    kind = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} if bits == 4 else {"load_in_8bit": True}
    base = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BitsAndBytesConfig(**kind))
    model = adapter(base=base, num_experts=2)
    init_attention_routers(model, BATCHES)
    exact = adapter(base=plain, num_experts=2)
    init_attention_routers(exact, BATCHES)
    scale = {4: 0.15, 8: 0.02}[bits]
    for ours, theirs in zip(ffns(model), ffns(exact), strict=True):
        for name in ("mean_query", "key"):
            a, b = (getattr(layer.router("default"), name).detach() for layer in (ours, theirs))
            assert a.dtype == torch.float32 and 0 < (a - b).norm() / b.norm() < scale * (2 if name == "key" else 1)
    model.train()(input_ids=IDS, labels=IDS).loss.backward()  # the linears have not been made ready for inference
    assert all(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "lora_router" in name)


# --- native MoEs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NATIVE)
def test_native_gates_are_initialized_trained_and_folded_back(kind, tmp_path):
    model = native(kind)
    means, names = mean_keys(model), list(model.state_dict())
    init_attention_routers(model, BATCHES, num_heads=2)
    for gate, layer, mean in zip(gates_of(model), model.model.layers, means, strict=True):
        query, key = attention_weights(layer.self_attn.q_proj.weight.detach(), *mean, 8, 2, 6)
        expected = key[:, 0].double() @ query.sum(0).double() / 16**0.5
        assert_near(gate.fold(), expected, dtype=torch.float32)
    before = [gate.fold() for gate in gates_of(model)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        out = model(input_ids=IDS, labels=IDS, output_router_logits=True)
        assert len(out.router_logits) == 2
        out.loss.backward()
        optimizer.step()
    after = [gate.fold().float() for gate in gates_of(model)]
    assert all((a - b).abs().max() > 1e-5 for a, b in zip(after, before, strict=True))
    logits = model(input_ids=IDS).logits
    fold_routers(model)
    assert sorted(model.state_dict()) == sorted(names)
    torch.testing.assert_close([gate.weight.data for gate in gates_of(model)], after, rtol=0, atol=0)
    assert all(gate.weight.requires_grad for gate in gates_of(model))
    assert_near(model(input_ids=IDS).logits, logits)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_near(again(input_ids=IDS).logits, logits)


def test_a_copy_is_folded_and_the_original_goes_on(tmp_path):
    model = native("qwen3_moe")
    init_attention_routers(model, BATCHES, num_heads=2)
    expected = model(input_ids=IDS).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(input_ids=IDS).logits, expected, rtol=0, atol=0)
        fold_routers(other)
        assert_near(other(input_ids=IDS).logits, expected)
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=0, atol=0)
    model.save_pretrained(tmp_path)  # not folded: who knows nothing of queries and keys reads the right model
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_near(again(input_ids=IDS).logits, expected)
    fold_routers(model)


def test_gates_that_peft_saves_whole_are_found_once():
    model = get_peft_model(native("mixtral"), LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"]))
    routers = gates_of(model)
    assert len(routers) == 2 and all(p.requires_grad for router in routers for p in router.parameters())
    init_attention_routers(model, BATCHES, num_heads=2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for router in routers for p in router.parameters())


def test_folding_leaves_modes_freezing_and_other_adapters_alone():
    config = MoELoraConfig(num_experts=4, r=4, router_type="attention", router_jitter_noise=0.5, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(vocab=64), config)
    model.add_adapter("other", config)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_router.default" in name)
    model.eval()
    expected = model(input_ids=IDS).logits
    fold_routers(model, "default")
    assert_near(model(input_ids=IDS).logits, expected)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 and all("lora_router.default.weight" in name for name in trained)
    assert config.router_type == "attention" and model.peft_config["other"].router_type == "attention"
    assert model.peft_config["default"].router_type == "linear"


@pytest.mark.parametrize("make, name, message", [
    (adapter, "nope", "adapter_name='nope': no adapter with routers|no such adapter"),
    (lambda: tiny_llama(vocab=64), None, "has no router"),
])  # fmt: skip
def test_what_cannot_be_folded_says_so(make, name, message):
    with pytest.raises(ValueError, match=f"fold_routers: .*({message})"):
        fold_routers(make(), name)


def test_frozen_gates_stay_frozen_parameters():
    model = native("mixtral")
    names = list(model.state_dict())
    for _ in range(2):  # the second time replaces the first
        init_attention_routers(model.requires_grad_(False), BATCHES, num_heads=2)
    fold_routers(model)
    assert sorted(model.state_dict()) == sorted(names)
    assert not any(p.requires_grad for p in model.parameters())


def test_trainer_of_labels_trains_attention_gates(tokenizer, tmp_path):
    from datasets import Dataset

    model = native("mixtral")
    model.resize_token_embeddings(128)
    init_attention_routers(model, BATCHES, num_heads=2)
    before = [gate.fold().float() for gate in gates_of(model)]
    data = Dataset.from_list([{"text": "w3 w5 w7 w9", "domain": d} for d in ("a", "b") * 4])
    args = MoESFTConfig(
        output_dir=str(tmp_path), max_steps=2, label_column="domain", expert_map={"a": [0, 1], "b": [2, 3]},
        training_stage="routers", use_cpu=True, bf16=False, report_to="none", learning_rate=1e-2, save_strategy="no",
    )  # fmt: skip
    MoESFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer).train()
    fold_routers(model)
    changes = [(gate.weight - b).abs().max() for gate, b in zip(gates_of(model), before, strict=True)]
    assert all(change > 1e-6 for change in changes)


# --- what cannot work -----------------------------------------------------------------------------------------------


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64))


def phi3():
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return Phi3ForCausalLM(Phi3Config(**size, num_key_value_heads=4, vocab_size=64, pad_token_id=0))


@pytest.mark.parametrize("make, batches, message", [
    (lambda: tiny_llama(vocab=64), BATCHES, "LlamaForCausalLM has no router"),
    (lambda: adapter(base=gpt2()), BATCHES, "no attention with q_proj, k_proj"),
    (lambda: adapter(base=phi3()), BATCHES, "no attention with q_proj, k_proj"),
    (lambda: adapter("mlp"), BATCHES, "router_type='mlp' cannot be initialized from an attention"),
    (lambda: adapter("linear", target_modules=["v_proj"]), BATCHES, "no routers on FFNs"),
    (adapter, [], "batches: no tokens"),
])  # fmt: skip
def test_what_cannot_be_initialized_says_so(make, batches, message):
    with pytest.raises(ValueError, match=message):
        init_attention_routers(make(), batches)


def test_a_linear_gate_has_one_key_per_expert():
    with pytest.raises(ValueError, match="num_heads=8: a linear gate takes at most num_experts=4"):
        init_attention_routers(adapter("linear"), BATCHES, num_heads=8)
