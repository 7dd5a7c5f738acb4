from .router_bias import RouterBiasCallback, router_bias_updates
from .router_config import RouterLossConfig
from .router_losses import RouterLossesMixin
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
