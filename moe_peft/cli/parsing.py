"""What several commands parse alike."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..analysis.figures import FORMATS
from ..messages import one_line

_QUANTIZATION = '{"load_in_4bit": true}'


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Which examples run through a model, and how."""
    add = parser.add_argument
    add("--split", default="train", help="split of the data; a file has only train, also train[:100]")
    add("--batch-size", type=int, default=8)
    add("--max-length", type=int, default=1024, help="maximum tokens per example")
    add("--max-examples", type=int, help="maximum number of examples")


def add_weights_options(parser: argparse.ArgumentParser) -> None:
    """How the weights are held in memory; `quantization` reads the second."""
    add = parser.add_argument
    add("--dtype", default="auto", help="of the weights: auto, float32, bfloat16 or float16")
    add("--quantization", metavar="JSON", help=f"fields of BitsAndBytesConfig, e.g. {_QUANTIZATION}")


def add_figures_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figures", default="png", choices=FORMATS, help="format of the figures")


def quantization(options: argparse.Namespace) -> dict[str, Any] | None:
    """
    The option `--quantization`.

    Raises:
        ValueError: it is not a JSON object.
    """
    return parse_json("--quantization", options.quantization, _QUANTIZATION)


def parse_json(option: str, text: str | None, example: str) -> dict[str, Any] | None:
    """
    An option that is a JSON object.

    Raises:
        ValueError: it is none.
    """
    if text is None:
        return None
    try:
        value = read_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{option} {one_line(repr(text))}: give JSON like {example}")
    return value


def read_json(text: str) -> Any:
    """
    Raises:
        ValueError: it is no JSON, or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_with_keys_once)
    except RecursionError as error:
        raise ValueError("is too deep") from error


def _with_keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("has a key twice")
    return found
