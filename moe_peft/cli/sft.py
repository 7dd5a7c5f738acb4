"""`moe-peft sft`: fine-tuning of a MoE-LoRA adapter or a native MoE, with router losses."""

from __future__ import annotations

from ..training.trainers import MoESFTConfig, MoESFTTrainer
from .arguments import USUAL as USUAL
from .arguments import Options, TrainingParser
from .training import train_or_plan

EXAMPLE = r"""
example:
  moe-peft sft --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \
    --dataset_name trl-lib/Capybara --num_experts 4 --top_k 2 \
    --learning_rate 2e-4 --max_steps 100 --output_dir adapter
"""


def parser(prog: str) -> TrainingParser:
    description = "Fine-tune a MoE-LoRA adapter, or a native MoE. All options may be keys of a YAML file (--config)."
    return TrainingParser(MoESFTConfig, prog=prog, description=description, epilog=EXAMPLE)


def run(options: Options) -> None:
    # TRL's rate is for all weights; adapters learn at ten times as much.
    train_or_plan(options, MoESFTTrainer, adapter_rate=2e-4)
