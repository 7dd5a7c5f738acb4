"""Loss per answer token and exact matches on held-out rows, by task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset

from moe_peft.analysis.recorder import RoutingStatistics
from moe_peft.training.scoring import fused_lm_head
from moe_peft.utils.torch_contexts import evaluating

_ROWS = 20  # of a forward pass


@torch.no_grad()
def measure(
    model: Any,
    rows: Dataset,
    collator: Callable[[list[dict[str, Any]]], dict[str, Any]],
    statistics: RoutingStatistics | None = None,
) -> dict[str, Any]:
    """
    An answer is an exact match if each of its tokens is the most probable one after those before it: greedy decoding
    gives it. Logits are computed for answer tokens alone.

    Args:
        rows: tokenized, with `labels` and the task as `domain`.
        statistics: of the routing, which records it and is told the tasks.

    Returns:
        `loss` and `exact`, means over tasks, and `tasks`: task → [loss, exact].
    """
    losses, counts, matches = (defaultdict(list) for _ in range(3))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))  # little padding
    with fused_lm_head(model, ("log_probs", "is_top1")), evaluating(model):
        for start in range(0, len(order), _ROWS):
            part = [rows[i] for i in order[start : start + _ROWS]]
            batch = {name: value for name, value in collator(part).items() if isinstance(value, torch.Tensor)}
            if statistics is not None:
                statistics.current = [row["domain"] for row in part]
            outputs = model(**batch, fused_lm_head=True)
            missed_B = ((outputs.is_top1 == 0) & outputs.label_mask).any(-1)
            for i, row in enumerate(part):
                losses[row["domain"]].append(-outputs.log_probs[i].sum().item())
                counts[row["domain"]].append(outputs.label_mask[i].sum().item())
                matches[row["domain"]].append(not missed_B[i].item())
    tasks = {t: [sum(losses[t]) / sum(counts[t]), sum(matches[t]) / len(matches[t])] for t in sorted(losses)}
    loss, exact = (sum(of) / len(tasks) for of in zip(*tasks.values(), strict=True))
    return {"loss": loss, "exact": exact, "tasks": tasks}
