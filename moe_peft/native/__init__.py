"""Native MoE checkpoints for transformers: dense models upcycled, trained adapters exported."""

from .config import UpcycleConfig
from .export import export_adapter
from .initialise import ExpertInit
from .routed import load_routers
from .upcycle import upcycle
from .verify import verify_export

__all__ = ["ExpertInit", "UpcycleConfig", "export_adapter", "load_routers", "upcycle", "verify_export"]
