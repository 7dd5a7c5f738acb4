"""
What a mixture gives on held-out rows, beside its base, each expert alone, each row's own, the experts' mean, and one
picked for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from datasets import Dataset
from transformers.utils.logging import tqdm

from ..adapter.lora_conversion import averaged_linears
from ..analysis.recorder import RoutingStatistics
from ..models.gates import uniform_gates
from ..models.introspection import end_tokens, greedy_decoding, observed_routing
from ..models.layer import AdapterLayer, routed_layers
from ..models.steering import common_size, force_experts, serve_alone
from ..training.scoring import Answers, Collator, example_answers, mean_loss
from ..utils.messages import InputError, one_line
from ..utils.torch_contexts import evaluating
from .mix_settings import MOST_ALONE
from .request_gate import BASE, RequestGate

Measure = dict[str, float]  # by label, and "mean" over labels
OWN, PICKED = "each its own", "picked by its request"


@dataclass(frozen=True)
class Judge:
    """
    Says which answers are right, in place of the comparison word for word.

    Args:
        is_right: the user's function of an answer's text and its row.
        name: of the function, for messages.
        rows: as they were read, with the columns that all files share.
        tokenizer: the mixture's.
        max_new_tokens: of an answer.
    """

    is_right: Callable[[str, dict[str, Any]], Any]
    name: str
    rows: Sequence[dict[str, Any]]
    tokenizer: Any
    max_new_tokens: int

    @torch.no_grad()
    def __call__(self, model: Any, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Whether the greedy answer to each tokenized row's last question is right, bool [R]."""
        prompts = [row["input_ids"][: _last_answer(row["labels"])] for row in rows]
        ends = end_tokens(model, self.tokenizer)
        length, end = max(map(len, prompts)), ends[0]
        ids_RS = torch.tensor([[end] * (length - len(ids)) + ids for ids in prompts], device=model.device)
        mask_RS = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device)
        with evaluating(model), greedy_decoding(model):
            ids_RS = model.generate(
                input_ids=ids_RS, attention_mask=mask_RS, max_new_tokens=self.max_new_tokens, eos_token_id=ends,
                pad_token_id=end,
            )  # fmt: skip
        made = [list(takewhile(lambda token: token not in ends, ids)) for ids in ids_RS[:, length:].tolist()]
        answers = self.tokenizer.batch_decode(made, skip_special_tokens=True)
        try:
            found = [self.is_right(answer, self.rows[row["row"]]) for answer, row in zip(answers, rows, strict=True)]
        except Exception as error:
            raise InputError(f"right={self.name!r}: {type(error).__name__}: {one_line(error)}") from error
        return torch.tensor([bool(is_right) for is_right in found])


def _last_answer(labels: Sequence[int]) -> int:
    """Where a row's last answer begins."""
    end = max(i for i, label in enumerate(labels) if label != -100)
    return next((i + 1 for i in range(end, -1, -1) if labels[i] == -100), 0)


@dataclass(frozen=True)
class Parts:
    """
    Tokenized held-out rows.

    Args:
        rows: with the columns `request`, where a gate for requests reads them, and `row`, a row's number.
        by_label: the rows of each label, the expert that they are for, in the experts' order.
        judge: whether answers are right; None: word for word as the rows'.
    """

    rows: Dataset
    by_label: Mapping[str, Sequence[int]]
    collator: Collator
    batch_size: int
    judge: Judge | None = None

    @property
    def have_answers(self) -> bool:
        """Whether rows are questions with answers, and not texts alone, which no model gives word for word."""
        return all(-100 in labels for labels in self.rows["labels"])

    @property
    def labels(self) -> list[str]:
        """Each row's."""
        label_of = {row: label for label, rows in self.by_label.items() for row in rows}
        return [label_of[row] for row in range(len(self.rows))]


@dataclass(frozen=True)
class HeldOut:
    """
    What a mixture gives.

    Args:
        rows: label → how many held-out rows it has.
        losses: way to answer → mean loss per scored token.
        right: way → share of rows whose answer greedy decoding gives exactly; empty where rows have no answers.
        picked: label → the share of its requests for which its expert is picked; empty without a gate for requests.
        lost: the share of all these requests that would go to the base.
        general: the share of general requests that would go to the base; None without any held out.
        reached: label → the share of its tokens whose first choice is each expert [n], mean over layers.
        verdict: sentences on what follows.
    """

    rows: dict[str, int]
    losses: dict[str, Measure]
    right: dict[str, Measure]
    picked: dict[str, float]
    lost: float
    general: float | None
    reached: dict[str, list[float]]
    verdict: list[str]


Scored = dict[str, Answers]  # by label


def score(
    model: Any,
    parts: Parts,
    statistics: RoutingStatistics | None = None,
    experts: Sequence[int | None] | None = None,
) -> Scored:
    """
    The answers to all rows, by label. Rows of similar length share a batch, whatever their labels.

    Args:
        statistics: of the routing, whose domains are the labels; answers are then not judged, as their tokens would
            count.
        experts: the expert that serves each row, and None for the base; left out: the model as it is.
    """
    lengths = [len(ids) for ids in parts.rows["input_ids"]]
    order, labels = sorted(range(len(lengths)), key=lengths.__getitem__), parts.labels
    groups = [order]
    by_expert = experts is not None and bool(averaged_linears(model, model.active_adapters[0]))
    if experts is not None and by_expert:  # averaged linears have one expert's part at a time
        groups = [[row for row in order if experts[row] == expert] for expert in dict.fromkeys(experts)]
    answers, scored = [], []
    for batch in (of[at : at + parts.batch_size] for of in groups for at in range(0, len(of), parts.batch_size)):
        if statistics is not None:
            statistics.current = [labels[row] for row in batch]
        context: AbstractContextManager = nullcontext()
        if experts is not None:
            chosen = [experts[row] for row in batch]
            context = force_experts(model, chosen)
            if by_expert:
                context = serve_alone(model, chosen[0])
        with context:
            rows = parts.rows.select(batch)
            found = example_answers(model, rows, parts.collator, rows=len(batch))
            if parts.judge is not None and statistics is None:
                found = found._replace(right=parts.judge(model, list(rows)))
            answers.append(found)
        scored += batch
    found = Answers(*map(torch.cat, zip(*answers, strict=True))).of(torch.tensor(scored).argsort().tolist())
    return {label: found.of(rows) for label, rows in parts.by_label.items()}


def score_mixture(
    model: Any,
    parts: Parts,
    gates: str,
    labels: Sequence[str],
    request_gate: RequestGate | None = None,
    general: Sequence[str] = (),
    others: Mapping[str, Scored] | None = None,
) -> HeldOut:
    """
    Args:
        model: with a MoE-LoRA adapter, or a native MoE.
        gates: what its gates are called.
        labels: the experts' names, of which `parts` may have some.
        request_gate: picks an expert for each request.
        general: general requests, which should go to the base.
        others: ways that were measured before, of models that the mixture was made of.
    """
    layers = routed_layers(model)
    adapters = [layer for layer in layers if isinstance(layer, AdapterLayer)]
    scored: dict[str, Scored] = {**(others or {})}
    ways: dict[str, AbstractContextManager] = {}
    if adapters:
        ways[BASE] = model.disable_adapter()
        if len(labels) <= MOST_ALONE:
            ways |= {label: serve_alone(model, i) for i, label in enumerate(labels)}
        ways["mean of the adapters"] = uniform_gates(model, "projection")
    for way, context in tqdm(ways.items(), desc="ways to answer"):
        with context:
            scored[way] = score(model, parts)
    if scored.keys() >= {*labels}:
        scored[OWN] = {label: scored[label][label] for label in parts.by_label}
    elif adapters:
        scored[OWN] = score(model, parts, experts=[labels.index(label) for label in parts.labels])
    shares: dict[str, float] = {}
    lost, to_base = 0.0, None
    if request_gate is not None:
        names = request_gate.pick(parts.rows["request"])
        shares = {label: sum(names[row] == label for row in rows) / len(rows) for label, rows in parts.by_label.items()}
        lost = names.count(None) / len(names)
        if general:
            to_base = request_gate.pick(general).count(None) / len(general)
        picked = [None if name is None else labels.index(name) for name in names]
        scored[PICKED] = score(model, parts, experts=picked)
    with first_choices(model, list(parts.by_label), common_size(model, "mix")) as statistics:
        scored[f"{gates} gates"] = score(model, parts, statistics)
    if parts.judge is not None:
        scored[f"{gates} gates"] = score(model, parts)
    reached = {label: share_LN.mean(0).tolist() for label, share_LN in statistics.shares().items()}
    return _held_out(scored, parts.have_answers, labels, shares, lost, to_base, reached)


def _held_out(
    scored: Mapping[str, Scored], have_answers: bool, labels: Sequence[str], shares: dict[str, float], lost: float,
    general: float | None, reached: dict[str, list[float]],
) -> HeldOut:  # fmt: skip
    losses, right = {}, {}
    for way, by_label in scored.items():
        each = {label: mean_loss(a.losses, a.counts, f"held-out rows of {label!r}") for label, a in by_label.items()}
        losses[way] = {**each, "mean": sum(each.values()) / len(each)}
        if have_answers:
            each = {label: float(a.right.double().mean()) for label, a in by_label.items()}
            right[way] = {**each, "mean": sum(each.values()) / len(each)}
    rows = {label: len(a.right) for label, a in next(iter(scored.values())).items()}
    sentences = verdict(scored, losses, right, labels)
    if shares:
        sentences.append(
            f"{sum(shares.values()) / len(shares):.0%} of the requests are picked for their own adapter"
            + (f", {lost:.1%} go to the base" if lost else "")
            + ("." if general is None else f"; of general requests, {general:.0%} go to the base.")
        )
    return HeldOut(rows, losses, right, shares, lost, general, reached, sentences)


def verdict(
    scored: Mapping[str, Scored], losses: Mapping[str, Measure], right: Mapping[str, Measure], labels: Sequence[str]
) -> list[str]:
    """
    Whether the mixture, the last way, is worth its routers: a sentence on each simpler way. Right answers decide, where
    there are any: a wrong choice costs one answer, however large its loss.
    """
    mixture, lines = [*scored][-1], []
    measure = right or losses
    simpler = [way for way in scored if way.startswith("mean of the ") or way == PICKED]
    if alone_ways := [way for way in scored if way in labels]:
        best = (max if right else min)(alone_ways, key=lambda way: measure[way]["mean"])
        simpler.append(best)
    for way in simpler:
        name = f"{way} alone" if way in labels else way
        values = [measure[each]["mean"] for each in (mixture, way)]
        shown = " and ".join(f"{value:.0%}" if right else f"{value:.3f}" for value in values)
        what = "right answers" if right else "loss"
        difference, bar = _difference(scored[mixture], scored[way], bool(right))
        if abs(difference) <= bar:
            size = f"{bar * 100:.1f} points" if right else f"{bar:.3f}"
            chance = f"; below {size} it may be chance" if bar else ", row by row"
            text = f"no difference between the mixture and {name} ({what} {shown}{chance})"
            if way == PICKED:
                text += "; picking needs the adapters alone: moe-peft pick"
        elif difference > 0:
            text = f"the mixture is better than {name} ({what} {shown})"
        else:
            text = f"{name} is better than the mixture ({what} {shown})"
            text += "; use it: moe-peft pick" if way == PICKED else "; use that"
        lines.append(f"{text[0].upper()}{text[1:]}.")
    return lines


def _difference(first: Scored, second: Scored, by_answers: bool) -> tuple[float, float]:
    """
    By how much the first way is better, as a mean over labels, and what may be chance: 1.96 standard errors of the
    differences by row.
    """
    differences, variances = [], []
    for label in first:
        a, b = first[label], second[label]
        by_row = a.right.double() - b.right.double() if by_answers else (b.losses - a.losses) / a.counts.double().mean()
        differences.append(float(by_row.mean()))
        variances.append(float(by_row.var(correction=0)) / len(by_row))
    count = len(differences)
    return sum(differences) / count, 1.96 * sum(variances) ** 0.5 / count


@contextmanager
def first_choices(model: Any, domains: Sequence[str], num_experts: int) -> Iterator[RoutingStatistics]:
    """Statistics in which every token counts only for its first choice, in each layer."""
    layers = len(routed_layers(model))
    statistics = RoutingStatistics([num_experts] * layers, [1] * layers, domains)
    with observed_routing(model, lambda seen: statistics.update(seen.router_logits, seen.mask, None)):
        yield statistics
