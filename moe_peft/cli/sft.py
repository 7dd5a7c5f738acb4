"""`moe-peft sft`: fine-tuning of a MoE-LoRA adapter or a native MoE, with router losses."""

from __future__ import annotations

from ..training.trainers import MoESFTConfig, MoESFTTrainer
from .arguments import Options, TrainingParser
from .training import train_or_plan


def parser(prog: str) -> TrainingParser:
    return TrainingParser(MoESFTConfig, prog=prog, description="Fine-tune a MoE-LoRA adapter, or a native MoE.")


def run(options: Options) -> None:
    train_or_plan(options, MoESFTTrainer)
