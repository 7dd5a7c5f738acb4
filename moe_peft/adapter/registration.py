"""Adds MOE_LORA to PEFT's list of adapter types."""

from __future__ import annotations

from aenum import extend_enum
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import register_peft_method

NAME = "MOE_LORA"


def register() -> None:
    """Add `MOE_LORA` to the enum `PeftType` and register the method. A second call does nothing."""
    if NAME not in PeftType.__members__:
        extend_enum(PeftType, NAME, NAME)
    if PeftType[NAME] in PEFT_TYPE_TO_CONFIG_MAPPING:
        return
    from .config import MoELoraConfig
    from .model import MoELoraModel

    register_peft_method(name=NAME.lower(), config_cls=MoELoraConfig, model_cls=MoELoraModel, prefix="moe_lora_")
