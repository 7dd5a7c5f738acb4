"""
Tasks that arrive one after the other: SmolLM2-135M-Instruct and eight domains of clinc150.

    python -m studies.growing run --data FOLDER [--workers 2]   # with clinc150/data_full.json and domains.json
    python -m studies.growing report                            # tables and the figure, in studies/results

Fixed before the first run. A task is one of eight domains of clinc150: an utterance, and its intent, one of 15, in
words. All prompts are the utterance alone, so no form of words gives a task away, and some domains are close (banking
and credit cards, travel and cars, home and utilities). A task has 480 training rows, 60 steps of 8 with a rate that
decays from 1e-3, and 60 held-out rows; a seed draws the training rows. The tasks arrive in the order of the alphabet,
and in the reverse one. After each arrival all tasks that are there are measured: loss per answer token, right answers.

- *mixture*: each task's LoRA of rank 8, trained on the untouched base, is an expert; gates are `ridge`'s, from 24 rows
  of each task, one expert for a token; nothing of what was there is trained or read again;
- *picked by its prompt*: one of the LoRAs for a row, by the mean of these gates over its prompt; *own*: its task's;
  *wrong*: that of the next task, which says what steering to another expert does to answers;
- *mean* of the LoRAs;
- *in turn*: one LoRA of rank 8 that goes on with each task; *with replay*: every tenth row is from an earlier task;
- *joint*: one LoRA of rank 8 (and one of rank 64) from nothing, on all rows of the tasks, for the sum of their steps;
  after half of the tasks and after all.

Predictions, of the loss after all eight, mean of the orders: *in turn* is more than 1.0 above the mixture; replay takes
more than half of that away; the mixture is within 0.15 of *own*, and *picked by its prompt* within 0.05 of the mixture;
the mean is more than 0.5 above it; *joint* of rank 8 is no more than 0.1 below it; *wrong* answers less than 5 % right.
Three seeds: a difference counts where all three have its sign.

Added after the first results: gates from all 480 rows of each task, as 24 are few for 15 intents.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import force_experts, init_gates, lora_to_moe
from moe_peft.analysis.figures import plot_curves
from moe_peft.models.gates import uniform_gates
from moe_peft.training.preparation import calibration_batches, preparation, tokenized

from .exact_match import Answer, answers, by_task, picked_experts
from .runs import DEVICE, Ledger, arguments, parser, score_answers_only, start_workers, work

RESULTS = Path(__file__).parent / "results"
TASKS = (
    "auto_and_commute", "banking", "credit_cards", "home", "kitchen_and_dining", "travel", "utility", "work",
)  # fmt: skip
ORDERS = {"alphabet": TASKS, "reverse": TASKS[::-1]}
SEEDS = (0, 1, 2)
STEPS, ROWS, HELD_OUT, CALIBRATION, REPLAY = 60, 480, 60, 24, 10
LEARNING_RATE, LONGEST = 1e-3, 64
ARRIVALS = (2, 4, 8)  # after which tables say what came out
LABELS = {
    "own": "its own LoRA for each row", "joint 64": "joint LoRA, rank 64", "joint": "joint LoRA",
    "picked 480": "picked by its prompt, of all rows", "picked": "picked by its prompt",
    "mixture 480": "mixture, ridge gates of all rows", "mixture": "mixture, ridge gates",
    "replay": "one LoRA in turn, 10 % replay",
    "mean": "mean of the LoRAs", "in turn": "one LoRA in turn", "wrong": "the next task's LoRA",
}  # fmt: skip


class Job(NamedTuple):
    """A run to be made: a task's LoRA, an order's way, or a joint LoRA of the first `count` tasks of an order."""

    seed: int
    what: str
    order: str = ""
    count: int = 0


class Growing:
    """
    Args:
        data: the folder with clinc150.
        work: a folder for the adapters.
    """

    def __init__(self, data: Path, work: Path, ledger: Ledger) -> None:
        self.work, self.ledger = work, ledger
        self.work.mkdir(parents=True, exist_ok=True)
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
        self.rows = {name: _read(data / "clinc150", name) for name in ("train", "test")}
        self.parts = {}
        for task in TASKS:
            held_out = random.Random(0).sample(self.rows["test"][task], HELD_OUT)
            self.parts[task], self.collator = tokenized(
                Dataset.from_list(held_out), self.tokenizer, preparation(LONGEST)
            )

    def train_rows(self, task: str, seed: int) -> list[dict[str, str]]:
        return random.Random(f"{seed} {task}").sample(self.rows["train"][task], ROWS)

    # --- what is to be done ------------------------------------------------------------------------------------------

    def jobs(self) -> Iterator[Job]:
        """Runs that are missing and can be made now, the most urgent first."""
        done = {Job(*(run[key] for key in Job._fields)) for run in self.ledger.records(finished=True)}
        for seed in SEEDS:
            trainings = [Job(seed, f"train {task}") for task in TASKS]
            wanted = [*trainings]
            if done.issuperset(trainings):
                wanted += [Job(seed, "mixtures", order) for order in ORDERS]
            wanted += [Job(seed, way, order) for way in ("in turn", "replay") for order in ORDERS]
            wanted += [Job(seed, "joint", order, len(TASKS) // 2) for order in ORDERS]
            wanted += [Job(seed, way, "alphabet", len(TASKS)) for way in ("joint", "joint 64")]
            yield from (job for job in wanted if job not in done)

    # --- a run -------------------------------------------------------------------------------------------------------

    def run(self, job: Job) -> None:
        started = time.monotonic()
        if job.what.startswith("train"):
            task = job.what.removeprefix("train ")
            model = self.lora(8, job.seed)
            self.fit(model, self.train_rows(task, job.seed), job.seed, STEPS)
            model.save_pretrained(str(self.folder(task, job.seed)))
        elif job.what == "mixtures":
            self.mixtures(job)
        elif job.what.startswith("joint"):
            tasks = ORDERS[job.order][: job.count]
            model = self.lora(64 if job.what.endswith("64") else 8, job.seed)
            self.fit(model, [r for t in tasks for r in self.train_rows(t, job.seed)], job.seed, STEPS * len(tasks))
            self.note(job, job.what, tasks, self.answers(model, tasks))
        else:
            self.in_turn(job)
        self.ledger.add({**job._asdict(), "finished": True}, f"{time.monotonic() - started:.0f} s")

    def folder(self, task: str, seed: int) -> Path:
        return self.work / f"{task}-{seed}"

    def base(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).to(DEVICE)

    def lora(self, rank: int, seed: int) -> Any:
        model = self.base()
        set_seed(seed)
        targets = ["gate_proj", "up_proj", "down_proj"]
        return get_peft_model(
            model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
        )

    def fit(self, model: Any, rows: list[dict[str, str]], seed: int, steps: int) -> None:
        args = arguments(
            SFTConfig, self.work / "state", max_steps=steps, learning_rate=LEARNING_RATE, lr_scheduler_type="cosine",
            max_length=LONGEST, logging_steps=steps, seed=seed,
        )  # fmt: skip
        SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=self.tokenizer).train()

    def answers(self, model: Any, tasks: Sequence[str]) -> list[Answer]:
        model.eval()
        return [answer for task in tasks for answer in answers(model, self.parts[task], self.collator)]

    def note(self, job: Job, way: str, tasks: Sequence[str], found: list[Answer]) -> None:
        """A measurement after the arrival of the last of the tasks."""
        record = {"seed": job.seed, "order": job.order, "way": way, "arrived": len(tasks), **by_task(found)}
        if not self.ledger.records(finished=False, seed=job.seed, order=job.order, way=way, arrived=len(tasks)):
            self.ledger.add({**record, "finished": False}, f"{record['loss']:.3f}")

    def in_turn(self, job: Job) -> None:
        """One LoRA for all tasks, which learns one after the other."""
        model, order, draw = self.lora(8, job.seed), ORDERS[job.order], random.Random(job.seed)
        for i, task in enumerate(order):
            rows = self.train_rows(task, job.seed)
            if job.what == "replay" and i:
                earlier = [row for other in order[:i] for row in self.train_rows(other, job.seed)]
                rows = rows[: -ROWS // REPLAY] + draw.sample(earlier, ROWS // REPLAY)
            self.fit(model, rows, job.seed, STEPS)
            self.note(job, job.what, order[: i + 1], self.answers(model, order[: i + 1]))

    def mixtures(self, job: Job) -> None:
        """What can be made of the tasks' own LoRAs after each arrival."""
        order = ORDERS[job.order]
        for arrived in range(2, len(order) + 1):
            tasks = order[:arrived]
            model = lora_to_moe(self.base(), [self.folder(task, job.seed) for task in tasks], top_k=1).eval()
            with uniform_gates(model, "projection"):
                self.note(job, "mean", tasks, self.answers(model, tasks))
            for suffix, rows in (("", CALIBRATION), (f" {ROWS}", ROWS)):
                if suffix and arrived not in ARRIVALS:
                    continue
                self.set_gates(model, tasks, job.seed, rows)
                self.note(job, f"mixture{suffix}", tasks, self.answers(model, tasks))
                picked = [picked_experts(model, self.parts[task], self.collator, HELD_OUT) for task in tasks]
                self.note(job, f"picked{suffix}", tasks, self.forced(model, tasks, picked))
            for way, step in (("own", 0), ("wrong", 1)):
                chosen = [[(i + step) % arrived] * HELD_OUT for i in range(arrived)]
                self.note(job, way, tasks, self.forced(model, tasks, chosen))

    def set_gates(self, model: Any, tasks: Sequence[str], seed: int, rows: int) -> None:
        texts = [{**row, "expert": i} for i, task in enumerate(tasks) for row in self.train_rows(task, seed)[:rows]]
        batches = calibration_batches(
            Dataset.from_list(texts), self.tokenizer, len(texts), max_length=LONGEST, columns=["expert"]
        )
        init_gates(model, "ridge", batches)

    def forced(self, model: Any, tasks: Sequence[str], chosen: Sequence[Sequence[int]]) -> list[Answer]:
        """Answers where each row of each task has one expert."""
        found = []
        for task, experts in zip(tasks, chosen, strict=True):
            for expert in sorted(set(experts)):
                own = self.parts[task].select([j for j, other in enumerate(experts) if other == expert])
                with force_experts(model, torch.tensor([expert])):
                    found += answers(model, own, self.collator)
        return found


def _read(folder: Path, name: str) -> dict[str, list[dict[str, str]]]:
    """Task → its rows."""
    rows = json.loads((folder / "data_full.json").read_text())[name]
    domains = json.loads((folder / "domains.json").read_text())
    return {
        task: [
            {"prompt": f"{text}\n", "completion": intent.replace("_", " "), "domain": task}
            for text, intent in rows
            if intent in domains[task]
        ]
        for task in TASKS
    }


# --- report ----------------------------------------------------------------------------------------------------------


def report(ledger: Ledger) -> str:
    """The page of the runs that there are, and its figure."""
    runs = ledger.records(finished=False)
    lines = [
        "# Tasks that arrive one after the other",
        "",
        "`python -m studies.growing report` writes this page; the script's head says what was fixed before the first "
        f"run. SmolLM2-135M-Instruct, eight domains of clinc150, {len(SEEDS)} seeds, two orders. Loss per answer token "
        "and right answers, means over the tasks that have arrived; in brackets the range over seeds.",
        "",
        "| way | seeds | loss after 2 | after 4 | after 8 | right answers after 2 | after 4 | after 8 |",
        f"|{'---|' * 8}",
    ]
    for way, label in LABELS.items():
        cells = [
            _spread([_seed_mean(runs, way, arrived, seed, measure) for seed in SEEDS], form)
            for measure, form in (("loss", "{:.3f}"), ("exact", "{:.0%}"))
            for arrived in ARRIVALS
        ]
        seeds = len({run["seed"] for run in runs if (run["way"], run["arrived"]) == (way, len(TASKS))})
        lines.append(f"| {' | '.join([label, str(seeds), *cells])} |")
    lines += ["", "| after all eight: A − B | loss, by seed |", "|---|---|"]
    for other in ("own", "picked", "picked 480", "mixture 480", "joint", "joint 64", "mean", "replay", "in turn"):
        pairs = [[_seed_mean(runs, way, len(TASKS), seed, "loss") for seed in SEEDS] for way in (other, "mixture")]
        cells = ", ".join(f"{a - b:+.3f}" for a, b in zip(*pairs, strict=True) if a is not None and b is not None)
        lines.append(f"| {LABELS[other]} − {LABELS['mixture']} | {cells} |")
    curves = {
        LABELS[way]: points
        for way in ("in turn", "mean", "replay", "mixture", "picked", "picked 480", "own", "joint")
        if (points := [
            (float(arrived), 100 * statistics.fmean(exact))
            for arrived in range(1, len(TASKS) + 1)
            if (exact := [run["exact"] for run in runs if (run["way"], run["arrived"]) == (way, arrived)])
        ])
    }  # fmt: skip
    if curves:
        plot_curves(
            curves,
            RESULTS / "growing.svg",
            "tasks that have arrived",
            "right answers to these tasks (%)",
            scale="linear",
        )
        lines += ["", "![Right answers to all tasks that have arrived, by way](growing.svg)"]
    return "\n".join(lines) + "\n"


def _seed_mean(runs: list[dict[str, Any]], way: str, arrived: int, seed: int, measure: str) -> float | None:
    found = [run[measure] for run in runs if (run["way"], run["arrived"], run["seed"]) == (way, arrived, seed)]
    return statistics.fmean(found) if found else None


def _spread(values: Sequence[float | None], form: str) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return ""
    return f"{form.format(statistics.fmean(there))} ({form.format(min(there))}–{form.format(max(there))})"


def main() -> None:
    args = parser(__doc__, workers=True).parse_args()
    ledger = Ledger(RESULTS / "growing.jsonl")
    if args.command == "report":
        page = report(ledger)
        (RESULTS / "growing.md").write_text(page)
        print(page)
        return
    if args.worker is None:
        raise SystemExit(start_workers("growing", args))
    score_answers_only()
    work(Growing(args.data, args.work / "growing", ledger))


if __name__ == "__main__":
    main()
