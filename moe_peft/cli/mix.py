"""`moe-peft mix`; its options are the fields of `MixSettings`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..combine.held_out import HeldOut
from ..combine.mix import MixSettings, mix
from .settings import SettingsParser

_GROUPS = {
    "Experts": ("output", "adapters", "models", "base", "labels", "top_k", "mixing", "add_to", "replace"),
    "Gates": ("gates", "prompts", "data", "label_column", "test_data", "calibration_examples", "test_examples",
              "max_length", "batch_size"),
}  # fmt: skip
EXAMPLE = r"""
example, of two LoRA adapters and a file with a few texts for each:
  moe-peft mix --adapters lora-math lora-prose --data math.jsonl prose.jsonl \
    --base HuggingFaceTB/SmolLM2-135M-Instruct --output mixed
"""


def parser(prog: str) -> SettingsParser:
    return SettingsParser(
        MixSettings,
        prog,
        groups=_GROUPS,
        usage="%(prog)s (--adapters A B | --models A B) --output FOLDER [options]",
        description="Make one mixture of LoRA adapters, or of dense models, with gates that need no training.",
        epilog=EXAMPLE,
    )


def run(settings: MixSettings) -> None:
    measured = mix(settings)
    if measured is not None:
        print_held_out(measured)
    print(settings.output)


def print_held_out(measured: HeldOut) -> None:
    """Where held-out tokens go, and the loss of every way to route them."""
    console = Console(markup=False, emoji=False)
    labels = list(measured.reached)
    n = len(next(iter(measured.reached.values())))
    experts = labels if len(labels) == n else [f"expert {i}" for i in range(n)]
    table = Table("tokens of", *experts, title="Where tokens go first")
    for label, shares in measured.reached.items():
        table.add_row(label, *(f"{share:.1%}" for share in shares))
    console.print(table)
    console.print(f"(mean over layers; by chance {1 / n:.0%})", highlight=False)
    table = Table("", *[*labels, "mean"], title="Loss per token")
    for way, losses in measured.losses.items():
        table.add_row(way, *(f"{losses[name]:.4f}" for name in (*labels, "mean")))
    console.print(table)
