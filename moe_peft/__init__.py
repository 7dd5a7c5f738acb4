"""
Mixture-of-Experts with LoRA experts for PEFT, UpIT, routers, native MoE checkpoints.

Importing the package adds the adapter type `MOE_LORA` to PEFT: at once if PEFT is already loaded, otherwise as soon as
it is. The public names (listed in `__init__.pyi`) are imported on first use.
"""

from typing import Any

from .utils.lazy_imports import lazy_exports, when_imported

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)


def _add_adapter_type(peft: Any) -> None:
    from .adapter.registration import register_moe_lora

    register_moe_lora()


when_imported("peft", _add_adapter_type)
