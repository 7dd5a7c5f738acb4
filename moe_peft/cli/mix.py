"""`moe-peft mix`; its options are the fields of `MixSettings`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..combine.mix_settings import MixSettings
from ..utils.messages import InputError
from .settings import SettingsParser, check_files, check_models

if TYPE_CHECKING:
    from ..combine.held_out import HeldOut

_GROUPS = {
    "Experts": ("output", "adapters", "models", "base", "labels", "top_k", "mixing", "attention", "add_to",
                "replace"),
    "Gates": ("gates", "prompts", "data", "label_column", "test_data", "calibration_examples", "test_examples",
              "keep_sums", "max_length", "batch_size"),
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
    check_models(adapters=settings.adapters, models=settings.models, base=settings.base, add_to=settings.add_to)
    check_files(**{"--data": settings.data, "--test-data": settings.test_data})
    from ..combine.mix import labels_of, mix  # only now: these imports take seconds

    measured = mix(settings)
    if measured is None:
        print("not evaluated: give --data, some rows of each expert, to see whether it beats merging the experts")
    else:
        print_held_out(measured, labels_of(settings))
    for line in destinations(settings):
        print(line)
    print(settings.output)


def print_held_out(measured: HeldOut, experts: Sequence[str]) -> None:
    """Where held-out tokens go, the loss of every way to route them, and what follows from it."""
    console = Console(markup=False, emoji=False)
    labels, n = list(measured.reached), len(experts)
    table = Table("tokens of", *experts, title="Where tokens go first")
    for label, shares in measured.reached.items():
        table.add_row(label, *(f"{share:.1%}" for share in shares))
    console.print(table)
    console.print(f"(mean over layers; by chance {1 / n:.0%})", highlight=False)
    table = Table("", *[*labels, "mean"], title="Loss per token")
    for way, losses in measured.losses.items():
        table.add_row(way, *(f"{losses[name]:.4f}" for name in (*labels, "mean")))
    console.print(table)
    if len(labels) < n:
        console.print(
            f"measured only on rows of {', '.join(labels)}; --test-data may have rows of all", highlight=False
        )
    for line in measured.verdict():
        console.print(line, highlight=False, soft_wrap=True)


def destinations(settings: MixSettings) -> list[str]:
    """Where a mixture can go, from what it really has."""
    from ..native.export import adapted_moe
    from ..native.folders import MoELoraFolder, open_folder
    from ..serving.vllm import check_served

    output = settings.output
    if settings.models:
        return [
            f"a native MoE, for transformers and vLLM as it is (vllm serve {output}); for llama.cpp: moe-peft export "
            f"--model {output} --format gguf --output {output}.gguf"
        ]
    folder = open_folder(output, "output", MoELoraFolder, base=settings.base)
    lines = [f"transformers: import moe_peft; AutoPeftModelForCausalLM.from_pretrained({output!r})"]
    try:
        check_served(folder)
        lines.append(f"vLLM: vllm serve {output}")
    except InputError as error:
        lines.append(f"not vLLM: {error}")
    try:
        adapted_moe(folder)
    except InputError as error:
        return [*lines, f"no export to a native MoE or GGUF: {error}"]
    return [
        *lines,
        f"a native MoE, for vLLM: moe-peft export --adapter {output} --output {output}-moe",
        f"llama.cpp: moe-peft export --adapter {output} --format gguf --output {output}.gguf",
    ]
