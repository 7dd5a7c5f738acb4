"""
The kinds of experts. `EXPERTS` is their table. To add a kind, write a subclass of `Experts` (or of `LoraExperts`) in a
new file, and add one line to the table. No other file compares the names of kinds.
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
