"""The trainers' first home; they live in `moe_peft.training` and `moe_peft.analysis` now."""

from .analysis import LoadCallback
from .training.sft import MoESFTConfig, MoESFTTrainer

__all__ = ["LoadCallback", "MoESFTConfig", "MoESFTTrainer"]
