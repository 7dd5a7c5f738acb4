"""
The memory that `--dry-run` plans, against what the training then takes, on SmolLM2-135M-Instruct on a CPU.

    python -m benchmarks.plan    # writes benchmarks/results/plan.md

Each case runs a command in a new process, once as a plan and once for a few steps of 8 chats of 59 tokens. The measured
figure is the peak of resident memory minus that before the model is loaded (Python and its libraries), which the plan
estimates as well.
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
        return load(base)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=Path("benchmarks/results/plan.md"))
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
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
