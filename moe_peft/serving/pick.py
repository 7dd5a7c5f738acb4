"""
`moe-peft pick`: a proxy in front of a server with OpenAI's API and LoRAs by name. A request for our model is forwarded
to the adapter picked by a `RequestGate` or a user's function, or to the base. All other requests are forwarded
unchanged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..combine.request_gate import BASE
from ..utils.messages import InputError, one_line
from .engines import MODELS, Engine, models_listed, warnings_of_adapters
from .picker import ASKED, Chooser, Picker, Refused, asked_requests
from .records import Records

logger = logging.getLogger("moe_peft")

HEADER = "x-moe-peft-adapter"
VIA = (b"via", b"1.1 moe-peft")
MOST_VALUES = 500_000  # of a body's JSON: Python parses so many in .3 s, during which no other request is served
LONGEST_URL = 16_384  # bytes
HEALTH_SECONDS = 5  # for the server's answer to /health
_PRINTABLE = "".join(map(chr, range(32, 127))).replace("%", "")  # other characters are percent-encoded in the header
_OF_CONNECTIONS = {  # headers of a single connection, never forwarded
    b"connection", b"content-length", b"expect", b"host", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
}  # fmt: skip
Header = tuple[bytes, bytes]
T = TypeVar("T")


class Proxy:
    """
    Proxy in front of an upstream server: routes and their handlers.

    Args:
        served: the name of our model. Requests for it get the picked adapter.
        timeout: maximum seconds between two bytes of the upstream server.
        max_body: maximum bytes of a request.
        records: counts and a log; None: without a log.
        hosts: host names that requests may have; `"*"`: any.
        checks_adapters: whether to warn, at the start, of adapters that answer like the base.
    """

    def __init__(
        self,
        choose: Chooser,
        engine: Engine,
        served: str,
        timeout: float,
        max_body: int,
        records: Records | None = None,
        hosts: Sequence[str] = ("*",),
        checks_adapters: bool = False,
    ) -> None:
        self.served, self.max_body, self.hosts, self.checks_adapters = served, max_body, hosts, checks_adapters
        self.records = records or Records()
        self.worker = ThreadPoolExecutor(1)  # reads requests, and loads gates
        self.use(choose, engine)
        self.gate: Gatekeeper | None = None
        # Close idle connections before the server would. Ignore proxies in the environment. Keep no cookies: they are
        # the clients' own.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)
        self.client = httpx2.AsyncClient(
            limits=limits, timeout=httpx2.Timeout(timeout, connect=10), trust_env=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )  # fmt: skip
        self.client.headers.clear()

    def use(self, choose: Chooser, engine: Engine) -> None:
        """Choose in this way from now on. Requests that wait are chosen for as before."""
        self.now = (Picker(choose, self.worker), engine)
        self.records.names([*engine.names])

    def app(self) -> Starlette:
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route(MODELS, self.models),
            Route(f"{MODELS}/{{name:path}}", self.model),
            *(Route(path, self.ask, methods=["POST"]) for path in ASKED),
            Route("/{path:path}", self.pass_on, methods=methods),
        ]
        handlers: Any = {
            httpx2.TimeoutException: _no_time, httpx2.HTTPError: _no_answer, Refused: _refuse, Gone: _gone,
            ClientDisconnect: _gone, Exception: _bug,
        }  # fmt: skip
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=[*self.hosts], www_redirect=False)]
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self.client:
            background = [asyncio.create_task(self._check_adapters())] if self.checks_adapters else []
            background += [asyncio.create_task(self.gate.watch(self))] if self.gate else []
            yield
            for task in background:
                task.cancel()
            self.worker.shutdown(wait=False, cancel_futures=True)

    async def _check_adapters(self) -> None:
        for warning in await warnings_of_adapters(self.client, self.now[1]):
            logger.warning("%s", warning)

    # --- routes ------------------------------------------------------------------------------------------------------

    async def ask(self, request: Request) -> Response:
        """Answer a request for our model by the picked adapter. Forward any other request."""
        content, path = await self.body(request), request.scope["path"]
        if sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:
            raise Refused(f"the request has more than {MOST_VALUES} values", 413)
        try:
            body = json.loads(content)
            ours = body["model"] == self.served
        except (ValueError, KeyError, TypeError, RecursionError):  # the server reports the error
            ours = False
        if not ours:
            return await self.pass_on(request, content)
        picker, engine = self.now
        requests = asked_requests(body.get(ASKED[path]), path)
        with self.records.choice_seconds.time():
            choices = await _unless_gone(request, picker.pick(requests))
        picked = {choice.name or BASE for choice in choices} or {BASE}
        if unknown := picked - engine.fields.keys():
            raise Refused(f"{', '.join(map(repr, unknown))} was chosen, which is no adapter of the server", 500)
        if len(picked) > 1:
            raise Refused(f"prompt: its texts are for {', '.join(sorted(picked))}; ask for each in its own request")
        (name,) = picked
        self.records.chosen(name, choices, requests)
        return await self._answer(request, engine, name, body)

    async def _answer(self, request: Request, engine: Engine, name: str, body: dict[str, Any]) -> Response:
        """Ask the server for an adapter, or for the base if the server has lost the adapter."""
        start = time.monotonic()

        def ended(failed: bool) -> None:
            self.records.answered(name, time.monotonic() - start, failed)

        try:
            answer = await self.send(request, engine, json.dumps(engine.body(body, name)).encode())
            if name != BASE and answer.status_code in (400, 404) and name in await self._lost(engine):
                logger.warning("%s: the server no longer has it; the base answers", name)
                await answer.aclose()
                name = BASE
                answer = await self.send(request, engine, json.dumps(engine.body(body, name)).encode())
        except httpx2.HTTPError:
            ended(failed=True)
            raise
        return _Streamed(answer, [(HEADER.encode(), quote(name, safe=_PRINTABLE).encode())], ended)

    async def models(self, request: Request) -> Response:
        """List our model and the server's models."""
        answer = await self.client.get(f"{self.now[1].url}{MODELS}", headers=self._headers(request, b"accept-encoding"))
        if answer.status_code != 200:
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        try:
            models_listed(answer)
        except ValueError as error:
            raise Refused(f"the server behind moe-peft pick: {error}", 502) from error
        listed = answer.json()
        return JSONResponse({**listed, "data": [self._ours(), *listed["data"]]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] == self.served:
            return JSONResponse(self._ours())
        return await self.pass_on(request)

    def _ours(self) -> dict[str, Any]:
        about = {"id": self.served, "object": "model", "created": 0, "owned_by": "moe_peft"}
        return {**about, "parent": self.now[1].base}

    async def health(self, request: Request) -> Response:
        """Report whether the server answers and has all adapters, and the number of requests for each."""
        engine = self.now[1]
        try:
            lost = await self._lost(engine, strict=True)
            state = f"has no {', '.join(lost)}" if lost else "ok"
        except TimeoutError:
            state = f"does not answer within {HEALTH_SECONDS} seconds"
        except (httpx2.HTTPError, ValueError) as error:
            state = _line(error)
        about = {
            "status": "ok", "server": engine.url, "server_status": state, "model": self.served,
            "adapters": [*engine.names], "base": engine.base, "picked": self.records.picked,
        }  # fmt: skip
        return JSONResponse(about, 200 if state == "ok" else 503)

    async def _lost(self, engine: Engine, strict: bool = False) -> list[str]:
        """Return the adapters that the server no longer has. Unless `strict`, [] if it does not say."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                answer = await self.client.get(f"{engine.url}{engine.kind.path}", headers=dict(engine.own))
            if answer.status_code != 200:
                raise ValueError(f"status {answer.status_code}")
            return engine.missing(answer)
        except (TimeoutError, httpx2.HTTPError, ValueError):
            if strict:
                raise
            return []

    async def metrics(self, request: Request) -> Response:
        return Response(self.records.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def pass_on(self, request: Request, content: bytes | None = None) -> Response:
        """Forward a request as it is."""
        content = await self.body(request) if content is None else content
        return _Streamed(await self.send(request, self.now[1], content))

    # --- forwarding --------------------------------------------------------------------------------------------------

    async def body(self, request: Request) -> bytes:
        too_large = Refused(f"the request has more than {self.max_body} bytes", 413, {"connection": "close"})
        length = request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self.max_body):
            raise too_large  # before any of it is read, or asked for (Expect: 100-continue)
        content = bytearray()
        async for piece in request.stream():
            content += piece
            if len(content) > self.max_body:
                raise too_large
        return bytes(content)

    async def send(self, request: Request, engine: Engine, content: bytes) -> httpx2.Response:
        """Send a request to the server, and return its answer, not yet read. If the client leaves, the request ends."""
        url, headers = _url(request, engine), self._headers(request)
        asked = self.client.build_request(request.method, url, headers=headers, content=content)
        return await _unless_gone(request, self.client.send(asked, stream=True))

    def _headers(self, request: Request, *without: bytes) -> list[Header]:
        headers = [(name, value) for name, value in _passed(request.headers.raw) if name.lower() not in without]
        if self.now[1].login is not None and "authorization" not in request.headers:
            headers.append((b"authorization", self.now[1].login.encode()))
        return headers


def _url(request: Request, engine: Engine) -> httpx2.URL:
    path, query = request.scope["raw_path"], request.scope["query_string"]
    if len(path) + len(query) > LONGEST_URL:
        raise Refused(f"the URL has more than {LONGEST_URL} bytes", 414)
    if {".", ".."} & {*re.split(r"[/\\]", request.scope["path"])}:
        raise Refused("the URL's path has . or .. in it")
    url = httpx2.URL(engine.url)
    try:
        return url.copy_with(raw_path=url.raw_path.rstrip(b"/") + path + (b"?" + query).rstrip(b"?"))
    except (httpx2.InvalidURL, ValueError) as error:
        raise Refused(f"the URL cannot be read: {one_line(error)}") from error


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """
    Return the result of `work`. If the client leaves before, cancel the work.

    Raises:
        Gone: the client has left.
    """
    working, gone = asyncio.ensure_future(work), asyncio.create_task(_gone_from(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _gone_from(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _passed(headers: Iterable[Header]) -> list[Header]:
    """Return the headers to forward, as bytes. A header, such as a cookie, may occur twice."""
    headers = [*headers]
    named = {
        token.strip().lower() for name, value in headers if name.lower() == b"connection" for token in value.split(b",")
    }
    return [*((name, value) for name, value in headers if name.lower() not in _OF_CONNECTIONS | named), VIA]


class _Streamed(StreamingResponse):
    """
    An answer of the server, passed on as it comes. If a stream of events breaks off, its last event is an error. If
    another answer breaks off, the client's connection is closed before the answer's end.

    Args:
        more: further headers.
        ended: is called at the end of the answer, with whether it failed.
    """

    def __init__(
        self, answer: httpx2.Response, more: Sequence[Header] = (), ended: Callable[[bool], None] = lambda failed: None
    ) -> None:
        super().__init__(self._pieces(), answer.status_code)
        self.answer, self.ended, self.failed = answer, ended, answer.status_code >= 500
        length = [header for header in answer.headers.raw if header[0].lower() == b"content-length"]
        self.raw_headers = [(name.lower(), value) for name, value in [*_passed(answer.headers.raw), *length, *more]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended(self.failed)
            await self.answer.aclose()

    async def stream_response(self, send: Send) -> None:
        with suppress(httpx2.HTTPError):  # uvicorn closes the connection of an answer without an end
            await super().stream_response(send)

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self.answer.aiter_raw():
                yield piece
        except httpx2.HTTPError as error:
            self.failed = True
            logger.warning("the server broke off its answer to %s (%s)", self.answer.request.url.path, _line(error))
            if not self.answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise
            message = f"the server behind moe-peft pick broke off ({_line(error)})"
            yield b"\n\ndata: " + _error(message, 502).body + b"\n\n"


# --- serving ---------------------------------------------------------------------------------------------------------


class Gatekeeper:
    """
    Reads the gate again when its file changes, or when it is asked to. Requests wait meanwhile; none is lost.

    Args:
        file: the gate's file.
        load: reads the gate.
        find: finds its adapters at the server.
        every: seconds between two looks at the file.
    """

    def __init__(
        self, file: Path, load: Callable[[], Chooser], find: Callable[[Chooser], Engine], every: float = 1
    ) -> None:
        self.file, self.load, self.find, self.every = file, load, find, every
        self.asked = False

    async def watch(self, proxy: Proxy) -> None:
        seen = read = self._stamp()
        while True:
            await asyncio.sleep(self.every)
            before, seen = seen, self._stamp()
            if self.asked or before == seen != read:  # a file that still changes is not read
                self.asked, read = False, seen
                await self._read(proxy)

    async def _read(self, proxy: Proxy) -> None:
        try:
            choose = await asyncio.get_running_loop().run_in_executor(proxy.worker, self.load)
            engine = await asyncio.to_thread(self.find, choose)
        except InputError as error:
            logger.warning("the gate stays as it was: %s", error)
        else:
            proxy.use(choose, engine)
            print(f"read again: picks among {', '.join(engine.names)} and the base", flush=True)

    def _stamp(self) -> tuple[int, int, int] | None:
        with suppress(OSError):
            stat = os.stat(self.file)
            return stat.st_mtime_ns, stat.st_size, stat.st_ino
        return None


def serve(proxy: Proxy, host: str, port: int) -> None:
    """
    Serve until interrupted. SIGHUP reads the gate again.

    Raises:
        ValueError: the port is taken, or the host is not an address of this machine.
    """
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InputError(f"--host {host}, --port {port}: taken, or not an address of this machine") from error
    address, engine = f"[{host}]" if ":" in host else host, proxy.now[1]
    if proxy.gate is not None and hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: setattr(proxy.gate, "asked", True))
    print(f"model {proxy.served!r} at http://{address}:{listening.getsockname()[1]}/v1 (Ctrl-C to stop)")
    print(f"picks among {', '.join(engine.names)} and the base, {engine.base}", flush=True)
    config = uvicorn.Config(
        proxy.app(), log_level="warning", server_header=False, date_header=False, timeout_graceful_shutdown=5
    )
    uvicorn.Server(config).run(sockets=[listening])


# --- errors, in OpenAI's form ----------------------------------------------------------------------------------------


class Gone(Exception):
    """Raised when the client has closed its connection."""


def _error(message: str, status: int, headers: Any = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status, headers=headers
    )


def _line(error: Exception) -> str:
    return one_line(error) or type(error).__name__


async def _no_time(request: Request, error: Exception) -> Response:
    return _error(f"the server behind moe-peft pick does not answer in time ({_line(error)})", 504)


async def _no_answer(request: Request, error: Exception) -> Response:
    return _error(f"the server behind moe-peft pick does not answer ({_line(error)})", 502)


async def _refuse(request: Request, error: Refused) -> Response:
    return _error(str(error), error.status, error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    return _error(f"moe-peft pick failed: {type(error).__name__}: {_line(error)}", 500)  # the log has the traceback


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
