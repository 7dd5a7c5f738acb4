"""Every benchmark starts, and their shared code works."""

from __future__ import annotations

import runpy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_llama
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
COMMANDS = [path.stem for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]


@pytest.fixture(autouse=True)
def from_root(monkeypatch):
    """Benchmarks are started in the repository's root."""
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_answers_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_mixtral_of_copies_computes_what_the_base_computes(tmp_path):
    from benchmarks.toy_training import mixtral

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    base.save_pretrained(tmp_path)
    moe, other = mixtral(tmp_path, 3), mixtral(tmp_path, 3, seed=1)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.allclose(moe(ids).logits, base(ids).logits, atol=1e-5)
    assert moe.lm_head.weight is moe.model.embed_tokens.weight
    assert moe.model.layers[0].mlp.gate.weight.shape == (3, 16)
    assert not torch.equal(moe.model.layers[0].mlp.gate.weight, other.model.layers[0].mlp.gate.weight)
    ids_loss = moe(ids, labels=ids, output_router_logits=True)
    plain = moe(ids, labels=ids)
    assert torch.isclose(ids_loss.loss, plain.loss + 0.01 * ids_loss.aux_loss)


def test_jobs_are_interleaved_in_another_order_each_round():
    from benchmarks.timing import interleave, ratio

    done: list[str] = []
    seconds = interleave({name: lambda name=name: float(done.append(name) or len(done)) for name in "abc"}, 6, warmup=1)
    rounds = ["".join(done[i : i + 3]) for i in range(3, 21, 3)]
    assert done[:3] == ["a", "b", "c"] and all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 1
    assert [len(times) for times in seconds.values()] == [6, 6, 6] and sum(map(sum, seconds.values())) == sum(
        range(4, 22)
    )
    assert str(ratio([2.0, 9.0, 3.0], [1.0, 3.0, 3.0])) == "2.00 (1.00–3.00)"


def test_routers_are_compared_at_their_own_best_rates(tmp_path, monkeypatch):
    from benchmarks import routers
    from benchmarks.runs import Ledger

    made = []

    def run(base, kind, router, seed, rate):
        made.append((router, seed, rate))
        best = {"linear": 2.5e-4, "mlp": 1e-3}[router]
        loss = 2.0 + abs(rate - best) + 0.01 * seed * (router == "mlp")
        return {"kind": kind, "router": router, "seed": seed, "rate": rate, "loss": loss,
                "entropy_at_start": 1.0, "load_cv": 0.1}  # fmt: skip

    monkeypatch.setattr(routers, "run", run)
    monkeypatch.setattr(routers, "JOBS", [("mixtral", "linear"), ("mixtral", "mlp")])
    monkeypatch.setattr(routers, "SEEDS", range(3))
    ledger = Ledger(tmp_path / "runs.jsonl")
    for _ in range(2):  # finished runs are not repeated
        routers.work(tmp_path / "base", ledger, 0, 1)
        assert len(made) == 5 + 3 + 2 * 3 and {seed for _, seed, _ in made[:8]} == {routers.TUNING_SEED}
    assert {(router, rate) for router, _, rate in made[8:]} == {("linear", 2.5e-4), ("mlp", 1e-3)}
    table = routers.report(ledger)
    assert "| mixtral | linear | 0.00025 | 2.0000 |" in table
    # Differences 0, 0.01, 0.02: standard error 0.01 / √3, t of two degrees of freedom 4.3027.
    assert "| mixtral | mlp | 0.001 | 2.0100 | +0.0100 [-0.0148, +0.0348] |" in table.replace(" | [", " [")


def test_a_ledger_keeps_runs_as_lines(tmp_path, capsys):
    from benchmarks.runs import Ledger

    ledger = Ledger(tmp_path / "results" / "runs.jsonl")
    assert ledger.records() == [] and not ledger.has(seed=0)
    for rate in (0.1, 0.2):
        ledger.add({"order": "iid", "seed": 0, "method": "UpIT", "rate": rate, "points": [{"loss": 1 / 3}]}, "fine")
    again = Ledger(ledger.path)
    assert again.find(order="iid", seed=0, rate=0.2)["points"] == [{"loss": 0.333333}]
    assert again.has(method="UpIT") and not again.has(method="UpIT", rate=0.3) and not again.has(order="blocks")
    assert "iid, 0, UpIT, 0.1: fine" in capsys.readouterr().out
    ledger.add({"seed": 1, "rate": 1e-3 / 64}, "")  # a small rate is not rounded
    assert again.records()[-1] == {"seed": 1, "rate": 1.5625e-05}


def test_exact_matches_and_losses_are_those_of_single_rows(tmp_path):
    from benchmarks.exact_match import measure

    model = tiny_llama(vocab=16).eval()
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(7):
        ids = torch.randint(0, 16, (5 + i,), generator=generator)
        labels = ids.clone()
        labels[:3] = -100
        if i % 2:  # an answer that greedy decoding gives
            for position in range(3, len(ids)):
                ids[position] = labels[position] = model(input_ids=ids[None, :position]).logits[0, -1].argmax()
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist(), "domain": "ab"[i % 2] if i < 6 else "a"})

    def collate(examples):
        length = max(len(example["input_ids"]) for example in examples)
        pad = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        whole = [{**example, "attention_mask": [1] * len(example["input_ids"])} for example in examples]
        return {k: torch.tensor([e[k] + [v] * (length - len(e[k])) for e in whole]) for k, v in pad.items()}

    found = measure(model, Dataset.from_list(rows), collate)
    losses = {"a": [], "b": []}
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        nll = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], labels[1:], reduction="none")
        losses[row["domain"]].append(nll[labels[1:] != -100])
    for task, exact in (("a", 0.0), ("b", 1.0)):
        assert found["tasks"][task] == [pytest.approx(torch.cat(losses[task]).mean().item(), rel=1e-5), exact]
    assert found["loss"] == pytest.approx((found["tasks"]["a"][0] + found["tasks"]["b"][0]) / 2)
    assert found["exact"] == 0.5


def test_the_upit_study_reports_what_its_runs_say(tmp_path, capsys):
    from benchmarks.runs import Ledger
    from benchmarks.upit_methods import CURVES, LATER, MAIN, ORDERS, SEEDS, SIZES, TUNING_SEED, UNVARIED
    from benchmarks.upit_report import report
    from examples.toy.tasks import TASKS

    ledger = Ledger(tmp_path / "study.jsonl")

    def add(order, seed, method, rate, loss):
        tasks = {task: [loss, i / 10] for i, task in enumerate(TASKS)}
        points = [
            {"share": share, "loss": loss - 0.05 + (1 - share), "exact": 0.5, "tasks": tasks}
            for share in (0.0, 0.9, 0.95, 1.0)
        ]
        ledger.add({"order": order, "seed": seed, "method": method, "rate": rate, "points": points}, "")

    rates = SIZES["1M"].rates
    for rate in rates:
        add("iid", TUNING_SEED, "UpIT", rate, abs(rate - rates[1]))
    for seed in SEEDS:
        for order in ORDERS:
            for name in MAIN:
                if (name, seed) != ("PESC", SEEDS[-1]):
                    level = {"UpIT": 1.0 + 0.01 * seed, "LoRAMoE-SFT": 1.5}.get(name, 2.0)
                    add(order, seed, name, rates[1], level + 0.1 * seed)
        levels = {UNVARIED: 1.2, "LoRAMoE-SFT, 2 active": 1.0, "LoRAMoE-PT, 0.25 of the data": 1.5}
        for name in CURVES:
            if (name, seed) != ("UpIT, 4 experts", SEEDS[-1]):
                add("iid", seed, name, rates[1], levels.get(name, 2.0))
        for order, names in LATER.items():
            for i, name in enumerate(names):
                add(order, seed, name, rates[1], 1.3 + 0.2 * i + 0.01 * seed + 0.3 * (order == "blocks"))
    capsys.readouterr()
    report(ledger, tmp_path / "study.md", "1M")
    lines = (tmp_path / "study.md").read_text().splitlines()
    assert capsys.readouterr().out.strip().splitlines() == lines
    # Differences -0.50, -0.49, -0.48, -0.47: standard error 0.01291 / 2, t of three degrees of freedom 3.1824.
    contrast = "-0.4850 [-0.5055, -0.4645]"
    row = next(line for line in lines if line.startswith("| UpIT minus LoRAMoE-SFT |"))
    assert row.startswith(f"| UpIT minus LoRAMoE-SFT | {contrast} | {contrast} | {contrast} | +0.0000 [")
    assert any(
        line.startswith(f"| UpIT | {rates[1]:g} | 1.1650 | 1.1650 | 0.5000 | 0.5000 | 2.1150 | 2.1150 |")
        for line in lines
    )
    assert f"| method | {' | '.join(TASKS)} |" in lines
    assert "| UpIT | 0.00 | 0.10 | 0.20 | 0.30 | 0.40 | 0.50 | 0.60 | 0.70 | 0.80 | 0.90 |" in lines
    assert any(line.startswith("| PESC | – | – | – | – | – |") for line in lines)  # a run is missing
    assert any("all runs of the main table: 3 of 4" in line for line in lines)
    # Differences 0.10, 0.11, 0.12, 0.13 between orders' runs; the same in each seed between methods.
    upit, genetic, random = LATER["blocks"]
    later = lines[lines.index("## Later runs") :]
    assert f"| {upit} minus {UNVARIED} | iid | +0.1150 [+0.0945, +0.1355] | +0.0000 [+0.0000, +0.0000] |" in later
    assert any(line.startswith(f"| {upit} minus LoRAMoE-SFT, 2 active | iid | +0.3150 [+0.2945") for line in later)
    assert any(line.startswith(f"| {upit} minus {upit} | blocks minus iid | +0.3000 [+0.3000") for line in later)
    for method, other, difference in ((genetic, random, -0.2), (genetic, upit, 0.2), (random, upit, 0.4)):
        cell = f"{difference:+.4f} [{difference:+.4f}, {difference:+.4f}]"
        assert any(line.startswith(f"| {method} minus {other} | blocks | {cell} |") for line in later)
    none, half = "+0.0000 [+0.0000, +0.0000]", "+0.5000 [+0.5000, +0.5000]"
    assert f"| 0.25 | 2.0000 | 2.0000 | 1.5000 | 2.0000 | {none} | {half} | {none} |" in lines
    assert any(line.startswith("| 1 | 1.2000 | 1.0000 | 2.0000 | 2.0000 | +0.2000 [") for line in lines)
    assert any(line.startswith("| experts, 3 seeds |") for line in lines)
    assert f"| 4 | 2.0000 | 2.0000 | {none} (3 seeds) |" in lines  # a run is missing
    assert f"| 2 | 2.0000 | 2.0000 | {none} |" in lines
    assert (tmp_path / "study.png").stat().st_size > 10_000
    # Another size has fewer orders and methods, and no variants.
    report(ledger, tmp_path / "large.md", "5M")
    small = (tmp_path / "large.md").read_text()
    assert "| UpIT minus LoRAMoE-SFT | -0.4850 [-0.5055, -0.4645] | +0.0000 [" in small
    assert "study run --size 5M --workers 2`" in small and "4 of 4" in small
    assert "PESC" not in small and "blocks" not in small and "relative perplexity" not in small


def test_every_run_of_the_upit_study_has_a_method_and_a_tuned_rate():
    from benchmarks.upit_methods import CONFIRMED, EVERY, LATER, MAIN, SIZES, UNVARIED
    from benchmarks.upit_report import PRIMARY

    for size in SIZES.values():
        assert set(size.methods) <= set(MAIN)
    assert {CONFIRMED, UNVARIED, *(name for names in LATER.values() for name in names)} <= set(EVERY)
    assert {name for pair in PRIMARY for name in pair} <= set(MAIN)
    for name, method in EVERY.items():
        rate_of = method.tuned_as or name
        assert rate_of in MAIN and MAIN[rate_of].tuned_as is None
    for names in LATER.values():
        for name, method in names.items():
            assert replace(method, tuned_as=None) == replace(MAIN[name.removesuffix(", later")], tuned_as=None)


def test_the_upcycling_study_says_where_curves_cross(tmp_path, capsys):
    from benchmarks.runs import Ledger
    from benchmarks.upcycle_study import INITIAL, POINTS, RATES, SEEDS, TUNING_SEED, report

    ledger, crossing = Ledger(tmp_path / "study.jsonl"), POINTS[-4]
    for seed in (TUNING_SEED, *SEEDS):
        for method in INITIAL:
            for rate in RATES[method]:
                for_drop = [2.5 if step < crossing else 1.9 - 0.01 * (seed % 100) for step in POINTS]
                losses = for_drop if method == "drop" else [2.0] * len(POINTS)
                points = [{"step": s, "loss": of + 10 * rate} for s, of in zip(POINTS, losses, strict=True)]
                record = {"seed": seed, "method": method, "rate": rate, "points": points}
                ledger.add(record, "")
    capsys.readouterr()
    report(ledger, tmp_path / "study.md")
    lines = (tmp_path / "study.md").read_text().splitlines()
    assert capsys.readouterr().out.strip().splitlines() == lines
    # Differences -0.10, -0.11, -0.12: standard error 0.01 / √3, t of two degrees of freedom 4.3027.
    assert "| drop minus copy | -0.1100 [-0.1348, -0.0852] |" in lines
    assert any(line.startswith(f"| copy | {RATES['copy'][0]:g} | 2.005 |") for line in lines)
    assert lines[-1] == f"The mean curve of `drop` stays below that of `copy`: from step {crossing} on."


def test_the_upcycling_study_runs_each_method_at_its_best_rate_once(tmp_path, monkeypatch):
    from benchmarks import upcycle_study as study
    from benchmarks.runs import Ledger

    made = []

    def run(experiment, method, rate):
        made.append((experiment.seed, method, rate))
        best = 4e-3 if method == "scratch" else 5e-4
        return [{"step": step, "loss": 2.0 + abs(rate - best)} for step in study.POINTS]

    monkeypatch.setattr(study.Experiment, "run", run)
    monkeypatch.setattr(study, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda base: None))
    ledger = Ledger(tmp_path / "study.jsonl")
    for _ in range(2):  # finished runs are not repeated
        study.work(tmp_path / "base", ledger, 0, 1)
        assert len(made) == len(set(made)) == 3 * 3 + 4 + 4 * len(study.SEEDS)
    compared = {(method, rate) for seed, method, rate in made if seed in study.SEEDS}
    assert compared == {(method, 4e-3 if method == "scratch" else 5e-4) for method in study.INITIAL}


@pytest.mark.parametrize("first", [(1e-3, 2e-3, 4e-3), (1e-3, 2e-3)])
def test_rates_are_tried_until_the_best_lies_between_worse_ones(first):
    from benchmarks.rates import best_rate, next_rate

    for optimum in (first[0] / 4, first[0], first[1], 4 * first[-1]):
        losses = {}
        while (rate := next_rate(losses, first)) is not None:
            assert rate not in losses
            losses[rate] = abs(rate - optimum)
        assert best_rate(losses) == optimum
        assert min(losses) < optimum < max(losses) and len(losses) <= 6


def test_workers_share_the_rates_and_wait_for_one_another(monkeypatch):
    from benchmarks import rates

    monkeypatch.setattr(rates, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(0.001)))
    optima, losses, tried = {"a": 1.0, "b": 4.0, "c": 2.0}, {"a": {}, "b": {}, "c": {}}, []

    def run(name, rate):
        tried.append((name, rate))
        losses[name][rate] = abs(rate - optima[name])

    def work(worker):
        return rates.tune(list(optima), lambda name: dict(losses[name]), lambda name: (1.0, 2.0), run, worker, 2)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [optima, optima]
    assert len(tried) == len(set(tried)) == 3 + 4 + 3


def test_the_gpu_benchmark_measures_all_its_rows_on_a_tiny_case():
    from benchmarks.gpu import SMALL, table

    lines = list(table([SMALL], rounds=2, compiled=False))
    tasks = ["training step", "prefill", "decode", *(["peak memory"] if torch.cuda.is_available() else [])]
    assert [line.split(" | ")[1] for line in lines[2:]] == tasks
    assert all(line.count("|") == 6 and line.split(" | ")[2].startswith("1.00") for line in lines[2:])


@pytest.mark.parametrize("method", ["base", "lora", "projection"])
def test_the_cost_model_counts_what_runs(method):
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks.adapter import Case
    from benchmarks.cost_model import Shape, added_operations, base_operations

    case = Case(64, layers=2, batch=2, length=24, vocab=32)
    model, ids = case.model(method).eval(), case.ids()
    f = LlamaConfig.from_dict(model.config.to_dict()).intermediate_size
    shape = Shape(64, f, 2, 1, 1, 32, length=24, tokens=48)
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=ids)
    scores = 2 * 24 * 64  # which torch does not count on a CPU
    per_token = 2 * (base_operations(shape) + added_operations(shape, method) - scores) + 2 * 64 * 32
    assert abs(counter.get_total_flops() / (48 * per_token) - 1) < 1e-3  # rotary frequencies are a product too
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == shape.trained(method)
    assert sum(p.numel() for p in model.parameters() if p.dim() > 1) - trained == shape.base_parameters
