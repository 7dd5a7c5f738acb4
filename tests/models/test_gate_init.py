"""Gates without training, against the formulas on hidden states that another pass recorded, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from moe_peft import MoELoraConfig, fold_routers, init_gates, lora_to_moe, replace_routers
from moe_peft.models import gate_init
from moe_peft.models.gate_init import GATE_INITS, ArrowGates, GateInit, PromptGates, RidgeGates, dense_gates
from moe_peft.native import UpcycleConfig, export_adapter, upcycle, verify_export
from tests.helpers.close import WIDTH, assert_near, near
from tests.helpers.models import tiny_llama

N, D = 3, 64


def lora(seed: int, targets=("gate_proj", "up_proj", "down_proj")) -> PeftModel:
    base = tiny_llama()
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def mixture(**settings) -> PeftModel:
    return lora_to_moe(tiny_llama(), [lora(i) for i in range(N)], **settings)


def texts() -> list[tuple[list[int], int, bool]]:
    """Tokens, expert, and whether it is what that expert is not for."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (18,), generator=generator).tolist()
    return [
        (torch.randint(3, 60, (length,), generator=generator).tolist(), i % N, i >= 12)
        for i, length in enumerate(lengths)
    ]


def batches(rows, size: int = 4, side: str = "right", extra: int = 0) -> list[dict[str, torch.Tensor]]:
    made = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        width = max(len(ids) for ids, _, _ in part) + extra
        pads = [[0] * (width - len(ids)) for ids, _, _ in part]
        ids = [p + i if side == "left" else i + p for p, (i, _, _) in zip(pads, part, strict=True)]
        real = [[1] * len(i) for i, _, _ in part]
        mask = [[*p, *m] if side == "left" else [*m, *p] for p, m in zip(pads, real, strict=True)]
        made.append({
            "input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask),
            "expert": torch.tensor([e for _, e, _ in part]), "negative": torch.tensor([n for _, _, n in part]),
        })  # fmt: skip
    return made


def inputs(rows) -> list[list[torch.Tensor]]:
    """The FFNs' inputs of every text alone, [S, d] in float64, by layer."""
    base = tiny_llama().eval()
    seen: list[list[torch.Tensor]] = [[] for _ in base.model.layers]
    for layer, of_layer in zip(base.model.layers, seen, strict=True):
        layer.mlp.register_forward_pre_hook(lambda m, args, to=of_layer: to.append(args[0][0].detach().double()))
    with torch.no_grad():
        for ids, _, _ in rows:
            base(torch.tensor([ids]))
    return seen


def routers(model) -> list[torch.Tensor]:
    return [p.detach().double() for name, p in model.named_parameters() if ".moe_lora_router." in name]


def ridge_reference(x, rows, penalty=1e-2, temperature=0.1):
    X = torch.cat(x)
    Y = torch.cat([
        torch.eye(N)[e].double().expand(len(ids), N) * (not negative) for ids, e, negative in rows
    ])  # fmt: skip
    W = torch.linalg.lstsq(
        torch.cat([X, math.sqrt(penalty) * torch.eye(D).double()]), torch.cat([Y, torch.zeros(D, N)])
    )
    return (W.solution / W.solution.norm(dim=0)).T / temperature


def prompts_reference(x, rows, pooled=lambda x: x.mean(0)):
    gates = []
    for i in range(N):
        own = [pooled(t) for t, (_, e, negative) in zip(x, rows, strict=True) if e == i and not negative]
        not_own = [pooled(t) for t, (_, e, negative) in zip(x, rows, strict=True) if e == i and negative]
        others = [pooled(t) for t, (_, e, negative) in zip(x, rows, strict=True) if e != i and not negative]
        row = torch.stack(own).mean(0) - torch.stack(not_own or others).mean(0)
        gates.append(row / row.norm())
    return torch.stack(gates)


REFERENCES = {
    "ridge": (RidgeGates(), ridge_reference),
    "ridge, other settings": (RidgeGates(1.0, 0.5), lambda x, rows: ridge_reference(x, rows, 1.0, 0.5)),
    "prompts": (PromptGates(), prompts_reference),
    "prompts, last token": (PromptGates("last"), lambda x, rows: prompts_reference(x, rows, lambda x: x[-1])),
}


@pytest.mark.parametrize("negatives", [True, False])
@pytest.mark.parametrize("case", REFERENCES)
def test_gates_are_the_formulas(case, negatives):
    way, reference = REFERENCES[case]
    rows = texts() if negatives else texts()[:12]
    model = mixture()
    init_gates(model, way, batches(rows))
    expected = [reference(x, rows) for x in inputs(rows)]
    terms = WIDTH**2 if "ridge" in case else WIDTH  # an inverse magnifies how the texts' inputs are rounded
    for gate, formula in zip(routers(model), expected, strict=True):
        assert_near(gate, formula, terms=terms, dtype=torch.float32)
    dense = dense_gates(tiny_llama(), way, batches(rows), N)
    for gate, formula in zip(dense, expected, strict=True):
        assert_near(gate, formula, terms=terms, dtype=torch.float32)


@pytest.mark.parametrize("way", [RidgeGates(), PromptGates(), PromptGates("last")], ids=str)
def test_order_batches_and_padding_do_not_count(way):
    rows, gates = texts(), []
    for given in (
        batches(rows), batches(rows[::-1], size=1), batches(rows, size=5, side="left"), batches(rows, extra=7),
    ):  # fmt: skip
        model = mixture()
        init_gates(model, way, given)
        gates.append(routers(model))
    for other in gates[1:]:
        for a, b in zip(gates[0], other, strict=True):
            assert_near(a, b, dtype=torch.float32)


def test_sums_add_up_to_the_bit_in_any_order_of_small_integers():
    """Order could only matter by rounding: where sums are exact, so are the gates."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(-4, 5, (6, D), generator=generator).double() for _ in range(5)]
    from moe_peft.models.gate_init import BatchLabels

    sums = [
        RidgeGates().sums(x, BatchLabels(torch.tensor([i % N]), torch.tensor([False]), torch.zeros(6).long(), N))
        for i, x in enumerate(parts)
    ]
    total = {name: sum(part[name] for part in sums) for name in sums[0]}
    other = {name: sum(part[name] for part in sums[::-1]) for name in sums[0]}
    assert torch.equal(RidgeGates().gates(total, ()), RidgeGates().gates(other, ()))


def test_arrow_is_the_top_right_singular_vector_whatever_its_sign():
    loras = [lora(i) for i in range(N)]
    model = lora_to_moe(tiny_llama(), loras)
    before = routers(model)
    init_gates(model, ArrowGates(iterations=2000))
    assert model.peft_config["default"].router_type == "arrow"
    for layer, gate in enumerate(routers(model)):
        for i, source in enumerate(loras):
            mlp = source.get_base_model().model.layers[layer].mlp
            update = torch.cat([
                (p.lora_B["default"].weight @ p.lora_A["default"].weight).double() for p in (mlp.gate_proj, mlp.up_proj)
            ])  # fmt: skip
            v = torch.linalg.svd(update).Vh[0]
            assert abs(float(gate[i] @ v)) == near(1)
    x = torch.randn(7, D)
    router = model.get_base_model().model.layers[0].mlp.router("default")
    assert_near(router(x), (x.double() @ routers(model)[0].T).abs())
    assert not torch.equal(before[0], routers(model)[0])


def test_arrow_iterates_15_times_from_one_start():
    model = mixture()
    init_gates(model, "arrow")
    spec = next(m for m in model.modules() if hasattr(m, "moe_lora_spec"))
    A, B = spec.expert_parameters("default")
    v = torch.randn(1, D, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[0, :, 0]
    for _ in range(15):
        v = sum(
            A[p][1].double().T @ (B[p][1].double() @ (B[p][1].double().T @ (A[p][1].double() @ v)))
            for p in ("gate_proj", "up_proj")
        )
        v = v / v.norm()
    assert_near(routers(model)[0][1], v, dtype=torch.float32)


@pytest.mark.parametrize("gates", ["ridge", "prompts"])
def test_linear_gates_export_exactly_and_arrow_says_why_not(gates, tmp_path, tokenizer):
    base = tiny_llama(vocab=128)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for i in range(N):
        base = tiny_llama(vocab=128)
        torch.manual_seed(i)
        config = LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(base, config).save_pretrained(tmp_path / str(i))
    base = tiny_llama(vocab=128)
    base.name_or_path = str(tmp_path / "base")
    model = lora_to_moe(base, [tmp_path / str(i) for i in range(N)])
    init_gates(model, gates, batches(texts()))
    before = routers(model)
    fold_routers(model)
    assert all(map(torch.equal, before, routers(model)))
    model.save_pretrained(tmp_path / "adapter")
    moe = export_adapter(tmp_path / "adapter", tmp_path / "moe", tmp_path / "base")
    compared = verify_export(tmp_path / "adapter", moe, ["w3 w9 w7 w20", "w5 w6"], tmp_path / "base")
    assert compared.difference < 1e-5 * compared.largest and compared.agreement == 1
    init_gates(model, "arrow")
    model.save_pretrained(tmp_path / "arrow")
    with pytest.raises(ValueError, match="absolute values, which no linear gate gives"):
        export_adapter(tmp_path / "arrow", tmp_path / "no", tmp_path / "base")


def test_a_loaded_arrow_mixture_computes_the_same(tmp_path):
    model = mixture().eval()
    init_gates(model, "arrow")
    ids = torch.arange(3, 27).view(2, 12)
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "arrow")
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path / "arrow").eval()
    torch.testing.assert_close(again(ids).logits, expected, rtol=0, atol=0)


def test_an_adapter_that_is_not_active_gets_its_gates():
    model = mixture()
    model.add_adapter("two", MoELoraConfig(num_experts=2, task_type="CAUSAL_LM"))
    rows = [row for row in texts() if row[1] < 2]
    init_gates(model, "ridge", batches(rows), adapter_name="two")
    other = get_peft_model(tiny_llama(), MoELoraConfig(num_experts=2, task_type="CAUSAL_LM"))
    init_gates(other, "ridge", batches(rows))
    of_two = [p.double() for name, p in model.named_parameters() if ".moe_lora_router.two" in name]
    assert all(map(torch.equal, of_two, routers(other)))


@pytest.mark.parametrize(("router_type", "after"), [("sigmoid", "sigmoid"), ("soft", "soft"), ("mlp", "linear")])
def test_routers_with_linear_logits_keep_their_kind(router_type, after):
    model = mixture(router_type=router_type)
    init_gates(model, "ridge", batches(texts()))
    assert model.peft_config["default"].router_type == after
    linear = mixture()
    init_gates(linear, "ridge", batches(texts()))
    assert all(map(torch.equal, routers(model), routers(linear)))


def test_routers_of_attention_linears_see_what_these_read():
    targets = ("q_proj", "up_proj")
    model = lora_to_moe(tiny_llama(), [lora(i, targets) for i in range(N)])
    init_gates(model, "arrow")
    init_gates(model, "ridge", batches(texts()[:12]))
    base, rows, seen = tiny_llama().eval(), texts()[:12], []
    base.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0][0].double()))
    with torch.no_grad():
        for ids, _, _ in rows:
            base(torch.tensor([ids]))
    router = model.get_base_model().model.layers[0].self_attn.q_proj.router("default")
    assert_near(router.weight, ridge_reference(seen, rows))


def test_what_cannot_be():
    model = mixture()
    with pytest.raises(ValueError, match="gates='x': must be one of ridge, prompts, arrow"):
        init_gates(model, "x")
    with pytest.raises(ValueError, match="expert 0 has no text"):
        init_gates(model, "ridge")
    with pytest.raises(ValueError, match="expert 2 has no text"):
        init_gates(model, "prompts", batches([row for row in texts()[:12] if row[1] != 2]))
    with pytest.raises(ValueError, match="no LoRA expert reads the input of a routed layer"):
        init_gates(lora_to_moe(tiny_llama(), [lora(i, ["down_proj"]) for i in range(2)]), "arrow")
    bottlenecks = get_peft_model(tiny_llama(), MoELoraConfig(expert_type="bottleneck", task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="no LoRA expert reads"):
        init_gates(bottlenecks, "arrow")


def test_an_expert_without_updates_is_never_arrows_first_choice():
    loras = [lora(0), lora(1)]
    for name, parameter in loras[1].named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    model = lora_to_moe(tiny_llama(), loras)
    init_gates(model, "arrow")
    assert all(not gate[1].any() and gate[0].norm() == near(1) for gate in routers(model))


def test_a_way_of_ones_own(monkeypatch):
    class Counts(GateInit):
        def sums(self, x_TD, labels):
            return {"count": torch.bincount(labels.expert_B[labels.text_T], minlength=labels.num_experts).double()}

        def gates(self, sums, updates):
            return sums["count"].unsqueeze(1).expand(-1, D)

    monkeypatch.setitem(GATE_INITS, "counts", Counts)
    model, rows = mixture(), texts()
    init_gates(model, "counts", batches(rows))
    counts = torch.tensor([float(sum(len(ids) for ids, e, _ in rows if e == i)) for i in range(N)]).double()
    assert all(torch.equal(gate, counts.unsqueeze(1).expand(-1, D)) for gate in routers(model))


def test_upcycled_checkpoints_get_the_gates_of_their_mean(tmp_path):
    from transformers import AutoModelForCausalLM

    models = [tiny_llama() for _ in range(N)]
    for i, model in enumerate(models):
        torch.manual_seed(i)
        for parameter in model.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / str(i))
    rows = texts()
    config = UpcycleConfig(num_experts=N, init="checkpoints", router_init="ridge", granularity=2)
    moe = upcycle([tmp_path / str(i) for i in range(N)], tmp_path / "moe", config, calibration=batches(rows))
    mean = tiny_llama()
    for parameter, *of_models in zip(mean.parameters(), *(m.parameters() for m in models), strict=True):
        parameter.data = torch.stack([p.double() for p in of_models]).mean(0).float()
    expected = dense_gates(mean, "ridge", batches(rows), N)
    native = AutoModelForCausalLM.from_pretrained(moe)
    for layer, gate in zip(native.model.layers, expected, strict=True):
        assert_near(layer.mlp.gate.weight, gate.repeat_interleave(2, 0))
    with pytest.raises(ValueError, match="go with router_init='attention', 'ridge', 'prompts'"):
        upcycle(tmp_path / "0", tmp_path / "no", UpcycleConfig(router_init="ridge"))
    with pytest.raises(ValueError, match="router_init='arrow': must be one of"):
        UpcycleConfig(router_init="arrow")
    replace_routers(native, "arrow")  # a native gate may become one, which does not fold
    with pytest.raises(ValueError, match="absolute values"):
        fold_routers(native)


def test_arrow_has_no_gate_for_the_base():
    model = get_peft_model(tiny_llama(), MoELoraConfig(base_expert=True, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="init_gates: 'arrow' reads LoRAs, and the base_expert has none"):
        init_gates(model, "arrow")


def test_sums_beyond_the_memory_of_the_device_are_on_the_cpu(monkeypatch):
    """Their places alone: "meta" stands for an accelerator."""
    monkeypatch.setattr(gate_init, "_MEMORY", 8 * D * D)
    sums, value = gate_init._Added(2), torch.zeros(D, D, device="meta")
    sums.add(0, {"xx": value})
    assert sums.by_layer()[0]["xx"].is_meta
    with pytest.raises(NotImplementedError, match="meta"):  # it would be copied
        sums.add(1, {"xx": value})
