"""
What costs as work grows: experts, tokens, adapters that are mixed, and files.

    python -m benchmarks.growth    # twenty minutes of a core; writes benchmarks/results/growth.md

CPU seconds of this process with one thread, medians of interleaved rounds; float32, random weights, hidden size 256.
A table's last column says how much more the largest costs than the smallest, and how much more work it is: what has a
larger first number grows faster than the work. Layers: forward and backward of an FFN with experts of rank 8, 2 active.
Mixing: `lora_to_moe`, ridge gates and the gate for requests, of 16 texts for each LoRA; and the answers to 4 held-out
rows of each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from moe_peft import MoELoraConfig, RequestGate, init_gates, lora_to_moe
from moe_peft.combine.held_out import HeldOutRows, score
from moe_peft.models.gates import uniform_gates
from tests.helpers.words import word_tokenizer

from .dispatch import build
from .timing import clock, interleave

HIDDEN, FFN = 256, ["gate_proj", "up_proj", "down_proj"]
EXPERTS, TOKENS, ADAPTERS = (8, 16, 32, 64, 128, 256), (256, 1024, 4096, 8192), (4, 8, 16, 32, 64)


def table(title: str, sizes: Sequence[int], rows: Mapping[str, Sequence[float]], unit: float = 1e3) -> list[str]:
    """Milliseconds (or other units of a second) by size, and the growth from the first to the last."""
    lines = [f"| {title} | {' | '.join(map(str, sizes))} | growth, of work |", f"|{'---|' * (2 + len(sizes))}"]
    for name, values in rows.items():
        growth = f"{values[-1] / values[0]:.1f}, {sizes[-1] / sizes[0]:.0f}"
        lines.append(f"| {name} | {' | '.join(f'{unit * value:.3g}' for value in values)} | {growth} |")
    return [*lines, ""]


def step(layer: torch.nn.Module, x_TD: torch.Tensor, train: bool) -> float:
    start = clock()
    with torch.set_grad_enabled(train):
        y_TD = layer(x_TD)
        if train:
            y_TD.backward(y_TD.detach())
    return clock() - start


def medians(jobs: dict[Any, Callable[[], float]], rounds: int) -> list[float]:
    return [statistics.median(times) for times in interleave(jobs, rounds, warmup=1).values()]


def layers(sizes: Sequence[int], tokens: Sequence[int], rounds: int) -> list[str]:
    """By experts with 1,024 tokens, and by tokens with 8 experts."""
    lines: list[str] = []
    for title, shapes in (
        ("experts, 1,024 tokens: ms", [(n, 1024) for n in sizes]), ("tokens, 8 experts: ms", [(8, t) for t in tokens]),
    ):  # fmt: skip
        rows = {}
        for mixing in ("output", "projection"):
            built = {n: build(HIDDEN, n, 8, 2, mixing) for n, _ in shapes}
            for train in (True, False):
                jobs: dict[Any, Callable[[], float]] = {
                    (n, t): partial(step, built[n], torch.randn(t, HIDDEN, requires_grad=train), train)
                    for n, t in shapes
                }
                rows[f"{mixing}, {'training' if train else 'inference'}"] = medians(jobs, rounds)
        lines += table(title, sizes if shapes[0][1] == 1024 else tokens, rows)
    return lines


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, vocab_size=2048
        )
    ).eval()


def timed(call: Callable[..., Any], *args: Any, **more: Any) -> tuple[Any, float]:
    start = clock()
    return call(*args, **more), clock() - start


def files(sizes: Sequence[int], rounds: int, folder: Path) -> list[str]:
    """Saving and loading a mixture."""
    base().save_pretrained(folder / "base")

    def save(n: int) -> float:
        return timed(models[n].save_pretrained, str(folder / str(n)))[1]

    def load(n: int) -> float:
        return timed(AutoPeftModelForCausalLM.from_pretrained, folder / str(n))[1]

    models = {}
    for n in sizes:
        model = LlamaForCausalLM.from_pretrained(folder / "base")
        models[n] = get_peft_model(model, MoELoraConfig(num_experts=n, r=8, top_k=2, task_type="CAUSAL_LM"))
    rows = {
        name: medians({n: partial(job, n) for n in sizes}, rounds) for name, job in (("save", save), ("load", load))
    }
    return table("experts in 4 layers: ms", sizes, rows)


def mixing(sizes: Sequence[int], folder: Path) -> list[str]:
    """What `moe-peft mix` does, part by part."""
    tokenizer = word_tokenizer(512)
    words = [word for word in tokenizer.get_vocab() if word.startswith("w")]

    def texts(count: int, seed: int) -> list[str]:
        drawn = torch.randint(len(words), (count, 12), generator=torch.Generator().manual_seed(seed)).tolist()
        return [" ".join(words[i] for i in row) for row in drawn]

    model = get_peft_model(base(), LoraConfig(r=8, target_modules=FFN, init_lora_weights=False))
    model.save_pretrained(str(folder / "lora"))
    lora_to_moe(base(), [folder / "lora"] * 2)  # what is imported at the first call
    rows: dict[str, list[float]] = {}
    for n in sizes:
        requests = {str(i): texts(16, i) for i in range(n)}
        held_out = [text for i in range(n) for text in texts(4, n + i)]
        batches = [
            {**tokenizer(of[at : at + 8], return_tensors="pt", padding=True), "expert": torch.full((8,), i)}
            for i, of in enumerate(requests.values())
            for at in (0, 8)
        ]
        ids = [tokenizer(text)["input_ids"] for text in held_out]
        data = Dataset.from_dict({"input_ids": ids, "labels": [[-100] * 6 + row[6:] for row in ids]})
        parts = HeldOutRows(data, {str(i): range(4 * i, 4 * i + 4) for i in range(n)}, partial(padded, tokenizer), 8)
        seconds = {}
        mixed, seconds["lora_to_moe"] = timed(lora_to_moe, base(), [folder / "lora"] * n, top_k=1)
        _, seconds["ridge gates"] = timed(init_gates, mixed, "ridge", batches)
        gate, seconds["the gate for requests"] = timed(RequestGate.fit, mixed, requests, tokenizer=tokenizer)
        _, seconds["picking"] = timed(gate.pick, held_out)
        mixed.eval()
        own = [i // 4 for i in range(4 * n)]
        _, seconds["answers of the mixture"] = timed(score, mixed, parts)
        _, seconds["answers, each row its own"] = timed(score, mixed, parts, experts=own)
        with uniform_gates(mixed, "projection"):
            _, seconds["answers of the mean"] = timed(score, mixed, parts)
        for name, value in seconds.items():
            rows.setdefault(name, []).append(value)
    return table("LoRAs that are mixed: s", sizes, rows, 1.0)


def padded(tokenizer: Any, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    batch = tokenizer.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt")
    labels = torch.full_like(batch["input_ids"], -100)
    for i, row in enumerate(rows):
        labels[i, : len(row["labels"])] = torch.tensor(row["labels"])
    return {**batch, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="the smallest sizes, to test the script")
    args = parser.parse_args()
    torch.set_num_threads(1)
    experts, tokens, adapters = ([*sizes[: 2 if args.small else None]] for sizes in (EXPERTS, TOKENS, ADAPTERS))
    lines = ["`python -m benchmarks.growth`: CPU seconds of one core, hidden size 256.", ""]
    lines += layers(experts, tokens, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        lines += files(experts, args.rounds, Path(folder)) + mixing(adapters, Path(folder))
    print(page := "\n".join(lines))
    if not args.small:
        Path("benchmarks/results/growth.md").write_text(page)


if __name__ == "__main__":
    main()
