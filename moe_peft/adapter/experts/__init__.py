"""
What an expert is. `EXPERTS` is the table of kinds; a new kind is one subclass of `Experts` (or of `LoraExperts`) in a
file of its own, and one line there. No other file compares the names of kinds.
"""

from .base import Experts
from .bottleneck import BottleneckExperts
from .hydra_lora import HydraLoraExperts
from .lora import LoraExperts

EXPERTS: dict[str, type[Experts]] = {
    "lora": LoraExperts,
    "bottleneck": BottleneckExperts,
    "hydra_lora": HydraLoraExperts,
}

__all__ = ["EXPERTS", "BottleneckExperts", "Experts", "HydraLoraExperts", "LoraExperts"]
