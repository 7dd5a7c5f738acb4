"""Load datasets and check them row by row before training."""

from __future__ import annotations

import copy
import csv
import glob
import json
import math
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset, Features, List, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from trl import is_conversational
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.data_utils import maybe_convert_to_chatml

from ..utils.io import read_text, reading
from ..utils.messages import InputError, one_line

# --- loading ---------------------------------------------------------------------------------------------------------

# Columns of the formats that TRL's trainers accept.
SUPERVISED = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"text"}, {"input_ids"})
PREFERENCES = ({"chosen", "rejected"},)
MOST_DOMAINS = 1000  # evaluated one by one; a column with more values holds no domains
FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_data(
    source: str | dict[str, Any],
    field: str,
    label_column: str | None,
    split: str = "train",
    formats: Sequence[set[str]] = SUPERVISED,
    text_field: str = "text",
) -> Dataset:
    """
    Load a dataset as given in the `data` section of a recipe.

    Args:
        source: a file, a dataset's name, or arguments of `datasets.load_dataset`. A split among these arguments takes
            precedence over `split`.
        field: the config field to name in messages.
        label_column: a column that the data must have.
        split: the split, e.g. "test" or "train[:100]". A file has the split "train".
        formats: sets of columns. The data must have all columns of at least one set.
        text_field: the column of plain texts; it is renamed to "text".
    """
    # Build the arguments of `load_dataset` from a file, a name, or a mapping of arguments.
    arguments: dict[str, Any] = {"path": source} if isinstance(source, str) else source
    if isinstance(source, str) and (suffix := Path(source).suffix) in FORMATS:
        if not Path(source).is_file():
            raise InputError(f"{field}={source!r}: no such file")
        # `load_dataset` reads file names as patterns, and in relative names the folder as well.
        arguments = {"path": FORMATS[suffix], "data_files": glob.escape(os.path.abspath(source))}
        arguments |= _values_as_written(source) if suffix == ".csv" else {}
    elif isinstance(source, str) and Path(source).is_file():
        raise InputError(f"{field}={source!r}: is a file; its name must end in {', '.join(FORMATS)}")
    # Refuse folders that would be read as patterns, streams, and code in a dataset's repository.
    arguments = {"split": split, **arguments}
    folder = str(arguments.get("path"))
    if os.path.isdir(folder) and glob.has_magic(os.path.abspath(folder)):
        raise InputError(f"{field}={source!r}: datasets reads a path with *, ? or [ as a pattern; rename the folder")
    if arguments.get("streaming"):
        raise InputError(f"{field}.streaming=True: rows are counted and checked before training; leave it out")
    if arguments.get("trust_remote_code"):
        raise InputError(f"{field}.trust_remote_code=True: code that comes with data is never run; leave it out")
    # Load, and report errors in the files on one line.
    _check_cache()
    try:
        with reading(f"{field}={source!r}", "give a file of rows, or arguments of datasets.load_dataset"):
            try:
                dataset = load_dataset(**arguments)
            except DatasetGenerationError as error:
                if stray := _stray_file(folder):
                    raise InputError(f"{stray}; move it away") from error
                if isinstance(source, str) and (broken := _broken_line(source)):
                    raise InputError(broken) from error
                raise error.__cause__ or error from None  # the cause names the error
            if isinstance(dataset, Dataset):
                if isinstance(source, str) and arguments["path"] == "json" and "timestamp[" in str(dataset.features):
                    dataset = _without_times(source, dataset, split)
                with reading("text that is not UTF-8", "save it as UTF-8"):  # otherwise found only when a row is read
                    dataset.data.validate(full=True)
    except ValueError as error:
        if not isinstance(error.__cause__, StopIteration):
            raise
        dataset = None  # an empty file
    # Require rows in one of the formats, and labels if a label column is given.
    if not isinstance(dataset, Dataset) or len(dataset) == 0:
        raise InputError(f"{field}={source!r}: no examples; name a split that has some")
    if text_field != "text" and text_field in dataset.column_names:
        kept = [name for name in dataset.column_names if name != "text"]
        dataset = dataset.select_columns(kept).rename_column(text_field, "text")
    names = set(dataset.column_names)
    found = [columns for columns in formats if columns <= names]
    # Alpaca's files may also have instruction and output joined in a column "text".
    is_alpaca = formats is SUPERVISED and names >= {"instruction", "output"} and found in ([], [{"text"}])
    if not found and not is_alpaca:
        needed = "messages, prompt and completion, or text" if formats is SUPERVISED else "chosen and rejected"
        raise InputError(f"{field}={source!r}: columns {dataset.column_names}: needs {needed}")
    check_has_labels(dataset, label_column, field)
    # Convert to TRL's formats now, as checks and plans read rows before TRL does it.
    if is_alpaca:
        removed = sorted((_ALPACA & names) - {label_column})
        return dataset.map(
            partial(_from_alpaca, field), with_indices=True, remove_columns=removed,
            desc="Converting to prompts and completions",
        )  # fmt: skip
    if formats is SUPERVISED and "prompt" in names and "completion" not in names:  # TRL would look for a completion
        dataset = dataset.remove_columns("prompt")
    unread = {"question", "instruction"} & names
    if formats is PREFERENCES and unread and "prompt" not in names and isinstance(dataset[0]["chosen"], str):
        raise InputError(f"{field}={source!r}: column {min(unread)!r}: is not read; rename it to prompt")
    has_system = "system" in names and not names.isdisjoint({"messages", "conversations"})
    if has_system or _to_messages(copy.deepcopy(dataset[0])) != dataset[0]:
        of_answers = {"messages"} if isinstance(dataset[0].get("chosen"), dict) else set()
        removed = sorted(({"conversations", *({"system"} if has_system else ())} | of_answers) & names - {label_column})
        dataset = dataset.map(_to_messages, remove_columns=removed, desc="Converting to messages")
    return dataset


def _values_as_written(file: str) -> dict[str, Any]:
    """
    Return `load_dataset` arguments to read a CSV file's cells as text.

    pandas by itself reads 007 as 7, None as missing, and 3 in a column with an empty cell as 3.0.
    """
    with suppress(ValueError, OSError, csv.Error), open(file, encoding="utf-8-sig", newline="") as lines:
        head = next(filter(None, csv.reader(lines)), [])
        names = [name or f"Unnamed: {i}" for i, name in enumerate(head)]  # the name pandas gives
        if names and len({*names}) == len(names):
            features = Features(dict.fromkeys(names, Value("string")))
            return {"features": features, "keep_default_na": False, "na_values": [""]}
    return {}  # errors in the file are reported when it is read


def with_shared_format(parts: Sequence[Dataset], field: str) -> list[Dataset]:
    """Keep only the columns that tokenization reads and all datasets have."""
    read = {*_OF_TOKENS, "tools", "chat_template_kwargs"}.union(*SUPERVISED)
    shared = set.intersection(*(set(part.column_names) for part in parts)) & read
    if not any(columns <= shared for columns in SUPERVISED):
        formats = "; ".join(sorted({", ".join(part.column_names) for part in parts}))
        raise InputError(f"{field}: its files have no format in common ({formats}); give all of them the same columns")
    return [part.select_columns(sorted(shared)) for part in parts]


_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def _to_messages(row: dict[str, Any]) -> dict[str, Any]:
    """
    Convert a row in place to `messages`.

    Rows in ShareGPT's format have `from` and `value`, or a column `conversations`. A row with two ranked answers to a
    conversation, as in LLaMA-Factory, gets a `prompt` and the two answers.
    """
    answers = [key for key in ("chosen", "rejected") if isinstance(row.get(key), dict)]
    for key in answers:
        row[key] = [row[key]]
    row = maybe_convert_to_chatml(row)
    if answers and "messages" in row:
        row["prompt"] = row.pop("messages")
    key = "prompt" if answers else "messages"
    messages, system = row.get(key), row.get("system")
    if system and isinstance(messages, list) and messages and messages[0].get("role") != "system":
        row[key] = [{"role": "system", "content": system}, *messages]
    for cell in row.values():
        for message in cell if isinstance(cell, list) else ():
            if isinstance(message, dict) and message.get("role") in _SHAREGPT_ROLES:
                message["role"] = _SHAREGPT_ROLES[message["role"]]
    return row


_ALPACA = {"instruction", "input", "output", "system", "history", "text"}


def _from_alpaca(field: str, row: dict[str, Any], i: int) -> dict[str, Any]:
    """Convert an Alpaca row to a prompt and its completion. LLaMA-Factory's `system` and `history` are included."""
    parts = {name: row.get(name) for name in ("instruction", "input", "output")}
    for name, value in parts.items():
        # The text of an integer is known. A float, flag or list may have been written differently in the file.
        if not isinstance(value, str) and type(value) is not int and (value is not None or name == "output"):
            raise InputError(f"{field}: row {i + 1}: {name}={one_line(repr(value), 60)}: must be a string")
    turns = [("system", row.get("system"))]
    for pair in row.get("history") or ():
        if len(pair) != 2 or None in pair:
            raise InputError(f"history: {one_line(repr(pair), 60)}: must be a request and its answer")
        turns += zip(("user", "assistant"), pair, strict=True)
    asked = (parts["instruction"], parts["input"])
    turns.append(("user", "\n\n".join(str(part) for part in asked if part not in (None, ""))))
    return {
        "prompt": [{"role": role, "content": text} for role, text in turns if text],
        "completion": [{"role": "assistant", "content": str(parts["output"])}],
    }


def _without_times(file: str, dataset: Dataset, split: str) -> Dataset:
    """
    Reload a JSON file's rows with text in place of times, through a Parquet file with column types.

    pyarrow reads text as times if all values of a JSON column, or of a part of it, look like times.
    """
    text = read_text(file)
    lines = text.split("\n")  # `splitlines` would also split at other characters inside strings
    rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines if line.strip()]
    features = Features({name: _as_text(feature) for name, feature in dataset.features.items()})
    with tempfile.TemporaryDirectory() as folder:
        typed = str(Path(folder, "rows.parquet"))
        # `from_list` would take only the first row's columns.
        rows = [{name: row.get(name) for name in features} for row in rows]
        Dataset.from_list(rows, features=features).to_parquet(typed)
        return load_dataset("parquet", data_files=typed, split=split)


def _as_text(feature: Any) -> Any:
    """Return a column's type with strings in place of times."""
    if isinstance(feature, dict):
        return {name: _as_text(part) for name, part in feature.items()}
    if isinstance(feature, List):
        return List(_as_text(feature.feature))
    return Value("string") if isinstance(feature, Value) and feature.dtype.startswith("timestamp[") else feature


def _check_cache() -> None:
    """Check that the cache of `datasets` is writable."""
    cache = Path(datasets.config.HF_DATASETS_CACHE).absolute()
    parent = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"HF_HOME: rows go to {cache}, which cannot be written to; set HF_HOME to another folder")


def _stray_file(folder: str) -> str | None:
    """
    Return a message on the first file in a folder that is unreadable or has other columns than the first file, or None.
    """
    first: tuple[str, list[str]] | None = None
    for file in sorted(Path(folder).rglob("*")) if os.path.isdir(folder) else ():
        if file.suffix not in FORMATS:
            continue  # not read by `load_dataset`
        try:
            files = glob.escape(os.path.abspath(file))
            names = load_dataset(FORMATS[file.suffix], data_files=files, split="train").column_names
        except Exception as error:
            return f"{file} cannot be read ({_broken_line(file) or one_line(error.__cause__ or error, 80)})"
        first = first or (file.name, names)
        if set(names) != set(first[1]):
            return f"{file} has the columns {', '.join(names)}, {first[0]} has {', '.join(first[1])}"
    return None


def _broken_line(file: str | os.PathLike) -> str | None:
    """
    Return a message on the first line of a JSON file that cannot be parsed, counted from 1. None for other files, or if
    all lines are valid.
    """
    try:
        text = read_text(file) if FORMATS.get(Path(file).suffix) == "json" else "[]"
        json.loads(text)
        return None
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("["):
            return f"line {error.lineno}: is no JSON: {error.msg}"
    except (InputError, RecursionError):
        return None
    for i, line in enumerate(text.split("\n"), 1):
        try:
            row = json.loads(line.strip() or "{}")
        except json.JSONDecodeError as error:
            return f"line {i}: is no JSON: {error.msg}: {one_line(line, 60)}"
        if not isinstance(row, dict):
            return f"line {i}: {one_line(line, 60)}: must be a JSON object, with columns and their values"
    return None


def check_has_labels(dataset: Dataset, column: str | None, field: str, section: str = "") -> None:
    """
    Check that a dataset has its label column.

    Args:
        field: the config field of the data, for messages.
        section: prefix of `label_column` in messages, with a dot.
    """
    check_label_column(column, section)
    if column is not None and column not in dataset.column_names:
        raise InputError(f"{section}label_column={column!r}: {field} has only {dataset.column_names}")


def check_label_column(column: str | None, section: str = "") -> None:
    """Check that a column can hold labels."""
    if column in ("text", "completion"):
        raise InputError(
            f"{section}label_column={column!r}: trainers add the EOS token here; copy the labels to a "
            "column of their own"
        )


def check_domains(dataset: Dataset, column: str | None, section: str = "") -> None:
    """Check that a label column has few enough values to be domains."""
    count = 0 if column is None else len(dataset.unique(column))
    if count > MOST_DOMAINS:
        raise InputError(f"{section}label_column={column!r}: {count} values; name a column of domains")


def rows_of_labels(labels: Iterable[Any]) -> dict[Any, list[int]]:
    """Return label → indices of its rows, with labels sorted as text."""
    rows = defaultdict(list)
    for i, label in enumerate(labels):
        rows[label].append(i)
    return {label: rows[label] for label in sorted(rows, key=str)}


def source_name(source: str | dict[str, Any] | None) -> str | None:
    """Return a source's file or dataset name."""
    return source.get("path") if isinstance(source, dict) else source


def drawn(dataset: Dataset, count: int, seed: int) -> Dataset:
    """Return `count` examples in random order, or all examples if there are fewer."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    return dataset.select(order[:count].tolist())


# --- rows ------------------------------------------------------------------------------------------------------------

# Columns that trainers accept, in TRL's order of precedence. Each tuple forms one text or conversation.
_ROW_FORMATS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("input_ids",),),
    (("prompt", "chosen"), ("prompt", "rejected")),
    (("chosen",), ("rejected",)),
    (("prompt", "completion"),),
    (("messages",),),
    (("text",),),
)
# Columns with one value per token.
_OF_TOKENS = ("labels", "attention_mask", "completion_mask", "assistant_masks", "token_labels")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KINDS = 100  # kinds of conversations to test with the chat template
IGNORED = -100  # label of tokens without a language loss


def check_rows(
    dataset: Dataset,
    field: str,
    tokenizer: Any,
    label_column: str | None = None,
    other_template: str | None = None,
) -> None:
    """
    Check that every row can be trained on.

    Args:
        field: the config field of the data, for messages.
        tokenizer: has the chat template for conversations.
        label_column: a column that must hold a label in every row.
        other_template: a chat template to use instead of the tokenizer's.
    """
    columns = set(dataset.column_names)
    parts = next(parts for parts in _ROW_FORMATS if all(columns >= set(part) for part in parts))
    template = other_template or getattr(tokenizer, "chat_template", None)
    kinds: dict[tuple, tuple[str, list[dict[str, Any]], Any]] = {}  # kind of conversation → its first row
    size = len(tokenizer)
    kept = {key for part in parts for key in part}
    of_tokens = columns & set(_OF_TOKENS)
    if of_tokens and parts != (("input_ids",),):
        name = min(of_tokens)
        raise InputError(f"{field}: column {name!r}: trainers treat a column of this name as token values; rename it")
    kept |= of_tokens | ({"tools"} & columns)
    if label_column:
        check_label_values(dataset, field, label_column)
    for i, row in enumerate(dataset.select_columns(sorted(kept)), 1):
        where = f"{field}: row {i}"
        for name in of_tokens:
            if not isinstance(row[name], list) or len(row[name]) != len(row["input_ids"] or []):
                raise InputError(f"{where}: {name}={one_line(repr(row[name]), 60)}: must have a value for each token")
        if wrong := [token for token in row.get("labels") or () if token != IGNORED and token not in range(size)]:
            raise InputError(f"{where}: labels: {wrong[0]!r}: must be tokens from 0 to {size - 1}, or {IGNORED}")
        for part in parts:
            messages = [
                message for key in part for message in _messages(f"{where}: {key}", key, row[key], template, size)
            ]
            if messages and len(kinds) < _KINDS:
                kinds.setdefault(tuple(map(_kind, messages)), (where, messages, row.get("tools")))
        if len({isinstance(row[key], str) for part in parts for key in part}) > 1:
            keys = ", ".join(key for part in parts for key in part)
            raise InputError(f"{where}: {keys}: must all be strings, or all conversations")
    if kinds and template is None:
        raise InputError(f"{field}: has conversations, but the tokenizer has no chat template; set chat_template_path")
    for where, messages, tools in kinds.values():
        roles = ", ".join(message["role"] for message in messages)
        with reading(f"{where}: the chat template does not take messages of {roles}"):
            tools = json.loads(tools) if isinstance(tools, str) else tools
            chat = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, chat_template=other_template)
        for number, message in enumerate(messages, 1):
            if lost := _left_out(message, chat, number == len(messages)):
                raise InputError(
                    f"{where}: message {number}, of the role {message['role']!r}: the chat template leaves out its "
                    f"{lost}; use one that has it (chat_template_path), or change the message"
                )


def _kind(message: dict[str, Any]) -> tuple[str, ...]:
    """
    Return the features of a message that a chat template may depend on: its role, content type, and non-empty parts.
    """
    content, parts = message.get("content"), sorted(name for name in message if message[name])
    return (message["role"], type(content).__name__, str("</think>" in str(content)), *parts)


def _left_out(message: dict[str, Any], chat: str, is_last: bool) -> str | None:
    """Return the first part of a message that is missing from the chat template's output, or None."""
    text = "".join(chat.split())  # templates strip texts

    def lacks(part: str) -> bool:
        forms = [
            part,
            json.dumps(part, ensure_ascii=False)[1:-1],
            json.dumps(part)[1:-1],
        ]  # tool results are quoted
        forms += (
            [] if is_last else [part.rpartition("</think>")[2]]
        )  # many templates drop the thoughts of earlier turns
        return all("".join(form.split()) not in text for form in forms)

    content = message.get("content")
    if isinstance(content, str) and lacks(content):
        return f"content {one_line(content, 40)!r}"
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if "".join(str(content).split()) in text or any(isinstance(part, str) and lacks(part) for part in texts):
            return "content, which is a list"
    thoughts = message.get("reasoning_content")
    if is_last and isinstance(thoughts, str) and lacks(thoughts):
        return "reasoning_content"
    for call in message.get("tool_calls") or ():
        name = (call.get("function") or call).get("name")
        if isinstance(name, str) and lacks(name):
            return f"tool_calls of {name!r}"
    return None


def check_label_values(dataset: Dataset, field: str, column: str) -> None:
    """Check that a column has a string or a number in every row. NaN is refused: files have it for missing labels."""
    for i, value in enumerate(dataset[column], 1):
        if not (isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))):
            raise InputError(f"{field}: row {i}: {column}={value!r}: must be a label")


def _messages(cell: str, key: str, value: Any, template: Any, size: int) -> list[dict[str, Any]]:
    """
    Return the messages of a cell of the data if it is a conversation, otherwise an empty list. Raise if the column
    `key` cannot have this value.

    Args:
        cell: the cell's place, for messages.
        size: number of tokens of the tokenizer.
    """
    shown = f"{cell}={one_line(repr(value), 60)}"
    if isinstance(value, str) and key not in ("messages", "input_ids"):
        if not value.strip() and key != "prompt":
            raise InputError(f"{shown}: must not be empty; leave the row out")
        return []
    if isinstance(value, str) and key != "input_ids":
        raise InputError(f"{shown}: is text; parse it (json.loads), as this column must hold lists of messages")
    if not isinstance(value, list) or not value:
        kind = "a list of tokens" if key == "input_ids" else "a string or a list of messages"
        raise InputError(f"{shown}: must be {kind}; leave the row out")
    if key != "input_ids":
        return [_message(cell, message, template) for message in value]
    if not all(isinstance(token, int) and 0 <= token < size for token in value):
        raise InputError(f"{shown}: must be tokens of the tokenizer, from 0 to {size - 1}")
    return []


def _message(cell: str, message: Any, template: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InputError(f"{cell}: {one_line(repr(message), 60)}: must be a message with role and content")
    role, content = message.get("role"), message.get("content")
    quoted = "" if not isinstance(role, str) or role in _ROLES else rf"['\"]{re.escape(role)}['\"]"
    if not isinstance(role, str) or not re.search(quoted, str(template)):
        raise InputError(f"{cell}: role={role!r}: must be one of {', '.join(_ROLES)}")
    if not isinstance(content, (str, list)) and not message.get("tool_calls"):
        raise InputError(f"{cell}: content={one_line(repr(content), 60)} of the role {role!r}: must be a string")
    return message


# --- what a loss needs -----------------------------------------------------------------------------------------------


def check_answers(section: str, dataset: Any, completion_only: bool | None, assistant_only: bool | None) -> None:
    """
    Check that a dataset has the answers to restrict the loss to.

    Args:
        section: prefix of the settings in messages, with a dot.
        completion_only, assistant_only: `SFTConfig`'s `completion_only_loss` and `assistant_only_loss`.
    """
    if not isinstance(dataset, Dataset) or not len(dataset):
        return
    if completion_only and not {"completion", "completion_mask"} & set(dataset.column_names):
        raise InputError(
            f"{section}completion_only_loss=True: the data have no completions; use columns prompt and completion, or "
            "assistant_only_loss for conversations"
        )
    if assistant_only and "assistant_masks" not in dataset.column_names and not is_conversational(dataset[0]):
        raise InputError(
            f"{section}assistant_only_loss=True: the data have no conversations; use a column of messages, or "
            "completion_only_loss for prompts and completions"
        )


def check_marks(section: str, dataset: Any, tokenizer: Any, template: str | None) -> None:
    """
    Check that the chat template marks answers, for `assistant_only_loss`.

    Args:
        template: the chat template of `chat_template_path`; None: the tokenizer's.
    """
    if not isinstance(dataset, Dataset) or {"assistant_masks", "prompt"} & set(dataset.column_names):
        return
    template = template or tokenizer.chat_template
    if template and not has_generation_markers(template):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
        try:
            get_training_chat_template(tokenizer)
        except ValueError as error:
            raise InputError(
                f"{section}assistant_only_loss=True: the chat template does not mark answers; put "
                "{% generation %} and {% endgeneration %} around them in a copy of it, a .jinja file that "
                "chat_template_path names; or give columns prompt and completion, whose loss is on completions"
            ) from error


def check_learnable(path: str, dataset: Any, args: Any) -> None:
    """Check that a prepared dataset has a token to learn."""
    if isinstance(dataset, Dataset) and not is_learnable(dataset):
        section = f"{path}: " if path else ""
        raise InputError(
            f"{section}max_length={args.max_length}: no example keeps a token to learn from; raise it, or give longer "
            "examples"
        )


def is_learnable(dataset: Dataset) -> bool:
    """
    Return whether a row of a prepared dataset has a token to learn. A row's first token does not count: nothing
    precedes it, so it is not predicted.
    """
    if "labels" not in dataset.column_names:
        return len(dataset) > 0
    return any(label != IGNORED for row in dataset.select_columns("labels") for label in row["labels"][1:])
