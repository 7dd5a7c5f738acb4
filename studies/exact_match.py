"""Loss per answer token and exact matches on held-out rows, by task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset

from moe_peft.utils.torch_contexts import evaluating

_ROWS = 100  # of a forward pass


@torch.no_grad()
def measure(model: Any, rows: Dataset, collator: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> dict[str, Any]:
    """
    An answer is an exact match if each of its tokens is the most probable one after those before it: greedy decoding
    gives it.

    Args:
        rows: tokenized, with `labels` and the task as `domain`.

    Returns:
        `loss` and `exact`, means over tasks, and `tasks`: task → [loss, exact].
    """
    losses, matches = defaultdict(list), defaultdict(list)
    with evaluating(model):
        for start in range(0, len(rows), _ROWS):
            part = [rows[i] for i in range(start, min(start + _ROWS, len(rows)))]
            batch = {name: value for name, value in collator(part).items() if isinstance(value, torch.Tensor)}
            labels = batch.pop("labels")[:, 1:]
            logits = model(**batch).logits[:, :-1]
            answer = labels != -100
            nll = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            match = ((logits.argmax(-1) == labels) | ~answer).all(-1)
            for i, row in enumerate(part):
                losses[row["domain"]].append(nll[i][answer[i]])
                matches[row["domain"]].append(match[i].item())
    tasks = {task: [torch.cat(losses[task]).mean().item(), sum(of) / len(of)] for task, of in matches.items()}
    loss, exact = (sum(of) / len(tasks) for of in zip(*tasks.values(), strict=True))
    return {"loss": loss, "exact": exact, "tasks": dict(sorted(tasks.items()))}
