"""Evaluation on tasks of lm-evaluation-harness: complete models, forced and masked experts."""

from ..utils.lazy_imports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
