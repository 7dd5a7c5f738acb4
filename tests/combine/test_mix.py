"""`mix`: what it writes and measures, against plain PEFT and transformers."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from moe_peft import force_experts, init_gates, lora_to_moe, prune_experts, put_expert, regmean
from moe_peft.analysis.inspect import inspect_model
from moe_peft.analysis.inspect_settings import InspectSettings
from moe_peft.cli import main
from moe_peft.combine.held_out import AnswerChecker, score, verdict
from moe_peft.combine.mix import mix
from moe_peft.combine.request_gate import RequestGate
from moe_peft.combine.texts import Batching, expert_rows, neutral_texts, split_rows
from moe_peft.models.introspection import expert_names
from moe_peft.native import UpcycleConfig, export_adapter, upcycle
from moe_peft.native.folders import DenseFolder, LoraFolder, check_same_tokens, open_folder
from moe_peft.native.upcycle import mean_model
from moe_peft.training.preparation import calibration_batches
from moe_peft.training.scoring import Answers
from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near, near
from tests.helpers.mix_case import DOMAINS, FFN, make_case, rows, settings, write_lora

TEST = rows()[:12]  # of test.jsonl


def split(file: Path, tokenizer: Any, test: Path | None = None, **counts: Any) -> tuple[Any, Any]:
    """The calibration rows and the held-out rows of a mixture."""
    parts, tests = (path and expert_rows([str(path)], "--data", DOMAINS, tokenizer, "domain") for path in (file, test))
    return split_rows(parts, tests, DOMAINS, **counts)


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    return make_case(tmp_path_factory.mktemp("mix"), tokenizer)


def losses(model, tokenizer) -> dict[str, float]:
    """The mean loss of each domain's tokens, the EOS token among them, text by text; and the mean over domains."""
    result = {}
    for domain in DOMAINS:
        nll = []
        for row in (row for row in TEST if row["domain"] == domain):
            ids = torch.tensor([[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]])
            with torch.no_grad():
                log_probs = model(ids).logits[0, :-1].double().log_softmax(-1)
            nll += (-log_probs.gather(-1, ids[0, 1:, None])).flatten().tolist()
        result[domain] = sum(nll) / len(nll)
    return {**result, "mean": sum(result.values()) / len(result)}


def base(case):
    return AutoModelForCausalLM.from_pretrained(case / "base").eval()


def close(measured, reference):
    assert measured == near(reference)


def plain(case, *names):
    """PEFT's model with these adapters, the first one active."""
    model = PeftModel.from_pretrained(base(case), case / names[0], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(case / name, name)
    return model.eval()


@pytest.fixture(scope="module")
def mixed(case, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "mixed"
    return mix(settings(case, output=str(out), test_data=[str(case / "test.jsonl")])), out


def test_the_losses_are_those_of_plain_peft(case, mixed, tokenizer):
    measured = mixed[0].losses
    assert list(measured) == [
        "base",
        *DOMAINS,
        "mean of the adapters",
        "each its own",
        "picked by its request",
        "ridge gates",
    ]
    assert mixed[0].right == {}  # texts alone have no answers
    close(measured["base"], losses(base(case), tokenizer))
    for name in DOMAINS:
        close(measured[name], losses(PeftModel.from_pretrained(base(case), case / name).eval(), tokenizer))
    mean = plain(case, *DOMAINS)
    mean.add_weighted_adapter(list(DOMAINS), [1 / 3] * 3, "mean", "cat")
    mean.set_adapter("mean")
    close(measured["mean of the adapters"], losses(mean, tokenizer))
    own = {name: measured[name][name] for name in DOMAINS}
    close(measured["each its own"], {**own, "mean": sum(own.values()) / 3})
    assert json.loads((mixed[1] / "mix.json").read_text())["losses"] == measured


def test_loras_on_a_head_are_measured_with_it(case, tmp_path, tokenizer):
    for i, name in enumerate("abcd"):
        write_lora(tmp_path / name, case / "base", i, targets=[*FFN, "q_proj", "lm_head"])
    own = {"output": str(tmp_path / "out"), "test_data": [str(case / "test.jsonl")]}
    measured = mix(settings(case, **own, adapters=[str(tmp_path / name) for name in DOMAINS])).losses
    for name in DOMAINS:
        close(measured[name], losses(PeftModel.from_pretrained(base(case), tmp_path / name).eval(), tokenizer))
    close(measured["ridge gates"], losses(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval(), tokenizer))
    # With another expert, it is the mixture that is made of these from the start, but for gates.
    replaced = put_expert(base(case), tmp_path / "out", tmp_path / "d", 1).get_base_model().state_dict()
    expected = lora_to_moe(base(case), [tmp_path / name for name in "adc"]).get_base_model().state_dict()
    for name, value in expected.items():
        if "router" not in name:
            assert_near(replaced[name], value)


def test_adapters_that_trained_the_same_tokens_are_themselves_alone(case, tmp_path, tokenizer):
    for i, name in enumerate(DOMAINS):
        write_lora(tmp_path / name, case / "base", i, moved={5: 0.5, 50: -0.5})
    adapters = [str(tmp_path / name) for name in DOMAINS]
    measured = mix(settings(
        case, output=str(tmp_path / "out"), adapters=adapters, test_data=[str(case / "test.jsonl")],
    )).losses  # fmt: skip
    close(measured["base"], losses(base(case), tokenizer))
    for name in DOMAINS:
        close(measured[name], losses(PeftModel.from_pretrained(base(case), tmp_path / name).eval(), tokenizer))
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    close(measured["ridge gates"], losses(model, tokenizer))
    ids = torch.tensor([[5, 9, 50, 12, 60]])
    native = export_adapter(tmp_path / "out", tmp_path / "native")
    exported = AutoModelForCausalLM.from_pretrained(native).eval()(ids).logits
    assert_near(exported, model(ids).logits)


def test_the_folder_is_the_mixture(case, mixed, tokenizer):
    measured, out = mixed
    model = AutoPeftModelForCausalLM.from_pretrained(out).eval()
    close(measured.losses["ridge gates"], losses(model, tokenizer))
    for domain, shares in measured.reached.items():
        hits, count = torch.zeros(3), 0
        for row in (row for row in TEST if row["domain"] == domain):
            ids = torch.tensor([[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]])
            for logits in model(ids, output_router_logits=True).router_logits:
                hits += torch.bincount(logits.argmax(-1), minlength=3)
                count += len(logits)
        assert shares == near((hits / count).tolist())
        assert shares[DOMAINS.index(domain)] == max(shares)
    card = (out / "README.md").read_text()
    assert "`moe-peft mix`" in card and "`ridge`" in card
    assert len(json.loads((out / "mix.json").read_text())["labels"]) == 3
    assert (out / "tokenizer_config.json").is_file()


def test_calibration_sees_no_held_out_row(case, tokenizer):
    counts = {"calibration_examples": 7, "test_examples": 4}
    used, held_out = split(case / "data.jsonl", tokenizer, **counts)
    assert not {*used["text"]} & {*held_out["text"]}
    assert used["expert"] == [0] * 6 + [1] * 6 + [2] * 6  # at most half of 12
    assert held_out["expert"] == [0] * 4 + [1] * 4 + [2] * 4
    again, _ = split(case / "data.jsonl", tokenizer, **counts)
    other, _ = split(case / "data.jsonl", tokenizer, seed=1)
    assert again["text"] == used["text"] != other["text"][: len(used)]


def test_a_file_for_each_expert_is_a_column(case, tmp_path):
    files = [str(case / f"{name}.jsonl") for name in DOMAINS]
    column = mix(settings(case, output=str(tmp_path / "column")))
    apart = mix(settings(case, output=str(tmp_path / "apart"), data=files, label_column=None))
    assert column == apart
    a, b = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("column", "apart"))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_files_need_only_a_format_in_common(case, tmp_path):
    """Other columns may differ, and so may what messages have beside role and content."""

    def losses(name: str, *files: list[dict[str, Any]]) -> dict[str, Any]:
        paths = [tmp_path / f"{name} {i}.jsonl" for i in range(3)]
        for path, content in zip(paths, files, strict=True):
            path.write_text("\n".join(map(json.dumps, content)))
        data = {"data": [*map(str, paths)], "label_column": None}
        return mix(settings(case, output=str(tmp_path / name), **data)).losses

    texts = [[{"text": row["text"]} for row in rows() if row["domain"] == domain] for domain in DOMAINS]
    ids = ({"id": 1}, {"id": "one", "meta": {"a": 1}}, {"meta": {"b": None}})
    plain = losses("plain", *texts)
    assert plain == losses("with ids", *([{**row, **more} for row in of] for of, more in zip(texts, ids, strict=True)))
    messages = [{"messages": [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]}] * 4
    with pytest.raises(ValueError, match=r"--data: its files have no format in common \(messages; text\)"):
        losses("mixed", messages, *texts[1:])


def test_prompts_in_place_of_data(case, tmp_path, tokenizer):
    prompts = {name: {"positive": ["w5 w6", f"w{40 * i + 9}"], "negative": ["w7"]} for i, name in enumerate(DOMAINS)}
    out = tmp_path / "out"
    options = {"data": None, "label_column": None, "prompts": prompts, "gates": "prompts", "mixing": "projection"}
    assert mix(settings(case, output=str(out), **options)) is None
    model = AutoPeftModelForCausalLM.from_pretrained(out)
    texts = [
        (text, i, kind) for i, name in enumerate(DOMAINS) for kind in prompts[name] for text in prompts[name][kind]
    ]
    expected = lora_to_moe(base(case), [case / name for name in DOMAINS])
    batches = [
        {"input_ids": torch.tensor([[*tokenizer(t)["input_ids"], tokenizer.eos_token_id]]),
         "expert": torch.tensor([i]), "negative": torch.tensor([kind == "negative"])}
        for t, i, kind in texts
    ]  # fmt: skip
    init_gates(expected, "prompts", batches)
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        if "moe_lora_router" in name:
            assert_near(parameter, other)


def test_arrow_needs_no_data(case, tmp_path):
    assert mix(settings(case, output=str(tmp_path / "out"), data=None, label_column=None, gates="arrow")) is None
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["router_type"] == "arrow"


def test_dense_models_become_a_native_moe(case, tmp_path, tokenizer):
    models = [str(case / f"dense-{name}") for name in DOMAINS]
    options = {"adapters": None, "models": models, "labels": list(DOMAINS), "test_data": [str(case / "test.jsonl")]}
    measured = mix(settings(case, output=str(tmp_path / "moe"), **options))
    assert list(measured.losses) == [*DOMAINS, "mean of the models", "each its own", "ridge gates"]
    dense = [AutoModelForCausalLM.from_pretrained(model).eval() for model in models]
    for name, model in zip(DOMAINS, dense, strict=True):
        close(measured.losses[name], losses(model, tokenizer))
    moe = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    close(measured.losses["ridge gates"], losses(moe, tokenizer))
    for parameter, *others in zip(*(model.parameters() for model in dense), strict=True):
        parameter.data = torch.stack([parameter.data, *(p.data for p in others)]).double().mean(0).float()
    close(measured.losses["mean of the models"], losses(dense[0], tokenizer))
    assert all(shares[i] == max(shares) for i, shares in enumerate(measured.reached.values()))


def test_models_with_other_end_tokens_are_warned_of(case, tmp_path, tokenizer, caplog):
    shutil.copytree(case / "dense-b", tmp_path / "other")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = "w5"
    tokenizer.save_pretrained(tmp_path / "other")
    shutil.copytree(case / "dense-c", tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    models = [str(case / "dense-a"), str(tmp_path / "other"), str(tmp_path / "bare")]
    mix(settings(case, output=str(tmp_path / "out"), adapters=None, models=models, labels=list("abc")))
    warned = [record.message for record in caplog.records if "another EOS token than models=" in record.message]
    assert len(warned) == 1 and "other' has" in warned[0]


def test_bfloat16_models_are_averaged_as_the_mixture_is(case, tmp_path):
    models = []
    for name in DOMAINS:
        model = AutoModelForCausalLM.from_pretrained(case / f"dense-{name}", dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name)
        models.append(str(tmp_path / name))
    upcycle(models, tmp_path / "moe", UpcycleConfig(num_experts=3, init="checkpoints"))
    mixture = load_file(tmp_path / "moe/model.safetensors")
    mean = mean_model([open_folder(model, "models", DenseFolder) for model in models]).state_dict()
    same = mean.keys() & mixture.keys()
    assert "lm_head.weight" in same and all(torch.equal(mean[name], mixture[name]) for name in same)
    parts = [load_file(f"{model}/model.safetensors")["model.layers.0.mlp.up_proj.weight"] for model in models]
    expected = torch.stack(parts).double().mean(0).bfloat16()
    assert torch.equal(mean["model.layers.0.mlp.up_proj.weight"], expected)


def test_models_that_cannot_be_scored_leave_nothing(case, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("moe_peft.combine.mix.score", broken)
    models = [str(case / f"dense-{name}") for name in DOMAINS]
    with pytest.raises(RuntimeError):
        mix(settings(case, output=str(tmp_path / "moe"), adapters=None, models=models, labels=list(DOMAINS)))
    assert not list(tmp_path.iterdir())


def with_base(case, folder, **changes) -> list[str]:
    """Copies of the LoRAs; the last one's config with changes."""
    for name in DOMAINS:
        shutil.copytree(case / name, folder / name)
    path = folder / DOMAINS[-1] / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return [str(folder / name) for name in DOMAINS]


OF_ARROW = {"data": None, "label_column": None, "gates": "arrow"}


@pytest.mark.parametrize("field", ["adapters", "always"])
def test_the_same_lora_is_no_second_expert(field, case, tmp_path):
    shutil.copytree(case / "a", tmp_path / "again")
    config = json.loads((tmp_path / "again/adapter_config.json").read_text())
    given = {"adapters": [str(case / "a"), str(case / "b")], "always": None}
    given |= {"always": str(tmp_path / "again")} if field == "always" else {}
    given["adapters"] += [str(tmp_path / "again")] if field == "adapters" else []
    with pytest.raises(ValueError, match=rf"{field}='.*/again': is the same LoRA as adapters='.*/a'"):
        mix(settings(case, output=str(tmp_path / "out"), **given, **OF_ARROW))
    # With another scaling, it is another one.
    (tmp_path / "again/adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))
    mix(settings(case, output=str(tmp_path / "out"), **given, **OF_ARROW))


@pytest.mark.parametrize("field", ["adapters", "models"])
def test_a_folder_is_no_second_expert_under_the_name_of_a_link(field, case, tmp_path):
    name = "a" if field == "adapters" else "dense-a"
    (tmp_path / "link").symlink_to(case / name)
    given = {"adapters": None, field: [str(case / name), str(tmp_path / "link")], "labels": ["a", "b"]}
    with pytest.raises(ValueError, match=rf"{field}='.*/link': is given twice"):
        mix(settings(case, output=str(tmp_path / "out"), **given))


@pytest.mark.parametrize("field", ["adapters", "always", "add_to"])
def test_a_lora_that_was_never_trained_is_warned_of(field, case, tmp_path, caplog):
    shutil.copytree(case / "d", tmp_path / "new")
    tensors = load_file(tmp_path / "new/adapter_model.safetensors")
    untrained = {name: value * (".lora_A." in name) for name, value in tensors.items()}
    save_file(untrained, tmp_path / "new/adapter_model.safetensors", metadata={"format": "pt"})
    adapters = [str(case / name) for name in "ab"]
    mix(settings(case, output=str(tmp_path / "mixed"), adapters=adapters, **OF_ARROW))
    assert not caplog.records
    new = str(tmp_path / "new")
    given = {
        "adapters": {"adapters": [*adapters, new]},
        "always": {"adapters": adapters, "always": new},
        "add_to": {"adapters": [new], "add_to": str(tmp_path / "mixed")},
    }[field]
    mix(settings(case, output=str(tmp_path / "out"), **given, **OF_ARROW))
    (warned,) = [record.message for record in caplog.records if "never trained" in record.message]
    assert warned.startswith(f"{'always' if field == 'always' else 'adapters'}={new!r}")


def test_the_base_has_the_revision_that_the_adapters_name(case, tmp_path, monkeypatch):
    loaded, original = [], AutoModelForCausalLM.from_pretrained

    def recorded(*args, **options):
        loaded.append(options.get("revision"))
        return original(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", recorded)
    adapters = with_base(case, tmp_path)
    for adapter in adapters:
        path = Path(adapter, "adapter_config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "revision": "v2"}))
    for base, revision in ((None, "v2"), (str(case / "base"), None)):
        out = tmp_path / f"out {revision}"
        mix(settings(case, output=str(out), adapters=adapters, base=base, **OF_ARROW))
        assert loaded.pop() == (revision or "main")
        assert json.loads((out / "adapter_config.json").read_text())["revision"] == revision


@pytest.mark.parametrize("field", ["base_model_name_or_path", "revision"])
def test_adapters_of_different_bases_are_refused_unless_one_is_given(field, case, tmp_path):
    shutil.copytree(case / "base", tmp_path / "other")
    adapters = with_base(case, tmp_path, **{field: str(tmp_path / "other") if "name" in field else "v2"})
    with pytest.raises(ValueError, match=r"adapters=.*/c': its base is .*, that of adapters=.*/a' is .*/base \(main\)"):
        mix(settings(case, output=str(tmp_path / "out"), adapters=adapters, **OF_ARROW))
    assert not (tmp_path / "out").exists()
    mix(settings(case, output=str(tmp_path / "out"), adapters=adapters, base=str(case / "base"), **OF_ARROW))


def test_two_names_of_one_folder_are_one_base(case, tmp_path, monkeypatch):
    monkeypatch.chdir(case)
    adapters = with_base(case, tmp_path, base_model_name_or_path="./base", revision="main")
    mix(settings(case, output=str(tmp_path / "out"), adapters=adapters, **OF_ARROW))


def test_an_expert_of_another_base_does_not_join(case, tmp_path):
    shutil.copytree(case / "base", tmp_path / "other")
    adapters = with_base(case, tmp_path, base_model_name_or_path=str(tmp_path / "other"))
    mix(settings(case, output=str(tmp_path / "mixed"), adapters=adapters[:2], **OF_ARROW))
    options = {"add_to": str(tmp_path / "mixed"), **OF_ARROW}
    with pytest.raises(ValueError, match=r"adapters=.*: its base is .*, that of add_to=.*; experts of one mixture"):
        mix(settings(case, output=str(tmp_path / "out"), adapters=adapters[2:], **options))


def test_calibration_batches_have_the_numbers_of_their_rows(case, tokenizer):
    used, _ = split(case / "data.jsonl", tokenizer)
    for batch in calibration_batches(used, tokenizer, len(used), columns=["expert"]):
        words = [
            ids[mask.bool()][0].item() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        assert [(word - 3) // 40 for word in words] == batch["expert"].tolist()


@pytest.fixture(scope="module")
def on_attention(case):
    """Adapters `all-a`, `all-b`, `all-c` on all linears."""
    for i, name in enumerate(DOMAINS):
        write_lora(case / f"all-{name}", case / "base", 20 + i, [*FFN, "q_proj", "k_proj", "v_proj", "o_proj"])
    return [str(case / f"all-{name}") for name in DOMAINS]


@pytest.mark.parametrize("attention", ["mean", "route", None])
def test_attention_is_a_mean_or_routed_and_the_adapters_alone_are_themselves(
    attention, on_attention, case, tmp_path, tokenizer
):
    out, labels = tmp_path / "out", [*DOMAINS]
    measured = mix(settings(
        case, output=str(out), adapters=on_attention, labels=labels, attention=attention,
        test_data=[str(case / "test.jsonl")],
    ))  # fmt: skip
    routers = [name for name in load_file(out / "adapter_model.safetensors") if "moe_lora_router" in name]
    assert len(routers) == (2 if attention == "mean" else 10)
    names = [f"all-{name}" for name in DOMAINS]
    for label, name in zip(labels, names, strict=True):
        close(measured.losses[label], losses(plain(case, name), tokenizer))
    merged = plain(case, *names)
    merged.add_weighted_adapter(names, [1 / 3] * 3, "mean", "cat")
    merged.set_adapter("mean")
    close(measured.losses["mean of the adapters"], losses(merged, tokenizer))
    if attention != "mean":
        with pytest.raises(ValueError, match=r"single linear with 3 experts, .* mix LoRAs with attention='mean'"):
            export_adapter(out, tmp_path / "moe")
    else:
        exported = AutoModelForCausalLM.from_pretrained(export_adapter(out, tmp_path / "moe")).eval()
        close(losses(exported, tokenizer), measured.losses["ridge gates"])


@pytest.mark.parametrize("expert", [1, None])
def test_rows_that_are_all_for_one_adapter_are_answered_by_it_alone(expert, on_attention, case, tmp_path, tokenizer):
    """Also where the LoRAs of attention are a mean, of which it then has its own part; for none, by the base."""
    chosen = settings(
        case, output=str(tmp_path / "out"), adapters=on_attention, labels=[*DOMAINS], attention="mean",
        test_data=[str(case / "test.jsonl")],
    )  # fmt: skip
    mix(chosen)
    _, held_out = split(case / "data.jsonl", tokenizer, case / "test.jsonl")
    parts = Batching(tokenizer).held_out(held_out, DOMAINS)
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    got = score(model, parts, experts=[expert] * len(parts.rows))
    expected = score(base(case) if expert is None else plain(case, f"all-{[*DOMAINS][expert]}"), parts)
    for label in DOMAINS:
        assert_near(got[label].losses, expected[label].losses, dtype=torch.float32)


def test_a_row_is_answered_by_the_adapter_that_its_request_is_for(case, mixed, tokenizer):
    measured, out = mixed
    gate = RequestGate.from_pretrained(out)
    assert gate.names == [*DOMAINS]
    alone = {name: PeftModel.from_pretrained(base(case), case / name).eval() for name in DOMAINS}
    alone[None] = base(case)
    expected, picked = {}, {}
    for domain in DOMAINS:
        nll, picks = [], gate.pick([row["text"] for row in TEST if row["domain"] == domain])
        for row, name in zip([row for row in TEST if row["domain"] == domain], picks, strict=True):
            ids = torch.tensor([[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]])
            with torch.no_grad():
                log_probs = alone[name](ids).logits[0, :-1].double().log_softmax(-1)
            nll += (-log_probs.gather(-1, ids[0, 1:, None])).flatten().tolist()
        expected[domain], picked[domain] = sum(nll) / len(nll), picks.count(domain) / len(picks)
    close(measured.losses["picked by its request"], {**expected, "mean": sum(expected.values()) / 3})
    assert measured.picked == picked and min(picked.values()) > 0.7


def of_rows(right: str, loss: float | None = None) -> Answers:
    """Rows of one token each, right where it says 1; losses are 0 and 1, or near the one that is given."""
    is_right = torch.tensor([int(each) for each in right])
    signs = torch.tensor([1.0, -1.0], dtype=torch.double).repeat(len(right))[: len(right)]
    of_row = 1.0 - is_right.double() if loss is None else loss * (1 + 0.01 * signs)
    return Answers(of_row, torch.ones(len(right), dtype=torch.long), is_right > 0)


def said(ways: dict[str, list[Answers]], answered: bool = True, judged: bool = False) -> list[str]:
    """The verdict on ways, with the answers to rows of `a`, `b`, …; the last is the mixture."""
    scored = {way: dict(zip("abc", of_way, strict=False)) for way, of_way in ways.items()}

    def means(value) -> dict[str, dict[str, float]]:
        found = {way: {label: float(value(a).mean()) for label, a in of.items()} for way, of in scored.items()}
        return {way: {**of, "mean": sum(of.values()) / len(of)} for way, of in found.items()}

    losses, right = means(lambda a: a.losses / a.counts), means(lambda a: a.right.double())
    return verdict(scored, losses, right if answered else {}, ["a", "b"], judged)


FEW = {"base": ["0" * 10], "picked by its request": ["1" * 6 + "0" * 4], "ridge gates": ["1" * 5 + "0" * 5]}
VERDICTS = {
    # What is best, what is behind it beyond chance, what cannot be told from it, and other words.
    "picking": (
        {"base": ["0" * 40, "0" * 40], "a": ["1" * 20 + "0" * 20] * 2, "mean of the adapters": ["0" * 40] * 2,
         "each its own": ["1" * 40] * 2, "picked by its request": ["1" * 40, "1" * 38 + "00"],
         "ridge gates": ["1" * 40, "1" * 37 + "000"]},
        "picked by its request (moe-peft pick), with 98% right answers",
        ["base", "mean of the adapters", "a alone"], ["ridge gates (1.2 ± 4."], [],
    ),
    "the mixture": (
        {"base": ["0" * 40], "a": ["0" * 40], "mean of the adapters": ["0" * 40], "ridge gates": ["1" * 40]},
        "ridge gates (this mixture), with 100%", ["base", "mean of the adapters", "a alone"], [], [],
    ),
    "an adapter alone": (
        {"base": ["0" * 40], "a": ["1" * 40], "mean of the adapters": ["0" * 40], "ridge gates": ["0" * 40]},
        "a alone, with 100%", ["base", "mean of the adapters", "ridge gates"], [], [],
    ),
    "the base": (
        {"base": ["1" * 40], "a": ["0" * 40], "mean of the adapters": ["0" * 40], "ridge gates": ["0" * 40]},
        "base, with 100%", ["mean of the adapters", "ridge gates", "a alone"], [], [],
    ),
    "few rows": (
        FEW, "picked by its request", ["base"], ["10 held-out rows cannot tell it from ridge gates (10.0 ± 2"], [],
    ),
    "rows that all agree": (
        {"base": ["1"], "ridge gates": ["1"]}, "base", [], ["1 held-out row ", "ridge gates (0.0 ± 65.3 points"], [],
    ),
    "losses far apart": (
        {"base": [("0" * 10, 2.0)], "a": [("1" + "0" * 9, 4.0)], "ridge gates": [("11" + "0" * 8, 0.5)]},
        "ridge gates", [], ["base (20.0 ±", "a alone (10.0 ±"], ["ridge gates 0.500, base 2.000, a alone 4.000"],
    ),
    "no right answer": (
        {"base": [("0" * 10, 2.0)], "a": [("0" * 10, 4.0)], "ridge gates": [("0" * 10, 0.5)]},
        "ridge gates (this mixture), with a loss of 0.500", ["base", "a alone"], [],
        ["No way answers a word for word: see the loss, or give --right."],
    ),
    "a column of zeros": (
        {"base": ["0" * 10, "0" * 10], "ridge gates": ["0" * 10, "1" * 10]}, "ridge gates", ["base"], [],
        ["No way answers a word for word: see the loss"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_recommends_one_way_and_says_what_the_rows_can_tell(name):
    ways, best, behind, untold, others = VERDICTS[name]
    made = {
        way: [of_rows(each) if isinstance(each, str) else of_rows(*each) for each in of] for way, of in ways.items()
    }
    first, *lines = said(made)
    assert first.startswith(f"Best: {best}")
    assert (f"Beyond chance, it is better than {', '.join(behind)}." in lines) == bool(behind)
    text = " ".join(lines)
    assert all(word in text for word in (*untold, *others)) and text.count("Best:") == 0
    assert ("cannot tell" in text) == bool(untold) and ("lie apart" in text) == (name == "losses far apart")
    if "No way" in text:
        assert (
            "No way has a right answer to" in said(made, judged=True)[-1]
            and "--right" not in said(made, judged=True)[-1]
        )


def test_without_answers_the_verdict_goes_by_losses():
    """With one row of each there is nothing to tell chance by."""
    ways = {
        "base": [of_rows("0" * 10, 2.0)] * 2,
        "a": [of_rows("0" * 10, 1.0)] * 2,
        "ridge gates": [of_rows("0" * 10, 1.5)] * 2,
    }
    expected = ["Best: a alone, with a loss of 1.000.", "Beyond chance, it is better than base, ridge gates."]
    assert said(ways, answered=False) == expected
    one = said({way: [of.of([0]) for of in each] for way, each in ways.items()}, answered=False)
    assert len(one) == 2 and "2 held-out rows cannot tell it from base (1.010 ± inf" in one[1]


@pytest.mark.parametrize(("gates", "k"), [("ridge", 1), ("arrow", 1), ("prompts", 2)])
def test_experts_per_token_follow_the_gates(gates, k, case, tmp_path):
    mix(settings(case, output=str(tmp_path / "out"), gates=gates))
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["top_k"] == k


def test_the_experts_have_their_names_wherever_the_mixture_goes(mixed, case, tmp_path):
    _, out = mixed
    assert PeftConfig.from_pretrained(out).expert_names == [*DOMAINS]
    moe = export_adapter(out, tmp_path / "moe")
    for i, folder in enumerate((out, moe)):
        data, output = str(case / "test.jsonl"), str(tmp_path / str(i))
        inspect_model(InspectSettings(model=str(folder), data=data, output=output, label_column="domain", html=True))
        load = (tmp_path / str(i) / "load.csv").read_text().splitlines()
        assert {line.split(",")[2] for line in load[1:]} == {*DOMAINS}
        pruned = tmp_path / f"pruned-{i}"
        prune_experts(str(folder), str(pruned), drop=[1])
        names = (
            PeftConfig.from_pretrained(pruned).expert_names
            if i == 0
            else expert_names(AutoModelForCausalLM.from_pretrained(pruned))
        )
        assert names == ["a", "c"]
    mix(settings(
        case, output=str(tmp_path / "dense"), adapters=None, models=[str(case / f"dense-{name}") for name in DOMAINS],
        labels=[*DOMAINS],
    ))  # fmt: skip
    assert expert_names(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")) == [*DOMAINS]


@pytest.fixture
def penalties(case):
    """A base whose generation config asks for beams and penalties."""
    own = case / "base" / "generation_config.json"
    before = own.read_bytes()
    GenerationConfig(
        num_beams=3, repetition_penalty=9.0, no_repeat_ngram_size=1, suppress_tokens=[9], eos_token_id=1
    ).save_pretrained(case / "base")
    yield
    own.write_bytes(before)


def greedy(model, ids, count, end):
    """Token by token, without `generate`."""
    made = []
    while len(made) < count and end not in made:
        made.append(int(model(input_ids=torch.tensor([ids + made])).logits[0, -1].argmax()))
    return made


def test_right_answers_are_those_of_greedy_decoding(case, tmp_path, tokenizer):
    rows_of = [{"prompt": row["text"], "completion": " w9", "domain": row["domain"]} for row in rows(24)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows_of)))
    measured = mix(settings(case, output=str(tmp_path / "out"), data=[str(tmp_path / "data.jsonl")], test_examples=4))
    assert measured.right.keys() == measured.losses.keys() and measured.rows == dict.fromkeys(DOMAINS, 4)
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    _, held_out = split(tmp_path / "data.jsonl", tokenizer, test_examples=4)
    right = dict.fromkeys(DOMAINS, 0.0)
    for row in held_out:
        expected = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        made = greedy(model, tokenizer(row["prompt"])["input_ids"], len(expected), tokenizer.eos_token_id)
        right[DOMAINS[row["expert"]]] += (made == expected) / 4
    assert {name: measured.right["ridge gates"][name] for name in DOMAINS} == right


def test_right_answers_are_those_that_a_function_of_yours_says(case, tmp_path, tokenizer, monkeypatch, penalties):
    """It gets the text that each way generates, and the row."""
    rows_of = [{"prompt": row["text"], "completion": " w9", "domain": row["domain"]} for row in rows(24)]
    for name, content in (("data", rows_of), ("test", rows_of[:6])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
    (tmp_path / "judges.py").write_text(
        "seen = []\n\n\ndef even(answer, row):\n    seen.append((row['prompt'], row['completion'], answer))\n"
        "    return len(answer + row['prompt']) % 2 == 0\n\n\ndef broken(answer, row):\n    return row['none']\n"
    )
    monkeypatch.chdir(tmp_path)

    def mixed(name, **own):
        return mix(settings(
            case, output=str(tmp_path / name), data=[str(tmp_path / "data.jsonl")], max_new_tokens=3,
            test_data=[str(tmp_path / "test.jsonl")], **own,
        ))  # fmt: skip

    measured = mixed("out", right="judges:even")
    from judges import seen

    assert measured.right.keys() == measured.losses.keys()
    report = json.loads((tmp_path / "out/mix.json").read_text())  # has the setting and the results
    assert report["right"] == "judges:even" and report["right_answers"] == measured.right
    assert len(seen) == 6 * (len(measured.right) - 1)  # "each its own" is read off those alone
    for way, model in (("base", base(case)), ("b", plain(case, "b")), ("ridge gates", None)):
        model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval() if model is None else model
        expected = {label: [] for label in DOMAINS}
        for row in rows_of[:6]:
            made = greedy(model, tokenizer(row["prompt"])["input_ids"], 3, tokenizer.eos_token_id)
            answer = tokenizer.decode(made, skip_special_tokens=True)
            assert (row["prompt"], " w9", answer) in seen
            expected[row["domain"]].append(len(answer + row["prompt"]) % 2 == 0)
        shares = {label: sum(of) / len(of) for label, of in expected.items()}
        close(measured.right[way], {**shares, "mean": sum(shares.values()) / 3})
    with pytest.raises(ValueError, match="right='judges:broken': KeyError: 'none'"):
        mixed("broken", right="judges:broken")
    for wrong, message in (("judges", "must be module:function"), ("judges:none", "has no function 'none'")):
        with pytest.raises(ValueError, match=message):
            mixed("wrong", right=wrong)
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize(
    ("made", "judged"),
    [
        ("<think>\n\n</think>\n\n42", "42"),
        ("<think>six\ntimes seven</think>42", "42"),
        ("six times seven\n</think>\n\n42\n", "42\n"),  # <think> stands in the prompt
        ("<think>six times", "<think>six times"),
        (" 42", " 42"),
    ],
)
def test_a_function_of_yours_judges_what_comes_after_the_thoughts(made, judged, case, tokenizer, monkeypatch):
    seen = []
    monkeypatch.setattr(type(tokenizer), "batch_decode", lambda *_, **__: [made])
    judge = AnswerChecker(lambda answer, row: seen.append(answer), "judges:all", [{}], tokenizer, 1)
    judge(base(case), [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7], "row": 0}])
    assert seen == [judged]


def test_chats_are_questions_with_answers(case, tmp_path, tokenizer, monkeypatch):
    """Their last answers count, as those of prompts and completions do; they end where the base's own answers end."""
    folder = shutil.copytree(case / "base", tmp_path / "base")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'w1' if m.role == 'user' else 'w2' }} {{ m.content }}"
        "{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}{{ 'w2 ' if add_generation_prompt else '' }}"
    )
    tokenizer.save_pretrained(folder)
    chats = []
    for row in rows(24):
        turns = zip(("user", "assistant", "user", "assistant"), ("w5", "w6", row["text"], "w9 w10"), strict=True)
        chats.append({
            "messages": [{"role": role, "content": text} for role, text in turns],
            "domain": row["domain"],
        })  # fmt: skip
    split = [
        {"prompt": chat["messages"][:-1], "completion": chat["messages"][-1:], "domain": chat["domain"]}
        for chat in chats
    ]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def answer(chat) -> list[int]:
        inputs = tokenizer.apply_chat_template(
            chat["messages"][:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        return made[0, inputs["input_ids"].shape[1] :].tolist()

    end = answer(chats[0])[1]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
    model.generation_config.save_pretrained(folder)
    (tmp_path / "chat_judges.py").write_text(
        "seen = []\n\n\ndef odd(answer, row):\n    seen.append(answer)\n    return len(answer) % 2\n"
    )
    monkeypatch.chdir(tmp_path)
    measured = {}
    for name, content in (("chats", chats), ("split", split)):
        for part, of_part in (("data", content), ("test", content[:6])):
            (tmp_path / f"{name}-{part}.jsonl").write_text("\n".join(map(json.dumps, of_part)))
        for right in (None, "chat_judges:odd"):
            measured[name, right] = mix(settings(
                case, base=str(folder), output=str(tmp_path / f"{name}-{right is None}"), right=right, max_new_tokens=4,
                data=[str(tmp_path / f"{name}-data.jsonl")], test_data=[str(tmp_path / f"{name}-test.jsonl")],
            ))  # fmt: skip
            assert measured[name, right].right.keys() == measured[name, right].losses.keys()
    for right in (None, "chat_judges:odd"):
        close(measured["chats", right].losses["base"], measured["split", right].losses["base"])
        assert measured["chats", right].right["base"] == measured["split", right].right["base"]
    from chat_judges import seen

    of_base = [tokenizer.decode([token for token in answer(chat) if token not in (end, tokenizer.eos_token_id)])
               for chat in chats[:6]]  # fmt: skip
    assert sorted(seen[:6]) == sorted(of_base) and len({*of_base}) > 1


def test_general_requests_go_to_the_base(case, mixed, tmp_path, tokenizer):
    """An expert without an update, whose gate is set by general texts; it is named in what a mixture says of itself."""
    general = [f"w{3 + 40 * (i % 3)} w{4 + 40 * ((i + 1) % 3)} w{5 + 40 * ((i + 2) % 3)} w123" for i in range(24)]
    (tmp_path / "general.txt").write_text("\n".join(general))
    given = {"neutral": str(tmp_path / "general.txt"), "test_data": [str(case / "test.jsonl")]}
    measured = mix(settings(case, output=str(tmp_path / "out"), **given))
    close(*(of.losses["mean of the adapters"] for of in (measured, mixed[0])))  # without the base
    assert measured.general > 0.6 and measured.lost < 0.2
    config = PeftConfig.from_pretrained(tmp_path / "out")
    assert (config.num_experts, config.base_expert, config.expert_names) == (4, True, [*DOMAINS, "base"])
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = tokenizer(general[0], return_tensors="pt")["input_ids"]
    with force_experts(model, "base"), torch.no_grad():
        assert torch.equal(model(ids).logits, base(case)(ids).logits)
    moe = AutoModelForCausalLM.from_pretrained(export_adapter(tmp_path / "out", tmp_path / "moe")).eval()
    assert_near(moe(ids).logits, model(ids).logits)
    assert expert_names(moe) == [*DOMAINS, "base"]


def swapped(case: Path, name: str, target: Path, tokenizer) -> str:
    """A copy of a model or an adapter of the case, whose tokenizer has two words swapped."""
    shutil.copytree(case / name, target / name)
    tokenizer.save_pretrained(target / name)
    path = target / name / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["w5"], words["w9"] = words["w9"], words["w5"]
    path.write_text(json.dumps(content))
    return str(target / name)


@pytest.mark.parametrize(
    "site", ["adapters", "add_to", "always", "models", "upcycle", "prepare.adapters", "checkpoints"]
)
def test_tokenizers_that_differ_are_refused_with_the_first_token(site, case, tmp_path, tokenizer):
    """Wherever adapters or models become one model, which has one tokenizer."""
    lora, dense = (swapped(case, name, tmp_path, tokenizer) for name in ("b", "dense-b"))
    out, own = str(tmp_path / "out"), {"data": None, "label_column": None, "gates": "arrow"}
    recipe = {
        "output_dir": out,
        "model": {"name_or_path": str(case / "base")},
        "data": {"train": str(case / "a.jsonl")},
    }

    def upit(**prepare: Any) -> None:
        mode = {"mode": "ffn"} if "checkpoints" in prepare else {}
        UpIT(recipe_from_dict({**recipe, **mode, "num_experts": 2, "prepare": prepare})).context.check_base()

    def joined() -> None:
        mix(settings(case, output=str(tmp_path / "two"), adapters=[str(case / "a"), str(case / "c")], **own))
        mix(settings(case, output=out, adapters=[lora], add_to=str(tmp_path / "two"), **own))

    sites = {
        "adapters": lambda: mix(settings(case, output=out, adapters=[str(case / "a"), lora], **own)),
        "add_to": joined,
        "always": lambda: mix(
            settings(case, output=out, always=lora, adapters=[str(case / "a"), str(case / "c")], **own)
        ),
        "models": lambda: mix(
            settings(case, output=out, adapters=None, models=[str(case / "dense-a"), dense], labels=["a", "b"])
        ),
        "upcycle": lambda: upcycle([case / "dense-a", dense], out, UpcycleConfig(num_experts=2, init="checkpoints")),
        "prepare.adapters": lambda: upit(adapters=[str(case / "a"), lora]),
        "checkpoints": lambda: upit(checkpoints=[str(case / "dense-a"), dense]),
    }
    with pytest.raises(InputError, match=r"in its tokenizer, token 5 is 'w9'; in the tokenizer of .* it is 'w5'"):
        sites[site]()
    assert not Path(out).exists()


def test_a_token_that_the_first_tokenizer_lacks_is_a_warning(case, tmp_path, tokenizer, caplog):
    shutil.copytree(case / "b", tmp_path / "b")
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["new"])
    more.save_pretrained(tmp_path / "b")
    with caplog.at_level(logging.WARNING, "moe_peft"):
        check_same_tokens(*(open_folder(path, "adapters", LoraFolder) for path in (tmp_path / "b", case / "a")))
    assert [record.message for record in caplog.records if "has the token 'new'" in record.message]


def test_an_adapter_that_is_always_on(case, tmp_path, tokenizer):
    """Each expert is then its LoRA and the one for all: both LoRAs active in PEFT."""
    mix(settings(case, output=str(tmp_path / "out"), always=str(case / "d")))
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[5, 9, 50, 12, 60]])
    for name in DOMAINS:
        both = plain(case, name, "d")
        both.base_model.set_adapter([name, "d"])
        with force_experts(model, name), torch.no_grad():
            assert_near(model(ids).logits, both(ids).logits)


COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


@pytest.mark.parametrize("folder", [COMPOSED, DECOMPOSED])
@pytest.mark.parametrize("data", [COMPOSED, DECOMPOSED])
@pytest.mark.parametrize("given", ["column", "files", "labels", "prompts"])
def test_a_name_is_the_same_however_its_accents_are_written(folder, data, given, case, tmp_path):
    """File systems decompose names, keyboards do not."""
    shutil.copytree(case / "b", tmp_path / folder)
    own = {"adapters": [str(case / "a"), str(tmp_path / folder)], "data": None, "label_column": None}
    of = {"a": [row["text"] for row in rows() if row["domain"] == "a"],
          data: [row["text"] for row in rows() if row["domain"] == "b"]}  # fmt: skip
    lines = {name: [json.dumps({"text": text, "domain": name}) for text in texts] for name, texts in of.items()}
    if given == "files":
        own["data"] = [str(tmp_path / f"{name}.jsonl") for name in of]
        for file, content in zip(own["data"], lines.values(), strict=True):
            Path(file).write_text("\n".join(content))
    elif given == "prompts":
        own |= {"prompts": {name: {"positive": texts} for name, texts in of.items()}, "gates": "prompts"}
    else:
        own |= {"data": [str(tmp_path / "all.jsonl")], "label_column": "domain"}
        Path(own["data"][0]).write_text("\n".join(lines["a"] + lines[data]))
        own |= {"labels": ["a", data]} if given == "labels" else {}
    mix(settings(case, output=str(tmp_path / "out"), **own))
    assert PeftConfig.from_pretrained(tmp_path / "out").expert_names == ["a", COMPOSED]
    assert (tmp_path / "out" / "request_gate.safetensors").is_file()


@pytest.mark.parametrize("chats", [False, True])
def test_one_lora_out_of_several(chats, case, tmp_path, tokenizer, capsys):
    """It is the merge of `regmean`, an ordinary LoRA of PEFT's, and measured beside what it was made of."""
    made = rows()
    if chats:
        answer = [{"role": "assistant", "content": "w5"}]
        made = [
            {"prompt": [{"role": "user", "content": row["text"]}], "completion": answer, "domain": row["domain"]}
            for row in made
        ]
        shutil.copytree(case / "base", tmp_path / "base")
        own = AutoTokenizer.from_pretrained(tmp_path / "base")
        own.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
        own.save_pretrained(tmp_path / "base")
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, made)))
    base_folder = tmp_path / "base" if chats else case / "base"
    main(["mix", "--into", "lora", "--adapters", *(str(case / name) for name in DOMAINS), "--base", str(base_folder),
          "--data", str(tmp_path / "data.jsonl"), "--label-column", "domain", "--output", str(tmp_path / "one"),
          "--test-examples", "4"])  # fmt: skip
    printed = capsys.readouterr().out
    assert "one LoRA (RegMean)" in printed and "Best: " in printed and "--max-lora-rank 16" in printed
    config = PeftConfig.from_pretrained(tmp_path / "one")
    assert config.peft_type == "LORA" and config.r == 12 and config.base_model_name_or_path == str(base_folder)
    merged = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "one").eval()

    own = AutoTokenizer.from_pretrained(base_folder)
    calibration, held_out = split(tmp_path / "data.jsonl", own, test_examples=4)
    batches = Batching(own).for_merging(calibration, neutral_texts(None)[0], 3)
    assert {int(i) for batch in batches for i in batch["expert"]} == {0, 1, 2, 3}
    expected = regmean(base(case), [case / name for name in DOMAINS], batches).eval()
    ids = torch.arange(3, 60)[None]
    assert_near(merged(input_ids=ids).logits, expected(input_ids=ids).logits)
    parts = Batching(own).held_out(held_out, DOMAINS)
    losses = json.loads((tmp_path / "one" / "mix.json").read_text())["losses"]
    for way, model in (("one LoRA (RegMean)", merged), ("b", plain(case, "b")), ("base", base(case))):
        for label, answers_ in score(model.eval(), parts).items():
            assert_near(losses[way][label], float(answers_.losses.sum() / answers_.counts.sum()))


def test_a_lora_that_cannot_be_merged_is_named_before_anything_is_measured(case, tmp_path, monkeypatch):
    write_lora(tmp_path / "moved", case / "base", 7, moved={5: 1.0})
    monkeypatch.setattr("moe_peft.combine.mix.lora_to_moe", None)
    with pytest.raises(InputError, match=r"moved'.*trainable_token_indices=\[5\]"):
        adapters = [str(case / "a"), str(tmp_path / "moved")]
        mix(settings(case, output=str(tmp_path / "one"), into="lora", labels=["a", "b"], adapters=adapters))


@pytest.mark.parametrize(
    ("own", "field"),
    [
        ({"data": None, "label_column": None}, "into='lora'"),
        ({"gates": "arrow"}, "gates"),
        ({"attention": "mean"}, "attention"),
        ({"top_k": 2}, "top_k"),
        ({"always": "a"}, "always"),
        ({"adapters": None, "models": ["a", "b"]}, "into='lora'"),
        ({"add_to": "x", "adapters": ["a"]}, "into='lora'"),
    ],
)
def test_what_has_no_meaning_for_one_lora_is_refused(own, field, case):
    with pytest.raises(InputError, match=field):
        settings(case, output="x", into="lora", **own)
