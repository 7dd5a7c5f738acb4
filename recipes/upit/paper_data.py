"""Make the paper's data mixture: code, mathematics and general instructions, 1:1:3 (arXiv 2410.01610, section 3.1).

    python recipes/upit/paper_data.py --out runs/paper-mixture --examples 500000

Needs the Hugging Face Hub. Writes `train.jsonl` and `test.jsonl`: rows `{"messages": [...], "domain": ...}`. The last
300 examples of each part's shuffle are held out.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, load_dataset

HELD_OUT = 300
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


def pair(question: str, answer: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Rows with a question column and an answer column, as messages."""

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": row[question]}, {"role": "assistant", "content": row[answer]}]
        return {"messages": messages}

    return convert


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """Rows of `conversations` with `from` and `value`, as messages."""
    return {"messages": [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]}


# domain: dataset, conversion, parts of five
SOURCES = {
    "code": ("ise-uiuc/Magicoder-Evol-Instruct-110K", pair("instruction", "response"), 1),
    "mathematics": ("meta-math/MetaMathQA", pair("query", "response"), 1),
    "general": ("Open-Orca/SlimOrca", conversation, 3),
}


def convert(dataset: Dataset, domain: str, conversion: Callable, wanted: int, seed: int) -> tuple[Dataset, Dataset]:
    """Training and held-out rows of one source."""
    if len(dataset) < wanted + HELD_OUT:
        raise ValueError(f"{domain}: {wanted} examples and {HELD_OUT} held out are wanted, there are {len(dataset)}")
    rows = dataset.shuffle(seed=seed).map(conversion, remove_columns=dataset.column_names)
    rows = rows.add_column("domain", [domain] * len(rows))
    return rows.select(range(wanted)), rows.select(range(len(rows) - HELD_OUT, len(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    parts = []
    for domain, (name, conversion, share) in SOURCES.items():
        dataset = load_dataset(name, split="train")
        parts.append(convert(dataset, domain, conversion, args.examples * share // 5, args.seed))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "test"), zip(*parts, strict=True), strict=True):
        concatenate_datasets(list(rows)).shuffle(seed=args.seed).to_json(args.out / f"{name}.jsonl")


if __name__ == "__main__":
    main()
