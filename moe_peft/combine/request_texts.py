"""
Texts of requests, as `RequestGate` reads them: in one form for all, part by part, with the user's earlier turns; and
lists of requests that are for no adapter.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..utils.io import read_text
from ..utils.messages import InputError

Message: TypeAlias = Mapping[str, Any]
Request: TypeAlias = str | Sequence[Message]  # a text, or a chat's messages

PARTS = 32  # number of parts read of a request at most, from its beginning and its end
# Characters at a text's beginning and end that are split into parts. While a text is split, no other thread runs.
LONGEST = 1 << 19
_MARKS = re.compile(r"[.?!,;:]+(?=\s|$)")
_ENDS = re.compile(r"(?<=[.?!])\s+|(?<=:)\s+(?![\"“{\[])|(?<=[。?!])|\n+")


# --- requests --------------------------------------------------------------------------------------------------------


def request_of(row: Mapping[str, Any]) -> Request:
    """Return the request in a row of training data: its prompt, its messages, or its text."""
    return next((row[name] for name in ("prompt", "messages", "text") if row.get(name)), "")


def request_text(request: Request) -> str:
    """Return the text of a request: the request itself, or the last user message of a chat."""
    return next(iter(user_turns(request)), "")


def user_turns(request: Request) -> list[str]:
    """Return the texts of a request's user messages, the last message first. A request that is a text is one turn."""
    if isinstance(request, str):
        return [request]
    return [_text(message.get("content")) for message in reversed(request) if message.get("role") == "user"]


def _text(content: Any) -> str:
    """Return the text of a message: its content, or the texts among the content's parts."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if isinstance(part, Mapping) and part.get("text"))


# --- forms -----------------------------------------------------------------------------------------------------------


def one_form(text: str) -> str:
    """
    Return a text in the form in which all texts are read: lower case, without marks at the end of words, on one line.

    Texts of adapters often share a form (lower case without marks, say). Without this step a gate learns that form, and
    a request in another form goes to the base.

    Example:

    ```python
    >>> one_form("What is the balance  of my account?")
    'what is the balance of my account'
    ```
    """
    text = " ".join(_MARKS.sub("", unicodedata.normalize("NFC", text).lower()).split())
    return text or "?"  # a request of marks alone


def parts_of(text: str) -> list[str]:
    """
    Split a text into sentences and lines, and after colons, unless a quotation or data follows. Of a long text, return
    the first and the last `PARTS / 2` parts. What lies more than `LONGEST` characters from both ends is left out.
    """
    if len(text) > 2 * LONGEST:
        text = f"{text[:LONGEST]}\n{text[-LONGEST:]}"
    parts = [part.strip() for part in _ENDS.split(text) if part and part.strip()]
    return parts if len(parts) <= PARTS else [*parts[: PARTS // 2], *parts[-PARTS // 2 :]]


def quoting(texts: Sequence[str], count: int) -> list[str]:
    """
    Return requests about some of an adapter's texts, such as their translation. The base should answer these requests.

    Args:
        texts: the adapter's texts.
        count: number of requests to return at most.
    """
    asks = read_list("about_a_text")
    picked = texts[:: max(1, -(-len(texts) // count))]
    return [
        (f"{ask} {text}", f'"{text}" {ask}', f'{ask.rstrip(" .:?")} "{text}"')[i % 3]
        for i, text in enumerate(picked)
        for ask in [asks[7 * i % len(asks)]]
    ]


def numbers_of(texts: Iterable[str]) -> torch.Tensor:
    """Return a number for each text, int64 [R]. Texts that differ in form alone have the same number."""
    found = [blake2b(one_form(text).encode("utf-8", "replace"), digest_size=8).digest() for text in texts]
    return torch.tensor([int.from_bytes(value, "little", signed=True) for value in found], dtype=torch.int64)


# --- lists -----------------------------------------------------------------------------------------------------------


def neutral_requests() -> list[str]:
    """
    Return the built-in list of general requests, meant for no adapter: many kinds of requests in English, and some in
    other languages.

    Example:

    ```python
    >>> from moe_peft import neutral_requests
    >>> len(neutral_requests()) > 300
    True
    ```
    """
    return read_list("neutral")


def read_list(name: str) -> list[str]:
    """Return the lines of a list of this package."""
    return _lines(read_text(Path(__file__).with_name(f"{name}.txt"), name))


def read_neutral(file: str | None, only: bool = False, field: str = "neutral") -> list[str]:
    """
    Return general requests: the built-in list and those of a file, one per line. Empty lines and lines beginning with
    `# ` do not count.

    Args:
        file: a file of the user's own, or None.
        only: whether to leave out the built-in list.
        field: the setting that names the file, for messages.

    Raises:
        ValueError: the file cannot be read, or has no requests; or `only` is set, and there are fewer than eight.
    """
    ours = [] if only else neutral_requests()
    if file is None:
        return ours
    texts = _lines(read_text(file, f"{field}={file!r}"))
    least = 8 if only else 1
    if len(texts) < least:
        raise InputError(f"{field}={file!r}: has {len(texts)} lines; give {least} or more, dozens are better")
    return [*ours, *texts]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not f"{line} ".startswith("# ")]


def check_requests(requests: Any, source: str) -> None:
    """Raise if `requests` is one text or one chat: its letters or messages would be read as requests."""
    if isinstance(requests, str) or (requests and isinstance(requests[0], Mapping)):
        raise InputError(f"{source}: must be a list of texts, or of chats, each a list of messages")
