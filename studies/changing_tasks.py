"""
Tasks that come and go: right answers with the gate for requests, removing one of eight domains, beginning a new one
from few rows, and two facts that two LoRAs know. SmolLM2-135M-Instruct.

    python -m studies.changing_tasks run --source FOLDER      # an hour of a CPU core a seed
    python -m studies.changing_tasks report                   # tables, in studies/results

Fixed before the first run. Tasks, rows, LoRAs and kinds of requests are those of `studies.requests`, of the sets
*short* and *domains*; seeds 2, 3 and 4, which that study has not used.

- *Measure*: the *base*, each request's *own* LoRA, and the LoRA that is *picked* by `RequestGate` as it is shipped
  (kernel ridge regression with a margin for the base) from 24 rows a task or all; requests alone, behind system
  prompts, as a chat's second turn, and general ones. *None*, *harm*: as there.
- *Removal*, of *domains*: each domain is taken out of the gate in turn. Right answers of the other domains' requests
  before and after; where the removed domain's requests go.
- *New domain*: two of the eight, drawn by the seed, are held out. 60 held-out rows of each are asked of the *base*, of
  what the six others' gate *picks*, and of LoRAs trained on 8 or 64 of its rows (20 or 40 steps of 8 rows, a rate that
  decays from 1e-3) that begin from *zero* or from the *nearest* of the six LoRAs: that to which the gate without a base
  sends most of these rows.
- *Two facts*: 24 made-up people work for 24 companies, which are in 8 cities. One LoRA learns who works where, another
  which company is where, a *joint* one of twice the rank both (60 steps; joint: 120). "In which city does NAME work?"
  is asked of each LoRA, of their *sum*, their *mean*, and the joint one.

Predictions, means over seeds.

1. *Picked* from all rows has at least .98 of what *own* has on *short* and .93 on *domains*; from 24 rows .9 and .75.
   90 % or more of the general requests are answered as by the base, with harm below .15 (in `studies.requests`, with a
   linear gate, it was .2 to .3).
2. Removal changes right answers of the others by less than a point (up, if anything), half of the removed domain's
   requests or more go to other domains, and less than 2 % of them are answered right.
3. A new domain has 0 to 3 % right without rows. *Nearest* is above *zero* by 5 points or more with 8 rows, and within 5
   points with 64.
4. Two facts: single questions at least 90 % right; the joint question at most 25 % in all ways (12.5 % are chance), as
   a model of this size does not join facts that it was not shown together.

What failed of the predictions:

- 1: general requests lose .31 per token on *short*, where .15 were expected, as 8 % go to an adapter (*domains*: .13).
- 2: 2.8 % of the removed domain's requests are answered right, not less than 2 (an intent that two domains share). That
  half or more go to other domains held, but it is 97 %.
- 3: *nearest* is above *zero* by 7.8 points with 64 rows, where at most 5 were expected (with 8: 6.4).
- 4: the single questions are 44 and 75 % right after 60 steps, not 90 (*joint*, after 120: all).
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from typing import Any

from datasets import Dataset
from peft import PeftModel
from transformers import set_seed

from moe_peft import RequestGate
from moe_peft.training.preparation import preparation, tokenized

from .exact_match import answers
from .request_gate import THEN
from .requests import FEW, HELD_OUT, KINDS, LONGEST, STEPS, Job, Measured, Requests, command, drawn
from .runs import Ledger

SEEDS = (2, 3, 4)
NEW_ROWS = {8: 20, 64: 40}  # rows of a new domain: steps
ASKED = 60
KINDS_HERE = [kind for kind in KINDS if kind != "two"]


class ChangingTasks(Requests):
    """As `Requests`, with other measurements of the same LoRAs."""

    def jobs(self) -> Iterator[Job]:
        done = {Job(run["set"], run["seed"], run["way"]) for run in self.ledger.records()}
        for seed in SEEDS:
            for name in ("domains", "short"):
                missing = [job for task in self.tasks[name] if (job := Job(name, seed, f"train {task}")) not in done]
                yield from missing
                whats = ("measure", "new domain") if name == "domains" else ("measure",)
                yield from (job for what in whats if not missing and (job := Job(name, seed, what)) not in done)
            if (job := Job("facts", seed, "two facts")) not in done:
                yield job

    def run(self, job: Job) -> None:
        started = time.monotonic()
        if job.what == "measure":
            self.measure(job)
        elif job.what == "new domain":
            self.new_domain(job)
        elif job.what == "two facts":
            self.two_facts(job)
        else:
            self.train(job.set, job.seed, job.what.removeprefix("train "))
        self.ledger.add({**job._asdict(), "way": job.what}, f"{time.monotonic() - started:.0f} s")

    # --- the tasks that there are ------------------------------------------------------------------------------------

    def measure(self, job: Job) -> None:
        measured = Measured(self, job)
        for parts in (measured.parts, measured.own, measured.texts):
            for kind in ("two", "two, other"):
                parts.pop(kind)
        n, tasks = measured.n, measured.tasks

        def note(way: str, rows: int, found: dict[str, Any], **more: Any) -> None:
            right = {kind: "".join("01"[a.is_match] for a in found[kind]) for kind in KINDS_HERE}
            record = {"set": job.set, "seed": job.seed, "way": way, "rows": rows, "right": right, **more}
            if of_none := found.get("none"):
                record["none"] = sum(a.is_match for a in of_none) / len(of_none)
                record["none_loss"] = -sum(a.log_prob for a in of_none) / sum(a.tokens for a in of_none)
            self.ledger.add(record, f"{right['one'].count('1') / len(right['one']):.1%}")

        note("base", 0, measured.forced({kind: [n] * len(part) for kind, part in measured.parts.items()}))
        note("own", 0, measured.forced(measured.own))
        index: dict[str | None, int] = {name: i for i, name in enumerate([*tasks, None])}
        for rows in (FEW, self.most_rows):
            prompts = {t: [r["prompt"] for r in self.train_rows(job.set, job.seed, t)[:rows]] for t in tasks}
            gate = RequestGate.fit(self.base, prompts, tokenizer=self.tokenizer)
            chosen = {kind: [index[name] for name in gate.pick(texts)] for kind, texts in measured.texts.items()}
            note("picked", rows, measured.forced(chosen), chosen=chosen)
        if job.set == "domains":
            for task in tasks:
                started = time.monotonic()
                picked = gate.without_adapter(task).pick(measured.texts["one"])
                seconds = time.monotonic() - started
                found = measured.forced({"one": [index[name] for name in picked]})["one"]
                right = "".join("01"[a.is_match] for a in found)
                record = {"set": job.set, "seed": job.seed, "way": "removed", "task": task, "chosen": picked}
                self.ledger.add({**record, "right": right, "seconds": seconds}, f"{right.count('1')}")

    # --- a new one ---------------------------------------------------------------------------------------------------

    def new_domain(self, job: Job) -> None:
        tasks = [*self.tasks[job.set]]
        held_out = random.Random(f"new {job.seed}").sample(tasks, 2)
        others = [task for task in tasks if task not in held_out]
        prompts = {t: [row["prompt"] for row in self.train_rows(job.set, job.seed, t)] for t in others}
        gate = RequestGate.fit(self.base, prompts, tokenizer=self.tokenizer)
        for task in held_out:
            asked = drawn(self.tasks[job.set][task]["test"], ASKED, job.seed, task)

            def note(way: str, rows: int, right: str, task: str = task, **more: Any) -> None:
                record = {"set": job.set, "seed": job.seed, "way": way, "task": task, "rows": rows, "right": right}
                self.ledger.add({**record, **more}, f"{right.count('1') / len(right):.1%}")

            note("new, base", 0, self.right(self.base, asked))
            picked = gate.pick([row["prompt"] for row in asked])
            right = ["0"] * len(asked)
            for name in sorted(set(picked), key=str):
                model = self.base if name is None else self.lora(job, name)
                of = [i for i, each in enumerate(picked) if each == name]
                for i, is_right in zip(of, self.right(model, [asked[i] for i in of]), strict=True):
                    right[i] = is_right
            note("new, picked", 0, "".join(right))
            for rows, steps in NEW_ROWS.items():
                few = self.train_rows(job.set, job.seed, task)[:rows]
                near = gate.without_adapter("base").pick([row["prompt"] for row in few])
                nearest = max(others, key=near.count)
                for way, start in (("zero", None), ("nearest", nearest)):
                    set_seed(job.seed)
                    model = self.lora(job, start, trained=True) if start else self.new_lora(8)
                    self.fit(model, few, steps, job.seed)
                    note(f"new, {way}", rows, self.right(model, asked), start=start)

    def lora(self, job: Job, task: str, trained: bool = False) -> Any:
        folder = self.folder(job.set, job.seed, task)
        return PeftModel.from_pretrained(copy.deepcopy(self.base), folder, is_trainable=trained)

    def right(self, model: Any, rows: list[dict[str, Any]]) -> str:
        table = Dataset.from_list([{**row, "domain": "x"} for row in rows])
        part, collator = tokenized(table, self.tokenizer, preparation(4 * LONGEST))
        return "".join("01"[answer.is_match] for answer in answers(model.eval(), part, collator))

    # --- two facts ---------------------------------------------------------------------------------------------------

    def two_facts(self, job: Job) -> None:
        first, second, both = facts(job.seed)
        parts = {"who": first, "where": second, "both": both}
        models = {}
        trainings = {"who": (first, 8, STEPS), "where": (second, 8, STEPS), "joint": (first + second, 16, 2 * STEPS)}
        for way, (rows, rank, steps) in trainings.items():
            set_seed(job.seed)
            models[way] = self.new_lora(rank)
            self.fit(models[way], rows, self.steps * steps // STEPS, job.seed)
            models[way].save_pretrained(str(self.folder("facts", job.seed, way)))
        two = PeftModel.from_pretrained(copy.deepcopy(self.base), self.folder("facts", job.seed, "who"), "who")
        two.load_adapter(self.folder("facts", job.seed, "where"), "where")
        for way, weight in (("sum", 1.0), ("mean", 0.5)):
            two.add_weighted_adapter(["who", "where"], [weight, weight], way, combination_type="cat")
        for way in (*trainings, "sum", "mean"):
            if way not in models:
                two.set_adapter(way)
            right = {part: self.right(models.get(way, two), rows) for part, rows in parts.items()}
            self.ledger.add({"set": "facts", "seed": job.seed, "way": f"facts, {way}", "right": right}, f"{right}")


def facts(seed: int) -> tuple[list[dict[str, Any]], ...]:
    """Who works for which company, which city each company is in, and in which city each of them works."""
    draw = random.Random(f"facts {seed}")
    first = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana"]
    last = ["Abbot", "Brook", "Carver", "Dixon", "Ellis", "Frost"]
    people = draw.sample([f"{a} {b}" for a in first for b in last], 24)
    starts = ["Bright", "Silver", "North", "Clear", "Green", "Iron"]
    companies = draw.sample([f"{a}{b}" for a in starts for b in ("wood", "field", "stone", "works", "line")], 24)
    cities = ["Lisbon", "Oslo", "Cairo", "Lima", "Delhi", "Tokyo", "Rome", "Perth"]
    city_of = {company: cities[i % len(cities)] for i, company in enumerate(companies)}

    def row(question: str, answer: str) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": question}],
                "completion": [{"role": "assistant", "content": answer}]}  # fmt: skip

    who = [row(f"Which company does {p} work for?", c) for p, c in zip(people, companies, strict=True)]
    where = [row(f"In which city is {c}?", city_of[c]) for c in companies]
    both = [row(f"In which city does {p} work?", city_of[c]) for p, c in zip(people, companies, strict=True)]
    return who, where, both


# --- report ----------------------------------------------------------------------------------------------------------


def report(ledger: Ledger) -> str:
    """The page of the runs that there are."""
    runs = [run for run in ledger.records() if "right" in run]
    lines = [
        "# Tasks that come and go",
        "",
        "`python -m studies.changing_tasks report` writes this page; the script's head says what was fixed before its"
        " first run. SmolLM2-135M-Instruct; right answers in per cent, means over seeds and rows.",
        "",
        THEN,
    ]
    for name in ("short", "domains"):
        of_set = [run for run in runs if run["set"] == name and "rows" in run and "task" not in run]
        base = {run["seed"]: run["none_loss"] for run in of_set if run["way"] == "base"}
        if not base:
            continue
        lines += ["", f"## {name}", "", f"| way | rows | seeds | {' | '.join(KINDS_HERE)} | none | harm |"]
        lines += [f"|{'---|' * 8}"]
        for way, rows in dict.fromkeys((run["way"], run["rows"]) for run in of_set):
            of_way = [run for run in of_set if (run["way"], run["rows"]) == (way, rows)]
            cells = [way, {0: "", FEW: str(FEW)}.get(rows, "all"), str(len(of_way))]
            cells += [_share(run["right"][kind] for run in of_way) for kind in KINDS_HERE]
            if "none" in of_way[0]:
                harm = [run["none_loss"] - base[run["seed"]] for run in of_way]
                cells += [f"{100 * _mean(run['none'] for run in of_way):.0f}", f"{_mean(harm):.3f}"]
            lines.append(f"| {' | '.join([*cells, '', ''][:8])} |")
    if removed := [run for run in runs if run["way"] == "removed"]:
        lines += ["", "## A domain removed", ""]
        before, after, gone, to_base, own = "", "", "", 0, 0
        rows = HELD_OUT["domains"]
        for run in removed:
            picked = next(r for r in runs if r["set"] == "domains" and r["seed"] == run["seed"]
                          and r["way"] == "picked" and r["rows"] > FEW)["right"]["one"]  # fmt: skip
            names = [other["task"] for other in removed if other["seed"] == run["seed"]]
            at = slice(rows * names.index(run["task"]), rows * (names.index(run["task"]) + 1))
            gone += run["right"][at]
            to_base, own = to_base + run["chosen"][at].count(None), own + rows
            before += picked[: at.start] + picked[at.stop :]
            after += run["right"][: at.start] + run["right"][at.stop :]
        lines.append(
            f"{len(removed)} removals, {_mean(run['seconds'] for run in removed):.1f} s each. The others' requests:"
            f" {_share([before])} % right before, {_share([after])} % after. Of the removed domain's"
            f" {100 * to_base / own:.0f} % go to the base, and {_share([gone])} % are answered right."
        )
    if new := [run for run in runs if run["way"].startswith("new, ")]:
        lines += ["", "## A new domain", "", "| way | rows | domains | right |", "|---|---|---|---|"]
        for way, of in dict.fromkeys((run["way"], run["rows"]) for run in new):
            of_way = [run["right"] for run in new if (run["way"], run["rows"]) == (way, of)]
            lines.append(f"| {way.removeprefix('new, ')} | {of} | {len(of_way)} | {_share(of_way)} |")
    if two := [run for run in runs if run["set"] == "facts"]:
        lines += ["", "## Two facts", "", "| way | seeds | who | where | both |", "|---|---|---|---|---|"]
        for way in dict.fromkeys(run["way"] for run in two):
            of_way = [run["right"] for run in two if run["way"] == way]
            cells = [_share(right[part] for right in of_way) for part in ("who", "where", "both")]
            lines.append(f"| {way.removeprefix('facts, ')} | {len(of_way)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def _share(matches: Any) -> str:
    """Of right answers, texts of 0 and 1."""
    return f"{100 * _mean(map(int, ''.join(matches))):.1f}"


def shrink() -> None:
    global SEEDS, ASKED
    SEEDS, ASKED = (2,), 3
    NEW_ROWS.update({8: 1, 64: 1})


def main() -> None:
    command("changing_tasks", __doc__, ChangingTasks, report, shrink)


if __name__ == "__main__":
    main()
