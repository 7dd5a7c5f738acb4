"""The PEFT adapter type MOE_LORA."""

from .registration import register

register()
