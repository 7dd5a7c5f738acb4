"""
How close numeric results must be: one rule for all tests.

Results that differ by rounding alone differ by some `eps · sqrt(terms)` of the largest value, since the errors of a sum
of `terms` products have all signs. Half precisions are rounded once: their products are summed in float32. So a test
names no tolerance, only what its computation is, where it is not that of a layer: more terms (steps of training), a
coarser dtype than the tensors have, or values that cancel.

With `MOE_PEFT_CLOSE_LOG=FILE` every comparison is noted in FILE, and a run ends with the worst of each line of a test.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

FACTOR = 16  # every comparison has a factor of four left, with scalar kernels, AVX2 and AVX-512
WIDTH = 64  # of the tiny models, about
LOG = os.environ.get("MOE_PEFT_CLOSE_LOG")


def assert_near(
    actual: Any,
    expected: Any,
    what: str = "",
    *,
    terms: float = WIDTH,
    dtype: torch.dtype | None = None,
    scale: torch.Tensor | float = 0.0,
) -> None:
    """
    Tensors, numbers, or lists and dicts of them agree up to rounding, and integers exactly.

    Args:
        actual: what was computed.
        expected: of the same shape, dtype and device; a reference may be in float64.
        what: what it is, for the message.
        terms: of the longest sum, times the steps that such sums went through.
        dtype: the coarsest that was computed in, where neither tensor has it; float32 for Python's numbers.
        scale: the values that were added up, where they cancel.
    """
    rule = {"terms": terms, "dtype": dtype, "scale": scale}
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), f"{what}: {list(actual)} instead of {list(expected)}"
        for key, value in expected.items():
            assert_near(actual[key], value, f"{what} {key}", **rule)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{what}: {len(actual)} instead of {len(expected)}"
        for i, value in enumerate(expected):
            assert_near(actual[i], value, f"{what} {i}", **rule)
    else:
        if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
            dtype = dtype or torch.float32
        _assert_one(_tensor(actual), _tensor(expected), _tensor(scale), what, terms, dtype)


class near:
    """`value == near(expected)` in an expression: what `assert_near` asserts."""

    __hash__ = None

    def __init__(self, expected: Any, **rule: Any) -> None:
        self.expected, self.rule = expected, rule

    def __eq__(self, actual: object) -> bool:
        try:
            assert_near(actual, self.expected, **self.rule)
        except AssertionError:
            return False
        return True

    def __repr__(self) -> str:
        return f"near({self.expected})"


def worst() -> dict[str, tuple[float, float, str]]:
    """By line of a test the largest error as a share of the tolerance, with that tolerance and the test."""
    found: dict[str, tuple[float, float, str]] = {}
    for line in Path(LOG).read_text().splitlines():
        place, ratio, tolerance, test = line.split("\t")
        found[place] = max(found.get(place, (-1.0, 0.0, "")), (float(ratio), float(tolerance), test))
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def _tensor(value: Any) -> torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def _largest(values: torch.Tensor) -> float:
    """Of the finite ones."""
    values = values.double()
    return float(values.masked_fill(~values.isfinite(), 0).abs().max()) if values.numel() else 0.0


def _assert_one(actual, expected, scale, what, terms, dtype) -> None:
    tolerance = 0.0
    if expected.is_floating_point():
        coarsest = max(map(torch.finfo, {actual.dtype, expected.dtype, dtype or expected.dtype}), key=lambda of: of.eps)
        # A sum is in float32 at least; below the smallest normal number, rounding stays what it is there.
        rounding = max(coarsest.eps, terms**0.5 * min(coarsest.eps, torch.finfo(torch.float32).eps))
        tolerance = FACTOR * rounding * max(_largest(expected), _largest(scale), coarsest.tiny)
    if expected.dtype == torch.float64:
        actual = actual.double()
    error = _largest(actual.double() - expected.double()) if actual.shape == expected.shape else math.inf
    ratio = error / tolerance if tolerance else error and math.inf
    if LOG:
        _note(ratio, tolerance)
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance, msg=lambda text: f"{what} {ratio:.3g} of the tolerance: {text}"
    )


def _note(ratio: float, tolerance: float) -> None:
    frame = sys._getframe()
    while Path(frame.f_code.co_filename).parent == Path(__file__).parent:
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).relative_to(Path(__file__).parents[2])}:{frame.f_lineno}"
    with open(LOG, "a") as log:
        log.write(f"{place}\t{ratio:.4g}\t{tolerance:.4g}\t{os.environ.get('PYTEST_CURRENT_TEST', '').split(' ')[0]}\n")
