"""Conversations that show which experts served each token; `terminal` is what `moe-peft chat` runs."""

from .conversation import Answer, Conversation
from .routes import Routes, record_routes

__all__ = ["Answer", "Conversation", "Routes", "record_routes"]
