"""
What recording routing statistics adds to a training step.

    python benchmarks/recorder.py --rounds 30

The models of `benchmarks/adapter.py` (mixing "output", 8 experts, batch 4×256), steps with the recorder and without
taking turns; the median of the per-round ratios.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from adapter import build, token_ids, train_step

from moe_peft.analysis.record import TOKEN_CLASSES, record_routing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    ids = token_ids()
    classes = torch.randint(len(TOKEN_CLASSES), (4096,), generator=torch.Generator().manual_seed(0))
    print("| hidden | step with the recorder, as a multiple of one without |\n|---|---|")
    for hidden in args.hidden:
        model = build("output", hidden, 8, 4)
        for _ in range(3):
            train_step(model, ids)
        ratios = []
        for turn in range(args.rounds):
            seconds = {}
            for recorded in (True, False) if turn % 2 else (False, True):
                if recorded:
                    with record_routing(model, ["all"], {"all": [0, 1]}, classes):
                        seconds[recorded] = train_step(model, ids)
                else:
                    seconds[recorded] = train_step(model, ids)
            ratios.append(seconds[True] / seconds[False])
        print(f"| {hidden} | {statistics.median(ratios):.3f} |", flush=True)


if __name__ == "__main__":
    main()
