"""How data files are read: text stays the text that it is in the file."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from moe_peft.training.data import PREFERENCES, check_marks, check_rows, load_data
from moe_peft.utils.messages import InputError

DATES = ["1987-04-11", "2024-12-01", "1999-01-31"]


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("split", ["train", "train[1:]"])
def test_dates_in_json_are_text(as_list, split, tmp_path):
    """pyarrow takes a JSON column of ISO dates, or a part of one, for times."""
    rows = [
        {"prompt": f"Day\u2028{i}?", "completion": date, "meta": {"when": [date], "n": i}}
        for i, date in enumerate(DATES)
    ]
    file = tmp_path / "dates.json"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text(f"[{','.join(lines)}]" if as_list else "\n".join(lines))
    data = load_data(str(file), "data", None, split)
    assert data.to_list() == (rows if split == "train" else rows[1:])


def test_a_folder_may_be_named_by_arguments(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps([{"text": "w3"}]))
    assert load_data({"path": "json", "data_dir": str(tmp_path)}, "data", None).to_list() == [{"text": "w3"}]


def test_a_template_without_marks_names_the_remedy(tokenizer: PreTrainedTokenizerFast, tmp_path):
    file = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]
    file.write_text(json.dumps({"messages": turns}))
    data = load_data(str(file), "data", None)
    plain = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    with pytest.raises(ValueError, match=r"generation.*endgeneration.*chat_template_path names; or give columns"):
        check_marks("sft.", data, tokenizer, plain)
    check_marks(
        "", data, tokenizer, "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )


def loaded(tmp_path, *rows, **more):
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return load_data(str(tmp_path / "rows.json"), "dataset_name", None, **more).to_list()


def test_rows_with_more_columns_than_their_format_has(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    system = {"role": "system", "content": "Be kind."}
    # Alpaca's rows with both parts as one text, too
    (row,) = loaded(tmp_path, {"instruction": "Add one.", "input": 2, "output": 3, "text": "### Instruction: …"})
    assert row == {
        "prompt": [{"role": "user", "content": "Add one.\n\n2"}],
        "completion": [{"role": "assistant", "content": "3"}],
    }
    # a prompt that repeats the first message, and a system prompt in a column of its own
    rows = loaded(
        tmp_path,
        {"prompt": "hi", "system": "", "messages": messages},
        {"prompt": "hi", "system": "Be kind.", "messages": messages},
    )
    assert rows == [{"messages": messages}, {"messages": [system, *messages]}]
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    assert loaded(tmp_path, {"system": "Be kind.", "conversations": turns}) == [{"messages": [system, *messages]}]


@pytest.mark.parametrize("output", [None, True, 2.0, ["a", "b"], {"answer": "a"}], ids=str)
def test_answers_that_are_no_text_are_refused(output, tmp_path):
    """Not trained on as Python writes them."""
    with pytest.raises(ValueError, match=r"^dataset_name: row 2: output=.*: must be a string"):
        loaded(tmp_path, {"instruction": "a", "output": "b"}, {"instruction": "a", "output": output})


def test_values_of_a_csv_file_are_what_it_has(tmp_path):
    def answers(text: str) -> list[tuple[str, str]]:
        (tmp_path / "rows.csv").write_text(text)
        rows = load_data(str(tmp_path / "rows.csv"), "x", None)
        return [(row["prompt"][0]["content"], row["completion"][0]["content"]) for row in rows]

    text = "instruction,input,output\nAdd 1,3,4\nWhich code?,,007\nWhat is printed?,a,None\nIs it?,,true\n"
    assert answers(text) == [
        ("Add 1\n\n3", "4"), ("Which code?", "007"), ("What is printed?\n\na", "None"), ("Is it?", "true"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"^x: row 2: output=None: must be a string"):
        answers("instruction,input,output\nAdd 1,3,4\nAdd 2,3,\n")


def test_a_column_of_times_that_the_first_row_lacks(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b", "when": "2024-01-02"}\n')
    rows = load_data(str(tmp_path / "rows.jsonl"), "x", None).to_list()
    assert rows == [{"text": "a", "when": None}, {"text": "b", "when": "2024-01-02"}]


def test_a_question_that_would_not_be_read_is_refused(tmp_path):
    pair = {"question": "2 + 2?", "chosen": "4", "rejected": "5"}
    with pytest.raises(ValueError, match="column 'question': is not read; rename it to prompt"):
        loaded(tmp_path, pair, formats=PREFERENCES)
    with pytest.raises(ValueError, match=r"history: \['hi', None\]: must be a request and its answer"):
        loaded(tmp_path, {"instruction": "a", "output": "b", "history": [["hi", None]]})


# Roles that the template has a branch for; its tools are written as `<tool_call>`, which is no role of its own.
BRANCHES = """{% for m in messages %}{% if m['role'] in ('system', 'user') %}{{ m['role'] }}: {{ m['content'] | trim }}
{% elif m['role'] == 'assistant' %}assistant: {% if loop.last and m['reasoning'] %}{{ m['reasoning'] }}{% endif -%}
{{ m['content'].split('</think>')[-1] if m['content'] else '' }}{% for call in m['tool_calls'] or [] %}
<tool_call>{{ call['function']['name'] }}</tool_call>{% endfor %}
{% elif m['role'] == 'tool' %}tool: {{ m['content'] | tojson }}
{% endif %}{% endfor %}"""
ASKED = {"role": "user", "content": " w3 w4\n"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "w5"}}]}
ANSWER = {"role": "assistant", "content": "w6"}


@pytest.mark.parametrize(
    ("messages", "lost"),
    {
        "plain": ([ASKED, ANSWER], None),
        "a result in quotes": ([ASKED, CALL, {"role": "tool", "content": 'w"7\n'}, ANSWER], None),
        "thoughts of an earlier turn": (
            [ASKED, {"role": "assistant", "content": "<think>w8</think>w9"}, ASKED, ANSWER], None,
        ),
        "thoughts of the last turn": ([ASKED, {"role": "assistant", "content": "<think>w8</think>w9"}], "content"),
        "thoughts of its own field": ([ASKED, ANSWER | {"reasoning_content": "w8"}], "reasoning_content"),
        "a role without a branch": ([ASKED, {"role": "developer", "content": "w7"}, ANSWER], "content"),
        "a role by its letters": ([ASKED, {"role": "tool_call", "content": "w7"}, ANSWER], "role='tool_call'"),
        "a list": (
            [{"role": role, "content": [{"type": "text", "text": "w3"}]} for role in ("user", "tool")],
            "content, which is a list",
        ),
    }.values(),
)  # fmt: skip
@pytest.mark.parametrize("kind", ["text", "mapping", "other"])
def test_each_message_is_in_what_the_chat_template_makes_of_it(messages, lost, kind, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    other = BRANCHES if kind == "other" else None
    if other is None:
        tokenizer.chat_template = BRANCHES if kind == "text" else {"default": BRANCHES, "tool_use": "no"}
    before = [] if isinstance(messages[0]["content"], list) else [{"messages": [ASKED, ANSWER]}]
    rows = Dataset.from_list([*before, {"messages": messages}])
    with pytest.raises(InputError, match=lost) if lost else nullcontext():
        check_rows(rows, "data", tokenizer, other_template=other)


def test_calls_that_the_template_drops(tokenizer):
    rows = Dataset.from_list([{"messages": [ASKED, CALL]}])
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with pytest.raises(InputError, match="tool_calls of 'w5'"):
        check_rows(rows, "data", tokenizer, other_template=template)


def test_tools_choose_a_template_of_a_mapping(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = {"default": "no", "tool_use": BRANCHES}
    tools = [{"type": "function", "function": {"name": "w5", "description": "", "parameters": {"type": "object"}}}]
    check_rows(Dataset.from_list([{"messages": [ASKED, CALL], "tools": json.dumps(tools)}]), "data", tokenizer)


@pytest.mark.parametrize("roles", [("from", "value", "human", "gpt"), ("role", "content", "user", "assistant")])
@pytest.mark.parametrize("column", ["conversations", "messages"])
@pytest.mark.parametrize("system", [None, "Be kind."])
def test_two_answers_to_a_conversation_become_pairs(roles, column, system, tmp_path):
    """The rows in which LLaMA-Factory ranks answers."""
    role, content, user, assistant = roles
    row = {column: [{role: user, content: "hi"}], "chosen": {role: assistant, content: "hello"},
           "rejected": {role: assistant, content: "no"}}  # fmt: skip
    row |= {} if system is None else {"system": system}
    prompt = [{"role": "system", "content": system}] if system else []
    assert loaded(tmp_path, row, formats=PREFERENCES) == [{
        "prompt": [*prompt, {"role": "user", "content": "hi"}],
        "chosen": [{"role": "assistant", "content": "hello"}], "rejected": [{"role": "assistant", "content": "no"}],
    }]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("x.jsonl", '{"text": "a"}\n{"text": "b"}\n{"text": c}\n{"text": "d"}\n', "line 3: is no JSON"),
        ("x.jsonl", '{"text": "a"}\n\n{"text": "b",\n', "line 3: is no JSON"),
        ("x.jsonl", '{"text": "a"}\n\n5\n', "line 3: 5: must be a JSON object"),
        ("x.jsonl", "[1]\n[2]\n", "line 2: is no JSON"),
        ("x.json", '[{"text": "a"},\n {"text": "b" "c"}]', "line 2: is no JSON"),
    ],
)
def test_a_broken_line_is_counted_as_an_editor_counts(name, text, line, tmp_path):
    """In a file, and in a folder with another one."""
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=f"^data='.*{name}': {line}") as error:
        load_data(str(tmp_path / name), "data", None)
    assert "\n" not in str(error.value)
    (tmp_path / "good.jsonl").write_text('{"text": "a"}')
    with pytest.raises(InputError, match=rf"{name} cannot be read \({line}"):
        load_data(str(tmp_path), "data", None)
