"""
`moe-peft pick`: a proxy in front of a server with OpenAI's API and LoRAs by name. A request for our model is forwarded
to the adapter picked by a `RequestGate`, or to the base. All other requests are forwarded unchanged.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..combine.request_gate import BASE, RequestGate
from ..combine.request_texts import request_text
from ..utils.messages import InputError, choice_error, one_line

HEADER = "x-moe-peft-adapter"
_PRINTABLE = "".join(map(chr, range(32, 127))).replace("%", "")  # other characters are percent-encoded in the header
# Route → field of the body with the question.
ASKED = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
_OF_CONNECTIONS = {  # headers of a single connection, never forwarded
    "connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "te",
    "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip


@dataclass
class Picker:
    """Runs a gate for concurrent requests. Waiting requests are read in one batch, in a worker thread."""

    gate: RequestGate
    waiting: list[tuple[str, asyncio.Future[str | None]]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    async def pick(self, texts: Sequence[str]) -> list[str | None]:
        """Return the adapter for each text; None for the base."""
        asked = [(text, asyncio.get_running_loop().create_future()) for text in texts]
        self.waiting += asked
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._read())
        return [await future for _, future in asked]

    async def _read(self) -> None:
        while self.waiting:
            batch, self.waiting = self.waiting, []
            answers = [future for _, future in batch]
            try:
                picked = await asyncio.to_thread(self.gate.pick, [text for text, _ in batch])
            except Exception as error:
                for future in answers:
                    future.set_exception(error)
            else:
                for future, name in zip(answers, picked, strict=True):
                    future.set_result(name)


@dataclass(frozen=True)
class Engine:
    """
    Upstream server of the proxy.

    Args:
        url: the server's URL, without `/v1`.
        base: the server's name of the base.
        names: the gate's names of adapters → the server's names.
        key: API key for the proxy's own requests; clients send theirs.
    """

    url: str
    base: str
    names: Mapping[str, str]
    key: str | None = None


def find_engine(
    url: str, adapters: Sequence[str], names: Mapping[str, str], base: str | None, served: str, key: str | None = None
) -> Engine:
    """
    Ask the upstream server for its models, and find the gate's adapters and the base among them.

    Args:
        adapters: the gate's names of the adapters.
        names: the server's names of adapters, where they differ from the gate's.
        base: the server's name of the base; None: its first model that is no adapter.
        served: the name of our model.

    Raises:
        ValueError: the server does not answer, lacks a model, or has a model with our name.
    """
    url = url.rstrip("/").removesuffix("/v1")
    source = f"server={url!r}"
    try:
        answer = httpx2.get(f"{url}/v1/models", headers=_authorization(key), timeout=30, trust_env=False)
        listed = {str(model["id"]): model for model in answer.raise_for_status().json()["data"]}
        models = {name: model.get("parent") for name, model in listed.items()}
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise InputError(f"{source}: {one_line(error)}; start it first, e.g. vllm serve BASE --enable-lora") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{source}: /v1/models is not a list of models, as OpenAI's API has it") from error
    for name in names.keys() - set(adapters):
        raise InputError(choice_error("names", name, adapters))
    names = {name: names.get(name, name) for name in adapters}
    if missing := [name for name in names.values() if name not in models]:
        raise InputError(
            f"{source}: has no {', '.join(missing)}, only {', '.join(models)}; start it with them (vllm serve BASE "
            "--enable-lora --lora-modules NAME=FOLDER), or say how it calls them (--names)"
        )
    if base is None:
        others = [name for name, parent in models.items() if not parent and name not in names.values()]
        if len({listed[name].get("root", name) for name in others}) > 1:  # one model may have several names
            raise InputError(f"{source}: has {', '.join(others)}; say which is the base (--base-name)")
        base = next(iter(others), None)
    if base is None or base not in models:
        raise InputError(choice_error("base_name", base, models))
    if served in models:
        raise InputError(f"served_model_name={served!r}: {source} has a model of that name; give another")
    return Engine(url, base, names, key)


def _authorization(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


class Proxy:
    """
    Proxy in front of an upstream server: routes and their handlers.

    Args:
        served: the name of our model. Requests for it get the picked adapter.
        timeout: maximum seconds between two bytes of the upstream server.
        max_body: maximum bytes of a request.
    """

    def __init__(self, gate: RequestGate, engine: Engine, served: str, timeout: float, max_body: int) -> None:
        self.picker, self.engine, self.served, self.max_body = Picker(gate), engine, served, max_body
        self.picked = Counter(dict.fromkeys((*engine.names, BASE), 0))
        # Close idle connections before the server would. Ignore proxies in the environment.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)
        self.client = httpx2.AsyncClient(limits=limits, timeout=httpx2.Timeout(timeout, connect=10), trust_env=False)
        self.client.headers.clear()

    def app(self) -> Starlette:
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            *(Route(path, self.ask, methods=["POST"]) for path in ASKED),
            Route("/{path:path}", self.pass_on, methods=methods),
        ]
        handlers: Any = {
            httpx2.TimeoutException: _no_time, httpx2.HTTPError: _no_answer, _Refused: _refuse, Gone: _gone,
            Exception: _bug,
        }  # fmt: skip

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            async with self.client:
                yield

        return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)

    # --- routes ------------------------------------------------------------------------------------------------------

    async def ask(self, request: Request) -> Response:
        """Answer a request for our model by the picked adapter. Forward any other request."""
        content = await self.body(request)
        try:
            body = json.loads(content)
            ours = body["model"] == self.served
        except (ValueError, KeyError, TypeError, RecursionError):  # the server reports the error
            ours = False
        if not ours:
            return await self.forward(request, content)
        texts = asked_texts(body.get(ASKED[request.url.path]), request.url.path)
        picked = {name or BASE for name in await self.picker.pick(texts)} or {BASE}
        if len(picked) > 1:
            raise _Refused(f"prompt: its texts are for {', '.join(sorted(picked))}; ask for each in its own request")
        (name,) = picked
        self.picked[name] += 1
        body["model"] = self.engine.names.get(name, self.engine.base)
        return await self.forward(request, json.dumps(body).encode(), {HEADER: quote(name, safe=_PRINTABLE)})

    async def models(self, request: Request) -> Response:
        """List our model and the server's models."""
        answer = await self.client.get(f"{self.engine.url}/v1/models", headers=_passed(request.headers.items()))
        if answer.status_code != 200:
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        listed = answer.json()
        ours = {"id": self.served, "object": "model", "created": 0, "owned_by": "moe_peft", "parent": self.engine.base}
        return JSONResponse({**listed, "data": [ours, *listed["data"]]})

    async def health(self, request: Request) -> Response:
        """Report whether the server answers, and the number of requests for each adapter."""
        try:
            answer = await self.client.get(f"{self.engine.url}/v1/models", headers=_authorization(self.engine.key))
            state = "ok" if answer.status_code == 200 else f"status {answer.status_code}"
        except httpx2.HTTPError as error:
            state = _line(error)
        about = {
            "status": "ok", "server": self.engine.url, "server_status": state, "model": self.served,
            "adapters": [*self.engine.names], "base": self.engine.base, "picked": self.picked,
        }  # fmt: skip
        return JSONResponse(about, 200 if state == "ok" else 503)

    async def pass_on(self, request: Request) -> Response:
        return await self.forward(request, await self.body(request))

    # --- forwarding --------------------------------------------------------------------------------------------------

    async def body(self, request: Request) -> bytes:
        content = bytearray()
        async for piece in request.stream():
            content += piece
            if len(content) > self.max_body:
                raise _Refused(f"the request has more than {self.max_body} bytes", 413)
        return bytes(content)

    async def forward(self, request: Request, content: bytes, more: Mapping[str, str] | None = None) -> Response:
        """Forward a request, and stream the answer. If the client disconnects, close the connection to the server."""
        url = httpx2.URL(self.engine.url)
        path = request.scope["raw_path"] + (b"?" + request.scope["query_string"]).rstrip(b"?")
        url = url.copy_with(raw_path=url.raw_path.rstrip(b"/") + path)
        headers = _passed(request.headers.items())
        asked = self.client.build_request(request.method, url, headers=headers, content=content)
        sending = asyncio.create_task(self.client.send(asked, stream=True))
        gone = asyncio.create_task(_gone_from(request))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise Gone
            answer = sending.result()
        finally:
            gone.cancel()
            sending.cancel()
        headers = [*_passed(answer.headers.multi_items()), *(more or {}).items()]
        if "content-length" in answer.headers:
            headers.append(("content-length", answer.headers["content-length"]))
        response = StreamingResponse(_pieces(answer), answer.status_code)
        response.raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        return response


async def _gone_from(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _pieces(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield an answer's bytes. If a stream of events breaks off, its last event is an error."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx2.HTTPError as error:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            raise
        yield b"\n\ndata: " + _error(f"the server behind moe-peft pick broke off ({_line(error)})", 502).body + b"\n\n"
    finally:
        await answer.aclose()


def _passed(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers to forward. A header, such as a cookie, may occur twice."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_CONNECTIONS]


def asked_texts(value: Any, path: str) -> list[str]:
    """Return the texts to pick by: a chat's last user message, a text, or the texts of a list of prompts."""
    name = ASKED[path]
    requests = value if name == "prompt" and isinstance(value, list) else [value]
    if name == "prompt" and not all(isinstance(request, str) for request in requests):
        raise _Refused("prompt: the choice reads text; give a string or a list of strings, or name an adapter")
    try:
        if name == "input" and not isinstance(value, str) and not any(item.get("role") == "user" for item in value):
            # The user's message is stored on the server (`previous_response_id`).
            raise _Refused("input: has no message of the user, who decides; name an adapter")
        # JSON can hold half a pair of surrogates. A tokenizer cannot read it.
        return [request_text(request).encode(errors="replace").decode() for request in requests]
    except (TypeError, AttributeError) as error:
        raise _Refused(f"{name}: is not a list of messages") from error


def serve(proxy: Proxy, host: str, port: int) -> None:
    """
    Serve until interrupted.

    Raises:
        ValueError: the port is taken, or the host is not an address of this machine.
    """
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InputError(f"--host {host}, --port {port}: taken, or not an address of this machine") from error
    address = f"[{host}]" if ":" in host else host
    adapters = ", ".join(proxy.engine.names)
    print(f"model {proxy.served!r} at http://{address}:{listening.getsockname()[1]}/v1 (Ctrl-C to stop)")
    print(f"picks among {adapters} and the base, {proxy.engine.base}", flush=True)
    config = uvicorn.Config(
        proxy.app(), log_level="warning", server_header=False, date_header=False, timeout_graceful_shutdown=5
    )
    uvicorn.Server(config).run(sockets=[listening])


# --- errors, in OpenAI's form ----------------------------------------------------------------------------------------


class Gone(Exception):
    """Raised when the client has closed its connection."""


class _Refused(Exception):
    """An error in a request, with the status of the answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def _error(message: str, status: int) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


def _line(error: Exception) -> str:
    return one_line(error) or type(error).__name__


async def _no_time(request: Request, error: Exception) -> Response:
    return _error(f"the server behind moe-peft pick does not answer in time ({_line(error)})", 504)


async def _no_answer(request: Request, error: Exception) -> Response:
    return _error(f"the server behind moe-peft pick does not answer ({_line(error)})", 502)


async def _refuse(request: Request, error: _Refused) -> Response:
    return _error(str(error), error.status)


async def _bug(request: Request, error: Exception) -> Response:
    return _error(f"moe-peft pick failed: {type(error).__name__}: {_line(error)}", 500)  # the log has the traceback


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
