"""
Six tasks of real data with short rows and one right answer each, for studies on a small model.

    python -m studies.short_tasks --source FOLDER --output FOLDER

The source folder has the files that their publishers serve, in a folder for each dataset:

| folder | from | license | files |
|---|---|---|---|
| banking77 | github.com/PolyAI-LDN/task-specific-datasets | CC BY 4.0 | train.csv, test.csv |
| clinc150 | github.com/clinc/oos-eval | CC BY 3.0 | data_full.json, domains.json |
| snips | github.com/sonos/nlu-benchmark | CC0 | train_INTENT_full.json, validate_INTENT.json |
| text2sql | github.com/jkkummerfeld/text2sql-data | BSD-3-Clause (wikisql) | wikisql.json.bz2 |
| gsm8k | github.com/openai/grade-school-math | MIT | train.jsonl, test.jsonl |
| bbh | github.com/suzgunmirac/BIG-Bench-Hard | MIT | boolean_expressions.json |
"""

from __future__ import annotations

import argparse
import bz2
import csv
import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from examples.demo.smollm2 import smollm2_folder

TRAIN, HELD_OUT, LONGEST = 200, 100, 32  # rows of a task, but for `logic`, which has 250 in all; tokens of a row
_INTENTS = ("GetWeather", "PlayMusic", "SearchCreativeWork")


class Pairs(NamedTuple):
    """Questions and answers, for training and held out."""

    train: list[tuple[str, str]]
    held_out: list[tuple[str, str]]


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes().decode("utf-8", "replace"))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def banking(source: Path) -> Pairs:
    """A customer's question → its intent, of the first 15 in the alphabet."""
    files = [list(csv.DictReader((source / f"banking77/{name}.csv").open())) for name in ("train", "test")]
    intents = set(sorted({row["category"] for row in files[0]})[:15])
    return Pairs(*([(r["text"], _words(r["category"])) for r in rows if r["category"] in intents] for rows in files))


def kitchen(source: Path) -> Pairs:
    """What somebody says in the kitchen → its intent, of 15."""
    rows = _json(source / "clinc150/data_full.json")
    intents = set(_json(source / "clinc150/domains.json")["kitchen_and_dining"])
    return Pairs(
        *([(t, _words(intent)) for t, intent in rows[name] if intent in intents] for name in ("train", "test"))
    )


def slots(source: Path) -> Pairs:
    """A request about weather, music or films → its slots as JSON."""

    def read(name: str) -> list[tuple[str, str]]:
        requests = [r["data"] for i in _INTENTS for r in _json(source / f"snips/{name.format(i)}.json")[i]]
        return [
            (_text(r), json.dumps({part["entity"]: part["text"].strip() for part in r if "entity" in part}))
            for r in requests
        ]

    def _text(request: list[dict[str, str]]) -> str:
        return "".join(part["text"] for part in request).strip()

    return Pairs(read("train_{}_full"), read("validate_{}"))


def sql(source: Path) -> Pairs:
    """A question about a table that is not shown → SQL without its FROM."""
    pairs = Pairs([], [])
    for entry in json.loads(bz2.decompress((source / "text2sql/wikisql.json.bz2").read_bytes())):
        query = entry["sql"][0].replace("TABLEalias0.", "").replace(" FROM TABLE AS TABLEalias0", "")
        query = query.replace("_FIELD", "").rstrip(" ;").lower()
        sentence = entry["sentences"][0]
        question = sentence.get("original", sentence["text"]).strip()
        for name, value in sentence["variables"].items():
            query = query.replace(f'"{name}"', name).replace(name, value)
        split = {"train": pairs.train, "test": pairs.held_out}.get(sentence["question-split"])
        if split is not None:
            split.append((question, query))
    return pairs


def arithmetic(source: Path) -> Pairs:
    """A step of a solution, from its calculator annotation → its result."""
    steps = [
        {tuple(step) for row in _lines(source / f"gsm8k/{name}.jsonl") for step in _steps(row["answer"])}
        for name in ("train", "test")
    ]
    return Pairs(sorted(steps[0]), sorted(steps[1] - steps[0]))


def _steps(answer: str) -> Iterable[tuple[str, str]]:
    return re.findall(r"<<([^=<>]+=)([^=<>]+)>>", answer)


def logic(source: Path) -> Pairs:
    """A boolean expression → its value."""
    rows = _json(source / "bbh/boolean_expressions.json")["examples"]
    pairs = [(row["input"], row["target"]) for row in rows]
    random.Random(0).shuffle(pairs)
    return Pairs(pairs[:-HELD_OUT], pairs[-HELD_OUT:])


TASKS: dict[str, Callable[[Path], Pairs]] = {
    "arithmetic": arithmetic, "banking": banking, "kitchen": kitchen, "logic": logic, "slots": slots, "sql": sql,
}  # fmt: skip


def _words(intent: str) -> str:
    return intent.lower().replace("_", " ")


def build(source: Path, held_out_rows: int = HELD_OUT) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """
    Rows `{"prompt", "completion", "domain"}` of all tasks, for training and held out, drawn at random from those that
    are short enough. No held-out question is a training question, too.

    Args:
        source: the folder of the files.
        held_out_rows: at most, of each task.
    """
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    train: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for task, read in TASKS.items():
        seen: set[str] = set()
        for rows, pairs, count in zip((train, held_out), read(source), (TRAIN, held_out_rows), strict=True):
            pairs = [p for p in dict.fromkeys(pairs) if p[0] not in seen and _length(tokenizer, p) <= LONGEST]
            seen |= {question for question, _ in pairs}
            random.Random(0).shuffle(pairs)
            rows += [{"prompt": f"{q}\n", "completion": a, "domain": task} for q, a in pairs[:count]]
    return train, held_out


def _length(tokenizer: Any, pair: tuple[str, str]) -> int:
    return len(tokenizer("\n".join(pair))["input_ids"]) + 1  # the EOS token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="rows of a task, where it has as many")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "test"), build(args.source, args.held_out), strict=True):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (args.output / f"{name}.jsonl").write_text("".join(lines))
        print(f"{args.output / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
