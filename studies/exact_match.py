"""Loss per answer token and exact matches on held-out rows, by task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from datasets import Dataset

from moe_peft import pick_experts
from moe_peft.analysis.recorder import RoutingStatistics
from moe_peft.training.scoring import example_answers

_ROWS = 128 if torch.cuda.is_available() else 20  # of a forward pass


class Answer(NamedTuple):
    """
    A row's answer, as a model sees it.

    Args:
        task: the row's.
        log_prob: the sum over its tokens, in nats.
        tokens: how many it has.
        is_match: whether each of them is the most probable one after those before it: greedy decoding gives it.
    """

    task: str
    log_prob: float
    tokens: int
    is_match: bool


def answers(
    model: Any,
    rows: Dataset,
    collator: Callable[[list[dict[str, Any]]], dict[str, Any]],
    statistics: RoutingStatistics | None = None,
) -> list[Answer]:
    """
    The answer of every row, in their order. Logits are computed for answer tokens alone.

    Args:
        rows: tokenized, with `labels` and the task as `domain`.
        statistics: of the routing, which records it and is told the tasks.
    """

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        if statistics is not None:
            statistics.current = [row["domain"] for row in batch]
        return collator(batch)

    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))  # the shortest first: little padding
    scored = example_answers(model, rows.select(order), collate, rows=_ROWS)
    of_rows = zip(rows.select(order)["domain"], *(values.tolist() for values in scored), strict=True)
    found = [Answer(task, -loss, tokens, is_match) for task, loss, tokens, is_match in of_rows]
    return [found[i] for i in torch.tensor(order).argsort().tolist()]


def picked_experts(model: Any, rows: Dataset, collator: Callable[..., dict[str, Any]], batch_size: int) -> list[int]:
    """The expert that each row's prompt picks, see `moe_peft.pick_experts`."""
    starts = range(0, len(rows), batch_size)
    batches = (collator([*rows.select(range(i, min(i + batch_size, len(rows))))]) for i in starts)
    return [expert for batch in batches for expert in pick_experts(model, batch).tolist()]


def by_task(found: Sequence[Answer]) -> dict[str, Any]:
    """`loss` per answer token and `exact` matches, means over tasks, and `tasks`: task → [loss, exact]."""
    tasks = {}
    for task in sorted({answer.task for answer in found}):
        of = [answer for answer in found if answer.task == task]
        loss = -sum(answer.log_prob for answer in of) / sum(answer.tokens for answer in of)
        tasks[task] = [loss, sum(answer.is_match for answer in of) / len(of)]
    loss, exact = (sum(of) / len(tasks) for of in zip(*tasks.values(), strict=True))
    return {"loss": loss, "exact": exact, "tasks": tasks}


def measure(model: Any, rows: Dataset, collator: Any, statistics: RoutingStatistics | None = None) -> dict[str, Any]:
    """`by_task` of the `answers`."""
    return by_task(answers(model, rows, collator, statistics))
