"""
Few large experts or many small ones? Shapes of equal parameters and equal scale on SmolLM2-135M-Instruct, beside LoRA.

    python -m studies.short_tasks --source FOLDER --output .cache/short_tasks
    python -m studies.granularity run       # resumes where the ledger ends; a run takes about three minutes of a core
    python -m studies.granularity report    # the tables of the ledger, in studies/results

With gates that sum to 1, each of k experts counts 1/k: at equal alpha/r a mixture's update is k times smaller than that
of a LoRA of rank k·r. Here all have equal scale: alpha = s·k·r with s = 2, which is 32 for every shape r/n/k of n
experts of rank r, k of them active, with k·r = 16 and n·r = 64; and alpha = 2·rank for LoRA.

Fixed before the first run: the four tasks of the six that the model can do; one pass in steps of 8 rows, with a rate
that decays linearly to 0; methods, contrasts, predictions and rules. A seed draws the rows, too: seed s trains on all
rows but every fourth of each task, from s on (562 or so, 70 steps). A method's rate is the best on seed 3, *scored on
the training rows that this seed leaves out*, with worse ones on both sides, so the held-out rows choose nothing. The
balancing loss has coefficient 0.02/k (it sums to k, so this is equal pressure, and the default at k = 2).

The held-out loss per answer token, mean of the tasks, decides, paired over three seeds, with 95 % t intervals; beside
it stands the interval over held-out rows (of the seeds' mean). Of eleven contrasts, two in five such studies would show
one without zero where there is no difference at all. A prediction is the range where the mean is expected. Rules:

- the default's scale becomes s·k·r, unless its interval says that this is worse;
- the default's shape changes if a shape's difference from 8/8/2 is at most -0.01 and its interval excludes 0;
- the low-rank router stays if its interval excludes 0 in its favor; otherwise its code goes.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from moe_peft.routing.routers import ROUTERS, Router
from moe_peft.training.preparation import preparation, tokenized
from moe_peft.utils.io import hash_file

from .differences import Difference, paired_difference
from .exact_match import answers, by_task
from .rates import best_rate, next_rate
from .runs import Ledger, arguments, parser, score_answers_only

RESULTS = Path(__file__).parent / "results"
TASKS = ("banking", "kitchen", "logic", "slots")
SEEDS, TUNING_SEED, PARTS = (0, 1, 2), 3, 4
FIRST_RATES = (4e-3, 2e-3)
SCALE = 2


class Method(NamedTuple):
    """
    Args:
        label: in tables.
        r: the rank of an expert, or of the LoRA.
        num_experts: None: a plain LoRA.
        alpha: None: that of equal scale.
    """

    label: str
    r: int
    num_experts: int | None = None
    top_k: int = 1
    mixing: str = "projection"
    router_type: str = "linear"
    alpha: float | None = None

    def config(self) -> LoraConfig | MoELoraConfig:
        """The adapter's."""
        alpha = self.alpha or SCALE * self.top_k * self.r
        if self.num_experts is None:
            targets = ["gate_proj", "up_proj", "down_proj"]
            return LoraConfig(r=self.r, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
        return MoELoraConfig(
            r=self.r, lora_alpha=alpha, num_experts=self.num_experts, top_k=self.top_k, mixing=self.mixing,
            router_type=self.router_type, router_aux_loss_coef=0.02 / self.top_k, task_type="CAUSAL_LM",
        )  # fmt: skip


METHODS = {
    "8/8/2": Method("8/8/2", 8, 8, 2),
    "4/16/4": Method("4/16/4", 4, 16, 4),
    "2/32/8": Method("2/32/8", 2, 32, 8),
    "1/64/16": Method("1/64/16", 1, 64, 16),
    "unscaled": Method("8/8/2, alpha/r = 2 (the default before this study)", 8, 8, 2, alpha=16),
    "lora_kr": Method("LoRA, rank k·r", 16),
    "lora_nr": Method("LoRA, rank n·r", 64),
    "8/8/2 output": Method("8/8/2, output mixing", 8, 8, 2, "output"),
    "4/16/4 output": Method("4/16/4, output mixing", 4, 16, 4, "output"),
    "1/64/16 low_rank": Method("1/64/16, router d → 16 → n", 1, 64, 16, router_type="low_rank"),
}
# In the order in which their runs are made: the first contrasts are there first.
PHASES = (
    ("8/8/2", "1/64/16", "unscaled", "lora_kr", "4/16/4"),
    ("lora_nr", "2/32/8"),
    ("8/8/2 output", "4/16/4 output", "1/64/16 low_rank"),
)
# Contrast → the range in which its mean is expected.
CONTRASTS = {
    ("8/8/2", "unscaled"): (-0.02, 0.01),  # Adam's rate makes up for a factor of 2
    ("4/16/4", "8/8/2"): (-0.02, 0.0),  # with equal scale little is left to shape
    ("2/32/8", "8/8/2"): (-0.03, 0.0),
    ("1/64/16", "8/8/2"): (-0.03, 0.0),
    ("8/8/2", "lora_kr"): (-0.04, 0.0),
    ("1/64/16", "lora_kr"): (-0.05, -0.01),
    ("8/8/2", "lora_nr"): (-0.03, 0.01),
    ("1/64/16", "lora_nr"): (-0.04, 0.0),
    ("8/8/2 output", "8/8/2"): (-0.01, 0.01),
    ("4/16/4 output", "4/16/4"): (-0.01, 0.01),
    ("1/64/16 low_rank", "1/64/16"): (-0.01, 0.01),  # routers hardly move in so few steps
}


class LowRankRouter(Router):
    """A linear gate as the product of two matrices, d → 16 → n, which begins with as large logits. It did not pay."""

    def make(self) -> None:
        self.hidden = torch.nn.Parameter(0.02 * torch.randn(16, self.hidden_size))
        self.weight = torch.nn.Parameter(torch.randn(self.num_experts, 16) / 4)

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x_TD, self.hidden.to(x_TD.dtype)), self.weight.to(x_TD.dtype))


class Job(NamedTuple):
    """A run to be made."""

    method: str
    seed: int
    rate: float


# --- what is to be done ----------------------------------------------------------------------------------------------


def tuning_losses(ledger: Ledger, method: str) -> dict[float, float]:
    """Rate → loss on the rows that the tuning seed leaves out."""
    return {run["rate"]: run["loss"] for run in ledger.records(method=method, seed=TUNING_SEED)}


def tuned_rate(ledger: Ledger, method: str) -> float | None:
    """A method's learning rate, once there is one with worse ones on both sides."""
    losses = tuning_losses(ledger, method)
    return None if next_rate(losses, FIRST_RATES) is not None else best_rate(losses)


def jobs(ledger: Ledger) -> Iterator[Job]:
    """Runs that are missing and can be made now, the most urgent first: all methods of a phase, then the next one."""
    for phase in PHASES:
        tried = {name: tuning_losses(ledger, name) for name in phase}
        for name in sorted(phase, key=lambda name: len(tried[name])):
            if (rate := next_rate(tried[name], FIRST_RATES)) is not None:
                yield Job(name, TUNING_SEED, rate)
        rates = {name: tuned_rate(ledger, name) for name in phase}
        for seed in SEEDS:
            for name, rate in rates.items():
                if rate is not None and not ledger.records(method=name, seed=seed, rate=rate):
                    yield Job(name, seed, rate)


def split(rows: list[dict[str, str]], seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """A seed's training rows, and those that it leaves out."""
    parts: tuple[list[dict[str, str]], ...] = ([], [])
    for task in TASKS:
        for i, row in enumerate(row for row in rows if row["domain"] == task):
            parts[i % PARTS == seed].append(row)
    return parts[0], parts[1]


# --- a run -----------------------------------------------------------------------------------------------------------


class Study:
    """
    Args:
        data: the folder of `train.jsonl` and `test.jsonl`.
        work: a folder for what trainers write.
        ledger: of the finished runs.

    Raises:
        SystemExit: the ledger's runs had other rows, or another model.
    """

    def __init__(self, data: Path, work: Path, ledger: Ledger) -> None:
        ROUTERS["low_rank"] = LowRankRouter
        self.work, self.ledger = work, ledger
        self.train, self.test = (_read(data / f"{name}.jsonl") for name in ("train", "test"))
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
        files = [hash_file(smollm2_folder() / name) for name in ("model.safetensors", "tokenizer.json")]
        digest = hashlib.sha256(json.dumps([self.train, self.test, files]).encode()).hexdigest()[:12]
        if not ledger.records():  # what the per-row numbers of runs are about
            rows, _ = tokenized(Dataset.from_list(self.test), self.tokenizer, preparation(max_length=64))
            tokens = [sum(label != -100 for label in row["labels"]) for row in rows]
            ledger.add({"method": "rows", "data": digest, "tasks": rows["domain"][:], "tokens": tokens}, f"{len(rows)}")
        if ledger.records(method="rows")[0]["data"] != digest:
            raise SystemExit(f"{ledger.path}: its runs had other rows or another model; remove it to begin anew")

    def run(self, job: Job) -> None:
        """Train and measure; the ledger gets the run."""
        method = METHODS[job.method]
        train, left_out = split(self.train, job.seed)
        model = AutoModelForCausalLM.from_pretrained(smollm2_folder())
        set_seed(job.seed)
        model = get_peft_model(model, method.config())
        routed = method.num_experts is not None
        config, trainer_class = (MoESFTConfig, MoESFTTrainer) if routed else (SFTConfig, SFTTrainer)
        args = arguments(
            config, self.work / "granularity", num_train_epochs=1, max_length=None, padding_free=True,
            learning_rate=job.rate, lr_scheduler_type="linear", seed=job.seed,
            **({"router_balancing": "layer"} if routed else {}),
        )  # fmt: skip
        trainer = trainer_class(model, args, train_dataset=Dataset.from_list(train), processing_class=self.tokenizer)
        start = time.process_time()
        trainer.train()
        seconds = (time.process_time() - start) / trainer.state.global_step
        is_tuning = job.seed == TUNING_SEED
        rows = Dataset.from_list(left_out if is_tuning else self.test)
        found = answers(model, *tokenized(rows, self.tokenizer, preparation(max_length=64)))
        record = {
            **job._asdict(), **by_task(found), "steps": trainer.state.global_step, "seconds_per_step": seconds,
            "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "versions": {name: version(name) for name in ("torch", "transformers", "peft", "trl")},
        }  # fmt: skip
        if not is_tuning:
            record["answers"] = {
                "log_probs": [float(f"{answer.log_prob:.4g}") for answer in found],
                "matches": "".join(str(int(answer.is_match)) for answer in found),
            }
        self.ledger.add(record, f"{record['loss']:.4f}")


def _read(path: Path) -> list[dict[str, str]]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["domain"] in TASKS]


# --- report ----------------------------------------------------------------------------------------------------------


def runs_of(ledger: Ledger, name: str) -> dict[int, dict[str, Any]]:
    """Seed → the run at the method's own rate."""
    runs = ledger.records(method=name, rate=tuned_rate(ledger, name)) if tuned_rate(ledger, name) else []
    return {run["seed"]: run for run in runs if run["seed"] in SEEDS}


def over_rows(rows: dict[str, Any], pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> Difference:
    """The difference of the tasks' mean loss, and its 95 % interval over held-out rows, of the mean over seeds."""
    differences = np.mean(
        [np.subtract(*(of["answers"]["log_probs"] for of in (other, run))) for run, other in pairs], axis=0
    )
    means, variances = [], []
    for task in TASKS:
        of_task = np.array([name == task for name in rows["tasks"]])
        tokens = np.array(rows["tokens"])[of_task].sum()
        means.append(differences[of_task].sum() / tokens)
        variances.append(of_task.sum() * differences[of_task].var(ddof=1) / tokens**2)
    mean, half = statistics.fmean(means), 1.96 * math.sqrt(sum(variances)) / len(TASKS)
    return Difference(mean, mean - half, mean + half)


def report(ledger: Ledger) -> str:
    """The page of the runs that there are."""
    runs = {name: runs_of(ledger, name) for name in METHODS}
    missing = sum(len(SEEDS) - len(of) for of in runs.values())
    lines = [
        "# Granularity: few large experts or many small ones",
        "",
        "`python -m studies.granularity report` writes this page; the script's head says what was fixed before the "
        "first run. Shapes are r/n/k: n experts of rank r, k of them active. SmolLM2-135M-Instruct, four short tasks, "
        "one pass over three quarters of the rows, projection mixing and alpha = 2·k·r where nothing else is said.",
        "",
    ]
    if missing:
        lines += [
            f"*Incomplete: {missing} of {len(SEEDS) * len(METHODS)} runs are missing; "
            "`python -m studies.granularity run` goes on where it stopped.*",
            "",
        ]
    return "\n".join([*lines, *_means(runs), "", *_contrasts(ledger, runs), "", *_rates(ledger)]) + "\n"


def _means(runs: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    lines = [
        f"| method | parameters | rate | seeds | loss | exact | {' | '.join(TASKS)} | seconds per step |",
        f"|{'---|' * (7 + len(TASKS))}",
    ]
    made = [(name, list(of.values())) for name, of in runs.items() if of]
    for name, of in sorted(made, key=lambda item: statistics.fmean(run["loss"] for run in item[1])):
        loss, exact, seconds = (
            statistics.fmean(run[key] for run in of) for key in ("loss", "exact", "seconds_per_step")
        )
        tasks = ["{:.3f}, {:.0%}".format(*np.mean([run["tasks"][task] for run in of], axis=0)) for task in TASKS]
        cells = [METHODS[name].label, f"{of[0]['parameters'] / 1e6:.2f}M", f"{of[0]['rate']:g}", str(len(of))]
        cells += [f"{loss:.4f}", f"{exact:.3f}", *tasks, f"{seconds:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _contrasts(ledger: Ledger, runs: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    lines = [
        "| contrast | predicted | loss | over seeds | over rows | exact | over seeds | seeds |",
        f"|{'---|' * 8}",
    ]
    for (name, other), (low, high) in CONTRASTS.items():
        seeds = sorted(runs[name].keys() & runs[other].keys())
        cells = [f"{METHODS[name].label} − {METHODS[other].label}", f"{low:+g} to {high:+g}"]
        if len(seeds) > 1:
            pairs = [(runs[name][seed], runs[other][seed]) for seed in seeds]
            loss, exact = (
                paired_difference([run[key] for run, _ in pairs], [run[key] for _, run in pairs])
                for key in ("loss", "exact")
            )
            rows = over_rows(ledger.records(method="rows")[0], pairs)
            cells += [*loss.cells(), rows.cells()[1], *exact.cells(), str(len(seeds))]
        else:
            cells += ["", "", "", "", "", str(len(seeds))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _rates(ledger: Ledger) -> list[str]:
    lines = [
        "Learning rates, on the tuning seed and the training rows that it leaves out:",
        "",
        "| method | rate: loss | chosen |",
        "|---|---|---|",
    ]
    for name, method in METHODS.items():
        tried = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in sorted(tuning_losses(ledger, name).items()))
        rate = tuned_rate(ledger, name)
        lines.append(f"| {method.label} | {tried} | {'' if rate is None else f'{rate:g}'} |")
    return lines


def main() -> None:
    args = parser(__doc__).parse_args()
    ledger = Ledger(RESULTS / "granularity.jsonl")
    if args.command == "report":
        page = report(ledger)
        (RESULTS / "granularity.md").write_text(page)
        print(page)
        return
    score_answers_only()
    study = Study(args.data, args.work, ledger)
    while (job := next(jobs(ledger), None)) is not None:
        study.run(job)


if __name__ == "__main__":
    main()
