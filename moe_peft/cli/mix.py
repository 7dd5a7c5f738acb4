"""`moe-peft mix`; its options are the fields of `MixSettings`."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from ..combine.held_out import HeldOut
from ..combine.mix import MixSettings, mix
from ..utils.messages import InputError
from ..utils.validation import plain_types, read_settings, read_yaml, validate
from .help import GroupedParser

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


def parser(prog: str) -> argparse.ArgumentParser:
    parser = GroupedParser(
        prog,
        usage="%(prog)s (--adapters A B | --models A B) --output FOLDER [options]",
        description="Make one mixture of LoRA adapters, or of dense models, with gates that need no training.",
        epilog=EXAMPLE,
        groups=_GROUPS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file with any of these settings")
    for name, field in MixSettings.model_fields.items():
        kinds = list(plain_types(field.annotation))
        options: dict[str, Any] = {"nargs": "+"} if list in kinds and dict not in kinds else {}
        default = "" if field.default is None or field.is_required() else f" (default: {field.default})"
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=_read_flag if {int, dict} & {*kinds} else str,
            default=argparse.SUPPRESS, help=f"{field.description}{default}", **options,
        )  # fmt: skip
    return parser


def _read_flag(text: str) -> Any:
    try:
        return read_yaml(text, repr(text))
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> None:
    flags = {name: value for name, value in vars(options).items() if name != "config"}
    file = {} if options.config is None else read_settings(options.config)
    file.pop("plugins", None)  # `main` has imported them
    settings = validate(MixSettings, {**file, **flags})
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
