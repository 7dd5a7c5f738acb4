"""
`moe-peft pick` before a small server of ours: what clients and servers may do that harms others, kinds of servers, and
what an operator sees. tests/cli/test_pick.py has the requests themselves.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx2
import pytest
from starlette.responses import JSONResponse, Response

from moe_peft import RequestGate
from moe_peft.combine.request_gate import RequestChoice
from moe_peft.combine.request_texts import request_text
from moe_peft.serving import pick, picker
from moe_peft.serving.engines import SERVER_KINDS, Engine, find_engine, warnings_of_adapters
from moe_peft.serving.pick import HEADER, Gatekeeper
from moe_peft.serving.picker import ByFunction, ByGate, Picker
from moe_peft.serving.records import Records
from moe_peft.utils.hosts import trusted_hosts
from moe_peft.utils.messages import InputError
from tests.helpers.fake_engine import FakeEngine, running
from tests.helpers.pick_case import FOR, chat, client_fixture, engine_fixture, gate_fixture, proxied, proxy_of  # noqa: F401
from tests.helpers.waiting import LIMIT, until


class Fixed:
    """Chooses adapters by a text's first word."""

    names = ("math", "code", "prose")

    def __call__(self, requests):
        words = [request_text(request).split()[0] for request in requests]
        return [RequestChoice(word if word in self.names else None, {word: 1.0}) for word in words]


@pytest.fixture(scope="module")
def choose():
    return Fixed()


# --- clients ---------------------------------------------------------------------------------------------------------


def exchange(client, head: bytes, body: bytes = b"") -> tuple[int, bytes, bytes]:
    """Status, headers and content of the answer to raw bytes, without `Connection`."""
    with socket.create_connection((client.base_url.host, client.base_url.port), LIMIT) as connection:
        connection.sendall(head + b"\r\n\r\n" + body)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    headers, _, content = received.partition(b"\r\n\r\n")
    return int(headers.split()[1]), headers, content


LINE = b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close"
RAW = {
    "parent": (LINE % b"/../admin", {400}),
    "parent within": (LINE % b"/v1/../../admin", {400}),
    "encoded parent": (LINE % b"/%2e%2e/admin", {400}),
    "encoded slash": (LINE % b"/v1/..%2fadmin", {400}),
    "backslash": (LINE % b"/..\\admin", {400}),
    "dot": (LINE % b"/./admin", {400}),
    "fragment": (LINE % b"/a#b", {400, 202}),  # httptools takes it off
    "long": (LINE % (b"/" + b"x" * 65_000), {400, 414, 431}),
    "too large": (b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000", {413}),
    "too large, asked for": (
        b"POST /v1/x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 10000000000", {413}
    ),
}  # fmt: skip


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_requests_that_are_refused_reach_no_server(choose, http):
    if http == "httptools":
        pytest.importorskip("httptools")
    engine = FakeEngine()
    with proxied(choose, engine, http) as client:
        for case, (head, statuses) in RAW.items():
            status, headers, content = exchange(client, head)
            assert status in statuses, (case, status)
            assert len(engine.asked) == (status == 202), case
            engine.asked.clear()
            assert b"100 Continue" not in headers
            if status in (413, 414) or "parent" in case:
                assert json.loads(content)["error"]["code"] == status


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_headers_pass_as_bytes_except_those_of_a_connection(choose, http):
    if http == "httptools":
        pytest.importorskip("httptools")
    engine, name = FakeEngine(), "Café".encode()
    with proxied(choose, engine, http) as client:
        sent = b"X-Title: %s\r\nConnection: X-Hop\r\nX-Hop: 1\r\nProxy-Connection: x" % name
        status, headers, _ = exchange(client, LINE % b"/a" + b"\r\n" + sent)
    assert status == 202 and b"x-title: " + name in headers and b"x-hop" not in headers
    received = engine.asked[0][3]
    assert received["x-title"].encode("latin-1") == name and received["via"] == "1.1 moe-peft"
    assert not {"x-hop", "proxy-connection"} & received.keys() and b"via: 1.1 moe-peft" in headers


def test_cookies_are_their_clients_own(choose, engine):
    with proxied(choose, engine) as client:
        assert client.get("/a").headers.get_list("set-cookie") == ["a=1", "b=2"]
        httpx2.get(client.base_url.join("/b"), trust_env=False)
        httpx2.get(client.base_url.join("/c"), trust_env=False, headers={"cookie": "own=1"})
    assert ["cookie" in asked[3] for asked in engine.asked] == [False, False, True]
    assert engine.asked[-1][3]["cookie"] == "own=1"


def test_a_login_of_the_server_is_not_shown_and_replaces_no_clients_own(choose, engine):
    with running(engine.app) as server:
        login = server.replace("//", "//user:pass%40word@")
        with running(proxy_of(choose, f"{login}/v1/").app()) as url, httpx2.Client(base_url=url) as client:
            client.get("/a", headers={"authorization": "Bearer own"})
            client.get("/b")
            shown = client.get("/health").text
    assert [asked[3]["authorization"] for asked in engine.asked] == ["Bearer own", "Basic dXNlcjpwYXNzQHdvcmQ="]
    assert server in shown and "word" not in shown
    for url in (login, "http://user:pass/word@host", "user:password@host", "http://[user:password@host"):
        with pytest.raises(InputError, match="server") as error:
            find_engine(url, ["math"], {}, None, "auto")
        assert "pass" not in str(error.value)


def test_only_names_of_this_machine_reach_a_loopback_address(choose, engine):
    with proxied(choose, engine, hosts=trusted_hosts("127.0.0.1", ["proxy.local"])) as client:
        hosts = ["localhost:8100", "127.0.0.1", "[::1]:1", "proxy.local", "evil.example", "127.0.0.1.evil.example"]
        statuses = [client.get("/health", headers={"host": host}).status_code for host in hosts]
    assert statuses == [200] * 4 + [400] * 2
    assert trusted_hosts("0.0.0.0") == trusted_hosts("192.168.1.7") == trusted_hosts("::") == ["*"]
    assert "[::1]" in trusted_hosts("::1") and "127.0.0.2" in trusted_hosts("127.0.0.2")


LARGE = {
    "prompts": (json.dumps({"model": "auto", "prompt": ["math"] * 257}), 400, "has 257 texts"),
    "values": (json.dumps({"model": "auto", "prompt": [0] * 500_001}), 413, "more than 500000 values"),
    "objects": ('{"model": "auto", "x": [' + "{}," * 500_001 + "{}]}", 413, "more than 500000 values"),
}


@pytest.mark.parametrize("case", LARGE)
def test_requests_that_would_hold_others_are_refused(choose, engine, case):
    content, status, message = LARGE[case]
    with proxied(choose, engine, max_body=1 << 24) as client:
        answer = client.post("/v1/completions", content=content)
    assert answer.status_code == status and message in answer.json()["error"]["message"] and not engine.asked


# --- the order of texts ----------------------------------------------------------------------------------------------


def read_in_order(requests: list[list[str]], leave: list[int] = ()) -> list[list[str]]:
    """The batches in which a picker reads requests that came while it read a first one."""
    batches, began, go = [], Event(), Event()

    def choose(texts):
        batches.append(list(texts))
        began.set()
        until(go.is_set)
        return [RequestChoice(text, {}) for text in texts]

    async def run() -> None:
        with ThreadPoolExecutor(1) as worker:
            one = Picker(choose, worker)
            tasks = [asyncio.create_task(one.pick(["first"]))]
            await asyncio.to_thread(until, began.is_set)
            tasks += [asyncio.create_task(one.pick(texts)) for texts in requests]
            await asyncio.sleep(0)
            for i in leave:
                tasks[i + 1].cancel()
            await asyncio.sleep(0)
            go.set()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        for i, texts in enumerate(requests):
            assert i in leave or [choice.name for choice in answers[i + 1]] == texts

    asyncio.run(run())
    return batches[1:]


def test_texts_are_read_in_batches_of_similar_length_short_requests_between_long_ones():
    many, long, short = [f"{i:0100}" for i in range(100)], ["x" * 8000], ["1+1"]
    batches = read_in_order([many, long, short, ["2+2"], ["y" * 7000]])
    place = {text: i for i, batch in enumerate(batches) for text in batch}
    assert max(map(len, batches)) == 16
    for batch in batches:
        lengths = [max(64, len(text)) for text in batch]
        assert max(lengths) <= 4 * min(lengths)
    assert place["1+1"] <= 1 and place["2+2"] <= 1, "a request of one text waits for a list of many"
    assert place[long[0]] == place["y" * 7000] and place[long[0]] < len(batches) - 1, "a long one waits for all others"
    many_more = read_in_order([["z" * 9000], *([f"{i:0100}"] for i in range(100))])
    assert many_more.index(["z" * 9000]) <= 1, "the oldest waits for all shorter ones"


def test_texts_of_clients_that_left_are_not_read():
    assert read_in_order([["a"] * 20, ["b"], ["c"] * 20], leave=[0, 2]) == [["b"]]


def test_a_client_that_leaves_before_the_choice_frees_its_place(engine):
    began, go = Event(), Event()

    def choose(texts):
        began.set()
        until(go.is_set)
        return [None] * len(texts)

    with running(engine.app) as server:
        proxy = proxy_of(ByFunction(choose, "m:f"), server)
        with running(proxy.app()) as url, ThreadPoolExecutor(1) as pool:
            first = pool.submit(
                httpx2.post, f"{url}/v1/completions", json={"model": "auto", "prompt": "1"}, timeout=LIMIT
            )
            until(began.is_set)
            body = json.dumps({"model": "auto", "prompt": ["2"] * 200}).encode()
            address = (httpx2.URL(url).host, httpx2.URL(url).port)
            with socket.create_connection(address, LIMIT) as connection:
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
                connection.sendall(head + body)
                until(lambda: len(proxy.now[0].waiting) == 200)
            until(lambda: all(each.answer.cancelled() for each in proxy.now[0].waiting))
            go.set()
            assert first.result().status_code == 200


def test_when_too_many_wait_a_request_is_told_to_come_again(choose, engine, monkeypatch):
    monkeypatch.setattr(picker, "MOST_WAITING", 2)
    with proxied(choose, engine) as client:
        answer = client.post("/v1/completions", json={"model": "auto", "prompt": ["math"] * 3})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert client.post("/v1/completions", json={"model": "auto", "prompt": ["math"] * 2}).status_code == 200


# --- the server ------------------------------------------------------------------------------------------------------

LISTINGS = {
    "a page": Response("<html>", media_type="text/html"),
    "no data": JSONResponse({"object": "list"}),
    "data of texts": JSONResponse({"data": ["math"]}),
    "compressed": Response(b"\x28\xb5\x2f\xfd", headers={"content-encoding": "zstd"}),
}


@pytest.mark.parametrize("case", LISTINGS)
def test_a_list_of_models_that_is_none_is_an_error_of_the_server(choose, engine, case):
    with proxied(choose, engine) as client:
        engine.listing = LISTINGS[case]
        answer, health = client.get("/v1/models"), client.get("/health")
        assert client.get("/v1/models/auto").json()["id"] == "auto"
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 502 and "is not a list of models" in error["message"]
    assert health.status_code == 503 and "is not a list of models" in health.json()["server_status"]


def test_an_adapter_that_the_server_loses_is_missed_and_the_base_answers(choose, engine):
    with proxied(choose, engine) as client:
        assert client.get("/health").status_code == 200
        del engine.models["math"]
        answer = client.post("/v1/completions", json={"model": "auto", "prompt": "math 1+1"})
        assert (answer.status_code, answer.headers[HEADER], answer.json()["model"]) == (200, "base", "base-model")
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["server_status"] == "has no math"
        assert client.post("/v1/completions", json={"model": "math", "prompt": "x"}).status_code == 404


def test_health_answers_in_time_for_a_server_that_hangs(choose, monkeypatch):
    monkeypatch.setattr(pick, "HEALTH_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fields = {name: {"model": name} for name in ("math", "base")}
        found = Engine(f"http://127.0.0.1:{silent.getsockname()[1]}", "base-model", {"math": "math"}, fields)
        app = pick.Proxy(choose, found, "auto", LIMIT, 1 << 20).app()
        with running(app) as url:
            health = httpx2.get(f"{url}/health", timeout=LIMIT)
    assert health.status_code == 503 and "does not answer within" in health.json()["server_status"]


def test_an_answer_that_breaks_off_is_one_line_in_the_log(choose, engine, caplog, capfd):
    with proxied(choose, engine) as client, pytest.raises(httpx2.RemoteProtocolError):
        client.get("/breaks")
    (line,) = [record for record in caplog.records if record.name == "moe_peft"]
    assert re.match("the server broke off its answer to /breaks", line.getMessage())
    printed = capfd.readouterr().err  # the engine's own traceback is there
    assert "ConnectionAbortedError" in printed and "RemoteProtocolError" not in printed


# --- kinds of servers ------------------------------------------------------------------------------------------------

BASES = {"ollama": "base-model", "names": "base-model"}  # which do not say what is an adapter


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", SERVER_KINDS)
def test_each_kind_of_server_answers_with_the_adapter_chosen(choose, kind, given):
    engine = FakeEngine(kind=kind)
    with proxied(choose, engine, base=BASES.get(kind), kind=kind if given else None) as client:
        assert client.get("/health").json()["server_status"] == "ok"
        for name, by in {"math": "math", "code": "code", "prose": "prose", "none": "base-model"}.items():
            for path, body in {
                "chat/completions": chat(name), "completions": {"model": "auto", "prompt": name}
            }.items():  # fmt: skip
                answer = client.post(f"/v1/{path}", json={**body, "temperature": 0})
                assert answer.json()["model"] == by and answer.json()["echo"]["temperature"] == 0
                assert answer.headers[HEADER] == name.replace("none", "base")


NAMED = {
    "sglang": {"math": "base-model:math"},
    "llama-server": {"math": "0", "code": "loras/code.gguf"},
    "ollama": {"math": "math:latest"},
}


@pytest.mark.parametrize("kind", NAMED)
def test_a_servers_own_way_of_naming_is_taken_too(choose, kind):
    with proxied(choose, FakeEngine(kind=kind), base=BASES.get(kind), names=NAMED[kind]) as client:
        for name in ("math", "code"):
            assert client.post("/v1/completions", json={"model": "auto", "prompt": name}).json()["model"] == name


def test_a_gateway_may_list_a_pattern_of_names(choose):
    engine = FakeEngine(("team/*",), kind="names")
    with running(engine.app) as server:
        names = {name: f"team/{name}" for name in choose.names}
        found = find_engine(server, choose.names, names, "base-model", "auto")
    assert found.fields["math"] == {"model": "team/math"} and found.fields["base"] == {"model": "base-model"}


def test_an_adapter_with_the_bases_name_is_said_so():
    with running(FakeEngine(("math",)).app) as server:
        for base in (None, "base-model"):
            with pytest.raises(InputError, match=r"base.*--names"):
                find_engine(server, ["base-model", "math"], {}, base, "auto")
        names = {"base-model": "math"}
        assert find_engine(server, ["base-model"], names, None, "auto").fields["base-model"] == {"model": "math"}


# --- while it runs ---------------------------------------------------------------------------------------------------


def test_a_gate_that_changes_is_read_again_and_no_request_is_lost(gate, engine, tmp_path, caplog):
    shutil.copytree(gate.folder, tmp_path / "gate")
    file = tmp_path / "gate" / "request_gate.safetensors"

    def load():
        return ByGate(RequestGate.from_pretrained(tmp_path / "gate"))

    def post(name: str):
        return httpx2.post(f"{url}/v1/completions", json={"model": "auto", "prompt": FOR[name]}, timeout=LIMIT)

    with running(engine.app) as server:
        proxy = proxy_of(gate, server)
        proxy.gate = Gatekeeper(file, load, lambda choose: find_engine(server, choose.names, {}, None, "auto"), 0.01)
        with running(proxy.app()) as url, ThreadPoolExecutor(4) as pool:
            assert post("math").headers[HEADER] == "math"
            gate.without_adapter("math", to_base=True).save_pretrained(tmp_path / "new")
            (tmp_path / "new" / file.name).replace(file)
            answers, before = [], proxy.now
            until(lambda: answers.extend(pool.map(post, [*FOR])) or proxy.now is not before)
            assert {answer.status_code for answer in answers} <= {200}
            assert post("math").headers[HEADER] == "base" and post("code").headers[HEADER] == "code"
            file.write_bytes(b"half")  # stays as it was
            until(lambda: "the gate stays as it was" in caplog.text)
            assert post("code").headers[HEADER] == "code"
            shutil.copy(gate.folder / file.name, file)
            until(lambda: "math" in proxy.now[1].names)


def test_adapters_that_answer_like_the_base_are_warned_of_by_name(choose, engine):
    engine.idle = {"base-model", "code"}

    with running(engine.app) as server:
        found = find_engine(server, choose.names, {}, None, "auto")
        del engine.models["prose"]

        async def warned():
            async with httpx2.AsyncClient(trust_env=False) as client:
                return await warnings_of_adapters(client, found)

        code, prose = asyncio.run(warned())
    assert code.startswith("code: continues 3 texts exactly as the base")
    assert prose.startswith("prose: does not continue a text") and "404" in prose


@pytest.mark.parametrize("with_text", [False, True])
def test_choices_are_logged_and_counted(gate, engine, tmp_path, with_text):
    records = Records(str(tmp_path / "log.jsonl"), with_text)
    with proxied(gate, engine, records=records) as client:
        for name in ("math", "math", "base"):
            client.post("/v1/completions", json={"model": "auto", "prompt": FOR[name]})
        client.post("/v1/chat/completions", json=chat(FOR["code"], stream=True, breaks=True))
        client.post("/v1/completions", json={"model": "math", "prompt": "by name"})
        metrics = client.get("/metrics").text
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["adapter"] for line in lines] == ["math", "math", "base", "code"]
    for line, name in zip(lines, ("math", "math", "base", "code"), strict=True):
        assert {*line["scores"]} == {*FOR} and re.match(r"20\d\d-\d\d-\d\dT[\d:.]+\+00:00", line["time"])
        assert max(line["scores"], key=line["scores"].get) == name
        assert line.get("text") == (FOR[name] if with_text else None)
    for line in (
        'moe_peft_pick_requests_total{adapter="math"} 2.0', 'moe_peft_pick_requests_total{adapter="prose"} 0.0',
        'moe_peft_pick_failures_total{adapter="code"} 1.0', 'moe_peft_pick_failures_total{adapter="math"} 0.0',
        'moe_peft_pick_answer_seconds_count{adapter="base"} 1.0', "moe_peft_pick_choice_seconds_count 4.0",
    ):  # fmt: skip
        assert line in metrics.splitlines()


def test_a_function_chooses_in_place_of_a_gate(engine):
    answers = {"good": ["code"], "base": [None], "unknown": ["law"], "many": ["code", "code"], "text": "code"}
    choose = ByFunction(lambda texts: answers[texts[0]], "m:f")
    expected = {
        "good": (200, "code"), "base": (200, "base-model"), "unknown": (500, "'law' was chosen"),
        "many": (500, "choose='m:f': must return 1 names"), "text": (500, "choose='m:f': must return 1 names"),
    }  # fmt: skip
    with proxied(choose, engine) as client:
        for text, (status, found) in expected.items():
            answer = client.post("/v1/completions", json={"model": "auto", "prompt": text})
            assert answer.status_code == status
            assert found in (answer.json()["model"] if status == 200 else answer.json()["error"]["message"])
        assert client.get("/health").json()["adapters"] == ["math", "code", "prose"]  # all of the server's
