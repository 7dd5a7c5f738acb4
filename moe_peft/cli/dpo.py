"""`moe-peft dpo`: preference tuning of a MoE-LoRA adapter or a native MoE, with router losses."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from .usual_options import DPO, UsualOptions

if TYPE_CHECKING:
    from .arguments import Options

ADAPTER_RATE = 5e-6  # five times TRL's default for all weights
USUAL = [*chain(*DPO.values())]
EXAMPLE = r"""
example:
  moe-peft dpo --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \
    --dataset_name trl-lib/ultrafeedback_binarized --num_experts 4 \
    --learning_rate 5e-6 --max_steps 100 --output_dir preferred
"""


def parser(prog: str) -> UsualOptions:
    return UsualOptions(
        "MoEDPOConfig",
        DPO,
        f"{ADAPTER_RATE:g} for an adapter, 1e-06 for all weights",
        prog=prog,
        description="Tune a MoE-LoRA adapter, or a native MoE, by DPO. All options may be keys of a YAML file "
        "(--config).",
        epilog=EXAMPLE,
    )


def run(options: Options) -> None:
    from ..training.trainers import MoEDPOTrainer
    from .training import train_or_plan

    train_or_plan(options, MoEDPOTrainer, ADAPTER_RATE)
