"""Checks the rows of a data set before anything is spent on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from datasets import Dataset

from ..messages import one_line
from ..reading import reading

# Columns that trainers take, in the order in which TRL looks for them; each tuple is one text or conversation.
_FORMATS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("input_ids",),),
    (("prompt", "chosen"), ("prompt", "rejected")),
    (("chosen",), ("rejected",)),
    (("prompt", "completion"),),
    (("messages",),),
    (("conversations",),),
    (("text",),),
)
# Columns with a value for each token.
_OF_TOKENS = ("labels", "attention_mask", "completion_mask", "assistant_masks", "token_labels")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ORDERS = 100  # of roles, which are put through the chat template


def check_rows(
    dataset: Dataset,
    field: str,
    tokenizer: Any,
    label_column: str | None = None,
    own_template: Callable[[], str | None] = lambda: None,
) -> None:
    """
    Check that every row can be trained on.

    Args:
        field: the field that names the data, for messages.
        tokenizer: whose chat template conversations go through.
        label_column: a column whose values must be labels.
        own_template: gives another one. It is called only for conversations, as it may read a file.

    Raises:
        ValueError: a row has no text or no label, or a conversation has messages or roles that the chat template does
            not take; or there is no template for conversations.
    """
    columns = set(dataset.column_names)
    parts = next(parts for parts in _FORMATS if all(columns >= set(part) for part in parts))
    template = cache(lambda: own_template() or getattr(tokenizer, "chat_template", None))
    orders: dict[tuple[str, ...], tuple[str, list[dict[str, Any]]]] = {}
    size = len(tokenizer)
    kept = {key for part in parts for key in part} | ({label_column} if label_column else set())
    of_tokens = columns & set(_OF_TOKENS)
    if of_tokens and not parts == (("input_ids",),):
        raise ValueError(f"{field}: column {min(of_tokens)!r}: trainers take it for values of tokens; rename it")
    kept |= of_tokens
    for i, row in enumerate(dataset.select_columns(sorted(kept))):
        where = f"{field}: row {i}"
        if label_column and not _is_label(row[label_column]):
            raise ValueError(f"{where}: {label_column}={row[label_column]!r}: must be a label")
        for name in of_tokens:
            if not isinstance(row[name], list) or len(row[name]) != len(row["input_ids"] or []):
                raise ValueError(f"{where}: {name}={one_line(repr(row[name]), 60)}: must have a value for each token")
        for part in parts:
            messages = [
                message for key in part for message in _messages(f"{where}: {key}", key, row[key], template, size)
            ]
            if messages and len(orders) < _ORDERS:
                orders.setdefault(tuple(message["role"] for message in messages), (where, messages))
        if len({isinstance(row[key], str) for part in parts for key in part}) > 1:
            named = ", ".join(key for part in parts for key in part)
            raise ValueError(f"{where}: {named}: must all be texts, or all conversations")
    if orders and template() is None:
        raise ValueError(f"{field}: has conversations, but the tokenizer no chat template; set chat_template_path")
    for roles, (where, messages) in orders.items():
        with reading(f"{where}: the chat template does not take messages of {', '.join(roles)}"):
            tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template())


def _is_label(value: Any) -> bool:
    """A text or a number; NaN, for which Parquet and CSV files leave a place without a number, is none."""
    return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


def _messages(what: str, key: str, value: Any, template: Callable[[], Any], size: int) -> list[dict[str, Any]]:
    """Check a cell; returns its messages if it is a conversation."""
    shown = f"{what}={one_line(repr(value), 60)}"
    if isinstance(value, str) and key not in ("messages", "conversations", "input_ids"):
        if not value.strip() and key != "prompt":
            raise ValueError(f"{shown}: must not be empty; leave the row out")
        return []
    if not isinstance(value, list) or not value:
        kind = "a list of tokens" if key == "input_ids" else "a text or a list of messages"
        raise ValueError(f"{shown}: must be {kind}; leave the row out")
    if key != "input_ids":
        return [_message(what, message, template) for message in value]
    if not all(isinstance(token, int) and 0 <= token < size for token in value):
        raise ValueError(f"{shown}: must be tokens from 0 to {size - 1}, those of the tokenizer")
    return []


def _message(what: str, message: Any, template: Callable[[], Any]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{what}: {one_line(repr(message), 60)}: must be a message with role and content")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str) or (role not in _ROLES and role not in str(template())):
        raise ValueError(f"{what}: role={role!r}: must be one of {', '.join(_ROLES)}")
    if not isinstance(content, (str, list)) and not message.get("tool_calls"):
        raise ValueError(f"{what}: content={one_line(repr(content), 60)} of the role {role!r}: must be a text")
    return {**message, "role": role, "content": content}
