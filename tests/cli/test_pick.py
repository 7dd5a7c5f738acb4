"""
`moe-peft pick` before a small server of ours: which model it asks for whom, what passes through, streams, and how it
ends when something is not there. tests/serving/test_pick.py does it with vLLM.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from urllib.parse import unquote

import httpx2
import pytest
import torch

from moe_peft import RequestGate
from moe_peft.cli import main
from moe_peft.cli.pick import PickSettings, parser
from moe_peft.combine.request_gate import RequestChoice
from moe_peft.serving.engines import Engine, find_engine
from moe_peft.serving.pick import HEADER, Proxy
from moe_peft.serving.picker import ByGate
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near
from tests.helpers.fake_engine import FakeEngine, running
from tests.helpers.gate_case import NEUTRAL, TEXTS
from tests.helpers.pick_case import FOR, chat, client_fixture, engine_fixture, gate_fixture, proxied, proxy_of  # noqa: F401
from tests.helpers.waiting import LIMIT, until

# --- whom it asks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOR)
def test_a_request_is_answered_by_its_adapter_or_the_base(client, engine, name):
    body = chat(FOR[name], temperature=0.5, unknown={"ä": [1, None]})
    headers = {"authorization": "Bearer secret", "x-own": "1"}
    answer = client.post("/v1/chat/completions?debug=1", json=body, headers=headers)
    model = {"base": "base-model"}.get(name, name)
    assert (answer.status_code, answer.headers[HEADER], answer.headers["x-request-id"]) == (200, name, "7")
    assert answer.json() == {"model": model, "echo": {**body, "model": model}}
    ((method, path, _, sent),) = engine.asked
    assert (method, path) == ("POST", "/v1/chat/completions?debug=1")
    assert headers.items() <= sent.items()


def test_the_last_user_message_decides(client):
    turns = [
        {"role": "system", "content": FOR["prose"] * 50},
        {"role": "user", "content": FOR["math"]},
        {"role": "assistant", "content": FOR["math"]},
        {"role": "user", "content": [{"type": "text", "text": FOR["code"]}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": FOR["math"]},
    ]
    answer = client.post("/v1/chat/completions", json={"model": "auto", "messages": turns})
    assert answer.headers[HEADER] == "code" and answer.json()["echo"]["messages"] == turns


@pytest.mark.parametrize("content", ["", "  ", None, [{"type": "image_url", "image_url": {"url": "data:"}}]])
def test_without_words_the_base_answers(client, content):
    answer = client.post("/v1/chat/completions", json=chat(content))
    assert (answer.headers[HEADER], answer.json()["model"]) == ("base", "base-model")


@pytest.mark.parametrize("name", FOR)
def test_completions_and_responses_are_picked_for_too(client, name):
    text, other = FOR[name], (TEXTS.get(name) or NEUTRAL)[1]
    bodies = [
        ("completions", {"prompt": text}), ("completions", {"prompt": [text, other]}), ("responses", {"input": text}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": text}]}]}),
    ]  # fmt: skip
    for path, body in bodies:
        assert client.post(f"/v1/{path}", json={"model": "auto", **body}).headers[HEADER] == name


def test_names_of_the_server(gate):
    engine = FakeEngine(("lora-math", "code", "prose"))
    with proxied(gate, engine, names={"math": "lora-math"}) as client:
        answer = client.post("/v1/chat/completions", json=chat(FOR["math"]))
        assert (answer.headers[HEADER], answer.json()["model"]) == ("math", "lora-math")


def test_clients_at_once_get_their_own(client, engine):
    """The engine answers none before all have come."""
    names = [*FOR, *FOR]

    def ask(i: int):
        return client.post("/v1/chat/completions", json=chat(FOR[names[i]], wait=True, number=i))

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ask, i) for i in range(8)]
        until(lambda: len(engine.asked) == 8, lambda: engine.asked)
        engine.go.set()
        for i, answer in enumerate(each.result() for each in waiting):
            assert answer.headers[HEADER] == names[i] and answer.json()["echo"]["number"] == i
    assert client.get("/health").json()["picked"] == dict.fromkeys(FOR, 2)


def test_those_that_wait_are_read_together(gate, engine, monkeypatch):
    """Six come while the first is read."""
    names, sizes, choose, go = [*FOR, *FOR][:7], [], gate.choose, Event()

    def held(texts):
        sizes.append(len(texts))
        until(go.is_set)
        return choose(texts)

    def ask(name: str) -> str:
        return httpx2.post(f"{url}/v1/chat/completions", json=chat(FOR[name]), timeout=LIMIT).headers[HEADER]

    monkeypatch.setattr(gate, "choose", held)
    with running(engine.app) as server:
        proxy = proxy_of(gate, server)
        with running(proxy.app()) as url, ThreadPoolExecutor(7) as pool:
            answers = [pool.submit(ask, names[0])]
            until(lambda: sizes or answers[0].done())
            answers += [pool.submit(ask, name) for name in names[1:]]
            until(lambda: len(proxy.now[0].waiting) == 6, lambda: proxy.now[0].waiting)
            go.set()
            assert [answer.result() for answer in answers] == names
    assert sizes == [1, 6]


def test_names_that_are_no_ascii_are_encoded_in_the_header(gate):
    names = {"math": "数学", "code": "ä ö/v2", "prose": "100 %"}
    renamed = gate.renamed(names)
    with proxied(renamed, FakeEngine((*names.values(),))) as client:
        for name, other in names.items():
            answer = client.post("/v1/chat/completions", json=chat(FOR[name]))
            assert unquote(answer.headers[HEADER]) == other and answer.json()["model"] == other


def test_a_choice_that_fails_is_an_error_in_openais_form(gate, engine, monkeypatch):
    def fail(texts):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gate, "choose", fail)
    with proxied(gate, engine) as client:
        answer = client.post("/v1/chat/completions", json=chat(FOR["math"]))
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 500 and "RuntimeError: out of memory" in error["message"]


# --- what passes through ---------------------------------------------------------------------------------------------


def test_models_that_are_named_are_asked_as_they_are(client, engine):
    for name in ("prose", "base-model", "nobody"):
        content = json.dumps({"messages": [{"content": FOR["math"], "role": "user"}], "model": name}, indent=3)
        answer = client.post("/v1/chat/completions", content=content)
        assert answer.status_code == (404 if name == "nobody" else 200) and HEADER not in answer.headers
        assert engine.asked[-1][2] == content.encode()
    assert answer.json() == {"error": {"message": "no model nobody"}}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"auto"', b"\xff", b"[" * 100_000, b'{"messages": []}'])
def test_the_engine_says_what_is_no_request(client, engine, content):
    answer = client.post("/v1/completions", content=content)
    assert answer.json() == {"error": {"message": "no JSON with a model"}} and engine.asked[-1][2] == content


@pytest.mark.parametrize("asked", ["GET /version", "POST /tokenize?a=1&b=%2F", "DELETE /v1/responses/a%2Fb", "GET /"])
def test_other_routes_pass_through(client, engine, asked):
    method, path = asked.split()
    answer = client.request(method, path, content=b"\x00x" if method == "POST" else None)
    assert (answer.status_code, answer.headers["x-other"]) == (202, "1")
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert answer.content == (b"<\x00x>" if method == "POST" else b"<>") and engine.asked[0][:2] == (method, path)
    assert "accept-encoding" in engine.asked[0][3] and "python-httpx2" in engine.asked[0][3]["user-agent"]


def test_models_are_listed_after_ours(gate):
    engine = FakeEngine(key="secret")
    with proxied(gate, engine) as client:
        listed = client.get("/v1/models", headers={"authorization": "Bearer secret"}).json()
        assert [model["id"] for model in listed["data"]] == ["auto", "base-model", "math", "code", "prose"]
        refused = client.get("/v1/models")
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        assert client.get("/health").json()["server_status"] == "ok"


def test_streams_come_piece_by_piece(client, engine):
    with client.stream("POST", "/v1/chat/completions", json=chat(FOR["code"], stream=True, wait=True)) as answer:
        assert answer.headers[HEADER] == "code" and answer.headers["content-type"].startswith("text/event-stream")
        pieces = answer.iter_raw()
        assert next(pieces) == b'data: {"model": "code", "piece": 0}\n\n'  # while the engine holds the next one back
        assert not engine.go.is_set()
        engine.go.set()
        assert b"".join(pieces) == b"data: [DONE]\n\n"


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_request(gate, engine, stream):
    with proxied(gate, engine) as client:
        address = (client.base_url.host, client.base_url.port)
        content = json.dumps(chat(FOR["math"], wait=True, stream=stream)).encode()
        with socket.create_connection(address, LIMIT) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            if stream:
                assert b"200" in connection.recv(100)
            until(lambda: engine.asked)
        until(engine.gone.is_set)
        assert client.get("/health").status_code == 200  # and others are served


REFUSED = {
    "texts of two adapters": ({"prompt": [FOR["math"], FOR["code"]]}, "prompt: its texts are for code, math; ask"),
    "tokens": ({"prompt": [1, 2, 3]}, "prompt: the choice reads text"),
    "lists of tokens": ({"prompt": [[1], [2]]}, "prompt: the choice reads text"),
    "no prompt": ({}, "prompt: the choice reads text"),
    "messages a number": ({"messages": 7}, "messages: is not a list of messages"),
    "input a number": ({"input": 7}, "input: is not a list of messages"),
    # The conversation is kept by the engine, where another adapter may have begun it.
    "what a tool gave": (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}], "previous_response_id": "r"},
        "input: has no message of the user, who decides; name an adapter",
    ),
    "no messages": ({"messages": None}, "messages: is not a list of messages"),
    "messages of texts": ({"messages": ["x"]}, "messages: is not a list of messages"),
    "content a number": ({"messages": [{"role": "user", "content": 3}]}, "messages: is not a list"),
    "text a number": ({"messages": [{"role": "user", "content": [{"text": 3}]}]}, "messages: is not a list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_picked_for_is_refused_in_openais_form(client, engine, case):
    body, message = REFUSED[case]
    path = "chat/completions" if "messages" in body else "responses" if "input" in body else "completions"
    answer = client.post(f"/v1/{path}", json={"model": "auto", **body})
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 400 and error["type"] == "invalid_request_error"
    assert error["message"].startswith(message) and not engine.asked


def test_half_a_pair_of_surrogates_is_read(client):
    content = json.dumps(chat(FOR["math"] + "\ud800"))
    assert client.post("/v1/chat/completions", content=content).headers[HEADER] == "math"


def test_large_bodies_are_refused(gate, engine):
    with proxied(gate, engine, max_body=1000) as client:
        assert client.post("/v1/chat/completions", json=chat("x" * 800)).status_code == 200
        answer = client.post("/v1/chat/completions", json=chat("x" * 1000))
        assert answer.status_code == 413 and "more than 1000 bytes" in answer.json()["error"]["message"]


def test_an_engine_that_went_away_is_an_error_in_openais_form(gate):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nothing listens to the port, and no other process gets it
        names = {name: name for name in gate.names}
        fields = {name: {"model": name} for name in (*names, "base")}
        found = Engine(f"http://127.0.0.1:{silent.getsockname()[1]}", "base-model", names, fields)
        app = Proxy(ByGate(gate), found, "auto", LIMIT, 1 << 20).app()
        with running(app) as url, httpx2.Client(base_url=url, timeout=LIMIT) as client:
            answers = [client.post("/v1/chat/completions", json=chat(FOR["math"])), client.get("/v1/models")]
            health = client.get("/health")
    for answer in answers:
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == 502 and error["type"] == "server_error"
        assert "the server behind moe-peft pick does not answer" in error["message"]
    assert health.status_code == 503 and "ok" not in health.json()["server_status"]


def test_a_stream_that_breaks_off_ends_with_an_error(client):
    answer = client.post("/v1/chat/completions", json=chat(FOR["math"], stream=True, breaks=True))
    first, last = answer.text.strip().split("\n\n", 1)
    assert first == 'data: {"model": "math", "piece": 0}'
    assert "broke off" in json.loads(last.strip().removeprefix("data: "))["error"]["message"]


def test_an_engine_that_is_silent_is_an_error_too(gate, engine):
    with proxied(gate, engine, timeout=0.2) as client:
        answer = client.post("/v1/chat/completions", json=chat(FOR["math"], wait=True))
        assert answer.status_code == 504 and "in time" in answer.json()["error"]["message"]
    until(lambda: engine.gone.is_set() or not engine.asked)  # unless there was no time to ask


# --- the start -------------------------------------------------------------------------------------------------------


def test_the_engine_must_have_what_the_gate_names(gate):
    engine = FakeEngine(("math", "other"), key="secret")
    with running(engine.app) as server:

        def find(names=None, base=None, served="auto", adapters=("math",), key="secret", url=server):
            return find_engine(url, adapters, names or {}, base, served, key)

        for url in (server, f"{server}/", f"{server}/v1", f"{server}/v1/"):
            found = find(url=url)
            assert (found.url, found.base, found.names) == (server, "base-model", {"math": "math"})
        assert find(base="other").base == "other"
        engine.models["law"] = None  # a server that does not say which are adapters
        with pytest.raises(InputError, match="has base-model, law; name the base"):
            find()
        del engine.models["law"]
        wrong = [
            ({"adapters": gate.names}, "has no code, prose, only base-model, math, other; start it with them"),
            ({"names": {"law": "x"}}, "names='law': must be one of math"),
            ({"names": {"math": "x"}}, "has no x, only"),
            ({"base": "nobody"}, "base_name='nobody': must be one of base-model, math, other"),
            ({"served": "other"}, "has a model of that name; give another"),
            ({"key": None}, "401"),
            ({"url": f"{server}/nowhere"}, "start it first|is not a list of models"),
            ({"url": "nonsense"}, "server='nonsense'"),
            ({"url": "http://127.0.0.1:1"}, "server='http://127.0.0.1:1': .*; start it first"),
        ]
        for options, message in wrong:
            with pytest.raises(InputError, match=message) as error:
                find(**options)
            assert "\n" not in str(error.value)


def test_proxies_of_the_environment_are_not_asked(gate, engine, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with proxied(gate, engine) as client:
        assert client.post("/v1/chat/completions", json=chat(FOR["math"])).headers[HEADER] == "math"
        assert client.get("/health").json()["server_status"] == "ok"


def ends(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as end:
        main(["pick", *map(str, arguments)])
    assert end.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_the_command_ends_with_one_line(gate, tmp_path, capsys):
    start = ["--gate", gate.folder]
    assert "has no request_gate.safetensors" in ends(["--gate", tmp_path], capsys)
    assert "start it first, e.g. vllm serve" in ends([*start, "--server", "http://127.0.0.1:1"], capsys)
    with running(FakeEngine().app) as server, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}: taken" in ends([*start, "--server", server, "--port", port], capsys)
        assert "--host nonsense" in ends([*start, "--server", server, "--host", "nonsense"], capsys)


WITHOUT_TRAINERS = """
import sys
sys.modules.update(dict.fromkeys(["trl", "rich", "matplotlib"]))
from moe_peft.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(gate, tmp_path, sent):
    """It needs no more than the extra `pick`. SIGHUP reads the gate again."""
    with running(FakeEngine().app) as server:
        options = ["--gate", gate.folder, "--server", server, "--port", "0", "--log", str(tmp_path / "log")]
        command = [sys.executable, "-c", WITHOUT_TRAINERS, "pick", *options]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
        )  # fmt: skip
        try:
            line = process.stdout.readline()
            url = line.split()[3]
            assert line.startswith("model 'auto' at http://127.0.0.1:") and url.endswith("/v1")
            assert process.stdout.readline() == "picks among math, code, prose and the base, base-model\n"
            for again in (False, True):
                answer = httpx2.post(f"{url}/chat/completions", json=chat(FOR["prose"]), timeout=LIMIT)
                assert answer.headers[HEADER] == "prose"
                if not again:
                    process.send_signal(signal.SIGHUP)
                    assert process.stdout.readline() == "read again: picks among math, code, prose and the base\n"
            assert httpx2.get(f"{url}/models", headers={"host": "evil.example"}, timeout=LIMIT).status_code == 400
            process.send_signal(sent)
            _, errors = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert process.returncode == 128 + sent and errors.splitlines()[-1] == "stopped" and "Traceback" not in errors
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_a_function_of_the_user_chooses(gate, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_to_choose.py").write_text("def first(texts):\n    return [None for _ in texts]\nnumber = 7\n")
    made = []
    monkeypatch.setattr("moe_peft.serving.pick.serve", lambda proxy, host, port: made.append(proxy))
    with running(FakeEngine().app) as server:
        main(["pick", "--choose", "mine_to_choose:first", "--server", server])
    (proxy,) = made
    assert proxy.now[0].choose(["x"]) == [RequestChoice(None, {})] and [*proxy.now[1].names] == [
        "math",
        "code",
        "prose",
    ]
    wrong = {
        ("--choose", "mine_to_choose"): "must be module:function",
        ("--choose", "mine_to_choose:number"): "has no function 'number'",
        ("--choose", "mine_to_choose:first", "--gate", str(gate.folder)): "--choose: goes without gate",
        (): "name the gate's folder",
        ("--gate", str(gate.folder), "--log-text"): "goes with log",
        ("--gate", str(gate.folder), "--server-kind", "x"): "--server-kind='x'",
    }  # fmt: skip
    for options, message in wrong.items():
        assert message in ends([*options], capsys)


# --- making a gate ---------------------------------------------------------------------------------------------------


def write(path, rows) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


FORMATS: dict[str, Callable[[str], dict]] = {
    "text": lambda text: {"text": text},
    "prompt": lambda text: {"prompt": text, "completion": "an answer"},
    "messages": lambda text: {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": text},
            {"role": "assistant", "content": "an answer"},
        ]
    },
    "prompt of messages": lambda text: {
        "prompt": [{"role": "user", "content": text}], "completion": [{"role": "assistant", "content": "an answer"}],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_fit_makes_the_gate_of_the_requests_in_files(gate, tmp_path, capsys, kind):
    files = [write(tmp_path / f"{name}.jsonl", map(FORMATS[kind], of_name)) for name, of_name in TEXTS.items()]
    (tmp_path / "neutral.txt").write_text("# general\n" + "\n".join(NEUTRAL))
    options = [
        "--base",
        gate.base,
        "--neutral",
        str(tmp_path / "neutral.txt"),
        "--neutral-only",
        "--gate",
        str(tmp_path / "gate"),
    ]
    main(["pick", "--fit", "--data", *files, *options])
    printed = capsys.readouterr().out
    counts = {line.split()[0]: line.split()[1] for line in printed.splitlines() if "%" in line}
    assert counts == {"math": "24", "code": "40", "prose": "16", "base": "30"}
    assert "warning: prose: has 16 different texts" in printed
    made, expected = (
        RequestGate.from_pretrained(tmp_path / "gate"),
        RequestGate.fit(gate.base, TEXTS, NEUTRAL, chat="messages" in kind),
    )
    assert made.reader.chat == expected.reader.chat
    # rows are drawn in another order
    assert_near(made.scores(["x"]), expected.scores(["x"]), dtype=torch.float32)


def test_fit_takes_labels_of_a_column_or_of_flags(gate, tmp_path, capsys):
    rows = [{"text": text, "of": name} for name, of_name in TEXTS.items() for text in of_name]
    file = write(tmp_path / "all.jsonl", rows)

    def fit(*options: str) -> RequestGate:
        shutil.rmtree(tmp_path / "gate", ignore_errors=True)
        main(["pick", "--fit", "--base", gate.base, "--gate", str(tmp_path / "gate"), "--max-examples", "9", "--data",
              *options])  # fmt: skip
        return RequestGate.from_pretrained(tmp_path / "gate")

    made = fit(file, "--label-column", "of")
    assert {name: len(x) for name, x in made.texts.items() if name != "base"} == dict.fromkeys(sorted(TEXTS), 9)
    again = ["--fit", "--base", gate.base, "--gate", tmp_path / "gate", "--data", file, "--label-column", "of"]
    assert "gate': is not empty; choose another" in ends(again, capsys)
    assert fit(file, "--label-column", "of", "--labels", "prose", "code").names == ["prose", "code"]
    made = fit(file, file, "--labels", "a", "b", "--max-length", "7")
    assert (made.names, made.reader.max_length) == (["a", "b"], 7)


def test_every_setting_is_a_flag():
    assert {action.dest for action in parser("pick")._actions} == {*PickSettings.model_fields, "config", "help"}


BAD = {
    "no data": (["--fit", "--base", "b"], "fit=True: give base and data"),
    "no base": (["--fit", "--data", "d.jsonl"], "fit=True: give base and data"),
    "data alone": (["--data", "d.jsonl"], "--data, --neutral: go with fit"),
    "ours left out of nothing": (
        ["--fit", "--base", "{base}", "--data", "{d}", "--neutral-only"], "--neutral-only=True: goes with neutral"
    ),
    "neutral alone": (["--neutral", "n.txt"], "--data, --neutral: go with fit"),
    "labels alone": (["--labels", "a"], "--labels, --label-column: go with data"),
    "files and a column": (
        ["--fit", "--base", "b", "--data", "c", "d", "--label-column", "x"], "give one file with --label-column"
    ),
    "too few labels": (["--fit", "--base", "b", "--data", "c", "d", "--labels", "x"], "2 files; give a name for each"),
    "equal labels": (["--fit", "--base", "b", "--data", "x/a.jsonl", "y/a.jsonl"], "two adapters have the same name"),
    "no such file": (["--fit", "--base", "b", "--data", "nowhere.jsonl"], "nowhere.jsonl': no such file"),
    "no such column": (["--fit", "--base", "{base}", "--data", "{d}", "--label-column", "x"], "--label-column='x'"),
    "no such label": (
        ["--fit", "--base", "{base}", "--data", "{d}", "--label-column", "of", "--labels", "x"],
        "labels='x': must be one of a, b, which --data has",
    ),
    "files in another order": (
        ["--fit", "--base", "{base}", "--data", "{d}", "{silent}", "--labels", "silent", "d"],
        "d.jsonl: give the files in the order of silent, d",
    ),
    "named base": (["--fit", "--base", "{base}", "--data", "{d}", "--labels", "base"], "'base' is the name of"),
    "tokens": (["--fit", "--base", "{base}", "--data", "{ids}"], "needs messages, prompt and completion, or text"),
    "no such base": (["--fit", "--base", "nowhere", "--data", "{d}"], "base='nowhere'"),
    "no neutral": (
        ["--fit", "--base", "{base}", "--data", "{d}", "--neutral", "nowhere"], "neutral='nowhere': no such file"
    ),
    "a neutral file without lines": (
        ["--fit", "--base", "{base}", "--data", "{d}", "--neutral", "{few}"], "has 0 lines; give 1 or more"
    ),
    "no words": (["--fit", "--base", "{base}", "--data", "{silent}"], "'silent' has none with words"),
    "a row without a label": (
        ["--fit", "--base", "{base}", "--data", "{unlabeled}", "--label-column", "of"],
        "row 2: of=None: must be a label",
    ),
    "messages that are none": (["--fit", "--base", "{base}", "--data", "{none}"], "must be a message with role"),
    "port": (["--port", "70000"], "port=70000: must be at most 65535"),
    "names": (["--names", "[1]"], "names=[1]: must be a mapping"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_options_and_data_that_cannot_be(gate, tmp_path, capsys, case):
    places = {
        "base": gate.base,
        "d": write(tmp_path / "d.jsonl", [{"text": "x", "of": "a"}, {"text": "y", "of": "b"}]),
        "ids": write(tmp_path / "ids.jsonl", [{"input_ids": [1, 2]}]),
        "none": write(tmp_path / "none.jsonl", [{"messages": [1]}]),
        "silent": write(tmp_path / "silent.jsonl", [{"prompt": "", "completion": "x"}]),
        "unlabeled": write(tmp_path / "unlabeled.jsonl", [{"text": "x", "of": "a"}, {"text": "y", "of": None}]),
        "few": tmp_path / "few.txt",
    }
    (tmp_path / "few.txt").write_text("# general requests\n\n#\n")
    arguments, message = BAD[case]
    line = ends([*(each.format(**places) for each in arguments), "--gate", str(tmp_path / "gate")], capsys)
    assert message in line and not (tmp_path / "gate").exists()


def test_a_gate_is_tested_on_held_out_requests(gate, tmp_path, capsys):
    rows = [{"text": text, "of": name} for name, text in FOR.items() for _ in range(3)]
    file = Path(write(tmp_path / "rows.jsonl", [*rows, {"text": FOR["code"], "of": "math"}]))
    options = ["pick", "--test", str(file), "--label-column", "of", "--gate", str(gate.folder)]
    main([*options, "--report", str(tmp_path / "report")])
    printed = capsys.readouterr().out
    table = {line.split()[0]: line.split()[1:3] for line in printed.splitlines()[1:5]}
    assert table == {"math": ["4", "75.0%"], "code": ["3", "100.0%"], "prose": ["3", "100.0%"], "base": ["3", "100.0%"]}
    assert "math → code (+" in printed and FOR["code"] in printed
    saved = json.loads((tmp_path / "report" / "gate_report.json").read_text())
    assert saved["picked"]["math"] == {"math": 3, "code": 1} and (tmp_path / "report" / "gate_report.png").is_file()
    write(file, [{"text": "x", "of": "law"}])
    assert "labels='law': must be one of math, code, prose, base" in ends(options[1:], capsys)
