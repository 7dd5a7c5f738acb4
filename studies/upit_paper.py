"""
UpIT as its paper has it, where its parts can act: eight training tasks, and tasks that nothing was trained on.

    python -m studies.upit_paper run --source FOLDER [--workers 6]   # resumes where the ledger ends; minutes of a GPU
    python -m studies.upit_paper report                              # the tables, in studies/results

Earlier studies had a schedule of our own, no expansion, and a stage 3 that hardly moved the routers. Here experts are
LoRAs from the second half of the fine-tuning's checkpoints, all rates are constant, routing vectors train at 1e-2 for
32 steps an expert, and genetic expansion with DARE makes 16 experts of 8. Rows, steps and rate are ours.

Fixed before the first run. SmolLM2-135M-Instruct; 800 rows of each of eight tasks, drawn by seed, of at most 128
tokens. Steps have 32 rows: stage 1 is one pass, 200 steps, run once for a seed; what follows it is half a pass, 100
steps; a LoRA of rank k·r gets both. UpIT's stage 3 comes on top, as in the paper: 4 passes over 32 rows for each
expert, in steps of 4 rows, which is .16 (16 experts: .32) of a pass over all rows more than the others have. Seeds 0,
1, 2. All methods have one rate, of 3e-4, 6e-4 and 1e-3 the one with the lowest loss of the LoRA at a constant rate on
50 further rows of each task, with seed 0.

Methods: UpIT with 8 and with 16 experts, each also with random routers, which leaves out stage 3 and its training of
experts, too; the mean of the eight checkpoints as one LoRA, alone and trained on; a LoRA with a constant rate, and one
whose rate decays linearly. The mean is the checkpoints' LoRAs side by side with alpha as it was, so that a step moves
its update as far as one moves a checkpoint's.

Measured on 100 held-out rows a task: loss per answer token, and right answers (greedy decoding gives the answer
exactly; not of gsm8k, whose answers are whole solutions). Out of domain, on 60 rows of each of seven tasks of BIG-Bench
Hard in the prompt form of the trained questions: the right answer's loss, and how often it is the most probable one of
a task's possible answers. Means over tasks; contrasts, the most important first in `CONTRASTS`, paired over seeds with
95 % t intervals. Three seeds make these wide, and of ten contrasts two in five such studies would show one without 0
where there is no difference at all.

Predictions, means over seeds; of the loss in domain where nothing else is said.

1. UpIT 8 − LoRA, decay: between −.03 and +.01. UpIT 8 − LoRA, constant: between −.06 and −.005.
2. UpIT 8 − the mean trained on: within .01.
3. UpIT − UpIT with random routers: within .01, for 8 and for 16 experts, although vectors move by more than their
   length. Routing differs more between tasks than with random routers, by less than 10 points.
4. UpIT 16 − UpIT 8: within .01.
5. LoRA, decay − LoRA, constant: between −.05 and −.005. The mean of the checkpoints alone is below neither.
6. Out of domain, right answers of all trained methods are within 3 points of each other.

`--fraction .25`, for two cores and two hours, has as many steps, each with a quarter of the rows, half of the held-out
ones, and seed 0 alone; stage 3's 32 rows for each expert are as many as before, and so .64 (16 experts: 1.28) of a
pass. Fixed before its first run: the same predictions, held by a single run's differences, of which those below .02 are
within its noise.

What came of it with the quarter (*UpIT 16* and the mean alone have another training of stage 1, alike up to rounding):
1 and 2 failed, UpIT 8 is above LoRA by .095 and .090 and above the mean trained on by .038. Of 3, both differences are
above .01, to UpIT's disfavour (.026, .016), and routing differs by 21 and 25 points more than with random routers. 4
held (.001). Of 5, decay gains .0046, just less than predicted; the mean alone is below neither LoRA. 6 failed: 53.3 to
57.6 %.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from filelock import FileLock
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from examples.demo.smollm2 import smollm2_folder
from moe_peft.analysis.recorder import record_routing
from moe_peft.models.layer import routed_layers
from moe_peft.training.preparation import preparation, tokenized
from moe_peft.upit import UpIT, load_recipe
from moe_peft.upit.files import expert_folders
from moe_peft.upit.stage_cache import MARKER, run_stage

from .differences import paired_difference
from .exact_match import Answer, answers, by_task
from .runs import DEVICE, Ledger, parser, score_answers_only, start_workers, work
from .short_tasks import Pairs, banking, kitchen, slots, sql

RECIPE = Path(__file__).with_suffix(".yaml")
RESULTS = Path(__file__).parent / "results"
SEEDS, RATES = (0, 1, 2), (3e-4, 6e-4, 1e-3)
ROWS, DEVELOPMENT, HELD_OUT, OUT_OF_DOMAIN, LONGEST = 800, 50, 100, 60, 128
EXPERTS, STEP_ROWS, SEED_ROWS = 8, 32, 32  # checkpoints; rows of a step; of stage 3 for each expert
QUESTIONS = ("boolq", "ARC-Easy", "openbookqa")
SHORT = {"banking": banking, "kitchen": kitchen, "slots": slots, "sql": sql}
UNTRAINED_TASKS = (
    "boolean_expressions", "navigate", "sports_understanding", "web_of_lies", "hyperbaton", "snarks",
    "disambiguation_qa",
)  # fmt: skip
ROW = ("prompt", "completion", "domain")
SOLUTIONS = "gsm8k"  # whose answers are too long for exact matches
_LORA = ("method=lora", "adapter.r=16", "adapter.lora_alpha=32")
_RANDOM, _SIXTEEN = "router_init.buckets=none", "num_experts=16"
# Method → settings of the recipe, in the order in which a seed's runs are made; the mean has no recipe.
METHODS: dict[str, tuple[str, ...]] = {
    "upit 8": (),
    "lora, decay": (*_LORA, "sft.lr_scheduler_type=linear"),
    "mean, trained on": (),
    "upit 8, random routers": (_RANDOM,),
    "upit 16": (_SIXTEEN,),
    "upit 16, random routers": (_SIXTEEN, _RANDOM),
    "lora, constant": _LORA,
    "mean of the checkpoints": (),
}
CONTRASTS = (
    ("upit 8", "lora, decay"), ("upit 8", "mean, trained on"), ("upit 8", "upit 8, random routers"),
    ("upit 16", "upit 8"), ("upit 16", "upit 16, random routers"), ("upit 16", "lora, decay"),
    ("upit 8", "lora, constant"), ("mean, trained on", "lora, decay"), ("lora, decay", "lora, constant"),
    ("mean, trained on", "mean of the checkpoints"),
)  # fmt: skip


class Job(NamedTuple):
    """A method, `stage 1` or `no training`, with a seed at a rate."""

    method: str
    seed: int
    rate: float


# --- rows ------------------------------------------------------------------------------------------------------------


def read_pairs(source: Path) -> dict[str, Pairs]:
    """Task → questions and answers, for training and held out."""

    def questions(name: str, split: str) -> list[tuple[str, str]]:
        rows = json.loads((source / f"llm-adapters/{name}-{split}.json").read_text())
        return [(row["instruction"], row["output"]) for row in rows]

    def solutions(split: str) -> list[tuple[str, str]]:
        lines = (source / f"gsm8k/{split}.jsonl").read_text().splitlines()
        return [(row["question"], row["answer"]) for row in map(json.loads, lines)]

    pairs = {name: Pairs(questions(name, "train"), questions(name, "test")) for name in QUESTIONS}
    pairs[SOLUTIONS] = Pairs(solutions("train"), solutions("test"))
    return pairs | {name: read(source) for name, read in SHORT.items()}


def draw(pairs: Sequence[tuple[str, str]], count: int, seed: str, task: str, tokenizer: Any) -> list[dict[str, str]]:
    """As many rows, drawn at random from those that are short enough."""
    rows: list[dict[str, str]] = []
    unique = sorted(set(pairs))
    for question, answer in random.Random(seed).sample(unique, len(unique)):
        if len(rows) < count and len(tokenizer(f"{question}\n{answer}")["input_ids"]) < LONGEST:
            rows.append({"prompt": f"{question}\n", "completion": answer, "domain": task})
    return rows


def untrained_rows(source: Path, count: int) -> list[dict[str, str]]:
    """A row for every possible answer to each question; `is_right` marks the right one."""
    found = []
    for task in UNTRAINED_TASKS:
        examples = json.loads((source / f"bbh/{task}.json").read_text())["examples"]
        options = sorted({example["target"] for example in examples})
        for number, example in enumerate(random.Random(task).sample(examples, count)):
            question = f"Please choose the correct answer to the question: {example['input']}"
            prompt = f"{question}\n\nAnswer format: {'/'.join(options)}\n"
            found += [
                {"prompt": prompt, "completion": f"the correct answer is {option}", "domain": task,
                 "question": f"{task} {number}", "is_right": option == example["target"]}
                for option in options
            ]  # fmt: skip
    return found


class Study:
    """
    Args:
        source: the folder of the data sets.
        work: a folder for rows and what is made on the way.
        ledger: of the finished runs.
        fraction: the share of all rows, and of a step's, to make the study on a CPU; below 1 with the first seed.
    """

    def __init__(self, source: Path, work: Path, ledger: Ledger, fraction: float) -> None:
        self.work, self.ledger, self.fraction = work, ledger, fraction
        self.work.mkdir(parents=True, exist_ok=True)
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
        with FileLock(self.work / "rows.lock"):
            if not (self.work / "untrained.jsonl").exists():
                self.write_rows(source)
        self.step_rows = max(1, round(fraction * STEP_ROWS))
        self.seeds = SEEDS if fraction == 1 else SEEDS[:1]

    def write_rows(self, source: Path) -> None:
        def part(count: int) -> int:
            return max(2, round(self.fraction * count))

        measured = math.sqrt(self.fraction)  # few rows to train on need more to be told apart

        files: dict[str, list[dict[str, Any]]] = {"test": []}
        for task, (train, held_out) in read_pairs(source).items():
            test = draw(held_out, round(measured * HELD_OUT), "0", task, self.tokenizer)
            files["test"] += test
            asked = {row["prompt"] for row in test}
            pool = [pair for pair in train if f"{pair[0]}\n" not in asked]
            for seed in SEEDS:
                rows = draw(pool, part(ROWS) + part(DEVELOPMENT), str(seed), task, self.tokenizer)
                files.setdefault(f"train-{seed}", []).extend(rows[: part(ROWS)])
                files.setdefault(f"development-{seed}", []).extend(rows[part(ROWS) :])
        files["untrained"] = untrained_rows(source, round(measured * OUT_OF_DOMAIN))
        for name, rows in files.items():
            (self.work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.work / f"{name}.jsonl").read_text().splitlines()]

    # --- what is to be done ------------------------------------------------------------------------------------------

    def jobs(self) -> Iterator[Job]:
        """Runs that are missing and can be made now, the most urgent first."""
        records = self.ledger.records()
        done = {Job(run["method"], run["seed"], run["rate"]) for run in records}
        yield from (job for rate in RATES if (job := Job("lora, constant", SEEDS[0], rate)) not in done)
        if (rate := best_rate(records)) is not None:
            for seed in self.seeds:
                has_stage_1 = (self.stage_1_folder(seed, rate) / "prepare" / MARKER).exists()
                of_seed = [job for method in METHODS if (job := Job(method, seed, rate)) not in done]
                needs_it = any(not job.method.startswith("lora") for job in of_seed)
                if needs_it and not has_stage_1:
                    yield Job("stage 1", seed, rate)
                yield from (job for job in of_seed if has_stage_1 or job.method.startswith("lora"))
        if (job := Job("no training", SEEDS[0], 0.0)) not in done:
            yield job

    # --- a run -------------------------------------------------------------------------------------------------------

    def run(self, job: Job) -> None:
        """Make a run, measure its result and write it down."""
        started, folder, adapter, record = time.monotonic(), self.work / "-".join(map(str, job)), None, {}
        if job.method == "stage 1":
            return self.stage_1(job)
        if job.method.startswith("mean"):
            adapter = self.mean(job, folder)
        elif job.method != "no training":
            pipeline = self.pipeline(job, folder, METHODS[job.method])
            if job.method.startswith("upit"):
                shutil.copytree(self.stage_1_folder(job.seed, job.rate) / "prepare", folder / "prepare")
            adapter = pipeline.run()
            stages = {name: of["metrics"] for name, of in pipeline.records.items()}
            record["steps"] = {name: of["steps"] for name, of in stages.items() if "steps" in of}
            if "router_init" in stages:
                record |= {key: stages["router_init"][key] for key in ("steps_per_expert", "vectors_moved")}
        trained = time.monotonic() - started
        record |= self.measure(adapter, job.seed)
        self.ledger.add({**job._asdict(), "seconds": trained, **record}, f"{time.monotonic() - started:.0f} s")
        shutil.rmtree(folder, ignore_errors=True)

    def pipeline(self, job: Job, folder: Path, settings: Sequence[str]) -> UpIT:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
        experts = 16 if _SIXTEEN in settings else EXPERTS
        share = min(1.0, SEED_ROWS * experts / len(self.rows(f"train-{job.seed}")))
        common = [
            f"output_dir={folder}", f"seed={job.seed}", f"model.name_or_path={smollm2_folder()}",
            f"data.train={self.work / f'train-{job.seed}.jsonl'}", f"sft.learning_rate={job.rate}",
            f"sft.per_device_train_batch_size={self.step_rows}", f"router_init.seed_fraction={share}",
            "sft.use_cpu=true" if DEVICE == "cpu" else "sft.bf16=true",
        ]  # fmt: skip
        return UpIT(load_recipe(RECIPE, [*common, *settings]))

    def stage_1_folder(self, seed: int, rate: float) -> Path:
        return self.work / f"stage_1-{seed}-{rate}"

    def stage_1(self, job: Job) -> None:
        """The fine-tuning whose checkpoints become experts."""
        pipeline = self.pipeline(job, self.stage_1_folder(job.seed, job.rate), ())
        pipeline.join_processes()
        pipeline.root.mkdir()
        run_stage(pipeline.stages[0])

    def mean(self, job: Job, folder: Path) -> Path:
        """The mean of the checkpoints, trained on if the method says so."""
        shutil.rmtree(folder, ignore_errors=True)
        adapter = mean_adapter(expert_folders(self.stage_1_folder(job.seed, job.rate) / "prepare", EXPERTS), folder)
        if job.method == "mean, trained on":
            pipeline, seed = self.pipeline(job, folder / "recipe", ()), job.seed + 3  # as UpIT's last stage
            args = SFTConfig(
                str(folder / "state"), **pipeline.recipe.sft, num_train_epochs=pipeline.context.budget.post_train,
                seed=seed, data_seed=seed, save_strategy="no", report_to="none",
            )  # fmt: skip
            set_seed(args.seed)
            model = PeftModel.from_pretrained(self.base(), adapter, is_trainable=True)
            data = Dataset.from_list(self.rows(f"train-{job.seed}"))
            SFTTrainer(model, args, train_dataset=data, processing_class=self.tokenizer).train()
            model.save_pretrained(str(adapter))
        return adapter

    def base(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).to(DEVICE)

    def measure(self, adapter: Path | None, seed: int) -> dict[str, Any]:
        """Loss and right answers on development, held-out and untrained tasks' rows; of a mixture, its routing."""
        model = self.base()
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter).eval()
        measured: dict[str, Any] = {}
        data, collator = self.tokenized(self.rows(f"development-{seed}"))
        measured["development"] = by_task(answers(model, data, collator))["loss"]
        data, collator = self.tokenized(self.rows("test"))
        if routed_layers(model):
            with record_routing(model, sorted(set(data["domain"]))) as statistics:
                measured["test"] = by_task(answers(model, data, collator, statistics))["tasks"]
            routing = statistics.specialization().values()
            measured["routing"] = sum(float(of_L.mean()) for of_L in routing) / len(routing)
        else:
            measured["test"] = by_task(answers(model, data, collator))["tasks"]
        measured["untrained"] = self.choices(model)
        return measured

    def choices(self, model: Any) -> dict[str, list[float]]:
        """Task → the right answer's loss per token, and how often it is the most probable of the possible ones."""
        rows = self.rows("untrained")
        found = answers(model, *self.tokenized([{key: row[key] for key in ROW} for row in rows]))
        options: dict[str, list[float]] = defaultdict(list)
        right: dict[str, dict[str, Answer]] = defaultdict(dict)
        for row, answer in zip(rows, found, strict=True):
            options[row["question"]].append(answer.log_prob)
            if row["is_right"]:
                right[row["domain"]][row["question"]] = answer
        tasks = {}
        for task, of_task in right.items():
            loss = -sum(answer.log_prob for answer in of_task.values()) / sum(a.tokens for a in of_task.values())
            chosen = [answer.log_prob == max(options[question]) for question, answer in of_task.items()]
            tasks[task] = [loss, sum(chosen) / len(chosen)]
        return tasks

    def tokenized(self, rows: list[dict[str, Any]]) -> Any:
        return tokenized(Dataset.from_list(rows), self.tokenizer, preparation(2 * LONGEST))


def mean_adapter(experts: Sequence[Path], folder: Path) -> Path:
    """LoRAs side by side: with alpha as it was, of a rank so many times theirs, this is the mean of their updates."""
    states = [load_file(expert / "adapter_model.safetensors") for expert in experts]
    weights = {
        name: torch.cat([state[name] for state in states], dim=1 if ".lora_B." in name else 0) for name in states[0]
    }
    config = json.loads((experts[0] / "adapter_config.json").read_text())
    target = folder / "mean"
    target.mkdir(parents=True)
    (target / "adapter_config.json").write_text(json.dumps({**config, "r": len(experts) * config["r"]}))
    save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
    return target


# --- report ----------------------------------------------------------------------------------------------------------


def tuning(records: Sequence[dict[str, Any]]) -> dict[float, float]:
    """Rate → loss of the LoRA on the development rows."""
    tried = [run for run in records if run["method"] == "lora, constant" and run["seed"] == SEEDS[0]]
    return {run["rate"]: run["development"] for run in tried}


def best_rate(records: Sequence[dict[str, Any]]) -> float | None:
    """The best one, once all were tried."""
    tried = tuning(records)
    return min(tried, key=lambda rate: tried[rate]) if set(RATES) <= set(tried) else None


MEASURES = ("loss", "right", "out of domain: loss", "out of domain: right")


def values(run: dict[str, Any]) -> dict[str, float]:
    """`MEASURES`: means over tasks, right answers in per cent."""
    loss = np.mean([of_task for of_task, _ in run["test"].values()])
    right = np.mean([exact for task, (_, exact) in run["test"].items() if task != SOLUTIONS])
    other_loss, other_right = np.mean(list(run["untrained"].values()), axis=0)
    return dict(zip(MEASURES, map(float, (loss, 100 * right, other_loss, 100 * other_right)), strict=True))


def report(ledger: Ledger) -> str:
    """The page of the runs that there are."""
    records = ledger.records()
    rates = (best_rate(records), 0.0)  # 0: without training
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for method in (*METHODS, "no training"):
        of_seed = {run["seed"]: run for run in records if run["method"] == method and run["rate"] in rates}
        if of_seed:
            runs[method] = of_seed
    tried = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in sorted(tuning(records).items()))
    quarter = ledger.path.stem.endswith("quarter")
    command = "report --fraction 0.25" if quarter else "report"
    lines = [
        "# UpIT as its paper has it" + ", with a quarter of the rows" * quarter,
        "",
        f"`python -m studies.upit_paper {command}` writes this page; the script's head says what was fixed before its"
        " first run. SmolLM2-135M-Instruct; means over tasks and seeds. Right answers in per cent; *routing*: the share"
        " of a task's tokens that go to other experts than the average task's; *moved*: by how much of their length"
        " stage 3 moved the routing vectors; seconds of training after stage 1, with several runs at a time.",
        "",
        f"The LoRA's loss on development rows, by rate: {tried}.",
        "",
        f"| method | seeds | {' | '.join(MEASURES)} | routing | moved | seconds |",
        f"|{'---|' * (5 + len(MEASURES))}",
    ]
    for method, of_seed in runs.items():
        made = list(of_seed.values())
        cells = [method, str(len(made))]
        cells += [_form(name).format(np.mean([values(run)[name] for run in made])) for name in MEASURES]
        for key in ("routing", "vectors_moved"):
            cells.append(f"{np.mean([run[key] for run in made]):.1%}" if key in made[0] else "")
        lines.append(f"| {' | '.join(cells)} | {np.mean([run['seconds'] for run in made]):.0f} |")
    lines += ["", "Differences, with 95 % t intervals over seeds if there are several; of right answers in points.", ""]
    lines += [f"| A − B | seeds | {' | '.join(MEASURES)} |", f"|{'---|' * (2 + len(MEASURES))}"]
    for a, b in CONTRASTS:
        seeds = sorted(runs.get(a, {}).keys() & runs.get(b, {}).keys())
        if seeds:
            cells = [f"{a} − {b}", str(len(seeds))]
            for name in MEASURES:
                pairs = [[values(runs[method][seed])[name] for seed in seeds] for method in (a, b)]
                if len(seeds) == 1:
                    cells.append(_form(name, "+").format(pairs[0][0] - pairs[1][0]))
                    continue
                mean, *interval = (_form(name, "+").format(value) for value in paired_difference(*pairs))
                cells.append(f"{mean} [{', '.join(interval)}]")
            lines.append(f"| {' | '.join(cells)} |")
    for title, key in (("Held-out rows of the trained tasks", "test"), ("Tasks that were not trained on", "untrained")):
        tasks = sorted({task for of_seed in runs.values() for run in of_seed.values() for task in run[key]})
        lines += ["", f"{title}: loss, right answers.", "", f"| method | {' | '.join(tasks)} |"]
        lines.append(f"|{'---|' * (1 + len(tasks))}")
        for method, of_seed in runs.items():
            means = [np.mean([run[key][task] for run in of_seed.values()], axis=0) for task in tasks]
            lines.append(f"| {method} | {' | '.join('{:.3f}, {:.0%}'.format(*mean) for mean in means)} |")
    return "\n".join(lines) + "\n"


def _form(measure: str, sign: str = "") -> str:
    return f"{{:{sign}.1f}}" if measure.endswith("right") else f"{{:{sign}.4f}}"


def main() -> None:
    options = parser(__doc__, workers=True)
    options.add_argument("--source", type=Path, default=Path("data"))
    options.add_argument(
        "--fraction", type=float, default=1.0, help="of the rows; only 1 and .25 write to studies/results"
    )
    args = options.parse_args()
    folder = args.work.absolute() / "upit_paper" / f"{args.fraction:g}"
    results = (RESULTS if args.fraction in (1, 0.25) else folder) / ("upit_paper" + "_quarter" * (args.fraction < 1))
    ledger = Ledger(results.with_suffix(".jsonl"))
    if args.command == "report":
        results.with_suffix(".md").write_text(page := report(ledger))
        return print(page)
    if args.worker is None:
        more = ("--source", str(args.source), "--fraction", str(args.fraction))
        raise SystemExit(start_workers("upit_paper", args, *more))
    score_answers_only()
    torch.set_float32_matmul_precision("high")  # TF32 where a GPU computes in float32
    work(Study(args.source, folder, ledger, args.fraction))


if __name__ == "__main__":
    main()
