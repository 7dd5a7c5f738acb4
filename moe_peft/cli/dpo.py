"""`moe-peft dpo`: preference tuning of a MoE-LoRA adapter or a native MoE, with router losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .usual_options import USUAL as OF_TRAINING
from .usual_options import UsualOptions

if TYPE_CHECKING:
    from .arguments import Options, TrainingParser

ADAPTER_RATE = 5e-6  # five times TRL's default, which is for all weights
USUAL = (*OF_TRAINING, "beta")
EXAMPLE = r"""
example:
  moe-peft dpo --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \
    --dataset_name trl-lib/ultrafeedback_binarized --num_experts 4 \
    --learning_rate 5e-6 --max_steps 100 --output_dir preferred
"""


def parser(prog: str) -> UsualOptions:
    return UsualOptions(
        complete_parser,
        f"{ADAPTER_RATE:g} for an adapter, 1e-06 for all weights",
        labels=False,
        more={"beta": ("X", "How strongly deviation from the reference is penalized.", 0.1)},
        prog=prog,
        description="Tune a MoE-LoRA adapter, or a native MoE, by DPO. All options may be keys of a YAML file "
        "(--config).",
        epilog=EXAMPLE,
    )


def complete_parser(**kwargs: Any) -> TrainingParser:
    from ..training.trainers import MoEDPOConfig  # only now: these imports take seconds
    from .arguments import TrainingParser

    parser = TrainingParser(MoEDPOConfig, **kwargs)
    rate = parser.actions["learning_rate"]
    rate.help = f"The learning rate (default: {ADAPTER_RATE:g} for an adapter, {rate.default:g} for all weights)."
    return parser


def run(options: Options) -> None:
    from ..training.trainers import MoEDPOTrainer
    from .training import train_or_plan

    train_or_plan(options, MoEDPOTrainer, adapter_rate=ADAPTER_RATE)
