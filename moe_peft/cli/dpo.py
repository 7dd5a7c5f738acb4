"""`moe-peft dpo`: preference tuning of a MoE-LoRA adapter or a native MoE, with router losses."""

from __future__ import annotations

from ..training.trainers import MoEDPOConfig, MoEDPOTrainer
from .arguments import Options, TrainingParser
from .training import train_or_plan


def parser(prog: str) -> TrainingParser:
    return TrainingParser(MoEDPOConfig, prog=prog, description="Tune a MoE-LoRA adapter, or a native MoE, by DPO.")


def run(options: Options) -> None:
    train_or_plan(options, MoEDPOTrainer)
