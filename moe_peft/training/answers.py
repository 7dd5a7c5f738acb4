"""Greedy answers of a model to many prompts, kept in a JSONL file: a run that was killed continues with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from accelerate import PartialState
from transformers.utils.logging import tqdm

from ..models.introspection import greedy_decoding
from ..utils.distributed import gathered, gathered_as_it_runs, is_sharded, on_main_process
from ..utils.io import atomic_write, reading
from ..utils.torch_contexts import evaluating
from .checkpointing import base_parameters, first_values, hash_value

Tokens: TypeAlias = list[int]

# --- generation ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def greedy_answers(model: Any, prompts: Sequence[Tokens], ends: Sequence[int], max_new_tokens: int) -> list[Tokens]:
    """
    Answer a batch of prompts greedily.

    Args:
        model: a causal LM. With ZeRO-3, all processes must call this.
        prompts: tokens of the prompts; shorter ones are padded on the left.
        ends: tokens that end an answer.
        max_new_tokens: maximum length of an answer, with the token that ends it.

    Returns:
        the tokens of each answer, with the token that ends it. An answer that was cut has no end.
    """
    device, pad, length = next(model.parameters()).device, ends[0], max(map(len, prompts))
    ids_BS = torch.tensor([[pad] * (length - len(ids)) + ids for ids in prompts], device=device)
    mask_BS = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
    with evaluating(model), greedy_decoding(model), gathered_as_it_runs(model):
        made_BS = model.generate(
            input_ids=ids_BS, attention_mask=mask_BS, max_new_tokens=max_new_tokens, eos_token_id=[*ends],
            pad_token_id=pad, synced_gpus=any(map(is_sharded, model.parameters())),
        )[:, length:]  # fmt: skip
    lengths = [next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids)) for ids in made_BS.tolist()]
    return [ids[:end] for ids, end in zip(made_BS.tolist(), lengths, strict=True)]


def answers_in_batches(
    model: Any,
    prompts: Mapping[str, Tokens],
    limits: Mapping[str, int],
    ends: Sequence[int],
    batch_size: int,
    title: str,
) -> Iterator[dict[str, Tokens]]:
    """
    Yield the greedy answers to prompts, batch by batch. Prompts of similar lengths share a batch, the longest first.

    The main process answers, and all processes get the answers. With ZeRO-3 no process has all weights, so all of them
    run the model together.

    Args:
        prompts: key → tokens of a prompt.
        limits: key → maximum length of an answer. A batch runs to the largest of its limits.
        ends: tokens that end an answer.
        batch_size: prompts that are answered at once.
        title: of the progress bar.
    """
    act = _runner(model)
    keys = sorted(prompts, key=lambda key: -len(prompts[key]))
    bar = tqdm(total=len(keys), desc=title, disable=not (keys and PartialState().is_main_process))
    with bar:
        for start in range(0, len(keys), batch_size):  # one by one, as other processes wait only so long
            batch = keys[start : start + batch_size]
            most = max(limits[key] for key in batch)
            made = act(partial(greedy_answers, model, [prompts[key] for key in batch], ends, most))
            yield dict(zip(batch, made, strict=True))
            bar.update(len(batch))


def base_digest(model: Any) -> str:
    """Return a digest of the first values of each of the base's weights. All processes must call this."""

    def digest() -> str:
        values = []
        for parameter in base_parameters(model):
            with gathered([parameter]):
                values.append(first_values(parameter))
        return hash_value(values)

    return _runner(model)(digest)


def _runner(model: Any) -> Callable[[Callable[[], Any]], Any]:
    """Return how to run a function of a model's weights: in the main process, or in all if ZeRO-3 shards the model."""
    return _run if any(map(is_sharded, model.parameters())) else on_main_process


def _run(act: Callable[[], Any]) -> Any:
    return act()


# --- the file --------------------------------------------------------------------------------------------------------

_START = b'{"by": "'  # of every line


class KeptAnswer(NamedTuple):
    """
    A line of an `AnswersFile`.

    Args:
        by: the name of the model that answers, for readers.
        prompt: the prompt's text, for readers.
        answer: the answer's text, for readers.
        tokens: the answer, as `greedy_answers` returns it.
        key: identifies the model, the prompt and the limits.
    """

    by: str
    prompt: str
    answer: str
    tokens: Tokens
    key: str


@dataclass(frozen=True)
class AnswersFile:
    """
    A JSONL file of answers.

    Args:
        path: the file; None: no answer is kept.
        field: the setting that names the file, for messages.
    """

    path: Path | None
    field: str = "answers"

    def read(self, only: Collection[str] | None = None) -> dict[str, Tokens]:
        """
        Return the tokens of answers by their keys, and check that the file can be written. Remove a last line that a
        killed run has begun to write.

        Args:
            only: keys to return; other lines are removed from the file. None: all.

        Raises:
            ValueError: the file has something else, or cannot be read or written.
        """
        if self.path is None:
            return {}
        remedy = "name a new file, or one that an earlier run has written"
        with reading(f"{self.field}={str(self.path)!r}", remedy), self.path.open("a+b") as file:
            file.seek(0)
            content = file.read()
            *lines, last = content.split(b"\n")
            if _is_json(last):  # whole, but for its line break
                lines.append(last)
            elif not last.startswith(_START[: len(last)]):
                raise ValueError("its last line is no answer")
            rows = [_parsed(line, i) for i, line in enumerate(lines, 1)]
            kept = [row for row in rows if only is None or row.key in only]
            if (wanted := b"".join(map(_line, kept))) != content:
                with atomic_write(self.path) as partial_file:
                    partial_file.write_bytes(wanted)
        return {row.key: row.tokens for row in kept}

    def append(self, rows: Iterable[KeptAnswer]) -> None:
        """Add lines."""
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(b"".join(map(_line, rows)))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parsed(line: bytes, number: int) -> KeptAnswer:
    row = json.loads(line)
    if not (isinstance(row, dict) and row.keys() == {*KeptAnswer._fields} and isinstance(row["key"], str)):
        raise ValueError(f"line {number} is no answer")
    if not (isinstance(row["tokens"], list) and row["tokens"] and all(type(token) is int for token in row["tokens"])):
        raise ValueError(f"line {number} has no tokens")
    return KeptAnswer(**row)


def _line(row: KeptAnswer) -> bytes:
    return json.dumps(row._asdict(), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
