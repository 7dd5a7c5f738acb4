"""
What is it in UpIT: the mixture, the mean of its checkpoints, or the schedule? SmolLM2-135M-Instruct, six short tasks.

    python -m studies.short_tasks --source FOLDER --output .cache/short_tasks_300 --held-out 300
    python -m studies.schedule run [--workers 2]   # resumes where the ledgers end; minutes of a GPU, days of a core
    python -m studies.schedule report              # tables and the figure of the ledgers, in studies/results

Fixed before the first run. A seed draws its own three quarters of each task's rows, initial values and order. All
methods take equally many passes over them: from the start with a rate that decays linearly; or in two steps, half of
the passes at a constant rate and half at an eighth of it, decaying to 0, which is UpIT's schedule. What UpIT starts
from, a LoRA of rank 8 in the first step with eight checkpoints, is trained on in the second as experts of a mixture
(routers from `ridge` on perplexity buckets of a tenth of the rows, or at random), as their mean (a LoRA of rank 64), as
copies of the last, or as the last LoRA alone. A mixture and a LoRA from the start are measured a second time as the
mean of eight checkpoints, taken at equal intervals of the second step.

Passes are 1 or 2, the best for LoRA of rank k·r and a mixture in two steps on the tuning seed, and then the same for
all. A method's rate is the best on the tuning seed, with worse ones on both sides, scored on the quarter of the
training rows that this seed leaves out: the held-out rows choose nothing. Controls of the mixture have its rate.

The loss per answer token on the four tasks that the model can do decides, paired over six seeds, with 95 % t intervals.
Beside it: all six tasks, and right answers. Of seventeen contrasts, three in five such studies would show one without 0
where there is no difference at all. A prediction is the range where the mean of a contrast is expected. The runs in
the ledgers were also measured after one temperature each, fitted on the rows that their seed leaves out. None was
better with another one than 1, so over-confidence explains nothing, and it is not measured any more.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from filelock import FileLock
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer, force_experts, init_gates, lora_to_moe
from moe_peft.models.layer import routed_layers
from moe_peft.training.preparation import calibration_batches, preparation, tokenized
from moe_peft.upit.buckets import perplexity_buckets

from .differences import Difference, paired_difference, plot_differences
from .exact_match import Answer, answers, by_task
from .rates import best_rate, next_rate
from .runs import DEVICE, Ledger, arguments, parser, score_answers_only, start_workers, work
from .upit import BEYOND, mean_adapter

RESULTS = Path(__file__).parent / "results"
LEDGERS = RESULTS / "schedule"
SEEDS, TUNING_SEED = range(6), 6
FIRST_RATES, PASSES = (1e-3, 2e-3, 4e-3), (1, 2)
LEFT_OUT, SEED_SHARE, LAST = 1 / 4, 1 / 10, 1 / 8  # of the rows; of them for routers; the second step's rate
EXPERTS, RANK, TOP_K = 8, 8, 2
FFN = ["gate_proj", "up_proj", "down_proj"]


class Method(NamedTuple):
    """
    Args:
        label: in tables.
        start: what is trained: a key of `FRESH` or, after the first step of a LoRA of rank 8, of `AFTER_STEP_1`.
        in_two_steps: or with one rate that decays from the start.
        rate_of: the method that has its rate; None: its own.
        options: of `MoESFTConfig`.
    """

    label: str
    start: str
    in_two_steps: bool = True
    rate_of: str | None = None
    options: Mapping[str, Any] = MappingProxyType({})


# The most decisive first.
METHODS = {
    "upit": Method("UpIT", "upit"),
    "mean": Method("mean of the checkpoints, trained on", "mean"),
    "mixture linear": Method("mixture, linear decay", "mixture", False),
    "lora_kr linear": Method("LoRA, rank k·r, linear decay", "lora_kr", False),
    "mixture": Method("mixture", "mixture"),
    "last": Method("last checkpoint, trained on", "last"),
    "lora_nr linear": Method("LoRA, rank n·r, linear decay", "lora_nr", False),
    "mixture_frozen": Method(
        "mixture, frozen random routers", "mixture", rate_of="mixture", options={"training_stage": "rest"}
    ),
    "lora_kr": Method("LoRA, rank k·r", "lora_kr"),
    "copies": Method("copies of the last checkpoint", "copies"),
    "lora_nr": Method("LoRA, rank n·r", "lora_nr"),
    "upit_random": Method("UpIT, random routers", "upit_random", rate_of="upit"),
    "mixture_fast": Method(
        "mixture, routers at 1e-2", "mixture", rate_of="mixture", options={"router_learning_rate": 1e-2}
    ),
    "mean_alone": Method("mean of the checkpoints, half of the training", "mean_alone", rate_of="mean"),
}
TUNES_PASSES = ("lora_kr", "mixture")
TAIL = ", mean of its last checkpoints"
# Contrast → the range in which its mean is expected, of the tasks that the model can do.
CONTRASTS = {
    # schedule
    ("lora_kr", "lora_kr linear"): (-0.01, 0.01),
    ("lora_nr", "lora_nr linear"): (-0.01, 0.01),
    ("mixture", "mixture linear"): (-0.01, 0.01),
    # mixture
    ("mixture", "lora_kr"): (-0.04, 0.0),
    ("mixture", "lora_nr"): (-0.03, 0.01),
    # averaging
    ("mean", "last"): (-0.03, 0.0),
    (f"lora_kr{TAIL}", "lora_kr"): (-0.01, 0.0),
    (f"mixture{TAIL}", "mixture"): (-0.01, 0.0),
    ("mean", "lora_nr"): (-0.03, 0.01),
    # what UpIT adds
    ("upit", "mean"): (-0.01, 0.02),
    ("upit", "mixture"): (-0.02, 0.02),
    ("upit", "lora_kr"): (-0.04, 0.0),
    ("upit", f"mixture{TAIL}"): (-0.01, 0.03),
    ("upit", "copies"): (-0.03, 0.0),
    # routing
    ("mixture", "mixture_frozen"): (-0.01, 0.01),
    ("mixture_fast", "mixture"): (-0.01, 0.01),
    ("upit", "upit_random"): (-0.01, 0.01),
}
# After the first results: what a method has at its better schedule.
ADDED = (
    ("mixture linear", "lora_kr linear"),
    ("mixture linear", "lora_nr linear"),
    ("upit", "mixture linear"),
    ("mean", "lora_nr linear"),
)
DRAWN = (  # in the figure
    ("mixture", "mixture linear"), ("mixture linear", "lora_kr linear"), ("mixture linear", "lora_nr linear"),
    ("mean", "last"), ("upit", "mean"), ("upit", "mixture"), ("upit", "mixture linear"), ("mixture", "mixture_frozen"),
)  # fmt: skip
FRESH: dict[str, Callable[[], LoraConfig | MoELoraConfig]] = {
    "lora_r": lambda: _lora(RANK),
    "lora_kr": lambda: _lora(TOP_K * RANK),
    "lora_nr": lambda: _lora(EXPERTS * RANK),
    "mixture": lambda: MoELoraConfig(
        r=RANK, num_experts=EXPERTS, top_k=TOP_K, mixing="projection", task_type="CAUSAL_LM"
    ),
}


def _lora(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=FFN, task_type="CAUSAL_LM")


class Job(NamedTuple):
    """A run to be made."""

    method: str
    seed: int
    rate: float
    passes: int


# --- training --------------------------------------------------------------------------------------------------------


class TailMean(TrainerCallback):
    """Sums what is trained at equal intervals of the steps; `apply` puts the mean in its place."""

    def __init__(self, model: Any, steps: int, count: int = EXPERTS) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.steps = {round((i + 1) * steps / count) for i in range(count)}
        self.sums: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step in self.steps:
            self.sums = self.sums or [torch.zeros_like(parameter) for parameter in self.parameters]
            for of, parameter in zip(self.sums, self.parameters, strict=True):
                of += parameter.detach() / len(self.steps)

    def apply(self) -> None:
        for of, parameter in zip(self.sums, self.parameters, strict=True):
            parameter.data.copy_(of)


class Study:
    """
    Args:
        data: the folder of `train.jsonl` and `test.jsonl`.
        work: a folder for what is made on the way.
        ledgers: a folder for a ledger of each seed.

    Raises:
        SystemExit: the ledgers' runs had other rows.
    """

    def __init__(self, data: Path, work: Path, ledgers: Path = LEDGERS) -> None:
        self.work, self.ledgers = work / "schedule", {}
        self.work.mkdir(parents=True, exist_ok=True)
        self.train, self.test = (
            [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
            for name in ("train", "test")
        )
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
        digest = hashlib.sha256(json.dumps([self.train, self.test]).encode()).hexdigest()[:12]
        for seed in (*SEEDS, TUNING_SEED):
            ledger = self.ledgers[seed] = Ledger(ledgers / f"{'tuning' if seed == TUNING_SEED else seed}.jsonl")
            with FileLock(self.work / "rows.lock"):
                if not ledger.records():
                    rows = {"tasks": [row["domain"] for row in self.test]} if seed == SEEDS[0] else {}
                    ledger.add({"method": "rows", "data": digest, **rows}, f"{len(self.test)}")
            if ledger.records(method="rows")[0]["data"] != digest:
                raise SystemExit(f"{ledger.path}: its runs had other rows; remove it to begin anew")

    # --- what is to be done ------------------------------------------------------------------------------------------

    def losses(self, method: str, passes: int) -> dict[float, float]:
        """Rate → loss on the rows that the tuning seed leaves out."""
        return {run["rate"]: run["decides"] for run in self.ledgers[TUNING_SEED].records(method=method, passes=passes)}

    def rate(self, method: str, passes: int) -> float | None:
        """A method's learning rate, once there is one with worse ones on both sides."""
        losses = self.losses(METHODS[method].rate_of or method, passes)
        return None if next_rate(losses, FIRST_RATES) is not None else best_rate(losses)

    def passes(self) -> int | None:
        """Those of all methods, once they are chosen."""
        best = {}
        for passes in PASSES:
            if any(self.rate(method, passes) is None for method in TUNES_PASSES):
                return None
            best[passes] = sum(min(self.losses(method, passes).values()) for method in TUNES_PASSES)
        return min(best, key=best.__getitem__)

    def tuning(self, methods: Any, passes: int) -> Iterator[Job]:
        for method in methods:
            losses = self.losses(method, passes)
            if (rate := next_rate(losses, FIRST_RATES)) is not None:
                for each in [first for first in FIRST_RATES if first not in losses] or [rate]:
                    yield Job(method, TUNING_SEED, each, passes)

    def jobs(self) -> Iterator[Job]:
        """Runs that are missing and can be made now, the most urgent first."""
        passes = self.passes()
        if passes is None:
            for each in sorted(PASSES, reverse=True):  # the longest first
                yield from self.tuning(TUNES_PASSES, each)
            return
        yield from self.tuning([name for name, method in METHODS.items() if method.rate_of is None], passes)
        rates = {name: rate for name in METHODS if (rate := self.rate(name, passes)) is not None}
        done = {seed: {run["method"] for run in self.ledgers[seed].records()} for seed in SEEDS}
        for seeds in (SEEDS[:3], SEEDS[3:]):
            for name, rate in rates.items():
                for seed in seeds:
                    if name not in done[seed]:
                        yield Job(name, seed, rate, passes)

    # --- a run -------------------------------------------------------------------------------------------------------

    def split(self, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        """A seed's training rows, and those that it leaves out."""
        kept, left_out = [], []
        for task in dict.fromkeys(row["domain"] for row in self.train):
            rows = [row for row in self.train if row["domain"] == task]
            random.Random(f"{seed} {task}").shuffle(rows)
            count = round(LEFT_OUT * len(rows))
            left_out += rows[:count]
            kept += rows[count:]
        return kept, left_out

    def run(self, job: Job) -> None:
        """Train and measure; the seed's ledger gets the run, and that of the mean of its last checkpoints."""
        method, started = METHODS[job.method], time.monotonic()
        rows, left_out = self.split(job.seed)
        steps = math.ceil(job.passes * len(rows) / 8)
        half = steps // 2
        tails: list[TailMean] = []
        if method.start in FRESH:
            model = self.fresh(method.start, job.seed)
            if method.in_two_steps:
                if job.seed != TUNING_SEED and any(job.method + TAIL in pair for pair in CONTRASTS):
                    tails = [TailMean(model, steps - half)]
                self.fit(model, rows, job.seed, half, job.rate, "constant", method.options)
                self.fit(model, rows, ~job.seed, steps - half, LAST * job.rate, "linear", method.options, *tails)
            else:
                self.fit(model, rows, job.seed, steps, job.rate, "linear", method.options)
        else:
            model = self.after_step_1(method.start, self.step_1(job, rows, half), rows, job.seed)
            if method.start != "mean_alone":
                self.fit(model, rows, ~job.seed, steps - half, LAST * job.rate, "linear", method.options)
        self.measure(model, job, job.method, left_out, started)
        for tail in tails:
            tail.apply()
            self.measure(model, job, job.method + TAIL, left_out, started)

    def fresh(self, start: str, seed: int) -> Any:
        """A new adapter on the base."""
        model = AutoModelForCausalLM.from_pretrained(smollm2_folder())
        set_seed(seed)
        return get_peft_model(model, FRESH[start]())

    def fit(
        self, model: Any, rows: list[dict[str, str]], seed: int, steps: int, rate: float, schedule: str,
        options: Mapping[str, Any], *callbacks: TrainerCallback,
    ) -> None:  # fmt: skip
        routed = bool(routed_layers(model))
        config, trainer = (MoESFTConfig, MoESFTTrainer) if routed else (SFTConfig, SFTTrainer)
        balancing = {"router_balancing": "layer"} if routed and options.get("training_stage") != "rest" else {}
        args = arguments(
            config, self.work / "state", max_steps=steps, learning_rate=rate, lr_scheduler_type=schedule,
            max_length=None, padding_free=True, seed=seed % 2**31, logging_steps=steps, **balancing, **options,
        )  # fmt: skip
        trainer(
            model, args, train_dataset=Dataset.from_list(rows), processing_class=self.tokenizer,
            callbacks=list(callbacks),
        ).train()  # fmt: skip

    def step_1(self, job: Job, rows: list[dict[str, str]], steps: int) -> list[Path]:
        """Eight checkpoints of a LoRA of rank r, which methods of the same seed and rate share."""
        folder = self.work / f"step_1-{job.seed}-{job.rate}-{job.passes}"
        folders = [folder / f"expert_{i}" for i in range(EXPERTS)]
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                model, partial = self.fresh("lora_r", job.seed), folder.with_name(f"{folder.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                self.fit(model, rows, job.seed, steps, job.rate, "constant", {}, _Saver(model, partial, steps))
                partial.rename(folder)
        return folders

    def after_step_1(self, start: str, folders: list[Path], rows: list[dict[str, str]], seed: int) -> Any:
        """What the second step trains."""
        base = AutoModelForCausalLM.from_pretrained(smollm2_folder())
        set_seed(seed)
        if start == "last":
            return PeftModel.from_pretrained(base, folders[-1], is_trainable=True)
        if start.startswith("mean"):
            with FileLock(f"{folders[0].parent}.lock"):
                if not (mean := folders[0].parent / "mean").exists():
                    mean_adapter(folders, mean.parent)
            return PeftModel.from_pretrained(base, mean, is_trainable=True)
        model = lora_to_moe(
            base, [folders[-1]] * EXPERTS if start == "copies" else folders, mixing="projection", top_k=TOP_K
        )
        if start == "upit":
            self.init_routers(model.to(DEVICE), random.Random(seed).sample(rows, round(SEED_SHARE * len(rows))))
        return model

    def init_routers(self, model: Any, rows: list[dict[str, str]]) -> None:
        """`ridge` on perplexity buckets."""
        data, collator = tokenized(Dataset.from_list(rows), self.tokenizer, preparation(max_length=64))
        perplexity_SN = torch.zeros(len(rows), EXPERTS)
        for expert in range(EXPERTS):
            with force_experts(model, torch.tensor([expert])):
                found = answers(model, data, collator)
            perplexity_SN[:, expert] = torch.tensor([math.exp(-answer.log_prob / answer.tokens) for answer in found])
        texts = [
            {**rows[i], "expert": expert} for expert, of in enumerate(perplexity_buckets(perplexity_SN)) for i in of
        ]
        batches = calibration_batches(
            Dataset.from_list(texts), self.tokenizer, len(texts), max_length=64, columns=["expert"]
        )
        init_gates(model, "ridge", batches)

    def measure(self, model: Any, job: Job, name: str, left_out: list[dict[str, str]], started: float) -> None:
        rows = left_out if job.seed == TUNING_SEED else self.test
        found = answers(model, *tokenized(Dataset.from_list(rows), self.tokenizer, preparation(max_length=64)))
        record: dict[str, Any] = {**job._asdict(), "method": name, **by_task(found)}
        if job.seed != TUNING_SEED:
            record["rows"] = _of_rows(found)
        record["decides"] = can_do(record["tasks"])
        record["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.ledgers[job.seed].add(record, f"{record['decides']:.4f} in {time.monotonic() - started:.0f} s")


class _Saver(TrainerCallback):
    """Saves eight checkpoints of an adapter at equal intervals."""

    def __init__(self, model: Any, folder: Path, steps: int) -> None:
        self.model, self.folder = model, folder
        self.experts = {round((i + 1) * steps / EXPERTS): i for i in range(EXPERTS)}

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if (expert := self.experts.get(state.global_step)) is not None:
            self.model.save_pretrained(str(self.folder / f"expert_{expert}"))


def can_do(tasks: dict[str, list[float]]) -> float:
    """The mean loss of the tasks that the model can do."""
    return statistics.fmean(loss for task, (loss, _) in tasks.items() if task not in BEYOND)


def _of_rows(found: list[Answer]) -> dict[str, Any]:
    """Log-probabilities in hundredths of a nat, and matches."""
    return {
        "log_probs": [round(100 * answer.log_prob) for answer in found],
        "matches": "".join(str(int(answer.is_match)) for answer in found),
    }


# --- report ----------------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "loss, four tasks": lambda run: run["decides"],
    "all six": lambda run: run["loss"],
    "right answers": lambda run: run["exact"],
}


def runs_of(ledgers: dict[int, Ledger]) -> dict[str, dict[int, dict[str, Any]]]:
    """Method → seed → its run."""
    named = [name for pair in CONTRASTS for name in pair]
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in dict.fromkeys([*METHODS, *named])}
    for seed in SEEDS:
        for run in ledgers[seed].records():
            if run["method"] in found:
                found[run["method"]][seed] = run
    return {name: of for name, of in found.items() if of}


def label_of(name: str) -> str:
    return METHODS[name.removesuffix(TAIL)].label + (TAIL if name.endswith(TAIL) else "")


def contrasts(
    runs: dict[str, dict[int, dict[str, Any]]], measure: Callable[[dict[str, Any]], float]
) -> dict[tuple[str, str], Difference]:
    """The contrasts that at least two seeds have."""
    found = {}
    for name, other in (*CONTRASTS, *ADDED):
        seeds = sorted(runs.get(name, {}).keys() & runs.get(other, {}).keys())
        if len(seeds) > 1:
            pairs = [[measure(runs[method][seed]) for seed in seeds] for method in (name, other)]
            found[name, other] = paired_difference(*pairs)
    return found


def report(study: Study) -> str:
    """The page of the runs that there are, and its figure."""
    runs = runs_of(study.ledgers)
    seeds = {len(of) for of in runs.values()}
    lines = [
        "# The mixture, the mean or the schedule",
        "",
        "`python -m studies.schedule report` writes this page; the script's head says what was fixed before the first "
        f"run. SmolLM2-135M-Instruct, six short tasks, {study.passes()} passes over three quarters of 1,150 rows; "
        f"{' or '.join(map(str, sorted(seeds)))} seeds.",
        "",
        f"| method | parameters | rate | seeds | {' | '.join(MEASURES)} |",
        f"|{'---|' * (4 + len(MEASURES))}",
    ]
    for name, of in sorted(runs.items(), key=lambda item: statistics.fmean(run["decides"] for run in item[1].values())):
        made = list(of.values())
        means = [f"{statistics.fmean(map(measure, made)):.4f}" for measure in MEASURES.values()]
        cells = [label_of(name), f"{made[0]['parameters'] / 1e6:.1f}M", f"{made[0]['rate']:g}", str(len(made))]
        lines.append(f"| {' | '.join([*cells, *means])} |")
    found = {name: contrasts(runs, measure) for name, measure in MEASURES.items()}
    lines += [
        "",
        f"| contrast | predicted | {' | '.join(f'{name} | 95 % interval' for name in MEASURES)} |",
        f"|{'---|' * (2 + 2 * len(MEASURES))}",
    ]
    for pair, difference in found["loss, four tasks"].items():
        predicted = "added later"
        if pair in CONTRASTS:
            low, high = CONTRASTS[pair]
            predicted = f"{low:+g} to {high:+g}{'' if low <= difference.mean <= high else ', missed'}"
        cells = [" − ".join(map(label_of, pair)), predicted]
        cells += [cell for of in found.values() for cell in of[pair].cells()]
        lines.append(f"| {' | '.join(cells)} |")
    drawn = [
        (" − ".join(map(label_of, pair)).replace(", trained on", ""), found["loss, four tasks"][pair])
        for pair in DRAWN
        if pair in found["loss, four tasks"]
    ]
    if drawn:
        plot_differences({"loss, four tasks": drawn}, RESULTS / "schedule.svg", "difference of held-out loss")
        lines += ["", "![Differences of held-out loss with 95 % intervals](schedule.svg)"]
    lines += ["", "Learning rates on the tuning seed, loss of the four tasks:", ""]
    lines += ["| method | passes | rate: loss | chosen |", "|---|---|---|---|"]
    for name, method in METHODS.items():
        for passes in PASSES:
            if method.rate_of is None and (losses := study.losses(name, passes)):
                tried = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in sorted(losses.items()))
                rate = study.rate(name, passes)
                lines.append(f"| {method.label} | {passes} | {tried} | {'' if rate is None else f'{rate:g}'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser(__doc__, workers=True)
    options.set_defaults(data=Path(".cache/short_tasks_300"))
    args = options.parse_args()
    if args.command == "run" and args.worker is None:
        raise SystemExit(start_workers("schedule", args))
    study = Study(args.data, args.work)
    if args.command == "report":
        page = report(study)
        (RESULTS / "schedule.md").write_text(page)
        print(page)
        return
    score_answers_only()
    work(study)


if __name__ == "__main__":
    main()
