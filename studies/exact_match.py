"""Loss per answer token and exact matches on held-out rows, by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import nn

from moe_peft.analysis.recorder import RoutingStatistics
from moe_peft.models.introspection import base_passes, counted_tokens
from moe_peft.models.layer import adapter_layers
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


@torch.no_grad()
def pick_experts(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """
    Return one expert of a mixture for each text: the expert with the largest gate of a softmax, averaged over the
    text's tokens and over routers. The routers see the base's hidden states, from one pass of the base over the texts.
    This works for trained gates and for gates set by `init_gates`.

    Args:
        batch: `input_ids` and `attention_mask`, [B, S]. Only some tokens count: the tokens marked by `counted` [B, S]
            or, without it, the tokens with label -100 in `labels` (other tokens are an answer). In a text without such
            tokens, all count.

    Returns:
        Experts, int64 [B], on the CPU.
    """
    layers = adapter_layers(model, None, "pick_experts")
    n = max(layer.num_experts for layer in layers)
    scores_BN = torch.zeros(len(batch["input_ids"]), n, dtype=torch.float64)

    def add(i: int, batch: Any, mask_BS: torch.Tensor, x_BSD: torch.Tensor, output: torch.Tensor) -> None:
        counted_BS = counted_tokens(batch, mask_BS)
        logits_TN = layers[i].router(x_BSD.reshape(-1, x_BSD.shape[-1]))  # some models flatten tokens themselves
        gates_BSN = logits_TN.float().softmax(-1).view(*mask_BS.shape, -1)
        sum_BN = torch.einsum("bs,bsn->bn", counted_BS.to(gates_BSN), gates_BSN)
        scores_BN[:, : gates_BSN.shape[-1]] += (sum_BN / counted_BS.sum(1, keepdim=True)).cpu()

    base_passes(model, [batch], [layer.module for layer in layers], add)
    return scores_BN.argmax(1)


def picked_experts(model: Any, rows: Dataset, collator: Callable[..., dict[str, Any]], batch_size: int) -> list[int]:
    """The expert that each row's prompt picks, see `pick_experts`."""
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
