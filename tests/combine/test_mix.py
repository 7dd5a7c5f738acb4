"""`mix`: what it writes and measures, against plain PEFT and transformers."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe_peft import force_experts, init_gates, lora_to_moe, prune_experts
from moe_peft.analysis.inspect import inspect_model
from moe_peft.combine.held_out import HeldOut, picked_experts
from moe_peft.combine.mix import Source, mix
from moe_peft.models.introspection import expert_names
from moe_peft.models.layer import routed_layers
from moe_peft.native import UpcycleConfig, export_adapter, upcycle
from moe_peft.native.folders import DenseFolder, open_folder
from moe_peft.native.upcycle import mean_model
from moe_peft.training.preparation import calibration_batches, preparation, tokenized
from tests.helpers.close import assert_near, near
from tests.helpers.mix_case import DOMAINS, FFN, make_case, rows, settings, write_lora

TEST = rows()[:12]  # of test.jsonl


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
        "uniform gates",
        "picked by its prompt",
        "ridge gates",
    ]
    close(measured["base"], losses(base(case), tokenizer))
    for name in DOMAINS:
        close(measured[name], losses(PeftModel.from_pretrained(base(case), case / name).eval(), tokenizer))
    mean = plain(case, *DOMAINS)
    mean.add_weighted_adapter(list(DOMAINS), [1 / 3] * 3, "mean", "cat")
    mean.set_adapter("mean")
    close(measured["mean of the adapters"], losses(mean, tokenizer))
    uniform = lora_to_moe(base(case), [case / name for name in DOMAINS], router_type="soft")
    for name, parameter in uniform.named_parameters():
        if "moe_lora_router" in name:
            parameter.data.zero_()
    close(measured["uniform gates"], losses(uniform.eval(), tokenizer))
    assert json.loads((mixed[1] / "mix.json").read_text())["losses"] == measured


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
    chosen = settings(case, output="x", calibration_examples=7, test_examples=4)
    used, held_out = Source(chosen, DOMAINS, tokenizer).split()
    assert not {*used["text"]} & {*held_out["text"]}
    assert used["expert"] == [0] * 6 + [1] * 6 + [2] * 6  # at most half of 12
    assert held_out["expert"] == [0] * 4 + [1] * 4 + [2] * 4
    again, _ = Source(chosen, DOMAINS, tokenizer).split()
    other, _ = Source(settings(case, output="x", seed=1), DOMAINS, tokenizer).split()
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


def test_projection_mixing_has_no_line_for_uniform_gates_which_are_the_mean(case, tmp_path):
    measured = mix(settings(case, output=str(tmp_path / "out"), mixing="projection", top_k=1))
    assert "uniform gates" not in measured.losses and "mean of the adapters" in measured.losses


def test_dense_models_become_a_native_moe(case, tmp_path, tokenizer):
    models = [str(case / f"dense-{name}") for name in DOMAINS]
    options = {"adapters": None, "models": models, "labels": list(DOMAINS), "test_data": [str(case / "test.jsonl")]}
    measured = mix(settings(case, output=str(tmp_path / "moe"), **options))
    assert list(measured.losses) == [*DOMAINS, "mean of the models", "uniform gates", "ridge gates"]
    dense = [AutoModelForCausalLM.from_pretrained(model).eval() for model in models]
    for name, model in zip(DOMAINS, dense, strict=True):
        close(measured.losses[name], losses(model, tokenizer))
    moe = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    close(measured.losses["ridge gates"], losses(moe, tokenizer))
    for layer in moe.model.layers:
        layer.mlp.gate.weight.data.zero_()
        layer.mlp.gate.top_k = 3
    close(measured.losses["uniform gates"], losses(moe, tokenizer))
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
    used, _ = Source(settings(case, output="x"), DOMAINS, tokenizer).split()
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


def test_the_expert_of_a_row_is_picked_by_its_prompt(case, mixed, tmp_path, tokenizer):
    """Gates of the base's hidden states, a mean over the prompt's tokens and the layers, choose one adapter."""
    measured, out = mixed
    model = AutoPeftModelForCausalLM.from_pretrained(out).eval()
    routers = [layer.router for layer in routed_layers(model)]
    seen = []
    expected = {}
    for domain in DOMAINS:
        nll = []
        for row in (row for row in TEST if row["domain"] == domain):
            ids = torch.tensor([[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]])
            seen.clear()
            hooks = [
                layer.module.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
                for layer in routed_layers(model)
            ]
            with torch.no_grad(), model.disable_adapter():
                model(ids)
            for hook in hooks:
                hook.remove()
            gates = [router(x).softmax(-1).mean(0) for router, x in zip(routers, seen, strict=True)]
            picked = int(torch.stack(gates).mean(0).argmax())
            with torch.no_grad(), force_experts(model, DOMAINS[picked]):
                log_probs = model(ids).logits[0, :-1].double().log_softmax(-1)
            nll += (-log_probs.gather(-1, ids[0, 1:, None])).flatten().tolist()
        expected[domain] = sum(nll) / len(nll)
    close(measured.losses["picked by its prompt"], {**expected, "mean": sum(expected.values()) / 3})


def test_a_verdict_names_the_domains_that_lose():
    losses = {
        "base": {"a": 5.0, "b": 5.0, "mean": 5.0},
        "a": {"a": 1.0, "b": 3.0, "mean": 2.0},
        "b": {"a": 3.0, "b": 2.0, "mean": 2.5},
        "mean of the adapters": {"a": 2.0, "b": 1.5, "mean": 1.75},
        "picked by its prompt": {"a": 1.0, "b": 2.0, "mean": 1.5},
        "ridge gates": {"a": 1.2, "b": 1.8, "mean": 1.5},
    }
    first, second = HeldOut(losses, {"a": [1, 0], "b": [0, 1]}).verdict()
    assert first == "ridge gates beat merging (the mean) in 1 of 2 domains; they lose to it in b."
    assert "picked by the prompt is as good" in second and "--enable-lora" in second
    losses["ridge gates"] = {"a": 0.9, "b": 2.5, "mean": 1.7}
    losses["picked by its prompt"] = {"a": 1.0, "b": 2.6, "mean": 1.8}
    losses["a"] = {"a": 1.0, "b": 2.0, "mean": 1.5}
    _, second, third = HeldOut(losses, {"a": [1, 0], "b": [0, 1]}).verdict()
    assert second == "One adapter picked by the prompt is worse in a, b."
    assert third == "a alone is at least as good as the mixture: use that."


@pytest.mark.parametrize(("gates", "k"), [("ridge", 1), ("arrow", 1), ("prompts", 2)])
def test_experts_per_token_follow_the_gates(gates, k, case, tmp_path):
    mix(settings(case, output=str(tmp_path / "out"), gates=gates))
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["top_k"] == k


def test_the_experts_have_their_names_wherever_the_mixture_goes(mixed, case, tmp_path):
    _, out = mixed
    assert PeftConfig.from_pretrained(out).expert_names == [*DOMAINS]
    moe = export_adapter(out, tmp_path / "moe")
    for i, folder in enumerate((out, moe)):
        inspect_model(str(folder), str(case / "test.jsonl"), tmp_path / str(i), label_column="domain", html=True)
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


def test_a_prompt_picks_by_its_own_tokens(mixed, tokenizer):
    """Neither the answer nor the padding counts."""
    model = AutoPeftModelForCausalLM.from_pretrained(mixed[1]).eval()
    prompts = [row["text"] for row in rows(24)]
    picked = []
    for answer, size in (("w9", 24), ("w90 w91 w92 w93 w94 w95", 5)):
        data = Dataset.from_list([{"prompt": prompt, "completion": f" {answer}"} for prompt in prompts])
        tokens, collator = tokenized(data, tokenizer, preparation(64))
        picked.append(picked_experts(model, tokens, collator, size))
    assert picked[0] == picked[1] and set(picked[0]) == {0, 1, 2}
