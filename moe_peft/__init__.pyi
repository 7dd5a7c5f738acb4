from .adapter.choosing import pin_dispatch
from .adapter.config import MoELoraConfig
from .adapter.convert import expert_to_lora, lora_to_moe
from .adapter.ffn import FFNLayout, register_ffn_layout
from .adapter.model import MoELoraModel
from .analysis.callback import LoadCallback
from .analysis.record import record_routing
from .cards import write_model_card
from .models.attention_routers import fold_routers, init_attention_routers
from .models.native_routers import replace_routers
from .models.steering import allow_experts, force_experts
from .pruning.prune import prune_experts
from .training.dpo import MoEDPOConfig, MoEDPOTrainer
from .training.router_losses import RouterLossConfig, RouterLossesMixin
from .training.sft import MoESFTConfig, MoESFTTrainer

__version__: str

__all__ = [
    "FFNLayout",
    "LoadCallback",
    "MoEDPOConfig",
    "MoEDPOTrainer",
    "MoELoraConfig",
    "MoELoraModel",
    "MoESFTConfig",
    "MoESFTTrainer",
    "RouterLossConfig",
    "RouterLossesMixin",
    "allow_experts",
    "expert_to_lora",
    "fold_routers",
    "force_experts",
    "init_attention_routers",
    "lora_to_moe",
    "pin_dispatch",
    "prune_experts",
    "record_routing",
    "register_ffn_layout",
    "replace_routers",
    "write_model_card",
]
