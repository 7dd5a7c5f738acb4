"""
Four LoRA adapters of SmolLM2-135M-Instruct, trained apart on four real tasks, as the experts of one MoE adapter: what
each way to set its gates without training gives on held-out rows.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from moe_peft.demo.smollm2 import smollm2_folder
from studies.runs import Ledger

FOLDER, RESULTS = Path(".cache/combine"), Path(__file__).parent / "results"
ROWS = {"train": 320, "test": 16}  # of each task
STEPS = {"intents": 40, "slots": 28, "queries": 24, "science": 24}  # of about 8,000 tokens together
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


def train(task: str, rows: Dataset, folder: Path) -> float:
    """Train a task's LoRA on its FFNs; the last logged loss."""
    set_seed(0)
    base = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
    args = SFTConfig(
        str(FOLDER / "state"), max_steps=STEPS[task], per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine", max_length=LONGEST, gradient_checkpointing=False, bf16=False, use_cpu=True,
        logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    lora = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=["gate_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    trainer = SFTTrainer(
        get_peft_model(base, lora),
        args,
        train_dataset=rows.filter(lambda row: row["domain"] == task),
        processing_class=AutoTokenizer.from_pretrained(smollm2_folder()),
    )
    trainer.train()
    trainer.model.save_pretrained(str(folder))
    return next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry)


def run(data: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    ledger, tokenizer = Ledger(FOLDER / "runs.jsonl"), AutoTokenizer.from_pretrained(smollm2_folder())
    if not (FOLDER / "test.jsonl").exists():
        write_rows(data, tokenizer)
    for task in TASKS:
        if not ledger.has(way="train", task=task):
            loss = train(task, read_rows("train"), FOLDER / task)
            ledger.add({"way": "train", "task": task, "seed": 0}, f"loss {loss:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options.data)


if __name__ == "__main__":
    main()
