"""
Measures a mixture on held-out rows, and compares it with its base, each expert alone, each row's own expert, the
experts' mean, and one expert picked for each request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from datasets import Dataset
from transformers.utils.logging import tqdm

from ..adapter.lora_conversion import averaged_linears
from ..analysis.recorder import RoutingStatistics
from ..models.gates import uniform_gates
from ..models.introspection import end_tokens, observed_routing
from ..models.layer import AdapterLayer, routed_layers
from ..models.steering import common_size, force_experts, only_expert
from ..training.answers import greedy_answers
from ..training.data import rows_of_labels
from ..training.scoring import Answers, Collator, example_answers, mean_loss
from ..utils.messages import InputError, one_line
from .mix_settings import MOST_ALONE
from .request_gate import BASE, RequestGate

Measure = dict[str, float]  # by label, and "mean" over labels
_THOUGHTS = re.compile(r"\A.*?</think>\s*", re.DOTALL)  # <think> may be in the prompt, from the template
OWN, PICKED = "each its own", "picked by its request"
MEAN_OF_ADAPTERS, MEAN_OF_MODELS = "mean of the adapters", "mean of the models"
MERGED, DISTILLED = "one LoRA (RegMean)", "one LoRA (distilled)"


def check_not_taken(labels: Sequence[str], gates: str) -> None:
    """Raise if an expert has the name of a way to answer, or of a column of the tables."""
    taken = (BASE, "mean", MEAN_OF_ADAPTERS, MEAN_OF_MODELS, MERGED, DISTILLED, OWN, PICKED, f"{gates} gates")
    for label in labels:
        if label in taken:
            raise InputError(
                f"labels={[*labels]}: {label!r} is a line or column of the tables; give another (--labels)"
            )


@dataclass(frozen=True)
class AnswerChecker:
    """
    Checks generated answers with the user's function, instead of comparing answers word for word.

    Args:
        is_right: the user's function of an answer's text and its row.
        name: the function's name, for messages.
        rows: rows before tokenization, with the columns read by tokenization and common to all files.
        tokenizer: the mixture's tokenizer.
        max_new_tokens: maximum length of an answer in tokens.
    """

    is_right: Callable[[str, dict[str, Any]], Any]
    name: str
    rows: Sequence[dict[str, Any]]
    tokenizer: Any
    max_new_tokens: int

    def __call__(self, model: Any, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Return whether the greedy answer to each tokenized row's last question is right, bool [R]."""
        prompts = [row["input_ids"][: _last_answer(row["labels"])] for row in rows]
        ends = end_tokens(model, self.tokenizer)
        answered = greedy_answers(model, prompts, ends, self.max_new_tokens)
        made = [[token for token in tokens if token not in ends] for tokens in answered]
        answers = [_THOUGHTS.sub("", text) for text in self.tokenizer.batch_decode(made, skip_special_tokens=True)]
        try:
            found = [self.is_right(answer, self.rows[row["row"]]) for answer, row in zip(answers, rows, strict=True)]
        except Exception as error:
            raise InputError(f"right={self.name!r}: {type(error).__name__}: {one_line(error)}") from error
        return torch.tensor([bool(is_right) for is_right in found])


def _last_answer(labels: Sequence[int]) -> int:
    """Return the position of the first token of a row's last answer."""
    end = max(i for i, label in enumerate(labels) if label != -100)
    return next((i + 1 for i in range(end, -1, -1) if labels[i] == -100), 0)


@dataclass(frozen=True)
class HeldOutRows:
    """
    Tokenized held-out rows.

    Args:
        rows: tokenized rows, with the columns `request`, the text for a gate for requests, and `row`, the row's number.
        by_label: label → its rows, in the experts' order. A row's label is the name of the expert for the row.
        judge: decides if an answer is right; None: it is right if it equals the row's answer word for word.
    """

    rows: Dataset
    by_label: Mapping[str, Sequence[int]]
    collator: Collator
    batch_size: int
    judge: AnswerChecker | None = None

    @property
    def have_answers(self) -> bool:
        """True if rows are questions with answers, not only texts. No model generates a text word for word."""
        return all(-100 in labels for labels in self.rows["labels"])

    @property
    def labels(self) -> list[str]:
        """Label of each row."""
        label_of = {row: label for label, rows in self.by_label.items() for row in rows}
        return [label_of[row] for row in range(len(self.rows))]

    def of(self, labels: Sequence[str]) -> HeldOutRows:
        """Return the rows of some labels."""
        kept = [row for label in labels for row in self.by_label[label]]
        counts = [len(self.by_label[label]) for label in labels]
        ends = list(accumulate(counts))
        by_label = {label: range(end - n, end) for label, end, n in zip(labels, ends, counts, strict=True)}
        return replace(self, rows=self.rows.select(kept), by_label=by_label)

    def taught(self, rows: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> HeldOutRows:
        """
        Return held-out prompts with the answers of their teachers, which nobody judges.

        Args:
            rows: tokenized rows, with the index of their teacher in `labels`, `expert`.
            labels: names of the teachers.
        """
        of_label = rows_of_labels(row["expert"] for row in rows)
        by_label = {label: of_label[i] for i, label in enumerate(labels) if i in of_label}
        return replace(self, rows=Dataset.from_list([*rows]), by_label=by_label, judge=None)


@dataclass(frozen=True)
class HeldOut:
    """
    Results of a mixture, or of a merged LoRA, on held-out rows.

    Args:
        labels: names of all experts, in order.
        rows: label → its number of held-out rows.
        losses: way to answer → mean loss per scored token.
        right: way → share of rows with a right answer: greedy decoding gives exactly the row's answer, or a judge
            accepts the generated answer. Empty if rows have no answers.
        picked: label → share of its requests picked for its own expert. Empty without a gate for requests.
        lost: share of all these requests sent to the base.
        general: share of general requests sent to the base; None without held-out general requests.
        reached: label → share of its tokens with each expert as first choice [n], mean over layers.
        verdict: sentences with the conclusions.
        agreement: of a distilled LoRA, label → share of its requests that are answered as by its own adapter, word for
            word.
        kept: of a distilled LoRA, share of general requests that are answered as by the base, word for word.
        harm: of a distilled LoRA, loss per token of the base's answers to general requests, above the base's.
    """

    labels: list[str]
    rows: dict[str, int]
    losses: dict[str, Measure]
    right: dict[str, Measure]
    picked: dict[str, float]
    lost: float
    general: float | None
    reached: dict[str, list[float]]
    verdict: list[str]
    agreement: dict[str, float] = field(default_factory=dict)
    kept: float | None = None
    harm: float | None = None


Scored = dict[str, Answers]  # by label


def score(
    model: Any,
    parts: HeldOutRows,
    statistics: RoutingStatistics | None = None,
    experts: Sequence[int | None] | None = None,
) -> Scored:
    """
    Return the answers to all rows, by label. Rows of similar length share a batch, whatever their labels.

    Args:
        statistics: statistics of the routing, with the labels as domains. Answers are then not judged, because the
            tokens generated for the judge would count in the statistics.
        experts: the expert for each row, None for the base. If left out, the model runs unchanged.
    """
    lengths = [len(ids) for ids in parts.rows["input_ids"]]
    order, labels = sorted(range(len(lengths)), key=lengths.__getitem__), parts.labels
    groups = [order]
    by_expert = experts is not None and bool(averaged_linears(model, model.active_adapters[0]))
    if experts is not None and by_expert:  # averaged linears can hold the part of one expert at a time
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
                context = only_expert(model, chosen[0])
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
    parts: HeldOutRows,
    gates: str,
    labels: Sequence[str],
    request_gate: RequestGate | None = None,
    general: Sequence[str] = (),
    others: Mapping[str, Scored] | None = None,
) -> HeldOut:
    """
    Measure a mixture on held-out rows, with its gates and in the other ways to answer.

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE.
        gates: the name of its gates.
        labels: names of all experts. `parts` may have rows of only some of them.
        request_gate: picks an expert for each request.
        general: general requests. They should go to the base.
        others: for a native MoE, way → answers of its source models, measured before.
    """
    adapters = [layer for layer in routed_layers(model) if isinstance(layer, AdapterLayer)]
    scored = score_ways(model, parts, labels) if adapters else {**(others or {})}
    if not adapters and scored.keys() >= {*labels}:
        scored[OWN] = {label: scored[label][label] for label in parts.by_label}
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
    return _held_out(scored, parts, labels, shares, lost, to_base, reached)


def score_ways(model: Any, parts: HeldOutRows, labels: Sequence[str]) -> dict[str, Scored]:
    """Return the answers of a mixture's base, each expert alone, the experts' mean, and each row's own expert."""
    ways: dict[str, AbstractContextManager] = {BASE: model.disable_adapter()}
    if len(labels) <= MOST_ALONE:
        ways |= {label: only_expert(model, i) for i, label in enumerate(labels)}
    ways[MEAN_OF_ADAPTERS] = uniform_gates(model, "projection")
    scored = {}
    for way, context in tqdm(ways.items(), desc="ways to answer"):
        with context:
            scored[way] = score(model, parts)
    if scored.keys() >= {*labels}:
        scored[OWN] = {label: scored[label][label] for label in parts.by_label}
    else:
        scored[OWN] = score(model, parts, experts=[labels.index(label) for label in parts.labels])
    return scored


def score_merged(model: Any, parts: HeldOutRows, labels: Sequence[str], others: Mapping[str, Scored]) -> HeldOut:
    """
    Measure a merged LoRA on held-out rows, and compare it with the other ways to answer.

    Args:
        model: a model with the LoRA merged from the adapters.
        labels: the adapters' names.
        others: the answers of `score_ways`.
    """
    return _held_out({**others, MERGED: score(model, parts)}, parts, labels, {}, 0.0, None, {})


def score_distilled(
    model: Any,
    parts: HeldOutRows,
    labels: Sequence[str],
    others: Mapping[str, Scored],
    taught: HeldOutRows,
    of_base: Scored,
    have_gold: bool,
) -> HeldOut:
    """
    Measure a distilled LoRA on held-out rows, and compare it with the other ways to answer, and with its teachers.

    Args:
        model: a model with the LoRA that learned from the adapters.
        labels: the adapters' names.
        others: the answers of `score_ways`.
        taught: held-out prompts with their own teachers' answers. Those of general requests have the label `base`.
        of_base: the base's answers to the general ones.
        have_gold: whether `parts` have right answers, not the teachers' ones.
    """
    scored = {**others, DISTILLED: score(model, parts)}
    measured = _held_out(scored, parts, labels, {}, 0.0, None, {})
    copied = score(model, taught)
    agreement = {label: float(answers.right.double().mean()) for label, answers in copied.items()}
    loss, before = (mean_loss(a[BASE].losses, a[BASE].counts, "general requests") for a in (copied, of_base))
    kept, harm = agreement.pop(BASE), loss - before
    sentences = [
        f"Word for word, it gives the adapters' own answers to {sum(agreement.values()) / len(agreement):.0%} of their "
        f"held-out requests, and the base's to {kept:.0%} of {len(copied[BASE].right)} general ones. The loss of the "
        f"base's answers changes by {harm:+.3f} per token.",
        _advice(scored, measured)
        if have_gold
        else "There are no right answers: read some of its own before you take it.",
    ]
    return replace(measured, verdict=[*measured.verdict, *sentences], agreement=agreement, kept=kept, harm=harm)


def _advice(scored: Mapping[str, Scored], measured: HeldOut) -> str:
    """Say whether to take a distilled LoRA: it should be better than the base, and no worse than the adapters."""
    by_answers = any(of_way["mean"] for of_way in measured.right.values())
    of_ways, form = (measured.right, "{:.0%} right answers") if by_answers else (measured.losses, "a loss of {:.3f}")
    value, of_own = (form.format(of_ways[way]["mean"]) for way in (DISTILLED, OWN))
    behind, half_behind = _difference(scored[OWN], scored[DISTILLED], by_answers)
    ahead, half_ahead = _difference(scored[DISTILLED], scored[BASE], by_answers)
    if behind > half_behind:
        return (
            f"It is not as good as the adapters: {value}, where each has {of_own} on its own requests. Give more "
            "prompts or steps, or pick an adapter for each request (moe-peft pick)."
        )
    if ahead > half_ahead:
        return f"Take it: {value}, and {of_own} for each adapter on its own requests: no difference beyond chance."
    return "The held-out rows cannot tell whether it is better than the base; give more (--test-examples)."


def _held_out(
    scored: Mapping[str, Scored], parts: HeldOutRows, labels: Sequence[str], shares: dict[str, float], lost: float,
    general: float | None, reached: dict[str, list[float]],
) -> HeldOut:  # fmt: skip
    losses, right = {}, {}
    for way, by_label in scored.items():
        each = {label: mean_loss(a.losses, a.counts, f"held-out rows of {label!r}") for label, a in by_label.items()}
        losses[way] = {**each, "mean": sum(each.values()) / len(each)}
        if parts.have_answers:
            each = {label: float(a.right.double().mean()) for label, a in by_label.items()}
            right[way] = {**each, "mean": sum(each.values()) / len(each)}
    rows = {label: len(a.right) for label, a in next(iter(scored.values())).items()}
    sentences = verdict(scored, losses, right, labels, parts.judge is not None)
    if shares:
        sentences.append(
            f"{sum(shares.values()) / len(shares):.0%} of the requests are picked for their own adapter"
            + (f", {lost:.1%} go to the base" if lost else "")
            + ("." if general is None else f"; of general requests, {general:.0%} go to the base.")
        )
    return HeldOut([*labels], rows, losses, right, shares, lost, general, reached, sentences)


def shown(way: str, labels: Sequence[str]) -> str:
    """Return a way's name in tables and sentences. "alone" tells an expert from the task of the same name."""
    return f"{way} alone" if way in labels else way


def verdict(
    scored: Mapping[str, Scored], losses: Mapping[str, Measure], right: Mapping[str, Measure], labels: Sequence[str],
    judged: bool = False,
) -> list[str]:  # fmt: skip
    """
    Recommend the way with most right answers, or with least loss if no way has any, and compare it with all others.

    Right answers decide, because a wrong choice costs one answer, however large its loss.

    Args:
        scored: way → its answers. The last way is the mixture or the merged LoRA.
        labels: names of the experts.
        judged: whether the user's function decides if an answer is right.
    """
    rows = {label: len(a.right) for label, a in next(iter(scored.values())).items()}
    zeros = [label for label in rows if right and not any(of_way[label] for of_way in right.values())]
    by_answers = bool(right) and len(zeros) < len(rows)
    # Leave out `OWN`: in service, nobody knows each row's own expert. Of equal ways, prefer any to an expert alone.
    ways = sorted((way for way in scored if way != OWN), key=lambda way: way in labels)
    best = min(ways, key=lambda way: (-right[way]["mean"] if by_answers else 0, round(losses[way]["mean"], 4)))
    note = {
        PICKED: " (moe-peft pick)",
        [*scored][-1]: " (this mixture)",
        MERGED: " (this LoRA)",
        DISTILLED: " (this LoRA)",
    }.get(best, "")
    value = f"{right[best]['mean']:.0%} right answers" if by_answers else f"a loss of {losses[best]['mean']:.3f}"
    lines = [f"Best: {shown(best, labels)}{note}, with {value}."]
    # Separate differences beyond chance from the rest.
    behind, untold, apart = [], [], []
    for way in ways:
        if way == best:
            continue
        name = shown(way, labels)
        difference, half = _difference(scored[best], scored[way], by_answers)
        by_loss, half_by_loss = _difference(scored[best], scored[way], False)
        if difference > half:
            behind.append(name)
            continue
        size = f"{100 * difference:.1f} ± {100 * half:.1f} points" if by_answers else f"{difference:.3f} ± {half:.3f}"
        untold.append(f"{name} ({size} behind)")
        if by_answers and abs(by_loss) > 2 * half_by_loss:
            apart.append(f"{name} {losses[way]['mean']:.3f}")
    if behind:
        lines.append(f"Beyond chance, it is better than {', '.join(behind)}.")
    if untold:
        count = sum(rows.values())
        lines.append(f"{count} held-out row{'s' * (count > 1)} cannot tell it from {', '.join(untold)}.")
    if apart:
        lines.append(
            f"Losses of these do lie apart: {shown(best, labels)} {losses[best]['mean']:.3f}, {', '.join(apart)}."
        )
    if zeros and judged:
        lines.append(f"No way has a right answer to {', '.join(zeros)}: see the loss.")
    elif zeros:
        lines.append(f"No way answers {', '.join(zeros)} word for word: see the loss, or give --right.")
    return lines


def _difference(first: Scored, second: Scored, by_answers: bool) -> tuple[float, float]:
    """Return the first way's lead over the second, as a mean over labels, and half the width of its 95 % interval."""
    differences, variances, freedom = [], [], 0
    for label, a in first.items():
        b, n = second[label], len(a.right)
        freedom += n - 1
        if by_answers:
            by_row = a.right.double() - b.right.double()
            # Add two rows, half a row for each of four outcomes (Agresti and Min): few rows in agreement prove little.
            mean = float(by_row.sum()) / (n + 2)
            variances.append(((float(by_row.square().sum()) + 1) / (n + 2) - mean**2) / (n + 2))
        else:
            by_row = (b.losses - a.losses) / a.counts.double().mean()
            variances.append(float(by_row.var(correction=0)) / (n - 1) if n > 1 else float("inf"))
        differences.append(float(by_row.mean()))
    quantile = 1.96 if by_answers else 1.96 + 2.37 / max(1, freedom) + 2.82 / max(1, freedom) ** 2  # Student's t
    return sum(differences) / len(first), quantile * sum(variances) ** 0.5 / len(first)


@contextmanager
def first_choices(model: Any, domains: Sequence[str], num_experts: int) -> Iterator[RoutingStatistics]:
    """Collect routing statistics inside the block. In each layer, a token counts only for its first choice."""
    layers = len(routed_layers(model))
    statistics = RoutingStatistics([num_experts] * layers, [1] * layers, domains)
    with observed_routing(model, lambda seen: statistics.update(seen.router_logits, seen.mask, None)):
        yield statistics
