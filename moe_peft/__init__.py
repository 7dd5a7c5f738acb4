"""
LoRA-expert Mixture-of-Experts for PEFT, UpIT, routers, native MoE checkpoints.

Importing the package adds the adapter type `MOE_LORA` to PEFT, at once where PEFT is loaded already, else as soon as it
is. The public names (`__init__.pyi` lists them) are imported when they are first used.
"""

from typing import Any

import lazy_loader
import wrapt

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


@wrapt.when_imported("peft")
def _add_adapter_type(peft: Any) -> None:
    from .adapter.registration import register

    register()
