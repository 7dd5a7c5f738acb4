"""The demo's requests: right answers, and nothing shared by training and held-out rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import datetime

import pytest

from examples.demo.tasks import TASKS, in_words, make_rows, write_rows


def texts(row):
    return row["prompt"][0]["content"], row["completion"][0]["content"]


def test_answers_are_right():
    """By rules of their own, from the request's text alone."""
    for row in make_rows(60, 10, seed=3)[0]:
        request, answer = texts(row)
        if row["domain"] == "dates":
            day = datetime.strptime(request, "Write %d %B %Y as an ISO date.")
            assert answer == f"{day:%Y-%m-%d}"
        elif row["domain"] == "json":
            name, age, city = request.removeprefix("Give this as JSON: ").removesuffix(".").split(", ")
            assert json.loads(answer) == {"name": name, "age": int(age), "city": city}
        elif row["domain"] == "sorting":
            words = request.removeprefix("Sort these by the alphabet: ").removesuffix(".").split(", ")
            assert answer.split(", ") == sorted(words) and len(set(words)) == 4
        else:
            assert row["domain"] == "numbers" and answer == in_words(int(re.sub(r"\D", "", request)))


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (13, "thirteen"), (40, "forty"), (99, "ninety-nine"), (100, "one hundred"),
     (347, "three hundred forty-seven"), (810, "eight hundred ten")],
)  # fmt: skip
def test_numbers_in_words(number, words):
    assert in_words(number) == words
    assert len({in_words(i) for i in range(1000)}) == 1000


def test_rows_are_the_same_for_one_seed_and_their_parts_share_nothing(tmp_path):
    train, test = make_rows(50, 10, seed=1)
    assert (train, test) == make_rows(50, 10, seed=1) != make_rows(50, 10, seed=2)
    assert Counter(row["domain"] for row in test) == dict.fromkeys(TASKS, 10)
    assert not {texts(row)[0] for row in train} & {texts(row)[0] for row in test}
    write_rows(tmp_path / "data", 50, 10, seed=1)
    assert [json.loads(line) for line in (tmp_path / "data" / "test.jsonl").read_text().splitlines()] == test
