"""
Choosing for concurrent requests: what is read of them, what chooses (a gate, or a user's function), and in which order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..combine.request_gate import RequestChoice, RequestGate
from ..combine.request_texts import Request, request_text, user_turns
from ..utils.messages import InputError
from ..utils.plugins import names_for

# Route → field of the body with the question.
ASKED = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
MOST_PROMPTS = 256  # texts of one request
MOST_WAITING = 1024  # texts of all requests
MOST_TURNS = 16  # user messages of a chat
_BATCH = 16
_SHORT = 64  # characters: shorter texts count as so long


class Refused(Exception):
    """A request that is not answered, with the status and headers of the error."""

    def __init__(self, message: str, status: int = 400, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


def asked_requests(value: Any, path: str) -> list[Request]:
    """Return the requests to pick by: the user's messages of a chat, a text, or the texts of a list of prompts."""
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
        return [_of_user(request) for request in requests]
    except (TypeError, AttributeError) as error:
        raise Refused(f"{name}: is not a list of messages") from error


def _of_user(request: Any) -> Request:
    """Return the request's text, or its last user messages."""
    # JSON can hold half a pair of surrogates. A tokenizer cannot read it.
    turns = [turn.encode(errors="replace").decode() for turn in user_turns(request)[:MOST_TURNS]]
    if isinstance(request, str):
        return turns[0]
    return [{"role": "user", "content": turn} for turn in reversed(turns)]


# --- what chooses ----------------------------------------------------------------------------------------------------


class Chooser(Protocol):
    """Chooses for requests. `names` are the adapters to choose from; None: all of the server's."""

    @property
    def names(self) -> Sequence[str] | None: ...

    def __call__(self, requests: Sequence[Request]) -> list[RequestChoice]: ...


@dataclass(frozen=True)
class ByGate:
    """Chooses by a gate."""

    gate: RequestGate

    @property
    def names(self) -> list[str]:
        return self.gate.names

    def __call__(self, requests: Sequence[Request]) -> list[RequestChoice]:
        return self.gate.choose(requests)


@dataclass(frozen=True)
class ByFunction:
    """Chooses by a function from texts to names of adapters, None for the base."""

    function: Callable[[Sequence[str]], Sequence[str | None]]
    path: str
    names: Sequence[str] | None = None

    def __call__(self, requests: Sequence[Request]) -> list[RequestChoice]:
        try:
            picked = names_for([request_text(request) for request in requests], self.function, self.path)
        except InputError as error:
            raise Refused(str(error), 500) from error
        return [RequestChoice(name, {}) for name in picked]


# --- the order -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Waiting:
    request: Request
    work: int  # characters of the whole request
    answer: asyncio.Future[RequestChoice]

    @property
    def length(self) -> int:
        return max(_SHORT, len(request_text(self.request)))


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

    async def pick(self, requests: Sequence[Request]) -> list[RequestChoice]:
        """
        Return the choice for each request. If the caller is cancelled, its requests are no longer read.

        Raises:
            Refused: too many requests wait.
        """
        if len(self.waiting) + len(requests) > MOST_WAITING:
            raise Refused("too many requests wait to be read; ask again", 503, {"retry-after": "1"})
        loop, work = asyncio.get_running_loop(), sum(len(request_text(request)) for request in requests)
        asked = [_Waiting(request, work, loop.create_future()) for request in requests]
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
            requests, loop = [each.request for each in batch], asyncio.get_running_loop()
            try:
                choices = await loop.run_in_executor(self.worker, self.choose, requests)
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
