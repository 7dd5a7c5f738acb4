"""
Four LoRA adapters of SmolLM2-135M-Instruct, trained apart on four real tasks, as the experts of one MoE adapter: what
each way to set its gates without training gives on held-out rows, and 100 steps of post-training after it.

    python -m studies.combine run --data FOLDER    # resumes where it was; writes .cache/combine
    python -m studies.combine report               # results/combine.md

`FOLDER` has `clinc150/data_full.json`, `snips/train_*_full.json` and `snips/validate_*.json` (nlu-benchmark),
`text2sql/wikisql.json.bz2` (text2sql-data) and `llm-adapters/ARC-Easy-{train,test}.json`, under the names that their
repositories give them.
"""

from __future__ import annotations

import argparse
import bz2
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from moe_peft import force_experts, init_gates, lora_to_moe
from moe_peft.analysis.figures import plot_bars
from moe_peft.combine.held_out import first_choices
from moe_peft.demo.smollm2 import smollm2_folder
from moe_peft.models.gates import uniform_gates
from moe_peft.models.layer import routed_layers
from moe_peft.training.preparation import calibration_batches, preparation, tokenized
from studies.exact_match import measure
from studies.runs import Ledger

FOLDER, RESULTS = Path(".cache/combine"), Path(__file__).parent / "results"
ROWS = {"train": 640, "test": 32}  # of each task
STEPS = {"intents": 80, "slots": 56, "queries": 24, "science": 24}  # of 10,000 to 18,000 tokens
POST_STEPS, POST_LEARNING_RATE = 100, 5e-4
BATCH, LONGEST = 8, 48  # rows of a step; tokens of a row
LEARNING_RATE, RANK = 1e-3, 8

# --- data ------------------------------------------------------------------------------------------------------------

Pairs = Iterator[tuple[str, str]]  # prompt, answer


def intents(data: Path, split: str) -> Pairs:
    """clinc150: which of 150 intents an utterance has."""
    for text, intent in json.loads((data / "clinc150/data_full.json").read_text())[split]:
        yield f"Which intent does this have? {text}", intent.replace("_", " ")


def slots(data: Path, split: str) -> Pairs:
    """snips: the slots of a request, in its order."""
    for path in sorted((data / "snips").glob({"train": "train_*_full.json", "test": "validate_*.json"}[split])):
        for (requests,) in [json.loads(path.read_text("latin-1" if split == "train" else "utf-8")).values()]:
            for request in requests:
                parts = request["data"]
                filled = [f"{part['entity']}: {part['text'].strip()}" for part in parts if "entity" in part]
                yield f"Which slots are filled? {''.join(p['text'] for p in parts).strip()}", "; ".join(filled)


def queries(data: Path, split: str) -> Pairs:
    """WikiSQL: a question as SQL, without the table's columns."""
    for entry in json.loads(bz2.decompress((data / "text2sql/wikisql.json.bz2").read_bytes())):
        sql = entry["sql"][0].replace("TABLEalias0.", "").replace(" AS TABLEalias0", "")
        for sentence in entry["sentences"]:
            if sentence["question-split"] == split:
                for name, value in sentence["variables"].items():
                    sql = sql.replace(name, value)
                yield f"Write this as SQL: {sentence['original']}", sql


def science(data: Path, split: str) -> Pairs:
    """ARC-Easy: which answer is right."""
    for row in json.loads((data / f"llm-adapters/ARC-Easy-{split}.json").read_text()):
        question = row["instruction"].removeprefix("Please choose the correct answer to the question: ")
        yield " ".join(question.split("\n\nAnswer format")[0].split()), row["output"]


TASKS: dict[str, Callable[[Path, str], Pairs]] = {f.__name__: f for f in (intents, slots, queries, science)}


def write_rows(data: Path, tokenizer: Any) -> None:
    """`train.jsonl` and `test.jsonl`: short rows of each task, drawn at random."""
    for split, count in ROWS.items():
        rows = []
        for task, read in TASKS.items():
            pairs = sorted(set(read(data, split)))
            random.Random(0).shuffle(pairs)
            short = (pair for pair in pairs if len(tokenizer("\n".join(pair))["input_ids"]) <= LONGEST - 2)
            for (prompt, answer), _ in zip(short, range(count), strict=False):
                rows.append({"prompt": f"{prompt}\n", "completion": answer, "domain": task})
        (FOLDER / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(split: str) -> Dataset:
    return Dataset.from_list([json.loads(line) for line in (FOLDER / f"{split}.jsonl").read_text().splitlines()])


# --- the adapters ----------------------------------------------------------------------------------------------------


def read_base() -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)


def train(model: Any, rows: Dataset, steps: int, learning_rate: float) -> float:
    """Train an adapter; the last logged loss."""
    set_seed(0)
    args = SFTConfig(
        str(FOLDER / "state"), max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=learning_rate,
        lr_scheduler_type="cosine", max_length=LONGEST, gradient_checkpointing=False, bf16=False, use_cpu=True,
        logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    return next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry)


def train_alone(task: str, folder: Path) -> float:
    """Train a task's LoRA on its FFNs, and save it."""
    lora = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=["gate_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(read_base(), lora)
    loss = train(model, read_rows("train").filter(lambda row: row["domain"] == task), STEPS[task], LEARNING_RATE)
    model.save_pretrained(str(folder))
    return loss


# --- the mixture ------------------------------------------------------------------------------------------------------

CALIBRATION, SEEDS = 24, (0, 1, 2)  # texts of each task; of their draw
GATES = ("arrow", "ridge", "prompts")


def measured(model: Any, parts: dict[str, Dataset], collator: Any) -> dict[str, Any]:
    """Loss and exact answers of each task, and the share of its tokens whose first choice is its own expert."""
    tasks: dict[str, Any] = {}
    with first_choices(model, list(parts), len(TASKS)) as statistics:
        for task, rows in parts.items():
            statistics.current = task
            tasks |= measure(model, rows, collator)["tasks"]
    own = {task: float(share_LN[:, i].mean()) for i, (task, share_LN) in enumerate(statistics.shares().items())}
    return {
        "loss": {t: loss for t, (loss, _) in tasks.items()},
        "exact": {t: x for t, (_, x) in tasks.items()},
        "own": own,
    }


@contextmanager
def active(model: Any, k: int) -> Iterator[None]:
    """`k` experts for each token."""
    layers = [(layer.module, layer.adapter) for layer in routed_layers(model)]
    before = [layer.moe_lora_spec[name] for layer, name in layers]
    for layer, name in layers:
        layer.moe_lora_spec[name] = replace(layer.moe_lora_spec[name], top_k=k)
    yield
    for (layer, name), spec in zip(layers, before, strict=True):
        layer.moe_lora_spec[name] = spec


def mixture() -> Any:
    """The four adapters as experts, with random gates."""
    set_seed(0)
    return lora_to_moe(read_base(), [FOLDER / task for task in TASKS])


def set_gates(model: Any, gates: str, seed: int, tokenizer: Any) -> None:
    """Set the gates with the texts that a seed draws of each task."""
    train, of_task = read_rows("train"), defaultdict(list)
    for i, task in enumerate(train["domain"]):
        of_task[task].append(i)
    drawn = [i for rows in of_task.values() for i in random.Random(seed).sample(rows, CALIBRATION)]
    texts = train.select(drawn).map(lambda row: {"expert": list(TASKS).index(row["domain"])})
    batches = calibration_batches(texts, tokenizer, len(texts), max_length=LONGEST, columns=["expert"])
    init_gates(model, gates, batches)


def run(data: Path) -> None:
    """Make what the ledger lacks: the adapters, every way to route, and post-training."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    ledger, tokenizer = Ledger(FOLDER / "runs.jsonl"), AutoTokenizer.from_pretrained(smollm2_folder())
    if not (FOLDER / "test.jsonl").exists():
        write_rows(data, tokenizer)
    for task in TASKS:
        if not ledger.records(way="train", task=task):
            loss = train_alone(task, FOLDER / task)
            ledger.add({"way": "train", "task": task, "seed": 0, "k": 0}, f"loss {loss:.3f}")
    rows, collator = tokenized(read_rows("test"), tokenizer, preparation(LONGEST))
    parts = {task: rows.filter(lambda row, task=task: row["domain"] == task) for task in TASKS}

    def add(model: Any, way: str, seed: int, k: int) -> None:
        started = time.process_time()
        record = measured(model.eval(), parts, collator)
        loss = sum(record["loss"].values()) / len(TASKS)
        note = f"loss {loss:.3f} in {time.process_time() - started:.0f} s"
        ledger.add({"way": way, "seed": seed, "k": k, **record}, note)

    model = mixture()
    fixed: dict[str, Any] = {
        "random gates": nullcontext(), "base": model.disable_adapter(),
        **{f"{task} alone": force_experts(model, torch.tensor([i])) for i, task in enumerate(TASKS)},
        "mean of the adapters": uniform_gates(model, "projection"), "uniform gates": uniform_gates(model),
    }  # fmt: skip
    for way, context in fixed.items():
        if not ledger.records(way=way):
            with context:
                add(model, way, 0, 2)
    for seed, k in ((0, 2), (0, 1), *((seed, 2) for seed in SEEDS[1:])):
        for gates in GATES:
            if ledger.records(way=f"{gates} gates", seed=seed, k=k) or (gates == "arrow" and seed):
                continue
            set_gates(model, gates, seed, tokenizer)
            with active(model, k):
                add(model, f"{gates} gates", seed, k)
    for gates in ("random", *GATES):
        way = f"{gates} gates, post-trained"
        if not ledger.records(way=way):
            model = mixture()
            if gates != "random":
                set_gates(model, gates, 0, tokenizer)
            train(model, read_rows("train"), POST_STEPS, POST_LEARNING_RATE)
            add(model, way, 0, 2)


# --- report ----------------------------------------------------------------------------------------------------------


def report() -> None:
    """`results/combine.md`"""
    records = [record for record in Ledger(FOLDER / "runs.jsonl").records() if record["way"] != "train"]
    lines = [
        f"| way to route | {' | '.join(TASKS)} | mean loss | exact answers | own expert first |",
        f"|---|{'---|' * (len(TASKS) + 3)}",
    ]
    ways = dict.fromkeys((r["way"], r["k"] if r["way"].removesuffix(" gates") in GATES else 0) for r in records)
    for way, k in ways:
        runs = [r for r in records if r["way"] == way and (not k or r["k"] == k)]
        cells = [spread([r["loss"][task] for r in runs]) for task in TASKS]
        cells.append(spread([sum(r["loss"].values()) / len(TASKS) for r in runs]))
        exact = [sum(r["exact"].values()) / len(TASKS) for r in runs]
        own = [sum(r["own"].values()) / len(TASKS) for r in runs if r["own"]]
        routed = way.split()[0] in ("random", *GATES)
        cells += [spread(exact, "{:.0%}"), spread(own, "{:.0%}") if routed else ""]
        seeds = f" ({len(runs)} draws)" if len(runs) > 1 else ""
        lines.append(f"| {way}{f', k = {k}' if k else ''}{seeds} | {' | '.join(cells)} |")
    alone = {r["way"].removesuffix(" alone"): r for r in records if r["way"].endswith(" alone")}
    if alone.keys() == TASKS.keys():
        losses = [alone[task]["loss"][task] for task in TASKS]
        exact = sum(alone[task]["exact"][task] for task in TASKS) / len(TASKS)
        cells = [f"{loss:.3f}" for loss in (*losses, sum(losses) / len(TASKS))]
        lines.append(f"| **each task its own adapter** | {' | '.join(cells)} | {exact:.0%} | |")
        of_way = {(r["way"], r["k"]): r["loss"] for r in reversed(records)}
        shown = {"base": ("base", 2), "mean of the adapters": ("mean of the adapters", 2),
                 "mixture, ridge gates": ("ridge gates", 1)}  # fmt: skip
        losses = {name: of_way[way] for name, way in shown.items() if way in of_way}
        losses["the task's own adapter"] = {task: alone[task]["loss"][task] for task in TASKS}
        title = "Four LoRA adapters of SmolLM2-135M as one model, not trained further:\nheld-out loss per answer token"
        plot_bars(losses, RESULTS / "combine.png", title)
    RESULTS.joinpath("combine.md").write_text(
        HEAD.format(test=ROWS["test"], calibration=CALIBRATION, steps=POST_STEPS) + "\n".join(lines) + "\n"
    )


def spread(values: list[float], form: str = "{:.3f}") -> str:
    """The mean, and the range over several draws."""
    mean = form.format(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))}–{form.format(max(values))})"


HEAD = """# Gates without training for four LoRA adapters

SmolLM2-135M-Instruct and four LoRA adapters of rank 8 on all FFN projections, each trained alone, briefly (24 to 80
steps of 8 rows of at most 48 tokens): the intent of an utterance (clinc150), the slots of a request (snips), a question
as SQL (WikiSQL), the right one of four answers (ARC-Easy). The mixture mixes outputs. {calibration} training rows of
each task calibrate the gates; {test} held-out rows of each task are scored: the loss per answer token, the answers that
greedy decoding gives exactly, and the share of tokens whose first choice is the adapter of their own task, a mean over
30 layers (by chance 25 %). k experts serve a token, 2 where nothing is said. Post-training: {steps} steps of 8 rows of
all four tasks, routers and experts.
Made by `python -m studies.combine`.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options.data)
    else:
        report()


if __name__ == "__main__":
    main()
