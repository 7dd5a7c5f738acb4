"""
`moe-peft pick` before vLLM: a client of openai's gets through the proxy what vLLM answers to the adapter's own name.
`make test-vllm` runs this file.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model

from moe_peft import RequestGate
from moe_peft.serving.pick import HEADER
from tests.helpers.chat_model import save_chat_model
from tests.helpers.fake_engine import running
from tests.helpers.gate_case import NEUTRAL, TEXTS
from tests.helpers.native_case import dense_model
from tests.helpers.pick_case import proxy_of

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM has an environment of its own", allow_module_level=True)

from openai import BadRequestError, NotFoundError, OpenAI

from benchmarks.pick import vllm_server

SIZE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 320, "num_hidden_layers": 4}
FOR = {"math": TEXTS["math"][0], "code": TEXTS["code"][0], "base": NEUTRAL[0]}
MODELS = {"math": "math", "code": "code", "base": "base-model"}


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    """A client of the proxy, and one of vLLM."""
    root = tmp_path_factory.mktemp("pick")
    base = save_chat_model(root / "base")
    dense_model("llama", **SIZE, rope_parameters={"rope_type": "default", "rope_theta": 1e4}).save_pretrained(base)
    for seed, name in enumerate(("math", "code")):
        model = dense_model("llama", **SIZE)
        torch.manual_seed(seed)
        config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(model, config).save_pretrained(root / name)
    gate = RequestGate.fit(base, {name: TEXTS[name] for name in ("math", "code")}, NEUTRAL, chat=True)
    adapters = {name: root / name for name in gate.names}
    with (
        vllm_server(base, adapters, "--dtype", "float32", "--max-model-len", "64") as server,
        running(proxy_of(gate, server).app()) as url,
    ):
        yield [OpenAI(base_url=f"{each}/v1", api_key="none", max_retries=0) for each in (url, server)]


def asked(text: str, model: str, **options) -> dict:
    chat = [{"role": "user", "content": text}]
    return {"model": model, "messages": chat, "temperature": 0, "max_tokens": 12, "logprobs": True, **options}


def test_the_list_of_models_begins_with_ours(clients):
    proxy, server = ([model.id for model in client.models.list()] for client in clients)
    assert server == ["base-model", "math", "code"] and proxy == ["auto", *server]


def test_answers_are_those_of_the_adapter_that_a_request_is_for(clients):
    proxy, server = clients
    for name, text in FOR.items():
        raw = proxy.chat.completions.with_raw_response.create(**asked(text, "auto"))
        answer, expected = raw.parse(), server.chat.completions.create(**asked(text, MODELS[name]))
        assert raw.headers[HEADER] == name and answer.model == expected.model == MODELS[name]
        assert answer.choices == expected.choices and answer.usage == expected.usage
        # Other models answer otherwise, also by way of the proxy, where they are named.
        for other in {*MODELS.values()} - {MODELS[name]}:
            answers = [client.chat.completions.create(**asked(text, other)).choices for client in clients]
            assert answers[0] == answers[1] != expected.choices


def test_streams_are_those_of_the_adapter(clients):
    """Text and tokens; a busy server puts several tokens into one piece."""
    proxy, server = clients

    def streamed(client, text, model):
        pieces = [*client.chat.completions.create(**asked(text, model, stream=True))]
        choices = [choice for piece in pieces for choice in piece.choices]
        content = "".join(choice.delta.content or "" for choice in choices)
        tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
        return {piece.model for piece in pieces}, content, tokens, choices[-1].finish_reason

    for name, text in FOR.items():
        found = streamed(proxy, text, "auto")
        assert found == streamed(server, text, MODELS[name]) and found[0] == {MODELS[name]}


def test_completions_and_responses(clients):
    proxy, server = clients
    for name, text in FOR.items():
        options = {"prompt": text, "temperature": 0, "max_tokens": 8}
        answer = proxy.completions.create(model="auto", **options)
        assert answer.choices == server.completions.create(model=MODELS[name], **options).choices
        options = {"input": text, "temperature": 0, "max_output_tokens": 8}
        answer = proxy.responses.create(model="auto", **options)
        expected = server.responses.create(model=MODELS[name], **options)
        assert (answer.model, answer.output_text) == (expected.model, expected.output_text)


def test_clients_at_once_get_their_own(clients):
    names = [*FOR] * 4

    def ask(i: int):
        return clients[0].chat.completions.with_raw_response.create(**asked(FOR[names[i]], "auto"))

    with ThreadPoolExecutor(len(names)) as pool:
        answers = [*pool.map(ask, range(len(names)))]
    assert [answer.headers[HEADER] for answer in answers] == names
    assert [answer.parse().model for answer in answers] == [MODELS[name] for name in names]


def test_errors_of_the_server_and_of_the_proxy_are_the_clients_own(clients):
    proxy, _ = clients
    with pytest.raises(NotFoundError, match="nobody"):
        proxy.chat.completions.create(**asked("x", "nobody"))
    with pytest.raises(BadRequestError, match="tokens"):
        proxy.chat.completions.create(**asked(FOR["math"] * 20, "auto"))
    with pytest.raises(BadRequestError, match="its texts are for code, math"):
        proxy.completions.create(model="auto", prompt=[FOR["math"], FOR["code"]])
