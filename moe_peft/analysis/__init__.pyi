from .load_callback import LoadCallback
from .recorder import RoutingStatistics, record_routing
from .token_classes import TOKEN_CLASSES, classify_tokens

__all__ = ["TOKEN_CLASSES", "LoadCallback", "RoutingStatistics", "classify_tokens", "record_routing"]
