"""Conversations with the experts of each answer's tokens. `terminal` runs `moe-peft chat`."""

from .conversation import Answer, Conversation

__all__ = ["Answer", "Conversation"]
