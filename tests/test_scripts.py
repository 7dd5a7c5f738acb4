"""Every benchmark and study starts, and their shared code works."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig

from tests.helpers.close import near
from tests.helpers.models import tiny_llama

ROOT = Path(__file__).parents[1]
COMMANDS = [
    f"{folder}.{path.stem}"
    for folder in ("benchmarks", "compatibility", "studies")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in path.read_text()
]


@pytest.fixture(autouse=True)
def from_root(monkeypatch):
    """Benchmarks are started in the repository's root."""
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_script_answers_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


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


def test_a_ledger_keeps_runs_as_lines(tmp_path, capsys):
    from studies.runs import DEVICE_NAME, Ledger

    ledger = Ledger(tmp_path / "results" / "runs.jsonl")
    assert ledger.records() == []
    for rate in (0.1, 0.2):
        ledger.add({"order": "iid", "seed": 0, "method": "UpIT", "rate": rate, "points": [{"loss": 1 / 3}]}, "fine")
    again = Ledger(ledger.path)
    assert [run["points"] for run in again.records(order="iid", seed=0, rate=0.2)] == [[{"loss": 0.333333}]]
    assert len(again.records(method="UpIT")) == 2 and again.records(order="blocks") == []
    assert "iid, 0, UpIT, 0.1: fine" in capsys.readouterr().out
    ledger.add({"seed": 1, "rate": 1e-3 / 64}, "")  # a small rate is not rounded
    assert again.records()[-1] == {"seed": 1, "rate": 1.5625e-05, "device": DEVICE_NAME}


def test_exact_matches_and_losses_are_those_of_single_rows(tmp_path):
    from studies.exact_match import answers, by_task

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

    each = answers(model, Dataset.from_list(rows[::-1]), collate)[::-1]  # in the rows' order, not that of their lengths
    found = by_task(each)
    losses = {"a": [], "b": []}
    for answer, row in zip(each, rows, strict=True):
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        nll = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], labels[1:], reduction="none")
        losses[row["domain"]].append(nll[labels[1:] != -100])
        expected = (row["domain"], near(-nll[labels[1:] != -100].sum().item()), len(labels) - 3)
        assert answer[:3] == expected
    for task, exact in (("a", 0.0), ("b", 1.0)):
        assert found["tasks"][task] == [near(torch.cat(losses[task]).mean().item()), exact]
    assert found["loss"] == near((found["tasks"]["a"][0] + found["tasks"]["b"][0]) / 2)
    assert found["exact"] == 0.5


@pytest.mark.parametrize("first", [(1e-3, 2e-3, 4e-3), (1e-3, 2e-3)])
def test_rates_are_tried_until_the_best_lies_between_worse_ones(first):
    from studies.rates import best_rate, next_rate

    for optimum in (first[0] / 4, first[0], first[1], 4 * first[-1]):
        losses = {}
        while (rate := next_rate(losses, first)) is not None:
            assert rate not in losses
            losses[rate] = abs(rate - optimum)
        assert best_rate(losses) == optimum
        assert min(losses) < optimum < max(losses) and len(losses) <= 6


@pytest.mark.slow
def test_the_study_of_upit_makes_every_run_once_and_those_of_stage_1s_rate_after_it(tmp_path, monkeypatch):
    from studies import upit
    from studies.runs import Ledger

    monkeypatch.setattr(upit, "smollm2_folder", lambda: tmp_path)
    monkeypatch.setattr(upit, "RESULTS", tmp_path)
    for name in ("train.jsonl", "test.jsonl", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("")
    study = upit.Study(tmp_path, tmp_path, Ledger(tmp_path / "runs.jsonl"))
    jobs, layers = [], {"specialization": {"sql": [0.1, 0.2]}}
    while (job := next(study.jobs(), None)) is not None:
        jobs.append(job)
        loss = abs(job.rate - 2e-3) + (1 + job.seed) * len(job.method) / 100
        run = {**job._asdict(), "loss": loss, "exact": 0.5, "tasks": {"logic": [loss - 1, 0.5], "sql": [loss + 1, 0.5]}}
        run["curve"] = [["prepare", 1.0, 3.0], ["prepare", 2.0, 2.0]]
        study.ledger.add({**run, "data": study.digest, **({} if "lora_" in job.method else layers)}, "")
    assert len(jobs) == len(set(jobs))
    counted = {(job.method, job.size, job.seed) for job in jobs if job.rate == 2e-3 and job.seed != upit.TUNING_SEED}
    assert counted == {(name, size, seed) for name in upit.METHODS for size in upit.SIZES for seed in upit.SEEDS}
    tuning = [job for job in jobs if job.seed == upit.TUNING_SEED]
    tuned = [name for name, method in upit.METHODS.items() if method.rate_of is None]
    assert sorted(job[:1] + job[3:] for job in tuning) == sorted(
        (name, r) for name in tuned for r in (1e-3, 2e-3, 4e-3)
    )
    starting = [name for name, method in upit.METHODS.items() if method.experts is not None]
    staged = [i for i, job in enumerate(jobs) if job.method in starting]
    assert min(staged) > max(jobs.index(("lora_kr", "quarter", upit.TUNING_SEED, rate)) for rate in (1e-3, 2e-3, 4e-3))

    upit.report(study)
    page = (tmp_path / "upit.md").read_text()
    assert "In progress" not in page and "| UpIT − LoRA, rank k·r | -0.0600 |" in page  # 4 letters and 7: seeds 0 to 2
    assert all((tmp_path / name).is_file() for name in re.findall(r"\]\((upit_\w+\.svg)\)", page))
    (tmp_path / "tokenizer.json").write_text("another")  # none of the runs counts any more
    assert upit.Study(tmp_path, tmp_path, study.ledger).records() == []


def test_the_smaller_studies_report_what_their_ledgers_have(tmp_path, monkeypatch):
    from studies import label_routing, upcycling

    for study in (label_routing, upcycling):
        monkeypatch.setattr(study, "RESULTS", tmp_path)
    compliance = {task: [[0.5, 0.6, 0.7, 0.8, 0.9]] * 2 for task in label_routing.EXPERTS}
    run = {"mean_compliance": 0.7, "compliance": compliance, "exact": 0.5}
    states = label_routing.STATES
    label_routing.report([{**run, "state": s, "seed": i, "loss": 2.0 + i * len(s)} for s in states for i in range(3)])
    page = (tmp_path / "label_routing.md").read_text()
    assert page.count("| 3 | 0.700 | 0.500 | 0.900 | 0.700 | 0.700 |") == len(states) and "minus without: +" in page
    upcycling.report([
        {"init": "drop", "rate": rate, "passes": n, "loss": 3.0 - n + 100 * rate, "exact": 0.25}
        for rate in upcycling.RATES for n in range(4)
    ])  # fmt: skip
    assert "| drop | 5e-05 | 3.0050 | 2.0050 | 1.0050 | 0.0050 | 0.250 |" in (tmp_path / "upcycling.md").read_text()
    assert {path.name for path in tmp_path.glob("*.svg")} == {"label_routing.svg", "upcycling.svg"}


def test_the_gpu_benchmark_goes_on_where_it_stopped_and_suggests_constants(tmp_path, monkeypatch):
    from benchmarks import gpu

    monkeypatch.setattr(gpu, "EXPERTS", (4,))
    monkeypatch.setattr(gpu, "BATCHES", [(1, False), (512, True)])
    ledger = tmp_path / "gpu.jsonl"
    assert gpu.run(gpu.SMALL, ledger, rounds=2, minutes=0) and not ledger.exists()
    first = gpu.run(gpu.SMALL, ledger, rounds=2, minutes=60)
    written = ledger.read_text()
    names = [json.loads(line)["name"] for line in written.splitlines()]
    assert names[1:3] == ["output 4/2/8", "projection 4/2/8"] and len(names) == 4
    monkeypatch.setattr(gpu, "measure", None)
    assert gpu.run(gpu.SMALL, ledger, rounds=2, minutes=60) == first == (tmp_path / "gpu.md").read_text()
    assert ledger.read_text() == written
    assert "| projection 4/2/8 | 512, training (" in first and "decode | lora 1.00" in first
    fast, slow = {"dense": 1.0, "gather": 2.0}, {"dense": 2.0, "gather": 1.0}
    records = [
        {"name": "projection 32/2/8", "cells": [("8192", fast), ("8", slow)]},
        {"name": "projection 64/2/8", "cells": [("8192", {"dense": 2.0, "blocks": 1.0})]},
        {"name": "output 8/2/8", "cells": [("4", slow), ("8", slow), ("16", fast)]},
        {"name": "output 128/2/8", "cells": [("16", slow), ("32", fast)]},
    ]
    assert gpu.suggestion(records) == "Crossovers(columns=256, pair_columns=0, pairs=32, narrow_pairs=16)"


def test_launches_counts_what_a_layer_of_the_base_and_lora_ask_for(capsys, monkeypatch):
    """Five operations of a dense FFN; four more for each of LoRA's three linears."""
    from benchmarks import launches

    base, lora, *ours = (
        launches.trace(launches.layer(method, 64, 160, torch.bfloat16), 64, 8, False) for method in launches.METHODS
    )
    assert [operation.name for operation in base.operations] == ["mm", "silu", "mm", "mul", "mm"]
    assert len(lora.operations) == 17 and sum(operation.flops > 0 for operation in lora.operations) == 9
    assert (
        base.operations[0].bytes == 2 * (8 * 64 + 64 * 160 + 8 * 160) and base.operations[0].flops == 2 * 8 * 64 * 160
    )
    assert all(len(seen.operations) > 17 and not seen.waits for seen in ours)
    monkeypatch.setattr("sys.argv", ["launches", "--hidden", "64", "--intermediate", "160"])
    launches.main()
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(launches.TASKS)


def test_a_layer_keeps_about_as_much_for_the_backward_pass_as_lora(monkeypatch):
    from benchmarks import launches

    monkeypatch.setattr(launches.dispatch_choice, "device_kind", lambda device: "cuda 9")
    rows = [line.strip("| ").split(" | ") for line in launches.saved_table(512, 1536)][2:]
    share = {label: float(of_lora) for label, _, of_lora in rows}
    assert share["output 8/2/8"] <= 1.1 and share["projection 8/2/8"] <= 1.1 and share["plain mixture 8/2/8"] > 2
    assert share["output 8/4/8"] < 0.8  # pairs are computed again


@pytest.mark.slow
def test_a_training_step_of_ours_waits_as_often_as_one_of_lora():
    from benchmarks import launches

    of_lora, *ours = (line.split(" | ")[1:] for line in list(launches.steps())[1:])
    assert len(ours) == 2 and {waits for _, waits in ours} == {of_lora[1]}


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


def test_the_study_of_granularity_tunes_each_method_and_reports_what_its_ledger_has(tmp_path):
    from studies import granularity
    from studies.runs import Ledger

    ledger = Ledger(tmp_path / "runs.jsonl")
    tasks, tokens = [task for task in granularity.TASKS for _ in range(3)], [1, 2, 3] * 4
    ledger.add({"method": "rows", "data": "", "tasks": tasks, "tokens": tokens}, "")
    made = []
    while (job := next(granularity.jobs(ledger), None)) is not None:
        made.append(job)
        loss = abs(job.rate - 8e-3) + (1 + job.seed) * len(job.method) / 100
        run = {"loss": loss, "exact": 0.5, "seconds_per_step": 1.0, "parameters": 10**6}
        run |= {"tasks": {task: [loss, 0.5] for task in granularity.TASKS}}
        answers = {"log_probs": [-loss * n for n in tokens], "matches": "01" * 6}
        ledger.add({**job._asdict(), **run, "answers": answers}, "")
    assert len(made) == len(set(made)) == len(granularity.METHODS) * (4 + len(granularity.SEEDS))
    assert {job.method for job in made[:5]} == set(granularity.PHASES[0])  # all of a phase at one rate, then the next
    page = granularity.report(ledger)
    assert "Incomplete" not in page
    # 5 letters and 7, so -0.02, -0.04 and -0.06; 4.303 · 0.02 / √3 around it, and 1.96 · √(4 · 3 · 0.04² / 6²) / 4
    row = "| 8/8/2 − LoRA, rank k·r | -0.04 to +0 | -0.0400 | [-0.0897, +0.0097] | [-0.0513, -0.0287] |"
    assert row in page


def test_seeds_of_the_study_of_granularity_leave_out_other_rows():
    from studies.granularity import PARTS, TASKS, split

    rows = [{"prompt": f"{task} {i}", "domain": task} for task in TASKS for i in range(8)]
    left_out = [split(rows, seed)[1] for seed in range(PARTS)]
    assert sorted(row["prompt"] for part in left_out for row in part) == sorted(row["prompt"] for row in rows)
    assert all(
        len(part) == 8 and not [row for row in split(rows, s)[0] if row in part] for s, part in enumerate(left_out)
    )


def study_of_schedule(folder):
    """Without the rows and the model."""
    from studies import schedule
    from studies.runs import Ledger

    study = object.__new__(schedule.Study)
    names = {seed: str(seed) for seed in schedule.SEEDS} | {schedule.TUNING_SEED: "tuning"}
    study.ledgers = {seed: Ledger(folder / f"{name}.jsonl") for seed, name in names.items()}
    return study


def test_the_study_of_the_schedule_tunes_first_and_makes_every_run_once(tmp_path, monkeypatch):
    from studies import schedule

    monkeypatch.setattr(schedule, "RESULTS", tmp_path)
    study, made = study_of_schedule(tmp_path), []
    while jobs := list(study.jobs()):
        assert len(jobs) == len(set(jobs)) and not {*jobs} & {*made}
        job = jobs[0]
        made.append(job)
        loss = abs(job.rate - 2e-3) + 0.1 / job.passes + (1 + job.seed) * len(job.method) / 100
        tasks = {"banking": [loss, 0.5], "sql": [2.0, 0.0]}
        run = {**job._asdict(), "decides": loss, "loss": loss, "exact": 0.5, "parameters": 10**6, "tasks": tasks}
        study.ledgers[job.seed].add(run, "")
        if job.seed != schedule.TUNING_SEED and job.method in ("lora_kr", "mixture"):
            study.ledgers[job.seed].add({**run, "method": job.method + schedule.TAIL}, "")
    # The passes of two methods, then the rates of all that have their own at the best number of them.
    own = [name for name, method in schedule.METHODS.items() if method.rate_of is None]
    tuning = [job for job in made if job.seed == schedule.TUNING_SEED]
    assert len(tuning) == 3 * (len(own) + len(schedule.TUNES_PASSES)) and study.passes() == 2
    assert [job for job in made if job.seed == 0] == [schedule.Job(name, 0, 2e-3, 2) for name in schedule.METHODS]
    assert len(made) == len(tuning) + 6 * len(schedule.METHODS)
    page = schedule.report(study)
    # 4 letters less than "mixture linear" has, so -0.07 to -0.42; 2.571 · 0.1310 / √6 around the mean
    assert "| mixture − mixture, linear decay | -0.01 to +0.01, missed | -0.2450 | [-0.3824, -0.1076] |" in page
    assert "| mean of the checkpoints, trained on − LoRA, rank n·r, linear decay | added later |" in page
    assert (tmp_path / "schedule.svg").is_file()


def test_pages_of_results_are_what_their_ledgers_say(tmp_path, monkeypatch):
    from studies import (
        balancing,
        changing_tasks,
        choices,
        fork,
        granularity,
        growing,
        label_routing,
        lora_kinds,
        one_lora,
        request_gate,
        requests,
        scale,
        schedule,
        tenants,
        upcycling,
        upit,
        upit_paper,
        writings,
    )  # fmt: skip
    from studies.runs import Ledger

    results = ROOT / "studies/results"
    names = ("balancing", "granularity", "growing", "label_routing", "lora_kinds", "request_gate", "upcycling", "upit")
    ledgers = {name: Ledger(results / f"{name}.jsonl") for name in names}
    for study in (growing, label_routing, lora_kinds, schedule, upcycling, upit):
        monkeypatch.setattr(study, "RESULTS", tmp_path)
    of_upit = object.__new__(upit.Study)  # without the rows and the model
    of_upit.ledger, of_upit.digest = ledgers["upit"], ledgers["upit"].records()[0]["data"]
    upit.report(of_upit)
    label_routing.report(ledgers["label_routing"].records())
    upcycling.report(ledgers["upcycling"].records())
    lora_kinds.report(ledgers["lora_kinds"])
    lora_kinds.report(Ledger(results / "lora_kinds_gemma-3-270m.jsonl"), "gemma-3-270m")
    (tmp_path / "balancing.md").write_text(balancing.report(ledgers["balancing"]))
    (tmp_path / "granularity.md").write_text(granularity.report(ledgers["granularity"]))
    (tmp_path / "growing.md").write_text(growing.report(ledgers["growing"]))
    (tmp_path / "request_gate.md").write_text(request_gate.report(ledgers["request_gate"]))
    for study in (changing_tasks, choices, fork, one_lora, requests, scale, tenants, writings):
        name = study.__name__.rpartition(".")[2]
        (tmp_path / f"{name}.md").write_text(study.report(Ledger(results / f"{name}.jsonl")))
    quarter = upit_paper.report(Ledger(results / "upit_paper_quarter.jsonl"))
    (tmp_path / "upit_paper_quarter.md").write_text(quarter)
    (tmp_path / "schedule.md").write_text(schedule.report(study_of_schedule(results / "schedule")))
    pages = list(tmp_path.glob("*.md"))
    assert len(pages) == len(names) + 11
    for path in pages:
        assert path.read_text() == (results / path.name).read_text(), path.name
