"""`moe-peft mix`; its options are the fields of `MixSettings`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..combine.mix_settings import MOST_ALONE, MixSettings
from ..utils.io import read_json
from ..utils.messages import InputError
from .commands import PLUGINS, to_run
from .settings import SettingsParser, check_files, check_models

if TYPE_CHECKING:
    from ..combine.held_out import HeldOut

_GROUPS = {
    "Experts": ("output", "into", "adapters", "models", "base", "labels", "top_k", "mixing", "attention", "always",
                "add_to", "replace"),
    "Gates": ("gates", "prompts", "data", "label_column", "test_data", "calibration_examples", "test_examples",
              "neutral", "right", "keep_sums", "max_length", "batch_size"),
    "One LoRA, distilled (--into lora)": ("steps", "rank", "learning_rate", "answers", "max_new_tokens"),
}  # fmt: skip
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank
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
    from ..combine.mix import mix  # only now: these imports take seconds

    measured = mix(settings)
    if measured is None:
        print("not evaluated: give --data, some rows of each expert, to see whether it beats merging the experts")
    else:
        print_held_out(measured)
    for line in destinations(settings):
        print(line)
    print(settings.output)


def print_held_out(measured: HeldOut) -> None:
    """Print the results of every way to answer, the routing of requests and tokens, and the verdict."""
    from ..combine.held_out import shown

    console = Console(markup=False, emoji=False)
    experts, labels = measured.labels, list(measured.rows)
    columns = labels if len(labels) <= MOST_ALONE else []  # more do not fit a terminal
    for title, by_way, form in (
        ("Right answers", measured.right, "{:.1%}"), ("Loss per token", measured.losses, "{:.4f}"),
    ):  # fmt: skip
        if by_way:
            table = Table("", *[*columns, "mean"], title=title)
            for way, values in by_way.items():
                table.add_row(shown(way, experts), *(form.format(values[name]) for name in (*columns, "mean")))
            console.print(table)
    table = Table("of", "rows", "requests picked for it", "tokens that go to it first", title="What reaches its own")
    for label in labels if measured.reached else ():
        reached = measured.reached.get(label)
        table.add_row(
            label, str(measured.rows[label]), f"{measured.picked[label]:.0%}" if measured.picked else "",
            f"{reached[experts.index(label)]:.1%}" if reached else "",
        )  # fmt: skip
    if measured.reached:  # a merged LoRA has no gates
        console.print(table)
    if len(labels) < len(experts):
        console.print(
            f"measured only on rows of {', '.join(labels)}; --test-data may have rows of all", highlight=False
        )
    for line in measured.verdict:
        console.print(line, highlight=False, soft_wrap=True)


def destinations(settings: MixSettings) -> list[str]:
    """Return lines with the programs that can load a mixture, and with the programs that cannot and the reasons."""
    from ..native.export import adapted_moe
    from ..native.folders import MoELoraFolder, open_folder
    from ..serving.vllm import check_served

    output, quoted = settings.output, shlex.quote(settings.output)
    if settings.into == "lora":
        config = read_json(Path(output, "adapter_config.json"))
        base, rank = shlex.quote(config["base_model_name_or_path"]), config["r"]
        lines = [f"PEFT, a LoRA of rank {rank}: AutoPeftModelForCausalLM.from_pretrained({output!r})"]
        if limit := next((most for most in _VLLM_RANKS if most >= rank), None):
            vllm = f"vllm serve {base} --enable-lora --max-lora-rank {limit} --lora-modules one={quoted}"
            lines.append(f"vLLM: {vllm}")
        return lines
    if settings.models:
        export = to_run(f"export --model {quoted} --format gguf --output {shlex.quote(output + '.gguf')}")
        return [f"a native MoE, for transformers and vLLM as it is (vllm serve {quoted}); for llama.cpp: {export}"]
    modules = ", ".join(["moe_peft", *PLUGINS])
    lines = [f"transformers: import {modules}; AutoPeftModelForCausalLM.from_pretrained({output!r})"]
    if os.path.isfile(os.path.join(output, "request_gate.safetensors")):
        lines.append(f"the adapters behind vLLM, one for a request: {to_run(f'pick --gate {quoted}')}")
    refusals, folder = [], open_folder(output, "output", MoELoraFolder, base=settings.base)
    try:
        check_served(folder)
        lines.append(f"vLLM: vllm serve {quoted}")
    except InputError as error:
        refusals.append(f"not vLLM: {error}")
    try:
        adapted_moe(folder)
        for place, form, ending in (("a native MoE, for vLLM", "", "-moe"), ("llama.cpp", " --format gguf", ".gguf")):
            target = shlex.quote(output + ending)
            lines.append(f"{place}: {to_run(f'export --adapter {quoted}{form} --output {target}')}")
    except InputError as error:
        refusals.append(f"no export to a native MoE or GGUF: {error}")
    return [*lines, *refusals]
