"""
When does UpIT pay, and which parts of it? UpIT, its baselines and its variants on ten learnable tasks.

    python -m benchmarks.upit_study run --workers 2    # hours on 2 cores; run it again to continue
    python -m benchmarks.upit_study report             # writes the table and the figure below benchmarks/results

Finished runs are lines of `benchmarks/results/upit_study_1M.jsonl`; a run that is there is not done again.

Fixed before the first run:
- Data: ten rules on sequences of digits (`examples/toy/tasks.py`), one pass. Every method sees the same 48,000 rows
  in the same order, 3,000 steps of 16. Stage 1 has the first half, stage 4 the second; the examples of stage 3
  (240 seeds, 4 passes: 2 %) are taken from the end of stage 4. Methods without stages train once over both halves.
- Bases of 1M and (`--size 5M`: four methods, order iid) 5M parameters; they have read inputs and outputs of the rules
  under other names, but no instructions.
- Rates are constant, as in the paper. Each method of the main table has its own: the best on the tuning seed, by the
  held-out loss at the end, of its size's `rates` and of as many further doublings or halvings as it takes for the best
  to have worse ones on both sides. Parts left out, variants and curves have the rate of the method that they vary, and
  stage 1, a LoRA of rank r, has that of the LoRA of rank k·r.
- Held out: 500 rows, 50 a task, sequences that no training row has. Outcomes: loss per answer token and exact matches
  (every token of the answer is the most probable one), means over tasks, and over the last three measurements (at 90,
  95 and 100 % of stage 4), because a constant rate leaves the loss jumping.
- 4 seeds (data, order, initial values), two orders of the first half: "iid", and "blocks", one task after the other.
- Primary contrasts, paired by seed, 95 % t intervals: UpIT against LoRAMoE-SFT, LoRAMoE-PT, LoRA of rank k·r, PESC, no
  router initialisation, random buckets, and, in the order iid, 4 → 8 experts by genetic against random pairs and
  against 8 checkpoints.
- Curves, order iid, two seeds, later four: share of the data, experts, active experts, for UpIT and LoRAMoE-SFT. Later,
  share of the data for LoRAMoE-PT and LoRA of rank k·r, too.
- Beyond the paper (`IDEAS`), order iid: compared on two more tuning seeds, the best confirmed on the table's seeds.

Another machine trains another base, because it rounds otherwise. So a base is kept beside its results. The main table
of 1M is older than that one: curves and ideas have runs of the unvaried methods of their own. `LATER` repeats UpIT
after stage 3's losses became means over tokens, and adds expansion in the order blocks.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets, disable_progress_bars
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging
from trl import SFTConfig, SFTTrainer

from examples.toy.base import ensure_base, take
from examples.toy.tasks import build, documents
from moe_peft import MoELoraConfig, lora_to_moe
from moe_peft.training.data import in_blocks
from moe_peft.training.tokenizing import tokenized
from moe_peft.upit import expand_experts, init_router, post_train, prepare_experts
from moe_peft.upit.buckets import draw_seeds

from .exact_match import measure
from .rates import best_rate, tune
from .runs import Ledger, start_workers
from .upit_methods import (
    CONFIRMED,
    CURVES,
    EVERY,
    EXPANDED,
    FIRST_STAGE,
    IDEAS,
    LATER,
    MAIN,
    SEEDS,
    SIZES,
    TUNING_SEED,
    UNVARIED,
    UPIT,
    K,
    Method,
    N,
    R,
)  # fmt: skip

ROWS, HELD_OUT, BATCH = 48_000, 500, 16
SEED_EXAMPLES, SEED_PASSES = 240, 4
FFN = ["gate_proj", "up_proj", "down_proj"]
POINTS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 1.0)  # of stage 4, where held-out rows are measured
# Shorter than the base's own: rows of some 30 tokens.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}\n{% else %}"
    "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


class Curve(TrainerCallback):
    """Measures held-out rows after some steps of a training."""

    def __init__(self, experiment: Experiment, steps: dict[int, float]) -> None:
        self.experiment, self.steps, self.points = experiment, steps, []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._measure(state.global_step, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._measure(state.global_step, model)

    def _measure(self, step: int, model: Any) -> None:
        if step in self.steps:
            self.points.append({"share": self.steps[step], **self.experiment.measure(model)})


class Experiment:
    """All runs of one seed and order; methods that begin alike share their first half."""

    def __init__(self, base: Path, seed: int, order: str, folder: Path) -> None:
        self.base, self.seed, self.order, self.folder = base, seed, order, folder
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.tokenizer.chat_template = TEMPLATE

    @cached_property
    def data(self) -> tuple[Dataset, Any, Dataset]:
        """Tokenized training rows, a collator, and held-out rows."""
        train, test = (Dataset.from_list(rows) for rows in build(self.seed, ROWS, HELD_OUT))
        rows, collator = tokenized(train, self.tokenizer, self.args("tokenize"))
        return rows, collator, tokenized(test, self.tokenizer, self.args("tokenize"))[0]

    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)

    def args(self, name: str, **own: Any) -> SFTConfig:
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="state-"))
        settings = {
            "per_device_train_batch_size": BATCH, "assistant_only_loss": True, "max_length": 128, "bf16": False,
            "use_cpu": True, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
            "lr_scheduler_type": "constant", "logging_steps": 1000, "save_steps": 100_000, "save_strategy": "no",
            "num_train_epochs": 1, "train_sampling_strategy": "sequential", "seed": self.seed,
        }  # fmt: skip
        return SFTConfig(output_dir=str(folder / name), **{**settings, **own})

    def half(self, number: int, share: float) -> Dataset:
        """A half's rows in order, the same for all methods."""
        count, rows = round(share * ROWS / 2), self.data[0]
        part = rows.select(range(number * (ROWS // 2), number * (ROWS // 2) + count))
        return in_blocks(part, "domain", 1, self.seed) if number == 0 and self.order == "blocks" else part

    def measure(self, model: Any) -> dict[str, Any]:
        return measure(model, self.data[2], self.data[1])

    def checkpoints(self, rate: float, method: Method) -> list[Path]:
        """16 checkpoints of plain LoRA, from the second half of stage 1; trained unless they are there already."""
        done = self.folder / f"lora-{rate:g}-{method.share:g}-{method.schedule}"
        if not done.exists():
            unfinished = Path(tempfile.mkdtemp(dir=self.folder))
            cycles = {"lr_scheduler_kwargs": {"num_cycles": 2 * N}} if method.schedule != "constant" else {}
            args = self.args("first", learning_rate=rate, lr_scheduler_type=method.schedule, **cycles)
            lora = LoraConfig(r=R, lora_alpha=2 * R, target_modules=FFN, task_type="CAUSAL_LM")
            prepare_experts(
                self.model(), self.half(0, method.share), args, lora, self.tokenizer, output_dir=unfinished,
                num_experts=2 * N,
            )  # fmt: skip
            unfinished.rename(done)
        return [done / "experts" / str(i) for i in range(2 * N)]

    def experts(self, method: Method, rate: float) -> list[Path]:
        folders, n = self.checkpoints(rate, method), method.num_experts
        if method.experts == "copies":
            return [folders[-1]] * n
        taken = n if method.experts == "checkpoints" else n // 2
        chosen = [folders[round(len(folders) * (i + 1) / taken) - 1] for i in range(taken)]
        if taken == n:
            return chosen
        output = Path(tempfile.mkdtemp(dir=self.folder))
        return expand_experts(chosen, output_dir=output, num_experts=n, method=method.experts, seed=self.seed)[0]

    def run(self, method: Method, rate: float, first_rate: float) -> list[dict[str, Any]]:
        """Train a method and return its held-out results along stage 4."""
        set_seed(self.seed)
        if method.whole is not None:
            model = get_peft_model(self.model(), self.whole_config(method))
            stream = concatenate_datasets([self.half(0, method.share), self.half(1, method.share)])
            before = len(self.half(0, method.share)) // BATCH
        else:
            experts, stream, before = self.experts(method, first_rate), self.half(1, method.share), 0
            set_seed(self.seed)
            model = lora_to_moe(self.model(), experts, task_type="CAUSAL_LM", top_k=method.top_k)
        if method.buckets is not None:
            taken = self.init_router(model, method, rate)
            stream = stream.select(range(len(stream) - taken))
        steps = len(stream) // BATCH - before
        curve = Curve(self, {before + round(point * steps): point for point in POINTS})
        args = self.args("second", learning_rate=rate, max_steps=before + steps)
        if method.whole == "lora":
            SFTTrainer(model, args, train_dataset=stream, processing_class=self.tokenizer, callbacks=[curve]).train()
        else:
            folder = Path(args.output_dir) / "adapter"
            post_train(model, stream, args, self.tokenizer, output_dir=folder, callbacks=[curve])
        return curve.points

    def whole_config(self, method: Method) -> Any:
        if method.whole == "lora":
            return LoraConfig(r=K * R, lora_alpha=2 * K * R, target_modules=FFN, task_type="CAUSAL_LM")
        own: dict[str, Any] = {"r": R, "lora_alpha": 2 * R}
        if method.whole == "pesc":
            config = self.model().config  # as many parameters as an expert of three LoRAs has
            width = config.hidden_size + config.intermediate_size
            own = {"expert_type": "bottleneck", "bottleneck_size": round(3 * R * width / (2 * config.hidden_size))}
        return MoELoraConfig(num_experts=method.num_experts, top_k=method.top_k, task_type="CAUSAL_LM", **own)

    def init_router(self, model: Any, method: Method, rate: float) -> int:
        """Stage 3; returns how many rows it took from stage 4."""
        count = round(method.share * SEED_EXAMPLES)
        rows = concatenate_datasets([self.half(0, method.share), self.half(1, method.share)])
        args = self.args("router", learning_rate=rate, num_train_epochs=SEED_PASSES, per_device_eval_batch_size=8 * N)
        init_router(
            model, draw_seeds(rows, count, self.seed), args, self.tokenizer, buckets=str(method.buckets),
            objective=method.objective, train_experts=method.train_experts, label_column="domain",
        )  # fmt: skip
        return count * SEED_PASSES


# --- running ----------------------------------------------------------------------------------------------------------


def at_end(record: dict[str, Any], outcome: str, task: str | None = None) -> float:
    """A run's outcome, "loss" or "exact", of a task or of all: the mean over its last three measurements."""
    last = record["points"][-3:]
    place = ("loss", "exact").index(outcome)
    return sum(point[outcome] if task is None else point["tasks"][task][place] for point in last) / len(last)


def jobs(size: str) -> list[tuple[str, int, dict[str, Method]]]:
    """Order, seed and methods of each group of runs that share first halves; the most important ones first."""
    own = {name: MAIN[name] for name in SIZES[size].methods}
    once = {name: method for name, method in own.items() if name not in EXPANDED}
    main = [(order, seed, own if order == "iid" else once) for order in SIZES[size].orders for seed in SEEDS]
    if not SIZES[size].variants:
        return main
    ideas = [("iid", TUNING_SEED + i, {"UpIT": UPIT, **IDEAS}) for i in (1, 2)]
    best = [("iid", seed, {name: EVERY[name] for name in (UNVARIED, CONFIRMED)}) for seed in SEEDS]
    later = [(order, seed, methods) for order, methods in LATER.items() for seed in SEEDS]
    curves = [("iid", seed, CURVES) for seed in SEEDS]
    return main + ideas + best + later + curves


def work(base: Path, size: str, ledger: Ledger, worker: int, workers: int) -> None:
    """One worker's share of the runs."""
    torch.set_num_threads(1)
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("moe_peft").setLevel(logging.ERROR)
    rates = best_rates(base, size, ledger, worker, workers)
    for order, seed, methods in jobs(size)[worker::workers]:
        wanted = {
            name: method for name, method in methods.items() if not ledger.has(order=order, seed=seed, method=name)
        }
        if wanted:
            with tempfile.TemporaryDirectory() as folder:
                experiment = Experiment(base, seed, order, Path(folder))
                for name, method in wanted.items():
                    rate = rates[method.tuned_as or name]
                    run(experiment, ledger, name, rate, rates[FIRST_STAGE])


def run(experiment: Experiment, ledger: Ledger, name: str, rate: float, first_rate: float) -> None:
    start = time.perf_counter()
    points = experiment.run(EVERY[name], rate, first_rate)
    ledger.add(
        {"order": experiment.order, "seed": experiment.seed, "method": name, "rate": rate, "points": points},
        f"{time.perf_counter() - start:.0f} s, loss {points[-1]['loss']:.4f}, exact matches {points[-1]['exact']:.3f}",
    )


def best_rates(base: Path, size: str, ledger: Ledger, worker: int, workers: int) -> dict[str, float]:
    """Each method's best rate on the tuning seed. Methods without stages come first: LoRA's rate is stage 1's."""
    own = [name for name in SIZES[size].methods if MAIN[name].tuned_as is None]
    whole = [name for name in own if MAIN[name].whole is not None]
    staged = [name for name in own if name not in whole]
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(base, TUNING_SEED, "iid", Path(folder))

        def attempt(name: str, rate: float) -> None:
            first_rate = rate if name in whole else best_rate(tuned(ledger, FIRST_STAGE))
            run(experiment, ledger, name, rate, first_rate)

        for group in (whole, staged):
            rates |= tune(group, partial(tuned, ledger), lambda _: SIZES[size].rates, attempt, worker, workers)
    return rates


def tuned(ledger: Ledger, method: str) -> dict[float, float]:
    """Rate → loss of a method on the tuning seed."""
    found = [r for r in ledger.records() if r["seed"] == TUNING_SEED and r["method"] == method]
    return {record["rate"]: at_end(record, "loss") for record in found}


def make_base(path: Path, size: str) -> Path:
    more = list(take(documents(Random(0)), 3_000_000))
    own = SIZES[size]
    return ensure_base(
        path, 0, own.hidden, own.layers, 512, chars=600_000, more=more, dtype=own.dtype, learning_rate=own.learning_rate
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--size", choices=SIZES, default="1M", help="parameters of the base model")
    parser.add_argument(
        "--base", type=Path, help="default: upit_study_SIZE_base beside the results; trained if missing"
    )
    parser.add_argument("--results", type=Path, help="finished runs; default: benchmarks/results/upit_study_SIZE.jsonl")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    results = args.results or Path(f"benchmarks/results/upit_study_{args.size}.jsonl")
    base = args.base or results.with_name(f"{results.stem}_base")
    if args.command == "report":
        from .upit_report import report

        report(Ledger(results), results.with_suffix(".md"), args.size)
    elif args.worker is not None:
        work(base, args.size, Ledger(results), args.worker, args.workers)
    else:
        make_base(base, args.size)
        shared = ["--size", args.size, "--results", str(results), "--base", str(base)]
        sys.exit(start_workers("upit_study", shared, args.workers))


if __name__ == "__main__":
    main()
