"""
MoE-LoRA against plain PEFT LoRA of the same active rank (top_k·r) on the same projections.

    python -m benchmarks.adapter                       # hidden 256 and 768, 8 experts; and 64 experts at hidden 256
    python -m benchmarks.adapter --hidden 256 --experts 8 --rounds 40

A Llama-shaped model, batch 4×256, fp32 on the CPU or bf16 on CUDA. All methods run interleaved in one process, in an
order that changes every round; a row gives the median of the per-round ratios to LoRA. Memory is measured in a fresh
process per method: the peak during training steps less what the process held before them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from moe_peft import MoELoraConfig

from .processes import peak_growth, run_module
from .timing import interleave, median_ratio

BATCH, LENGTH, K, R, DECODED = 4, 256, 2, 8, 16
METHODS = ("lora", "output", "projection", "base")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def build(method: str, hidden: int, experts: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=4096,
    )
    base = LlamaForCausalLM(config).to(DEVICE, DTYPE)
    if method == "base":
        # The frozen model with one tiny trainable vector, so that its backward runs as far down as the others'.
        base.requires_grad_(False)
        base.model.embed_tokens.register_forward_hook(_require_grad)
        return base
    if method == "lora":
        adapter = LoraConfig(r=K * R, lora_alpha=2 * K * R, target_modules=["gate_proj", "up_proj", "down_proj"])
    else:
        adapter = MoELoraConfig(num_experts=experts, top_k=K, r=R, mixing=method)
    model = get_peft_model(base, adapter)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def _require_grad(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def train_step(model: torch.nn.Module, ids: torch.Tensor) -> float:
    model.train()
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    synchronize()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


@torch.no_grad()
def prefill(model: torch.nn.Module, ids: torch.Tensor) -> float:
    model.eval()
    start = time.perf_counter()
    model(input_ids=ids, logits_to_keep=1)
    synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def decode(model: torch.nn.Module, ids: torch.Tensor) -> float:
    model.eval()
    cache = model(input_ids=ids[:1, :64], use_cache=True).past_key_values
    start = time.perf_counter()
    for i in range(DECODED):
        cache = model(input_ids=ids[:1, 64 + i : 65 + i], past_key_values=cache, use_cache=True).past_key_values
    synchronize()
    return (time.perf_counter() - start) / DECODED


TASKS: dict[str, Callable[[torch.nn.Module, torch.Tensor], float]] = {
    "training step": train_step,
    "prefill": prefill,
    "decode": decode,
}


def token_ids() -> torch.Tensor:
    return torch.randint(4096, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def time_ratios(hidden: int, experts: int, layers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Per task and method: the median over rounds of the time, as a multiple of LoRA's in the same round."""
    models = {method: build(method, hidden, experts, layers) for method in METHODS}
    ids = token_ids()
    ratios = {}
    for task, run in TASKS.items():
        seconds = interleave({method: partial(run, model, ids) for method, model in models.items()}, rounds)
        ratios[task] = {method: median_ratio(times, seconds["lora"]) for method, times in seconds.items()}
    return ratios


def memory_growth(method: str, hidden: int, experts: int, layers: int) -> int:
    """Bytes by which three training steps raise the peak above what the process held before."""
    model, ids = build(method, hidden, experts, layers), token_ids()

    def train() -> None:
        for _ in range(3):
            train_step(model, ids)

    if DEVICE == "cpu":
        return peak_growth(train)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train()
    return torch.cuda.max_memory_allocated() - before


def memory_ratios(hidden: int, experts: int, layers: int) -> dict[str, float]:
    sizes = ("--hidden", hidden, "--experts", experts, "--layers", layers)
    growth = {method: int(run_module("benchmarks.adapter", "--memory-of", method, *sizes)) for method in METHODS}
    return {method: value / growth["lora"] for method, value in growth.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--experts", type=int, nargs="+", default=[8])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory-of", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(memory_growth(args.memory_of, args.hidden[0], args.experts[0], args.layers))
        return
    cases = [(h, n) for h in args.hidden for n in args.experts]
    if 256 in args.hidden and 64 not in args.experts:
        cases.append((256, 64))
    print("| hidden | experts | task | MoE output | MoE projection | base alone |\n|---|---|---|---|---|---|")
    for hidden, experts in cases:
        ratios = time_ratios(hidden, experts, args.layers, args.rounds)
        ratios["memory growth"] = memory_ratios(hidden, experts, args.layers)
        for task, row in ratios.items():
            cells = " | ".join(f"{row[method]:.2f}" for method in METHODS[1:])
            print(f"| {hidden} | {experts} | {task} | {cells} |", flush=True)
    print(json.dumps({"device": DEVICE, "torch": torch.__version__, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
