"""
What a training step costs on paper: operations and traffic of the base, LoRA and both mixings; checked here.

    python -m benchmarks.cost_model            # the tables at 8B and 70B, by arithmetic alone
    python -m benchmarks.cost_model --check    # predicted and measured ratios on this machine, a minute or two

Legend (per token and layer unless said otherwise): d hidden size, f the FFN's intermediate size, n experts, k active,
r their rank, C = n·r columns, R = k·r the rank of the LoRA that it is compared with, L text length. Operations count a
multiplication and an addition as two. Traffic counts elements that elementwise operations of an FFN read or write;
what products read and write beside them is counted once, as their input or output.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from moe_peft.adapter.dispatch_choice import DEVICES, Crossovers

from .adapter import METHODS, Case, time_ratios


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped model, its experts, and a training batch."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    length: int
    tokens: int
    experts: int = 8
    k: int = 2
    r: int = 8
    checkpointing: bool = True
    device: str = "gpu"  # whose crossovers decide how experts are computed

    @property
    def crossovers(self) -> Crossovers:
        return DEVICES[self.device]

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def base_parameters(self) -> int:
        d, f, kv = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        return self.layers * (2 * d * d + 2 * d * kv + 3 * d * f) + 2 * self.vocab * d

    def model(self) -> PreTrainedModel:
        """The base without weights."""
        config = LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, vocab_size=self.vocab,
        )  # fmt: skip
        with torch.device("meta"):
            return LlamaForCausalLM(config)

    def trained(self, method: str) -> int:
        """Parameters of an adapter on all three projections."""
        rank = {"lora": self.k * self.r, "base": 0}.get(method, self.experts * self.r)
        router = 0 if method in ("lora", "base") else self.experts * self.hidden
        return self.layers * (3 * rank * (self.hidden + self.intermediate) + router)


# --- one layer, one token ---------------------------------------------------------------------------------------------


def base_operations(s: Shape) -> int:
    """Attention with causal scores, and the FFN; forward. A backward to inputs alone has as many."""
    d, f, kv = s.hidden, s.intermediate, s.kv_heads * s.head_dim
    return 2 * (2 * d * d + 2 * d * kv) + 2 * s.length * d + 6 * d * f


def added_operations(s: Shape, method: str) -> int:
    """Low-rank products and the router, forward; a backward has twice as many, for inputs and weights."""
    d, f, n, C, R = s.hidden, s.intermediate, s.experts, s.experts * s.r, s.k * s.r
    dense = s.crossovers.columns >= C
    router = 2 * d * n
    if method == "base":
        return 0
    if method == "lora":
        return 2 * R * 3 * (d + f)
    if method == "projection":  # every product has all columns, or only the chosen experts'
        return router + 2 * (C if dense else R) * 3 * (d + f)
    hidden = s.k * C if s.crossovers.pair_columns >= C else R  # of a token's pairs
    return router + 2 * (3 * (C if dense else R) * d + 3 * hidden * f)


def traffic(s: Shape, method: str) -> tuple[int, int]:
    """Elements that the FFN's elementwise operations move, forward and backward, counted from their code."""
    f, k = s.intermediate, s.k
    narrow = s.experts * s.r <= s.crossovers.columns
    return {
        "base": (8 * f, 12 * f),
        "lora": (20 * f, 22 * f),
        "projection": (12 * f, 16 * f) if narrow else ((16 + 4 * k) * f, (14 + 6 * k) * f),
        "output": ((6 + 13 * k) * f, (5 + 28 * k) * f),
    }[method]


# --- a step -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Operations in matrix products, and elements moved, of all tokens of a step."""

    operations: float
    elements: float

    def seconds(self, rate: float, bandwidth: float) -> float:
        """One after the other, as without fusion: operations per second, elements per second."""
        return self.operations / rate + self.elements / bandwidth


def step(s: Shape, method: str, backward: bool = True) -> Step:
    forward, back = traffic(s, method)
    products = base_operations(s) + added_operations(s, method)
    times = 1
    if backward:
        times = 2 if s.checkpointing else 1
        products = times * products + base_operations(s) + 2 * added_operations(s, method)
    head = 2 * s.hidden * s.vocab * (2 if backward else 0)  # a prefill computes it for the last token only
    per_token = s.layers * products + head
    return Step(s.tokens * per_token, s.tokens * s.layers * (times * forward + (back if backward else 0)))


def sent(s: Shape, method: str, processes: int, fsdp2: bool) -> float:
    """Bytes that a process sends in a step: gradients (an all-reduce), or FSDP2's layers twice and gradients once."""
    ring = (processes - 1) / processes
    layers = 2 * 2 * s.base_parameters * ring if fsdp2 else 0
    return layers + 2 * 4 * s.trained(method) * ring


MODELS = {
    "8B": Shape(4096, 14336, 32, 32, 8, 128256, length=2048, tokens=8192),
    "70B": Shape(8192, 28672, 80, 64, 8, 128256, length=2048, tokens=8192),
}


def tables() -> Iterator[str]:
    yield "Operations and traffic of a training step with gradient checkpointing, as multiples of LoRA of rank k·r:\n"
    yield "| model | n, k, r | method | trained | operations | traffic of the FFNs |\n|---|---|---|---|---|---|"
    for name, shape in MODELS.items():
        for n, k, r in ((8, 2, 8), (8, 2, 16), (64, 2, 8), (8, 4, 8)):
            s = replace(shape, experts=n, k=k, r=r)
            lora = step(s, "lora")
            for method in ("output", "projection"):
                moe = step(s, method)
                yield (
                    f"| {name} | {n}, {k}, {r} | {method} | {s.trained(method) / 1e6:.0f}M "
                    f"| {moe.operations / lora.operations:.3f} | {moe.elements / lora.elements:.2f} |"
                )
    yield "\nBytes that a process sends in a step (n = 8, k = 2, r = 8, 8192 tokens per process):\n"
    yield "| model | processes | sent, LoRA | sent, MoE-LoRA |\n|---|---|---|---|"
    for name, s in MODELS.items():
        for processes, fsdp2 in ((8, False), (8, True), (64, True)):
            cells = [f"{sent(s, method, processes, fsdp2) / 1e9:.2f} GB" for method in ("lora", "output")]
            yield f"| {name} | {processes}, {'FSDP2' if fsdp2 else 'DDP'} | {' | '.join(cells)} |"


# --- against this machine ---------------------------------------------------------------------------------------------


def calibrate(s: Shape, rounds: int = 15) -> tuple[float, float]:
    """Operations per second of the base's products, and elements per second of a sum, at this size."""
    x, w = torch.randn(s.tokens, s.hidden), torch.randn(s.hidden, s.intermediate)
    y = torch.randn(s.tokens, s.intermediate)

    def fastest(job: Callable[[], object]) -> float:
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            job()
            seconds.append(time.perf_counter() - start)
        return sorted(seconds)[rounds // 2]

    rate = 2 * s.tokens * s.hidden * s.intermediate / fastest(lambda: x @ w)
    return rate, 3 * y.numel() / fastest(lambda: y + y)


def check(rounds: int) -> Iterator[str]:
    yield "| hidden | task | method | operations | predicted | measured |\n|---|---|---|---|---|---|"
    for hidden in (256, 768):
        case = Case(hidden)
        config = case.base().config
        s = Shape(
            hidden, config.intermediate_size, case.layers, config.num_attention_heads, config.num_key_value_heads,
            case.vocab, case.length, case.batch * case.length, case.experts, case.k, case.r, checkpointing=False,
            device="cpu",
        )  # fmt: skip
        measured = time_ratios(case, rounds, compiled=False)
        rate, bandwidth = calibrate(s)
        for task, backward in (("training step", True), ("prefill", False)):
            steps = {method: step(s, method, backward) for method in METHODS}
            for method in METHODS[1:]:
                yield (
                    f"| {hidden} | {task} | {method} | {steps[method].operations / steps['lora'].operations:.3f} "
                    f"| {steps[method].seconds(rate, bandwidth) / steps['lora'].seconds(rate, bandwidth):.2f} "
                    f"| {measured[task][method]} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with measurements on this machine")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    for line in check(args.rounds) if args.check else tables():
        print(line, flush=True)


if __name__ == "__main__":
    main()
