"""A Space that serves the page of `moe-peft chat --web`; the Space's variables say with which model."""

import os
import sys

from moe_peft.cli import main

if "MODEL" not in os.environ:
    sys.exit("MODEL: set this variable in the Space's settings to the name of an adapter or a model on the hub")
flags = {"--system": os.environ.get("SYSTEM"), "--max-new-tokens": os.environ.get("MAX_NEW_TOKENS")}
given = [part for flag, value in flags.items() if value for part in (flag, value)]
main(["chat", "--web", "--host", "0.0.0.0", "--port", "7860", "--model", os.environ["MODEL"], *given])
