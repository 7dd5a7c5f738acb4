"""Routing statistics against a plain loop; reports as files."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from moe_peft.analysis import TOKEN_CLASSES, RoutingStatistics, classify_tokens, load_callback, record_routing
from moe_peft.analysis.figures import plot_compliance, plot_shares
from moe_peft.analysis.html import numbering, shares_section, strongest
from moe_peft.analysis.load_callback import LoadCallback
from moe_peft.cli import main
from moe_peft.models.introspection import base_model
from tests.helpers.close import assert_near, near
from tests.helpers.llama_cpp import sentencepiece_tokenizer
from tests.helpers.models import tiny_llama
from tests.helpers.routed_models import KINDS, K, N, adapter, ids, routed_model
from tests.helpers.trainers import EXPERTS, arguments, make_model
from tests.helpers.upit_case import rows

DOMAINS = ["code", "prose"]
MAP = {"code": [0, 1, 2], "prose": [3, 5]}


def mask():
    return torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_a_plain_loop(kind):
    model = routed_model(kind)
    classes = torch.arange(64) % 3
    labels = ["prose", "code", "prose"]
    with torch.no_grad():
        with record_routing(model, DOMAINS, MAP, classes) as statistics:
            statistics.current = labels
            model(input_ids=ids(), attention_mask=mask())
            statistics.current = "code"
            model(input_ids=ids() + 1, attention_mask=mask())
        batches = [(ids(), labels), (ids() + 1, ["code"] * 3)]
        counts, tokens = torch.zeros(2, 2, N), torch.zeros(2)
        by_class = torch.zeros(len(TOKEN_CLASSES), 2, N)
        inside: dict = {}
        effective = torch.zeros(2, 2)
        for batch, domains in batches:
            outputs = model(input_ids=batch, attention_mask=mask(), output_router_logits=True)
            for layer, logits in enumerate(outputs.router_logits):
                for row in range(3):
                    position = -1
                    for s in range(7):
                        if not mask()[row, s]:
                            continue
                        position += 1
                        token = logits[row * 7 + s].float()
                        chosen = token.topk(K).indices.tolist()
                        domain = DOMAINS.index(domains[row])
                        tokens[domain] += layer == 0
                        gates = token[chosen].exp() / token[chosen].exp().sum()
                        effective[domain, layer] += 1 / gates.square().sum()
                        for i in chosen:
                            counts[domain, layer, i] += 1
                            by_class[classes[batch[row, s]], layer, i] += 1
                        bucket = {0: 0, 1: 1, 2: 1}.get(position, 2)
                        p = token.softmax(-1)[MAP[domains[row]]].sum()
                        inside.setdefault((layer, bucket), []).append(p)
    assert_near(statistics.counts, counts.double())
    assert_near(statistics.tokens, tokens.double())
    assert_near(statistics.effective_sums, effective.double(), dtype=torch.float32)
    assert_near(statistics.class_counts, by_class.double())
    compliance = statistics.compliance_sums.sum(0) / statistics.compliance_tokens.sum(0)
    assert compliance[:, 3:].isnan().all()
    for (layer, bucket), values in inside.items():
        assert compliance[layer, bucket].item() == near(torch.stack(values).mean().item())
    every = torch.stack([value for values in inside.values() for value in values])
    assert statistics.mean_compliance() == near(every.mean().item())


def test_nothing_stays_on_the_model_and_memory_does_not_grow():
    model = routed_model("adapter")
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    enabled = model.config.output_router_logits = False
    with torch.no_grad(), record_routing(model) as statistics:
        sizes = []
        for _ in range(3):
            model(input_ids=ids())
            tensors = [value for value in vars(statistics).values() if isinstance(value, torch.Tensor)]
            sizes.append(sum(tensor.numel() for tensor in tensors))
        assert len(set(sizes)) == 1
        assert not any(isinstance(value, list) and len(value) > 6 for value in vars(statistics).values())
    assert statistics.tokens.item() == 3 * 21
    assert model.config.output_router_logits is enabled
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_generation_counts_every_token_once():
    model = routed_model("adapter")
    padded = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], [1] * 7])
    with record_routing(model, ["all"], {"all": [0]}) as statistics:
        model.generate(input_ids=ids(), attention_mask=padded, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert statistics.tokens.item() == 7 + 4 + 7 + 3 * 4  # the last token is not run through the model
    assert (
        statistics.compliance_tokens[0, 3].item() == 2 * 4 + 1
    )  # positions 7 to 14: of the unpadded rows 4, of the other 1


@pytest.mark.parametrize("kind", ["adapter", "mixtral"])
def test_rows_that_have_ended_do_not_count_while_others_go_on(kind):
    model = routed_model(kind)
    free = model.generate(input_ids=ids(), max_new_tokens=20, do_sample=False, eos_token_id=None)
    generation = base_model(model).generation_config
    generation.eos_token_id, generation.pad_token_id = free[0, 8].item(), 0
    with record_routing(model) as together:
        model.generate(input_ids=ids(), max_new_tokens=20, do_sample=False)
    with record_routing(model) as apart:
        for i in range(3):
            model.generate(input_ids=ids()[i : i + 1], max_new_tokens=20, do_sample=False)
    assert together.tokens.item() == apart.tokens.item() < 3 * 26
    assert torch.equal(together.counts, apart.counts)


@pytest.mark.parametrize(("kind", "window"), [("adapter", None), ("mixtral", None), ("mixtral", 4)])
def test_padding_does_not_count_with_a_static_cache(kind, window):
    """Whose masks have four dimensions; with a window, the last token attends to some of the prompt only."""
    model = routed_model(kind)
    model.config.sliding_window = window
    generation = base_model(model).generation_config
    generation.eos_token_id = generation.pad_token_id = None
    padded = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], [1] * 7])
    found = []
    for cache in (None, "static"):
        with record_routing(model, ["all"], {"all": [0]}) as statistics:
            model.generate(
                input_ids=ids(), attention_mask=padded, max_new_tokens=5, do_sample=False, eos_token_id=None,
                pad_token_id=63, cache_implementation=cache,
            )  # fmt: skip
        found.append(statistics)
    assert found[0].tokens.item() == found[1].tokens.item() == 7 + 4 + 7 + 3 * 4
    assert torch.equal(found[0].counts, found[1].counts)
    if window is None:  # a cache of a window has forgotten how many tokens came before
        assert torch.equal(found[0].compliance_tokens, found[1].compliance_tokens)


def test_collapse_is_told():
    model = routed_model("adapter")
    with torch.no_grad():
        for layer in model.get_base_model().model.layers:
            layer.mlp.moe_lora_router["default"].weight.zero_()  # ties: always the same two
        with record_routing(model) as statistics:
            model(input_ids=ids())
    layers = len(statistics.sizes)
    assert (statistics.health().monopolies, statistics.health().dead) == (layers, 4 * layers)
    assert statistics.warning().startswith("collapsed, CV 1.41 ")
    with record_routing(model, expert_map={"all": [0, 1]}) as steered:
        model(input_ids=ids())
    assert steered.health().status == "collapsed" and steered.warning() == ""  # as the labels ask


def test_wrong_settings():
    with pytest.raises(ValueError, match="has no router"), record_routing(tiny_llama()):
        pass
    missing = pytest.raises(ValueError, match=r"no experts for the domains \['prose'\]")
    with missing, record_routing(routed_model("adapter"), DOMAINS, {"code": [0]}):
        pass
    without_map = pytest.raises(ValueError, match="needs an expert_map")
    with record_routing(routed_model("adapter"), DOMAINS) as statistics, without_map:
        statistics.compliance_by_domain()


def test_layers_with_different_numbers_of_experts():
    model = adapter(num_experts_pattern={r"layers\.0\.mlp": 3}).eval()
    with torch.no_grad(), record_routing(model) as statistics:
        model(input_ids=ids())
    assert statistics.sizes == [3, 6]
    assert statistics.counts[0, 0, 3:].sum() == 0 and statistics.health().experts == sum(statistics.sizes)


def test_layers_with_different_top_k():
    model = adapter(top_k_pattern={r"layers\.0\.mlp": 1, r"layers\.1\.mlp": 5}).eval()
    with torch.no_grad():
        for layer in model.get_base_model().model.layers:
            layer.mlp.moe_lora_router["default"].weight.zero_()  # equal gates
        with record_routing(model) as statistics:
            model(input_ids=ids())
    assert statistics.as_dict()["top_k"] == [1, 5]
    assert_near(statistics.effective()["all"].float(), torch.tensor([1.0, 5.0]))


def test_token_classes(tokenizer):
    classes = classify_tokens(tokenizer, size=130)
    assert classes.shape == (130,)
    assert TOKEN_CLASSES[classes[tokenizer.convert_tokens_to_ids("w7")]] == "words"
    assert TOKEN_CLASSES[classes[tokenizer.pad_token_id]] == TOKEN_CLASSES[classes[129]] == "other"
    pieces = sentencepiece_tokenizer()  # decodes a space by itself to nothing
    assert TOKEN_CLASSES[classify_tokens(pieces)[pieces.convert_tokens_to_ids("▁")]] == "space"
    holes = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "Three": 3}, unk_token="<unk>"))  # none has id 2
    found = classify_tokens(PreTrainedTokenizerFast(tokenizer_object=holes, unk_token="<unk>"), size=4)
    assert [TOKEN_CLASSES[i] for i in found] == ["other", "words", "other", "capitalized"]


@pytest.mark.slow
def test_inspect_writes_tables_and_figures(tokenizer, tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = make_model()
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows(12))))
    command = [
        "inspect",
        "--model",
        tmp_path / "adapter",
        "--data",
        tmp_path / "data.jsonl",
        "--label-column",
        "domain",
    ]
    command += ["--output", tmp_path / "report", "--expert-map", json.dumps(EXPERTS)]
    main(list(map(str, command)))
    printed = capsys.readouterr().out
    assert "mean compliance" in printed and "differs" in printed and "effective" in printed
    report = json.loads((tmp_path / "report" / "routing.json").read_text())
    assert list(report["shares"]) == ["a", "b", "c"] and 0 < report["mean_compliance"] < 1
    assert report["effective_experts"].keys() == report["shares"].keys()
    assert all(1 < x <= 2 for of_layers in report["effective_experts"].values() for x in of_layers)
    with (tmp_path / "report" / "load.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 3 * 2 * 6
    assert float(table[7]["share"]) == near(report["shares"]["a"][1][1])
    for name in ("load", "compliance"):
        assert (tmp_path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    mine = tmp_path / "report" / "notes.png"
    mine.write_text("mine")
    again = [part for part in command if part not in ("--expert-map", json.dumps(EXPERTS))]
    for more, left in ((["--html"], {"report.html"}), (["--figures", "svg"], set())):
        main(list(map(str, [*again, *more])))
        suffix = ".svg" if "svg" in more else ".png"
        there = {path.name for path in (tmp_path / "report").iterdir()}
        assert there == {"routing.json", "load.csv", "notes.png", f"load{suffix}", *left}
    for arguments_, message in (
        (["--model", "nowhere", "--data", "x.jsonl"], "--model='nowhere'"),
        (["--model", str(tmp_path / "base"), "--data", str(tmp_path / "data.jsonl")], "has no router"),
        (["--model", "m", "--data", "d", "--expert-map", "[1]"], "--expert-map=[1]: must be a mapping"),
    ):
        with pytest.raises(SystemExit):
            main(["inspect", *arguments_])
        assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_load_over_a_training(options, tokenizer, tmp_path):
    trainer = SFTTrainer(
        model=make_model(),
        args=arguments(tmp_path, SFTConfig, max_steps=6, **options),
        train_dataset=Dataset.from_list(rows(24)),
        processing_class=tokenizer,
        callbacks=[LoadCallback(tmp_path / "load", every=2)],
    )
    trainer.train()
    points = json.loads((tmp_path / "load" / "load.json").read_text())["points"]
    assert [point["step"] for point in points] == [2, 4, 6]
    assert all(len(point["variations"]) == 2 and min(point["variations"]) > 0 for point in points)
    assert points[0]["variations"] != points[1]["variations"]
    assert (tmp_path / "load" / "load.png").exists()


@pytest.mark.slow
def test_load_over_a_training_that_resumes_is_that_of_the_whole(tokenizer, tmp_path, monkeypatch):
    def train(steps, **options):
        trainer = SFTTrainer(
            model=make_model(),
            args=arguments(tmp_path, SFTConfig, max_steps=steps, save_strategy="steps", save_steps=4),
            train_dataset=Dataset.from_list(rows(24)),
            processing_class=tokenizer,
            callbacks=[LoadCallback(tmp_path / "load", every=2)],
        )
        trainer.train(**options)
        return json.loads((tmp_path / "load" / "load.json").read_text())["points"]

    first = train(6)  # as if killed after step 6; the last checkpoint is that of step 4
    shutil.rmtree(tmp_path / "checkpoint-6", ignore_errors=True)
    result = train(8, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [point["step"] for point in result] == [2, 4, 6, 8]
    assert result[:2] == first[:2]
    before = {path.name: path.read_bytes() for path in (tmp_path / "load").iterdir()}
    monkeypatch.setattr(load_callback, "plot_curves", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(4)
    assert {path.name: path.read_bytes() for path in (tmp_path / "load").iterdir()} == before
    monkeypatch.undo()
    (tmp_path / "load" / "load.json").write_text('{"steps": [2]}')
    assert [point["step"] for point in train(6, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))] == [6]


def test_load_over_a_training_is_that_of_the_training(tokenizer, tmp_path):
    """Not of the evaluations in between, nor of what a DPO trainer asks its reference."""
    loads = []
    for name, options in (("plain", {}), ("evaluated", {"eval_strategy": "steps", "eval_steps": 1})):
        trainer = SFTTrainer(
            model=make_model(),
            args=arguments(tmp_path / name, SFTConfig, max_steps=4, **options),
            train_dataset=Dataset.from_list(rows(16)),
            eval_dataset=Dataset.from_list(rows(5)),
            processing_class=tokenizer,
            callbacks=[LoadCallback(tmp_path / name / "load", every=2)],
        )
        trainer.train()
        loads.append(json.loads((tmp_path / name / "load" / "load.json").read_text())["points"])
    assert loads[0] == loads[1]
    model, ids = make_model().eval(), torch.arange(3, 19).view(2, 8)
    with record_routing(model, training_only=True) as statistics:
        model(input_ids=ids)
        with torch.no_grad():
            model(input_ids=ids)
    assert statistics.tokens.tolist() == [16]


def test_figures_of_many_experts_and_layers(tmp_path):
    share = torch.distributions.Dirichlet(torch.ones(64)).sample((32,))
    plot_shares({"a": share, "b": share}, tmp_path / "one.png", "Load")
    plot_shares({"a": share, "b": share}, tmp_path / "two.png", "Load")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_names_with_dollar_signs_are_text(tmp_path):
    share, name = torch.full((2, 4), 0.25), r"$\frac$"
    plot_shares({name: share}, tmp_path / "shares.png", title=name)
    plot_compliance({name: torch.rand(2, 3)}, tmp_path / "compliance.png", [0, 1, 3], {name: 0.5})


def test_what_is_said_of_a_domain_names_layer_and_expert():
    share_LN = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.1, 0.6]])
    assert strongest(share_LN) == "1: 3 (60%), 0: 0 (50%)"
    section = shares_section({"a": share_LN}, Path("load.png"), None, [3, 4])
    assert "gives every expert 25.0% to 33.3%, by" in section.text[0] and "3 in layer 1 (60%)" in section.rows[0][1]
    assert "gives every expert 25.0%. " in shares_section({"a": share_LN}, Path("load.png")).text[0]


def test_numbers_that_are_not_the_models_layers_are_explained():
    assert numbering(["model.layers.0.mlp", "model.layers.1.mlp"]) == []
    (said,) = numbering(["model.layers.1.mlp"])
    assert said == "Layers are counted by router: 0 is model.layers.1.mlp"
    routers = [f"layers.{i}.{part}" for i in range(2) for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp")]
    (said,) = numbering(routers)
    assert said.endswith(
        "0 is layers.0.self_attn.q_proj, 1 is layers.0.self_attn.v_proj, 2 is layers.0.mlp, …, 5 is layers.1.mlp"
    )


def test_specialization_is_what_goes_elsewhere_than_the_average_domains():
    statistics = RoutingStatistics([4, 4], [1, 1], ["a", "b"])
    eye = 9 * torch.eye(4)
    for domain, experts in (("a", [[0, 0, 1, 1], [0, 1, 2, 3]]), ("b", [[2, 2, 3, 3], [0, 1, 2, 3]])):
        statistics.current = domain
        statistics.update([eye[of_layer] for of_layer in experts], torch.ones(1, 4), None)
    # Layer 0 shares nothing: half of each domain's assignments differ from the mean of both. Layer 1 is the same.
    assert {d: of_L.tolist() for d, of_L in statistics.specialization().items()} == {"a": [0.5, 0], "b": [0.5, 0]}


def test_in_a_notebook_statistics_are_their_figure(tmp_path):
    model = routed_model("adapter")
    with torch.no_grad(), record_routing(model, DOMAINS, MAP) as statistics:
        statistics.current = ["code", "prose", "code"]
        model(ids(), attention_mask=mask())
    plot_shares(statistics.shares(), tmp_path / "load.png", "Where the tokens go", MAP, statistics.sizes)
    assert statistics._repr_png_() == (tmp_path / "load.png").read_bytes()
