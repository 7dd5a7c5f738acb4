"""
Which adapter a request is for, however it is written. SmolLM2-135M-Instruct; choices alone, so no adapter is needed.

    python -m studies.writings run --source FOLDER   # ten minutes of a CPU core a set and seed
    python -m studies.writings report                # the tables, in studies/results

Before this study the gate read each text as it stood, with one list of general sentences and a margin of .1. It had
learned the form of its texts beside their matter: of out-of-scope questions in the form of the adapters' own 7 % went
to the base.

Sets: *short* (four short tasks) and *domains* (eight look-alike domains of clinc150), as in `studies.requests`; 240 or
24 texts of each adapter; three draws of texts and held-out rows (40 of a task, 30 in *domains*).

Own requests, from held-out rows: *data*, as they stand; *sentence*, with a capital and a mark; *lower*, without marks;
*capitals*; *typos*, in about a third of longer words; *polite*, a sentence between two or three others; *polite, run
on*, the same without marks of its own; *before* and *after* a document of 100 to 130 words; *examples*, behind two
questions with answers; *second*, the first turn of a chat whose last message refers to it; *switch*, after another
adapter's request. For the base: *quoted*, own requests inside requests about them; *oos*, 300 of clinc150's
out-of-scope test questions; *oos, sentence*; *near*, neighbours (other intents of Snips and domains of clinc150);
*near, same bank*, the other 62 intents of banking77 where an adapter has fifteen; *kinds*, word problems, programming
tasks, quizzes and yes-no questions of other data sets; *strange*, 20 lines by hand in languages and writings that no
list has.

Ways: *before*, the gate as it was; *now*; *now* without one remedy each: one form for all texts, the new general texts
(with the old ones), parts, the list of requests about a text, the list of messages that refer back;
*words*, n-grams of characters in place of hidden states; *own log*, 100 of the out-of-scope validation questions as
general texts in addition.

What chose: lists, λ, thresholds and this choice of remedies were set with two draws (20, 21) of training rows, the
out-of-scope validation questions, and other polite sentences, documents, quotations and references than the ones here;
and then with the requests of this study, seed 30 of *short*, which is therefore not reported: it took away a remedy
(every second text a second time with typing errors: *typos* 84 → 94 %, but *polite* 98 → 82 and *quoted* 89 → 78 %)
and set the share that may go to the base at .03 (.02: *oos* 71 for 78 %; .05: *data* 93 for 98 %). Tried before that
and without gain: words and characters added to the hidden states, own texts behind greetings, a floor under an
adapter's score, a narrower kernel, a larger margin for parts.

Fixed before the run, means over draws, *now* with 240 texts:

1. *Data* at least 95 % on *short* and 92 % on *domains*; *sentence*, *lower* and *capitals* the same within 1 point.
2. *Before*, *after*, *examples* and *polite* at least 90 %; *typos* 75 to 88 %; *polite, run on* 60 to 85 %.
3. *Second* at least 78 %, *switch* within 1 point of *data*; *quoted* at least 85 %.
4. *Oos* at least 72 % with the lists of the package, 5 points more with *own log*, at no more than 2 points of *data*.
5. *Near* 45 to 75 %, *near, same bank* below 30 %: an adapter is not told from what its texts do not exclude.
6. The gate as it was (*before*) has less than 15 % of *oos* on *domains*, and less than 10 % of requests *before* and
   *after* a document.
7. Each remedy that is left out loses 5 points or more somewhere on both sets.
8. *Words* lose 3 points or more of *data* on *domains*, and 20 or more of *before* and *after*.
9. With 24 texts *now* has 75 % of *data* on *short* and 70 % on *domains*, fewer than *before* on *short*, and 80 % of
   *oos*.

Run so far: draws 31 and 32 of both sets. What failed: 2 in part (*typos* 89 % on *short*, better than predicted), 3 on
*domains* (*quoted* 78 %), 4 on *domains* (*oos* 67 %, 4 points more with *own log*), 8 (*words* have as much of *data*
as *now* on *domains*, and of *before* and *after*; on *short* they lose 29 points there), 9 (*oos* 76 and 67 %). What
nobody predicted: on *short* *oos* is 89 % with texts as they stand, 73 % in one form; the form told something there.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import RequestGate
from moe_peft.combine import request_gate, request_texts
from moe_peft.combine.request_gate import ABOUT, AS_BEFORE, BASE, FILLER
from moe_peft.combine.request_texts import neutral_requests, one_form

from .request_gate import first_general_texts, general_kinds
from .requests import all_tasks, drawn, slots_of
from .runs import Ledger, parser, work

RESULTS = Path(__file__).parent / "results"
SETS, SEEDS, HELD_OUT, ROWS = ("short", "domains"), (31, 32, 33), {"short": 40, "domains": 30}, (240, 24)
POLITE = (
    "Hello from Lisbon! It is the first time that I write to you, and I am a little nervous. {} Wishing you a lovely "
    "weekend, yours truly, Henrique",
    "I know you must be terribly busy. My wife told me that you always find an answer. {} We would both be delighted!",
    "Hey team, great work last month, everybody here was impressed. One small thing from my side. {} Cheers, Jo",
)
DOCUMENTS = (
    "The town theatre opened its season on Saturday with a comedy that has not been seen here for thirty years. "
    "The hall was full, and the applause lasted for ten minutes. The young director moved the action to a railway"
    " station in the nineteen-fifties. Not every joke survived the journey, but the actors played with such joy "
    "that nobody minded. The stage was almost empty: two benches, a clock, a lamp. In the second half a goose "
    "escaped and had to be caught by the orchestra. After the last performance in June the building will be "
    "closed, because the roof and the heating must be renewed. The mayor has promised that it will open again "
    "within two years.",
    "Subject: Garden fence\n\nDear neighbours,\nas you may have noticed, the fence between our gardens fell over in "
    "the storm last week. I have talked to the carpenter in Mill Lane. He can put up a new one in larch or in "
    "spruce. Larch lasts longer and costs a third more. He would need two days and could begin on the twentieth. "
    "I suggest that we share the bill, as we did with the hedge. The old posts can stay, he says. Tell me which "
    "wood you like better, and whether the colour should be the same as before.\nWarm regards,\nGreta",
    "Granite is a coarse rock that formed when molten material cooled slowly deep below the surface. It is mostly"
    " quartz and feldspar, with dark grains of mica. Because the crystals had time to grow, they can be seen with"
    " the naked eye. Granite is hard and weathers slowly, so it was used for bridges, kerbs and monuments. Where "
    "it is exposed, it often breaks into rounded blocks that look as if giants had piled them up. The soil above "
    "it is poor and sour, and heather likes it. Large quarries are found in Finland, Portugal and Brazil.",
)
QUOTED = (
    "What is the Greek for: {}", "I want this in Hungarian: {}", "Please check the spelling of the following. {}",
    'How many syllables does "{}" have?', "Write the following sentence backwards. {}",
    'My son said "{}" in his sleep. Isn\'t that funny?', 'Which tense is used in "{}"?',
    "Make a rhyme out of this line: {}", "Turn the next line into a headline. {}",
)  # fmt: skip
REFERS = (
    "and for Lisbon?", "Please do it a second time.", "What if it is raining?", "No, the green one.",
    "ok, and the day after that", "Same question for my mother.", "and the larger one",
    "Could you do that for May too?",
    "And how much longer than that?", "hm, what about the others", "and with two of them?", "not him, her",
)  # fmt: skip
STRANGE = (
    "Mikä on Suomen pääkaupunki?", "Ποια είναι η πρωτεύουσα της Ελλάδας;", "Thủ đô của Việt Nam là gì?",
    "Mi Magyarország fővárosa?", "Jaké je hlavní město Česka?", "Apa ibu kota Indonesia?",
    "мне скучно, расскажи сказку",
    "Was kostet ein Kilo Gold?", "raconte-moi la vie de Molière", "qué es un agujero negro",
    "lorem ipsum dolor sit amet",
    "qwertz uiop", "!!!", "12345", "WHY IS THE SEA SALTY", "hpow od bees fnid thier hvie", "zzz", "<br/>", "y tho",
    "k thx",
)  # fmt: skip
ASKS = ("what", "who", "how", "when", "where", "why", "which", "can", "is", "are", "do", "does", "will", "could")
Turns = list[str]


class Job(NamedTuple):
    """A set of tasks with the rows of a seed."""

    set: str
    seed: int


def sentence(text: str) -> str:
    text = text.strip()
    mark = "" if text[-1:] in ".?!" else "?" if text.split(maxsplit=1)[0].lower() in ASKS else "."
    return text[:1].upper() + text[1:] + mark


def lower(text: str) -> str:
    return re.sub(r"[.?!,;:]+(?=\s|$)", "", text.lower()).strip()


def misspelled(text: str, draw: random.Random) -> str:
    words = text.split(" ")
    for i, word in enumerate(words):
        if len(word) > 3 and draw.random() < 0.3:
            at = draw.randrange(1, len(word) - 1)
            swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
            words[i] = draw.choice((swapped, word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:]))
    return " ".join(words)


def written(rows: list[tuple[int, str, str]], n: int, draw: random.Random) -> dict[str, list[tuple[int, Turns]]]:
    """Writing → for each of the rows (adapter, question, answer) the adapter that is right (n: the base), and turns."""
    found: dict[str, list[tuple[int, Turns]]] = {}

    def add(kind: str, right: int, *turns: str) -> None:
        found.setdefault(kind, []).append((right, [*turns]))

    for j, (i, text, _) in enumerate(rows):
        document, polite = DOCUMENTS[j % len(DOCUMENTS)], POLITE[j % len(POLITE)]
        shown = draw.sample([row for row in rows if row[0] == i and row[1] != text], 2)
        before = draw.choice([row for row in rows if row[0] != i])
        add("data", i, text)
        add("sentence", i, sentence(text))
        add("lower", i, lower(text))
        add("capitals", i, text.upper())
        add("typos", i, misspelled(text, draw))
        add("polite", i, polite.format(sentence(text)))
        add("polite, run on", i, polite.format(lower(text)))
        add("before", i, f"{text}\n\n{document}")
        add("after", i, f"{document}\n\n{text}")
        add("examples", i, "".join(f"Q: {q}\nA: {a}\n\n" for _, q, a in shown) + f"Q: {text}\nA:")
        add("second", i, text, REFERS[j % len(REFERS)])
        add("switch", i, before[1], text)
        add("quoted", n, QUOTED[j % len(QUOTED)].format(text))
    return found


class CachedGate(RequestGate):
    """A gate that remembers what it read."""

    known: dict[str, torch.Tensor]

    def read(self, requests: Any, batch_size: int = 16) -> torch.Tensor:
        texts = [request_gate.one_form(request_gate.request_text(request)) for request in requests]
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        if new:
            with mock.patch.object(request_gate, "one_form", str):
                self.known.update(zip(new, super().read(new, batch_size).half(), strict=True))
        return torch.stack([self.known[text] for text in texts]).float() if texts else super().read(requests)


class Grams:
    """Vectors of a text's n-grams of characters within words, [1, F], hashed and weighted by how rare they are."""

    def __init__(self, texts: list[str], size: int = 8192) -> None:
        self.size = size
        present = sum((self.counts(text) > 0).double() for text in texts)
        self.weight = (len(texts) / (1 + present)).log().clamp_min(0)

    def counts(self, text: str) -> torch.Tensor:
        found = torch.zeros(self.size)
        for word in one_form(text).split():
            for length in range(2, 6):
                for at in range(max(1, len(word) + 3 - length)):
                    found[zlib.crc32(f" {word} "[at : at + length].encode()) % self.size] += 1
        return found

    def __call__(self, text: str) -> torch.Tensor:
        x = (self.counts(text).log1p() * self.weight).float()
        return (x / x.norm().clamp_min(1e-6))[None]


class Writings:
    """
    Args:
        source: the folder of the data sets.
        work: a folder for locks.
    """

    def __init__(self, source: Path, work: Path, ledger: Ledger) -> None:
        self.source, self.work, self.ledger = source, work, ledger
        self.work.mkdir(parents=True, exist_ok=True)
        self.tasks = all_tasks(source)
        tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
        model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
        self.gate = CachedGate(model.eval(), request_gate.RequestReader(tokenizer, True), {})
        CachedGate.known = {}
        self.old = first_general_texts()
        clinc = json.loads((source / "clinc150/data_full.json").read_text())
        self.log = random.Random(0).sample([text for text, _ in clinc["oos_val"]], 100)
        self.clinc, self.domains = clinc, json.loads((source / "clinc150/domains.json").read_text())

    def jobs(self) -> Iterator[Job]:
        done = {Job(run["set"], run["seed"]) for run in self.ledger.records()}
        yield from (job for seed in SEEDS for name in SETS if (job := Job(name, seed)) not in done)

    def run(self, job: Job) -> None:
        tasks = self.tasks[job.set]
        own, rows = {}, []
        for i, task in enumerate(tasks):
            own[task] = [row["prompt"][-1]["content"] for row in drawn(tasks[task]["train"], max(ROWS), job.seed, task)]
            held_out = drawn(tasks[task]["test"], HELD_OUT[job.set], job.seed, task)
            rows += [(i, row["prompt"][-1]["content"], row["completion"][-1]["content"]) for row in held_out]
        asked = written(rows, len(tasks), random.Random(f"writings {job.seed}"))
        asked |= {kind: [(len(tasks), [text]) for text in texts] for kind, texts in self.for_none(job).items()}
        records = []
        for count in ROWS:
            texts = {task: of_task[:count] for task, of_task in own.items()}
            for way, gate in self.ways(texts, all_of=count == max(ROWS)):
                found = {}
                for kind, requests in asked.items():
                    picked = self.picked(way, gate, [turns for _, turns in requests])
                    names = [*tasks, None]
                    right = [name == names[i] for name, (i, _) in zip(picked, requests, strict=True)]
                    wrong = [name not in (names[i], None) for name, (i, _) in zip(picked, requests, strict=True)]
                    found[kind] = ["".join(map(str, map(int, of))) for of in (right, wrong)]
                margin = gate.margin
                records.append({**job._asdict(), "rows": count, "way": way, "margin": margin, "found": found})
        for record in records:  # together: a job is done or not
            data = record["found"]["data"][0]
            self.ledger.add(record, f"{record['way']}, {record['rows']}: {data.count('1') / len(data):.1%}")

    def ways(self, own: dict[str, Turns], all_of: bool) -> Iterator[tuple[str, RequestGate]]:
        """The ways, each with a gate fitted to the adapters' texts."""
        yield "now", (now := self.fitted(own, neutral_requests()))
        yield "own log", self.fitted(own, [*neutral_requests(), *self.log])
        with self.as_it_stands():
            old = self.fitted(own, self.old)
            yield "before", dataclasses.replace(old, lists={}, fixed_margin=0.1)
        if not all_of:
            return
        with self.as_it_stands():
            yield "now, texts as they stand", self.fitted(own, neutral_requests())
        yield "now, old general texts", self.fitted(own, self.old)
        with mock.patch.object(request_gate, "parts_of", lambda text: []):
            yield "now, no parts", now
        lists = {name: now.lists[name] for name in (FILLER, AS_BEFORE)}
        empty = now.lists[ABOUT][:0]
        quoted = {name: dataclasses.replace(of, quoted=empty) for name, of in now.texts.items()}
        with mock.patch.object(request_gate, "CLEARLY_ABOUT", 9.0):
            yield (
                "now, nothing about a text",
                dataclasses.replace(now, texts=quoted, lists={ABOUT: now.lists[ABOUT][:1], **lists}),
            )
        yield (
            "now, no messages that refer back",
            dataclasses.replace(now, lists={**now.lists, AS_BEFORE: now.lists[AS_BEFORE][:1]}),
        )
        grams = Grams([*neutral_requests(), *(text for of_name in own.values() for text in of_name)])
        known, CachedGate.known = CachedGate.known, _Made(grams)
        with mock.patch.object(RequestGate, "read", lambda gate, texts, batch_size=16: torch.zeros(0, 1, grams.size)):
            yield "words", self.fitted(own, neutral_requests())
        CachedGate.known = known

    def fitted(self, own: dict[str, Turns], general: Turns) -> RequestGate:
        lists = {name: self.gate.read(request_texts.read_list(name)) for name in (ABOUT, FILLER, AS_BEFORE)}
        gate: RequestGate = dataclasses.replace(self.gate, lists=lists)
        for name, texts in {**own, BASE: general}.items():
            gate = gate.with_adapter(name, texts)
        return gate

    def as_it_stands(self) -> Any:
        return mock.patch.object(request_gate, "one_form", str.strip)

    def picked(self, way: str, gate: RequestGate, requests: list[Turns]) -> list[str | None]:
        chats = [[{"role": "user", "content": text} for text in turns] for turns in requests]
        return gate.pick(chats)

    def for_none(self, job: Job) -> dict[str, Turns]:
        """Requests for no adapter, by kind."""
        draw = random.Random(f"none {job.seed}")
        oos = draw.sample([text for text, _ in self.clinc["oos_test"]], 300)
        intents = ("AddToPlaylist", "BookRestaurant", "RateBook", "SearchScreeningEvent")
        snips = [text for intent in intents for text, _ in slots_of(self.source, intent).held_out]
        if job.set == "short":
            own = {*self.domains["kitchen_and_dining"], *self.domains["banking"], *self.domains["credit_cards"]}
            near = [text for text, intent in self.clinc["test"] if intent not in own]
        else:
            other = {*self.domains["small_talk"], *self.domains["meta"]}
            near = [text for text, intent in self.clinc["test"] if intent in other]
        kinds = [text for kind in general_kinds(self.source, "test") for text in draw.sample(kind, 25)]
        found = {
            "oos": oos, "oos, sentence": [*map(sentence, oos)],
            "near": draw.sample(snips, 60) + draw.sample(near, 60), "kinds": kinds, "strange": [*STRANGE],
        }  # fmt: skip
        if job.set == "short":
            with (self.source / "banking77/test.csv").open() as file:
                bank = [(row["text"], row["category"]) for row in csv.DictReader(file)]
            ours = {*sorted({category for _, category in bank})[:15]}
            found["near, same bank"] = draw.sample([text for text, category in bank if category not in ours], 100)
        return found


class _Made(dict[str, torch.Tensor]):
    """Vectors that are made when they are asked for."""

    def __init__(self, make: Callable[[str], torch.Tensor]) -> None:
        self.make = make

    def __contains__(self, text: object) -> bool:
        return True

    def __missing__(self, text: str) -> torch.Tensor:
        self[text] = self.make(text)
        return self[text]


# --- report ----------------------------------------------------------------------------------------------------------


def report(ledger: Ledger) -> str:
    """The page of the runs that there are."""
    lines = [
        "# How a request is written",
        "",
        "`python -m studies.writings report` writes this page; the script's head says what was fixed before the run."
        " Requests that go where they belong, in per cent: own ones to their adapter, the others to the base; means"
        " over draws. *Wrong*: the largest share of own requests in one writing that goes to another adapter, *polite,"
        " run on* apart.",
    ]
    for name in SETS:
        for rows in ROWS:
            runs = [run for run in ledger.records() if (run["set"], run["rows"]) == (name, rows)]
            if not runs:
                continue
            seeds, kinds = len({run["seed"] for run in runs}), [*runs[0]["found"]]
            ways = [*dict.fromkeys(run["way"] for run in runs)]
            lines += ["", f"## {name}, {rows} texts of each adapter, {seeds} draws", ""]
            lines += [f"| | {' | '.join(ways)} |", f"|{'---|' * (1 + len(ways))}"]
            for kind in kinds:
                cells = [f"{_share(runs, way, kind):.1f}" for way in ways]
                lines.append(f"| {kind} | {' | '.join(cells)} |")
            own = [kind for kind in kinds[: kinds.index("quoted")] if kind != "polite, run on"]
            worst = [max(_share(runs, way, kind, 1) for kind in own) for way in ways]
            lines.append(f"| *wrong* | {' | '.join(f'{value:.1f}' for value in worst)} |")
            margins = [[run["margin"] for run in runs if run["way"] == way] for way in ways]
            lines.append(f"| *margin* | {' | '.join(f'{sum(of) / len(of):.2f}' for of in margins)} |")
    return "\n".join(lines) + "\n"


def _share(runs: list[dict[str, Any]], way: str, kind: str, which: int = 0) -> float:
    """Per cent of requests, a mean over draws."""
    found = [run["found"][kind][which] for run in runs if run["way"] == way]
    return 100 * sum(of.count("1") / len(of) for of in found) / len(found)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--source", type=Path, default=Path("data"))
    options.add_argument("--small", action="store_true", help="few rows and one draw, to test the script")
    args = options.parse_args()
    ledger = Ledger((args.work / "small.jsonl") if args.small else RESULTS / "writings.jsonl")
    if args.small:
        _shrink()
    if args.command == "report":
        page = report(ledger)
        if not args.small:
            (RESULTS / "writings.md").write_text(page)
        return print(page)
    work(Writings(args.source, args.work / "writings", ledger))


def _shrink() -> None:
    global SETS, SEEDS, ROWS
    SETS, SEEDS, ROWS = ("short",), (31,), (12, 6)
    HELD_OUT.update(short=3)


if __name__ == "__main__":
    main()
