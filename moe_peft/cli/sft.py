"""`moe-peft sft`: fine-tuning of a MoE-LoRA adapter or a native MoE, with router losses."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from .usual_options import SFT, UsualOptions

if TYPE_CHECKING:
    from .arguments import Options

ADAPTER_RATE = 2e-4  # ten times TRL's default for all weights
USUAL = [*chain(*SFT.values())]
EXAMPLE = r"""
example:
  moe-peft sft --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \
    --dataset_name trl-lib/Capybara --num_experts 4 --top_k 2 \
    --learning_rate 2e-4 --max_steps 100 --output_dir adapter
"""


def parser(prog: str) -> UsualOptions:
    return UsualOptions(
        "MoESFTConfig",
        SFT,
        f"{ADAPTER_RATE:g} for an adapter, 2e-05 for all weights",
        prog=prog,
        description="Fine-tune a MoE-LoRA adapter, or a native MoE. All options may be keys of a YAML file (--config).",
        epilog=EXAMPLE,
    )


def run(options: Options) -> None:
    from ..training.trainers import MoESFTTrainer
    from .training import train_or_plan

    train_or_plan(options, MoESFTTrainer, ADAPTER_RATE)
