"""Every benchmark starts, and their shared code works."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
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
    from benchmarks.timing import interleave, median_ratio

    done: list[str] = []
    seconds = interleave({name: lambda name=name: float(done.append(name) or len(done)) for name in "abc"}, 6, warmup=1)
    rounds = ["".join(done[i : i + 3]) for i in range(3, 21, 3)]
    assert done[:3] == ["a", "b", "c"] and all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 1
    assert [len(times) for times in seconds.values()] == [6, 6, 6] and sum(map(sum, seconds.values())) == sum(
        range(4, 22)
    )
    assert median_ratio([2.0, 9.0, 3.0], [1.0, 3.0, 3.0]) == 2.0


def test_a_finished_run_is_not_repeated(tmp_path, capsys):
    from benchmarks.runs import finished, slug

    path = tmp_path / f"{slug('UpIT, 2 → 4')}-0.json"
    assert path.name == "UpIT--2---4-0.json"
    with pytest.raises(ZeroDivisionError):
        finished(path, lambda: {"loss": 1 / 0})
    assert finished(path, lambda: {"loss": 1.5}) == {"loss": 1.5}
    assert "UpIT--2---4-0" in capsys.readouterr().out
    assert finished(path, lambda: {"loss": 2.5}) == {"loss": 1.5}
    assert list(tmp_path.iterdir()) == [path]


def test_routers_are_compared_at_their_own_best_rates(tmp_path, monkeypatch):
    from benchmarks import routers

    made = []

    def run(base, kind, router, seed, rate, size):
        made.append((router, seed, rate))
        best = {"linear": 1e-3, "mlp": 2e-3}[router]
        loss = 2.0 + abs(rate - best) + 0.01 * seed * (router == "mlp")
        return {"kind": kind, "router": router, "seed": seed, "rate": rate, "loss": loss,
                "entropy_at_start": 1.0, "load_cv": 0.1}  # fmt: skip

    monkeypatch.setattr(routers, "run", run)
    size, wanted = routers.Size(5, 9), [("mixtral", "linear"), ("mixtral", "mlp")]
    found = routers.study(tmp_path / "base", tmp_path / "runs", wanted, 3, size)
    assert len(made) == 2 * 3 + 2 * 3 and {seed for _, seed, _ in made[:6]} == {routers.TUNING_SEED}
    assert {(r["router"], r["rate"]) for r in found} == {("linear", 1e-3), ("mlp", 2e-3)}
    assert routers.study(tmp_path / "base", tmp_path / "runs", wanted, 3, size) == found and len(made) == 12
    table = routers.report(found, wanted, 3, size)
    assert "| mixtral | mlp | 0.002 | 2.0100 | +0.0100 [-0.0148, +0.0348] |" in table.replace(" | [", " [")
    routers.study(tmp_path / "base", tmp_path / "runs", wanted, 1, routers.Size(6, 9))
    assert len(made) == 12 + 8  # another size is another study


def test_report_follows_the_plan_it_is_given(tmp_path, capsys):
    from benchmarks.upit_report import Plan, report

    plan = Plan(
        domains=("sums",), seeds=(0, 1, 2), orders=("iid", "blocks"), replicates=2, methods=("A", "B"),
        added={"C": 0.5}, reference="A", subject="B", primary=("A",), post_hoc=(("C", "B"),), interest=0.1,
    )  # fmt: skip
    for folder in ("results", "tuning"):
        (tmp_path / folder).mkdir()
    for rate, loss in ((0.1, 2.0), (0.2, 1.0), (0.4, 3.0)):
        for method in plan.methods:
            record = {"method": method, "rate": rate, "loss": {"mean": loss}}
            (tmp_path / "tuning" / f"{method}-{rate}.json").write_text(json.dumps(record))
    for method, level, slope in (("A", 1.0, 0.1), ("B", 1.5, 0.11), ("C", 1.5, 0.12)):
        for order in plan.orders:
            for seed in plan.seeds:
                for replicate in range(1 if (method, seed) == ("C", 2) else 2):
                    loss = level + slope * seed + 0.001 * replicate
                    record = {"method": method, "order": order, "seed": seed, "loss": {"sums": loss, "mean": loss}}
                    path = tmp_path / "results" / f"{method}-{order}-{seed}-{replicate}.json"
                    path.write_text(json.dumps(record))
    report(plan, tmp_path, tmp_path / "table.md")
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert capsys.readouterr().out.strip().splitlines() == lines
    assert "fixed beforehand. Seeds with all runs: 3 of 3. Lower is better." in lines
    # differences 0.5, 0.51, 0.52: standard error 0.01 / √3, t of two degrees of freedom 4.3027
    contrast = "+0.5100 [+0.4852, +0.5348]"
    assert f"| A | {contrast} | {contrast} | {contrast} |" in lines
    assert any(line.startswith("| C, against: B | +0.0050 [") for line in lines)
    assert lines.count("| A | 0.2 | 1.1005 | 1.1005 |  |") == 2
    assert lines.count(f"| B | 0.2 | 1.6105 | 1.6105 | {contrast} |") == 2
    assert any(line.startswith("| C | 0.5 | 1.5605 | 1.5605 | +0.5100 [") for line in lines)
