"""Conversations that show which experts served each token; `terminal` is what `moe-peft chat` runs."""

from .conversation import Answer, Conversation

__all__ = ["Answer", "Conversation"]
