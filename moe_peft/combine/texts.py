"""Texts of a mixture's experts: calibration rows for gates, held-out rows, requests, and general requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from ..models.gate_init import find_gate_init
from ..native.gate_sums import FILE as SUMS
from ..routing.expert_map import label_text
from ..training.data import FORMATS, check_learnable, check_rows, drawn, load_data, rows_of_labels, with_shared_format
from ..training.preparation import calibration_batches, preparation, tokenized
from ..utils.io import reading
from ..utils.messages import InputError, choice_error
from ..utils.plugins import load_function
from .distil import Tokens, general_requests, prompt_tokens, short_prompts
from .held_out import AnswerChecker, HeldOutRows
from .mix_settings import OURS, MixSettings
from .request_gate import BASE
from .request_texts import Request, read_neutral, request_of, request_text

logger = logging.getLogger("moe_peft")


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


@dataclass(frozen=True)
class CalibrationData:
    """
    Reads the experts' texts, from `--data`, `--test-data` or prompts.

    Args:
        joins: whether texts of the new expert alone are enough, because there are sums of the other experts' texts.
    """

    settings: MixSettings
    labels: Sequence[str]
    tokenizer: Any
    joins: bool = False

    def by_expert(self, field: str) -> list[Dataset] | None:
        """Return the rows of each expert, with its index in a column `expert`. None if `field` is not set."""
        files, column = getattr(self.settings, field), self.settings.label_column
        if files is None:
            return None
        named, labels = f"--{field.replace('_', '-')}", self.labels
        if column is None:
            labels = [self.new] if self.joins and len(files) == 1 else labels
            if len(files) != len(labels):
                raise InputError(f"{named}: {len(files)} files for {len(labels)} experts; give one for each")
            stems = [label_text(Path(file).stem) for file in files]
            if stems != [*labels] and sorted(stems) == sorted(labels):
                raise InputError(f"{named}: {files[0]}: give the files in the order of {', '.join(labels)}")
            parts = [load_data(file, named, None) for file in files]
        else:
            data = load_data(files[0], named, column)
            rows = rows_of_labels(map(label_text, data[column]))
            if self.settings.add_to is not None and rows.keys() & set(labels) == {self.new}:
                labels = self._alone(named)
            for label in labels:
                if label not in rows:
                    raise InputError(
                        f"{choice_error('labels', label, list(rows)[:8])}, which {named} has; name the experts by them"
                    )
            parts = [data.select(rows[label]) for label in labels]
            if left := rows.keys() - set(labels):
                logger.warning(
                    "%s: rows of %s are left out: no expert has that name", named, ", ".join(sorted(left)[:8])
                )
        parts = with_shared_format(parts, named)
        for part in parts:
            check_rows(part, named, self.tokenizer)
        return [
            part.add_column("expert", [self.labels.index(label)] * len(part))
            for label, part in zip(labels, parts, strict=True)
        ]

    @property
    def new(self) -> str:
        """Name of the expert added to a mixture."""
        return self.labels[-1 if self.settings.replace is None else self.settings.replace]

    def _alone(self, named: str) -> list[str]:
        """Return only the new expert's label, for rows of it alone. Raise if there are no sums of other experts."""
        if self.joins:
            return [self.new]
        raise InputError(
            f"{named}: has only rows of {self.new!r}, and {self.settings.add_to!r} has no {SUMS} of the others' texts "
            "(--keep-sums); give rows of all experts"
        )

    def split(self) -> tuple[Dataset | None, Dataset | None]:
        """
        Return calibration rows and held-out rows. Without `--test-data`, both are from `--data`, without overlap.
        Without `--data`, both are None.
        """
        s = self.settings
        parts, tests = self.by_expert("data"), self.by_expert("test_data")
        if parts is None:
            return None, None
        parts = [drawn(part, len(part), s.seed) for part in parts]
        n = len(self.labels)
        most = s.calibration_examples or max(1, min(256, 4096 // n))
        counts = [min(most, len(part) // (2 if tests is None else 1)) for part in parts]
        if not all(counts):
            label = self.labels[parts[counts.index(0)]["expert"][0]]
            raise InputError(f"--data: one row of {label!r}; give two or more, or --test-data")
        if tests is None:
            tests = [part.select(range(n, len(part))) for n, part in zip(counts, parts, strict=True)]
        else:
            tests = [drawn(part, len(part), s.seed) for part in tests]
        measured = s.test_examples or max(1, min(64, 512 // n))
        tests = [part.select(range(min(measured, len(part)))) for part in tests]
        used = [part.select(range(n)) for n, part in zip(counts, parts, strict=True)]
        return _joined(used, "--data"), _joined(tests, "--data" if s.test_data is None else "--test-data")

    def of_prompts(self) -> Dataset:
        prompts = {label_text(label): texts for label, texts in (self.settings.prompts or {}).items()}
        labels = [self.new] if self.joins and prompts.keys() == {self.new} else self.labels
        for label in [*(prompts.keys() - set(labels)), *(set(labels) - prompts.keys())]:
            raise InputError(f"prompts: {label!r}: give prompts for each of the experts {', '.join(labels)}")
        return Dataset.from_list([
            {"text": text, "expert": self.labels.index(label), "negative": negative}
            for label in labels
            for negative in (False, True)
            for text in (prompts[label].negative if negative else prompts[label].positive)
        ])  # fmt: skip

    def batches(self, rows: Dataset | None) -> list[dict[str, torch.Tensor]] | None:
        """
        Return calibration batches of the prompts, if set, or the rows, and of general requests. None if the gates need
        no texts. A batch has texts of one expert, so an expert's sums do not depend on the other experts' texts.
        """
        s, columns = self.settings, ["expert"]
        if s.prompts is not None:
            rows, columns = self.of_prompts(), ["expert", "negative"]
        if rows is None or not find_gate_init(s.gates).needs_texts:
            return None
        parts = [rows.select(of_expert) for of_expert in rows_of_labels(rows["expert"]).values()]
        if s.neutral is not None:
            texts = neutral_texts(s.neutral)[0]
            rest = {"expert": len(self.labels), **({"negative": False} if s.prompts else {})}
            parts.append(Dataset.from_list([{"text": text, **rest} for text in texts]))
        return [
            batch
            for part in parts
            for batch in calibration_batches(
                part, self.tokenizer, len(part), s.batch_size, s.max_length, s.seed, columns=columns
            )
        ]

    def merge_batches(self, rows: Dataset) -> list[dict[str, torch.Tensor]]:
        """Return batches of the rows and of general requests (`expert` n), for `regmean`."""
        s = self.settings
        texts = neutral_texts(s.neutral)[0]
        if {"messages", "prompt"}.isdisjoint(rows.column_names):
            general: list[dict[str, Any]] = [{"text": text} for text in texts]
        else:  # in the chat template, like the rows
            general = [{"messages": [{"role": "user", "content": text}]} for text in texts]
        parts = [rows, Dataset.from_list([{**row, "expert": len(self.labels)} for row in general])]
        return [
            batch
            for part in parts
            for batch in calibration_batches(
                part, self.tokenizer, len(part), s.batch_size, s.max_length, s.seed, columns=["expert"]
            )
        ]

    def prompts(self, rows: Dataset) -> list[list[Tokens]]:
        """Return the tokens of each expert's prompts, without their answers."""
        prompts: list[list[Tokens]] = [[] for _ in self.labels]
        for row in rows:
            request = _unanswered(row)
            if request is None:
                raise InputError(
                    f"steps={self.settings.steps}: rows of --data are texts, where no answer begins; give prompts and "
                    "completions, or messages (answers are not read)"
                )
            prompts[row["expert"]].append(
                prompt_tokens(self.tokenizer, request, row.get("tools"), row.get("chat_template_kwargs"))
            )
        return [short_prompts(of_expert, self.settings.max_length) for of_expert in prompts]

    def general_prompts(self, rows: Dataset) -> tuple[list[Tokens], list[Tokens]]:
        """Return the tokens of general requests in the form of the rows: chats or texts. The second are held out."""
        is_chat = not isinstance(_unanswered(rows[0]), str)
        parts = [
            [prompt_tokens(self.tokenizer, request) for request in general_requests(texts, is_chat)]
            for texts in neutral_texts(self.settings.neutral)
        ]
        return short_prompts(parts[0], self.settings.max_length), short_prompts(parts[1], self.settings.max_length)

    def taught_parts(self, taught: Sequence[Mapping[str, Any]], parts: HeldOutRows) -> HeldOutRows:
        """Return held-out prompts with the answers of their teachers: of each adapter, and of the base."""
        of_label = rows_of_labels(row["expert"] for row in taught)
        by_label = {label: of_label[i] for i, label in enumerate([*self.labels, BASE]) if i in of_label}
        return HeldOutRows(Dataset.from_list([*taught]), by_label, parts.collator, self.settings.batch_size)

    def requests(self, rows: Dataset | None) -> dict[str, list[Request]]:
        """Return example requests for each expert: its positive prompts, or the requests of its rows."""
        if self.settings.prompts is not None:
            return {label_text(label): [*prompts.positive] for label, prompts in self.settings.prompts.items()}
        found: dict[str, list[Request]] = {}
        for row in rows or ():
            if request_text(request := request_of(row)).strip():  # tokenized rows have no text
                found.setdefault(self.labels[row["expert"]], []).append(request)
        return found

    def parts(self, held_out: Dataset) -> HeldOutRows:
        args = preparation(self.settings.max_length)
        given = held_out.to_list()
        held_out = held_out.add_column("request", [request_text(request_of(row)) for row in given])
        held_out = held_out.add_column("row", list(range(len(given))))
        rows, collator = tokenized(_with_answers(held_out), self.tokenizer, args)
        check_learnable("held-out rows", rows, args)
        of_label = rows_of_labels(rows["expert"])
        by_label = {label: of_label[i] for i, label in enumerate(self.labels) if i in of_label}
        parts = HeldOutRows(rows, by_label, collator, self.settings.batch_size)
        if (name := self.settings.right) is None:
            return parts
        if not parts.have_answers:
            raise InputError(f"right={name!r}: some held-out rows are texts, not questions with answers")
        judge = AnswerChecker(load_function(name, "right"), name, given, self.tokenizer, self.settings.max_new_tokens)
        return replace(parts, judge=judge)


def _unanswered(row: Mapping[str, Any]) -> Request | None:
    """Return a row's prompt without its answer. None for a text, in which nothing says where an answer begins."""
    if row.get("prompt"):
        return row["prompt"]
    messages = row.get("messages")
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def _with_answers(rows: Dataset) -> Dataset:
    """Split chats into prompts and last answers, if all end with an answer. Else return the rows unchanged."""
    chats = list(rows["messages"]) if "messages" in rows.column_names else []
    if not chats or not all(len(chat) > 1 and chat[-1]["role"] == "assistant" for chat in chats):
        return rows
    prompts, answers = [chat[:-1] for chat in chats], [chat[-1:] for chat in chats]
    return rows.remove_columns("messages").add_column("prompt", prompts).add_column("completion", answers)


def _joined(parts: Sequence[Dataset], field: str) -> Dataset:
    """Concatenate the rows. Their messages may have different keys."""
    with reading(f"{field}: rows of its files do not go together"):
        return Dataset.from_list([row for part in parts for row in part])


def neutral_texts(file: str | None) -> tuple[list[str], list[str]]:
    """Return general requests, built-in or from a file: for gates, and held out (every eighth)."""
    texts = read_neutral(None if file == OURS else file)
    return [text for i, text in enumerate(texts) if i % 8], texts[::8]
