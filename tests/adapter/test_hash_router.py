"""The hash router against a plain loop: which experts a token gets, layers, checkpointing, what has no token ids."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration
from trl import SFTConfig, SFTTrainer

import tests.helpers.reference as reference_module
from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from moe_peft.adapter.ffn_layout import find_layout
from moe_peft.adapter.layers import MoELoraFFN
from moe_peft.adapter.router_recorder import Collection, state
from moe_peft.native import export_adapter
from moe_peft.routing.routers import HashRouter, RouterSettings, make_router
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near
from tests.helpers.expert_layers import D, dense_ffn, tensors
from tests.helpers.models import tiny_llama
from tests.helpers.reference import assert_same, reference, run
from tests.helpers.routed_models import tuner_layers

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))


def config(**own) -> MoELoraConfig:
    settings = {"num_experts": 5, "top_k": 2, "r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **own}
    return MoELoraConfig(router_type="hash", **settings)


def model(**own):
    base = tiny_llama()
    torch.manual_seed(1)
    return get_peft_model(base, config(**own))


def routers(model) -> list[HashRouter]:
    return [module for module in model.modules() if isinstance(module, HashRouter)]


def hash_logits(token: int, salts: list[int]) -> list[float]:
    """splitmix64's finalizer in Python's integers; its first 24 bits, of which the last ones are the expert's index."""
    logits, bits = [], math.ceil(math.log2(len(salts)))
    for expert, salt in enumerate(salts):
        z = (token + salt) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z = z ^ (z >> 31)  # of which nothing reaches the first 24 bits
        logits.append((z // 2 ** (40 + bits) * 2**bits + expert) / 2**24)
    return logits


def chosen(token: int, salts: list[int], k: int) -> list[int]:
    logits = hash_logits(token, salts)
    return sorted(range(len(salts)), key=lambda i: -logits[i])[:k]


@pytest.mark.parametrize("n", [2, 5, 8])
def test_logits_and_gates_are_the_loops(n):
    torch.manual_seed(n)
    router = make_router(16, n, RouterSettings("hash"))
    ids = torch.tensor([0, 1, 2, 127, 151_935, 2**31 - 1])
    expected = [hash_logits(token, router.salt.tolist()) for token in ids.tolist()]
    for dtype, own in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        logits = router(torch.zeros(6, 16, dtype=dtype), ids.int())
        assert logits.dtype == own and logits.tolist() == expected
        for k in (1, 2):
            gates, experts = router.choose(logits, k, True)
            assert experts.tolist() == [chosen(token, router.salt.tolist(), k) for token in ids.tolist()]
            assert torch.equal(gates, torch.full((6, k), 1 / k, dtype=own))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_random_tokens_are_balanced_also_as_combinations(k):
    router = make_router(16, 4, RouterSettings("hash"))
    count = 20_000
    experts = router.choose(router(torch.zeros(1), torch.arange(count)), k, True)[1]
    combinations = torch.bincount((2**experts).sum(1), minlength=16)
    possible = [i for i in range(16) if i.bit_count() == k]
    share = 1 / len(possible)
    assert combinations[possible].sum() == count, "k different experts"
    assert (combinations[possible] / count - share).abs().max() < 5 * math.sqrt(share / count)
    assert router(torch.zeros(1), torch.arange(count)).sort(dim=1).values.diff(dim=1).min() > 0, "no ties"


@pytest.mark.parametrize("mixing", ["output", "projection"])
@pytest.mark.parametrize("k", [1, 3])
def test_layer_and_its_gradients_are_the_loops(mixing, k, monkeypatch):
    torch.manual_seed(0)
    ffn = dense_ffn("gated")
    layer = MoELoraFFN(ffn, find_layout(ffn), "default")
    layer.update_layer("default", config(mixing=mixing, top_k=k).expert_spec("mlp"))
    layer.double()
    salts = layer.router("default").salt.tolist()
    x, d_output = tensors(18, dtype=torch.float64)
    tokens = iter(IDS.flatten().tolist())

    def gates(self, x):
        return dict.fromkeys(chosen(next(tokens), salts, k), torch.tensor(1 / k, dtype=x.dtype))

    monkeypatch.setattr(reference_module._Loop, "_gates", gates)
    monkeypatch.setattr(state.current, "collection", Collection(layer, token_ids=IDS))
    assert x.shape == (18, D)
    assert_same(run(layer, x, d_output), reference(layer, x, d_output))


def test_a_token_has_the_same_experts_in_every_context_and_others_in_every_layer():
    adapted = model().eval()
    both = torch.stack([IDS[0], IDS[0].flip(0)])
    for logits in adapted(input_ids=both, output_router_logits=True).router_logits:
        first, second = logits.view(2, 9, 5)
        assert torch.equal(first, second.flip(0))
    one, other = routers(adapted)
    assert not torch.equal(one.salt, other.salt)


def test_nothing_of_it_is_trained():
    adapted = model().train()
    assert not any(list(router.parameters()) for router in routers(adapted))
    salts = [router.salt.clone() for router in routers(adapted)]
    assert adapted.peft_config["default"].router_aux_loss_coef == 0
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=1e-2)
    for _ in range(3):
        out = adapted(input_ids=IDS, labels=IDS, output_router_logits=True)
        assert not any(logits.requires_grad for logits in out.router_logits)
        out.loss.backward()
        assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, salts, [router.salt for router in routers(adapted)]))


def test_another_adapter_of_as_many_experts_hashes_alike():
    """A DPO trainer's reference is a new adapter with the parameters of the trained one, not its salt."""
    adapted = model()
    adapted.add_adapter("ref", adapted.peft_config["default"])
    adapted.add_adapter("other", config(num_experts=3))
    for layer in tuner_layers(adapted):
        salts = {name: router.salt for name, router in layer.moe_lora_router.items()}
        assert torch.equal(salts["ref"], salts["default"]) and not torch.equal(salts["other"], salts["default"])


def test_saved_and_loaded_it_routes_alike(tmp_path):
    adapted = model().eval()
    tiny_llama().save_pretrained(tmp_path / "base")
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(99)
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert all(torch.equal(a.salt, b.salt) for a, b in zip(routers(again), routers(adapted), strict=True))
    torch.testing.assert_close(again(input_ids=IDS).logits, adapted(input_ids=IDS).logits, rtol=0, atol=0)
    half = copy.deepcopy(adapted).bfloat16()
    assert all(torch.equal(a.salt, b.salt) for a, b in zip(routers(half), routers(adapted), strict=True))
    with pytest.raises(ValueError, match=r"router_type='hash' does not fold .* token ids"):
        export_adapter(tmp_path / "adapter", tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_would_run_again_without_their_token_ids_are_refused(reentrant):
    adapted = model().train()
    adapted.gradient_checkpointing_enable({"use_reentrant": reentrant})
    adapted.enable_input_require_grads()
    with pytest.raises(
        InputError, match=r"^router_type='hash': gradient_checkpointing=True runs layers again"
    ) as error:
        adapted(input_ids=IDS)
    assert "\n" not in str(error.value)
    with torch.no_grad():  # nothing runs again
        adapted(input_ids=IDS)
    adapted.eval()(input_ids=IDS)


def test_other_hooks_on_saved_tensors_are_no_checkpoint():
    adapted = model().train()
    with torch.autograd.graph.save_on_cpu():
        adapted(input_ids=IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize("own", [{}, {"packing": True, "max_length": 16}, {"padding_free": True}], ids=str)
def test_it_trains_in_a_stock_trainer(own, tokenizer, tmp_path):
    rows = [" ".join(f"w{i}" for i in row) for row in IDS.repeat(4, 1).tolist()]
    args = SFTConfig(output_dir=str(tmp_path), max_steps=3, learning_rate=1e-2, bf16=False, use_cpu=True,
                     report_to="none", save_strategy="no", logging_steps=1, gradient_checkpointing=False,
                     **{"max_length": None, **own})  # fmt: skip
    trainer = SFTTrainer(
        tiny_llama(attn_implementation="eager"),
        args=args,
        train_dataset=Dataset.from_list([{"text": row} for row in rows]),
        processing_class=tokenizer,
        peft_config=config(),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_a_compiled_model_computes_the_same():
    adapted = model().eval()
    expected = adapted(input_ids=IDS).logits
    torch._dynamo.reset()
    assert_near(torch.compile(adapted, backend="aot_eager")(input_ids=IDS).logits, expected)


def test_without_token_ids_it_is_refused_in_one_line():
    adapted = model()
    embeds = adapted.get_input_embeddings()(IDS)
    with pytest.raises(ValueError, match="no input_ids for 18 hidden states; call the model itself"):
        adapted(inputs_embeds=embeds)
    with pytest.raises(ValueError, match=r"router_type='hash': token_ids=None"):
        routers(adapted)[0](embeds)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=128, d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8))
    own = {"target_modules": r"(encoder|decoder).*\.DenseReluDense\.wo", "mixing": "projection"}
    seq2seq = get_peft_model(t5, config(**{**own, "task_type": "SEQ_2_SEQ_LM"}))
    with pytest.raises(ValueError, match=r"no input_ids for 18 hidden states; .* on a decoder-only model"):
        seq2seq(input_ids=IDS, decoder_input_ids=IDS)


@pytest.mark.parametrize(
    ("own", "field"),
    [
        ({"label_column": "domain", "expert_map": {"a": [0, 1], "b": [2, 3]}}, "router_label_loss_coef=1.0"),
        ({"router_z_loss_coef": 0.1}, "router_z_loss_coef=0.1"),
    ],
)
def test_a_loss_on_routers_that_cannot_learn_is_refused(own, field, tokenizer, tmp_path):
    args = MoESFTConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none", **own)
    rows = Dataset.from_list([{"text": "w1 w2", "domain": name} for name in ("a", "b")])
    with pytest.raises(ValueError, match=rf"{field}: .*the loss is a constant"):
        MoESFTTrainer(model(), args=args, train_dataset=rows, processing_class=tokenizer)
