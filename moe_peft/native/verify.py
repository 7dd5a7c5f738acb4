"""Does an exported model compute what its adapter does?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel

from ..checks import PATH, TEXT, Rule, check
from ..loading import check_tokenizer, read_adapter_weights, read_config, read_model, read_tokenizer
from .export import base_name, read_adapter_config
from .writing import parse_dtype

_TEXTS = Rule(
    lambda v: isinstance(v, (list, tuple)) and all(isinstance(text, str) for text in v), "give a list of texts"
)


class Comparison(NamedTuple):
    """Logits of an adapter compared with those of the model it was exported to."""

    tokens: int
    largest: float  # absolute value of a logit
    difference: float  # the largest
    agreement: float  # share of tokens for which both predict the same next token


def verify_export(
    adapter: str | os.PathLike,
    exported: str | os.PathLike,
    texts: Sequence[str],
    base: str | os.PathLike | None = None,
    dtype: str = "float32",
) -> Comparison:
    """
    Compare the logits of an adapter on its base with those of the exported model, on some texts.

    The models are in memory one after the other, in `dtype`.

    Raises:
        ValueError: there is no text, no tokenizer, no such base or dtype, or `exported` is an adapter.
    """
    check("export: verify", exported=(exported, PATH), texts=(texts, _TEXTS), dtype=(dtype, TEXT))
    precision = parse_dtype(dtype, None, "export: verify")
    config = read_adapter_config(adapter)
    source, revision = base_name(config, base), None if base else config.revision
    if (Path(exported) / "adapter_config.json").is_file():
        raise ValueError(f"export: verify: exported={os.fspath(exported)!r}: this is an adapter; give the export")
    read_adapter_weights(adapter, f"export: adapter {os.fspath(adapter)!r}")  # PEFT would take a pickled file
    tokenizer = read_tokenizer(exported, f"export: verify: {exported}")
    check_tokenizer(tokenizer, read_config(exported, f"export: verify: {exported}"), f"export: verify: {exported}")
    ids = [ids for text in texts if (ids := tokenizer(text, return_tensors="pt")["input_ids"]).numel()]
    if not ids:
        raise ValueError("export: verify: no text; give at least one")
    model = read_model(source, f"export: base {source!r}", revision=revision, dtype=precision)
    ours = _logits(PeftModel.from_pretrained(model, os.fspath(adapter)), ids)
    del model
    theirs = _logits(read_model(exported, f"export: verify: {exported}", dtype=precision), ids)
    same = [a.argmax(-1) == b.argmax(-1) for a, b in zip(ours, theirs, strict=True)]
    return Comparison(
        sum(x.shape[1] for x in ids),
        max(float(a.abs().max()) for a in ours),
        max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)),
        float(torch.cat([x.flatten() for x in same]).float().mean()),
    )


def check_verifiable(adapter: str | os.PathLike, base: str | os.PathLike | None = None) -> None:
    """
    Whether the export of an adapter will have a tokenizer that fits it; before it is written.

    Raises:
        ValueError: neither the adapter nor its base has one, or it has more tokens than the base has embeddings.
    """
    config = read_adapter_config(adapter)
    source = base_name(config, base)
    revision = None if base else config.revision
    own = (Path(adapter) / "tokenizer_config.json").is_file()
    what = f"export: verify: {os.fspath(adapter if own else source)!r}"
    tokenizer = read_tokenizer(adapter, what) if own else read_tokenizer(source, what, revision)
    check_tokenizer(tokenizer, read_config(source, f"export: base {source!r}", revision), what)


@torch.no_grad()
def _logits(model: Any, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [model.eval()(input_ids=x).logits.float() for x in ids]
