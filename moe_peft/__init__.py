"""LoRA-expert Mixture-of-Experts for PEFT. Importing the package registers the adapter type `MOE_LORA`."""

from . import adapter as _adapter  # noqa: F401  (registers the type, before the config class uses it)
from .adapter.choosing import pin_dispatch
from .adapter.config import MoELoraConfig
from .adapter.convert import expert_to_lora, lora_to_moe
from .adapter.ffn import FFNLayout, register_ffn_layout
from .adapter.model import MoELoraModel
from .models.attention_routers import fold_routers, init_attention_routers
from .models.steering import allow_experts, force_experts

__all__ = [
    "FFNLayout",
    "MoELoraConfig",
    "MoELoraModel",
    "allow_experts",
    "expert_to_lora",
    "fold_routers",
    "force_experts",
    "init_attention_routers",
    "lora_to_moe",
    "pin_dispatch",
    "register_ffn_layout",
]
