"""`moe-peft demo`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pydantic import Field

from ..utils.validation import Count, Settings, Text
from .settings import SettingsParser


class DemoSettings(Settings):
    """The settings of `moe-peft demo`."""

    model: Text | None = Field(None, description="another causal LM with a chat template, by name or folder")
    output: Text = Field("demo", title="FOLDER", description="folder for everything that is made")
    steps: Count = Field(48, description="training steps of the four LoRAs together, of 8 rows each")


def parser(prog: str) -> SettingsParser:
    return SettingsParser(
        DemoSettings,
        prog,
        description="See it work in about ten minutes on two cores: four LoRA adapters of SmolLM2-135M-Instruct "
        "become one model, which is trained a little further and exported to a native MoE.",
        epilog="example:\n  moe-peft demo --output demo --steps 48",
    )


def run(settings: DemoSettings) -> None:
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "20")
    from ..demo.run import run_demo  # only now: these imports take seconds

    run_demo(Path(settings.output), settings.model, settings.steps)
