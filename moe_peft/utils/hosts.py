"""Names by which clients may call a server of ours."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence


def trusted_hosts(host: str, more: Sequence[str] = ()) -> list[str]:
    """
    Return the host names that requests may have in `Host`, for Starlette's `TrustedHostMiddleware`. A server on a
    loopback address takes only names of this machine: a page of another site in a browser here could otherwise reach it
    under its own name (DNS rebinding).

    Args:
        host: the server's address.
        more: further names.
    """
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        return ["*"]
    # Older versions of Starlette read "[::1]:8100" as "[".
    return ["localhost", "127.0.0.1", "[::1]", "[", f"[{host}]" if ":" in host else host, *more]
