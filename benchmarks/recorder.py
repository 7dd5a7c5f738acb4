"""
What recording routing statistics adds to a training step.

    python -m benchmarks.recorder --rounds 30

The models of `benchmarks/adapter.py` (mixing "output", 8 experts, batch 4×256). Steps with and without the recorder are
interleaved; a row gives the median of the per-round ratios and their quartiles.
"""

from __future__ import annotations

import argparse

import torch

from moe_peft.analysis.recorder import TOKEN_CLASSES, record_routing

from .adapter import Case, train_step
from .timing import interleave, ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    print("| hidden | step with the recorder, as a multiple of one without |\n|---|---|")
    for hidden in args.hidden:
        seconds = measure(hidden, args.rounds)
        print(f"| {hidden} | {ratio(seconds['recorded'], seconds['plain'])} |", flush=True)


def measure(hidden: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of training steps, "plain" and "recorded"."""
    case = Case(hidden)
    model, ids = case.model("output"), case.ids()
    classes = torch.randint(len(TOKEN_CLASSES), (4096,), generator=torch.Generator().manual_seed(0))

    def recorded() -> float:
        with record_routing(model, ["all"], {"all": [0, 1]}, classes):
            return train_step(model, ids)

    return interleave({"plain": lambda: train_step(model, ids), "recorded": recorded}, rounds)


if __name__ == "__main__":
    main()
