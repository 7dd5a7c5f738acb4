"""Losses of single examples, with the model's own routing or with each expert alone. S examples, n experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers.utils.logging import tqdm

from ..models.introspection import base_model, end_tokens
from ..utils.compat import private
from ..utils.distributed import gathered_as_it_runs, is_sharded
from ..utils.messages import InputError
from ..utils.torch_contexts import evaluating
from .data import IGNORED

Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]
_add_fused_lm_head = private("trl.trainer.utils", "add_fused_lm_head")


@contextmanager
def fused_lm_head(model: Any, outputs: tuple[str, ...] = ("log_probs",)) -> Iterator[None]:
    """
    Give a model TRL's fused head inside the block. Then restore its own forward, which a trainer may need.

    Args:
        outputs: see `trl.trainer.utils.add_fused_lm_head`.
    """
    base = base_model(model)
    forward = base.__dict__.get("forward")  # e.g. set by a trainer
    _add_fused_lm_head(base, outputs=outputs)
    try:
        yield
    finally:
        del base.forward
        if forward is not None:
            base.forward = forward


def to_device(model: Any) -> None:
    """Move a model to this process's device, unless its loader has placed it."""
    inner, device = base_model(model), PartialState().device
    placed = getattr(inner, "hf_device_map", None) or getattr(inner, "is_quantized", False)
    if not placed and next(model.parameters()).device.type != device.type:
        model.to(device)


def example_losses(
    model: Any, dataset: Dataset, collator: Collator, rows: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss [S] and the number of scored tokens [S] of every example, see `example_answers`."""
    scored = example_answers(model, dataset, collator, rows)
    return scored.losses, scored.counts


class Answers(NamedTuple):
    """
    A model's results on examples.

    Args:
        losses: sum of the loss over an example's scored tokens, float64 [S].
        counts: number of scored tokens, int64 [S].
        right: True if each scored token up to the last end of an answer is the most probable after the tokens before
            it, so that greedy decoding gives exactly this answer, bool [S].
    """

    losses: torch.Tensor
    counts: torch.Tensor
    right: torch.Tensor

    def of(self, indices: Sequence[int]) -> Answers:
        """Select the results of some examples."""
        return Answers(*(values[list(indices)] for values in self))


@torch.no_grad()
def example_answers(model: Any, dataset: Dataset, collator: Collator, rows: int = 8) -> Answers:
    """
    Compute the summed loss, number of scored tokens and exact answers of every example. Processes share the work.

    Args:
        model: a model of transformers or PEFT; it is moved to this process's device.
        dataset: tokenized, with `input_ids` and `labels`, as `training.preparation.tokenized` returns it.
        collator: makes batches of the dataset's rows.
        rows: rows per forward pass.
    """
    starts = list(range(0, len(dataset), rows))
    state = PartialState()
    mine = starts[state.process_index :: state.num_processes]
    scored: list[tuple[int, list[float], list[int], list[bool]]] = []
    to_device(model)
    fused, ends = not _head_is_adapted(model), torch.tensor(end_tokens(model), dtype=torch.long)
    head = fused_lm_head(model, ("log_probs", "is_top1")) if fused else nullcontext()
    with head, evaluating(model), gathered_as_it_runs(model):
        for start in tqdm(mine, desc="scoring", disable=not state.is_main_process or len(mine) < 20):
            inputs = collator([dataset[i] for i in range(start, min(start + rows, len(dataset)))])
            inputs = {name: value.to(state.device) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
            log_probs, is_top1, mask = _of_labels(model, inputs, fused)
            # Sum in float64 on the CPU; not all devices have float64.
            losses_B, counts_B = -log_probs.cpu().double().sum(-1), mask.sum(-1)
            right_B = ~((is_top1 == 0) & mask & ~_after_end(inputs["labels"][:, 1:], ends)).any(-1)
            scored.append((start, losses_B.tolist(), counts_B.tolist(), right_B.tolist()))
        if len(mine) < -(-len(starts) // state.num_processes) and any(map(is_sharded, model.parameters())):
            # All processes gather sharded weights at once, so a process with a batch fewer runs a batch of padding.
            padding = {name: torch.zeros_like(value) for name, value in collator([dataset[0]]).items()}
            _of_labels(model, {name: value.to(state.device) for name, value in padding.items()}, fused)
    if state.num_processes > 1:
        scored = sorted(gather_object(scored))
    losses = [loss for _, losses, _, _ in scored for loss in losses]
    counts = [count for _, _, counts, _ in scored for count in counts]
    right = [is_right for _, _, _, right in scored for is_right in right]
    return Answers(torch.tensor(losses, dtype=torch.float64), torch.tensor(counts), torch.tensor(right))


def _after_end(labels_BS: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """
    Return whether labels follow the last end of an answer, bool [B, S], such as the line break that a chat template
    puts there. Decoding stops before them.
    """
    is_end_BS = torch.isin(labels_BS, ends.to(labels_BS.device))
    is_before_BS = is_end_BS.flip(1).cumsum(1).flip(1) > 0  # or the end itself
    return is_end_BS.any(1, keepdim=True) & ~is_before_BS


def _head_is_adapted(model: Any) -> bool:
    """Return whether there is an adapter on the head. TRL's fused head reads only the head's weight."""
    return isinstance(base_model(model).get_output_embeddings(), BaseTunerLayer)


def _of_labels(model: Any, inputs: dict[str, torch.Tensor], fused: bool) -> tuple[torch.Tensor, ...]:
    """
    Return per token: the label's log probability, or 0; whether it is the most probable token; whether there is a
    label.
    """
    if fused:
        outputs = model(**inputs, fused_lm_head=True)
        return outputs.log_probs, outputs.is_top1, outputs.label_mask
    labels = inputs["labels"][:, 1:]
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits[:, :-1].float()
    mask, labels = labels != IGNORED, labels.clamp(min=0)
    log_probs = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return log_probs * mask, logits.argmax(-1) == labels, mask


def loss_name(domain: str) -> str:
    """Return the name of a domain's loss, distinct from `"mean"`, the loss of all domains."""
    return "mean (domain)" if domain == "mean" else domain


def mean_loss(losses_S: torch.Tensor, counts_S: torch.Tensor, source: str) -> float:
    """
    Return the mean loss per scored token.

    Args:
        losses_S, counts_S: as `example_losses` returns them.
        source: names the examples in messages.
    """
    if not counts_S.any():
        raise InputError(
            f"{source}: none of {len(counts_S)} examples has a token to score; raise max_length, or leave it out"
        )
    loss = float(losses_S.sum() / counts_S.sum())
    if not math.isfinite(loss):
        raise InputError(f"{source}: the loss is {loss}; use a wider dtype, bfloat16 or float32, or another model")
    return loss
