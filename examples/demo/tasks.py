"""
Four kinds of short requests with one right answer each, made from the standard library.

    python -m examples.demo.tasks --output data --train 400 --test 60 --seed 0
"""

from __future__ import annotations

import argparse
import calendar
import json
import random
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

_ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_NAMES = ["Ada", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Karin", "Leo", "Maria"]
_CITIES = ["Athens", "Berlin", "Cairo", "Delhi", "Florence", "Geneva", "Hanoi", "Jakarta", "Kyoto", "Lima", "Oslo"]
_FRUITS = ["apple", "banana", "cherry", "date", "fig", "grape", "kiwi", "lemon", "mango", "olive", "peach", "quince"]


def in_words(number: int) -> str:
    """A number from 0 to 999 in English words."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{_ONES[hundreds]} hundred" + (f" {in_words(rest)}" if rest else "")


def _numbers(draw: random.Random) -> tuple[str, str]:
    number = draw.randrange(20, 1000)
    return f"Write {number} in words.", in_words(number)


def _dates(draw: random.Random) -> tuple[str, str]:
    day = date(1950, 1, 1) + timedelta(days=draw.randrange(36500))
    return f"Write {day.day} {calendar.month_name[day.month]} {day.year} as an ISO date.", day.isoformat()


def _json(draw: random.Random) -> tuple[str, str]:
    name, city, age = draw.choice(_NAMES), draw.choice(_CITIES), draw.randrange(18, 90)
    return f"Give this as JSON: {name}, {age}, {city}.", json.dumps({"name": name, "age": age, "city": city})


def _sorting(draw: random.Random) -> tuple[str, str]:
    words = draw.sample(_FRUITS, 4)
    return f"Sort these by the alphabet: {', '.join(words)}.", ", ".join(sorted(words))


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "numbers": _numbers,
    "dates": _dates,
    "json": _json,
    "sorting": _sorting,
}


def make_rows(train: int, test: int, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """
    Rows of a prompt, its completion and the domain, in random order; no request is in both parts.

    Args:
        train: rows of each domain to train on.
        test: rows of each domain to hold out.

    Example:

    ```python
    >>> from examples.demo.tasks import make_rows
    >>> train, test = make_rows(300, 20)
    >>> len(train), len(test), test[0]["prompt"]
    (1200, 80, [{'role': 'user', 'content': 'Sort these by the alphabet: olive, lemon, nectarine, fig.'}])

    ```
    """
    draw = random.Random(seed)
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for domain, make in TASKS.items():
        seen: dict[str, str] = {}
        while len(seen) < train + test:
            request, answer = make(draw)
            seen[request] = answer
        for i, (request, answer) in enumerate(seen.items()):
            parts[i >= train].append(
                {
                    "prompt": [{"role": "user", "content": request}],
                    "completion": [{"role": "assistant", "content": answer}],
                    "domain": domain,
                }
            )
    for part in parts:
        draw.shuffle(part)
    return parts


def write_rows(folder: Path, train: int, test: int, seed: int = 0) -> None:
    """`train.jsonl` and `test.jsonl` of `make_rows`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "test"), make_rows(train, test, seed), strict=True):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write train.jsonl and test.jsonl.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train", type=int, default=400, help="rows of each domain")
    parser.add_argument("--test", type=int, default=60, help="rows of each domain")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_rows(options.output, options.train, options.test, options.seed)
