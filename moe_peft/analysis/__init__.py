"""Where tokens go: recording, reports, figures."""

from .callback import LoadCallback
from .record import TOKEN_CLASSES, RoutingStatistics, classify_tokens, record_routing

__all__ = ["TOKEN_CLASSES", "LoadCallback", "RoutingStatistics", "classify_tokens", "record_routing"]
