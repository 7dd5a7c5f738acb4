from .adapter.config import MoELoraConfig
from .adapter.dispatch_choice import pin_dispatch
from .adapter.ffn_layout import FFNLayout, register_ffn_layout
from .adapter.lora_conversion import lora_to_moe
from .adapter.lora_extraction import expert_to_lora
from .adapter.model import MoELoraModel
from .analysis.load_callback import LoadCallback
from .analysis.recorder import record_routing
from .combine.distil import distil
from .combine.experts import put_expert
from .combine.regmean import regmean
from .combine.request_gate import RequestGate
from .combine.request_texts import neutral_requests
from .models.attention_init import init_attention_routers
from .models.gate_init import init_gates
from .models.gates import fold_routers
from .models.native_routers import replace_routers
from .models.steering import allow_experts, force_experts, weigh_experts
from .pruning.prune import prune_experts
from .training.replay import with_replay
from .training.router_bias import RouterBiasCallback, router_bias_updates
from .training.router_config import RouterLossConfig
from .training.router_losses import RouterLossesMixin
from .training.trainers import MoEDPOConfig, MoEDPOTrainer, MoESFTConfig, MoESFTTrainer
from .utils.model_card import write_model_card

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
    "RequestGate",
    "RouterBiasCallback",
    "RouterLossConfig",
    "RouterLossesMixin",
    "allow_experts",
    "distil",
    "expert_to_lora",
    "fold_routers",
    "force_experts",
    "init_attention_routers",
    "init_gates",
    "lora_to_moe",
    "neutral_requests",
    "pin_dispatch",
    "prune_experts",
    "put_expert",
    "record_routing",
    "register_ffn_layout",
    "regmean",
    "replace_routers",
    "router_bias_updates",
    "weigh_experts",
    "with_replay",
    "write_model_card",
]
