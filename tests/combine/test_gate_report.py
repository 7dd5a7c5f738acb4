"""The report of a gate for requests against plain counts of what it picks."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch

from moe_peft import RequestGate
from moe_peft.combine.gate_report import concerns, left_out_report, report_on
from tests.helpers.gate_case import NEUTRAL, TEXTS, requests, save_base

ASKED = {name: requests(name if name != "base" else "neutral", 12, seed=7) for name in (*TEXTS, "base")}


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    # Of code there are requests like those of math, so that some go wrong.
    texts = {**TEXTS, "code": [*TEXTS["code"], *requests("math", 6, seed=5)]}
    return RequestGate.fit(save_base(tmp_path_factory.mktemp("gate") / "base"), texts, NEUTRAL, chat=True)


def test_counts_and_mistakes_are_what_the_gate_picks(gate):
    asked = {**ASKED, "code": [*ASKED["code"], *requests("math", 4, seed=5), "Translate into French: {x}x("]}
    report, wrong = report_on(gate, asked), set()
    for name, texts in asked.items():
        picked = [choice or "base" for choice in gate.pick(texts)]
        assert report.picked[name] == {to: picked.count(to) for to in picked}
        wrong |= {(text, name, to) for text, to in zip(texts, picked, strict=True) if to != name}
    assert {(m.text, m.wanted, m.picked) for m in report.mistakes} == wrong and wrong
    assert [m.lead for m in report.mistakes] == sorted((m.lead for m in report.mistakes), reverse=True)
    table = report.lines()[: 1 + len(asked)]
    assert [line.split()[0] for line in table[1:]] == [*asked]
    kept = sum(report.picked[name].get(name, 0) for name in TEXTS) / sum(map(len, list(asked.values())[:-1]))
    for point in report.curve:
        other = dataclasses.replace(gate, fixed_margin=point["margin"])
        general = other.pick(asked["base"]).count(None) / len(asked["base"])
        assert point["general"] == pytest.approx(general, abs=1e-4)
    assert report.curve[0]["own"] >= kept - 0.05


def test_of_its_own_texts_each_is_left_out(gate):
    report, (scores, own) = left_out_report(gate), gate.left_out()
    for i, name in enumerate(gate.columns):
        best = scores[own == i][:, :-1].max(1)
        to_base = (best.values <= scores[own == i][:, -1] + gate.margin).sum().item()
        assert report.picked[name].get("base", 0) == to_base
        assert sum(report.picked[name].values()) == (own == i).sum()


def test_work_grows_with_the_adapters_not_with_their_square(gate):
    """The choice and the report, of 50 and of 800 adapters of two texts."""
    of = gate.texts["math"]
    seconds = []
    for n in (50, 800):
        draw = torch.Generator().manual_seed(0)
        texts = {
            str(i): dataclasses.replace(
                of,
                vectors=torch.randn(2, *of.vectors.shape[1:], generator=draw),
                digests=torch.tensor([2 * i, 2 * i + 1]),
            )
            for i in range(n)
        }
        many = dataclasses.replace(gate, texts={**texts, "base": gate.texts["base"]})
        assert many.margin >= 0 and len(many.names) == n  # fitted before the time is taken
        of_kind = []
        for work in (lambda gate=many: gate.pick(["1x2"]), lambda gate=many: left_out_report(gate)):
            start = time.thread_time()
            work()
            of_kind.append(time.thread_time() - start)
        seconds.append(of_kind)
    (pick, report), (pick_many, report_many) = seconds
    assert pick_many < 16 * pick
    assert report_many < 16 * 16 * report * 1.5  # rows of scores: texts times adapters


def test_files(gate, tmp_path):
    report = report_on(gate, ASKED)
    report.write(tmp_path)
    saved = json.loads((tmp_path / "gate_report.json").read_text())
    assert saved["picked"] == report.picked and len(saved["curve"]) == len(report.curve)
    assert (tmp_path / "gate_report.png").stat().st_size > 10_000


def test_what_is_doubtful_is_said(gate):
    doubtful = gate.with_adapter("twin", [text.upper() for text in TEXTS["math"][:20]]).with_adapter("odd", NEUTRAL[:2])
    assert sorted(line.split(" ")[0] for line in concerns(doubtful)) == ["math,", "odd:", "odd:", "prose:", "twin:"]
    assert concerns(gate) == ["prose: has 16 different texts; give dozens, better hundreds"]
