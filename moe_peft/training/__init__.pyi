from .router_losses import RouterLossConfig, RouterLossesMixin
from .trainers import MoEDPOConfig, MoEDPOTrainer, MoESFTConfig, MoESFTTrainer

__all__ = [
    "MoEDPOConfig",
    "MoEDPOTrainer",
    "MoESFTConfig",
    "MoESFTTrainer",
    "RouterLossConfig",
    "RouterLossesMixin",
]
