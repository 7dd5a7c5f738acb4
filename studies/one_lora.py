"""
One LoRA out of several: SmolLM2-135M-Instruct and the LoRAs of short tasks and of look-alike domains.

    python -m studies.one_lora run --source FOLDER [--workers 2]   # about three hours of a CPU core a seed of both sets
    python -m studies.one_lora report                              # tables, in studies/results

Fixed before the first run. Sets, rows, LoRAs and their training are those of `studies.requests` (*short*: four tasks,
*domains*: eight look-alike domains of clinc150; rank 8, 60 steps of 8 rows), with seeds of their own, 10 to 12. The
base is that study's, too: SmolLM2 out of a file of four bits, and back.

What a way may use: the LoRAs, *prompts* of each task that no LoRA was trained on (24, 100 or 240; of *logic* its
training prompts, as no others are left: found when the first run stopped there), and the 174 general texts of the
package. Gold answers are for the upper end alone.

Ways:

- *own* LoRA (who knows the task), the *base*, the *mean* of the LoRAs, *picked* by `RequestGate` from 24 or 240 of the
  prompts;
- *regmean*: the least-squares merge (Jin et al., arXiv 2212.09849), a LoRA of rank 8·n without training, from 24, 100
  and 240 prompts of each task with the LoRA's own greedy answers, each LoRA reading its own inputs, and the general
  texts in the sum; *without base*: without these; *base inputs*: the inputs of the base alone (240 prompts);
- *distilled*: one LoRA of rank 16 and of 8·n, trained for 120 steps of 10 rows, 8 of the prompts with their LoRA's
  greedy answers and 2 of the general texts with the base's (cross-entropy, rate 1e-3, cosine), from 24, 100 and 240
  prompts; *KL*: the same rows with the teacher's distribution in place of the answers' tokens (240, rank 16);
  *two writings*: half of the prompts as sentences (240, rank 16); *from regmean*: begins with the merge (240, rank 8·n,
  60 steps);
- *joint*: one LoRA of rank 16 on the gold rows that the LoRAs were trained on, with the same general rows and as many
  steps as *distilled*.

Requests, of held-out rows (40 of a task in *short*, 30 in *domains*): *one*, as in the data; *sentence*: with a capital
and a mark; *switch*: the second turn of a chat whose first is another task's row with its right answer. Of none of the
tasks: *none*, the 64 general requests of `studies.requests`, and 100 of clinc150's out-of-scope test set (*far*).

Right answers decide: greedy decoding gives the answer exactly. Of *none* the loss per token of the base's own greedy
answers, above the base's (*harm*). Of *far* the share whose greedy answer is an answer of some task's training rows
(*labels*).

The primary contrast: *distilled* (240, rank 16) − *own*, requests as in the data. Differences are over rows, paired,
the three seeds together; a set has 480 and 720.

Predictions, means over seeds.

1. *Distilled* (240, rank 16) is within 2 points of *own* on both sets, *one*.
2. With 24 prompts it loses 10 points or more of that, and is not above *picked* (24).
3. *Regmean* (240) has at least nine tenths of *own* on *short*, two thirds on *domains*, and 15 points or more above
   the *mean* on both; with 24 prompts it loses less than 5 points.
4. Without the base's sums its harm at least doubles; base inputs lose less than 3 points.
5. *KL* is within 2 points of *distilled*; *from regmean* within 2 points, in half of the steps.
6. *Sentence*: *distilled* loses 20 points or more on *domains* and less than 5 with *two writings*; *own* loses less
   than 10.
7. *Labels*: *picked* below 60 %, *distilled* below 20 %, *regmean* above 60 %, *joint* below 20 %.

Run so far: *short*, seed 10, the first six ways, with the package's gate as it was before `studies.writings`. 1 fails
there (*distilled* − *own* −10.0 points [−16.3, −3.7]), and of 3 nine tenths of *own* (82 %); *regmean* is 22.5 points
[15.6, 29.4] above the *mean*, as predicted. The answers that teach *distilled* are cut at 24 and 48 tokens and end
there, so general answers teach stopping too early; `moe-peft mix --into lora --steps` does not do that.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import PeftModel

from moe_peft import RequestGate, regmean
from moe_peft.adapter.plain_lora import read_loras
from moe_peft.combine import regmean as closed_form
from moe_peft.models.introspection import greedy_decoding
from moe_peft.training.preparation import calibration_batches, preparation, tokenized
from moe_peft.utils.io import atomic_write

from .differences import over_rows
from .exact_match import Answer, answers
from .request_gate import first_general_texts
from .requests import ANSWER, LONGEST, RATE, Job, Requests, command, drawn
from .runs import DEVICE, Ledger

SETS, SEEDS, PROMPTS, RANK, STEPS, FAR = ("short", "domains"), (10, 11, 12), (24, 100, 240), 16, 120, 100
KINDS = ("one", "sentence", "switch")


class Way(NamedTuple):
    """
    A way to have one LoRA.

    Args:
        rows: prompts of each task; 0 where it reads none.
    """

    name: str
    rows: int = 0


WAYS = (
    Way("own"), Way("base"), Way("mean"), Way("regmean", 240), Way("distilled", 240), Way("picked", 240), Way("joint"),
    Way("regmean", 24), Way("distilled", 24), Way("picked", 24), Way("regmean, without base", 240),
    Way("regmean, base inputs", 240), Way("KL", 240), Way("two writings", 240), Way("distilled, rank 8n", 240),
    Way("from regmean", 240), Way("regmean", 100), Way("distilled", 100),
)  # fmt: skip


def other_writing(text: str) -> str:
    """A sentence in lower case without marks, or else as a sentence."""
    if text[:1].isupper() or text.rstrip()[-1:] in ".?!":
        return text.lower().rstrip(" .?!")
    asks = text.split(maxsplit=1)[0] in (
        "what",
        "who",
        "how",
        "when",
        "where",
        "why",
        "which",
        "can",
        "is",
        "are",
        "do",
    )
    return text[:1].upper() + text[1:] + ("?" if asks else ".")


def said(prompt: list[dict[str, str]], text: str) -> list[dict[str, str]]:
    """A prompt with another last message."""
    return [*prompt[:-1], {**prompt[-1], "content": text}]


class OneLora(Requests):
    """The LoRAs of `studies.requests`, and ways to have one LoRA of them."""

    def __init__(self, source: Path, *args: Any) -> None:
        super().__init__(source, *args)
        rows = json.loads((source / "clinc150/data_full.json").read_text())["oos_test"]
        texts = random.Random(0).sample([text for text, _ in rows], FAR)
        self.far = [[{"role": "user", "content": text}] for text in texts]
        self.general = self.answered(first_general_texts(), "general")

    def answered(self, texts: list[str], domain: str) -> list[dict[str, Any]]:
        """In batches, and kept for the other workers and for a study that continues."""
        file = self.work / f"{domain}.json"
        if not file.exists():
            prompts = [[{"role": "user", "content": text}] for text in texts]
            rows = []
            for text, prompt, answer in zip(texts, prompts, greedy(self.base, self.tokenizer, prompts), strict=True):
                ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
                made = self.tokenizer(answer)["input_ids"][:ANSWER]
                rows.append({"text": text, "input_ids": [*ids, *made], "answer": len(made), "domain": domain})
            with atomic_write(file) as partial:
                partial.write_text(json.dumps(rows))
        return json.loads(file.read_text())

    def jobs(self) -> Iterator[Job]:
        done = {(run["set"], run["seed"], run["way"], run.get("rows", 0)) for run in self.ledger.records()}
        for seed in SEEDS:
            for name in SETS:
                trainings = [f"train {task}" for task in self.tasks[name]]
                missing = [Job(name, seed, what) for what in trainings if (name, seed, what, 0) not in done]
                yield from missing
                if not missing:
                    ways = [way for way in WAYS if (name, seed, *way) not in done]
                    yield from (Job(name, seed, f"{way.name}; {way.rows}") for way in ways)

    def run(self, job: Job) -> None:
        started = time.monotonic()
        if job.what.startswith("train "):
            self.train(job.set, job.seed, job.what.removeprefix("train "))
            record: dict[str, Any] = {**job._asdict(), "way": job.what}
            return self.ledger.add(record, f"{time.monotonic() - started:.0f} s")
        name, _, rows = job.what.partition("; ")
        record = {"set": job.set, "seed": job.seed, "way": name, "rows": int(rows)}
        record |= Asked(self, job.set, job.seed).measured(Way(name, int(rows)))
        right = "".join(record["right"]["one"])
        self.ledger.add(record, f"{right.count('1') / len(right):.1%}, {time.monotonic() - started:.0f} s")

    def prompts(self, name: str, seed: int, task: str, count: int) -> list[list[dict[str, str]]]:
        """Prompts of a task that its LoRA was not trained on."""
        seen = {row["prompt"][-1]["content"] for row in self.train_rows(name, seed, task)}
        rows = [row for row in self.tasks[name][task]["train"] if row["prompt"][-1]["content"] not in seen]
        rows = rows or self.tasks[name][task]["train"]  # all rows of *logic* are training or test rows
        return [row["prompt"] for row in drawn(rows, count, seed, f"prompts {task}")]


class Asked:
    """All requests of one set and seed, and the ways to answer them."""

    def __init__(self, study: OneLora, name: str, seed: int) -> None:
        self.study, self.set, self.seed, self.tasks = study, name, seed, [*study.tasks[name]]
        self.n = len(self.tasks)
        rows = [(i, row) for i, task in enumerate(self.tasks) for row in study.held_out(name, seed, task)]
        self.own = [i for i, _ in rows]
        draw = random.Random(f"others {seed}")
        texts: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        for i, row in rows:
            before = draw.choice([other for of, other in rows if of != i])
            other = said(row["prompt"], other_writing(row["prompt"][-1]["content"]))
            turns = [*before["prompt"], *before["completion"], *row["prompt"]]
            for kind, prompt in (("one", row["prompt"]), ("sentence", other), ("switch", turns)):
                texts[kind].append({"prompt": prompt, "completion": row["completion"], "domain": "x"})
        self.prompts = {kind: [row["prompt"] for row in of_kind] for kind, of_kind in texts.items()}
        self.parts = {}
        for kind, of_kind in texts.items():
            self.parts[kind], self.collator = tokenized(
                Dataset.from_list(of_kind), study.tokenizer, preparation(4 * LONGEST)
            )
        none = []
        for row in study.none:
            labels = [-100] * (len(row["input_ids"]) - row["answer"]) + row["input_ids"][-row["answer"] :]
            mask = [int(label != -100) for label in labels]
            none.append({"input_ids": row["input_ids"], "domain": "x", "labels": labels, "completion_mask": mask})
        kept = self.parts["one"].column_names
        self.parts["none"] = Dataset.from_list([{key: row[key] for key in row if key in kept} for row in none])
        self.prompts["none"] = [[{"role": "user", "content": row["text"]}] for row in study.none]
        self.labels = {
            row["completion"][0]["content"] for task in self.tasks for row in study.train_rows(name, seed, task)
        }

    # --- ways --------------------------------------------------------------------------------------------------------

    def measured(self, way: Way) -> dict[str, Any]:
        if way.name in ("own", "base", "picked"):
            return self.result(*self.by_choice(way))
        with torch.enable_grad():
            model = getattr(self, way.name.split(",")[0].replace(" ", "_"))(way)
        model.eval()
        found = {kind: answers(model, part, self.collator) for kind, part in self.parts.items()}
        return self.result(found, greedy(model, self.study.tokenizer, self.study.far))

    def result(self, found: dict[str, list[Answer]], far: list[str], **more: Any) -> dict[str, Any]:
        none = found["none"]
        return {
            "right": {kind: "".join("01"[a.is_match] for a in found[kind]) for kind in KINDS},
            "loss": -sum(a.log_prob for a in found["one"]) / sum(a.tokens for a in found["one"]),
            "none_loss": -sum(a.log_prob for a in none) / sum(a.tokens for a in none),
            "labels": sum(answer in self.labels for answer in far) / len(far), **more,
        }  # fmt: skip

    def by_choice(self, way: Way) -> tuple[dict[str, list[Answer]], list[str]]:
        """Answers where each request has one LoRA, or (n) the base."""
        kinds = {**self.prompts, "far": self.study.far}
        chosen = {kind: [self.n] * len(prompts) for kind, prompts in kinds.items()}
        if way.name == "own":
            chosen |= dict.fromkeys(KINDS, self.own)
        if way.name == "picked":
            texts = {task: self.study.prompts(self.set, self.seed, task, way.rows) for task in self.tasks}
            gate = RequestGate.fit(self.study.base, texts, tokenizer=self.study.tokenizer)
            index = {name: i for i, name in enumerate([*self.tasks, None])}
            chosen = {kind: [index[name] for name in gate.pick(prompts)] for kind, prompts in kinds.items()}
        found: dict[str, list[Any]] = {kind: [None] * len(of_kind) for kind, of_kind in chosen.items()}
        for expert in sorted({i for of_kind in chosen.values() for i in of_kind}):
            model = self.study.base if expert == self.n else self.lora(expert)
            for kind, of_kind in chosen.items():
                rows = [i for i, one in enumerate(of_kind) if one == expert]
                if not rows:
                    continue
                if kind == "far":
                    made: Sequence[Any] = greedy(model, self.study.tokenizer, [self.study.far[i] for i in rows])
                else:
                    made = answers(model, self.parts[kind].select(rows), self.collator)
                for i, answer in zip(rows, made, strict=True):
                    found[kind][i] = answer
        return found, found.pop("far")

    def folders(self) -> list[Path]:
        return [self.study.folder(self.set, self.seed, task) for task in self.tasks]

    def lora(self, expert: int) -> Any:
        return PeftModel.from_pretrained(copy.deepcopy(self.study.base), self.folders()[expert]).eval()

    def mean(self, way: Way) -> Any:
        base = copy.deepcopy(self.study.base)
        loras = read_loras(base, self.folders())[0]
        A = {path: torch.cat([lora.A[path].double() / self.n for lora in loras]) for path in loras[0].A}
        return closed_form._as_peft(base, loras, A)

    def taught(self, way: Way) -> list[dict[str, Any]]:
        """Prompts of each task with their LoRA's answers; they are kept for the other ways."""
        file = self.study.work / f"taught-{self.set}-{self.seed}.json"
        if not file.exists():
            made = {}
            for i, task in enumerate(self.tasks):
                prompts = self.study.prompts(self.set, self.seed, task, max(PROMPTS))
                for kind, asked in (
                    ("one", prompts),
                    ("other", [said(prompt, other_writing(prompt[-1]["content"])) for prompt in prompts]),
                ):
                    texts = greedy(self.lora(i), self.study.tokenizer, asked)
                    made[f"{kind} {i}"] = [
                        {"prompt": prompt, "completion": [{"role": "assistant", "content": text}], "expert": i}
                        for prompt, text in zip(asked, texts, strict=True)
                        if text
                    ]
            with atomic_write(file) as partial:
                partial.write_text(json.dumps(made))
        saved = json.loads(file.read_text())
        rows = []
        for i in range(self.n):
            one, other = saved[f"one {i}"][: way.rows], saved[f"other {i}"][: way.rows]
            rows += one if way.name != "two writings" else [*one[::2], *other[1::2]]
        return rows

    def with_general(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A fifth of all rows are general texts with the base's answers."""
        general = [
            {"prompt": [{"role": "user", "content": row["text"]}],
             "completion": [{"role": "assistant", "content": self.study.answer_of(row)}], "expert": self.n}
            for row in self.study.general
        ]  # fmt: skip
        return [*rows, *(general[i % len(general)] for i in range(len(rows) // 4))]

    def regmean(self, way: Way) -> Any:
        rows = self.taught(way)
        if way.name != "regmean, without base":
            rows += [row for row in self.with_general(rows)[len(rows) :]][: len(self.study.general)]
        batches = calibration_batches(
            Dataset.from_list(rows), self.study.tokenizer, len(rows), max_length=LONGEST, columns=["expert"]
        )
        of_base = mock.patch.object(closed_form, "with_lora", lambda linears, lora, device: nullcontext())
        with of_base if way.name == "regmean, base inputs" else nullcontext():
            return regmean(copy.deepcopy(self.study.base), self.folders(), batches)

    def distilled(self, way: Way) -> Any:
        model = self.study.new_lora(8 * self.n if way.name.endswith("8n") else RANK)
        return self.fitted(model, self.with_general(self.taught(way)))

    two_writings = distilled

    def joint(self, way: Way) -> Any:
        rows = [row for task in self.tasks for row in self.study.train_rows(self.set, self.seed, task)]
        return self.fitted(self.study.new_lora(RANK), self.with_general(rows))

    def from_regmean(self, way: Way) -> Any:
        model = self.regmean(Way("regmean", way.rows))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        return self.fitted(model, self.with_general(self.taught(way)), STEPS // 2)

    def fitted(self, model: Any, rows: list[dict[str, Any]], steps: int = STEPS) -> Any:
        rows = [{"prompt": row["prompt"], "completion": row["completion"]} for row in rows]
        self.study.fit(model, rows, min(steps, 2 * self.study.steps), self.seed, batch=10)
        return model

    def KL(self, way: Way) -> Any:
        """The same rows in the same number of steps; the loss is KL(teacher ∥ pupil), a mean over answer tokens."""
        study, rows = self.study, self.with_general(self.taught(way))
        data, collator = tokenized(Dataset.from_list(rows), study.tokenizer, preparation(LONGEST))
        teacher: dict[int, torch.Tensor] = {}
        for expert in range(self.n + 1):
            model = study.base if expert == self.n else self.lora(expert)
            for i in (i for i, row in enumerate(data) if row["expert"] == expert):
                logits = _answer_logits(model, collator([data[i]]))
                teacher[i] = logits.detach().log_softmax(-1).half().cpu()
        pupil = study.new_lora(RANK).train()
        parameters = [p for p in pupil.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, RATE, weight_decay=0.0)
        steps = min(STEPS, 2 * study.steps)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        draw, order = random.Random(self.seed), []
        for _ in range(steps):
            while len(order) < 10:
                order += draw.sample(range(len(data)), len(data))
            batch, order = order[:10], order[10:]
            logits = _answer_logits(pupil, collator([data[i] for i in batch]))
            wanted = torch.cat([teacher[i] for i in batch]).to(logits.device).float()
            loss = F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return pupil


def _answer_logits(model: Any, batch: Any) -> torch.Tensor:
    """The logits before each answer token [N, V], row by row."""
    labels = batch["labels"].to(DEVICE)
    inputs = {name: batch[name].to(DEVICE) for name in ("input_ids", "attention_mask")}
    hidden = model.get_base_model().model if hasattr(model, "get_base_model") else model.model
    at = labels[:, 1:] != -100
    head = model.get_output_embeddings()
    with torch.set_grad_enabled(model.training):
        return head(hidden(**inputs).last_hidden_state[:, :-1][at])


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, prompts: Sequence[list[dict[str, str]]], rows: int = 40) -> list[str]:
    """Greedy answers of at most twice `ANSWER` tokens."""
    found = []
    for start in range(0, len(prompts), rows):
        batch = tokenizer.apply_chat_template(
            list(prompts[start : start + rows]), add_generation_prompt=True, padding=True,
            tokenizer_kwargs={"padding_side": "left"}, return_tensors="pt", return_dict=True,
        ).to(DEVICE)  # fmt: skip
        with greedy_decoding(model):
            ids = model.generate(**batch, max_new_tokens=2 * ANSWER, pad_token_id=tokenizer.pad_token_id)
        found += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [answer.strip() for answer in found]


# --- report ----------------------------------------------------------------------------------------------------------

CONTRASTS = (
    ("distilled; 240", "own; 0"), ("distilled; 240", "picked; 240"), ("distilled; 24", "picked; 24"),
    ("distilled; 240", "joint; 0"), ("regmean; 240", "own; 0"), ("regmean; 240", "mean; 0"),
    ("regmean; 24", "regmean; 240"), ("regmean, base inputs; 240", "regmean; 240"), ("KL; 240", "distilled; 240"),
    ("from regmean; 240", "distilled; 240"), ("two writings; 240", "distilled; 240"),
    ("distilled, rank 8n; 240", "distilled; 240"),
)  # fmt: skip


def report(ledger: Ledger) -> str:
    """The page of the runs that there are."""
    runs = [*{(r["set"], r["seed"], r["way"], r["rows"]): r for r in ledger.records() if "right" in r}.values()]
    lines = [
        "# One LoRA out of several",
        "",
        "`python -m studies.one_lora report` writes this page; the script's head says what was fixed before its first"
        " run. SmolLM2-135M-Instruct (out of a file of four bits, and back). Right answers in per cent, means over"
        " seeds and rows; *harm*: the loss per token of the base's own answers to general requests, above the base's;"
        " *labels*: out-of-scope requests that are answered with an answer of some task.",
    ]
    for name in SETS:
        of_set = [run for run in runs if run["set"] == name]
        if not of_set:
            continue
        lines += ["", f"## {name}", "", f"| way | prompts | seeds | {' | '.join(KINDS)} | loss | harm | labels |"]
        lines.append(f"|{'---|' * (6 + len(KINDS))}")
        base = {run["seed"]: run["none_loss"] for run in of_set if run["way"] == "base"}
        for way in WAYS:
            of = [run for run in of_set if (run["way"], run["rows"]) == way and run["seed"] in base]
            if of:
                cells = [way.name, str(way.rows or ""), str(len(of))]
                cells += [f"{100 * float(_right(of, kind).mean()):.1f}" for kind in KINDS]
                cells.append(f"{_mean(run['loss'] for run in of):.3f}")
                cells.append(f"{_mean(run['none_loss'] - base[run['seed']] for run in of):.3f}")
                cells.append(f"{100 * _mean(run['labels'] for run in of):.0f}")
                lines.append(f"| {' | '.join(cells)} |")
        lines += [
            "",
            f"| A − B, points, 95 % over rows | seeds | {' | '.join(KINDS)} |",
            f"|{'---|' * (2 + len(KINDS))}",
        ]
        for names in CONTRASTS:
            pair = [[r for r in of_set if f"{r['way']}; {r['rows']}" == one] for one in names]
            seeds = sorted({r["seed"] for r in pair[0]} & {r["seed"] for r in pair[1]})
            if seeds:
                a, b = ([next(r for r in of if r["seed"] == seed) for seed in seeds] for of in pair)
                cells = [over_rows((_right(a, kind) - _right(b, kind)).flatten()) for kind in KINDS]
                lines.append(f"| {names[0]} − {names[1]} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _right(runs: list[dict[str, Any]], kind: str) -> torch.Tensor:
    """[runs, rows]"""
    return torch.tensor([[int(x) for x in run["right"][kind]] for run in runs]).double()


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def _shrink() -> None:
    global SETS, SEEDS, PROMPTS, WAYS, STEPS
    SETS, SEEDS, PROMPTS, STEPS = ("short",), (10,), (6,), 2
    WAYS = tuple(dict.fromkeys(way._replace(rows=min(way.rows, 6)) for way in WAYS))


def main() -> None:
    command("one_lora", __doc__, OneLora, report, _shrink)


if __name__ == "__main__":
    main()
