"""Every router of the table against plain loops in float64: logits, gates, gradients; in layers and in models."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from peft import AutoPeftModelForCausalLM, get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM

from moe_peft import MoELoraConfig, allow_experts, fold_routers, force_experts
from moe_peft.adapter.experts import EXPERTS, LoraExperts
from moe_peft.adapter.layers import MoELoraLayer
from moe_peft.native import export_adapter
from moe_peft.routing.gates import sigmoid_gates, switch_gates, threshold_gates, top_k_gates, top_p_gates
from moe_peft.routing.routers import ROUTERS, LinearRouter, Router, RouterSettings, make_router
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near
from tests.helpers.expert_layers import D, tensors
from tests.helpers.models import tiny_llama
from tests.helpers.reference import assert_same, reference, run
from tests.helpers.router_kinds import ROUTER_KINDS, N, config, decided, routed_layer

IDS = torch.randint(3, 128, (3, 11), generator=torch.Generator().manual_seed(0))
ALONE = [kind for kind in ROUTER_KINDS if kind != "hash"]  # work in a layer alone; test_hash_router.py has the other
FOLD = ("linear", "attention-sum", "switch", "soft", "locmoe")


def test_every_router_is_tried():
    assert {settings.get("router_type", "linear") for settings in ROUTER_KINDS.values()} == ROUTERS.keys()


def model(kind: str, **own):
    base = tiny_llama(attn_implementation="eager")
    torch.manual_seed(1)
    made = get_peft_model(base, config(kind, **own))
    decided(made)
    return made.eval()


# --- against the loops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, mixing", [(kind, mixing) for kind in ALONE for mixing in ("output", "projection") if kind != "switch"]
    + [("switch", "projection")]
)  # fmt: skip
def test_layer_and_its_gradients_are_the_loops(kind, mixing):
    made = routed_layer(kind, mixing=mixing)
    x, d_output = tensors(9, dtype=torch.float64)
    assert_same(run(made, x, d_output), reference(made, x, d_output))


def test_the_variable_kinds_do_vary():
    """Otherwise the comparison above would say little of them."""
    x, _ = tensors(64, dtype=torch.float64)
    for kind in ("top_p", "threshold"):
        made = routed_layer(kind, router_threshold=0.6 if kind == "top_p" else 0.25)
        decided(made, 0.2)
        gates_TK, _ = made.router("default").choose(made.router("default")(x), 3, True)
        assert set((gates_TK > 0).sum(1).tolist()) == {1, 2, 3}
        assert_near(gates_TK.sum(1), torch.ones(64, dtype=torch.float64))


def test_gates_at_the_edges():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert_near(top_p_gates(logits, 4, False, 0.79)[0], torch.tensor([[0.5, 0.3, 0.0, 0.0]]))
    assert_near(top_p_gates(logits, 4, False, 1.0)[0], torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert_near(top_p_gates(logits, 2, True, 1.0)[0], torch.tensor([[0.625, 0.375]]))
    assert_near(threshold_gates(logits, 4, False, 0.9)[0], torch.tensor([[0.5, 0.0, 0.0, 0.0]]))
    assert_near(threshold_gates(logits, 3, True, 0.2)[0], torch.tensor([[0.625, 0.375, 0.0]]))
    even = torch.zeros(1, 4)  # probabilities that reach a limit exactly
    assert_near(top_p_gates(even, 4, False, 0.5)[0], torch.tensor([[0.25, 0.25, 0.0, 0.0]]))
    assert_near(threshold_gates(even, 4, False, 0.25)[0], torch.full((1, 4), 0.25))
    far = torch.tensor([[-200.0, -201.0, -300.0]])  # sigmoids that are zero in float32
    assert_near(sigmoid_gates(far, 2)[0], torch.tensor([[1.0, 0.0]]).add(-1).exp() / (1 + math.exp(-1)))


def test_switch_takes_tokens_in_their_order_up_to_the_capacity():
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(3))
    logits[:, 0] += 0.5
    gates, experts = switch_gates(logits, capacity=9)
    taken = [0] * 4
    for t in range(50):
        p = logits[t].softmax(0)
        best = int(p.argmax())
        assert int(experts[t]) == best
        expected = p[best] if taken[best] < 9 else torch.zeros(())
        assert_near(gates[t, 0], expected)
        taken[best] += 1
    assert max(taken) > 9


def test_switch_drops_in_training_only():
    made = routed_layer("switch", router_capacity_factor=0.5)
    x, d_output = tensors(40, dtype=torch.float64)
    assert_same(run(made.eval(), x, d_output), reference(made, x, d_output))
    trained = made.train()(x)
    base = made.base_layer(x)
    dropped = (trained - base).abs().amax(1) < 1e-12
    capacity = math.ceil(0.5 * 40 / N)
    counts = torch.bincount(made.router("default")(x).argmax(1), minlength=N)
    assert int(dropped.sum()) == int((counts - capacity).clamp(min=0).sum()) > 0


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_gates_begin_with_the_deviation_that_transformers_has(kind):
    torch.manual_seed(0)
    for parameter in make_router(256, 64, RouterSettings(kind)).parameters():
        assert abs(parameter.mean().item()) < 1e-3 and parameter.std().item() == pytest.approx(0.02, rel=0.03)


def test_jitter_multiplies_each_entry_of_the_input_in_training_only():
    router = make_router(16, 16, RouterSettings(jitter_noise=0.3))
    with torch.no_grad():
        router.weight.copy_(torch.eye(16))  # so that the logits are the noisy input
    torch.manual_seed(0)
    noisy = router.train()(torch.full((500, 16), 2.0)) / 2
    assert 0.7 <= noisy.min() < 0.71 and 1.29 < noisy.max() <= 1.3
    for over in (0, 1):  # no two tokens and no two entries share their noise
        assert (noisy.std(over) > 0.05).all()
    assert noisy.mean().item() == pytest.approx(1, abs=0.01) and noisy.std().item() == pytest.approx(
        0.3 / 3**0.5, rel=0.03
    )
    assert torch.equal(router.eval()(torch.full((500, 16), 2.0)), torch.full((500, 16), 2.0))


# --- folding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FOLD)
def test_folded_gate_has_the_routers_logits(kind):
    made = routed_layer(kind).router("default")
    x, _ = tensors(20, dtype=torch.float64)
    assert_near(x @ made.fold().T, made(x))


@pytest.mark.parametrize("kind, reason", [
    ("mlp", "non-linearity"), ("attention-max", "'sum' folds"), ("attention-keys", "8 keys|2 keys"),
    ("sigmoid", "sigmoids"), ("top_p", "varies"), ("threshold", "varies"), ("hash", "token ids"), ("arrow", "absolute"),
])  # fmt: skip
def test_what_does_not_fold_says_why(kind, reason):
    adapted = model(kind)
    before = copy.deepcopy(adapted.state_dict())
    with pytest.raises(ValueError, match=f"does not fold.*({reason})"):
        fold_routers(adapted)
    assert adapted.state_dict().keys() == before.keys()


@pytest.mark.parametrize("kind", FOLD)
def test_folded_adapter_is_the_same_model_and_a_plain_one(kind, tmp_path):
    adapted = model(kind)
    expected = adapted(input_ids=IDS).logits
    fold_routers(adapted)
    assert_near(adapted(input_ids=IDS).logits, expected)
    name = adapted.peft_config["default"].router_type
    assert name == ("soft" if kind == "soft" else "linear")
    out = adapted(
        input_ids=IDS, labels=IDS, output_router_logits=True
    )  # its new routers speak the protocol and are trained
    out.loss.backward()
    routers = [(n, p) for n, p in adapted.named_parameters() if "moe_lora_router" in n]
    assert len(out.router_logits) == len(routers) == 2 and all(p.grad.abs().sum() > 0 for _, p in routers)
    adapted.base_model.model.save_pretrained(tmp_path / "base")
    base = tiny_llama(attn_implementation="eager")
    base.save_pretrained(tmp_path / "base")
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="eager").eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, adapted(input_ids=IDS).logits, rtol=0, atol=0)


# --- in models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROUTER_KINDS)
def test_life_of_an_adapter(kind, tmp_path):
    """
    Zero experts change nothing, every parameter gets a gradient, a saved adapter loads to the bit, a cache changes
    nothing.
    """
    if "raw" not in kind:  # gates that do not sum to 1 scale the FFNs' outputs, as in a native MoE that does so
        fresh = get_peft_model(tiny_llama(), config(kind, init_lora_weights=True))
        assert_near(fresh(input_ids=IDS).logits, tiny_llama()(input_ids=IDS).logits)
    adapted = model(kind).train()
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
    adapted.eval()
    tiny_llama().save_pretrained(tmp_path / "base")
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="eager").eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, adapted(input_ids=IDS).logits, rtol=0, atol=0)
    whole = adapted(input_ids=IDS[:1]).logits[:, -1]
    cache = adapted(input_ids=IDS[:1, :-1], use_cache=True).past_key_values
    step = adapted(input_ids=IDS[:1, -1:], past_key_values=cache).logits[:, -1]
    assert_near(step, whole)


@pytest.mark.parametrize("kind", ["linear", "sigmoid-raw", "top_p", "threshold", "attention-max"])
def test_allowed_experts_are_chosen_by_the_routers_own_rule(kind):
    made = routed_layer(kind)
    x, _ = tensors(12, dtype=torch.float64)
    spec = made.moe_lora_spec["default"]
    holder = nn.ModuleList([made])
    holder.base_model = nn.Identity()  # which steering asks for the rows of a batch
    router = made.router("default")
    allowed = [0, 1, 3]
    masked = router(x).clone()
    masked[:, 2] = -torch.inf
    gates, experts = router.choose(masked, spec.top_k, spec.normalize_top_k)
    assert 2 not in experts[gates > 0]
    router.register_forward_hook(lambda module, args, logits: masked)
    expected = made(x)
    router._forward_hooks.popitem()
    with allow_experts(holder, allowed):
        assert_near(made(x), expected)


@pytest.mark.parametrize("kind", ["soft", "top_p", "threshold"])
def test_kinds_that_leave_experts_out_can_do_with_one(kind):
    adapted = model(kind)
    with allow_experts(adapted, [2]):
        one = adapted(input_ids=IDS).logits
    with force_experts(adapted, torch.full((3,), 2)):
        assert_near(one, adapted(input_ids=IDS).logits)


def test_autocast_leaves_routers_in_float32():
    for kind in ALONE:
        made = routed_layer(kind).float().router("default")
        x = torch.randn(5, D)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_near(made(x), made(x.double()).float())


def test_soft_has_all_experts_and_layers_of_other_sizes_all_of_theirs():
    adapted = model("soft", num_experts_pattern={r"layers\.0\.mlp": 2, r"layers\.1\.mlp": 6})
    layers = [m for m in adapted.modules() if isinstance(m, MoELoraLayer)]
    assert [made.moe_lora_spec["default"].top_k for made in layers] == [2, 6]


@pytest.mark.parametrize("settings, message", [
    ({"router_type": "liner"}, "router_type='liner': must be one of linear, mlp"),
    ({"router_type": "switch"}, "router_type='switch': .*mixing='projection'"),
    ({"router_type": "top_p", "router_threshold": 1.5}, r"router_threshold=1.5: must be above 0 and at most 1"),
    ({"router_capacity_factor": 0}, "router_capacity_factor=0"),
    ({"router_num_heads": 0}, "router_num_heads=0"),
    ({"router_mixture": "mean"}, "router_mixture='mean'"),
])  # fmt: skip
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        MoELoraConfig(**settings)


@pytest.mark.parametrize("settings, message", [
    ({"router_num_heads": 3}, "router_num_heads=3: must divide the base's attention size 64"),
    ({"target_modules": ["mlp", "q_proj"]}, "'q_proj' is a single linear|q_proj. is a single linear"),
])  # fmt: skip
def test_attention_routers_that_do_not_fit_are_refused_before_anything_is_touched(settings, message):
    base = tiny_llama()
    before = [name for name, _ in base.named_modules()]
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, config("attention-sum", **settings))
    assert [name for name, _ in base.named_modules()] == before
    single = {"target_modules": ["mlp", "q_proj"], "num_experts_pattern": {"q_proj": 1}}
    get_peft_model(base, config("attention-sum", **single))  # one expert needs no router


def test_settings_hold_a_table_of_their_own():
    assert make_router(8, 3, RouterSettings("mlp"))(torch.zeros(2, 8)).shape == (2, 3)


# --- a router that somebody adds --------------------------------------------------------------------------------------


class Tempered(LinearRouter):
    """Divides the logits by 2, and says nothing about folding."""

    def logits(self, x_TD):
        return super().logits(x_TD) / 2


class Shifted(LinearRouter):
    """Not linear in its input, though its parent is, and says nothing about it."""

    def logits(self, x_TD):
        return super().logits(x_TD) + torch.arange(self.num_experts).to(x_TD)


class Squared(LinearRouter):
    """Linear logits; gates that no softmax gives."""

    def choose(self, logits_TN, k, normalize):
        gates_TK, experts_TK = top_k_gates(logits_TN, k, normalize)
        return gates_TK**2, experts_TK


@pytest.fixture
def added(monkeypatch):
    for cls in (Tempered, Shifted, Squared):
        monkeypatch.setitem(ROUTERS, cls.__name__.lower(), cls)
        monkeypatch.setitem(ROUTER_KINDS, cls.__name__.lower(), {"router_type": cls.__name__.lower()})


def test_an_added_router_folds_saves_loads_and_exports_without_its_class(added, monkeypatch, tmp_path):
    adapted = model("tempered")
    expected = adapted(input_ids=IDS).logits
    tiny_llama(attn_implementation="eager").save_pretrained(tmp_path / "base")
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "own")
    own = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "own", attn_implementation="eager").eval()
    torch.testing.assert_close(own(input_ids=IDS).logits, expected, rtol=0, atol=0)
    exported = export_adapter(tmp_path / "own", tmp_path / "moe")
    fold_routers(adapted)
    adapted.save_pretrained(tmp_path / "folded")
    monkeypatch.delitem(ROUTERS, "tempered")
    folded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "folded", attn_implementation="eager").eval()
    native = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager").eval()
    for loaded in (folded, native):
        assert_near(loaded(input_ids=IDS).logits, expected)


@pytest.mark.parametrize("kind", ["shifted", "squared"])
def test_a_router_that_only_inherits_from_a_linear_one_does_not_count_as_folded(kind, added):
    adapted = model(kind)
    with pytest.raises(ValueError, match=f"router_type='{kind}' does not fold .*: the gate routes differently"):
        fold_routers(adapted)
    assert adapted.peft_config["default"].router_type == kind


# --- details that nothing else shows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "mlp", "attention", "locmoe"])
def test_any_leading_dimensions_and_any_dtype(kind):
    router = make_router(16, N, RouterSettings(kind, attention_size=16))
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    expected = router.logits(x.view(6, 16))
    torch.testing.assert_close(router(x), expected, rtol=0, atol=0)
    assert router(x).dtype == torch.float32 and router(x.double()).dtype == torch.float64
    half = router(x.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, router(x.bfloat16().float()), rtol=0, atol=0)


class HalfRouter(LinearRouter):
    """Reads the first half of its input."""

    def logits(self, x_TD):
        half = self.hidden_size // 2
        return x_TD[:, :half] @ self.weight[:, :half].T


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("kind", [LinearRouter, HalfRouter])
def test_gradients_of_half_precision_inputs_are_those_of_what_the_router_saw(kind, noise):
    router = kind(16, N, RouterSettings("linear", jitter_noise=noise)).train()
    x_TD = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.manual_seed(1)
    router(x_TD).square().sum().backward()
    torch.manual_seed(1)
    seen_TD = x_TD.float() * torch.empty(6, 16).uniform_(1 - noise, 1 + noise) if noise else x_TD.float()
    weight = router.weight.detach().clone().requires_grad_()
    read = 16 if kind is LinearRouter else 8
    (seen_TD[:, :read] @ weight[:, :read].T).square().sum().backward()
    assert_near(router.weight.grad, weight.grad)


@pytest.mark.parametrize("kind", ["threshold", "top_p"])
def test_the_threshold_that_is_set_counts(kind):
    logits_TN = torch.randn(40, N, generator=torch.Generator().manual_seed(0))
    rule = {"threshold": threshold_gates, "top_p": top_p_gates}[kind]
    for p in (0.1, 0.45, 0.7):
        gates, experts = make_router(16, N, RouterSettings(kind, threshold=p)).choose(logits_TN, 3, True)
        wanted, same = rule(logits_TN, 3, True, p)
        assert torch.equal(experts, same) and torch.equal(gates, wanted)
    found = make_router(16, N, RouterSettings(kind)).choose(logits_TN, 3, True)[0]
    assert_near(found, rule(logits_TN, 3, True, {"threshold": 1 / N, "top_p": 0.8}[kind])[0])


@pytest.mark.parametrize(
    ("m", "n", "size"),
    [(4, 4, 10), (3, 4, 12), (6, 4, 12)],  # in turn: not of the attention; m divides not n; n divides not m
)
def test_heads_have_to_divide_three_numbers(m, n, size):
    with pytest.raises(ValueError, match=f"router_num_heads={m}: must divide the base's attention size {size}"):
        make_router(16, n, RouterSettings("attention", num_heads=m, attention_size=size))


def test_a_subclass_says_itself_whether_it_is_a_linear_gate():
    class Other(LinearRouter):
        pass

    class Same(LinearRouter):
        linear_gate = True

    assert Other.linear_gate is False and Same.linear_gate is True and LinearRouter.linear_gate is True


def test_salts_are_of_62_bits():
    salts = torch.cat([make_router(16, 64, RouterSettings("hash")).salt for _ in range(4)])
    assert salts.max() > 2**60 and len(salts.unique()) == len(salts)


@pytest.mark.parametrize("d, n", [(16, 4), (17, 4), (18, 5), (33, 7), (5, 5), (3, 5)])
def test_locmoes_parts_are_those_of_adaptive_pooling(d, n):
    x = torch.randn(6, d, dtype=torch.float64)
    expected = torch.nn.functional.adaptive_avg_pool1d(x, n)
    assert_near(make_router(d, n, RouterSettings("locmoe"))(x), expected)


class Short(LinearRouter):
    def logits(self, x_TD):
        return super().logits(x_TD)[:, :-1]


class Long(LinearRouter):
    def logits(self, x_TD):
        return torch.cat([super().logits(x_TD)] * 2, dim=1)


class Flat(LinearRouter):
    def logits(self, x_TD):
        return super().logits(x_TD).flatten()


class Half(LinearRouter):
    def logits(self, x_TD):
        return super().logits(x_TD).bfloat16()


class Single(LinearRouter):
    """Computes in float32, also where its input is float64."""

    def logits(self, x_TD):
        return x_TD.float() @ self.weight.T


@pytest.mark.parametrize("router", [Short, Long, Flat, Half, Single])
def test_a_router_of_a_users_own_with_other_logits_is_refused(router, monkeypatch):
    """In training and, in float64, as it is folded."""
    monkeypatch.setitem(ROUTERS, "mine", router)
    mine = make_router(16, 4, RouterSettings("mine"))
    for use in [mine.fold] if router is Single else [mine.fold, lambda: mine(torch.randn(5, 16))]:
        with pytest.raises(InputError, match=r"router_type='mine': its logits are .*, must be"):
            use()


class Frozen(LinearRouter):
    """Asks for what the adapter does not do: it trains every parameter, and no buffer."""

    def make(self):
        super().make()
        self.weight.requires_grad_(False)
        self.register_buffer("fixed", torch.ones(2))


class FrozenExperts(LoraExperts):
    def reset(self, A_all, B_all):
        super().reset(A_all, B_all)
        for A_NRI in A_all.values():
            A_NRI.requires_grad_(False)


def test_every_parameter_of_an_adapter_is_trained(monkeypatch):
    """As docs/extending.md says."""
    monkeypatch.setitem(ROUTERS, "mine", Frozen)
    monkeypatch.setitem(EXPERTS, "mine", FrozenExperts)
    config = MoELoraConfig(num_experts=4, router_type="mine", expert_type="mine", task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), config)
    own = {name: p for name, p in model.named_parameters() if "moe_lora" in name}
    assert all(p.requires_grad for p in own.values()) and len(own) == 2 * (2 * 3 + 1)
    saved = get_peft_model_state_dict(model)
    assert sum(name.endswith("router.fixed") for name in saved) == 2


class ByToken(Router):
    """Learned logits of each token id, plus a linear gate."""

    needs_token_ids = True

    def make(self):
        self.weight = torch.nn.Parameter(torch.randn(self.num_experts, self.hidden_size))
        self.rows = torch.nn.Parameter(torch.randn(128, self.num_experts))

    def token_logits(self, x_TD, token_ids_T):
        return x_TD @ self.weight.T.to(x_TD.dtype) + self.rows[token_ids_T].to(x_TD.dtype)


def test_a_router_of_a_users_own_reads_token_ids_and_learns(monkeypatch):
    monkeypatch.setitem(ROUTERS, "mine", ByToken)
    model = get_peft_model(tiny_llama(), MoELoraConfig(num_experts=4, router_type="mine", task_type="CAUSAL_LM"))
    ids = torch.randint(3, 128, (2, 9))
    model(input_ids=ids, labels=ids, output_router_logits=True).loss.backward()
    for module in model.modules():
        if isinstance(module, ByToken):
            used = module.rows.grad.abs().sum(1) > 0
            assert used.nonzero().flatten().tolist() == ids.unique().tolist() and module.weight.grad.any()
            with pytest.raises(InputError, match="router_type='mine' does not fold"):
                module.fold()
