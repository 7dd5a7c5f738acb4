"""
A three-domain instruction set (code, prose, arithmetic), made from the running interpreter's own library.

    python -m examples.toy.domains --out .cache/domains --train 400 --test 60 --seed 0

writes `train.jsonl` and `test.jsonl`: conversational rows, `{"messages": [user, assistant], "domain": ...}`, with the
same number of rows per domain. Nothing is downloaded: the code is the Python standard library, the prose is the
language reference behind `help()`, the sums are generated.

Every item has a source: a package of the library, a topic of the reference or a pair of operands. `is_held_out` puts
each source, whole, on one side of the split. The split does not depend on the seed, so a base model trained on the
training side, with any seed, has not seen a test item.
"""

import argparse
import ast
import functools
import hashlib
import json
import random
import re
import sys
import sysconfig
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Tests, installed packages and generated tables are not the library proper; the bulk of the interface code would crowd
# out the rest.
SKIPPED = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3"}
SKIPPED |= {"idlelib", "tkinter", "turtledemo"}
# Long enough to show a domain's style, short enough to train on in seconds.
QUESTION_CHARS, ANSWER_CHARS = range(10, 400), range(40, 480)

Row = dict[str, Any]


class Item(NamedTuple):
    source: str
    question: str
    answer: str


def is_held_out(source: str) -> bool:
    """Whether a source is on the test side: one in five, fixed by hash."""
    return hashlib.sha256(source.encode()).digest()[0] % 5 == 0


@functools.cache
def stdlib_modules() -> dict[Path, str]:
    """The standard library: path relative to its root -> source text, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    wanted = (p for p in paths if not SKIPPED & set(p.parts) and not p.name.startswith("_sysconfigdata"))
    return {path: (root / path).read_text(encoding="utf-8", errors="replace") for path in wanted}


def package(path: Path) -> str:
    """The source a module counts under: `json/decoder.py` and `json/encoder.py` are both `json`."""
    return path.parts[0].removesuffix(".py")


@functools.cache
def reference_topics() -> dict[str, list[str]]:
    """
    The language reference: title -> blocks of text.

    Composite topics repeat smaller ones in full, so a block belongs only to the shortest topic that contains it;
    otherwise the text of a held-out topic would reappear in a training topic.
    """
    from pydoc_data.topics import topics

    owned: dict[str, list[str]] = defaultdict(list)
    seen: set[str] = set()
    for text in sorted(topics.values(), key=lambda text: (len(text), text)):
        title, *blocks = (block for block in re.split(r"\n\s*\n", text) if block.strip())
        fresh = [block for block in blocks if one_line(block) not in seen]
        seen.update(map(one_line, fresh))
        owned[title.strip().splitlines()[0]] += fresh
    return owned


def operands(a: int, b: int) -> str:
    """The source of every sum of two numbers, whatever their order and the sign between them."""
    return f"{min(a, b)}, {max(a, b)}"


def one_line(text: str) -> str:
    return " ".join(text.split())


def code_items() -> Iterator[Item]:
    """Functions and methods without docstrings, decorators and comments; the docstring's first line is the question."""
    for path, text in stdlib_modules().items():
        for node in ast.walk(ast.parse(text)):
            # More than 40 lines make too long an answer whatever the docstring, and unparsing is the slow part.
            if not isinstance(node, ast.FunctionDef) or (node.end_lineno or 0) - node.lineno > 40:
                continue
            summary = (ast.get_docstring(node) or "").strip().partition("\n")[0]
            if summary:
                node.body = node.body[1:] or [ast.Pass()]
            node.decorator_list = []
            signature = f"{node.name}({ast.unparse(node.args)})"
            ask = f"Write the Python function {signature} of {package(path)}. {summary}"
            yield Item(package(path), ask.strip(), ast.unparse(node))


def prose_items() -> Iterator[Item]:
    """Passages of the reference to continue: given a paragraph's first sentence or, if it has only one, the paragraph
    before it."""
    for title, blocks in reference_topics().items():
        previous = ""
        for text in map(one_line, blocks):
            # Grammar rules, examples, headings and tables are not prose.
            if "::=" in text or ">>>" in text or not re.fullmatch(r"[A-Z].{40,}[a-z)*\"][.:]", text):
                continue
            opening, _, rest = text.partition(". ")
            given, answer = (opening + ".", rest) if len(rest) in ANSWER_CHARS else (previous, text)
            if given:
                given = textwrap.shorten(given, 240, placeholder="...")
                yield Item(title, f"Continue this passage on {title}: {given}", answer)
            previous = text


def arithmetic_items() -> Iterator[Item]:
    """Sums worked out as by hand: by columns, or by partial products."""

    def item(a: int, sign: str, b: int, steps: str, result: int) -> Item:
        ask = ("What is {}?", "Work out {} step by step.", "Please compute {}.")[(a + b) % 3]
        answer = f"{a} {sign} {b}: {steps}. The answer is {result}."
        return Item(operands(a, b), ask.format(f"{a} {sign} {b}"), answer)

    for a in range(12, 100):
        for b in range(11, a):
            (p, q), (r, s) = divmod(a, 10), divmod(b, 10)
            carry, borrow = (q + s) // 10, int(q < s)
            steps = f"{q} + {s} = {q + s}, carry {carry}. {p} + {r} + {carry} = {p + r + carry}"
            yield item(a, "+", b, steps, a + b)
            q += 10 * borrow
            steps = f"{q} - {s} = {q - s}, borrow {borrow}. {p} - {r} - {borrow} = {p - r - borrow}"
            yield item(a, "-", b, steps, a - b)
    for a in range(12, 400):
        for b in range(3, 10):
            tens, ones = a // 10 * 10, a % 10
            m, n = tens * b, ones * b
            yield item(a, "*", b, f"{tens} * {b} = {m}. {ones} * {b} = {n}. {m} + {n} = {m + n}", m + n)


DOMAINS = {"code": code_items, "prose": prose_items, "arithmetic": arithmetic_items}


@functools.cache
def pool(domain: str) -> list[Item]:
    """
    A domain's usable items: of a suitable length, each answer once, and no answer that two sources share, since a
    function copied from one package into another could otherwise be on both sides of the split.
    """
    by_answer: dict[str, list[Item]] = defaultdict(list)
    for item in DOMAINS[domain]():
        if len(item.question) in QUESTION_CHARS and len(item.answer) in ANSWER_CHARS:
            by_answer[item.answer].append(item)
    return [items[0] for items in by_answer.values() if len({item.source for item in items}) == 1]


def as_row(domain: str, item: Item) -> Row:
    question = {"role": "user", "content": item.question}
    answer = {"role": "assistant", "content": item.answer}
    return {"messages": [question, answer], "domain": domain}


def build(seed: int, per_domain_train: int, per_domain_test: int) -> tuple[list[Row], list[Row]]:
    """Sample (train, test) rows, the same number from each domain, shuffled across domains."""
    rng = random.Random(seed)
    train: list[Row] = []
    test: list[Row] = []
    for domain in DOMAINS:
        for rows, wanted, held_out in ((train, per_domain_train, False), (test, per_domain_test, True)):
            items = [item for item in pool(domain) if is_held_out(item.source) is held_out]
            if len(items) < wanted:
                side = "held-out" if held_out else "training"
                raise ValueError(
                    f"{domain}: {wanted} {side} items: this Python's library has {len(items)}; ask for fewer"
                )
            rows += [as_row(domain, item) for item in rng.sample(items, wanted)]
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def write_jsonl(path: Path, rows: list[Row]) -> None:
    """Write one JSON object per line, under a temporary name first, so that nobody reads half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


def write_sides(out: Path, train: list[Row], test: list[Row]) -> None:
    """Write `train.jsonl` and `test.jsonl`, and say how many rows they have."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        write_jsonl(out / f"{name}.jsonl", rows)
        print(f"{out / name}.jsonl: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the three-domain instruction set.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--train", type=int, default=400, help="training rows per domain")
    parser.add_argument("--test", type=int, default=60, help="held-out rows per domain")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        write_sides(args.out, *build(args.seed, args.train, args.test))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
