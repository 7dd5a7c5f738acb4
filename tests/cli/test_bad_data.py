"""Data that cannot be trained on: every row is looked at before anything is spent."""

from __future__ import annotations

import json
import math
import re

import pytest
from datasets import Dataset
from trl import SFTConfig

from moe_peft.analysis.inputs import load_rows
from moe_peft.training.data import PREFERENCES, check_rows, load_data, rows_of_labels
from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.upit.evaluate import evaluate
from moe_peft.utils.messages import InputError
from tests.helpers.models import tiny_llama
from tests.helpers.upit_case import make_case

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' and loop.index0 % 2 %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)
PAIR, TEXT = {"prompt": "w3", "completion": " w4"}, {"text": "w3 w4"}
TALK = {"messages": [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]}


def talk(*messages):
    return {"messages": [dict(zip(("role", "content"), message, strict=False)) for message in messages]}


@pytest.mark.parametrize(
    "rows",
    [
        [PAIR], [TEXT], [TALK], [{"prompt": "", "completion": "w4"}],
        [{"prompt": TALK["messages"][:1], "completion": TALK["messages"][1:]}],
        [{"input_ids": [3, 127]}], [{"chosen": "a", "rejected": "b"}],
        [{"prompt": "w3", "chosen": "w4", "rejected": "w5"}],
        [{**PAIR, "domain": "a"}, {**PAIR, "domain": "b"}],
    ],
)  # fmt: skip
def test_good_rows(rows, tokenizer):
    label = "domain" if "domain" in rows[0] else None
    check_rows(Dataset.from_list(rows), "data", tokenizer, label, TEMPLATE)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([PAIR, {**PAIR, "completion": None}], "data: row 2: completion=None: must be a string or a list of messages"),
        ([PAIR, {**PAIR, "completion": ""}], "data: row 2: completion='': must not be empty"),
        ([{**PAIR, "completion": " \n"}], "row 1: completion=.*: must not be empty"),
        ([{**PAIR, "completion": 3}], "row 1: completion=3: must be a string"),
        ([{**PAIR, "completion": ["x"]}], "row 1: completion: 'x': must be a message with role and content"),
        ([{**PAIR, "prompt": None}], "row 1: prompt=None"),
        ([TEXT, {"text": ""}], "row 2: text='': must not be empty"),
        ([TEXT, {"text": None}], "row 2: text=None"),
        ([{"text": ["a"]}], "row 1: text: 'a': must be a message"),
        ([{"messages": json.dumps(TALK["messages"])}], r"row 1: messages='\[.*: is text; parse it \(json.loads\)"),
        ([TALK, {"messages": []}], r"row 2: messages=\[\]"),
        ([TALK, {"messages": None}], "row 2: messages=None"),
        ([{"messages": ["w3"]}], "row 1: messages: 'w3': must be a message"),
        ([TALK, talk(("user", "w3"), ("bot", "w4"))], "row 2: messages: role='bot': must be one of system, "),
        ([talk(("user", "w3"), (None, "w4"))], "role=None"),
        ([talk(("user", "w3"), ("assistant", None))], "content=None of the role 'assistant'"),
        ([talk(("user",))], "content=None of the role 'user'"),
        ([talk(("user", 3), ("assistant", 4))], "content=3"),
        ([TALK, talk(("user", "w3"), ("user", "w3"))], "row 2: .*of user, user: TemplateError: roles must alternate"),
        ([{"input_ids": []}], r"input_ids=\[\]: must be a list of tokens"),
        ([{"input_ids": [3, 128]}], r"input_ids=\[3, 128\]: must be tokens of the tokenizer, from 0 to 127"),
        ([{"input_ids": [3, -1]}], "must be tokens of the tokenizer"),
        ([{"input_ids": [3, None]}], "must be tokens of the tokenizer"),
        ([{"input_ids": ["a"]}], "must be tokens of the tokenizer"),
        ([{"input_ids": [1.5]}], "must be tokens of the tokenizer"),
        ([{"chosen": "w3", "rejected": ""}], "row 1: rejected='': must not be empty"),
        ([{"prompt": "w3", "chosen": None, "rejected": "w4"}], "row 1: chosen=None"),
        ([{**PAIR, "domain": "a"}, {**PAIR, "domain": None}], "row 2: domain=None: must be a label"),
        ([{**PAIR, "domain": 1.0}, {**PAIR, "domain": math.nan}], "row 2: domain=nan: must be a label"),
        ([{**PAIR, "domain": -math.inf}], "row 1: domain=-inf: must be a label"),
        ([{**PAIR, "domain": ["a"]}], r"row 1: domain=\['a'\]: must be a label"),
        ([{**PAIR, "domain": {"a": "b"}}], "row 1: domain=.*: must be a label"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named(rows, words, tokenizer):
    label = "domain" if "domain" in rows[0] else None
    with pytest.raises(ValueError, match=words) as refused:
        check_rows(Dataset.from_list(rows), "data", tokenizer, label, TEMPLATE)
    assert "\n" not in str(refused.value)


def test_conversations_need_a_chat_template(tokenizer):
    with pytest.raises(ValueError, match=r"data: has conversations, .* no chat template; set chat_template_path"):
        check_rows(Dataset.from_list([TALK]), "data", tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("d.jsonl", b"", "no examples"),
        ("d.jsonl", b"\n\n", "no data|no examples"),
        ("d.jsonl", b"hello", "line 1: is no JSON"),
        ("d.jsonl", b'{"text": "w3", "te', "line 1: is no JSON"),
        ("d.jsonl", bytes(range(1, 255)), "JSON|codec"),
        ("d.jsonl", '{"text": "w3"}'.encode("utf-16"), "JSON|codec"),
        ("d.jsonl", b"1\n2\n", "JSON"),
        ("d.jsonl", b"[1]\n[2]\n", "JSON|Trailing"),
        ("d.json", b"{}", "no data|no examples|columns"),
        ("d.parquet", b"no parquet", "[Pp]arquet"),
        ("d.csv", b"", "No columns"),
        ("d.csv", b"text\n", "no data|no examples"),
        ("d.csv", b"text,a\nb,c\nd,e,f\n", "Expected 2 fields in line 3"),
        ("d.txt", b"w3 w4", "its name must end in .json, "),
        ("d.jsonl", b'{"a": 1}', r"columns \['a'\]: needs messages, prompt and completion, or text"),
        ("d.jsonl", b'{"prompt": "w3"}', r"columns \['prompt'\]: needs"),
    ],
)
def test_a_file_that_is_no_dataset(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words) as refused:
        load_data(str(tmp_path / name), "data.train", None)
    message = str(refused.value)
    assert type(refused.value) is InputError and "\n" not in message and message.startswith("data.train=")


@pytest.mark.parametrize("name", ["train[1].jsonl", "tr*n.jsonl", "train?.jsonl", "tr**.jsonl", "tr{a,b}.jsonl"])
def test_a_file_is_what_its_name_says_and_no_pattern(name, tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "a[b]"):
        folder.mkdir(exist_ok=True)
        for other in ("train1.jsonl", "train.jsonl", name):
            (folder / other).write_text(json.dumps({"text": f"{folder} {other}"}))
        assert list(load_data(str(folder / name), "data.train", None)["text"]) == [f"{folder} {name}"]
    monkeypatch.chdir(tmp_path / "a[b]")
    assert list(load_data(name, "data.train", None)["text"]) == [f"{folder} {name}"]


def test_a_folder_that_would_be_read_as_a_pattern(tmp_path, monkeypatch):
    for folder in (tmp_path / "data1", tmp_path / "data[1]"):
        folder.mkdir()
        (folder / "train.jsonl").write_text(json.dumps({"text": folder.name}))
    assert list(load_data(str(tmp_path / "data1"), "data.train", None)["text"]) == ["data1"]
    monkeypatch.chdir(tmp_path / "data[1]")
    for source in (str(tmp_path / "data[1]"), ".", {"path": str(tmp_path / "data[1]")}):
        with pytest.raises(ValueError, match=r"^data\.train=.*: datasets reads a path with .* as a pattern"):
            load_data(source, "data.train", None)


def test_a_column_of_too_many_values_is_none_of_domains(tokenizer, tmp_path, capsys):
    """The result would be as long as the data; and they were compared with each row."""
    case = make_case(tmp_path, tokenizer)
    many = [{**PAIR, "domain": i} for i in range(1001)]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, many)))
    words = "label_column='domain': 1001 values; name a column of domains"
    pipeline = UpIT(recipe_from_dict({**case, "output_dir": str(tmp_path / "out")}))
    with pytest.raises(ValueError, match=f"^data.eval: {words}$"):
        pipeline.check(weights=False)
    limits = {"batch_size": 8, "max_length": 64, "max_examples": None}
    with pytest.raises(ValueError, match=f"^{words}$"):
        load_rows(tokenizer, str(tmp_path / "eval.jsonl"), "domain", "train", **limits)
    with pytest.raises(ValueError, match=f"^evaluate: {words}$"):
        evaluate(tiny_llama(), Dataset.from_list(many), SFTConfig(str(tmp_path), bf16=False), tokenizer, "domain")
    assert len(load_rows(tokenizer, str(tmp_path / "eval.jsonl"), "domain", "train[1:]", **limits).data) == 1000


@pytest.mark.parametrize(("column", "count", "left"), [("domain", 4, "b, c"), ("domain", 9, ""), (None, 4, "")])
def test_the_first_rows_of_a_sorted_file_lack_domains(column, count, left, tokenizer, tmp_path, caplog):
    (tmp_path / "sorted.jsonl").write_text("\n".join(json.dumps({**PAIR, "domain": label}) for label in "aaaabbbbc"))
    limits = {"batch_size": 8, "max_length": 64, "max_examples": count}
    assert len(load_rows(tokenizer, str(tmp_path / "sorted.jsonl"), column, "train", **limits).data) == count
    said = [record.getMessage() for record in caplog.records if "--max-examples 4" in record.getMessage()]
    assert len(said) == bool(left) and all(f"none of {left};" in line for line in said)


def test_labels_are_gone_through_once():
    assert rows_of_labels(iter([10, 9, 10, 2])) == {10: [0, 2], 2: [3], 9: [1]}
    assert list(rows_of_labels(iter([10, 9, 10, 2]))) == [10, 2, 9]  # as text


def test_what_else_is_no_dataset(tmp_path):
    for name in ("d.jsonl", "d.tsv"):
        (tmp_path / name).write_text(json.dumps(TEXT))
    for source, words in (
        (str(tmp_path / "none.jsonl"), "no such file"),
        (str(tmp_path / "empty"), "data.train="),
        ("no/such-set", "data.train='no/such-set'"),
        ({}, r"data.train=\{\}"),
        ({"path": "json", "data_files": str(tmp_path / "d.jsonl"), "split": "test"}, "data.train="),
        ({"path": "json", "data_files": str(tmp_path / "d.jsonl"), "x": 1}, "data.train="),
        ({"path": "json", "data_files": str(tmp_path / "d.jsonl"), "trust_remote_code": True}, "is never run"),
        ({"path": "json", "data_files": str(tmp_path / "d.jsonl"), "streaming": True}, "leave it out"),
        (str(tmp_path / "d.tsv"), "its name must end in .json, "),
    ):
        with pytest.raises(ValueError, match=words) as refused:
            load_data(source, "data.train", None)
        assert type(refused.value) is InputError and "\n" not in str(refused.value)
    for column in ("completion", "text"):  # to which trainers add the token that ends them
        with pytest.raises(
            ValueError, match=f"label_column='{column}': trainers add the EOS token .*; copy the labels to"
        ):
            load_data(str(tmp_path / "d.jsonl"), "data.train", column)
    with pytest.raises(ValueError, match=r"label_column='domain': data\.train has only"):
        load_data(str(tmp_path / "d.jsonl"), "data.train", "domain")
    with pytest.raises(ValueError, match="needs chosen and rejected"):
        load_data(str(tmp_path / "d.jsonl"), "dataset_name", None, formats=PREFERENCES)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"prompt": "w3", "completion": TALK["messages"][1:]}],
            "row 1: prompt, completion: must all be strings, or all",
        ),
        (
            [{"prompt": TALK["messages"][:1], "completion": "w4"}],
            "row 1: prompt, completion: must all be strings, or all",
        ),
        (
            [{"prompt": "w3", "chosen": TALK["messages"][1:], "rejected": TALK["messages"][1:]}],
            "must all be strings, or",
        ),
        (
            [{**TEXT, "labels": "positive"}],
            "column 'labels': trainers treat a column of this name as token values; rename it",
        ),
        ([{**TEXT, "token_labels": 1}], "column 'token_labels'"),
        ([{"input_ids": [3, 4], "labels": [-100, 128]}], "row 1: labels: 128: must be tokens from 0 to 127, or -100"),
        ([{"input_ids": [3, 4], "labels": [-1, 4]}], "row 1: labels: -1: must be tokens from 0 to 127, or -100"),
        ([{"input_ids": [3, 4], "labels": [3]}], "row 1: labels=[3]: must have a value for each token"),
        ([{"input_ids": [3, 4], "completion_mask": [1, 0, 1]}], "row 1: completion_mask=[1, 0, 1]"),
    ],
)
def test_parts_of_several_kinds_and_columns_of_tokens(rows, message, tokenizer):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_rows(Dataset.from_list(rows), "data", tokenizer, None, TEMPLATE)
    check_rows(Dataset.from_list([{"input_ids": [3, 4], "labels": [-100, 4]}]), "data", tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl", b'{"other": 3}', "x.jsonl has the columns other, rows.jsonl has text; move it away"),
        ("bad.jsonl", b"{nonsense", "bad.jsonl cannot be read (line 1: is no JSON"),
        ("rows.jsonl", '{"text": "café"}'.encode("latin-1"), "text that is not UTF-8"),
    ],
)
def test_a_stray_file_of_a_folder_is_named(name, content, words, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "w3 w4"}')
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(words)):
        load_data(str(tmp_path), "dataset_name", None)


def test_a_cache_that_cannot_be_written_to_is_no_fault_of_the_data(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"text": "w3 w4"}')
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "rows.jsonl" / "datasets")
    with pytest.raises(ValueError, match=r"HF_HOME: rows go to .*which cannot be written to; set HF_HOME"):
        load_data(str(tmp_path / "rows.jsonl"), "dataset_name", None)
