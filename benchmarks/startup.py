"""
How long Python takes until a name of the package can be used.

    python -m benchmarks.startup --rounds 7

Every measurement is a process of its own; they are interleaved. A row gives medians of seconds, and of what is left
when an empty Python's, of the same round, is taken away.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from functools import partial

from .timing import interleave

CASES = {
    "an empty Python": ["-c", ""],
    "`import moe_peft`": ["-c", "import moe_peft"],
    "`moe-peft --help`": ["-m", "moe_peft", "--help"],
    "`import peft`": ["-c", "import peft"],
    "`from moe_peft import MoELoraConfig`": ["-c", "from moe_peft import MoELoraConfig"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    jobs = {name: partial(_seconds, arguments) for name, arguments in CASES.items()}
    seconds = interleave(jobs, args.rounds, warmup=1)
    empty = seconds["an empty Python"]
    print("| command | seconds | more than an empty Python |\n|---|---|---|")
    for name, measured in seconds.items():
        more = statistics.median(a - b for a, b in zip(measured, empty, strict=True))
        print(f"| {name} | {statistics.median(measured):.2f} | {more:.2f} |")


def _seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
