"""
Ten tasks of clear rules on sequences of digits, generated without end: reverse, sort, rotate, running totals, ….

    python -m examples.toy.tasks --out .cache/tasks --train 48000 --test 500 --seed 0

writes `train.jsonl` and `test.jsonl`: conversational rows, `{"messages": [user, assistant], "domain": task}`. A model
can learn every task, and an answer is either right or wrong, so that exact matches can be counted. No row of a test set
is in any training set: a sequence belongs to one side by its hash.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

from .domains import Row, is_held_out, write_sides

LENGTHS = range(4, 8)  # digits of a question


def _shift(digits: list[int], k: int) -> list[int]:
    return [(d + k) % 10 for d in digits]


def _swap(digits: list[int], k: int) -> list[int]:
    pairs = [digits[i : i + 2] for i in range(0, len(digits), 2)]
    return [d for pair in pairs for d in reversed(pair)]


def _rotate(digits: list[int], k: int) -> list[int]:
    return digits[k:] + digits[:k]


def _totals(digits: list[int], k: int) -> list[int]:
    return [total % 10 for total in accumulate(digits)]


# Task → its question, where {d} are the digits and {k} a number from 1 to 3, and its rule.
RULES: dict[str, tuple[str, Callable[[list[int], int], list[int]]]] = {
    "reverse": ("Write {d} backwards.", lambda digits, k: digits[::-1]),
    "sort": ("Sort the digits of {d}.", lambda digits, k: sorted(digits)),
    "shift": ("Add {k} to each digit of {d}.", _shift),
    "totals": ("Give the running totals of {d}, last digits only.", _totals),
    "filter": ("Keep the odd digits of {d}.", lambda digits, k: [d for d in digits if d % 2]),
    "swap": ("Swap neighbours in {d}.", _swap),
    "unique": ("Drop repeated digits from {d}.", lambda digits, k: list(dict.fromkeys(digits))),
    "maxima": ("Give the running maximum of {d}.", lambda digits, k: list(accumulate(digits, max))),
    "rotate": ("Move the first {k} digits of {d} to the end.", _rotate),
}
TASKS = (*RULES, "addition")


def joined(digits: list[int]) -> str:
    return "".join(map(str, digits)) or "none"


def addition(a: int, b: int) -> tuple[str, str]:
    """A sum of two numbers of two digits, worked out by columns."""
    steps, carry = [], 0
    for p, q in zip(reversed(f"{a:02d}"), reversed(f"{b:02d}"), strict=True):
        column = int(p) + int(q) + carry
        steps.append(f"{p}+{q}+{carry}={column}")
        carry = column // 10
    return f"Add {a} and {b}.", f"{';'.join(steps)};{a + b}"


def example(task: str, rng: random.Random) -> tuple[str, str, str]:
    """The source, question and answer of one example."""
    if task == "addition":
        a, b = rng.randrange(100), rng.randrange(100)
        return f"{a}+{b}", *addition(a, b)
    digits, k = [rng.randrange(10) for _ in range(rng.choice(LENGTHS))], rng.randrange(1, 4)
    question, rule = RULES[task]
    return joined(digits), question.format(d=joined(digits), k=k), joined(rule(digits, k))


def rows(seed: int, held_out: bool = False) -> Iterator[Row]:
    """Rows of all tasks in turn, of the training or the test side; endless."""
    rng = random.Random(f"{seed} {held_out}")
    while True:
        for task in TASKS:
            source, question, answer = example(task, rng)
            while is_held_out(source) is not held_out:
                source, question, answer = example(task, rng)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            yield {"messages": messages, "domain": task}


def documents(rng: random.Random) -> Iterator[str]:
    """
    Pre-training text: inputs and outputs of the rules under one-letter names, so that a base model knows how to copy,
    move and compare digits, but no question; endless.
    """
    names = dict(zip(RULES, "ABCDEFGHI", strict=True))
    while True:
        lines = []
        while len(lines) < 16:
            task, k = rng.choice(list(RULES)), rng.randrange(1, 4)
            digits = [rng.randrange(10) for _ in range(rng.choice(LENGTHS))]
            if not is_held_out(joined(digits)):
                lines.append(f"{names[task]}{k} {joined(digits)} > {joined(RULES[task][1](digits, k))}")
        yield "\n".join(lines)


def build(seed: int, train: int, test: int) -> tuple[list[Row], list[Row]]:
    """(train, test) rows, the same number from each task, in random order."""
    sides = []
    for count, held_out in ((train, False), (test, True)):
        found = rows(seed, held_out)
        side = [next(found) for _ in range(count)]
        random.Random(seed).shuffle(side)
        sides.append(side)
    return sides[0], sides[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the ten-task instruction set.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--train", type=int, default=48_000, help="training rows")
    parser.add_argument("--test", type=int, default=500, help="held-out rows")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        write_sides(args.out, *build(args.seed, args.train, args.test))
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
