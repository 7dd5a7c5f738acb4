"""A gate, a fake engine, and a proxy between a client and the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from moe_peft import RequestGate
from moe_peft.serving.engines import find_engine
from moe_peft.serving.pick import Proxy
from moe_peft.serving.picker import ByGate
from tests.helpers.fake_engine import FakeEngine, running
from tests.helpers.gate_case import NEUTRAL, TEXTS, save_base
from tests.helpers.waiting import LIMIT

FOR = {**{name: of_name[0] for name, of_name in TEXTS.items()}, "base": NEUTRAL[0]}


@pytest.fixture(name="gate", scope="module")
def gate_fixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pick")
    gate = RequestGate.fit(save_base(folder / "base"), TEXTS, NEUTRAL, chat=True)
    gate.save_pretrained(folder / "gate")
    assert [name or "base" for name in gate.pick([*FOR.values()])] == [*FOR]
    gate.folder = folder / "gate"
    return gate


def proxy_of(gate: Any, server: str, timeout: float = LIMIT, max_body: int = 1 << 20, **options: Any) -> Proxy:
    """A proxy before a server. `options`: of `Proxy`, and of `find_engine`."""
    finding = {"names": {}, "base": None, "key": None, "kind": None}
    finding = {name: options.pop(name, value) for name, value in finding.items()}
    choose = ByGate(gate) if isinstance(gate, RequestGate) else gate
    return Proxy(
        choose, find_engine(server, choose.names, served="auto", **finding), "auto", timeout, max_body, **options
    )


@contextmanager
def proxied(gate: Any, engine: FakeEngine, http: str = "auto", **options: Any) -> Iterator[httpx2.Client]:
    """A client of a proxy before an engine."""
    with running(engine.app) as server:
        app = proxy_of(gate, server, key=engine.key, **options).app()
        with running(app, http) as url, httpx2.Client(base_url=url, timeout=LIMIT, trust_env=False) as client:
            yield client


@pytest.fixture(name="engine")
def engine_fixture():
    engine = FakeEngine()
    yield engine
    engine.go.set()


@pytest.fixture(name="client")
def client_fixture(gate, engine):
    with proxied(gate, engine) as client:
        yield client


def chat(text: Any, **more: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": [{"role": "user", "content": text}], **more}
