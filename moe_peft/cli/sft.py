"""`moe-peft sft`: fine-tuning of a MoE-LoRA adapter or a native MoE, with the losses on the routers."""

from __future__ import annotations

from ..training.sft import MoESFTConfig, MoESFTTrainer
from .options import Options, TrainingParser
from .training import print_plan, train


def parser(prog: str) -> TrainingParser:
    return TrainingParser(MoESFTConfig, prog=prog, description="Fine-tune a MoE-LoRA adapter, or a native MoE.")


def run(options: Options) -> None:
    if options.run.dry_run:
        print_plan(options)
    else:
        train(options, MoESFTTrainer)
