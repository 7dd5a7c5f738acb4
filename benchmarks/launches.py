"""
What a GPU is asked to do for an FFN layer, and for a training step: launches, bytes, and the time that they take at
least. Ours beside LoRA's and the base's, without a GPU (see `benchmarks/tracing.py`).

    python -m benchmarks.launches                                       # a layer of Llama 3.1 8B on an H100
    python -m benchmarks.launches --device gpu --bandwidth 1.0 --tflops 165   # a 4090
    python -m benchmarks.launches --methods                             # each way of computing the experts
    python -m benchmarks.launches --saved                               # what a layer keeps for the backward pass
    python -m benchmarks.launches --step                                # a training step of 32 layers, with the trainer

A cell is "launches; GB moved; time": each operation takes as long as its bytes at the device's bandwidth or, for a
product, its multiplications at the device's rate, whichever is longer, and nothing overlaps. Base and adapters are in
bfloat16 (--float32: adapters in float32, as PEFT creates them). `--saved` counts the bytes of what autograd keeps of a
layer, its input included and its weights not, and also for a plain mixture: a loop over experts, each an FFN with its
LoRAs on its share of the tokens. `--step` counts what a trainer's step, forward, losses
and backward, asks of a CPU for a tiny model of as many layers as an 8B one: launches, and reads of values, for which a
GPU is waited.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer, pin_dispatch
from moe_peft.adapter import dispatch_choice
from moe_peft.routing import routers
from tests.helpers.words import word_tokenizer

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


class PlainMixture(torch.nn.Module):
    """A mixture of LoRAs as a loop over experts, each of which gets as many tokens as any other."""

    def __init__(self, mlp: torch.nn.Module, n: int, k: int, r: int) -> None:
        super().__init__()
        self.mlp, self.n, self.k = mlp, n, k
        linears = [getattr(mlp, name) for name in FFN]
        make = partial(torch.empty, device="meta", dtype=torch.bfloat16, requires_grad=True)
        self.A = [[make(r, linear.in_features) for linear in linears] for _ in range(n)]
        self.B = [[make(linear.out_features, r) for linear in linears] for _ in range(n)]
        self.router = make(n, linears[0].in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TD = x.flatten(0, 1)
        gates_TK = F.linear(x_TD.float(), self.router.float()).topk(self.k).values.softmax(-1).to(x.dtype)
        rows = torch.arange(len(x_TD) * self.k // self.n, device="meta")  # of the tokens that an expert gets
        y_TD = torch.zeros_like(x_TD)
        for A, B in zip(self.A, self.B, strict=True):
            x_E, gate_E1 = x_TD[rows], gates_TK[rows, :1]
            gate, up, down = (partial(self.product, *of) for of in zip(FFN, A, B, strict=True))
            y_TD = y_TD.index_add(0, rows, gate_E1 * down(F.silu(gate(x_E)) * up(x_E)))
        return y_TD.view_as(x)

    def product(self, name: str, A: torch.Tensor, B: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return getattr(self.mlp, name)(x) + F.linear(F.linear(x, A), B) * 2.0


def saved(mlp: torch.nn.Module, hidden: int, tokens: int) -> float:
    """Bytes a token that autograd keeps of a layer in training."""
    own = {parameter.untyped_storage()._cdata for parameter in mlp.parameters()}
    kept: dict[int, torch.Tensor] = {}  # by storage; held, so that no other takes its place

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    x = torch.empty(1, tokens, hidden, device="meta", dtype=torch.bfloat16, requires_grad=True)
    # A router that sees others' hooks leaves its input's float32 copy to them.
    no_hooks = mock.patch.object(routers, "_top_saved_tensors_hooks", lambda _: None)
    with no_hooks, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mlp(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / tokens


def saved_table(hidden: int, intermediate: int) -> Iterator[str]:
    yield f"| d = {hidden}, f = {intermediate} | bytes a token | of LoRA's |\n|---|---|---|"
    make = partial(layer, hidden=hidden, intermediate=intermediate, dtype=torch.bfloat16)
    layers = {method.label: make(method) for method in (*METHODS, Method("output", k=4), Method("projection", k=4))}
    layers["plain mixture 8/2/8"] = PlainMixture(make(METHODS[0]), 8, 2, 8)
    sizes = {label: saved(mlp, hidden, 8192) for label, mlp in layers.items()}
    for label, size in sizes.items():
        yield f"| {label} | {size:,.0f} | {size / sizes[METHODS[1].label]:.2f} |"


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


def steps() -> Iterator[str]:
    """Launches and waits of a training step with the trainers, plain LoRA's and ours."""
    rows = Dataset.from_list([{"input_ids": [*range(3, 35)], "labels": [*range(3, 35)]}] * 8)
    yield "| a training step of 32 layers | launches | waits |\n|---|---|---|"
    for method in (Method(None), Method("output"), Method("projection")):
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=32, num_attention_heads=4, vocab_size=128
        )
        model = LlamaForCausalLM(config)
        adapter, trainer_class, config_class = LoraConfig(r=16, target_modules=FFN), SFTTrainer, SFTConfig
        if method.mixing is not None:
            adapter, trainer_class, config_class = MoELoraConfig(mixing=method.mixing), MoESFTTrainer, MoESFTConfig
        with tempfile.TemporaryDirectory() as folder:
            args = config_class(
                folder, max_steps=2, gradient_checkpointing=False, use_cpu=True, bf16=False, report_to="none",
                save_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            trainer = trainer_class(
                get_peft_model(model, adapter), args, train_dataset=rows, processing_class=word_tokenizer(128)
            )
            trainer.train()  # what is done once
            batch = next(iter(trainer.get_train_dataloader()))
            with Trace("cpu") as seen:
                trainer.training_step(trainer.model, batch)
        yield f"| {method.label} | {len(seen.operations)} | {len(seen.waits)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(dispatch_choice.DEVICES), default="cuda 9", help="whose choices")
    parser.add_argument("--bandwidth", type=float, default=3.35, help="TB per second")
    parser.add_argument("--tflops", type=float, default=800, help="of products in bfloat16, as they are reached")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--float32", action="store_true", help="adapters in float32")
    parser.add_argument("--methods", action="store_true", help="every method, for the crossovers in `DEVICES`")
    parser.add_argument("--saved", action="store_true", help="bytes that a layer keeps for the backward pass")
    parser.add_argument("--step", action="store_true", help="a training step with the trainers, on the CPU")
    args = parser.parse_args()
    if args.step:
        print("\n".join(steps()))
        return
    with mock.patch.object(dispatch_choice, "device_kind", lambda device: args.device):
        for line in saved_table(args.hidden, args.intermediate) if args.saved else tables(args):
            print(line, flush=True)


if __name__ == "__main__":
    main()
