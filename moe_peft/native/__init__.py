"""Native MoE checkpoints for transformers: dense models upcycled, trained adapters exported."""

from ..utils.lazy_imports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
