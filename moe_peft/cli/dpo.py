"""`moe-peft dpo`: preference tuning of a MoE-LoRA adapter or a native MoE, with router losses."""

from __future__ import annotations

from ..training.trainers import MoEDPOConfig, MoEDPOTrainer
from .arguments import USUAL as OF_TRAINING
from .arguments import Options, TrainingParser
from .training import train_or_plan

USUAL = (*OF_TRAINING, "beta")
EXAMPLE = r"""
example:
  moe-peft dpo --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \
    --dataset_name trl-lib/ultrafeedback_binarized --num_experts 4 \
    --learning_rate 5e-6 --max_steps 100 --output_dir preferred
"""


def parser(prog: str) -> TrainingParser:
    description = "Tune a MoE-LoRA adapter, or a native MoE, by DPO. All options may be keys of a YAML file (--config)."
    return TrainingParser(MoEDPOConfig, prog=prog, description=description, epilog=EXAMPLE)


def run(options: Options) -> None:
    train_or_plan(options, MoEDPOTrainer)
