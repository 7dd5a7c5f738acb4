"""
What initial experts are worth, and UpIT for whole FFNs against its baselines, small.

    python -m benchmarks.upcycle_study    # 90 minutes on one core; writes benchmarks/results/upcycle_study.*

The toy base, a dense model of 1M parameters, becomes a Mixtral with 4 experts, 2 per token. All its weights are trained
on the three toy domains, 8 examples per step. Part "initial": upcycled by each method, then trained. Part "pipeline":
the recipe `mode: ffn` with each of its methods, all with the same passes over the same examples. One learning rate for
all. Runs whose results are in `--runs` are not repeated; `--part` runs one part only, so that two processes may share
the work.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from examples.toy.base import ensure_base
from examples.toy.domains import build, write_jsonl
from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.upit import UpIT, recipe_from_dict

from .differences import paired_difference
from .runs import finished, slug
from .toy_training import SFT as TOY_SFT
from .toy_training import loss_per_token

N, STEPS, RATE, WINDOW = 4, 240, 1e-3, 40
SFT = {**TOY_SFT, "learning_rate": RATE, "lr_scheduler_type": "constant", "logging_steps": 10}
INITIAL: dict[str, dict[str, Any]] = {
    "copy": {},
    "noise": {"init": "noise"},
    "random_noise": {"init": "random_noise"},
    **{f"drop, r = {r}": {"init": "drop", "drop_rate": r} for r in (0.1, 0.25, 0.5, 0.75, 1.0)},
}
ROUTER_INIT = {"router_init": {"seed_fraction": 0.05, "num_train_epochs": 2}}
PIPELINE: dict[str, dict[str, Any]] = {
    "SFT (dense)": {"method": "sft"},
    "Upcycle-PT": {"method": "upcycle_pt"},
    "Upcycle-SFT": {"method": "upcycle_sft"},
    "Self-MoE": {"method": "self_moe"},
    "UpIT, no router initialisation": {"router_init": {"buckets": "none"}},
    "UpIT": ROUTER_INIT,
    "UpIT, 2 → 4 experts": {**ROUTER_INIT, "prepare": {"num_experts": 2}},
}


def initial(base: Path, method: str, seed: int) -> dict[str, Any]:
    """Upcycle and train: the training loss by windows of steps, and the held-out loss before and after."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    train, test = (Dataset.from_list(rows) for rows in build(seed, 240, 60))
    with tempfile.TemporaryDirectory() as folder:
        config = UpcycleConfig(num_experts=N, top_k=2, seed=seed, **INITIAL[method])
        model = AutoModelForCausalLM.from_pretrained(upcycle(base, f"{folder}/moe", config))
        model.config.output_router_logits = True
        args = SFTConfig(output_dir=folder, **SFT, seed=seed, max_steps=STEPS, save_strategy="no")
        judge = SFTTrainer(model=model, args=args, train_dataset=test, processing_class=tokenizer)
        before = loss_per_token(judge, judge.train_dataset)
        trainer = SFTTrainer(model=model, args=args, train_dataset=train, processing_class=tokenizer)
        trainer.train()
        curve = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        return {"curve": curve, "before": before, "loss": loss_per_token(judge, judge.train_dataset)}


def pipeline(base: Path, method: str, seed: int) -> dict[str, Any]:
    """A recipe's run: its held-out loss."""
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in zip(("train", "test"), build(seed, 240, 60), strict=True):
            write_jsonl(Path(folder, f"{name}.jsonl"), rows)
        recipe = {
            "mode": "ffn", "output_dir": f"{folder}/out", "model": {"name_or_path": str(base)}, "seed": seed,
            "data": {"train": f"{folder}/train.jsonl", "eval": f"{folder}/test.jsonl", "label_column": "domain"},
            "num_experts": N, "num_train_epochs": 2, "sft": {**SFT, "save_steps": 10_000}, "moe": {"top_k": 2},
        }  # fmt: skip
        run = UpIT(recipe_from_dict({**recipe, **PIPELINE[method]}))
        run.run()
        return {"loss": run.records["evaluate"]["metrics"]["loss"]["adapted"]["mean"]}


def wanted(parts: list[str], seeds: list[int]) -> Iterator[tuple[str, str, int]]:
    for seed in seeds:
        for part, methods in (("initial", INITIAL), ("pipeline", PIPELINE)):
            if part in parts:
                yield from ((part, method, seed) for method in methods)


def difference(values: list[float], others: list[float]) -> str:
    return " | ".join(paired_difference(values, others).cells())


def report(runs: dict[tuple[str, str, int], dict[str, Any]], seeds: int, out: Path) -> None:
    def of(part: str, method: str) -> list[dict[str, Any]]:
        return [runs[part, method, seed] for seed in range(seeds)]

    def mean(rows: list[dict[str, Any]], key: str) -> float:
        return sum(row[key] for row in rows) / len(rows)

    windows = [f"{a + 1}–{a + WINDOW}" for a in range(0, STEPS, WINDOW)]
    lines = [
        "# Initial experts, and UpIT for whole FFNs",
        "",
        f"Made by `python -m benchmarks.upcycle_study`: a 1M-parameter Llama becomes a Mixtral of {N} experts, {seeds} "
        "seeds. Losses are means over seeds; differences are paired by seed, with 95 % intervals.",
        "",
        f"## Initial experts: training loss by steps (all weights, rate {RATE:g}), and held-out loss",
        "",
        f"| experts | {' | '.join(windows)} | held out, before | after | difference from copy | 95 % interval |",
        "|" + "---|" * (len(windows) + 5),
    ]
    copies = [row["loss"] for row in of("initial", "copy")]
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for i, method in enumerate(INITIAL):
        rows = of("initial", method)
        curve = torch.tensor([row["curve"] for row in rows]).mean(0)
        cells = [f"{value:.3f}" for value in curve.view(len(windows), -1).mean(1).tolist()]
        compared = " | " if method == "copy" else difference([row["loss"] for row in rows], copies)
        lines.append(
            f"| {method} | {' | '.join(cells)} | {mean(rows, 'before'):.3f} | {mean(rows, 'loss'):.4f} | {compared} |"
        )
        style = "-" if method.startswith("drop") else "--"
        axes.plot(range(10, STEPS + 1, 10), curve.tolist(), style, label=method, color=plt.cm.viridis(i / len(INITIAL)))
    axes.set(xlabel="training step", ylabel="training loss", title="Upcycled Mixtral of 4 experts, by initial experts")
    axes.legend()
    figure.savefig(out.with_suffix(".png"), dpi=110)
    lines += [
        "",
        "## UpIT for whole FFNs and its baselines: held-out loss, mean of the domains; 2 passes, 720 examples",
        "",
        "| method | held-out loss | difference from Upcycle-SFT | 95 % interval |",
        "|---|---|---|---|",
    ]
    others = [row["loss"] for row in of("pipeline", "Upcycle-SFT")]
    for method in PIPELINE:
        losses = [row["loss"] for row in of("pipeline", method)]
        compared = " | " if method == "Upcycle-SFT" else difference(losses, others)
        lines.append(f"| {method} | {sum(losses) / len(losses):.4f} | {compared} |")
    out.write_text("\n".join(lines) + "\n")
    print(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path(".cache/base"), help="the base model; trained if missing")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", choices=("initial", "pipeline"), help="run only this part; write no report")
    parser.add_argument("--runs", type=Path, default=Path(".cache/upcycle-study"), help="finished runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/upcycle_study.md"))
    args = parser.parse_args()
    base = ensure_base(args.base, 0)
    args.runs.mkdir(parents=True, exist_ok=True)
    runs = {}
    parts = [args.part] if args.part else ["initial", "pipeline"]
    for part, method, seed in wanted(parts, list(range(args.seeds))):
        run = partial(initial if part == "initial" else pipeline, base, method, seed)
        runs[part, method, seed] = finished(args.runs / f"{part}-{slug(method)}-{seed}.json", run)
    if args.part is None:
        report(runs, args.seeds, args.out)


if __name__ == "__main__":
    main()
