"""UpIT: checkpoints of ordinary fine-tuning become the experts of a Mixture-of-Experts (arXiv 2410.01610)."""

from ..utils.lazy_imports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
