"""`python -m examples.demo`, which `make demo` runs: one more command of `moe-peft`."""

import sys

from moe_peft.cli import COMMANDS, Command, main

COMMANDS["demo"] = Command("examples.demo.run", "see it work: four LoRAs of SmolLM2-135M become one model")
main(["demo", *sys.argv[1:]])
