"""
What a GPU is asked to do for an FFN layer, and for a training step: launches, bytes, and the time that they take at
least. Ours beside LoRA's and the base's, without a GPU (see `benchmarks/tracing.py`).

    python -m benchmarks.launches                                       # a layer of Llama 3.1 8B on an H100
    python -m benchmarks.launches --device gpu --bandwidth 1.0 --tflops 165   # a 4090
    python -m benchmarks.launches --methods                             # each way of computing the experts

A cell is "launches; GB moved; time": each operation takes as long as its bytes at the device's bandwidth or, for a
product, its multiplications at the device's rate, whichever is longer, and nothing overlaps. Base and adapters are in
bfloat16 (--float32: adapters in float32, as PEFT creates them).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from moe_peft import MoELoraConfig, pin_dispatch
from moe_peft.adapter import dispatch_choice

from .adapter import FFN
from .tracing import Trace

TASKS = {"decode 1": (1, False), "decode 8": (8, False), "decode 64": (64, False), "prefill 512": (512, False),
         "training 4 × 2048": (8192, True)}  # fmt: skip


class Method(NamedTuple):
    """An adapter on a layer; `mixing` None: LoRA of rank k·r, or the base alone if n is 0."""

    mixing: str | None
    n: int = 8
    k: int = 2
    r: int = 8

    @property
    def label(self) -> str:
        if self.mixing is None:
            return f"LoRA, r = {self.k * self.r}" if self.n else "base"
        return f"{self.mixing} {self.n}/{self.k}/{self.r}"


METHODS = [Method(None, 0), Method(None), *(Method(mixing, n) for n in (8, 64) for mixing in ("output", "projection"))]


def layer(method: Method, hidden: int, intermediate: int, dtype: torch.dtype) -> torch.nn.Module:
    """An FFN with the adapter, without values."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1, num_attention_heads=hidden // 64,
        vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        if not method.n:
            return model.requires_grad_(False).model.layers[0].mlp
        adapter = (
            LoraConfig(r=method.k * method.r, target_modules=FFN)
            if method.mixing is None
            else MoELoraConfig(num_experts=method.n, top_k=method.k, r=method.r, mixing=method.mixing)
        )
        model = get_peft_model(model, adapter)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.data = parameter.data.to(dtype)
        return model.get_base_model().model.layers[0].mlp


def trace(mlp: torch.nn.Module, hidden: int, tokens: int, train: bool) -> Trace:
    x = torch.empty(1, tokens, hidden, device="meta", dtype=torch.bfloat16, requires_grad=train)
    with Trace() as seen, torch.set_grad_enabled(train):
        y = mlp(x)
        if train:
            y.backward(torch.empty_like(y))
    return seen


def cell(seen: Trace, bandwidth: float, rate: float) -> str:
    operations = seen.operations
    seconds = sum(operation.seconds(bandwidth, rate) for operation in operations)
    time = f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
    return f"{len(operations)}; {sum(operation.bytes for operation in operations) / 1e9:.2f}; {time}"


def tables(args: argparse.Namespace) -> Iterator[str]:
    dtype = torch.float32 if args.float32 else torch.bfloat16
    bandwidth, rate = args.bandwidth * 1e12, args.tflops * 1e12
    methods = [
        Method(m, n, r=r) for n, r in ((8, 8), (16, 8), (32, 8), (64, 8), (128, 8)) for m in ("output", "projection")
    ]
    columns = methods if args.methods else METHODS
    yield f"| {args.device}, d = {args.hidden}, f = {args.intermediate} | {' | '.join(m.label for m in columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    pins = ("auto", "dense", "dense-blocks", "blocks", "sorted", "gather") if args.methods else ("auto",)
    for task, (tokens, train) in TASKS.items():
        for pin in pins:
            if pin == "gather" and tokens > 64:
                continue
            cells = []
            for method in columns:
                with pin_dispatch(pin) if pin != "auto" else nullcontext():
                    mlp = layer(method, args.hidden, args.intermediate, dtype)
                    cells.append(cell(trace(mlp, args.hidden, tokens, train), bandwidth, rate))
            yield f"| {task}{'' if not args.methods else f', {pin}'} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(dispatch_choice.DEVICES), default="cuda 9", help="whose choices")
    parser.add_argument("--bandwidth", type=float, default=3.35, help="TB per second")
    parser.add_argument("--tflops", type=float, default=800, help="of products in bfloat16, as they are reached")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--float32", action="store_true", help="adapters in float32")
    parser.add_argument("--methods", action="store_true", help="every method, for the crossovers in `DEVICES`")
    args = parser.parse_args()
    with mock.patch.object(dispatch_choice, "device_kind", lambda device: args.device):
        for line in tables(args):
            print(line, flush=True)


if __name__ == "__main__":
    main()
