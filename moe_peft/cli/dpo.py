"""`moe-peft dpo`: preference tuning of a MoE-LoRA adapter or a native MoE, with the losses on the routers."""

from __future__ import annotations

from ..training.dpo import MoEDPOConfig, MoEDPOTrainer
from .options import Options, TrainingParser
from .training import print_plan, train


def parser(prog: str) -> TrainingParser:
    return TrainingParser(MoEDPOConfig, prog=prog, description="Tune a MoE-LoRA adapter, or a native MoE, by DPO.")


def run(options: Options) -> None:
    if options.run.dry_run:
        print_plan(options)
    else:
        train(options, MoEDPOTrainer)
