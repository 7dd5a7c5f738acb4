"""A server like vLLM's that answers with what it was asked, and apps that run in threads."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.helpers.waiting import LIMIT


@contextmanager
def running(app: Any) -> Iterator[str]:
    """The address of an app that runs in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))  # clients that come before the app wait for it
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(LIMIT)
        assert not thread.is_alive(), "the server does not stop"


class FakeEngine:
    """
    Args:
        adapters: its models beside `base-model`.
        key: what clients must send.
    """

    def __init__(self, adapters: tuple[str, ...] = ("math", "code", "prose"), key: str | None = None) -> None:
        self.models, self.key = {"base-model": None, **dict.fromkeys(adapters, "base-model")}, key
        self.asked: list[tuple[str, str, bytes, dict[str, str]]] = []  # method, path and query, body, headers
        self.go = threading.Event()  # without it, requests with `wait` are not answered, or only with a first piece
        self.gone = threading.Event()  # a client of such a request has left
        answering = ("chat/completions", "completions", "responses")
        routes = [
            Route("/v1/models", self.list),
            *(Route(f"/v1/{path}", self.answer, methods=["POST"]) for path in answering),
            Route("/{path:path}", self.other, methods=["GET", "POST", "DELETE"]),
        ]
        self.app = Starlette(routes=routes)

    async def _note(self, request: Request) -> bytes:
        body, path = await request.body(), request.scope["raw_path"].decode()
        query = request.scope["query_string"].decode()
        self.asked.append((request.method, f"{path}?{query}" if query else path, body, dict(request.headers)))
        return body

    async def list(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        data = [{"id": name, "object": "model", "parent": parent} for name, parent in self.models.items()]
        return JSONResponse({"object": "list", "data": data})

    async def other(self, request: Request) -> Response:
        body = await self._note(request)
        response = Response(b"<" + body + b">", 202, {"content-type": "text/plain", "x-other": "1"})
        for cookie in ("a=1", "b=2"):
            response.headers.append("set-cookie", cookie)
        return response

    async def answer(self, request: Request) -> Response:
        try:
            body = json.loads(await self._note(request))
            name = body["model"]
        except ClientDisconnect:  # its client left before the body was read
            self.gone.set()
            return Response()
        except (ValueError, KeyError, TypeError, RecursionError):
            return JSONResponse({"error": {"message": "no JSON with a model"}}, 400)
        if name not in self.models:
            return JSONResponse({"error": {"message": f"no model {name}"}}, 404)
        if body.get("stream"):
            return StreamingResponse(self._pieces(name, body), media_type="text/event-stream")
        if body.get("wait"):
            await self._wait(request)
        return JSONResponse({"model": name, "echo": body}, headers={"x-request-id": "7"})

    async def _wait(self, request: Request) -> None:
        while not self.go.is_set():
            if await request.is_disconnected():
                self.gone.set()
                return
            await asyncio.sleep(0.005)

    async def _pieces(self, name: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            yield f'data: {{"model": "{name}", "piece": 0}}\n\n'.encode()
            while body.get("wait") and not self.go.is_set():
                await asyncio.sleep(0.005)
            if body.get("breaks"):
                raise RuntimeError("out of memory")
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.gone.set()
            raise
