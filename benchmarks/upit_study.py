"""
UpIT against its baselines and its own variants, small: a 1M-parameter base, three domains, equal data for every method.

    python -m benchmarks.upit_study run --workers 2    # two hours on 2 cores; run it again to continue
    python -m benchmarks.upit_study report             # writes benchmarks/results/upit_study.md

Fixed before the first run:
- Every method sees the same stream of examples: 2 passes over 720 (240 per domain). Halves are trained like UpIT's
  stages 1 and 4: the first at a constant rate, the second at a rate that falls to zero. The examples of router
  initialisation (36 seed examples, 4 passes) are taken from the end of the second half.
- 5 seeds (data, order, initial values), with two replicates of the second half each (another order and other routers),
  averaged.
- Two orders of the first half: "iid", and "blocks", one domain after the other.
- Learning rates are tuned for each method on another seed (order iid): the best of 2e-3, 4e-3, 8e-3. (The rates of the
  methods with buckets were chosen while a bug, since fixed, left their second half without the balancing loss.)
- Outcome: held-out loss per answer token (60 examples per domain), the mean over domains.
- Primary contrasts: UpIT against LoRAMoE-SFT, against no router initialisation, against random buckets; averages over
  both orders, paired by seed, 95 % t intervals. Smallest difference of interest: 0.01.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging as transformers_logging
from trl import SFTConfig, SFTTrainer

from examples.toy.base import ensure_base
from examples.toy.domains import DOMAINS, build
from moe_peft import MoELoraConfig, lora_to_moe
from moe_peft.training.data import in_blocks
from moe_peft.training.scoring import example_losses
from moe_peft.upit import expand_experts, init_router, post_train, prepare_experts

from .runs import finished, read, slug
from .toy_training import SFT
from .upit_report import Plan, report

SEEDS, REPLICATES, ORDERS = (0, 1, 2, 3, 4), (0, 1), ("iid", "blocks")
TUNING_SEED, RATES = 100, (2e-3, 4e-3, 8e-3)
PER_DOMAIN, HELD_OUT, PASSES = 240, 60, 1  # passes of each half
SEED_EXAMPLES, SEED_PASSES = 36, 4
N, K, R = 8, 2, 8
FFN = ["gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Method:
    """How the result of the first half becomes the model of the second half."""

    first: str = "lora"  # what the first half trains: "lora", "lora_wide" or "moe"
    experts: str = "checkpoints"  # "checkpoints", "copies", "genetic" or "random" (4 → 8), or "" (keep the model)
    buckets: str | None = None
    objective: str = "positive"
    train_experts: bool = True
    shorter: bool = False  # whether the second half leaves out what router initialisation would train on
    rate: float | None = None  # fixed; None: tuned


UPIT = Method(buckets="perplexity")
METHODS = {
    "LoRA, rank r": Method(experts=""),
    "LoRA, rank k·r": Method("lora_wide", ""),
    "LoRAMoE-PT": Method("moe", ""),
    "LoRAMoE-SFT": Method(experts="copies"),
    "UpIT": UPIT,
    "UpIT 4→8, genetic": Method(experts="genetic", buckets="perplexity"),
    "UpIT 4→8, random pairs": Method(experts="random", buckets="perplexity"),
    "no router initialisation": Method(),
    "random buckets": Method(buckets="random"),
    "label buckets": Method(buckets="label"),
    "relative perplexity": Method(buckets="relative"),
    "routing vectors only": Method(buckets="perplexity", train_experts=False),
    "one-vs-rest": Method(buckets="perplexity", objective="one_vs_rest"),
    "softmax": Method(buckets="perplexity", objective="softmax"),
}
# Added after the other results were seen, to find the causes of two differences.
POST_HOC = {
    "no router initialisation, shorter": Method(shorter=True, rate=4e-3),
    "random buckets, UpIT's rate": Method(buckets="random", rate=4e-3),
}
SHORTER, SAME_RATE = POST_HOC
PLAN = Plan(
    domains=tuple(DOMAINS),
    seeds=SEEDS,
    orders=ORDERS,
    replicates=len(REPLICATES),
    methods=tuple(METHODS),
    added={name: method.rate for name, method in POST_HOC.items() if method.rate is not None},
    reference="LoRAMoE-SFT",
    subject="UpIT",
    primary=("LoRAMoE-SFT", "no router initialisation", "random buckets"),
    post_hoc=(("UpIT", SHORTER), (SHORTER, "no router initialisation"), ("UpIT", SAME_RATE)),
    interest=0.01,
)


class Experiment:
    """All runs of one seed and order; methods that begin alike share their first half."""

    def __init__(self, base: Path, seed: int, order: str, folder: Path) -> None:
        self.base, self.seed, self.order, self.folder = base, seed, order, folder
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        train, test = build(seed, PER_DOMAIN, HELD_OUT)
        self.train = self._tokenized(Dataset.from_list(train))
        self.test = self._tokenized(Dataset.from_list(test))

    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.base)

    def args(self, name: str, **own: Any) -> SFTConfig:
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="state-"))
        settings = {
            **SFT, "logging_steps": 1000, "save_steps": 100_000, "save_strategy": "no", "num_train_epochs": 1,
            "train_sampling_strategy": "sequential",
        }  # fmt: skip
        return SFTConfig(output_dir=str(folder / name), **{**settings, **own})

    def _tokenized(self, rows: Dataset) -> Dataset:
        trainer = SFTTrainer(
            model=self.model(), args=self.args("tokenize"), train_dataset=rows, processing_class=self.tokenizer
        )
        return trainer.train_dataset

    def stream(self, half: int, replicate: int = 0) -> Dataset:
        """A half's examples in order, the same for all methods."""
        if half == 0 and self.order == "blocks":
            return in_blocks(self.train, "domain", PASSES, self.seed)
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * half + replicate)
        passes = [torch.randperm(len(self.train), generator=generator) for _ in range(PASSES)]
        return self.train.select(torch.cat(passes).tolist())

    def first_half(self, kind: str, rate: float) -> Path:
        """Train the first half unless it is there already; returns its folder."""
        done = self.folder / f"{kind}-{rate:g}"
        if done.exists():
            return done
        unfinished = Path(tempfile.mkdtemp(dir=self.folder))
        args = self.args("first", learning_rate=rate, lr_scheduler_type="constant", seed=self.seed)
        if kind == "moe":
            set_seed(self.seed)
            config = MoELoraConfig(num_experts=N, top_k=K, r=R, lora_alpha=2 * R, task_type="CAUSAL_LM")
            model = get_peft_model(self.model(), config)
            post_train(model, self.stream(0), args, self.tokenizer, output_dir=unfinished / "experts" / "0")
        else:
            r = R if kind == "lora" else K * R
            config = LoraConfig(r=r, lora_alpha=2 * r, target_modules=FFN, task_type="CAUSAL_LM")
            prepare_experts(
                self.model(), self.stream(0), args, config, self.tokenizer, output_dir=unfinished, num_experts=N
            )
        unfinished.rename(done)
        return done

    def second_half(self, method: Method, rate: float, first_rate: float, replicate: int) -> dict[str, float]:
        """Train a method's second half and return its held-out losses."""
        first = self.first_half(method.first, first_rate)
        stream, seed = self.stream(1, replicate), 7000 + 10 * self.seed + replicate
        if method.experts == "":
            last = sorted((first / "experts").iterdir(), key=lambda path: int(path.name))[-1]
            model = PeftModel.from_pretrained(self.model(), last, is_trainable=True)
        else:
            set_seed(seed)
            model = lora_to_moe(self.model(), self.experts(method, first), task_type="CAUSAL_LM", top_k=K)
        if method.buckets is not None:
            generator = torch.Generator().manual_seed(seed)
            chosen = torch.randperm(len(self.train), generator=generator)[:SEED_EXAMPLES]
            init_router(
                model,
                self.train.select(chosen.tolist()),
                self.args(
                    "router",
                    learning_rate=rate,
                    lr_scheduler_type="constant",
                    seed=seed,
                    num_train_epochs=SEED_PASSES,
                    per_device_eval_batch_size=64,
                ),
                self.tokenizer,
                buckets=method.buckets,
                objective=method.objective,
                train_experts=method.train_experts,
                label_column="domain",
            )
        if method.buckets is not None or method.shorter:
            stream = stream.select(range(len(stream) - SEED_EXAMPLES * SEED_PASSES))
        args = self.args("second", learning_rate=rate, lr_scheduler_type="linear", seed=seed)
        post_train(model, stream, args, self.tokenizer, output_dir=Path(args.output_dir) / "adapter")
        return self.losses(model)

    def run(self, name: str, method: Method, rates: dict[str, float], replicate: int) -> dict[str, Any]:
        """A run's record: what it was, and its held-out losses."""
        rate = method.rate or rates[name]
        losses = self.second_half(method, rate, first_rate(method, rate, rates), replicate)
        return {"order": self.order, "seed": self.seed, "method": name, "replicate": replicate, "loss": losses}

    def experts(self, method: Method, first: Path) -> list[Path]:
        folders = [first / "experts" / str(i) for i in range(N)]
        if method.experts == "copies":
            return [folders[-1]] * N
        if method.experts == "checkpoints":
            return folders
        output = Path(tempfile.mkdtemp(dir=self.folder))
        parents = folders[1::2]
        return expand_experts(parents, output_dir=output, num_experts=N, method=method.experts, seed=self.seed)[0]

    def losses(self, model: PeftModel) -> dict[str, float]:
        trainer = SFTTrainer(
            model=model, args=self.args("test"), train_dataset=self.test, processing_class=self.tokenizer
        )
        losses_S1, counts_S = example_losses(trainer.model, self.test, trainer.data_collator, rows=20)
        labels = self.test["domain"]
        found = {}
        for domain in DOMAINS:
            own = torch.tensor([label == domain for label in labels])
            found[domain] = float(losses_S1[own].sum() / counts_S[own].sum())
        return {**found, "mean": sum(found.values()) / len(found)}


# --- running ----------------------------------------------------------------------------------------------------------


def work(out: Path, base: Path, worker: int, workers: int) -> None:
    """One worker's share of the runs."""
    torch.set_num_threads(1)
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("moe_peft").setLevel(logging.ERROR)
    results = out / "results"
    results.mkdir(parents=True, exist_ok=True)
    rates = tune(out, base, worker, workers)
    pairs = [(order, seed, methods) for methods in (METHODS, POST_HOC) for seed in SEEDS for order in ORDERS]
    for order, seed, methods in pairs[worker::workers]:
        jobs = {
            results / f"{order}-{seed}-{slug(name)}-{replicate}.json": (name, replicate)
            for replicate in REPLICATES
            for name in methods
        }
        if all(path.exists() for path in jobs):
            continue
        with tempfile.TemporaryDirectory() as folder:
            experiment = Experiment(base, seed, order, Path(folder))
            for path, (name, replicate) in jobs.items():
                finished(path, partial(experiment.run, name, methods[name], rates, replicate))


def first_rate(method: Method, rate: float, rates: dict[str, float]) -> float:
    """The first half's rate: the method's own, or that of the LoRA whose checkpoints it takes."""
    return rate if method.experts == "" else rates["LoRA, rank r"]


def tune(out: Path, base: Path, worker: int, workers: int) -> dict[str, float]:
    """Each method's best rate on the tuning seed. LoRA comes first: other methods begin with its checkpoints."""
    folder = out / "tuning"
    folder.mkdir(parents=True, exist_ok=True)
    own_first = [name for name in METHODS if METHODS[name].experts == ""]

    def path(name: str, rate: float) -> Path:
        return folder / f"{slug(name)}-{rate:g}.json"

    with tempfile.TemporaryDirectory() as temporary:

        @cache
        def experiment() -> Experiment:
            return Experiment(base, TUNING_SEED, "iid", Path(temporary))

        def run(name: str, rate: float) -> dict[str, Any]:
            losses = experiment().second_half(METHODS[name], rate, first_rate(METHODS[name], rate, best), 0)
            return {"method": name, "rate": rate, "loss": losses}

        best: dict[str, float] = {}
        for group in (own_first, [name for name in METHODS if name not in own_first]):
            jobs = [(name, rate) for name in group for rate in RATES]
            for name, rate in jobs[worker::workers]:
                finished(path(name, rate), partial(run, name, rate))
            while not all(path(*job).exists() for job in jobs):
                time.sleep(2)  # another worker makes it
            for name in group:
                best[name] = min(RATES, key=lambda rate: read(path(name, rate))["loss"]["mean"])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--out", type=Path, default=Path(".cache/upit-study"))
    parser.add_argument("--base", type=Path, default=Path(".cache/base"), help="the base model; trained if missing")
    parser.add_argument("--table", type=Path, default=Path("benchmarks/results/upit_study.md"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.command == "report":
        report(PLAN, args.out, args.table)
    elif args.worker is not None:
        work(args.out, args.base, args.worker, args.workers)
    else:
        ensure_base(args.base, 0)
        command = [sys.executable, "-m", "benchmarks.upit_study", "run", "--workers", str(args.workers)]
        command += ["--out", str(args.out), "--base", str(args.base), "--worker"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([*command, str(i)], env=environment) for i in range(args.workers)]
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit(f"a worker failed: {codes}")
        report(PLAN, args.out, args.table)


if __name__ == "__main__":
    main()
