"""`moe-peft pick` before llama.cpp's own server, which takes adapters in a request's body."""

from __future__ import annotations

import asyncio
import importlib.util

import httpx2
import pytest

from moe_peft.native import export_gguf
from moe_peft.serving.engines import find_engine, warnings_of_adapters
from moe_peft.serving.pick import HEADER
from moe_peft.serving.picker import ByFunction
from tests.helpers.fake_engine import running
from tests.helpers.llama_cpp import LlamaCpp, letters, save_lora
from tests.helpers.native_case import adapter, dense_model, saved
from tests.helpers.pick_case import proxy_of
from tests.helpers.waiting import LIMIT

for _package in ("xllamacpp", "gguf"):
    if importlib.util.find_spec(_package) is None:
        pytest.skip(f"{_package} is not installed", allow_module_level=True)

NAMES = ("math", "code", "idle")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server with a model and three LoRAs, the last of which changes nothing."""
    folder = tmp_path_factory.mktemp("llama")
    dense = dense_model("llama")
    base = saved(dense, folder / "base")
    letters().save_pretrained(base)
    adapter(dense, folder / "adapter", base)
    file = export_gguf(folder / "adapter", folder / "model.gguf")
    loras = [save_lora(folder / f"{name}.gguf", dense.config, i, float(name != "idle")) for i, name in enumerate(NAMES)]
    running_server = LlamaCpp(file, loras)
    yield running_server.server.listening_address


def test_answers_are_those_of_the_adapter_chosen_also_for_a_prompt_that_another_has_read(server):
    def direct(prompt: str, name: str) -> str:
        scales = [{"id": i, "scale": float(other == name)} for i, other in enumerate(NAMES)]
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "lora": scales, "cache_prompt": False}
        return httpx2.post(f"{server}/v1/completions", json=body, timeout=LIMIT).json()["choices"][0]["text"]

    chosen: list[str | None] = []
    prompts = ["Hello world, " * 4, "Numbers and letters " * 3]
    expected = {(prompt, name): direct(prompt, name) for prompt in prompts for name in ("math", "code", "base")}
    assert len({*expected.values()}) == len(expected)
    proxy = proxy_of(ByFunction(lambda texts: [chosen[-1] for _ in texts], "m:f"), server)
    with running(proxy.app()) as url:
        for name in ("math", "code", "base", "code", "math"):
            for prompt in prompts:
                chosen.append(None if name == "base" else name)
                body = {"model": "auto", "prompt": prompt, "max_tokens": 8, "temperature": 0}
                answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=LIMIT)
                assert answer.headers[HEADER] == name
                assert answer.json()["choices"][0]["text"] == expected[prompt, name], (name, prompt)
        assert httpx2.get(f"{url}/health", timeout=LIMIT).json()["adapters"] == [*NAMES]


def test_an_adapter_that_changes_nothing_is_warned_of(server):
    async def warned() -> list[str]:
        async with httpx2.AsyncClient(trust_env=False) as client:
            return await warnings_of_adapters(client, find_engine(server, NAMES, {}, None, "auto"))

    (warning,) = asyncio.run(warned())
    assert warning.startswith("idle: continues 3 texts exactly as the base")
