"""
The memory that `--dry-run` plans, against what the training then takes, on SmolLM2-135M-Instruct on a CPU.

    python -m benchmarks.plan            # writes benchmarks/results/plan.md
    python -m benchmarks.plan --sizes    # what is planned for larger models, as docs/memory.md shows it

Each case runs a command in a new process, once as a plan and once for a few steps of 8 chats of 59 tokens. The measured
figure is the peak of resident memory minus that before the model is loaded (Python and its libraries), which the plan
estimates as well. Weights are copied out of the file that the loader maps: its other pages count as resident while one
of them is in use, but they are the kernel's to drop.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlamaConfig, PreTrainedConfig, Qwen3Config

from moe_peft.demo.smollm2 import NAME, smollm2_folder

GIB = 2**30
MONTHS = ("January", "March", "May", "July", "August", "October", "December")
NUMBERS = (1, 3, 5, 7, 8, 10, 12)
TRAINING = {
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
}
SFT = {"num_experts": 8, "top_k": 2, "r": 16, "max_steps": 3, **TRAINING}
UPIT = {
    "num_experts": 4,
    "num_train_epochs": 1.0,
    "adapter": {"r": 16, "top_k": 2},
    "prepare": {"num_experts": 2, "num_checkpoints": 4},
    "expand": {"method": "genetic"},
    "router_init": {"seed_fraction": 0.5, "num_train_epochs": 1},
    "sft": {name: value for name, value in TRAINING.items() if name != "save_strategy"},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "`sft`": ("sft", SFT),
    "`sft`, no gradient checkpointing": ("sft", {**SFT, "gradient_checkpointing": False}),
    "`sft`, 4-bit base": ("sft", {**SFT, "load_in_4bit": True}),
    "`upit`": ("upit", UPIT),
}


LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
QWEN = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
TIED = {"tie_word_embeddings": True}
SIZES: dict[str, PreTrainedConfig] = {
    "Qwen3 0.6B": Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, **QWEN, **TIED
    ),
    "Llama 3.2 1B": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, **{**LLAMA, "num_hidden_layers": 16}, **TIED
    ),
    "Llama 3.2 3B": LlamaConfig(
        hidden_size=3072, intermediate_size=8192, **{**LLAMA, "num_hidden_layers": 28, "num_attention_heads": 24},
        **TIED,
    ),
    "Llama 3.1 8B": LlamaConfig(hidden_size=4096, intermediate_size=14336, **LLAMA),
    "Qwen3 32B": Qwen3Config(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, **QWEN
    ),
}  # fmt: skip


def chats(count: int) -> list[dict[str, Any]]:
    draw, rows = random.Random(0), []
    for _ in range(count):
        day, month, year = draw.randint(10, 28), draw.randrange(len(MONTHS)), draw.randint(1950, 2030)
        question = {"role": "user", "content": f"Write the date {MONTHS[month]} {day}, {year} in ISO format."}
        rows.append({"messages": [question, {"role": "assistant", "content": f"{year}-{NUMBERS[month]:02d}-{day}"}]})
    return rows


def settings(command: str, fields: dict[str, Any], folder: Path) -> Path:
    """Writes the command's file."""
    data, model = str(folder / "train.jsonl"), str(smollm2_folder())
    Path(data).write_text("".join(json.dumps(row) + "\n" for row in chats(64)))
    names = {"model_name_or_path": model, "dataset_name": data}
    if command == "upit":
        names = {"model": {"name_or_path": model}, "data": {"train": data}}
    path = folder / f"{command}.yaml"
    path.write_text(json.dumps({**names, **fields, "output_dir": str(folder / "out")}))  # JSON is YAML
    return path


def measure(arguments: list[str]) -> None:
    """Run a command, and print the peak of this process's memory, and its memory before the model is loaded."""
    import psutil

    from moe_peft.cli import main
    from moe_peft.utils.loading import Base

    before, load = [], Base.load

    def noted(base: Base) -> Any:
        before.append(psutil.Process().memory_info().rss)
        model = load(base)
        for parameter in model.parameters():  # not in the mapped file, all of which stays resident with one of them
            parameter.data = parameter.data.clone()
        return model

    Base.load = noted  # type: ignore[method-assign]
    main(arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([peak, (before or [0])[0]]))


def child(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.plan", "--measure", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def row(name: str) -> str:
    command, fields = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        file = str(settings(command, fields, Path(folder)))
        plan = child(command, "--config", file, "--dry-run")
        peak, before = json.loads(child(command, "--config", file).splitlines()[-1])
    planned = max(float(size) for size in re.findall(r"([\d.]+) GiB +│", plan))
    python = float(re.findall(r"add ([\d.]+) GiB", plan)[0])
    measured = (peak - before) / GIB
    cells = [f"{planned:.2f}", f"{measured:.2f}", f"{planned / measured - 1:+.0%}", f"{python:.2f}"]
    return f"| {' | '.join([name, *cells, f'{before / GIB:.2f}'])} |"


def planned_sizes() -> None:
    """Print the memory planned for larger models, from their configs alone: 4 rows of 1,024 tokens a step."""
    cases = [(bits, n, r) for bits in (4, 16) for n, r in ((8, 8), (8, 16), (32, 8))]
    print("| model |" + "".join(f" {bits} bits, n = {n}, r = {r} |" for bits, n, r in cases))
    print("|---" * (len(cases) + 1) + "|")
    fields = {**TRAINING, "top_k": 2, "max_steps": 8, "per_device_train_batch_size": 4, "max_length": 1024}
    for name, config in SIZES.items():
        cells = []
        with tempfile.TemporaryDirectory() as folder:
            config.dtype = "bfloat16"
            config.save_pretrained(folder)
            AutoTokenizer.from_pretrained(smollm2_folder()).save_pretrained(folder)
            data = Path(folder, "train.jsonl")
            data.write_text((json.dumps({"text": "the sea " * 1100}) + "\n") * 32)
            names = {"model_name_or_path": folder, "dataset_name": str(data), "dtype": "bfloat16"}
            for bits, n, r in cases:
                case = {"num_experts": n, "r": r, "load_in_4bit": bits == 4, "output_dir": f"{folder}/out"}
                Path(folder, "sft.yaml").write_text(json.dumps({**fields, **names, **case}))
                plan = child("sft", "--config", f"{folder}/sft.yaml", "--dry-run")
                cells.append(re.findall(r"([\d.]+) GiB +│", plan)[0])
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=Path("benchmarks/results/plan.md"))
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", action="store_true", help="print what is planned for larger models")
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure)
    if args.sizes:
        return planned_sizes()
    columns = ["", "planned", "measured", "error", "Python, planned", "Python, measured"]
    lines = [
        "# Planned and measured memory",
        "",
        f"Made by `python -m benchmarks.plan`: {NAME}, float32, 8 chats of 59 tokens a step, on a "
        "CPU. GiB; of `upit` the largest stage's.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for name in CASES:
        lines.append(row(name))
        print(lines[-1], flush=True)
        args.table.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
