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
def running(app: Any, http: Any = "auto") -> Iterator[str]:
    """The address of an app that runs in a thread. `http`: uvicorn's parser."""
    listening = socket.create_server(("127.0.0.1", 0))  # clients that come before the app wait for it
    server = uvicorn.Server(uvicorn.Config(app, http=http, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(LIMIT)
        assert not thread.is_alive(), "the server does not stop"


OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama-server": "llamacpp", "ollama": "library", "names": "openai"}


class FakeEngine:
    """
    Args:
        adapters: its adapters beside `base-model`.
        key: what clients must send.
        kind: the server that it is like: how it lists its models, and how a request names an adapter.
    """

    def __init__(
        self, adapters: tuple[str, ...] = ("math", "code", "prose"), key: str | None = None, kind: str = "vllm"
    ) -> None:
        self.models, self.key, self.kind = {"base-model": None, **dict.fromkeys(adapters, "base-model")}, key, kind
        self.asked: list[tuple[str, str, bytes, dict[str, str]]] = []  # method, path and query, body, headers
        self.go = threading.Event()  # without it, requests with `wait` are not answered, or only with a first piece
        self.gone = threading.Event()  # a client of such a request has left
        self.listing: Response | None = None  # instead of the list of models
        self.idle: set[str] = set()  # adapters that answer as the base does
        answering = ("chat/completions", "completions", "responses")
        routes = [
            Route("/v1/models", self.list),
            Route("/lora-adapters", self.loras),
            *(Route(f"/v1/{path}", self.answer, methods=["POST"]) for path in answering),
            Route("/{path:path}", self.other, methods=["GET", "POST", "DELETE"]),
        ]
        self.app = Starlette(routes=routes)

    async def _note(self, request: Request) -> bytes:
        body, path = await request.body(), request.scope["raw_path"].decode()
        query = request.scope["query_string"].decode()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers.raw}
        self.asked.append((request.method, f"{path}?{query}" if query else path, body, headers))
        return body

    async def list(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if self.listing is not None:
            return self.listing
        of_kind = {"vllm": self.models, "sglang": self.models, "llama-server": {"base-model": None}}
        parents = of_kind.get(self.kind, dict.fromkeys(self.models))  # others say nothing of parents
        tag = ":latest" if self.kind == "ollama" else ""
        data = [
            {"id": f"{name}{tag}", "object": "model", "owned_by": OWNERS[self.kind], "parent": parent}
            for name, parent in parents.items()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def loras(self, request: Request) -> Response:
        if self.kind != "llama-server":
            return Response(status_code=404)
        names = [*self.models][1:]
        return JSONResponse([{"id": i, "path": f"loras/{name}.gguf", "scale": 0.0} for i, name in enumerate(names)])

    def _answering(self, body: dict[str, Any]) -> str | None:
        """The adapter or base that a request is for; None: there is no such model."""
        model = str(body["model"])
        if self.kind == "sglang":  # takes any model for the base
            return model.partition(":")[2] or "base-model"
        if self.kind == "llama-server":  # applies all adapters, unless it is told which
            scales = {lora["id"]: lora["scale"] for lora in body.get("lora", [])}
            applied = [name for i, name in enumerate([*self.models][1:]) if scales.get(i, 0.0 if scales else 1.0)]
            return "+".join(applied) or "base-model"
        if self.kind == "ollama":
            model = model.removesuffix(":latest")
        return model if model in self.models else None

    async def other(self, request: Request) -> Response:
        body = await self._note(request)
        if request.url.path == "/breaks":
            return StreamingResponse(self._breaks(), headers={"content-length": "100"})
        response = Response(b"<" + body + b">", 202, {"content-type": "text/plain", "x-other": "1"})
        for cookie in ("a=1", "b=2"):
            response.headers.append("set-cookie", cookie)
        response.raw_headers += [
            (b"x-title", "Café".encode()), (b"connection", b"x-hop"), (b"x-hop", b"1"),
        ]  # fmt: skip
        return response

    async def _breaks(self) -> AsyncIterator[bytes]:
        yield b"half"
        raise ConnectionAbortedError

    async def answer(self, request: Request) -> Response:
        try:
            body = json.loads(await self._note(request))
            name = self._answering(body)
        except ClientDisconnect:  # its client left before the body was read
            self.gone.set()
            return Response()
        except (ValueError, KeyError, TypeError, RecursionError):
            return JSONResponse({"error": {"message": "no JSON with a model"}}, 400)
        if name is None:
            return JSONResponse({"error": {"message": f"no model {body['model']}"}}, 404)
        if body.get("stream"):
            return StreamingResponse(self._pieces(name, body), media_type="text/event-stream")
        if body.get("wait"):
            await self._wait(request)
        text = {} if "prompt" not in body else {"choices": [{"text": "base" if name in self.idle else name[:4]}]}
        return JSONResponse({"model": name, "echo": body, **text}, headers={"x-request-id": "7"})

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
