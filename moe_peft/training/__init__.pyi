from .router_bias import RouterBiasCallback, router_bias_updates
from .router_losses import RouterLossConfig, RouterLossesMixin
from .trainers import MoEDPOConfig, MoEDPOTrainer, MoESFTConfig, MoESFTTrainer

__all__ = [
    "MoEDPOConfig",
    "MoEDPOTrainer",
    "MoESFTConfig",
    "MoESFTTrainer",
    "RouterBiasCallback",
    "RouterLossConfig",
    "RouterLossesMixin",
    "router_bias_updates",
]
