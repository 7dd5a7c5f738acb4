"""
When does Drop-Upcycling overtake copies? Continued pre-training of a Mixtral of 8 experts, by their initial values.

    python -m benchmarks.upcycle_study run --workers 2    # hours on 2 cores; run it again to continue
    python -m benchmarks.upcycle_study report             # writes the table and the figure below benchmarks/results

Finished runs are lines of `benchmarks/results/upcycle_study.jsonl`; a run that is there is not done again.

Fixed before the first run, after the paper (arXiv 2502.19261) where it says something:
- The toy base, a dense model of 1M parameters that has read 1.8M tokens, becomes a Mixtral with 8 experts, 2 per token,
  by `copy`, `drop` (r = 0.5), from scratch, or from two dense models (`checkpoints`: Branch-Train-MiX), which were
  trained for 1,000 steps more, one on code and one on the rest; these steps are extra.
- Then 4,000 steps of 4 rows of 256 tokens: 4.1M tokens, all weights. AdamW, weight decay 0.1, 2 % warm-up, cosine to a
  tenth of the rate. Gates are U(−0.0346, 0.0346), from scratch normal as all weights. The balancing loss has the
  coefficient 0.02.
- Each method's rate is the best on a tuning seed, of its `RATES` and of as many further doublings or halvings as it
  takes for the best to have worse ones on both sides.
- Outcome: loss on 25,000 held-out tokens, in the course of training; 3 seeds (order, new values), paired.
- The base is kept beside its results: another machine would train another one, because it rounds otherwise.
- Primary contrasts, at the end: `drop` minus `copy` and minus `scratch`, `checkpoints` minus `copy`; and the first step
  from which the mean curve of `drop` stays below that of `copy`.

A first series of these runs (`report --results benchmarks/results/upcycle_study_normal_gates.jsonl`) had gates
N(0, 0.02²) and two rates only, the lower of which was mostly the best. `drop` and `copy` ended level, and `checkpoints`
0.035 below. The third contrast was added after it, and `random_noise`, which had ended level with `copy`, left out.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from examples.toy.base import corpus, ensure_base, running_text, sums, take
from examples.toy.domains import is_held_out, package, stdlib_modules
from moe_peft.contexts import evaluating
from moe_peft.native import UpcycleConfig, upcycle

from .differences import paired_difference
from .rates import best_rate, tune
from .runs import Ledger, start_workers

N, K, STEPS, ROWS, BRANCH_STEPS = 8, 2, 4000, 4, 1000
SEEDS, TUNING_SEED = (0, 1, 2), 100
RATES = {"copy": (5e-4, 1e-3), "drop": (5e-4, 1e-3), "scratch": (1e-3, 2e-3), "checkpoints": (5e-4, 1e-3)}
INITIAL: dict[str, dict[str, Any]] = {
    "copy": {},
    "drop": {"init": "drop", "drop_rate": 0.5},
    "scratch": {},
    "checkpoints": {"init": "checkpoints"},
}
POINTS = sorted({0, *(round(STEPS * 2 ** (-i / 2)) for i in range(16)), *range(0, STEPS + 1, STEPS // 10)})
CHARS = 11_000_000
RESULTS = Path("benchmarks/results/upcycle_study.jsonl")
PRIMARY = (("drop", "copy"), ("drop", "scratch"), ("checkpoints", "copy"))


class Curve(TrainerCallback):
    """Measures held-out text after some steps."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.points = rows, []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step in POINTS:
            with evaluating(model), torch.no_grad():
                losses = [_loss(model, part) for part in self.rows.split(20)]
            self.points.append({"step": state.global_step, "loss": sum(losses) / len(losses)})


def _loss(model: Any, ids: torch.Tensor) -> float:
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()))


class Experiment:
    """All runs of one seed."""

    def __init__(self, base: Path, seed: int, folder: Path) -> None:
        self.base, self.seed, self.folder = base, seed, folder
        self.tokenizer = AutoTokenizer.from_pretrained(base)

    def rows(self, documents: Sequence[str], count: int) -> torch.Tensor:
        """Running text as rows of token ids, [at most count, 256]."""
        return torch.tensor(running_text(documents, self.tokenizer)[:count])

    @cached_property
    def train_rows(self) -> torch.Tensor:
        """Another shuffle of the text that the base has read, and more; from the start again where it ends."""
        rows = self.rows(corpus(random.Random(1000 + self.seed), CHARS), STEPS * ROWS)
        return rows.repeat(-(-STEPS * ROWS // len(rows)), 1)[: STEPS * ROWS]

    @cached_property
    def test_rows(self) -> torch.Tensor:
        code = [text for path, text in stdlib_modules().items() if is_held_out(package(path))]
        random.Random(0).shuffle(code)
        return torch.cat([self.rows(code, 80), self.rows(list(take(sums(random.Random(-1)), 20_000)), 20)])

    def train(self, model: Any, rows: torch.Tensor, steps: int, rate: float, seed: int) -> list[dict[str, Any]]:
        args = TrainingArguments(
            output_dir=str(self.folder / "state"), max_steps=steps, per_device_train_batch_size=ROWS,
            learning_rate=rate, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1},
            warmup_steps=0.02, weight_decay=0.1, save_strategy="no", report_to="none", use_cpu=True, seed=seed,
            disable_tqdm=True, logging_steps=1000, train_sampling_strategy="sequential",
        )  # fmt: skip
        curve, ids = Curve(self.test_rows), rows.tolist()
        data = Dataset.from_dict({"input_ids": ids, "labels": ids})
        Trainer(model, args, default_data_collator, data, callbacks=[curve]).train()
        return curve.points

    @cached_property
    def branches(self) -> list[Path]:
        """The base trained further on code, and on the rest."""
        folders = []
        code = corpus(random.Random(2000 + self.seed), CHARS)
        for name, documents in (
            ("code", [text for text in code if "def " in text or "import " in text]),
            ("rest", [text for text in code if "def " not in text and "import " not in text]),
        ):
            model, rows = AutoModelForCausalLM.from_pretrained(self.base), self.rows(documents, BRANCH_STEPS * ROWS)
            self.train(model, rows.repeat(-(-BRANCH_STEPS * ROWS // len(rows)), 1), BRANCH_STEPS, 1e-3, self.seed)
            model.save_pretrained(self.folder / name)
            self.tokenizer.save_pretrained(self.folder / name)
            folders.append(self.folder / name)
        return folders

    def run(self, method: str, rate: float) -> list[dict[str, Any]]:
        """Upcycle and train; the held-out loss along the way."""
        sources = self.branches if method == "checkpoints" else self.base
        settings = {"seed": self.seed, "router_init": "uniform", "router_aux_loss_coef": 0.02, **INITIAL[method]}
        config = UpcycleConfig(num_experts=N, top_k=K, **settings)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            model = AutoModelForCausalLM.from_pretrained(upcycle(sources, f"{folder}/moe", config))
        if method == "scratch":
            set_seed(self.seed)
            model.config.initializer_range = AutoModelForCausalLM.from_pretrained(self.base).config.initializer_range
            model = type(model)(model.config)
        model.config.output_router_logits = True
        return self.train(model, self.train_rows, STEPS, rate, self.seed)


# --- running ----------------------------------------------------------------------------------------------------------


def work(base: Path, ledger: Ledger, worker: int, workers: int) -> None:
    """One worker's share of the runs: tuning first, then the seeds."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    attempt = partial(do, base, ledger, TUNING_SEED)
    rates = tune(list(INITIAL), partial(tuned, ledger), RATES.__getitem__, attempt, worker, workers)
    for seed, method in list(product(SEEDS, INITIAL))[worker::workers]:
        if not ledger.has(seed=seed, method=method, rate=rates[method]):
            do(base, ledger, seed, method, rates[method])


def do(base: Path, ledger: Ledger, seed: int, method: str, rate: float) -> None:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        points = Experiment(base, seed, Path(folder)).run(method, rate)
    record = {"seed": seed, "method": method, "rate": rate, "points": points}
    ledger.add(record, f"{time.perf_counter() - start:.0f} s, loss {points[-1]['loss']:.4f}")


def _losses(ledger: Ledger, seed: int, method: str, rate: float) -> list[float]:
    return [point["loss"] for point in ledger.find(seed=seed, method=method, rate=rate)["points"]]


def tuned(ledger: Ledger, method: str) -> dict[float, float]:
    """Rate → loss at the end of a method on the tuning seed."""
    found = [r for r in ledger.records() if (r["seed"], r["method"]) == (TUNING_SEED, method)]
    return {record["rate"]: record["points"][-1]["loss"] for record in found}


# --- report -----------------------------------------------------------------------------------------------------------


def report(ledger: Ledger, table: Path) -> None:
    """Write and print the table; the figure goes beside it."""
    methods = dict.fromkeys(record["method"] for record in ledger.records())
    rates = {method: best_rate(tuned(ledger, method)) for method in methods}
    curves = {method: [_losses(ledger, seed, method, rates[method]) for seed in SEEDS] for method in methods}
    means = {method: torch.tensor(of).mean(0).tolist() for method, of in curves.items()}
    steps = [POINTS.index(step) for step in range(0, STEPS + 1, STEPS // 10)]
    lines = [
        "# When does Drop-Upcycling overtake copies?", "",
        "Made by `python -m benchmarks.upcycle_study run --workers 2` and `… report`. The script's head says what was",
        f"fixed before the first run. Held-out loss, mean of {len(SEEDS)} seeds, lower is better.", "",
        f"| experts | rate | {' | '.join(f'step {POINTS[i]}' for i in steps)} |", f"|---|---|{'---|' * len(steps)}",
    ]  # fmt: skip
    for method, of in means.items():
        lines.append(f"| {method} | {rates[method]:g} | {' | '.join(f'{of[i]:.3f}' for i in steps)} |")
    lines += ["", "| contrast, at the end | difference, 95 % interval |", "|---|---|"]
    for method, other in PRIMARY:
        ends = [[curve[-1] for curve in curves[name]] for name in (method, other)]
        lines.append(f"| {method} minus {other} | {' '.join(paired_difference(*ends).cells())} |")
    behind = [i for i in range(len(POINTS)) if means["drop"][i] >= means["copy"][i]]
    crossing = "never" if behind[-1:] == [len(POINTS) - 1] else f"from step {POINTS[max(behind, default=-1) + 1]} on"
    lines += ["", f"The mean curve of `drop` stays below that of `copy`: {crossing}."]
    table.write_text("\n".join(lines) + "\n")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for method, of in means.items():
        axes.plot(POINTS[1:], of[1:], label=method)
    axes.set(xlabel="step", ylabel="held-out loss", xscale="log", title=f"A Mixtral of {N} experts, by initial values")
    axes.legend()
    figure.savefig(table.with_suffix(".png"), dpi=110)
    plt.close(figure)
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--base", type=Path, help="default: upcycle_study_base beside the results; trained if missing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the finished runs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    base = args.base or args.results.with_name(f"{args.results.stem}_base")
    if args.command == "report":
        report(Ledger(args.results), args.results.with_suffix(".md"))
    elif args.worker is not None:
        work(base, Ledger(args.results), args.worker, args.workers)
    else:
        ensure_base(base, 0)
        shared = ["--results", str(args.results), "--base", str(base)]
        sys.exit(start_workers("upcycle_study", shared, args.workers))


if __name__ == "__main__":
    main()
