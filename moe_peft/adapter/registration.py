"""Adds MOE_LORA to PEFT's list of adapter types."""

from __future__ import annotations

from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import register_peft_method

NAME = "MOE_LORA"


def register_moe_lora() -> None:
    """Add `MOE_LORA` to the enum `PeftType` and register the method. A second call does nothing."""
    if NAME not in PeftType.__members__:
        _add_member()
    if PeftType[NAME] in PEFT_TYPE_TO_CONFIG_MAPPING:
        return
    from .config import MoELoraConfig
    from .model import MoELoraModel

    register_peft_method(name=NAME.lower(), config_cls=MoELoraConfig, model_cls=MoELoraModel, prefix="moe_lora_")


def _add_member() -> None:
    """Add the member, like a line `MOE_LORA = "MOE_LORA"` in the enum's class. PEFT has no API to add a type."""
    member = str.__new__(PeftType, NAME)
    member._name_ = member._value_ = NAME
    member.__objclass__ = PeftType
    member._sort_order_ = len(PeftType)
    PeftType._member_names_.append(NAME)
    PeftType._member_map_[NAME] = PeftType._value2member_map_[NAME] = member
    type.__setattr__(PeftType, NAME, member)  # an enum's `setattr` refuses members; Python ≥ 3.12 needs it
