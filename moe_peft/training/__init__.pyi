from .dpo import MoEDPOConfig, MoEDPOTrainer
from .router_losses import RouterLossConfig, RouterLossesMixin
from .sft import MoESFTConfig, MoESFTTrainer

__all__ = [
    "MoEDPOConfig",
    "MoEDPOTrainer",
    "MoESFTConfig",
    "MoESFTTrainer",
    "RouterLossConfig",
    "RouterLossesMixin",
]
