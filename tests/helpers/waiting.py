"""Waiting for other threads, processes and pages. A slow machine makes a test slow, not red."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LIMIT = 300  # seconds


def until(condition: Callable[[], T], seen: Callable[[], object] = str) -> T:
    """
    Return the first true value of a condition.

    Args:
        seen: Gives the state to report where the condition stays false.
    """
    end = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < end, f"the condition is false after {LIMIT} seconds: {seen()}"
        time.sleep(0.01)
    return value
