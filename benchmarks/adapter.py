"""
MoE-LoRA against plain PEFT LoRA of the same active rank (top_k·r) on the same projections.

    python -m benchmarks.adapter                       # hidden 256 and 768, 8 experts; and 64 experts at hidden 256
    python -m benchmarks.adapter --hidden 256 --experts 8 --rounds 40
    python -m benchmarks.adapter --hidden 256 --compiled     # further rows with torch.compile; minutes of compilation
    python -m benchmarks.adapter --model smollm2       # SmolLM2-135M-Instruct: 30 layers, hidden 576; half an hour

A Llama-shaped model, batch 4×256, fp32 on the CPU or bf16 on CUDA. All methods run interleaved in one process, in an
order that changes every round; a row gives the median of the per-round ratios to LoRA, and their quartiles. With
OMP_NUM_THREADS=1 a CPU's times are the process's own, to which other programs on a busy machine do not add. Rows
"compiled" compare compiled models with compiled LoRA, and compiled LoRA with LoRA as it is. Memory is measured in a
fresh process per method: the peak during training steps less what the process held before them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from examples.demo.smollm2 import smollm2_folder
from moe_peft import MoELoraConfig

from .processes import peak_growth, run_module
from .timing import Ratio, clock, interleave, machine, ratio

DECODED = 16
METHODS = ("lora", "output", "projection", "base")
FFN = ["gate_proj", "up_proj", "down_proj"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


@dataclass(frozen=True)
class Case:
    """A Llama-shaped base, experts on its FFNs, and a batch."""

    hidden: int
    experts: int = 8
    layers: int = 4
    intermediate: int | None = None
    k: int = 2
    r: int = 8
    batch: int = 4
    length: int = 256
    vocab: int = 4096
    quantized: bool = False
    checkpointing: bool = False
    pretrained: bool = False  # SmolLM2-135M-Instruct, whose sizes the others then are

    def base(self) -> torch.nn.Module:
        if self.pretrained:
            return LlamaForCausalLM.from_pretrained(smollm2_folder(), dtype=DTYPE).to(DEVICE)
        head = 64 if self.hidden < 4096 else 128
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate or self.hidden * 8 // 3 // 16 * 16,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // head,
            num_key_value_heads=self.hidden // head,
            vocab_size=self.vocab,
        )
        torch.manual_seed(0)
        with torch.device(DEVICE):
            base = LlamaForCausalLM(config).to(DTYPE)
        if not self.quantized:
            return base
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=DTYPE)
        with tempfile.TemporaryDirectory() as folder:
            base.save_pretrained(folder)
            del base
            return LlamaForCausalLM.from_pretrained(folder, quantization_config=nf4, device_map=DEVICE)

    def model(self, method: str) -> torch.nn.Module:
        base = self.base()
        if self.checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            base.enable_input_require_grads()
        if method == "base":
            # The frozen model with one tiny trainable vector, so that its backward runs as far down as the others'.
            base.requires_grad_(False)
            base.model.embed_tokens.register_forward_hook(_require_grad)
            return base
        rank = self.k * self.r
        if method == "lora":
            adapter: Any = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=FFN)
        else:
            adapter = MoELoraConfig(num_experts=self.experts, top_k=self.k, r=self.r, mixing=method)
        torch.manual_seed(0)
        model = get_peft_model(base, adapter)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        return model

    def ids(self) -> torch.Tensor:
        shape = (self.batch, self.length)
        return torch.randint(self.vocab, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


SMOLLM2 = Case(576, layers=30, intermediate=1536, vocab=49152, pretrained=True)


def _require_grad(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def train_step(model: torch.nn.Module, ids: torch.Tensor) -> float:
    model.train()
    start = clock()
    model(input_ids=ids, labels=ids).loss.backward()
    synchronize()
    seconds = clock() - start
    model.zero_grad(set_to_none=True)
    return seconds


@torch.no_grad()
def prefill(model: torch.nn.Module, ids: torch.Tensor) -> float:
    model.eval()
    start = clock()
    model(input_ids=ids, logits_to_keep=1)
    synchronize()
    return clock() - start


@torch.no_grad()
def decode(model: torch.nn.Module, ids: torch.Tensor) -> float:
    model.eval()
    cache = model(input_ids=ids[:1, :64], use_cache=True).past_key_values
    start = clock()
    for i in range(DECODED):
        cache = model(input_ids=ids[:1, 64 + i : 65 + i], past_key_values=cache, use_cache=True).past_key_values
    synchronize()
    return (clock() - start) / DECODED


TASKS: dict[str, Callable[[torch.nn.Module, torch.Tensor], float]] = {
    "training step": train_step,
    "prefill": prefill,
    "decode": decode,
}


def compile_for(task: str, models: dict[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """The models compiled for a task: static shapes for complete batches; in decoding, the cache grows."""
    torch._dynamo.reset()
    for name, model in models.items():
        yield name, cast(torch.nn.Module, torch.compile(model, dynamic=True if task == "decode" else None))


def time_ratios(
    case: Case, rounds: int, compiled: bool, tasks: Sequence[str] = tuple(TASKS)
) -> dict[str, dict[str, Ratio]]:
    """Per task and method: the time as a multiple of LoRA's in the same round; of compiled LoRA's in compiled rows."""
    models = {method: case.model(method) for method in METHODS}
    ids, ratios = case.ids(), {}
    for task in tasks:
        run = TASKS[task]
        jobs = {method: partial(run, model, ids) for method, model in models.items()}
        if compiled:
            jobs |= {f"{method}, compiled": partial(run, fast, ids) for method, fast in compile_for(task, models)}
        seconds = interleave(jobs, rounds)
        ratios[task] = {method: ratio(seconds[method], seconds["lora"]) for method in METHODS}
        if compiled:
            of = {method: seconds[f"{method}, compiled"] for method in METHODS}
            ratios[f"{task}, compiled"] = {method: ratio(of[method], of["lora"]) for method in METHODS}
            ratios[f"{task}, compiled"]["lora"] = ratio(of["lora"], seconds["lora"])
    return ratios


def memory_growth(case: Case, method: str) -> int:
    """Bytes by which three training steps raise the peak above what the process held before."""
    model, ids = case.model(method), case.ids()

    def train() -> None:
        for _ in range(3):
            train_step(model, ids)

    return peak_growth(train)


def memory_ratios(case: Case) -> dict[str, float]:
    sizes = ("--hidden", case.hidden, "--experts", case.experts, "--layers", case.layers)
    sizes = ("--model", "smollm2") if case.pretrained else sizes
    growth = {method: int(run_module("benchmarks.adapter", "--memory-of", method, *sizes)) for method in METHODS}
    return {method: value / growth["lora"] for method, value in growth.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--experts", type=int, nargs="+", default=[8])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--model", choices=["smollm2"], help="a pretrained model, in place of the sizes above")
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action="store_true", help="also with torch.compile")
    parser.add_argument("--memory-of", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [Case(hidden, experts, args.layers) for hidden in args.hidden for experts in args.experts]
    if args.model:
        cases = [SMOLLM2]
    if args.memory_of:
        print(memory_growth(cases[0], args.memory_of))
        return
    if 256 in args.hidden and not args.model and 64 not in args.experts:
        cases.append(Case(256, 64, args.layers))
    print(
        "| hidden | experts | task | LoRA | MoE output | MoE projection | base alone |\n|---|---|---|---|---|---|---|"
    )
    for case in cases:
        rows = {
            task: [str(row[method]) for method in METHODS]
            for task, row in time_ratios(case, args.rounds, args.compiled, args.tasks).items()
        }
        if "training step" in args.tasks:
            rows["memory growth"] = [f"{growth:.2f}" for growth in memory_ratios(case).values()]
        for task, cells in rows.items():
            print(f"| {case.hidden} | {case.experts} | {task} | {' | '.join(cells)} |", flush=True)
    print(machine())


if __name__ == "__main__":
    main()
