"""A file of answers that runs share: what stays of it, and what is made anew."""

from __future__ import annotations

import pytest

from moe_peft.training.answers import AnswersFile, KeptAnswer
from moe_peft.utils.messages import InputError

KEPT = [KeptAnswer("a", "w5", "w6 é", [6, 2], "1"), KeptAnswer("base", "w7", "w8", [8], "2")]


@pytest.fixture
def file(tmp_path):
    file = AnswersFile(tmp_path / "answers.jsonl")
    file.append(KEPT)
    return file


@pytest.mark.parametrize("cut, left", [(0, 2), (1, 2), (2, 1), (40, 1)])
def test_a_last_line_stays_if_it_is_whole_and_goes_if_it_is_torn(cut, left, file):
    content = file.path.read_bytes()
    file.path.write_bytes(content[: len(content) - cut])
    assert file.read() == {row.key: row.tokens for row in KEPT[:left]}
    file.append(KEPT[left:])
    assert file.path.read_bytes() == content


def test_only_the_keys_that_are_wanted_stay(file):
    assert file.read(only={"2"}) == {"2": [8]} == file.read()


@pytest.mark.parametrize("content", ['{"text": "hello"}\n', '{"text": "hello"}', "hello", "[1, 2]\n"])
def test_another_file_is_refused_and_stays(content, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="answers="):
        AnswersFile(path).read()
    assert path.read_text() == content
