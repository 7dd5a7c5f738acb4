from .load_callback import LoadCallback
from .recorder import RoutingStatistics, record_routing
from .routes import Routes, record_routes
from .token_classes import TOKEN_CLASSES, classify_tokens

__all__ = [
    "TOKEN_CLASSES",
    "LoadCallback",
    "Routes",
    "RoutingStatistics",
    "classify_tokens",
    "record_routes",
    "record_routing",
]
