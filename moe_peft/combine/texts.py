"""Texts of a mixture's experts: calibration rows for gates, held-out rows, requests, and general requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from ..routing.expert_map import label_text
from ..training.answers import Tokens
from ..training.data import (
    FORMATS,
    check_label_values,
    check_learnable,
    check_rows,
    drawn,
    load_data,
    rows_of_labels,
    with_shared_format,
)
from ..training.preparation import calibration_batches, preparation, tokenized
from ..utils.io import reading
from ..utils.messages import InputError, choice_error
from ..utils.plugins import load_function
from .distil import general_requests, prompt_tokens, short_prompts
from .held_out import AnswerChecker, HeldOutRows
from .mix_settings import OURS, Prompts
from .request_texts import Request, read_neutral, request_of, request_text

logger = logging.getLogger("moe_peft")

# --- files -----------------------------------------------------------------------------------------------------------


def read_requests(file: str | None, field: str) -> list[str]:
    """
    Read general requests from a text file with one per line, or from a file of rows in a format of training data.

    Args:
        file: None: the built-in list.
        field: the setting that names the file, for messages.
    """
    if file is None or Path(file).suffix not in FORMATS:
        return read_neutral(file, only=file is not None, field=field)
    texts = [request_text(request_of(row)).strip() for row in load_data(file, field, None)]
    if not any(texts):
        raise InputError(f"{field}={file!r}: no row has a request with words")
    return [*dict.fromkeys(filter(None, texts))]


def neutral_texts(file: str | None) -> tuple[list[str], list[str]]:
    """Return general requests, built-in or from a file: for gates, and held out (every eighth)."""
    texts = read_neutral(None if file == OURS else file)
    return [text for i, text in enumerate(texts) if i % 8], texts[::8]


def rows_by_label(
    files: Sequence[str],
    field: str,
    column: str | None = None,
    labels: Sequence[str] | None = None,
    alone: str | None = None,
) -> dict[str, Dataset]:
    """
    Read rows by label, from one file with a label column or from one file for each label.

    Args:
        files: the file with the label column, or the files in the order of `labels`.
        field: the flag of the files, for messages.
        column: the label column; None: a file for each label.
        labels: the labels to return; None: names of the files, or all values of the column.
        alone: a label whose rows may come without rows of the other labels.
    """
    if column is None:
        stems = [label_text(Path(file).stem) for file in files]
        wanted = [alone] if alone is not None and len(files) == 1 else stems if labels is None else [*labels]
        if len(files) != len(wanted):
            raise InputError(f"{field}: {len(files)} files for {len(wanted)} experts; give one for each")
        if stems != wanted and sorted(stems) == sorted(wanted):
            raise InputError(f"{field}: {files[0]}: give the files in the order of {', '.join(wanted)}")
        return {label: load_data(file, field, None) for label, file in zip(wanted, files, strict=True)}
    data = load_data(files[0], field, column)
    check_label_values(data, field, column)
    rows = rows_of_labels(map(label_text, data[column]))
    wanted = [*rows] if labels is None else [*labels]
    if alone is not None and rows.keys() & {*wanted} == {alone}:
        wanted = [alone]
    for label in wanted:
        if label not in rows:
            raise InputError(f"{choice_error('labels', label, list(rows)[:8])}, which {field} has")
    if left := rows.keys() - {*wanted}:
        logger.warning("%s: rows of %s are left out: no expert has that name", field, ", ".join(sorted(left)[:8]))
    return {label: data.select(rows[label]) for label in wanted}


def expert_rows(
    files: Sequence[str],
    field: str,
    labels: Sequence[str],
    tokenizer: Any,
    column: str | None = None,
    alone: str | None = None,
) -> list[Dataset]:
    """
    Read the rows of each expert, with the expert's index in a column `expert`. All have the same other columns.

    Args:
        labels: names of all experts. For the other arguments see `rows_by_label`.
        tokenizer: has the chat template for conversations.
    """
    found = rows_by_label(files, field, column, labels, alone)
    parts = with_shared_format([*found.values()], field)
    for part in parts:
        check_rows(part, field, tokenizer)
    return [
        part.add_column("expert", [labels.index(label)] * len(part)) for label, part in zip(found, parts, strict=True)
    ]


def split_rows(
    parts: Sequence[Dataset],
    tests: Sequence[Dataset] | None,
    labels: Sequence[str],
    calibration_examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> tuple[Dataset, Dataset]:
    """
    Return calibration rows and held-out rows, without overlap.

    Args:
        parts: rows of each expert, from `expert_rows`.
        tests: held-out rows of each expert; None: some of `parts`.
        labels: names of all experts.
        calibration_examples: maximum number of an expert's calibration rows; None: 256, and 4096 in all.
        test_examples: maximum number of an expert's held-out rows; None: 64, and 512 in all.
        seed: seed of the draw of rows.
    """
    n = len(labels)
    most, measured = calibration_examples or max(1, min(256, 4096 // n)), test_examples or max(1, min(64, 512 // n))
    parts = [drawn(part, len(part), seed) for part in parts]
    counts = [min(most, len(part) // (2 if tests is None else 1)) for part in parts]
    if not all(counts):
        label = labels[parts[counts.index(0)]["expert"][0]]
        raise InputError(f"--data: one row of {label!r}; give two or more, or --test-data")
    if tests is None:
        held_out = [part.select(range(count, len(part))) for count, part in zip(counts, parts, strict=True)]
    else:
        held_out = [drawn(part, len(part), seed) for part in tests]
    held_out = [part.select(range(min(measured, len(part)))) for part in held_out]
    used = [part.select(range(count)) for count, part in zip(counts, parts, strict=True)]
    return _joined(used, "--data"), _joined(held_out, "--data" if tests is None else "--test-data")


def _joined(parts: Sequence[Dataset], field: str) -> Dataset:
    """Concatenate the rows. Their messages may have different keys."""
    with reading(f"{field}: rows of its files do not go together"):
        return Dataset.from_list([row for part in parts for row in part])


# --- prompts in place of rows ----------------------------------------------------------------------------------------


def prompt_rows(prompts: Mapping[str, Prompts], labels: Sequence[str], alone: str | None = None) -> Dataset:
    """
    Return a row for each text, with the expert's index in a column `expert`, and in a column `negative` whether the
    text is an example of what the expert is not for.

    Args:
        labels: names of all experts.
        alone: an expert whose texts may come without texts of the others.
    """
    given = {label_text(label): texts for label, texts in prompts.items()}
    wanted = [alone] if alone is not None and given.keys() == {alone} else [*labels]
    for label in [*(given.keys() - {*wanted}), *({*wanted} - given.keys())]:
        raise InputError(f"prompts: {label!r}: give prompts for each of the experts {', '.join(wanted)}")
    return Dataset.from_list([
        {"text": text, "expert": labels.index(label), "negative": negative}
        for label in wanted
        for negative in (False, True)
        for text in (given[label].negative if negative else given[label].positive)
    ])  # fmt: skip


# --- requests --------------------------------------------------------------------------------------------------------


def requests_of_prompts(prompts: Mapping[str, Prompts]) -> dict[str, list[Request]]:
    """Return example requests for each expert: its positive prompts."""
    return {label_text(label): [*of_label.positive] for label, of_label in prompts.items()}


def requests_of_rows(rows: Dataset | None, labels: Sequence[str]) -> dict[str, list[Request]]:
    """Return example requests for each expert: the requests of its rows. Tokenized rows have none."""
    found: dict[str, list[Request]] = {}
    for row in rows or ():
        if request_text(request := request_of(row)).strip():
            found.setdefault(labels[row["expert"]], []).append(request)
    return found


def unanswered_prompts(
    rows: Dataset, labels: Sequence[str], tokenizer: Any, max_length: int, field: str
) -> list[list[Tokens]]:
    """Return the tokens of each expert's prompts, without their answers. `field` names who asks for them."""
    prompts: list[list[Tokens]] = [[] for _ in labels]
    for row in rows:
        request = _unanswered(row)
        if request is None:
            raise InputError(
                f"{field}: rows of --data are texts, where no answer begins; give prompts and completions, or "
                "messages (answers are not read)"
            )
        prompts[row["expert"]].append(
            prompt_tokens(tokenizer, request, row.get("tools"), row.get("chat_template_kwargs"))
        )
    return [short_prompts(of_expert, max_length) for of_expert in prompts]


def general_prompts(texts: Sequence[str], rows: Dataset, tokenizer: Any, max_length: int) -> list[Tokens]:
    """Return the tokens of general requests in the form of the rows: chats or texts."""
    is_chat = not isinstance(_unanswered(rows[0]), str)
    requests = general_requests(texts, is_chat)
    return short_prompts([prompt_tokens(tokenizer, request) for request in requests], max_length)


def _unanswered(row: Mapping[str, Any]) -> Request | None:
    """Return a row's prompt without its answer. None for a text, in which nothing says where an answer begins."""
    if row.get("prompt"):
        return row["prompt"]
    messages = row.get("messages")
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


# --- tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batching:
    """
    Makes batches of tokens from rows.

    Args:
        max_length: tokens per row; longer rows are truncated.
        batch_size: rows per batch.
        seed: seed of the order of rows.
    """

    tokenizer: Any
    max_length: int = 1024
    batch_size: int = 8
    seed: int = 0

    def for_gates(self, rows: Dataset, general: Sequence[str] = (), num_experts: int = 0) -> list[dict[str, Any]]:
        """
        Return batches of calibration rows for `init_gates`. A batch has texts of one expert, so an expert's sums do not
        depend on the other experts' texts.

        Args:
            rows: rows with columns of `expert_rows` or of `prompt_rows`.
            general: general requests of the base, which is the expert `num_experts`.
        """
        columns = ["expert", "negative"] if "negative" in rows.column_names else ["expert"]
        parts = [rows.select(of_expert) for of_expert in rows_of_labels(rows["expert"]).values()]
        if general:
            rest = dict(zip(columns, (num_experts, False), strict=False))
            parts.append(Dataset.from_list([{"text": text, **rest} for text in general]))
        return self._batches(parts, columns)

    def for_merging(self, rows: Dataset, general: Sequence[str], num_experts: int) -> list[dict[str, Any]]:
        """Return batches of rows and of general requests (`expert` n), for `regmean`."""
        texts: list[dict[str, Any]]
        if {"messages", "prompt"}.isdisjoint(rows.column_names):
            texts = [{"text": text} for text in general]
        else:  # in the chat template, like the rows
            texts = [{"messages": [{"role": "user", "content": text}]} for text in general]
        return self._batches([rows, Dataset.from_list([{**row, "expert": num_experts} for row in texts])], ["expert"])

    def _batches(self, parts: Sequence[Dataset], columns: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        return [
            batch
            for part in parts
            for batch in calibration_batches(
                part, self.tokenizer, len(part), self.batch_size, self.max_length, self.seed, columns=columns
            )
        ]

    def held_out(
        self, rows: Dataset, labels: Sequence[str], right: str | None = None, max_new_tokens: int = 64
    ) -> HeldOutRows:
        """
        Return tokenized held-out rows.

        Args:
            labels: names of all experts.
            right: `module:name` of a function that judges answers; None: answers are compared word for word.
            max_new_tokens: maximum length of an answer to judge.
        """
        args, given = preparation(self.max_length), rows.to_list()
        rows = rows.add_column("request", [request_text(request_of(row)) for row in given])
        rows = rows.add_column("row", list(range(len(given))))
        tokens, collator = tokenized(_with_answers(rows), self.tokenizer, args)
        check_learnable("held-out rows", tokens, args)
        of_label = rows_of_labels(tokens["expert"])
        by_label = {label: of_label[i] for i, label in enumerate(labels) if i in of_label}
        judge = None
        if right is not None:
            judge = AnswerChecker(load_function(right, "right"), right, given, self.tokenizer, max_new_tokens)
        held_out = HeldOutRows(tokens, by_label, collator, self.batch_size, judge)
        if right is not None and not held_out.have_answers:
            raise InputError(f"right={right!r}: some held-out rows are texts, not questions with answers")
        return held_out


def _with_answers(rows: Dataset) -> Dataset:
    """Split chats into prompts and last answers, if all end with an answer. Else return the rows unchanged."""
    chats = list(rows["messages"]) if "messages" in rows.column_names else []
    if not chats or not all(len(chat) > 1 and chat[-1]["role"] == "assistant" for chat in chats):
        return rows
    prompts, answers = [chat[:-1] for chat in chats], [chat[-1:] for chat in chats]
    return rows.remove_columns("messages").add_column("prompt", prompts).add_column("completion", answers)
