"""Parameters, those that a token uses, its floating-point operations, and how alike experts are: counted by hand."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig, MixtralForCausalLM

from moe_peft import MoELoraConfig, replace_routers
from moe_peft.models.model_size import ModelSize, expert_similarity, model_size
from moe_peft.routing.routers import AttentionRouter
from moe_peft.upit.expansion import update_inner
from moe_peft.utils.expert_likeness import similarities, update_gram, value_gram
from tests.helpers.close import assert_near, near
from tests.helpers.models import ATTENTION, FFN, tiny_llama
from tests.helpers.routed_models import NATIVE

BASE = 2 * 128 * 64 + 2 * (ATTENTION + FFN + 2 * 64) + 64
BASE_PRODUCTS = 128 * 64 + 2 * (ATTENTION + FFN)
EXPERT = 4 * 3 * (64 + 128)  # of rank 4, on gate, up and down


def adapted(base=None, **settings):
    config = {"num_experts": 6, "top_k": 2, "r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **settings}
    return get_peft_model(base or tiny_llama(), MoELoraConfig(**config))


def test_a_dense_model_uses_everything():
    assert model_size(tiny_llama()) == ModelSize(BASE, BASE, 2 * BASE_PRODUCTS)
    tied = tiny_llama(tie_word_embeddings=True)  # stored once, multiplied all the same
    assert model_size(tied) == ModelSize(BASE - 128 * 64, BASE - 128 * 64, 2 * BASE_PRODUCTS)


@pytest.mark.parametrize("mixing", ["output", "projection"])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_an_adapter(mixing, k):
    """The base runs once, whatever k and the mixing."""
    router = 6 * 64
    products = BASE_PRODUCTS + 2 * (k * EXPERT + router)
    expected = ModelSize(BASE + 2 * (6 * EXPERT + router), BASE + 2 * (k * EXPERT + router), 2 * products)
    assert model_size(adapted(mixing=mixing, top_k=k)) == expected


def test_adapters_that_do_not_run_are_there_but_not_active():
    model = adapted()
    one = model_size(model)
    model.add_adapter("other", MoELoraConfig(num_experts=3, r=4, task_type="CAUSAL_LM"))
    added = 2 * (3 * EXPERT + 3 * 64)
    assert model_size(model) == ModelSize(one.total + added, one.active, one.flops)
    with model.disable_adapter():
        assert model_size(model) == ModelSize(one.total + added, BASE, 2 * BASE_PRODUCTS)


def test_single_linears_with_one_and_with_several_experts():
    model = adapted(target_modules=["q_proj", "v_proj"], num_experts_pattern={"q_proj": 1})
    single, several = 4 * (64 + 64), 4 * (64 + 32)
    total = BASE + 2 * (single + 6 * several + 6 * 64)
    assert model_size(model).total == total
    assert model_size(model).active == total - 2 * 4 * several


def test_other_routers():
    for kind, own, size in (
        ("mlp", {}, 64 * 64 + 6 * 64),
        ("attention", {"router_num_heads": 2}, 32 * 64 + 6 * 32),
        ("locmoe", {}, 0),
        ("soft", {"top_k": 6}, 6 * 64),
    ):
        k = own.get("top_k", 2)
        expected = BASE + 2 * (k * EXPERT + size)
        found = model_size(adapted(router_type=kind, **own))
        assert found.active == expected, kind
        assert found.flops == 2 * (BASE_PRODUCTS + 2 * (k * EXPERT + size)), kind


@pytest.mark.parametrize(("mixture", "times"), [("sum", 1), ("max", 2)])
def test_the_keys_of_an_attention_router_meet_every_query_of_the_mixture(mixture, times):
    model = adapted(router_type="attention", router_num_heads=2, router_mixture=mixture)
    router = next(m for m in model.modules() if isinstance(m, AttentionRouter))
    with FlopCounterMode(display=False) as counter:
        router.logits(torch.zeros(10, 64))
    products = BASE_PRODUCTS + 2 * (2 * EXPERT) + 2 * counter.get_total_flops() / (2 * 10)
    assert counter.get_total_flops() == 2 * 10 * times * (32 * 64 + 6 * 32)
    assert model_size(model).flops == 2 * products


def test_native_moes():
    attention, norms, table = 32 * 32 * 2 + 32 * 16 * 2, 2 * 2 * 32 + 32, 64 * 32
    expert, router = 3 * 32 * 48, 6 * 32
    layers = 2 * (attention + router)
    expected = ModelSize(
        2 * table + norms + layers + 2 * 6 * expert,
        2 * table + norms + layers + 2 * 2 * expert,
        2 * (table + layers + 2 * 2 * expert),
    )
    assert model_size(NATIVE["mixtral"]()) == expected

    model = NATIVE["qwen2_moe"]()
    shared = 3 * 32 * model.config.shared_expert_intermediate_size + 32  # with its gate
    biases, expert = 2 * (32 + 16 + 16), 3 * 32 * 16
    layers = 2 * (attention + router + shared)
    expected = ModelSize(
        2 * table + norms + biases + layers + 2 * 6 * expert,
        2 * table + norms + biases + layers + 2 * 2 * expert,
        2 * (table + layers + 2 * 2 * expert),
    )
    assert model_size(model) == expected


def test_packed_weights_count_unpacked(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    packed = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map={"": "cpu"}
    )
    assert sum(p.numel() for p in packed.parameters()) < BASE
    assert model_size(packed) == ModelSize(BASE, BASE, 2 * BASE_PRODUCTS)
    assert model_size(adapted(packed)).total == BASE + 2 * (6 * EXPERT + 6 * 64)


def test_sizes_are_readable():
    assert str(ModelSize(46_700_000_000, 12_900_000_000, 25_400_000_000)) == (
        "46.7 G parameters, 12.9 G active per token (28%), 25.4 GFLOP per token"
    )
    assert str(ModelSize(900, 900, 1_800)).startswith("900 parameters, 900 active per token (100%), 1.8 kFLOP")
    assert str(ModelSize(999_600, 999_400, 0)).startswith("1 M parameters, 999 k active")


# --- similarity -------------------------------------------------------------------------------------------------------


def test_inner_products_of_updates_are_those_of_the_products():
    generator = torch.Generator().manual_seed(0)
    A, B = torch.randn(5, 3, 8, generator=generator), torch.randn(5, 3, 6, generator=generator)
    updates = torch.stack([b.double().T @ a.double() for a, b in zip(A, B, strict=True)]).flatten(1)
    assert_near(update_gram(A, B), updates @ updates.T)
    experts = [{"x.lora_A.weight": a, "x.lora_B.weight": b.T} for a, b in zip(A, B, strict=True)]
    assert update_gram(A, B)[1, 3].item() == near(update_inner(experts[1], experts[3]), dtype=torch.float64)
    values = torch.randn(4, 33, generator=generator)
    assert_near(value_gram(values, chunk=10), values.double() @ values.double().T)


def test_cosines():
    values = torch.tensor([[1.0, 0.0], [2.0, 2.0], [0.0, 0.0], [-3.0, 0.0]])
    cosines = similarities(value_gram(values))
    half = 0.5**0.5
    expected = [[1, half, 0, -1], [half, 1, 0, -half], [0, 0, 1, 0], [-1, -half, 0, 1]]
    assert_near(cosines, torch.tensor(expected, dtype=torch.float64))


def test_experts_of_a_model():
    model = adapted()
    weights = {name: p.detach().double() for name, p in model.named_parameters() if "moe_lora_A" in name}
    flat = []
    for expert in range(6):
        own = [
            model.get_parameter(name.replace("moe_lora_A", "moe_lora_B")).detach()[expert].double().T @ A[expert]
            for name, A in weights.items()
        ]
        flat.append(torch.cat([update.flatten() for update in own]))
    expected = torch.nn.functional.cosine_similarity(torch.stack(flat)[:, None], torch.stack(flat)[None], dim=-1)
    assert_near(expert_similarity(model), expected)

    scaled = adapted(alpha_pattern={r"layers\.1\.mlp": 64}, lora_alpha=4)
    scaled.load_state_dict(model.state_dict())
    scalings = [16.0 if "layers.1" in name else 1.0 for name in weights]
    flat = []
    for expert in range(6):
        own = [
            s * model.get_parameter(name.replace("moe_lora_A", "moe_lora_B")).detach()[expert].double().T @ A[expert]
            for s, (name, A) in zip(scalings, weights.items(), strict=True)
        ]
        flat.append(torch.cat([update.flatten() for update in own]))
    expected = torch.nn.functional.cosine_similarity(torch.stack(flat)[:, None], torch.stack(flat)[None], dim=-1)
    assert_near(expert_similarity(scaled), expected)

    native = NATIVE["qwen3_moe"]()
    stacked = [p.detach().double().flatten(1) for name, p in native.named_parameters() if ".experts." in name]
    rows = torch.cat(stacked, dim=1)
    expected = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1)
    assert_near(expert_similarity(native), expected)
    assert expert_similarity(tiny_llama()) is None
    assert expert_similarity(adapted(num_experts_pattern={r"layers\.0\.mlp": 3})) is None


@pytest.mark.parametrize("router, extra", [("linear", 0), ("mlp", 64 * 64)])
def test_a_native_moe_with_other_routers(router, extra):
    """Per layer, an MLP router has [d, d] more than a linear gate."""
    model = NATIVE["mixtral"]()
    before = model_size(model)
    n_layers = model.config.num_hidden_layers
    d = model.config.hidden_size
    replace_routers(model, router)
    added = n_layers * (d * d if extra else 0)
    assert model_size(model) == ModelSize(before.total + added, before.active + added, before.flops + 2 * added)
    assert expert_similarity(model).shape == (model.config.num_local_experts,) * 2


def test_a_module_that_is_saved_whole_serves_in_the_place_of_its_original():
    config = MoELoraConfig(num_experts=4, r=2, task_type="CAUSAL_LM")
    plain = model_size(get_peft_model(tiny_llama(), config))
    saved = get_peft_model(
        tiny_llama(), MoELoraConfig(num_experts=4, r=2, modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    )
    head = saved.get_base_model().lm_head.original_module.weight.numel()
    assert model_size(saved) == ModelSize(plain.total + head, plain.active, plain.flops)
    with saved.disable_adapter():
        assert model_size(saved).active == model_size(tiny_llama()).active


@pytest.mark.parametrize("tied", [False, True])
def test_trained_rows_serve_instead_of_those_of_the_base(tied):
    def size(**tokens):
        config = MoELoraConfig(num_experts=4, r=2, task_type="CAUSAL_LM", **tokens)
        return model_size(get_peft_model(tiny_llama(tie_word_embeddings=tied), config))

    plain, with_rows = size(), size(trainable_token_indices=[3, 4, 5])
    assert with_rows == ModelSize(plain.total + 3 * 64, plain.active, plain.flops)


@pytest.mark.parametrize("experts", [0, 4])
def test_drop_upcyclings_table_3(experts):
    """
    Its terms as they stand there, for s tokens. It leaves out gates, which `ModelSize.flops` has, and counts embeddings
    as products and attention scores, which that has not.
    """
    s, v, d_h, d_f, n_l, n_h, n_q, d_k, n_e = 50, 128, 64, 128, 2, 4, 2, 16, 2 if experts else 1
    model = tiny_llama(layers=n_l)
    if experts:
        sizes = {
            **model.config.to_dict(),
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": n_e,
        }
        model = MixtralForCausalLM(
            MixtralConfig(**{key: value for key, value in sizes.items() if key != "rope_parameters"})
        )
    attention = 4 * s * d_h * d_k * n_q + 2 * s * d_h * d_k * n_h + 2 * s**2 * d_k * n_h * 2 + 2 * s * d_k * n_h * d_h
    ffn = n_e * (4 * s * d_h * d_f + 2 * s * d_f * d_h)
    total = 2 * s * v * d_h + n_l * (attention + ffn) + 2 * s * d_h * v
    gates = n_l * 2 * s * experts * d_h
    not_counted = 2 * v * d_h + 4 * s * d_k * n_h * n_l
    assert s * (model_size(model).flops + not_counted) == total + gates
