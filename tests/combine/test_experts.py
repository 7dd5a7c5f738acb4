"""An expert joins a mixture or replaces one; the others and their gates stay as they are."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_peft import MoELoraConfig, force_experts, lora_to_moe, prune_experts
from moe_peft.combine.experts import put_expert
from moe_peft.combine.mix import mix
from moe_peft.combine.request_gate import _Saved
from moe_peft.models.gate_init import GATE_INITS, GateInit
from moe_peft.models.steering import only_expert
from tests.helpers.close import assert_near
from tests.helpers.mix_case import DOMAINS, make_case, rows, settings, write_lora
from tests.helpers.models import tiny_llama, tiny_opt

ALL = [str(name) for name in (*DOMAINS, "d")]


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    folder = make_case(tmp_path_factory.mktemp("mix"), tokenizer)
    mix(settings(folder, output=str(folder / "mixed"), top_k=1))
    four = [{"text": f"w{100 + i} w{101 + i} w{102 + i}", "domain": "d"} for i in range(12)]
    (folder / "four.jsonl").write_text("\n".join(map(json.dumps, rows() + four)))
    return folder


def weights(folder):
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("replace", [None, 1])
def test_a_mixture_that_an_expert_joins_is_the_one_made_of_all(replace, case, tmp_path):
    labels = ALL if replace is None else ["a", "d", "c"]
    measured = mix(settings(
        case, output=str(tmp_path / "out"), adapters=[str(case / "d")], add_to=str(case / "mixed"), replace=replace,
        data=[str(case / "four.jsonl")],
    ))  # fmt: skip
    assert json.loads((tmp_path / "out/mix.json").read_text())["labels"] == labels
    assert list(measured.reached) == labels and list(measured.losses)[1:-4] == labels
    complete = mix(settings(
        case, output=str(tmp_path / "all"), adapters=[str(case / name) for name in labels], top_k=1,
        data=[str(case / "four.jsonl")],
    ))  # fmt: skip
    after, anew = weights(tmp_path / "out"), weights(tmp_path / "all")
    assert after.keys() == anew.keys() and all(torch.equal(value, anew[key]) for key, value in after.items())
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["num_experts"], config["top_k"]) == (len(labels), 1)
    assert measured == complete


def test_a_router_with_other_parameters_keeps_them(case, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(case / "base")
    mixed = lora_to_moe(
        base, [case / name for name in DOMAINS], router_type="mlp", router_jitter_noise=0.1, mixing="projection"
    )
    mixed.save_pretrained(tmp_path / "mlp")
    model = put_expert(AutoModelForCausalLM.from_pretrained(case / "base"), tmp_path / "mlp", case / "d")
    config = model.peft_config["default"]
    assert (config.router_type, config.router_jitter_noise, config.mixing) == ("mlp", 0.1, "projection")
    model.save_pretrained(tmp_path / "more")
    before, after = weights(tmp_path / "mlp"), weights(tmp_path / "more")
    for key, value in before.items():
        kept = after[key] if key.endswith("hidden") else after[key][:3]
        assert torch.equal(kept, value), key


def test_biases_and_shared_experts_are_those_of_the_mixture(case, tmp_path):
    def base():
        return AutoModelForCausalLM.from_pretrained(case / "base")

    mixed = lora_to_moe(
        base(), [case / name for name in DOMAINS], top_k=1, router_bias_update_rate=0.5, num_shared_experts=1
    )
    for name, tensor in (*mixed.named_parameters(), *mixed.named_buffers()):
        if "shared" in name:
            tensor.data.normal_(std=0.1)
        if "bias_steps" in name:
            tensor.copy_(torch.tensor([1, -2, 3]))
    mixed.save_pretrained(tmp_path / "mixed")
    model = put_expert(base(), tmp_path / "mixed", case / "d", 1).eval()
    biases = [buffer.tolist() for name, buffer in model.named_buffers() if "bias_steps" in name]
    assert biases == [[1, 0, 3]] * 2
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        for i in (0, 2):
            with force_experts(model, torch.tensor([i])), force_experts(mixed.eval(), torch.tensor([i])):
                assert_near(model(ids).logits, mixed(ids).logits)
    # The new one is its LoRA, with the shared experts' beside it.
    shared = {name for name in mixed.state_dict() if "shared" in name}
    assert shared and all(torch.equal(model.state_dict()[name], mixed.state_dict()[name]) for name in shared)
    expected = lora_to_moe(base(), [case / "d"] * 2, top_k=1, num_shared_experts=1).eval()
    expected.load_state_dict({name: mixed.state_dict()[name] for name in shared}, strict=False)
    with torch.no_grad(), force_experts(model, torch.tensor([1])), force_experts(expected, torch.tensor([1])):
        assert_near(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("replace", [None, 1])
@pytest.mark.parametrize("attention", ["route", "mean"])
def test_a_lora_under_every_expert_serves_the_new_one_too(attention, replace, tmp_path):
    """As in the mixture that is made of these adapters at once, to the bit; with ranks and alphas of their own."""

    def base():
        return tiny_llama().eval()

    for i, (r, alpha, targets) in enumerate(
        [(4, 8, ["up_proj", "down_proj", "q_proj"]), (4, 8, ["up_proj"]), (2, 8, ["down_proj", "q_proj"]),
         (3, 5, ["up_proj", "gate_proj"])]
    ):  # fmt: skip
        config = LoraConfig(r=r, lora_alpha=alpha, target_modules=targets, init_lora_weights=False)
        torch.manual_seed(i)
        get_peft_model(base(), config).save_pretrained(tmp_path / str(i))
    first, second, third, always = (str(tmp_path / str(i)) for i in range(4))
    given = {"attention": attention, "top_k": 1, "base_expert": attention == "route"}
    lora_to_moe(base(), [first, second], always=always, **given).save_pretrained(tmp_path / "mixed")
    made = put_expert(base(), tmp_path / "mixed", third, replace)
    expected = lora_to_moe(base(), [first, *([second] if replace is None else []), third], always=always, **given)
    of_expected = {name: tensor for name, tensor in expected.state_dict().items() if "router" not in name}
    assert any("shared" in name for name in of_expected)
    for name, tensor in of_expected.items():
        assert torch.equal(made.state_dict()[name], tensor), name
    assert made.peft_config["default"].num_shared_experts == expected.peft_config["default"].num_shared_experts


@pytest.mark.parametrize(
    ("router", "name", "value"), [("threshold", "threshold", 1 / 3), ("attention", "num_heads", 1)]
)
def test_settings_that_follow_from_the_number_of_experts_stay(router, name, value, case, tmp_path):
    def base():
        return AutoModelForCausalLM.from_pretrained(case / "base")

    given = {} if router == "threshold" else {f"router_{name}": value}
    mixed = lora_to_moe(base(), [case / name for name in DOMAINS], router_type=router, **given)
    mixed.save_pretrained(tmp_path / "mixed")
    model = put_expert(base(), tmp_path / "mixed", case / "d")
    assert getattr(model.peft_config["default"], f"router_{name}") == value


def test_heads_that_follow_from_the_number_of_experts_fit_no_other(case, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(case / "base")
    lora_to_moe(base, [case / name for name in "ab"], router_type="attention").save_pretrained(tmp_path / "mixed")
    with pytest.raises(ValueError, match=r"router_num_heads=2: must divide .* the 3 experts"):
        put_expert(AutoModelForCausalLM.from_pretrained(case / "base"), tmp_path / "mixed", case / "d")


def test_what_cannot_join(case, tmp_path):
    def base():
        return AutoModelForCausalLM.from_pretrained(case / "base")

    with pytest.raises(ValueError, match=r"replace=3: mixture=.* has experts 0 to 2"):
        put_expert(base(), case / "mixed", case / "d", 3)
    for i, name in enumerate(("q", "k")):
        write_lora(tmp_path / name, case / "base", 9 + i, [f"{name}_proj", "up_proj"])
    lora_to_moe(base(), [case / "a", tmp_path / "q"]).save_pretrained(tmp_path / "routed")
    with pytest.raises(ValueError, match="k_proj has experts and a router in only one of it and mixture"):
        put_expert(base(), tmp_path / "routed", tmp_path / "k")
    single = lora_to_moe(base(), [case / "a", tmp_path / "q"], attention="mean")
    single.peft_config["default"].mean_loras = False
    single = get_peft_model(base(), single.peft_config["default"])
    single.save_pretrained(tmp_path / "single")
    with pytest.raises(ValueError, match="q_proj has one LoRA for all experts, and it is not the mean"):
        put_expert(base(), tmp_path / "single", case / "d")
    saved = lora_to_moe(base(), [case / name for name in DOMAINS], modules_to_save=["lm_head"])
    saved.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"mixture=.*: modules_to_save=\['lm_head'\]"):
        put_expert(base(), tmp_path / "saved", case / "d")
    hashed = get_peft_model(tiny_llama(vocab=128), MoELoraConfig(router_type="hash", task_type="CAUSAL_LM"))
    hashed.save_pretrained(tmp_path / "hash")
    with pytest.raises(ValueError, match="router_type='hash' has no parameters of single experts"):
        put_expert(base(), tmp_path / "hash", case / "d")


@pytest.mark.parametrize("replace", [None, 1])
def test_an_expert_takes_its_own_part_of_the_mean(replace, case, tmp_path):
    """Attention is the mean of the adapters that the mixture has then, as if it had been made of these."""

    def base():
        return AutoModelForCausalLM.from_pretrained(case / "base")

    targets = (["q_proj", "up_proj"], ["up_proj", "down_proj"], ["q_proj", "v_proj", "up_proj"], ["v_proj", "up_proj"])
    folders = [tmp_path / str(i) for i in range(4)]
    for i, folder in enumerate(folders):
        write_lora(folder, case / "base", i, targets[i], r=4 if i < 3 else 6)
    names = ["one", "two", "three"]
    lora_to_moe(base(), folders[:3], attention="mean", expert_names=names).save_pretrained(tmp_path / "mixed")
    model = put_expert(base(), tmp_path / "mixed", folders[3], replace, name="new").eval()
    last = [*folders[:3], folders[3]] if replace is None else [folders[0], folders[3], folders[2]]
    expected = lora_to_moe(base(), last, attention="mean").eval()
    names = [*names, "new"] if replace is None else ["one", "new", "three"]
    assert model.peft_config["default"].expert_names == names
    ids = torch.arange(3, 27).view(2, 12)
    for i in range(len(last)):
        with torch.no_grad(), force_experts(model, i), force_experts(expected, i):
            assert_near(model(ids).logits, expected(ids).logits)
        adapter = PeftModel.from_pretrained(base(), last[i]).eval()
        with torch.no_grad(), only_expert(model, i):
            assert_near(model(ids).logits, adapter(ids).logits)


def test_an_expert_on_attention_does_not_join_a_mixture_of_ffns(case, tmp_path):
    """As one LoRA for all, its part would be in every expert; a router of its own has no texts of the others."""
    write_lora(tmp_path / "attention", case / "base", 9, ["q_proj", "up_proj"])
    base = AutoModelForCausalLM.from_pretrained(case / "base")
    with pytest.raises(ValueError, match=r"q_proj has experts and a router in only one of it and .*; mix all .* anew"):
        put_expert(base, case / "mixed", tmp_path / "attention")


def test_an_expert_joins_where_the_ffns_are_linears_and_attention_is_the_mean(tmp_path):
    for i in range(3):
        torch.manual_seed(i)
        config = LoraConfig(target_modules=["q_proj", "fc1", "fc2"], init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(tiny_opt(), config).save_pretrained(tmp_path / str(i))
    folders = [tmp_path / str(i) for i in range(3)]
    lora_to_moe(tiny_opt(), folders[:2], attention="mean").save_pretrained(tmp_path / "mixed")
    model = put_expert(tiny_opt(), tmp_path / "mixed", folders[2]).eval()
    expected = lora_to_moe(tiny_opt(), folders, attention="mean").eval()
    ids = torch.arange(3, 27).view(2, 12)
    for i in range(3):
        with torch.no_grad(), force_experts(model, i), force_experts(expected, i):
            assert_near(model(ids).logits, expected(ids).logits)


def test_the_rows_of_tokens_stay_as_the_others_have_them(case, tmp_path):
    """An expert that joins may have them too, or bring some of its own; where it differs, it counts as one of all."""
    moves = {"a": {5: 0.5}, "b": {5: 0.5, 50: 0.25}, "same": {5: 0.5}, "own": {60: 1.0}, "other": {5: 1.25}}
    for i, (name, moved) in enumerate(moves.items()):
        write_lora(tmp_path / name, case / "base", i, moved=moved)

    def base():
        return AutoModelForCausalLM.from_pretrained(case / "base")

    lora_to_moe(base(), [tmp_path / "a", tmp_path / "b"]).save_pretrained(tmp_path / "mixed")
    embeddings = base().get_input_embeddings().weight
    expected = {"same": [0.5, 0.25, 0], "own": [0.5, 0.25, 1], "other": [0.75, 0.25, 0], "d": [0.5, 0.25, 0]}
    for name, moved in expected.items():
        adapter = case / "d" if name == "d" else tmp_path / name
        model = put_expert(base(), tmp_path / "mixed", adapter)
        difference = model.get_base_model().get_input_embeddings().weight - embeddings
        assert_near(difference[[5, 50, 60]], torch.tensor(moved)[:, None].expand(3, 64))
        assert difference.abs().amax(1).gt(0).sum() == sum(value != 0 for value in moved), name


@pytest.fixture(scope="module")
def parts(case) -> Path:
    """`three` of a, b and c with the base; files of the rows of d, of all, and of general requests."""
    four = [json.loads(line) for line in (case / "four.jsonl").read_text().splitlines()]
    for name, of in (
        ("own", [r for r in four if r["domain"] == "d"]),
        ("abc", [r for r in four if r["domain"] != "d"]),
    ):
        (case / f"{name}.jsonl").write_text("\n".join(map(json.dumps, of)))
    (case / "general.txt").write_text("\n".join(f"w{20 + i} w{60 + i} w{90 + i} w127" for i in range(16)))
    made(case, case / "three", DOMAINS, "abc")
    return case


def made(case: Path, folder: Path, names: Sequence[str], data: str, gates: str = "ridge") -> dict[str, torch.Tensor]:
    mix(settings(
        case, output=str(folder), adapters=[str(case / name) for name in names], data=[str(case / f"{data}.jsonl")],
        neutral=str(case / "general.txt"), calibration_examples=6, gates=gates,
    ))  # fmt: skip
    return weights(folder)


def load_gate(folder: Path) -> dict[str, torch.Tensor]:
    """What a gate for requests has read, by name."""
    saved = _Saved.read(folder / "request_gate.safetensors")
    return {name: texts.vectors for name, texts in saved.texts.items()}


def same_gates(folder: Path, other: Path, gates: str = "ridge") -> None:
    """Weights, sums and the gate for requests, to the bit."""
    files = ("adapter_model.safetensors", f"{gates}_sums.safetensors", "request_gate.safetensors")
    for file in (file for file in files if (folder / file).exists()):
        ours, theirs = load_file(folder / file), load_file(other / file)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours), file
    names = [PeftConfig.from_pretrained(each).expert_names for each in (folder, other)]
    assert names[0] == names[1] and names[0][-1] == "base"


@pytest.mark.parametrize("replace, keep", [(None, None), (1, None), (None, False)])
def test_with_sums_an_expert_needs_only_its_own_texts(replace, keep, parts, tmp_path):
    mix(settings(
        parts, output=str(tmp_path / "joined"), adapters=[str(parts / "d")], data=[str(parts / "own.jsonl")],
        add_to=str(parts / "three"), replace=replace, calibration_examples=6, keep_sums=keep,
    ))  # fmt: skip
    assert (tmp_path / "joined/ridge_sums.safetensors").exists() == (keep is None)
    made(parts, tmp_path / "anew", ALL if replace is None else "adc", "four")
    same_gates(tmp_path / "joined", tmp_path / "anew")


class Means(GateInit):
    """Gates of a plugin, which has sums to keep: the mean of each expert's tokens."""

    def sums(self, x_TD, labels):
        of_T = torch.where(labels.negative_B, -1, labels.expert_B)[labels.text_T]
        return {
            f"{expert}.{kind}": value
            for expert in {*of_T.tolist()}
            for kind, value in (("x", x_TD[of_T == expert].sum(0)), ("tokens", (of_T == expert).sum().double()[None]))
        }

    def gates(self, sums, updates):
        experts = sorted(int(name.removesuffix(".x")) for name in sums if name.endswith(".x"))
        return torch.stack([sums[f"{expert}.x"] / sums[f"{expert}.tokens"] for expert in experts])

    def with_kept_sums(self):
        return self


def test_gates_of_a_plugin_may_keep_sums_too(parts, tmp_path, monkeypatch):
    monkeypatch.setitem(GATE_INITS, "means", Means)
    made(parts, tmp_path / "three", "abc", "abc", "means")
    mix(settings(
        parts, output=str(tmp_path / "joined"), adapters=[str(parts / "d")], data=[str(parts / "own.jsonl")],
        add_to=str(tmp_path / "three"), calibration_examples=6, gates="means",
    ))  # fmt: skip
    made(parts, tmp_path / "four", "abcd", "four", "means")
    same_gates(tmp_path / "joined", tmp_path / "four", "means")
    prune_experts(tmp_path / "joined", tmp_path / "dropped", drop=[3])
    same_gates(tmp_path / "dropped", tmp_path / "three", "means")


@pytest.mark.parametrize(
    ("keep", "written", "warned"), [(None, False, True), (False, False, False), (True, True, False)]
)
def test_sums_that_are_too_large_are_not_written_without_a_word(
    keep, written, warned, case, tmp_path, caplog, monkeypatch
):
    """LoRAs on attention have a router for each linear: 2 FFNs and 8 linears here."""
    for i, name in enumerate("ab"):
        write_lora(tmp_path / name, case / "base", i, ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"])
    monkeypatch.setattr("moe_peft.combine.mix.KEPT", 10)
    adapters, files = [str(tmp_path / name) for name in "ab"], [str(case / f"{name}.jsonl") for name in "ab"]
    mix(settings(
        case, output=str(tmp_path / "out"), adapters=adapters, data=files, label_column=None, keep_sums=keep,
    ))  # fmt: skip
    assert (tmp_path / "out/ridge_sums.safetensors").is_file() == written
    said = [record.getMessage() for record in caplog.records if "ridge_sums" in record.getMessage()]
    assert len(said) == warned
    assert all(word in line for line in said for word in ("10 routers", "--add-to", "--keep-sums"))


@pytest.mark.parametrize(("replace", "labels"), [(None, "xyzd"), (1, "xdz")])
def test_experts_that_get_other_names_keep_what_they_are_for(replace, labels, parts, tmp_path):
    mix(settings(
        parts, output=str(tmp_path / "joined"), adapters=[str(parts / "d")], data=[str(parts / "own.jsonl")],
        add_to=str(parts / "three"), replace=replace, calibration_examples=6, labels=[*labels],
    ))  # fmt: skip
    before, after = (load_gate(folder) for folder in (parts / "three", tmp_path / "joined"))
    assert [*after] == [*labels, "base"]
    for old, new in zip("abc", labels, strict=False):
        assert new == "d" or torch.equal(before[old], after[new])


def test_nothing_is_left_of_the_texts_of_an_expert_that_is_dropped(parts, tmp_path):
    """Its gates are those of a mixture that never had it."""
    prune_experts(parts / "three", tmp_path / "dropped", drop=[1])
    made(parts, tmp_path / "never", "ac", "abc")
    same_gates(tmp_path / "dropped", tmp_path / "never")


def test_sums_of_another_mixture_are_refused(parts, tmp_path):
    for name, damage in (
        ("other", lambda tensors: {**tensors, "0.0.x": tensors["0.1.x"], "0.1.x": tensors["0.0.x"]}),
        ("lacking", lambda tensors: dict(list(tensors.items())[1:])),
        ("short", lambda tensors: {key: value[:-1] for key, value in tensors.items()}),
        ("nan", lambda tensors: {key: value * torch.nan for key, value in tensors.items()}),
    ):
        shutil.copytree(parts / "three", tmp_path / name)
        file = tmp_path / name / "ridge_sums.safetensors"
        save_file(damage(load_file(file)), file)
        with pytest.raises(ValueError, match="does not give this mixture's gates; remove it, and give texts for all"):
            mix(settings(
                parts, output=str(tmp_path / "out"), adapters=[str(parts / "d")], data=[str(parts / "own.jsonl")],
                add_to=str(tmp_path / name),
            ))  # fmt: skip


def test_a_mixture_keeps_its_tokenizer(case, tmp_path, tokenizer, caplog):
    """The new expert has none of its own."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template, tokenizer.eos_token = "{{ messages }}", "w5"
    shutil.copytree(case / "mixed", tmp_path / "mixed")
    tokenizer.save_pretrained(tmp_path / "mixed")
    mix(settings(
        case, output=str(tmp_path / "out"), adapters=[str(case / "d")], add_to=str(tmp_path / "mixed"),
        data=[str(case / "four.jsonl")],
    ))  # fmt: skip
    kept = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (kept.chat_template, kept.eos_token) == ("{{ messages }}", "w5")
    said = " ".join(record.message for record in caplog.records)
    assert "d' has another chat template than add_to=" in said and "d' has another EOS token than add_to=" in said


def test_rows_of_the_new_expert_alone_need_sums(case, tmp_path):
    own = "\n".join(json.dumps({"text": f"w{100 + i} w{101 + i}", "domain": "d"}) for i in range(6))
    (tmp_path / "own.jsonl").write_text(own)
    mix(settings(case, output=str(tmp_path / "without"), keep_sums=False))
    assert not (tmp_path / "without/ridge_sums.safetensors").exists()
    join = {"adapters": [str(case / "d")], "data": [str(tmp_path / "own.jsonl")], "output": str(tmp_path / "out")}
    with pytest.raises(ValueError, match=r"has only rows of 'd', and .* has no ridge_sums\.safetensors"):
        mix(settings(case, add_to=str(tmp_path / "without"), **join))
    with pytest.raises(ValueError, match=r"replace=3: add_to=.* has experts 0 to 2"):
        mix(settings(case, add_to=str(case / "mixed"), replace=3, **join))
