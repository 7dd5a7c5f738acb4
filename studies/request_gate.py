"""
One gate for a request: which LoRA answers, and whether any should. SmolLM2-135M-Instruct.

    python -m studies.short_tasks --source FOLDER --output .cache/short_tasks
    python -m studies.request_gate run --source FOLDER [--workers 2]   # resumes where the ledger ends
    python -m studies.request_gate report                              # tables, in studies/results

Fixed before the first run. Two sets of tasks, with a LoRA of rank 8 on the FFNs for each task (60 steps of 8 rows, a
rate that decays from 1e-3): *short*, four of the short tasks, which their prompts tell apart (100 held-out rows each);
and *domains*, eight look-alike domains of clinc150 (60 held-out rows each). Three seeds, of the trainings and of the
rows that set gates: 24 of each task, and all that a task has been trained on (150 and 240). No row that sets a gate is
held out. Measured: right answers (greedy decoding gives the answer exactly), loss per answer token, the share of rows
whose choice is their own task, and *harm*: on 64 general texts (word problems, code, quizzes, yes-no questions of other
data sets; the gate's own general texts have sections of these kinds), the loss per token above the base's, and the
share sent to the base.

A gate is ridge regression, from the inputs of the FFNs to the expert whose text it is:

- *tokens*: as `moe-peft mix` sets gates today, of all tokens of a row, λ = 0.01, columns of norm 1;
- *prompts*: of the mean over the tokens of a row's prompt, one row a text, classes of equal weight, λ = 0.1; with
  *base*, one class more, of 190 general texts of our own (`studies/first_general_texts.txt`), which has no update.

Ways to use it:

- *token*: every token in every layer goes where its own score is largest (today);
- *text so far*: … where the mean of the scores of the tokens up to it is largest; *over layers*: summed over the
  routers so far; *first eight*: so, and from the eighth router on as that one has it; *when sure*: summed over layers,
  and the base until the best score of the mean is 0.2 above the second;
- *picked*: one LoRA for the row, by the mean over its prompt: *today* of softmaxes of the gates *tokens* in all layers;
  else of the scores of *prompts* in the first eight layers, or in all;
- *own*, the *mean* of the LoRAs, and the *base*.

What decides: a scope other than *token* is built for users if it has more right answers than *token* with the same
rows on both sets (the interval over rows and seeds excludes 0) and is at most 2 points below *picked*.

Added after the first training, as time was short: seeds 1 and 2 have *token* from tokens, *text so far, over layers*,
*picked* from eight layers and today, *own* and the *mean*; what the first training left behind is not run again.

Predictions.

1. *Picked* of *prompts* from eight layers chooses as well as from all (within 2 points), and on *domains* with all rows
   at least 90 % right; its right answers are then more than 0.85 of what *own* has.
2. It beats *picked* as today on *domains* with all rows, and does not differ on *short*.
3. *Token* from *prompts* has as many right answers as *token* from *tokens* (within 2 points): a gate can be set from
   one vector a text.
4. *Text so far, over layers* beats *token* on both sets, is within 2 points of *picked* on *short*, and is more than 2
   points below it on *domains*. *First eight* is level with it; *when sure* is worse on both.
5. *Base* costs *picked* at most 1 point of right answers with all rows and up to 3 with 24. Harm: *token* without it
   more than 0.3 above the base's loss; *picked* with it less than 0.05, and 90 % of general texts go to the base.
6. *Base* in *token* scope takes away at least half of its harm and costs up to 3 points of right answers.

What failed: 2 (with all rows of *domains* +1.4 points [−.1, 2.9] only), 3 (*token* from *prompts* has 8 to 21 points
fewer, where 2 were to be), 4 in part, 6 (*base* costs 6 to 14 points on *short*).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import force_experts, init_gates, lora_to_moe
from moe_peft.adapter.router_recorder import state
from moe_peft.models.gates import uniform_gates
from moe_peft.models.introspection import base_passes
from moe_peft.models.layer import AdapterLayer, routed_layers
from moe_peft.routing.routers import LinearRouter
from moe_peft.training.preparation import calibration_batches, preparation, tokenized

from .exact_match import Answer, answers, by_task, pick_experts
from .growing import TASKS as DOMAINS
from .growing import _read as read_domains
from .runs import DEVICE, Ledger, arguments, parser, score_answers_only, start_workers, work
from .short_tasks import _json, _lines

RESULTS = Path(__file__).parent / "results"
THEN = (
    "The gate is the package's first: it read texts as they stand, with a margin of .1 or none, and its general texts"
    " (`studies/first_general_texts.txt`) have sections of the kinds that are asked for the base here. Requests written"
    " otherwise, and general ones of other kinds, are in [how a request is written](writings.md)."
)
SETS = {"short": ("banking", "kitchen", "logic", "slots"), "domains": DOMAINS}
HELD_OUT = {"short": 100, "domains": 60}
ROWS = {"short": (24, 150), "domains": (24, 240)}  # that set gates
TRAIN = {"short": 200, "domains": 240}
SEEDS = (0, 1, 2)
STEPS, LEARNING_RATE, LONGEST, FIRST = 60, 1e-3, 64, 8
SURE = 0.2
SCOPES = ("token", "text so far", "over layers", "first eight", "when sure")


class Job(NamedTuple):
    """A run to be made: the training of a task's LoRA, or all measurements of a set."""

    set: str
    seed: int
    what: str


class Scope:
    """
    How scores become a choice, for all routers of a model.

    Args:
        kind: one of `SCOPES`.
        num_experts: how many have an update; what follows is the base.
    """

    def __init__(self, kind: str, num_experts: int) -> None:
        self.kind, self.n = kind, num_experts
        self.total: Any = 0.0

    def choose(self, layer: int, scores_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        collection = state.current.collection
        assert collection is not None and collection.attention_mask is not None
        mask_BS1 = collection.attention_mask.unsqueeze(-1).to(scores_TN)
        scores_BSN = scores_TN.view(*mask_BS1.shape[:2], -1)
        if self.kind != "token":
            count_BS1 = mask_BS1.cumsum(1).clamp(min=1)
            scores_BSN = (scores_BSN * mask_BS1).cumsum(1) / count_BS1
        if self.kind not in ("token", "text so far"):
            if layer == 0:
                self.total = 0.0
            if self.kind != "first eight" or layer < FIRST:
                self.total = self.total + scores_BSN
            scores_BSN = self.total / (layer + 1)
        best, experts = scores_BSN.flatten(0, 1).topk(2, -1)
        chosen_T = experts[:, 0]
        if self.kind == "when sure":
            chosen_T = chosen_T.where(best[:, 0] - best[:, 1] > SURE, self.n)
        return (chosen_T < self.n).to(scores_TN).unsqueeze(1), chosen_T.clamp(max=self.n - 1).unsqueeze(1)


class ScopedRouter(LinearRouter):
    """A linear gate whose choice is that of a scope."""

    scope: Any
    layer: int

    def choose(self, logits_TN: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scope.choose(self.layer, logits_TN)


class RequestGate:
    """
    Args:
        source: the folder of the data sets.
        data: that of the short tasks.
        work: a folder for the adapters.
    """

    def __init__(self, source: Path, data: Path, work: Path, ledger: Ledger) -> None:
        self.work, self.ledger = work, ledger
        self.work.mkdir(parents=True, exist_ok=True)
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
        self.rows = {"short": _short_rows(data), "domains": _domain_rows(source)}
        self.general = self.tokenized([{"text": text, "domain": "general"} for text in general_texts(source)])
        self.neutral = self.tokenized([{"text": f"{text}\n", "domain": "base"} for text in first_general_texts()])

    def tokenized(self, rows: list[dict[str, Any]]) -> Dataset:
        data, self.collator = tokenized(Dataset.from_list(rows), self.tokenizer, preparation(4 * LONGEST))
        return data

    def jobs(self) -> Iterator[Job]:
        done = {Job(run["set"], run["seed"], run["way"]) for run in self.ledger.records()}
        for seed in SEEDS:
            for name, tasks in SETS.items():
                trainings = [Job(name, seed, f"train {task}") for task in tasks]
                missing = [job for job in trainings if job not in done]
                yield from missing
                if not missing and Job(name, seed, "measured") not in done:
                    yield Job(name, seed, "measure")

    def run(self, job: Job) -> None:
        started = time.monotonic()
        if job.what == "measure":
            Measured(self, job).all_ways()
            way = "measured"
        else:
            way = job.what
            self.train(job.set, way.removeprefix("train "), job.seed)
        self.ledger.add({"set": job.set, "seed": job.seed, "way": way}, f"{time.monotonic() - started:.0f} s")

    def folder(self, name: str, task: str, seed: int) -> Path:
        return self.work / f"{name}-{task}-{seed}"

    def load(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).to(DEVICE)

    def train_rows(self, name: str, task: str, seed: int) -> list[dict[str, str]]:
        rows = self.rows[name]["train"][task]
        return random.Random(f"{seed} {task}").sample(rows, min(len(rows), TRAIN[name]))

    def train(self, name: str, task: str, seed: int) -> None:
        set_seed(seed)
        targets = ["gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(
            self.load(), LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
        )
        args = arguments(
            SFTConfig, self.work / "state", max_steps=STEPS, learning_rate=LEARNING_RATE, lr_scheduler_type="cosine",
            max_length=LONGEST, logging_steps=STEPS, seed=seed,
        )  # fmt: skip
        rows = Dataset.from_list(self.train_rows(name, task, seed))
        SFTTrainer(model, args, train_dataset=rows, processing_class=self.tokenizer).train()
        model.save_pretrained(str(self.folder(name, task, seed)))


class Measured:
    """All ways of one set and seed."""

    def __init__(self, study: RequestGate, job: Job) -> None:
        self.study, self.job, self.tasks = study, job, SETS[job.set]
        held_out = study.rows[job.set]["test"]
        self.parts = {task: study.tokenized(held_out[task][: HELD_OUT[job.set]]) for task in self.tasks}
        self.parts["general"] = study.general
        folders = [study.folder(job.set, task, job.seed) for task in self.tasks]
        self.model = lora_to_moe(study.load(), folders, top_k=1, mixing="projection").eval()
        self.model.config.output_router_logits = False
        self.layers: list[AdapterLayer] = routed_layers(self.model)  # type: ignore[assignment]
        self.routers = [layer.router for layer in self.layers]
        self.known: dict[tuple[str, int, int], Answer] = {}  # (task, row, expert; n: the base)
        self.held_out_means = {task: self.prompt_means(part) for task, part in self.parts.items()}

    def all_ways(self) -> None:
        n, tasks = len(self.tasks), self.tasks
        sizes = {task: len(part) for task, part in self.parts.items()}
        self.note("own", 0, self.forced({task: [i] * sizes[task] for i, task in enumerate(tasks)}))
        self.note("base", 0, self.forced({task: [n] * size for task, size in sizes.items()}))
        with uniform_gates(self.model, "projection"):
            self.note("mean", 0, self.free())
        neutral_RLD = self.prompt_means(self.study.neutral)
        for rows in ROWS[self.job.set]:
            train = [self.study.train_rows(self.job.set, task, self.job.seed)[:rows] for task in tasks]
            # As gates are set today: all tokens.
            texts = [{**row, "expert": i} for i, of_task in enumerate(train) for row in of_task]
            batches = calibration_batches(
                Dataset.from_list(texts), self.study.tokenizer, len(texts), max_length=LONGEST, columns=["expert"]
            )
            for layer, router in zip(self.layers, self.routers, strict=True):
                layer.module.moe_lora_router[layer.adapter] = router
            init_gates(self.model, "ridge", batches)
            self.note("token, tokens", rows, self.free())
            self.note_picked("picked today", rows, self.picks_today())
            # Of prompts, without and with the base.
            means = [self.prompt_means(self.study.tokenized(of_task)) for of_task in train]
            for suffix, classes in (("", means), (", base", [*means, neutral_RLD])):
                weight_LND = ridge(classes, penalty=0.1)
                for layers in (FIRST,) if self.job.seed else (FIRST, len(self.layers)):
                    self.note_picked(f"picked, {layers} layers{suffix}", rows, self.scores(weight_LND[:layers]))
                for kind in ("over layers",) if self.job.seed else SCOPES:
                    self.put(weight_LND, Scope(kind, n))
                    self.note(f"{kind}, prompts{suffix}", rows, self.free())

    # --- gates -------------------------------------------------------------------------------------------------------

    def prompt_means(self, rows: Dataset) -> torch.Tensor:
        """The mean input of each FFN over the tokens of a row's prompt (of its text, if it is no prompt), [R, L, d]."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
        batches = [self.study.collator([rows[i] for i in order[at : at + 16]]) for at in range(0, len(rows), 16)]
        columns: list[list[torch.Tensor]] = [[] for _ in self.layers]

        def add(i: int, batch: Any, mask_BS: torch.Tensor, x_BSD: torch.Tensor, output: torch.Tensor) -> None:
            prompt_BS = mask_BS.bool() & (batch["labels"] == -100)
            prompt_BS = torch.where(prompt_BS.any(1, keepdim=True), prompt_BS, mask_BS.bool()).to(x_BSD)
            columns[i].append(torch.einsum("bs,bsd->bd", prompt_BS / prompt_BS.sum(1, keepdim=True), x_BSD))

        base_passes(self.model, batches, [layer.module for layer in self.layers], add)
        means_RLD = torch.stack([torch.cat(of_layer) for of_layer in columns], 1)
        return means_RLD[torch.tensor(order).argsort()]

    def scores(self, weight_LND: torch.Tensor) -> dict[str, torch.Tensor]:
        """By task, the sum over layers of each row's scores [R, n]."""
        layers = len(weight_LND)
        return {
            task: torch.einsum("rld,lnd->rn", x_RLD[:, :layers].double(), weight_LND)
            for task, x_RLD in self.held_out_means.items()
        }

    def picks_today(self) -> dict[str, torch.Tensor]:
        """By `pick_experts`, the mean over tokens and layers of the gates' softmaxes; as scores of 0 and 1 [R, n]."""
        found = {}
        for task, part in self.parts.items():
            starts = range(0, len(part), 20)
            batches = [self.study.collator([part[i] for i in range(at, min(at + 20, len(part)))]) for at in starts]
            picked = torch.cat([pick_experts(self.model, batch) for batch in batches])
            found[task] = torch.nn.functional.one_hot(picked, len(self.tasks)).double()
        return found

    def put(self, weight_LND: torch.Tensor, scope: Scope) -> None:
        for i, (layer, weight_ND) in enumerate(zip(self.layers, weight_LND, strict=True)):
            router = ScopedRouter(weight_ND.shape[1], len(weight_ND)).requires_grad_(False)
            router.weight.copy_(weight_ND)
            router.scope, router.layer = scope, i
            layer.module.moe_lora_router[layer.adapter] = router.eval()

    # --- answers -----------------------------------------------------------------------------------------------------

    def free(self) -> dict[str, list[Answer]]:
        return {task: answers(self.model, part, self.study.collator) for task, part in self.parts.items()}

    def forced(self, chosen: dict[str, list[int]]) -> dict[str, list[Answer]]:
        """Answers where each row has one expert, or (n) the base."""
        found = {}
        for task, experts in chosen.items():
            for expert in sorted(set(experts)):
                missing = [i for i, e in enumerate(experts) if e == expert and (task, i, e) not in self.known]
                if not missing:
                    continue
                part = self.parts[task].select(missing)
                base = expert == len(self.tasks)
                steered: Any = self.model.disable_adapter() if base else force_experts(self.model, expert)
                with steered:
                    of_part = answers(self.model, part, self.study.collator)
                self.known |= {(task, i, expert): answer for i, answer in zip(missing, of_part, strict=True)}
            found[task] = [self.known[task, i, expert] for i, expert in enumerate(experts)]
        return found

    def note_picked(self, way: str, rows: int, scores: dict[str, torch.Tensor]) -> None:
        chosen = {task: scores_RN.argmax(1).tolist() for task, scores_RN in scores.items()}
        right = [chosen[task].count(i) / len(chosen[task]) for i, task in enumerate(self.tasks)]
        n = len(self.tasks)
        lost = [chosen[task].count(n) / len(chosen[task]) for task in self.tasks]
        more = {
            "chosen": sum(right) / n,
            "lost": sum(lost) / n,
            "to_base": chosen["general"].count(n) / len(chosen["general"]),
        }
        self.note(way, rows, self.forced(chosen), **more)

    def note(self, way: str, rows: int, found: dict[str, list[Answer]], **more: float) -> None:
        general = found.pop("general", None)
        if general is not None:
            more["general"] = -sum(a.log_prob for a in general) / sum(a.tokens for a in general)
        flat = [answer for of_task in found.values() for answer in of_task]
        matches = {task: "".join("01"[a.is_match] for a in of_task) for task, of_task in found.items()}
        measured = by_task(flat)
        record = {"set": self.job.set, "seed": self.job.seed, "way": way, "rows": rows, **measured, **more}
        note = f"{measured['loss']:.3f}, {measured['exact']:.1%}"
        self.study.ledger.add({**record, "matches": matches}, note)


# --- texts -----------------------------------------------------------------------------------------------------------


def _short_rows(data: Path) -> dict[str, dict[str, list[dict[str, str]]]]:
    rows: dict[str, dict[str, list[dict[str, str]]]] = {}
    for name in ("train", "test"):
        rows[name] = {task: [] for task in SETS["short"]}
        for line in (data / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["domain"] in rows[name]:
                rows[name][row["domain"]].append(row)
    return rows


def _domain_rows(source: Path) -> dict[str, dict[str, list[dict[str, str]]]]:
    rows = {name: read_domains(source / "clinc150", name) for name in ("train", "test")}
    rows["test"] = {
        task: random.Random(0).sample(of_task, HELD_OUT["domains"]) for task, of_task in rows["test"].items()
    }
    return rows


def ridge(classes: Sequence[torch.Tensor], penalty: float) -> torch.Tensor:
    """
    Ridge regression [L, n, d] from vectors [R, L, d] to their class, by layer, float64. All classes count the same,
    however many rows they have, and λ as if each had the mean number.
    """
    count_N = torch.tensor([len(x_RLD) for x_RLD in classes])
    class_R = torch.arange(len(classes)).repeat_interleave(count_N)
    weight_R1 = count_N[class_R].double().rsqrt()[:, None]
    x_LRD = torch.cat([*classes]).double().transpose(0, 1) * weight_R1
    target_RN = torch.eye(len(classes), dtype=torch.float64)[class_R] * weight_R1
    penalty *= len(classes) / len(class_R)
    rows, width = x_LRD.shape[1:]
    # By way of the rows' products or of the features', whichever are fewer.
    products = x_LRD @ x_LRD.mT if rows < width else x_LRD.mT @ x_LRD
    products = products + penalty * torch.eye(min(rows, width), dtype=torch.float64)
    if rows < width:
        return (x_LRD.mT @ torch.linalg.solve(products, target_RN.expand(len(x_LRD), -1, -1))).mT
    return torch.linalg.solve(products, x_LRD.mT @ target_RN).mT


def first_general_texts() -> list[str]:
    """The general texts that the package had first. Studies whose ledgers were made with them keep them."""
    lines = Path(__file__).with_name("first_general_texts.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("# ")]


def general_kinds(source: Path, split: str) -> list[list[str]]:
    """Word problems, programming tasks, quizzes and yes-no questions, of the data sets' `train` or `test`."""

    def asked(name: str, after: str) -> list[str]:
        rows = _json(source / f"llm-adapters/{name}-{split}.json")
        return [row["instruction"].split(after)[1].split("\n")[0] for row in rows]

    return [
        [row["question"] for row in _lines(source / f"gsm8k/{split}.jsonl")],
        [row["text"] for row in _lines(source / "mbpp/mbpp.jsonl")],
        asked("ARC-Easy", "to the question: "),
        asked("boolq", "question: "),
    ]


def general_texts(source: Path) -> list[str]:
    """Sixteen of each kind."""
    return [text for kind in general_kinds(source, "test") for text in random.Random(0).sample(kind, 16)]


# --- report ----------------------------------------------------------------------------------------------------------

CONTRASTS = (
    *((f"{kind}, prompts", "token, tokens") for kind in SCOPES),
    *((f"{kind}, prompts", "picked, 8 layers") for kind in ("over layers", "first eight", "when sure")),
    ("picked, 8 layers", "picked today"), ("picked, 8 layers", "picked, 30 layers"),
    ("picked, 8 layers, base", "picked, 8 layers"), ("picked, 8 layers", "own"),
)  # fmt: skip


def report(ledger: Ledger) -> str:
    """The page of the runs that there are."""
    runs = [run for run in ledger.records() if "exact" in run]
    base = {(run["set"], run["seed"]): run["general"] for run in runs if run["way"] == "base"}
    lines = [
        "# One gate for a request",
        "",
        "`python -m studies.request_gate report` writes this page; the script's head says what was fixed before its"
        " first run. SmolLM2-135M-Instruct; means over seeds. *Chosen*: requests picked for their own adapter; *lost*:"
        " for the base. *Harm*: loss per token of general texts above the base's; *to base*: those picked for it.",
        "",
        THEN,
    ]
    for name, sizes in ROWS.items():
        seeds = sorted({run["seed"] for run in runs if run["set"] == name})
        head = "| way | rows | seeds | right answers | loss | chosen | lost | harm | to base |"
        lines += ["", f"## {name}, {len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}", "", head, f"|{'---|' * 9}"]
        for rows in (0, *sizes):
            ways = dict.fromkeys(run["way"] for run in runs if (run["set"], run["rows"]) == (name, rows))
            for way in ways:
                of_way = [r for r in runs if (r["set"], r["rows"], r["way"]) == (name, rows, way)]
                harm = [run["general"] - base[name, run["seed"]] for run in of_way if "general" in run]
                cells = [way, str(rows or ""), str(len(of_way)), f"{_mean(of_way, 'exact'):.1%}"]
                cells += [f"{_mean(of_way, 'loss'):.3f}"]
                cells += [f"{_mean(of_way, key):.1%}" if key in of_way[0] else "" for key in ("chosen", "lost")]
                cells += [f"{sum(harm) / len(harm):.3f}" if harm else ""]
                cells += [f"{_mean(of_way, 'to_base'):.1%}" if "to_base" in of_way[0] else ""]
                lines.append(f"| {' | '.join(cells)} |")
        lines += ["", "| A − B, right answers in points, 95 % over rows | rows | |", "|---|---|---|"]
        for rows in sizes:
            for a, b in CONTRASTS:
                if found := _difference(runs, name, rows, a, b):
                    lines.append(
                        f"| {a} − {b} | {rows} | {100 * found[0]:+.1f} [{100 * found[1]:.1f}, {100 * found[2]:.1f}] |"
                    )
    return "\n".join(lines) + "\n"


def _mean(runs: Sequence[dict[str, Any]], key: str) -> float:
    return sum(run[key] for run in runs) / len(runs)


def _difference(
    runs: Sequence[dict[str, Any]], name: str, rows: int, a: str, b: str
) -> tuple[float, float, float] | None:
    """Right answers of a − b, a mean over tasks, with an interval over rows; a row's is its mean over seeds."""
    ways = [
        {
            run["seed"]: run["matches"]
            for run in runs
            if (run["set"], run["way"]) == (name, way) and run["rows"] in (0, rows)
        }
        for way in (a, b)
    ]
    seeds = sorted(ways[0].keys() & ways[1].keys())
    if not seeds:
        return None
    means, variances = [], []
    for task in SETS[name]:
        by_row = torch.tensor([
            [int(x) - int(y) for x, y in zip(ways[0][seed][task], ways[1][seed][task], strict=True)] for seed in seeds
        ]).double().mean(0)  # fmt: skip
        means.append(float(by_row.mean()))
        variances.append(float(by_row.var(correction=1)) / len(by_row))
    mean, half = sum(means) / len(means), 1.96 * sum(variances) ** 0.5 / len(means)
    return mean, mean - half, mean + half


def main() -> None:
    options = parser(__doc__, workers=True)
    options.add_argument("--source", type=Path, default=Path("data"))
    args = options.parse_args()
    ledger = Ledger(RESULTS / "request_gate.jsonl")
    if args.command == "report":
        (RESULTS / "request_gate.md").write_text(page := report(ledger))
        return print(page)
    if args.worker is None:
        raise SystemExit(start_workers("request_gate", args, "--source", str(args.source)))
    score_answers_only()
    work(RequestGate(args.source, args.data, args.work / "request_gate", ledger))


if __name__ == "__main__":
    main()
