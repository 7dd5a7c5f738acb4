"""
Mixture against LoRA where there are many rows: about 15,000 rows of five tasks, on a GPU. SmolLM2-135M-Instruct.

    python -m studies.scale run --source FOLDER [--workers 7]   # resumes where the ledger ends
    python -m studies.scale report                              # the page, in studies/results
    python -m studies.scale run --source FOLDER --fraction 0.002   # a try on a CPU, with a ledger in the work folder

The source has gsm8k and text2sql as in `studies.short_tasks`; `llm-adapters`, {boolq, ARC-Easy, openbookqa}-{train,
test}.json from github.com/AGI-Edgerunners/LLM-Adapters; and mbpp/mbpp.jsonl from github.com/google-research.

Fixed before the first run. Rows of at most 256 tokens: half of the training rows of BoolQ (questions alone), ARC-Easy,
OpenBookQA and GSM8K, and 4,000 of WikiSQL; and 200 of each task as *development rows*. Held out: 300 of each task,
whose questions are no training questions. Training: one pass, 32 rows a step without padding, in random order; a rate
that rises for 5 % of the steps and then falls linearly to 0; the base in bfloat16, adapters in float32, no dropout.

Methods, all on all linear layers of attention and FFN:

- *LoRA, k·r* and *LoRA, n·r*: rank 16 and 64, alpha = 2·rank;
- *mixture*: 8 experts of rank 8, 2 per token, a linear router in each layer, the library's mixing, balancing loss and
  alpha, which gives the two experts together the scale of a LoRA with alpha = 2·rank;
- *frozen routers*: the same with random routers that are not trained and have no balancing loss.

Rates: 5e-4, 1e-3 and 2e-3 with seed 0, of which the development rows choose one for each method by their loss; *frozen
routers* has the mixture's. Seeds 0 to 3, which draw the initial values and the order of rows.

Measured in float32: loss per answer token, a mean over tasks; right answers (greedy decoding gives the answer exactly),
but of GSM8K, where a solution has many right wordings; *harm*, the loss per token on 64 general texts (32 programming
tasks, 32 requests of our own) above the base's. Seconds of training are those beside the other workers on one GPU;
memory is the peak of a worker's training and has the base twice.

Contrasts, paired by seed, with 95 % t intervals: *mixture* − *LoRA, k·r*, which decides; *mixture* − *LoRA, n·r*;
*mixture* − *frozen routers*; *LoRA, n·r* − *LoRA, k·r*. For right answers also the interval over held-out rows.

Predictions.

1. *Mixture* − *LoRA, k·r*: loss between −.01 and +.01, right answers between −1.5 and +1.5 points.
2. *LoRA, n·r* − *LoRA, k·r*: loss between −.02 and 0, right answers between −.5 and +2 points. So *mixture* is no
   better than *LoRA, n·r*: loss between 0 and +.02.
3. *Mixture* − *frozen routers*: loss between −.005 and +.005; the interval over rows of right answers includes 0.
4. More than the base in each task; BoolQ, of questions alone, at most 70 % right with every method.
5. Harm of all methods between 0 and .5; that of the mixture within .05 of *LoRA, k·r*'s.
6. The mixture's training takes 1.3 to 2.5 times the seconds of *LoRA, k·r*.

Run so far: all rates with seed 0, further seeds of *LoRA, k·r* alone; no frozen routers. The highest rate is the best
for all three methods, so a higher one may be better still. All predictions that can be looked at with one seed held.
Nobody had asked what happened with *LoRA, n·r*: its harm is .2, that of the others below .08 with every seed.
"""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset, DatasetDict, load_from_disk
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from moe_peft.training.preparation import preparation, tokenized

from .differences import over_rows, paired_difference
from .exact_match import answers
from .request_gate import first_general_texts
from .runs import DEVICE, Ledger, parser, score_answers_only, start_workers, work
from .short_tasks import Pairs, _length, _lines, sql

RESULTS = Path(__file__).parent / "results"
SEEDS, RATES = (0, 1, 2, 3), (5e-4, 1e-3, 2e-3)
DEVELOPMENT, HELD_OUT, SQL_ROWS, LONGEST, ROWS_PER_STEP = 200, 300, 4000, 256, 32
QUIZZES = ("boolq", "ARC-Easy", "openbookqa")
TASKS, ANSWERED = (*QUIZZES, "sql", "gsm8k"), (*QUIZZES, "sql")  # those with a loss, and with right answers


def _lora(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _mixture() -> MoELoraConfig:
    return MoELoraConfig(num_experts=8, top_k=2, r=8, target_modules="all-linear", task_type="CAUSAL_LM")


METHODS: dict[str, Callable[[], Any]] = {
    "LoRA, k·r": lambda: _lora(16), "mixture": _mixture, "frozen routers": _mixture, "LoRA, n·r": lambda: _lora(64),
}  # fmt: skip
CONTRASTS = (
    ("mixture", "LoRA, k·r"), ("mixture", "LoRA, n·r"), ("mixture", "frozen routers"), ("LoRA, n·r", "LoRA, k·r"),
)  # fmt: skip


class Job(NamedTuple):
    """A method of a seed at a rate, or the base."""

    method: str
    seed: int
    rate: float


# --- rows ------------------------------------------------------------------------------------------------------------


def read_tasks(source: Path) -> dict[str, Pairs]:
    """Task → questions and answers."""
    tasks = {"sql": sql(source)}
    for task in QUIZZES:
        files = [json.loads((source / f"llm-adapters/{task}-{name}.json").read_text()) for name in ("train", "test")]
        tasks[task] = Pairs(*([(row["instruction"], row["output"]) for row in rows] for rows in files))
    files = [_lines(source / f"gsm8k/{name}.jsonl") for name in ("train", "test")]
    tasks["gsm8k"] = Pairs(*([(row["question"], row["answer"]) for row in rows] for rows in files))
    return tasks


def prepare(source: Path, folder: Path, fraction: float) -> None:
    """Tokenize a fraction of all rows into a folder, unless it is there: `train`, `development`, `test`, `general`."""
    if folder.is_dir():
        return
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    rows: dict[str, list[dict[str, str]]] = {name: [] for name in ("train", "development", "test", "general")}

    def count(all_rows: int) -> int:
        return max(2, round(fraction * all_rows))

    def drawn(pairs: Iterable[tuple[str, str]], task: str, at_most: int) -> list[dict[str, str]]:
        mixed = random.Random(0).sample(found := [*dict.fromkeys(pairs)], len(found))
        short = islice((pair for pair in mixed if _length(tokenizer, pair) <= LONGEST), at_most)
        return [{"prompt": f"{question}\n", "completion": answer, "domain": task} for question, answer in short]

    for task, pairs in read_tasks(source).items():
        of_all = SQL_ROWS if task == "sql" else (len(pairs.train) - DEVELOPMENT) // 2
        trained = drawn(pairs.train, task, count(DEVELOPMENT) + count(of_all))
        rows["development"] += trained[: count(DEVELOPMENT)]
        rows["train"] += trained[count(DEVELOPMENT) :]
        seen = {question for question, _ in pairs.train}
        rows["test"] += drawn((pair for pair in pairs.held_out if pair[0] not in seen), task, count(HELD_OUT))
    for texts in ([row["text"] for row in _lines(source / "mbpp/mbpp.jsonl")], first_general_texts()):
        rows["general"] += [{"text": text, "domain": "general"} for text in random.Random(0).sample(texts, count(32))]
    data = DatasetDict()
    for name, of_name in rows.items():
        made, _ = tokenized(Dataset.from_list(of_name), tokenizer, preparation(2 * LONGEST))
        data[name] = made.select_columns(["input_ids", "labels", "domain"])
    partial = folder.with_suffix(".partial")
    data.save_to_disk(partial)
    partial.rename(folder)


# --- runs ------------------------------------------------------------------------------------------------------------


class Scale:
    """
    Args:
        work: the folder with the rows, for locks and the trainer's state.
    """

    def __init__(self, work: Path, ledger: Ledger) -> None:
        self.work, self.ledger = work, ledger
        self.rows = load_from_disk(work / "rows")
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
        _, self.collator = tokenized(Dataset.from_list([{"text": "one"}]), self.tokenizer, preparation(LONGEST))
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        self.base = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=dtype).to(DEVICE)

    def jobs(self) -> Iterator[Job]:
        done = {Job(run["method"], run["seed"], run["rate"]) for run in self.ledger.records()}
        yield from (job for job in self.planned() if job not in done)

    def planned(self) -> Iterator[Job]:
        """All runs that can be made by now, those that the first contrast needs before others."""
        first = ("mixture", "LoRA, k·r")
        yield from (Job(method, SEEDS[0], rate) for rate in RATES for method in first)
        yield Job("base", 0, 0.0)
        # Without those whose rates have not all been tried: their further seeds wait.
        rates = {method: rate for method in METHODS if (rate := chosen_rate(self.ledger, method)) is not None}
        yield from (Job(method, seed, rates[method]) for seed in SEEDS[1:] for method in first if method in rates)
        yield from (Job("frozen routers", seed, rates["mixture"]) for seed in SEEDS if "mixture" in rates)
        yield from (Job("LoRA, n·r", SEEDS[0], rate) for rate in RATES)
        yield from (Job("LoRA, n·r", seed, rates["LoRA, n·r"]) for seed in SEEDS[1:] if "LoRA, n·r" in rates)

    def run(self, job: Job) -> None:
        model, record = copy.deepcopy(self.base), {**job._asdict()}
        if job.method != "base":
            set_seed(job.seed)
            model = get_peft_model(model, METHODS[job.method]())
            record |= self.train(model, job)
        model = model.float()
        for name in ("development", "test"):
            record[name] = self.answers(model, name)
        record["general"] = self.answers(model, "general")["general"][0]
        loss = sum(record["test"][task][0] for task in TASKS) / len(TASKS)
        self.ledger.add(record, f"loss {loss:.4f}, {record.get('seconds', 0):.0f} s")

    def train(self, model: Any, job: Job) -> dict[str, float]:
        """Train, and say how long it took and what memory it needed."""
        routed = isinstance(model.peft_config["default"], MoELoraConfig)
        config, trainer = (MoESFTConfig, MoESFTTrainer) if routed else (SFTConfig, SFTTrainer)
        frozen: dict[str, Any] = {"training_stage": "rest"} if job.method == "frozen routers" else {}
        args = config(
            str(self.work / "state"), num_train_epochs=1, per_device_train_batch_size=ROWS_PER_STEP,
            learning_rate=job.rate, lr_scheduler_type="linear", warmup_steps=self.warmup_steps(), seed=job.seed,
            bf16=DEVICE == "cuda", use_cpu=DEVICE == "cpu", gradient_checkpointing=False,
            padding_free=True, max_length=None, dataset_kwargs={"skip_prepare_dataset": True},
            dataloader_num_workers=int(DEVICE == "cuda"), save_strategy="no", report_to="none", disable_tqdm=True,
            logging_strategy="no", logging_nan_inf_filter=False,  # neither waits for the GPU
            **frozen,
        )  # fmt: skip
        rows = self.rows["train"].select_columns(["input_ids", "labels"])
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        trainer(model, args, train_dataset=rows, processing_class=self.tokenizer).train()
        memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
        return {"seconds": round(time.monotonic() - started, 1), "memory": round(memory, 2)}

    def warmup_steps(self) -> int:
        return math.ceil(0.05 * len(self.rows["train"]) / ROWS_PER_STEP)

    def answers(self, model: Any, name: str) -> dict[str, list[Any]]:
        """Task → loss per answer token, and which rows were answered right, as text of 0 and 1."""
        found = answers(model, self.rows[name], self.collator)
        measured = {}
        for task in sorted({answer.task for answer in found}):
            of_task = [answer for answer in found if answer.task == task]
            loss = -sum(answer.log_prob for answer in of_task) / sum(answer.tokens for answer in of_task)
            measured[task] = [loss, "".join(str(int(answer.is_match)) for answer in of_task)]
        return measured


# --- report ----------------------------------------------------------------------------------------------------------


def chosen_rate(ledger: Ledger, method: str) -> float | None:
    """The rate with the lowest loss on development rows, once all have been tried."""
    runs = ledger.records(method="mixture" if method == "frozen routers" else method, seed=SEEDS[0])
    return min(runs, key=lambda run: _loss(run, "development"))["rate"] if len(runs) == len(RATES) else None


def _loss(run: dict[str, Any], split: str = "test") -> float:
    return sum(run[split][task][0] for task in TASKS) / len(TASKS)


def _matches(run: dict[str, Any], tasks: Iterable[str] = ANSWERED) -> torch.Tensor:
    """[rows] of these tasks, 1 for a right answer."""
    return torch.tensor([int(x) for task in tasks for x in run["test"][task][1]]).double()


def _mean(values: Iterable[float]) -> float:
    return sum(found := [*values]) / len(found)


def report(ledger: Ledger) -> str:
    """The page of the runs that there are."""
    runs = {"base": ledger.records(method="base")}
    for method in METHODS:
        if rate := chosen_rate(ledger, method):
            runs[method] = ledger.records(method=method, rate=rate)
    runs = {method: of_method for method, of_method in runs.items() if of_method}
    lines = [
        "# Mixture against LoRA where there are many rows",
        "",
        "`python -m studies.scale report` writes this page; the script's head says what was fixed before its first run."
        " SmolLM2-135M-Instruct, five tasks; means over seeds. *Loss*: per answer token of held-out rows, a mean over"
        " tasks. *Harm*: loss per token of general texts above the base's. Seconds of training are those beside other"
        " workers on the same GPU.",
        "",
        f"| method | seeds | rate | loss | right | {' | '.join(ANSWERED)} | harm | seconds | peak, GiB |",
        f"|{'---|' * (8 + len(ANSWERED))}",
    ]
    for method, of_method in runs.items():
        cells = [method, str(len(of_method)), f"{of_method[0]['rate']:g}", f"{_mean(map(_loss, of_method)):.4f}"]
        for tasks in (ANSWERED, *((task,) for task in ANSWERED)):
            cells.append(f"{_mean(float(_matches(run, tasks).mean()) for run in of_method):.1%}")
        harm = [run["general"] - base["general"] for base in runs.get("base", []) for run in of_method]
        cells.append(f"{_mean(harm):.3f}" if harm else "")
        if method == "base":
            cells += ["", ""]
        else:
            cells.append(f"{_mean(run['seconds'] for run in of_method):.0f}")
            cells.append(f"{_mean(run['memory'] for run in of_method):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"| loss | {' | '.join(TASKS)} |", f"|{'---|' * (1 + len(TASKS))}"]
    for method, of_method in runs.items():
        losses = [f"{_mean(run['test'][task][0] for run in of_method):.4f}" for task in TASKS]
        lines.append(f"| {method} | {' | '.join(losses)} |")
    lines += [
        "",
        f"| development loss, seed {SEEDS[0]} | {' | '.join(f'{rate:g}' for rate in RATES)} |",
        f"|{'---|' * (1 + len(RATES))}",
    ]
    for method in ("LoRA, k·r", "mixture", "LoRA, n·r"):
        tried = {run["rate"]: _loss(run, "development") for run in ledger.records(method=method, seed=SEEDS[0])}
        lines.append(f"| {method} | {' | '.join(f'{tried[r]:.4f}' if r in tried else '' for r in RATES)} |")
    lines += [
        "",
        "Differences with 95 % intervals; those of right answers in points.",
        "",
        "| A − B | seeds | loss, over seeds | right, over seeds | right, over rows |",
        "|---|---|---|---|---|",
    ]
    for a, b in CONTRASTS:
        seeds = sorted({run["seed"] for run in runs.get(a, [])} & {run["seed"] for run in runs.get(b, [])})
        pair = [[run for seed in seeds for run in runs[method] if run["seed"] == seed] for method in (a, b)]
        if len(seeds) == 1:
            loss = f"{_loss(pair[0][0]) - _loss(pair[1][0]):+.4f}"
            lines.append(f"| {a} − {b} | 1 | {loss} | | {_over_rows(*pair)} |")
        elif seeds:
            difference = paired_difference(*([_loss(run) for run in of] for of in pair))
            right = paired_difference(*([100 * float(_matches(run).mean()) for run in of] for of in pair))
            over_seeds = f"{right.mean:+.1f} [{right.low:+.1f}, {right.high:+.1f}]"
            cells = [f"{a} − {b}", str(len(seeds)), " ".join(difference.cells()), over_seeds, _over_rows(*pair)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _over_rows(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> str:
    """A row's difference is its mean over seeds."""
    pair = [torch.stack([_matches(run) for run in runs]) for runs in (a, b)]
    return over_rows((pair[0] - pair[1]).mean(0))


def main() -> None:
    options = parser(__doc__, workers=True)
    options.add_argument("--source", type=Path, default=Path("data"))
    options.add_argument("--fraction", type=float, default=1.0, help="of all rows, for a try")
    args = options.parse_args()
    is_try = args.fraction < 1
    folder = args.work / (f"scale-{args.fraction:g}" if is_try else "scale")
    results = folder if is_try else RESULTS
    ledger = Ledger(results / "scale.jsonl")
    if args.command == "report":
        (results / "scale.md").write_text(page := report(ledger))
        return print(page)
    if args.worker is None:
        prepare(args.source, folder / "rows", args.fraction)
        raise SystemExit(start_workers("scale", args, "--fraction", str(args.fraction)))
    if DEVICE == "cpu":
        score_answers_only()
    work(Scale(folder, ledger))


if __name__ == "__main__":
    main()
