"""Model cards: the README.md of a folder with an adapter or a model."""

from .write import TAGS, write_model_card

__all__ = ["TAGS", "write_model_card"]
