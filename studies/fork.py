"""
All rows, or only LoRAs: one LoRA on all rows with replay, one LoRA of the LoRAs, picking, or a mixture.
SmolLM2-135M-Instruct.

    python -m studies.fork run --source FOLDER [--workers 2]   # about four hours of a CPU core a seed of both sets
    python -m studies.fork report                              # tables, in studies/results

Fixed before the first run. Sets (*short*, *domains*), rows, LoRAs, held-out rows and the base are those of
`studies.one_lora`, seeds 10 to 12.

Ways:

- where all rows are there: *joint*, one LoRA of rank 8 or 8·n on the rows of all tasks, as many passes as the own
  LoRAs had (n·30 steps of 16 rows), with 0, 5 or 20 % general rows as `moe-peft sft --replay` makes them; *mixture*,
  n experts of rank 8 with two for each token, on the same rows with 20 %;
- where only the LoRAs and 240 prompts of each task are there: *picked* by `RequestGate`; *words*, picked by n-grams of
  characters in place of hidden states (`studies.writings`); *regmean* and *distilled* (rank 16, 120 steps of 10 rows)
  as `moe-peft mix --into lora` makes them, each from the LoRAs' own answers; *distilled, 24* from 24 prompts of each
  task; *mean* of the LoRAs; *token*, a mixture with `ridge` gates, and *token, base*, with the base as one more expert;
- *own* and *base*.

Every rate is 1e-3, as the own LoRAs' was; *joint, 8n, 20 %* once more with half and with twice the rate.

Requests with a right answer: *one*, and *second*, the second turn after another task's row with its answer; *one* also
in another writing (a sentence, or lower case without marks). Requests of none of the tasks: *far*, 60 of clinc150's
out-of-scope test set; *near*, 60 of neighbours (other intents of Snips, other domains of clinc150); *talk*, 40 of
clinc150's small talk; each as it stands and as a sentence.

Measures: right answers (greedy decoding gives the answer exactly); of requests of none the share whose answer is an
answer of some task's training rows (*labels*), the harm that a user sees; the loss per token of the base's own greedy
answers to 64 general requests, above the base's (*harm*).

The primary contrast: *joint, 8n, 20 %* − *picked*, right answers to *one*. Differences are over rows, paired, seeds
together.

Predictions, means over seeds.

1. *Joint, 8n, 20 %* has 2 to 8 points more right than *picked* on both sets, and less harm.
2. Labels: *joint, 8n, 20 %* below 10 % of *far* and 10 to 30 % of *near*; *picked* below 30 % of *far* and 30 to 60 %
   of *near*; *joint* without replay above 60 % of both.
3. 5 % replay is within 2 points of 20 % in right answers and within .1 in harm.
4. Rank 8 is within 3 points of rank 8·n.
5. *Distilled* is between *picked* and *joint, 8n, 20 %* in right answers, *regmean* below *picked* on *domains*;
   *regmean* is 15 points or more above the *mean* on both sets, and *distilled, 24* 8 points or more below *distilled*.
6. *Mixture* is within 3 points of *joint, 8n, 20 %*: no difference that this study can show.
7. *Token* is 5 points or more below *picked*; *token, base* is no better in right answers and has half of its labels.
8. The other writing costs *picked* less than 3 points, *joint* and *distilled* 5 points or more on *domains*.
9. *Words* are within 3 points of *picked* on both sets.

An earlier head chose each way's rate of three on further rows, and had four kinds of requests; it was cut before the
first run, for time. Prediction 9 and the first number of *picked* in 2 follow `studies.writings`, which came between.

Run so far: *short*, seed 10, six ways. Of 1, *joint, 8n, 20 %* has 5.0 points more than *picked* on *one*, but the
interval holds 0; on *second* it has 6.2 fewer, which nobody predicted; and its harm is less. 2 fails for *joint*, which
answers 35 % of *far* with a label, and for *picked* the other way: 8 and 13 %. 5 fails: *distilled* is below *picked*.
8 holds for *picked*; *joint* loses 8.8 points on *short*, too. The first run of *distilled* (33.8 %) was thrown away:
its loss was a mean over tokens, two thirds of which were general answers', and right answers needed the line break that
the template puts after their end. Of 77 general answers that end within 96 tokens each stood six times in the rows.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from datasets import Dataset
from filelock import FileLock
from peft import get_peft_model
from trl import SFTConfig, SFTTrainer

from moe_peft import MoELoraConfig, RequestGate, distil, init_gates, lora_to_moe, regmean, with_replay
from moe_peft.combine import request_gate
from moe_peft.combine.distil import Teachers, prompt_tokens, with_general
from moe_peft.combine.request_texts import neutral_requests
from moe_peft.training.answers import AnswersFile
from moe_peft.training.preparation import preparation, tokenized

from . import one_lora, requests
from .differences import over_rows
from .exact_match import answers
from .one_lora import RANK, STEPS, Asked, OneLora, Way, greedy, other_writing, said
from .requests import FFN, LONGEST, RATE, Job, command, slots_of
from .runs import Ledger, arguments
from .writings import CachedGate, Grams, sentence

SETS, SEEDS, PROMPTS, FEW = ("short", "domains"), (10, 11, 12), 240, 24
REPLAY_TOKENS = 96  # of a general row's answer
MOST_FOR_NONE = 60  # requests of a kind
KINDS = ("one", "one, other writing", "second")
NONE = ("far", "near", "talk")


class Joint(NamedTuple):
    """A training on all rows: of a LoRA of this rank, or of a mixture."""

    rank: str
    replay: int
    rate: float = RATE


JOINT = {
    "joint, 8n, 20 %": Joint("8n", 20), "joint, 8n, 0 %": Joint("8n", 0), "mixture": Joint("mixture", 20),
    "joint, 8, 20 %": Joint("8", 20), "joint, 8n, 5 %": Joint("8n", 5), "joint, 8, 0 %": Joint("8", 0),
    "joint, 8n, 20 %, half rate": Joint("8n", 20, RATE / 2),
    "joint, 8n, 20 %, twice the rate": Joint("8n", 20, 2 * RATE),
}  # fmt: skip
OTHERS = ("own", "base", "picked", "words", "distilled", "regmean", "distilled, 24", "mean", "token", "token, base")
ORDER = (
    "own", "base", "picked", "joint, 8n, 20 %", "distilled", "regmean", "joint, 8n, 0 %", "mixture", "token", "words",
    "mean", "joint, 8, 20 %", "distilled, 24", "token, base", *JOINT,
)  # fmt: skip


class Fork(OneLora):
    """The LoRAs of `studies.one_lora`, and trainings on all rows."""

    def __init__(self, source: Path, work: Path, ledger: Ledger, *args: Any) -> None:
        super().__init__(source, work.with_name("one_lora"), ledger, *args)
        clinc = json.loads((source / "clinc150/data_full.json").read_text())["test"]
        domains = json.loads((source / "clinc150/domains.json").read_text())
        intents = ("AddToPlaylist", "BookRestaurant", "RateBook", "SearchScreeningEvent")
        snips = [text for intent in intents for text, _ in slots_of(source, intent).held_out]
        meta = [text for text, intent in clinc if intent in domains["meta"]]
        talk = [text for text, intent in clinc if intent in domains["small_talk"]]
        draw = random.Random("none of them")
        near = draw.sample(snips, 30) + draw.sample(meta, 30)
        self.for_none = {
            "far": [chat[-1]["content"] for chat in self.far], "near": near, "talk": draw.sample(talk, 40)
        }  # fmt: skip

    def jobs(self) -> Iterator[Job]:
        done = {(run["set"], run["seed"], run["way"]) for run in self.ledger.records()}
        for seed in SEEDS:
            for name in SETS:
                trained = {
                    task: (self.folder(name, seed, task) / "adapter_model.safetensors").exists()
                    for task in self.tasks[name]
                }
                yield from (Job(name, seed, f"train {task}") for task in trained if not trained[task])
                if all(trained.values()):
                    yield from (Job(name, seed, way) for way in ORDER if (name, seed, way) not in done)

    def run(self, job: Job) -> None:
        started = time.monotonic()
        if job.what.startswith("train "):
            return self.train(job.set, job.seed, job.what.removeprefix("train "))
        record = {**job._asdict(), "way": job.what, **Forked(self, job.set, job.seed).measured_by(job.what)}
        right = record["right"]["one"]
        self.ledger.add(record, f"{right.count('1') / len(right):.1%}, {time.monotonic() - started:.0f} s")

    def fit(self, model: Any, rows: list[dict[str, Any]], steps: int, seed: int, batch: int = 8) -> None:
        """Joint rows have very different lengths: two at a time need little padding, and have the same gradient."""
        if batch == 8:
            return super().fit(model, rows, steps, seed)
        args = arguments(
            SFTConfig, self.work / "state", max_steps=steps, learning_rate=requests.RATE, lr_scheduler_type="cosine",
            max_length=LONGEST, logging_steps=steps, seed=seed, gradient_accumulation_steps=batch // 2,
        )  # fmt: skip
        args.per_device_train_batch_size = 2
        SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=self.tokenizer).train()


class Forked(Asked):
    """All requests of one set and seed, and the ways to answer them."""

    def __init__(self, study: Fork, name: str, seed: int) -> None:
        super().__init__(study, name, seed)
        self.fork = study
        rows = [(i, row) for i, task in enumerate(self.tasks) for row in study.held_out(name, seed, task)]
        draw = random.Random(f"others {seed}")
        prompts: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        for i, row in rows:
            before = draw.choice([other for of, other in rows if of != i])
            other = said(row["prompt"], other_writing(row["prompt"][-1]["content"]))
            second = [*before["prompt"], *before["completion"], *row["prompt"]]
            for kind, prompt in zip(KINDS, (row["prompt"], other, second), strict=True):
                prompts[kind].append(prompt)
        self.parts = {"none": self.parts["none"]}
        self.prompts = {"none": self.prompts["none"], **prompts}
        for kind in KINDS:
            completed = [
                {"prompt": prompt, "completion": row["completion"], "domain": "x"}
                for prompt, (_, row) in zip(prompts[kind], rows, strict=True)
            ]
            self.parts[kind], self.collator = tokenized(
                Dataset.from_list(completed), study.tokenizer, preparation(4 * LONGEST)
            )

    def measured_by(self, way: str) -> dict[str, Any]:
        if way in ("own", "base", "picked", "words"):
            with mock.patch.object(one_lora, "KINDS", KINDS):
                return self.chosen(way)
        with torch.enable_grad():
            if way in JOINT:
                model = self.trained(JOINT[way])
            elif way.startswith("token"):
                model = self.token(with_base=way.endswith("base"))
            elif way.startswith("distilled"):
                model = self.one_of_all(FEW if way.endswith("24") else PROMPTS)
            elif way == "regmean":
                model = regmean(copy.deepcopy(self.study.base), self.folders(), self.batches())
            else:
                model = self.mean(Way(way))
        model.eval()
        found = {kind: answers(model, part, self.collator) for kind, part in self.parts.items()}
        return self.summary(found, lambda texts: greedy(model, self.study.tokenizer, texts))

    def summary(self, found: Any, answer: Any) -> dict[str, Any]:
        none = found["none"]
        shares = {}
        for kind, of_none in self.fork.for_none.items():
            texts = of_none[:MOST_FOR_NONE]
            for writing, of_kind in (("", texts), (", other writing", [*map(sentence, texts)])):
                made = answer([[{"role": "user", "content": text}] for text in of_kind])
                shares[kind + writing] = sum(each in self.labels for each in made) / len(made)
        return {
            "right": {kind: "".join("01"[a.is_match] for a in found[kind]) for kind in KINDS},
            "loss": -sum(a.log_prob for a in found["one"]) / sum(a.tokens for a in found["one"]),
            "none_loss": -sum(a.log_prob for a in none) / sum(a.tokens for a in none),
            "labels": shares,
        }

    def chosen(self, way: str) -> dict[str, Any]:
        """Answers where each request has one LoRA, or the base."""
        choose = self.chooser(way)
        kinds = {kind: self.own if way == "own" and kind in KINDS else choose(p) for kind, p in self.prompts.items()}
        found: dict[str, list[Any]] = {kind: [None] * len(of_kind) for kind, of_kind in kinds.items()}
        models = {expert: self.study.base if expert == self.n else self.lora(expert) for expert in range(self.n + 1)}
        for kind, of_kind in kinds.items():
            for expert in sorted({*of_kind}):
                rows = [i for i, one in enumerate(of_kind) if one == expert]
                made = answers(models[expert], self.parts[kind].select(rows), self.collator)
                for i, answer in zip(rows, made, strict=True):
                    found[kind][i] = answer

        def answer(prompts: list[Any]) -> list[str]:
            of_prompts, made = choose(prompts), [""] * len(prompts)
            for expert in sorted({*of_prompts}):
                rows = [i for i, one in enumerate(of_prompts) if one == expert]
                texts = greedy(models[expert], self.study.tokenizer, [prompts[i] for i in rows])
                for i, text in zip(rows, texts, strict=True):
                    made[i] = text
            return made

        return self.summary(found, answer)

    def chooser(self, way: str) -> Any:
        if way in ("own", "base"):
            return lambda prompts: [self.n] * len(prompts)
        texts = {task: self.study.prompts(self.set, self.seed, task, PROMPTS) for task in self.tasks}
        index = {name: i for i, name in enumerate([*self.tasks, None])}
        if way == "picked":
            gate = RequestGate.fit(self.study.base, texts, tokenizer=self.study.tokenizer)
            return lambda prompts: [index[name] for name in gate.pick(prompts)]
        words = {task: [prompt[-1]["content"] for prompt in of_task] for task, of_task in texts.items()}
        gate = WordGate.of(self.study, words)
        return lambda prompts: [index[name] for name in gate.pick(prompts)]

    def asked(self, count: int) -> list[list[Any]]:
        """`count` prompts for each LoRA."""
        return [self.study.prompts(self.set, self.seed, task, PROMPTS)[:count] for task in self.tasks]

    def answered(self) -> list[dict[str, Any]]:
        """All prompts and general requests with their teachers' answers, which are kept for all ways of one LoRA."""
        study = self.study
        general = [[{"role": "user", "content": text}] for text in neutral_requests()]
        tokens = [[prompt_tokens(study.tokenizer, chat) for chat in chats] for chats in (*self.asked(PROMPTS), general)]
        with FileLock(f"{self.answers}.lock"):
            teachers = Teachers(
                copy.deepcopy(study.base), self.folders(), study.tokenizer, 64, 32, AnswersFile(self.answers)
            )
            return teachers.rows(with_general(tokens[:-1], tokens[-1], self.seed))

    @property
    def answers(self) -> Path:
        return self.study.work / f"answers-{self.set}-{self.seed}.jsonl"

    def one_of_all(self, count: int) -> Any:
        self.answered()
        return distil(
            copy.deepcopy(self.study.base), self.folders(), self.asked(count), self.study.tokenizer, seed=self.seed,
            steps=min(STEPS, 2 * self.study.steps), rank=RANK, answers=self.answers, batch_size=2,
        )  # fmt: skip

    def batches(self, with_base: bool = True) -> list[dict[str, torch.Tensor]]:
        rows = [row for row in self.answered() if with_base or row["expert"] < self.n]
        rows = sorted(rows, key=lambda row: len(row["input_ids"]))
        batches = []
        for of_batch in (rows[start : start + 8] for start in range(0, len(rows), 8)):
            ids = [torch.tensor(row["input_ids"]) for row in of_batch]
            masks = [torch.ones_like(each) for each in ids]
            batch = {"input_ids": ids, "attention_mask": masks}
            padded = {name: torch.nn.utils.rnn.pad_sequence(of, batch_first=True) for name, of in batch.items()}
            batches.append({**padded, "expert": torch.tensor([row["expert"] for row in of_batch])})
        return batches

    def token(self, with_base: bool) -> Any:
        model = lora_to_moe(
            copy.deepcopy(self.study.base), self.folders(), top_k=1, mixing="projection", base_expert=with_base
        )
        init_gates(model, "ridge", self.batches(with_base))
        model.config.output_router_logits = False
        return model

    def trained(self, joint: Joint) -> Any:
        """A training on all rows."""
        study = self.study
        rows = [row for task in self.tasks for row in study.train_rows(self.set, self.seed, task)]
        rows = [
            {key: row[key] for key in ("prompt", "completion")}
            for row in random.Random(self.seed).sample(rows, len(rows))
        ]
        if joint.replay:
            file = study.work / "replay.jsonl"
            with FileLock(f"{file}.lock"):
                mixed = with_replay(
                    Dataset.from_list(rows), copy.deepcopy(study.base), study.tokenizer, neutral_requests(),
                    joint.replay / 100, max_new_tokens=REPLAY_TOKENS, max_length=LONGEST, file=file,
                )  # fmt: skip
            rows = mixed.to_list()
        if joint.rank == "mixture":
            config = MoELoraConfig(
                num_experts=self.n, top_k=2, r=8, lora_alpha=16, target_modules=FFN, task_type="CAUSAL_LM"
            )
            model = get_peft_model(copy.deepcopy(study.base), config)
        else:
            model = study.new_lora(8 * self.n if joint.rank == "8n" else 8)
        with mock.patch.object(requests, "RATE", joint.rate):
            study.fit(model, rows, self.n * study.steps // 2, self.seed, batch=16)
        return model


class WordGate(CachedGate):
    """A gate whose vectors are n-grams of characters."""

    grams: Grams

    @classmethod
    def of(cls, study: Fork, own: dict[str, list[str]]) -> WordGate:
        cls.grams = Grams([*neutral_requests(), *(text for texts in own.values() for text in texts)])
        gate = cls(study.base, request_gate.RequestReader(study.tokenizer, True), {})
        lists = {
            name: gate.read(request_gate.read_list(name))
            for name in (request_gate.ABOUT, request_gate.FILLER, request_gate.AS_BEFORE)
        }
        gate = cls(study.base, gate.reader, {}, lists)
        for name, texts in {**own, request_gate.BASE: neutral_requests()}.items():
            gate = gate.with_adapter(name, texts)
        return gate

    def read(self, texts: Any, batch_size: int = 16) -> torch.Tensor:
        made = [self.grams(request_gate.request_text(text)) for text in texts]
        return torch.stack(made) if made else torch.zeros(0, 1, self.grams.size)


# --- report ----------------------------------------------------------------------------------------------------------

CONTRASTS = (
    ("joint, 8n, 20 %", "picked"), ("joint, 8n, 20 %", "own"), ("joint, 8n, 5 %", "joint, 8n, 20 %"),
    ("joint, 8, 20 %", "joint, 8n, 20 %"), ("mixture", "joint, 8n, 20 %"), ("distilled", "picked"),
    ("distilled", "own"), ("distilled", "joint, 8n, 20 %"), ("distilled, 24", "distilled"), ("regmean", "mean"),
    ("joint, 8n, 20 %, half rate", "joint, 8n, 20 %"), ("joint, 8n, 20 %, twice the rate", "joint, 8n, 20 %"),
    ("regmean", "picked"), ("words", "picked"), ("token", "picked"), ("token, base", "token"), ("picked", "own"),
)  # fmt: skip


def report(ledger: Ledger) -> str:
    """The page of the runs that there are."""
    runs = [*{(r["set"], r["seed"], r["way"]): r for r in ledger.records()}.values()]
    none = [kind + writing for kind in NONE for writing in ("", ", other writing")]
    lines = [
        "# All rows, or only LoRAs",
        "",
        "`python -m studies.fork report` writes this page; the script's head says what was fixed before its first run."
        " Right answers in per cent; of requests of none of the tasks the share that is answered with some task's"
        " answer (*labels*), in two writings; *harm*: loss per token of the base's own answers to general requests,"
        " above the base's.",
    ]
    for name in SETS:
        of_set = [run for run in runs if run["set"] == name]
        base = {run["seed"]: run["none_loss"] for run in of_set if run["way"] == "base"}
        if not base:
            continue
        lines += ["", f"## {name}", "", f"| way | seeds | {' | '.join((*KINDS, *none))} | harm |"]
        lines.append(f"|{'---|' * (3 + len(KINDS) + len(none))}")
        for way in (*OTHERS, *JOINT):
            of = [run for run in of_set if run["way"] == way and run["seed"] in base]
            if of:
                cells = [way, str(len(of)), *(f"{100 * _right(of, kind).mean():.1f}" for kind in KINDS)]
                cells += [f"{100 * sum(run['labels'][kind] for run in of) / len(of):.0f}" for kind in none]
                cells.append(f"{sum(run['none_loss'] - base[run['seed']] for run in of) / len(of):.3f}")
                lines.append(f"| {' | '.join(cells)} |")
        lines += [
            "",
            f"| A − B, points, 95 % over rows | seeds | {' | '.join(KINDS)} |",
            f"|{'---|' * (2 + len(KINDS))}",
        ]
        for names in CONTRASTS:
            pair = [{run["seed"]: run for run in of_set if run["way"] == way} for way in names]
            if seeds := sorted(pair[0].keys() & pair[1].keys()):
                a, b = ([of[seed] for seed in seeds] for of in pair)
                cells = [over_rows((_right(a, kind) - _right(b, kind)).flatten()) for kind in KINDS]
                lines.append(f"| {names[0]} − {names[1]} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _right(runs: list[dict[str, Any]], kind: str) -> torch.Tensor:
    """[runs, rows]"""
    return torch.tensor([[int(x) for x in run["right"][kind]] for run in runs]).double()


def _shrink() -> None:
    global SETS, SEEDS, PROMPTS, FEW, MOST_FOR_NONE
    SETS, SEEDS, PROMPTS, FEW, MOST_FOR_NONE = ("short",), (10,), 6, 3, 2
    one_lora._shrink()


def main() -> None:
    command("fork", __doc__, Fork, report, _shrink)


if __name__ == "__main__":
    main()
