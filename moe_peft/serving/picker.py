"""
Choosing for concurrent requests: their texts, what chooses (a gate, or a user's function), and the order in which texts
are read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ..combine.request_gate import Request as AnyRequest
from ..combine.request_gate import RequestGate, request_text
from ..utils.messages import one_line

# Route → field of the body with the question.
ASKED = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
MOST_PROMPTS = 256  # texts of one request
MOST_WAITING = 1024  # texts of all requests
_BATCH = 16
_SHORT = 64  # characters: shorter texts count as so long


class Refused(Exception):
    """A request that is not answered, with the status and headers of the error."""

    def __init__(self, message: str, status: int = 400, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


def asked_texts(value: Any, path: str) -> list[str]:
    """Return the texts to pick by: a chat's last user message, a text, or the texts of a list of prompts."""
    name = ASKED[path]
    requests = value if name == "prompt" and isinstance(value, list) else [value]
    if name == "prompt" and not all(isinstance(request, str) for request in requests):
        raise Refused("prompt: the choice reads text; give a string or a list of strings, or name an adapter")
    if len(requests) > MOST_PROMPTS:
        raise Refused(f"prompt: has {len(requests)} texts; the choice reads up to {MOST_PROMPTS} of a request")
    try:
        if name == "input" and not isinstance(value, str) and not any(item.get("role") == "user" for item in value):
            # The user's message is stored on the server (`previous_response_id`).
            raise Refused("input: has no message of the user, who decides; name an adapter")
        # JSON can hold half a pair of surrogates. A tokenizer cannot read it.
        return [request_text(request).encode(errors="replace").decode() for request in requests]
    except (TypeError, AttributeError) as error:
        raise Refused(f"{name}: is not a list of messages") from error


# --- what chooses ----------------------------------------------------------------------------------------------------


class Picked(NamedTuple):
    """An adapter (None: the base) for a text, and the scores by which it was chosen."""

    name: str | None
    scores: Mapping[str, float]


class Chooser(Protocol):
    """Chooses for texts. `names` are the adapters to choose from; None: all of the server's."""

    @property
    def names(self) -> Sequence[str] | None: ...

    def __call__(self, texts: Sequence[str]) -> list[Picked]: ...


class ScoredGate(RequestGate):
    """A gate that keeps the scores of its last choice."""

    last: torch.Tensor

    def scores(self, requests: Sequence[AnyRequest]) -> torch.Tensor:
        self.last = super().scores(requests)
        return self.last.clone()


@dataclass(frozen=True)
class ByGate:
    """Chooses by a gate."""

    gate: ScoredGate

    @property
    def names(self) -> list[str]:
        return self.gate.names

    def __call__(self, texts: Sequence[str]) -> list[Picked]:
        picked, columns = self.gate.pick(texts), self.gate.columns
        rows = self.gate.last.tolist()
        return [Picked(name, dict(zip(columns, row, strict=True))) for name, row in zip(picked, rows, strict=True)]


@dataclass(frozen=True)
class ByFunction:
    """Chooses by a function from texts to names of adapters, None for the base."""

    function: Callable[[Sequence[str]], Sequence[str | None]]
    path: str
    names: Sequence[str] | None = None

    def __call__(self, texts: Sequence[str]) -> list[Picked]:
        picked = self.function(texts)
        if not isinstance(picked, Sequence) or isinstance(picked, str) or len(picked) != len(texts):
            answer = one_line(repr(picked), 80)
            raise Refused(f"choose={self.path!r}: must return {len(texts)} names for as many texts, not {answer}", 500)
        return [Picked(name, {}) for name in picked]


# --- the order -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Waiting:
    text: str
    work: int  # characters of the whole request
    answer: asyncio.Future[Picked]

    @property
    def length(self) -> int:
        return max(_SHORT, len(self.text))


@dataclass
class Picker:
    """
    Chooses for concurrent requests, in a worker thread. Up to 16 waiting texts of similar lengths are read together:
    those like the text of the shortest request, and every second time those like the text that came first.
    """

    choose: Chooser
    worker: Executor
    waiting: list[_Waiting] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    async def pick(self, texts: Sequence[str]) -> list[Picked]:
        """
        Return the choice for each text. If the caller is cancelled, its texts are no longer read.

        Raises:
            Refused: too many texts wait.
        """
        if len(self.waiting) + len(texts) > MOST_WAITING:
            raise Refused("too many requests wait to be read; ask again", 503, {"retry-after": "1"})
        loop, work = asyncio.get_running_loop(), sum(map(len, texts))
        asked = [_Waiting(text, work, loop.create_future()) for text in texts]
        self.waiting += asked
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._read())
        try:
            return await asyncio.gather(*(each.answer for each in asked))
        finally:
            for each in asked:
                each.answer.cancel()

    async def _read(self) -> None:
        for turn in itertools.count():
            self.waiting = [each for each in self.waiting if not each.answer.done()]
            if not self.waiting:
                return
            batch = self._next(oldest=turn % 2 == 1)
            self.waiting = [each for each in self.waiting if each not in batch]
            texts, loop = [each.text for each in batch], asyncio.get_running_loop()
            try:
                choices = await loop.run_in_executor(self.worker, self.choose, texts)
            except Exception as error:
                for each in batch:
                    if not each.answer.done():
                        each.answer.set_exception(error)
            else:
                for each, choice in zip(batch, choices, strict=True):
                    if not each.answer.done():
                        each.answer.set_result(choice)

    def _next(self, oldest: bool) -> list[_Waiting]:
        first = self.waiting[0] if oldest else min(self.waiting, key=lambda each: each.work)
        alike = (each for each in self.waiting if first.length <= 2 * each.length and each.length <= 2 * first.length)
        return sorted(alike, key=lambda each: (each is not first, each.work))[:_BATCH]
