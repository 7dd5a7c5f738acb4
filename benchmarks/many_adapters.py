"""
What a gate for requests costs as adapters come: texts alone, no adapter is needed.

    python -m benchmarks.many_adapters --data DATA    # ten minutes of a core; writes results/many_adapters.md

DATA has `clinc150/data_full.json` and `banking77/train.csv` and `test.csv`. An adapter is an intent with some training
texts: the 150 intents of clinc150; with the 77 of banking77, 227. Test texts of these intents and out-of-scope
questions are asked one at a time. Of 1,000 adapters, each has texts drawn at random from all intents: only the cost
counts. The model is SmolLM2-135M-Instruct in float32 with one thread; seconds are the process's CPU seconds. A row is
measured in two processes: one makes the gate, one serves with it.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import RequestGate
from moe_peft.combine.request_gate import FILE

from .processes import peak_growth, run_module
from .timing import clock, machine

RESULT = Path(__file__).parent / "results" / "many_adapters.md"
SIZES, INTENTS, SPLIT = (150, 227, 1000), 227, 12
MIB = 2**20
Texts = dict[str, list[str]]


def intents(data: Path) -> tuple[Texts, Texts]:
    """Intent → training texts, and → test texts; clinc150's intents first."""
    clinc = json.loads((data / "clinc150/data_full.json").read_text())
    of_banking = []
    for part in ("train", "test"):
        with (data / f"banking77/{part}.csv").open() as file:
            of_banking.append([(row["text"], f"bank: {row['category']}") for row in csv.DictReader(file)])
    found: tuple[Texts, Texts] = ({}, {})
    for texts, part, banking in zip(found, ("train", "test"), of_banking, strict=True):
        for text, intent in [*clinc[part], *banking]:
            texts.setdefault(intent, []).append(text)
    return found


def drawn(data: Path, n: int, each: int, asked: int) -> tuple[Texts, list[tuple[str, str | None]]]:
    """The texts of n adapters, and requests with their adapters; None: of no adapter, or of no known one."""
    draw = random.Random(0)
    train, test = intents(data)
    outside = [text for text, _ in json.loads((data / "clinc150/data_full.json").read_text())["oos_test"]]
    if n > INTENTS:
        texts = sorted({text for of_intent in train.values() for text in of_intent})
        draw.shuffle(texts)
        rows = [texts[SPLIT * i : SPLIT * (i + 1)] for i in range(n)]
        requests = [(text, None) for of_intent in test.values() for text in of_intent]
        return {f"adapter {i}": row for i, row in enumerate(rows)}, draw.sample(requests, asked)
    names = [*train][:n]
    own: list[tuple[str, str | None]] = [(text, name) for name in names for text in test[name]]
    general: list[tuple[str, str | None]] = [(text, None) for text in outside]
    return (
        {name: draw.sample(train[name], min(each, len(train[name]))) for name in names},
        [*draw.sample(own, asked), *draw.sample(general, asked // 3)],
    )


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = clock()
    found = action()
    return clock() - start, found


def make(n: int, data: Path, folder: Path, each: int, asked: int) -> dict[str, float]:
    """Make the gate of n adapters in `folder`: seconds to fit it and to add one more adapter, and memory."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm2_folder()).eval(), tokenizer_of()
    texts, _ = drawn(data, n, each, asked)
    (last, of_last), seconds = texts.popitem(), {}
    RequestGate.fit(model, {"first": of_last}, [], tokenizer=tokenizer).pick(of_last)  # what is imported at first

    def fitted(gate: RequestGate) -> RequestGate:
        _ = gate.margin
        return gate

    def run() -> None:
        seconds["fit"], gate = timed(lambda: fitted(RequestGate.fit(model, texts, tokenizer=tokenizer)))
        seconds["add"], gate = timed(lambda: fitted(gate.with_adapter(last, of_last)))
        seconds["texts"] = sum(map(len, gate.texts.values()))
        gate.save_pretrained(folder)

    return {"fit MiB": peak_growth(run) / MIB, **seconds}


def serve(n: int, data: Path, folder: Path, each: int, asked: int) -> dict[str, float]:
    """Serve with the gate: milliseconds of a request, the shares of right choices, and memory."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm2_folder()).eval(), tokenizer_of()
    RequestGate.fit(model, {"first": ["a text"]}, [], tokenizer=tokenizer).pick(["a text"])
    _, requests = drawn(data, n, each, asked)
    gates: list[RequestGate] = []

    def load() -> None:
        gates.append(RequestGate.from_pretrained(folder, model, tokenizer=tokenizer))
        gates[0].pick(["a first request"])

    memory = peak_growth(load)
    times, own, general = [], [], []
    for text, name in requests:
        seconds, (picked,) = timed(lambda text=text: gates[0].pick([text]))
        times.append(seconds)
        (general if name is None else own).append((picked, name))
    found = {"ms": 1000 * statistics.median(times), "MiB": memory / MIB, "file": (folder / FILE).stat().st_size / MIB}
    if own:
        found |= {
            "right": sum(picked == name for picked, name in own) / len(own),
            "lost": sum(picked is None for picked, _ in own) / len(own),
            "general": sum(picked is None for picked, _ in general) / len(general),
        }
    return found


def tokenizer_of() -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder())


def spawn(step: str, *arguments: object) -> dict[str, float]:
    return json.loads(run_module("benchmarks.many_adapters", "--measure", step, *arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of adapters")
    parser.add_argument("--each", type=int, default=12, help="texts of an adapter")
    parser.add_argument("--asked", type=int, default=150, help="requests of the adapters; a third as many of none")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--measure", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.measure:
        step, n, data, folder, each, asked = args.measure
        measure = {"make": make, "serve": serve}[step]
        print(json.dumps(measure(int(n), Path(data), Path(folder), int(each), int(asked))))
        return
    lines = [
        "# A gate of many adapters",
        "",
        f"Made by `python -m benchmarks.many_adapters` on {machine()}: {args.each} texts of an adapter, {SPLIT} of "
        "each of 1,000, and 419 of no adapter. The module's first lines say what is measured. *Lost*: to the "
        "base. *General*: clinc150's out-of-scope questions that the base gets. *Memory* is the growth of a process "
        "above the base's own, while the gate serves; *made*, at its peak while it is made.",
        "",
        "| adapters | texts | right | lost | general | ms a request | fit, s | one more, s | memory, MiB | made, MiB | "
        "file, MiB |",
        "|---" * 11 + "|",
    ]
    for n in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            given = (n, args.data, folder, args.each, args.asked)
            of = {**spawn("make", *given), **spawn("serve", *given)}
        shares = [f"{of[key]:.0%}" if key in of else "" for key in ("right", "lost", "general")]
        cells = [
            str(n),
            f"{of['texts']:.0f}",
            *shares,
            *(f"{of[key]:.0f}" for key in ("ms", "fit")),
            f"{of['add']:.1f}",
        ]
        lines.append(f"| {' | '.join([*cells, *(f'{of[key]:.0f}' for key in ('MiB', 'fit MiB', 'file'))])} |")
        print(lines[-1], flush=True)
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
