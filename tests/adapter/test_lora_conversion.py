"""Plain LoRA adapters to experts and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from moe_peft import MoELoraConfig, expert_to_lora, force_experts, lora_to_moe
from moe_peft.models.steering import only_expert
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.warm import run_module

FFN = ["gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(3, 27).view(2, 12)


def lora(seed: int, r: int = 4, lora_alpha: float = 8, targets=FFN, **kwargs) -> PeftModel:
    base = tiny_llama()
    torch.manual_seed(100 + seed)
    config = LoraConfig(
        r=r, lora_alpha=lora_alpha, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **kwargs
    )
    return get_peft_model(base, config).eval()


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"lora{i}" for i in range(3)]
    for i, path in enumerate(paths):
        lora(i).save_pretrained(path)
    return paths


def test_round_trip_from_folders_is_exact_to_the_bit(folders, tmp_path):
    moe = lora_to_moe(tiny_llama(), folders)
    moe.save_pretrained(tmp_path / "moe")
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path / "moe")
    for i, folder in enumerate(folders):
        expert_to_lora(again, i, tmp_path / f"out{i}")
        before, after = (load_file(p / "adapter_model.safetensors") for p in (folder, tmp_path / f"out{i}"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        a, b = (json.loads((p / "adapter_config.json").read_text()) for p in (folder, tmp_path / f"out{i}"))
        for field in ("r", "lora_alpha", "use_rslora", "task_type", "peft_type"):
            assert a[field] == b[field]
        assert sorted(a["target_modules"]) == sorted(b["target_modules"])


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_each_expert_alone_gives_its_loras_logits(mixing: str):
    sources = [lora(i) for i in range(3)]
    moe = lora_to_moe(tiny_llama(), sources, mixing=mixing, top_k=1).eval()
    for i, source in enumerate(sources):
        for name, module in moe.named_modules():
            if name.endswith("moe_lora_router.default"):
                force_expert(module, i)
        assert_near(moe(IDS).logits, source(IDS).logits)


@pytest.mark.parametrize("first", [0, 1])
def test_scalings_of_half_precision_adapters_are_folded_in_float32(first: int, tmp_path):
    alphas = (8, 11)
    for i, alpha in enumerate(alphas):
        model = lora(i, lora_alpha=alpha)
        state = {key: value.bfloat16() for key, value in get_peft_model_state_dict(model).items()}
        model.save_pretrained(tmp_path / str(i))
        save_file(state, tmp_path / str(i) / "adapter_model.safetensors")
    order = [tmp_path / str(i) for i in (first, 1 - first)]
    moe = lora_to_moe(tiny_llama(), order, top_k=1).eval()
    for i, folder in enumerate(order):
        with torch.no_grad(), force_experts(moe, i):
            assert_near(moe(IDS).logits, PeftModel.from_pretrained(tiny_llama(), folder).eval()(IDS).logits)


def test_loras_on_the_head_are_their_mean_beside_the_head_that_peft_saves(tmp_path):
    """Its weights must be the base's. A mixture serves an adapter by itself, too."""
    for i in range(2):
        lora(i, targets=[*FFN, "lm_head"]).save_pretrained(tmp_path / str(i), save_embedding_layers=True)
    folders = [tmp_path / str(i) for i in range(2)]
    assert "base_model.model.lm_head.base_layer.weight" in load_file(folders[0] / "adapter_model.safetensors")
    moe = lora_to_moe(tiny_llama(), folders, top_k=1).eval()
    for i, folder in enumerate(folders):
        with torch.no_grad(), only_expert(moe, i):
            assert_near(moe(IDS).logits, PeftModel.from_pretrained(tiny_llama(), folder).eval()(IDS).logits)
    head = moe.get_base_model().lm_head
    assert head.moe_lora_spec["default"].num_experts == 1 and "default" not in head.moe_lora_router
    x = torch.randn(3, head.in_features, dtype=torch.float64)
    updates = [
        layer.double()(x) - layer.base_layer.double()(x)
        for model in (moe, *(PeftModel.from_pretrained(tiny_llama(), folder) for folder in folders))
        for layer in [model.get_base_model().lm_head]
    ]
    assert_near(updates[0], (updates[1] + updates[2]) / 2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"lm_head.weight was trained in full and differs from the base"):
        lora_to_moe(tiny_llama(seed=5), folders)


def force_expert(router: torch.nn.Module, i: int) -> None:
    router._forward_hooks.clear()
    n = router.weight.shape[0]
    router.register_forward_hook(
        lambda m, a, out: torch.full((out.shape[0], n), -50.0).index_fill(1, torch.tensor(i), 0)
    )


@pytest.mark.slow
def test_an_extracted_expert_loads_where_moe_peft_is_not_imported(folders, tmp_path):
    expert_to_lora(lora_to_moe(tiny_llama(), folders), 1, tmp_path / "out")
    tiny_llama().save_pretrained(tmp_path / "base")
    script = f"""
import sys, torch
sys.modules["moe_peft"] = None
from transformers import AutoModelForCausalLM
from peft import PeftModel
base = AutoModelForCausalLM.from_pretrained({str(tmp_path / "base")!r})
model = PeftModel.from_pretrained(base, {str(tmp_path / "out")!r}).eval()
torch.save(model(torch.arange(3, 27).view(2, 12)).logits, {str(tmp_path / "logits.pt")!r})
"""
    (tmp_path / "plain.py").write_text(script)
    assert run_module("plain", cwd=tmp_path).returncode == 0
    assert_near(torch.load(tmp_path / "logits.pt"), lora(1)(IDS).logits)


def test_the_revision_of_the_base_goes_with_it():
    sources = [lora(0, revision="v2"), lora(1, revision="v2")]
    moe = lora_to_moe(tiny_llama(), sources)
    assert moe.peft_config["default"].revision == "v2" == expert_to_lora(moe, 0)[0].revision
    assert lora_to_moe(tiny_llama(), sources, revision="v3").peft_config["default"].revision == "v3"


def test_smaller_ranks_are_padded_and_other_scalings_are_taken_up():
    sources = [lora(0, r=2, lora_alpha=2), lora(1, r=6, lora_alpha=3), lora(2, r=4, lora_alpha=12, use_rslora=True)]
    moe = lora_to_moe(tiny_llama(), sources)
    A, B = moe.get_base_model().model.layers[1].mlp.expert_parameters("default")
    assert not any(part["up_proj"][0, 2:].any() or part["up_proj"][2, 4:].any() for part in (A, B))  # padding is zero
    for i, source in enumerate(sources):
        config, state = expert_to_lora(moe, i)
        assert config.r == 6
        got = get_peft_model(tiny_llama(), config).eval()
        load(got, state)
        assert_near(got(IDS).logits, source(IDS).logits)


def test_a_module_saved_whole_is_part_of_every_experts_lora(tmp_path):
    torch.manual_seed(0)
    config = MoELoraConfig(num_experts=3, r=2, init_lora_weights=False, modules_to_save=["lm_head"])
    moe = get_peft_model(tiny_llama(), config).eval()
    with torch.no_grad():
        moe.get_base_model().lm_head.modules_to_save["default"].weight.add_(0.1)
    expert_to_lora(moe, 1, tmp_path / "lora")
    got = PeftModel.from_pretrained(tiny_llama(), tmp_path / "lora").eval()
    with force_experts(moe, torch.tensor([1])):
        expected = moe(IDS).logits
    assert_near(got(IDS).logits, expected)
    assert (got(IDS).logits - tiny_llama().eval()(IDS).logits).abs().max() > 0.1


def load(model: PeftModel, state: dict[str, torch.Tensor]) -> None:
    from peft import set_peft_model_state_dict

    result = set_peft_model_state_dict(model, state)
    assert not result.unexpected_keys


def test_adapters_on_other_modules_become_experts_there_and_zero_experts_elsewhere():
    sources = [lora(0, targets=["up_proj", "q_proj"]), lora(1, targets=["up_proj", "down_proj"])]
    moe = lora_to_moe(tiny_llama(), sources)
    for i, source in enumerate(sources):
        config, state = expert_to_lora(moe, i)
        got = get_peft_model(tiny_llama(), config).eval()
        load(got, state)
        assert_near(got(IDS).logits, source(IDS).logits)


def test_single_expert_modules_are_part_of_every_expert():
    torch.manual_seed(0)
    config = MoELoraConfig(
        num_experts=3,
        r=4,
        target_modules=["mlp", "q_proj"],
        num_experts_pattern={"q_proj": 1},
        rank_pattern={"q_proj": 2},
        init_lora_weights=False,
    )
    moe = get_peft_model(tiny_llama(), config)
    for i in range(3):
        out, state = expert_to_lora(moe, i)
        q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        attention = moe.get_base_model().model.layers[0].self_attn.q_proj
        assert torch.equal(state[q], attention.moe_lora_A["default"]["weight"][0])
        load(get_peft_model(tiny_llama(), out), state)


PATTERNS = {
    "rank_pattern": {"up_proj": 2, r"layers\.1\.mlp\.gate_proj": 6},
    "alpha_pattern": {"down_proj": 3, r"layers\.0\.mlp\.up_proj": 20},
}


@pytest.mark.parametrize("use_rslora", [False, True])
def test_patterns_of_loras_are_taken_up(use_rslora: bool):
    sources = [lora(0, use_rslora=use_rslora, **PATTERNS), lora(1, use_rslora=not use_rslora)]
    moe = lora_to_moe(tiny_llama(), sources).eval()
    for i, source in enumerate(sources):
        with torch.no_grad(), force_experts(moe, torch.tensor([i, i])):
            assert_near(moe(IDS).logits, source(IDS).logits)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_patterns_of_a_moe_are_those_of_its_loras(use_rslora: bool):
    base = tiny_llama()
    base.name_or_path = "some/base"
    config = MoELoraConfig(
        num_experts=3,
        r=4,
        lora_alpha=6,
        lora_dropout=0.25,
        use_rslora=use_rslora,
        target_modules=["mlp", "q_proj"],
        num_experts_pattern={"q_proj": 1},
        rank_pattern={"q_proj": 3, r"layers\.1\.mlp": 2},
        alpha_pattern={"q_proj": 5, r"layers\.0\.mlp": 10},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    moe = get_peft_model(base, config).eval()
    for i in range(3):
        out, state = expert_to_lora(moe, i)
        assert (out.lora_dropout, out.task_type, out.base_model_name_or_path) == (0.25, "CAUSAL_LM", "some/base")
        got = get_peft_model(tiny_llama(), out).eval()
        load(got, state)
        with torch.no_grad(), force_experts(moe, torch.tensor([i, i])):
            assert_near(moe(IDS).logits, got(IDS).logits)


def test_target_modules_name_what_the_expert_has_and_nothing_else():
    for layers, names in ((None, {*FFN}), ([1], {f"model.layers.1.mlp.{name}" for name in FFN})):
        moe = get_peft_model(tiny_llama(), MoELoraConfig(target_modules=["mlp"], layers_to_transform=layers))
        assert set(expert_to_lora(moe, 0)[0].target_modules) == names


@pytest.mark.parametrize("expert", [-1, 3])
def test_wrong_expert_index_names_the_range(expert, folders):
    with pytest.raises(ValueError, match=rf"expert={expert}: the adapter has experts 0 to 2"):
        expert_to_lora(lora_to_moe(tiny_llama(), folders), expert)


def test_a_base_that_holds_an_adapter_is_refused(folders):
    """Its update would be added to that of the expert which it became."""
    base = tiny_llama()
    lora = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    for adapters in ([lora], folders):
        with pytest.raises(ValueError, match=r"lora_to_moe: model has an adapter"):
            lora_to_moe(base, adapters)
    assert lora_to_moe(lora.unload(), folders).active_adapter == "default"


def test_an_existing_folder_is_not_overwritten(folders, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for there in (folders[0], tmp_path / "link"):
        with pytest.raises(FileExistsError, match="exists; choose another name"):
            expert_to_lora(lora_to_moe(tiny_llama(), folders), 0, there)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
    ],
)
def test_adapters_that_are_no_plain_lora_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        lora_to_moe(tiny_llama(), [lora(0, **kwargs)])


def test_bad_inputs_are_one_clear_line_and_leave_the_base_alone(folders, tmp_path):
    def refused(base, adapters, message, **settings):
        keys = list(base.state_dict())
        with pytest.raises(ValueError, match=message) as error:
            lora_to_moe(base, adapters, **settings)
        assert "\n" not in str(error.value).split("(")[0]
        assert list(base.state_dict()) == keys

    refused(tiny_llama(), folders, "num_experts: the adapters determine this", num_experts=5)
    refused(tiny_llama(hidden=32), folders, "trained on a different base")
    refused(tiny_llama(layers=1), folders, "no module 'model.layers.1")
    refused(tiny_llama(head_dim=8), [lora(0, targets=["q_proj"])], r"q_proj has .* \(64, 64\), the base .* \(64, 32\)")
    state = load_file(folders[1] / "adapter_model.safetensors")
    state[next(iter(state))][0, 0] = float("nan")
    save_file(state, folders[1] / "adapter_model.safetensors")
    refused(tiny_llama(), folders, "NaN")
    data = (folders[0] / "adapter_model.safetensors").read_bytes()
    (folders[0] / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
    refused(tiny_llama(), folders, "cannot be read")


def mean_update(sources: list[PeftModel], module: str) -> torch.Tensor:
    """The mean of the adapters' changes of a weight, dense and in float64; no change where one lacks it."""
    total = 0.0
    for source in sources:
        layer = source.get_base_model().get_submodule(module)
        if hasattr(layer, "lora_A"):
            A, B = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
            total = total + layer.scaling["default"] * (B @ A)
    return total / len(sources)


def test_attention_can_be_one_lora_that_is_the_exact_mean():
    targets = [[*FFN, "q_proj", "v_proj"], [*FFN, "q_proj", "o_proj"], FFN]
    sources = [
        lora(i, r=r, lora_alpha=alpha, targets=targets[i]) for i, (r, alpha) in enumerate([(4, 8), (2, 8), (4, 3)])
    ]
    moe = lora_to_moe(tiny_llama(), sources, attention="mean").eval()
    config = moe.peft_config["default"]
    assert (config.num_experts, config.r) == (3, 4)
    assert config.num_experts_pattern == {"q_proj": 1, "v_proj": 1, "o_proj": 1}
    routers = [name for name, _ in moe.named_parameters() if "moe_lora_router" in name]
    assert len(routers) == 2 and all(".mlp." in name for name in routers)
    for path in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"):
        layer = moe.get_base_model().get_submodule(path)
        (A,), (B,) = (m["weight"].double() for m in layer.expert_parameters("default"))
        update = layer.moe_lora_spec["default"].scaling * (B.T @ A)
        assert_near(update, mean_update(sources, path))


def test_the_mean_is_pefts_and_its_scaling_is_exact(tmp_path):
    attention = [lora(i, targets=[*FFN, "q_proj", "v_proj"]) for i in range(4)]
    for i, source in enumerate(attention):
        source.save_pretrained(tmp_path / str(i))
    moe = lora_to_moe(tiny_llama(), [tmp_path / str(i) for i in range(4)], attention="mean")
    peft = PeftModel.from_pretrained(tiny_llama(), tmp_path / "0", adapter_name="0")
    for i in "123":
        peft.load_adapter(tmp_path / i, i)
    peft.add_weighted_adapter(list("0123"), [0.25] * 4, "mean", "cat")
    for path in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"):
        ours, theirs = (m.get_base_model().get_submodule(path) for m in (moe, peft))
        (A,), (B,) = (m["weight"] for m in ours.expert_parameters("default"))
        assert A.shape[0] == 16
        expected = theirs.lora_B["mean"].weight.double() @ theirs.lora_A["mean"].weight.double()
        scaling = ours.moe_lora_spec["default"].scaling
        assert_near(scaling * (B.double().T @ A.double()), theirs.scaling["mean"] * expected)
        for i, source in enumerate(attention):  # the adapters' own numbers, to the bit
            layer = source.get_base_model().get_submodule(path)
            assert torch.equal(A[4 * i : 4 * i + 4], layer.lora_A["default"].weight)


def test_a_mean_of_all_leaves_nothing_to_route():
    with pytest.raises(ValueError, match=r"attention='mean': nothing to route: all adapted linears, such as .*_proj"):
        lora_to_moe(tiny_llama(), [lora(0, targets=["q_proj"]), lora(1, targets=["v_proj"])], attention="mean")


def test_an_expert_that_serves_always_beside_a_mean_of_attention():
    sources = [lora(i, targets=[*FFN, "q_proj"]) for i in range(2)]
    moe = lora_to_moe(tiny_llama(), sources, attention="mean", always=lora(2)).eval()
    for expert, source in enumerate(sources):  # the expert, the one that serves always, and the mean on q_proj
        base = {name: weight.double() for name, weight in tiny_llama().state_dict().items()}
        for name in [name.removesuffix(".weight") for name in base if name.endswith("_proj.weight")]:
            found = {"q_proj": [(s, 0.5) for s in sources]}.get(name.rsplit(".", 1)[1], [(source, 1), (lora(2), 1)])
            for model, share in found:
                layer = model.get_base_model().get_submodule(name)
                if hasattr(layer, "lora_A"):
                    base[f"{name}.weight"] += share * layer.get_delta_weight("default").double()
        merged = tiny_llama().double().eval()
        merged.load_state_dict(base)
        with torch.no_grad(), force_experts(moe, expert):
            assert_near(moe(IDS).logits, merged(IDS).logits)


def test_an_expert_by_its_name_and_of_the_adapter_that_runs():
    model = get_peft_model(
        tiny_llama(), MoELoraConfig(num_experts=2, top_k=1, expert_names=["law", "math"], task_type="CAUSAL_LM")
    )
    model.add_adapter("b", MoELoraConfig(num_experts=2, top_k=1, expert_names=["math", "law"], task_type="CAUSAL_LM"))
    for p in model.parameters():
        if p.requires_grad or p.dim() == 3:
            torch.nn.init.normal_(p)
    model.base_model.set_adapter("b")  # PeftModel's own record of the active adapter stays behind
    named, second = expert_to_lora(model, "law")[1], expert_to_lora(model, 1, adapter_name="b")[1]
    assert named.keys() == second.keys() and all(torch.equal(named[key], second[key]) for key in named)
    with torch.no_grad(), force_experts(model, "law"):
        forced = model(IDS).logits
    with torch.no_grad(), force_experts(model, 1):
        assert torch.equal(forced, model(IDS).logits)
    with pytest.raises(ValueError, match="expert='art': must be one of math, law"):
        expert_to_lora(model, "art")
