"""A part of a matrix of cases in which all combinations of a few of its factors occur."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest


def pairs(*factors: Iterable[Any]) -> list[Any]:
    """Cells of the product of the factors, in which every two values of two factors occur together."""
    cells = list(itertools.product(*factors))
    random.Random(0).shuffle(cells)
    seen: set[Any] = set()
    covering = []
    for cell in cells:
        new = {*itertools.combinations(enumerate(map(repr, cell)), 2)} - seen
        if new:
            covering.append(pytest.param(*cell, id="-".join(map(str, cell))))
            seen |= new
    return covering
