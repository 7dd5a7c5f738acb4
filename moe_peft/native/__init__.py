"""Native MoE checkpoints for transformers: dense models upcycled, trained adapters exported."""

from .config import UpcycleConfig
from .export import export_adapter
from .initialise import ExpertInit
from .upcycle import upcycle
from .verify import verify_export

__all__ = ["ExpertInit", "UpcycleConfig", "export_adapter", "upcycle", "verify_export"]
