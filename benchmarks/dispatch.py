"""
Which way of computing the experts wins where: the crossovers behind `moe_peft.adapter.dispatch_choice.choose_method`.

    python -m benchmarks.dispatch

One FFN layer (hidden 256, or --hidden), fp32 on the CPU or bf16 on CUDA. Per number of tokens, experts and mixing the
median times of all methods, interleaved, as multiples of the fastest; "auto" is what the library chooses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from moe_peft import MoELoraConfig, pin_dispatch
from moe_peft.adapter import dispatch_choice

from .adapter import DEVICE, DTYPE
from .timing import interleave

METHODS = ("dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted", "auto")
R = 8


def build(hidden: int, experts: int, r: int, k: int, mixing: str, intermediate: int | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate or hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
    )
    adapter = MoELoraConfig(num_experts=experts, r=r, top_k=k, mixing=mixing, init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config).to(DEVICE, DTYPE), adapter)
    return model.get_base_model().model.layers[0].mlp


def seconds(layer: torch.nn.Module, x: torch.Tensor, method: str, train: bool) -> float:
    with pin_dispatch(method), torch.set_grad_enabled(train):
        start = time.perf_counter()
        y = layer(x)
        if train:
            y.backward(y.detach())
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def measure(layer: torch.nn.Module, hidden: int, tokens: int, train: bool, rounds: int) -> dict[str, float]:
    """Method → its median seconds, interleaved; those alone that torch has a kernel for, and copies for few tokens."""
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=DTYPE, requires_grad=train)
    grouped = DEVICE == "cpu" or DTYPE in dispatch_choice.DEVICES[dispatch_choice.device_kind(x.device)].grouped
    left_out = {"gather"} if tokens > 64 else set()
    methods = [m for m in METHODS if m not in left_out and (grouped or not m.endswith("sorted"))]
    jobs = {m: partial(seconds, layer, x, m, train) for m in methods}
    return {m: statistics.median(t) for m, t in interleave(jobs, rounds).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print("| mixing | mode | experts | tokens | " + " | ".join(METHODS) + " |\n" + "|---" * (4 + len(METHODS)) + "|")
    for mixing in ("output", "projection"):
        for experts in args.experts:
            layer = build(args.hidden, experts, R, 2, mixing)
            for train in (False, True):
                for tokens in args.tokens:
                    medians = measure(layer, args.hidden, tokens, train, args.rounds)
                    best = min(medians.values())
                    cells = [f"{medians[m] / best:.2f}" if m in medians else "–" for m in METHODS]
                    mode = "training" if train else "inference"
                    print(f"| {mixing} | {mode} | {experts} | {tokens} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
