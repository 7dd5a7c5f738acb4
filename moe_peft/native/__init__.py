"""Native MoE checkpoints of transformers: dense models upcycled, trained adapters exported."""

from .export import export_adapter, verify_export
from .initialise import ExpertInit
from .upcycle import UpcycleConfig, upcycle

__all__ = ["ExpertInit", "UpcycleConfig", "export_adapter", "upcycle", "verify_export"]
