"""
What reaches a service: requests of one task, chats that switch, two questions at once, unseen system prompts, none of
the tasks. SmolLM2-135M-Instruct, up to 24 LoRAs; which way of having them all answers best.

    python -m studies.requests run --source FOLDER [--workers 8]   # an hour of a CPU core a seed; minutes on a GPU
    python -m studies.requests report                              # tables, in studies/results

Fixed before the first run. Three sets of tasks, all as chats in the model's template: *short*, four short tasks that
their prompts tell apart; *domains*, eight look-alike domains of clinc150; *many*, 24: ten domains of clinc150, five
parts of banking77, seven intents of Snips with their slots as JSON, SQL, and steps of arithmetic. A task has at most
240 training rows and 40 held-out ones (30 in *domains*, 20 in *many*), which a seed draws, and a LoRA of rank 8 on the
FFNs (60 steps of 8 rows, a rate that decays from 1e-3). Six seeds, of *many* three.

Requests, of the same held-out rows:

- *one*: the row alone; *system*: behind one of five system prompts that nothing has seen; *switch*: the second turn of
  a chat whose first is another task's row with its right answer; *two*: with another task's question below it, right if
  either's answer is given;
- *none*: 64 general requests of other data sets, whose right answer is the base's own greedy one, of at most 24 tokens.

Ways:

- *own* LoRA, the *base*, the *mean* of the LoRAs;
- *picked*: `RequestGate` with its general texts, from 24 rows of each task or all; one LoRA, or the base, for a row;
- *token*: gates as `moe-peft mix` sets them, ridge regression on all tokens of 24 rows or all, with the same general
  texts as the base's; each token in each layer goes where its own score is largest;
- *so far*: gates of *picked* of all 30 layers, by the mean of the scores of the tokens up to a token, summed over the
  layers so far; *half-life*: the mean forgets half of a token's weight in 16 tokens; *by turn*: it begins anew with
  each message of the user; all with the base, from all rows, *so far* from 24 too;
- *joint*: one LoRA of rank 8·n, at most 64, on the rows of all tasks (n·30 steps of 16 rows: as many passes), alpha and
  rate as the others; *joint, replay*: every fifth row is a general text (others than *none*'s) with the base's answer.

Right answers decide: greedy decoding gives the answer exactly. Of *none* the share that is answered as by the base, and
the loss per token of its answers above the base's own (*harm*).

Predictions, means over seeds.

1. *One*: *picked* from all rows has at least 0.97 of what *own* has on *short*, 0.9 on *domains* and 0.85 on *many*.
   *Token* is at least 3, 10 and 10 points below *picked*.
2. *System*: *picked* is as with *one* (within 1 point), as it does not read system prompts. *So far* loses 5 points or
   more on *domains*; *by turn* less than half of that.
3. *Switch*: *picked* is within 3 points of *one*; *so far* loses 10 points or more on *domains*, *half-life* and *by
   turn* less than half of that; *joint* loses less than 5.
4. *Two*: *picked* has at least half of what it has with *one*; no way of ours beats *joint* there.
5. *None*: *picked* leaves 90 % as the base, harm below .03; *so far* and its variants less than 80 %; *token* less than
   50 %; *joint* less than 20 %; replay more than half of the way from *joint* to *picked*.
6. *Joint* is within 3 points of *own* on *short* and *domains*, above *picked* on *domains* and *many*.
7. No scope of the text is within 2 points of *picked* on all of *one*, *system* and *switch* in all three sets.

Controls, added before their first run, with *short* and *domains*, seeds 3 and 4 (the LoRAs are those of
`studies.changing_tasks`, trained as here), and *many*, seed 0; requests alone. *Shuffled*: the gate's training rows are
dealt to the tasks anew, as many to each. *Noise*: of each LoRA, B is random and as large; the own one answers.

8. *Picked, shuffled* and *token, shuffled* have less than half of what they have with their labels, and at most 5
   points more than the *mean*; *own, noise* has less than 2 %.

*Many* is asked *one*, *system* and *none*. It and later seeds than 1 go without the scopes, which had lost by up to 80
points.

Run so far: *short* with seeds 0 and 1, *domains* with 0, 1 and 3, *joint, replay* with seed 0 and, of *domains*, 3;
*many* with seed 0, without *joint, replay*; controls of *short* with seeds 3 and 4, of *domains* with seed 3 and of
*many*, which are as predicted. What failed of the other predictions:

- 2: *picked* loses 2.4 to 3.7 points with *system*; so does *own*, as the requests' choice is the same.
- 3: *picked* loses 4 points with *switch* on *domains* and 7 on *short*; *joint* loses 6 and 7, with replay 10 and 13.
- 5: *picked* leaves 90 to 94 %, of *many* 81 %, but the other requests make its mean harm .2 to .4. *Joint,
  replay* answers only 5 to 9 % word for word as the base, but its harm is .03 and .19.
- 6: *joint* is not within 3 points of *own* but 6 and 7 above it, of *many* 16.
- *So far* did not lose some points with chats on *domains*, but all.
"""

from __future__ import annotations

import copy
import csv
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import RequestGate, force_experts, init_gates, lora_to_moe
from moe_peft.adapter.router_recorder import state
from moe_peft.combine.request_gate import RequestReader
from moe_peft.models.gates import uniform_gates
from moe_peft.models.layer import routed_layers
from moe_peft.training.preparation import calibration_batches, preparation, tokenized

from . import short_tasks
from .differences import over_rows
from .exact_match import answers
from .growing import TASKS as DOMAINS
from .request_gate import THEN, ScopedRouter, first_general_texts, general_texts, ridge
from .runs import DEVICE, Ledger, arguments, parser, score_answers_only, start_workers, work

RESULTS = Path(__file__).parent / "results"
SEEDS = {"short": range(6), "domains": range(6), "many": range(3)}
SCOPED = range(2)  # the seeds whose gates read the text so far, too
HELD_OUT = {"short": 40, "domains": 30, "many": 20}
TRAIN, FEW, STEPS, RATE, LONGEST, HALF_LIFE, ANSWER = 240, 24, 60, 1e-3, 192, 16, 24
KINDS = ("one", "system", "switch", "two")
SYSTEMS = (
    "You are a friendly assistant.",
    "Answer in one line. Never mention these instructions.",
    "You work for the customer service of a company in Lisbon that sells furniture, kitchens and garden tools. Be "
    "polite and brief, and do not promise refunds. Office hours are from nine to five on weekdays, never on holidays.",
    "Today is Monday. The user is a member since 2019 and lives in Canada. Use metric units, and the 24-hour clock.",
    "# Role\nAn expert system for classification and extraction.\n# Rules\n- Output only what was asked for.\n- If you "
    "are unsure, give your best guess.\n- Do not explain.\n# Style\nTerse; no greetings, no emojis.",
)
FFN = ["gate_proj", "up_proj", "down_proj"]
JOINT = ("joint", "joint, replay")


class Job(NamedTuple):
    """A run to be made: the training of a task's LoRA or of a joint one, or all measurements of a set."""

    set: str
    seed: int
    what: str


class Scope:
    """
    A choice by the text so far, for all routers of a model; its last expert is the base, which has no update.

    Args:
        kind: "so far", "half-life" or "by turn".
        turn: the tokens that begin a message of the user.
    """

    def __init__(self, kind: str, num_experts: int, turn: list[int]) -> None:
        self.kind, self.n, self.turn = kind, num_experts, turn
        self.ids_BS = torch.empty(0)
        self.total: Any = 0.0
        self.weight_BSS = torch.empty(0)

    def begin(self, mask_BS: torch.Tensor) -> None:
        """The weight of token s in the mean at token t, for a new batch."""
        at_S = torch.arange(mask_BS.shape[1], device=mask_BS.device)
        distance_SS = at_S[:, None] - at_S
        weight_BSS = ((distance_SS >= 0) & mask_BS[:, None].bool()).float()
        if self.kind == "half-life":
            weight_BSS = weight_BSS * 2.0 ** (-distance_SS.clamp(min=0) / HALF_LIFE)
        if self.kind == "by turn":
            ids_BS = self.ids_BS.to(mask_BS.device)
            begins_BS = torch.ones_like(mask_BS, dtype=torch.bool)
            for i, token in enumerate(self.turn):
                begins_BS &= ids_BS.roll(-i, 1) == token
            start_BS = (begins_BS * at_S).cummax(1).values
            weight_BSS = weight_BSS * (at_S >= start_BS[:, :, None])
        self.weight_BSS = weight_BSS / weight_BSS.sum(2, keepdim=True).clamp(min=1e-6)
        self.total = 0.0

    def choose(self, layer: int, scores_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        collection = state.current.collection
        assert collection is not None and collection.attention_mask is not None
        mask_BS = collection.attention_mask
        if layer == 0:
            self.begin(mask_BS)
        self.total = self.total + self.weight_BSS @ scores_TN.view(*mask_BS.shape, -1).float()
        chosen_T1 = self.total.flatten(0, 1).argmax(-1, keepdim=True)
        return (chosen_T1 < self.n).to(scores_TN), chosen_T1.clamp(max=self.n - 1)


class TokenScope:
    """Each token by its own score."""

    def __init__(self, num_experts: int) -> None:
        self.n = num_experts

    def choose(self, layer: int, scores_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen_T1 = scores_TN.argmax(-1, keepdim=True)
        return (chosen_T1 < self.n).to(scores_TN), chosen_T1.clamp(max=self.n - 1)


class Requests:
    """
    Args:
        source: the folder of the data sets.
        work: a folder for the adapters.
        steps: of a LoRA; fewer for a test of this script.
    """

    def __init__(self, source: Path, work: Path, ledger: Ledger, steps: int = STEPS, rows: int = TRAIN) -> None:
        self.work, self.ledger, self.steps, self.most_rows = work, ledger, steps, rows
        self.work.mkdir(parents=True, exist_ok=True)
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
        self.base = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).to(DEVICE).eval()
        self.tasks = all_tasks(source)
        self.none = self.answered(general_texts(source), "none")

    def jobs(self) -> Iterator[Job]:
        done = {Job(run["set"], run["seed"], run["way"]) for run in self.ledger.records()}
        parts = [(name, seed) for seed in SEEDS["short"] for name in ("domains", "short") if seed in SEEDS[name]]
        for name, seed in [*parts, *(("many", seed) for seed in SEEDS["many"])]:
            missing = [job for task in self.tasks[name] if (job := Job(name, seed, f"train {task}")) not in done]
            yield from missing
            for what in ("measure", "controls"):
                if not missing and Job(name, seed, what) not in done:
                    yield Job(name, seed, what)
            if name != "domains" and not missing:
                yield from self.joint_jobs(("domains", name) if name == "short" else (name,), seed, done)

    def joint_jobs(self, names: Sequence[str], seed: int, done: set[Job]) -> Iterator[Job]:
        for name in names:
            if any(Job(name, seed, f"train {task}") not in done for task in self.tasks[name]):
                continue  # requests are measured beside the tasks' LoRAs
            for way in JOINT:
                if (job := Job(name, seed, f"train {way}")) not in done:
                    yield job
                elif Job(name, seed, way) not in done:
                    yield Job(name, seed, way)

    def run(self, job: Job) -> None:
        started = time.monotonic()
        if job.what in JOINT:
            return Measured(self, job).joint(job.what)
        if job.what == "measure":
            Measured(self, job).all_ways()
        elif job.what == "controls":
            Measured(self, job).controls()
        else:
            self.train(job.set, job.seed, job.what.removeprefix("train "))
        self.ledger.add({**job._asdict(), "way": job.what}, f"{time.monotonic() - started:.0f} s")

    # --- rows --------------------------------------------------------------------------------------------------------

    def train_rows(self, name: str, seed: int, task: str) -> list[dict[str, Any]]:
        return drawn(self.tasks[name][task]["train"], self.most_rows, seed, task)

    def held_out(self, name: str, seed: int, task: str) -> list[dict[str, Any]]:
        return drawn(self.tasks[name][task]["test"], HELD_OUT[name], seed, task)

    @torch.no_grad()
    def answered(self, texts: list[str], domain: str) -> list[dict[str, Any]]:
        """General requests with the base's own greedy answers."""
        rows = []
        for text in texts:
            prompt = [{"role": "user", "content": text}]
            ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")
            ids = (ids if isinstance(ids, torch.Tensor) else ids["input_ids"]).to(DEVICE)
            out = self.base.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False,
                pad_token_id=self.tokenizer.pad_token_id,
            )  # fmt: skip
            answer = out[0, ids.shape[1] :].tolist()
            rows.append({"text": text, "input_ids": ids[0].tolist() + answer, "answer": len(answer), "domain": domain})
        return rows

    # --- training ----------------------------------------------------------------------------------------------------

    def folder(self, name: str, seed: int, task: str) -> Path:
        return self.work / f"{name}-{task.replace(', ', '-')}-{seed}"

    def train(self, name: str, seed: int, task: str) -> None:
        set_seed(seed)
        n = len(self.tasks[name])
        if task in JOINT:
            rank, steps, batch = min(8 * n, 64), n * self.steps // 2, 16
            rows = [row for of_task in self.tasks[name] for row in self.train_rows(name, seed, of_task)]
            if task == JOINT[1]:
                texts = first_general_texts()
                general = [
                    {"prompt": [{"role": "user", "content": row["text"]}],
                     "completion": [{"role": "assistant", "content": self.answer_of(row)}], "domain": "general"}
                    for row in self.answered(texts[: 2 + self.most_rows], "general")
                ]  # fmt: skip
                rows += [general[i % len(general)] for i in range(len(rows) // 4)]
        else:
            rank, steps, batch, rows = 8, self.steps, 8, self.train_rows(name, seed, task)
        model = self.new_lora(rank)
        self.fit(model, rows, steps, seed, batch)
        model.save_pretrained(str(self.folder(name, seed, task)))

    def new_lora(self, rank: int) -> Any:
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=FFN, task_type="CAUSAL_LM")
        return get_peft_model(copy.deepcopy(self.base), config)

    def fit(self, model: Any, rows: list[dict[str, Any]], steps: int, seed: int, batch: int = 8) -> None:
        args = arguments(
            SFTConfig, self.work / "state", max_steps=steps, learning_rate=RATE, lr_scheduler_type="cosine",
            max_length=LONGEST, logging_steps=steps, seed=seed,
        )  # fmt: skip
        args.per_device_train_batch_size = batch
        SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=self.tokenizer).train()

    def answer_of(self, row: dict[str, Any]) -> str:
        return self.tokenizer.decode(row["input_ids"][-row["answer"] :], skip_special_tokens=True)


class Measured:
    """All ways of one set and seed."""

    def __init__(self, study: Requests, job: Job) -> None:
        self.study, self.job, self.tasks = study, job, [*study.tasks[job.set]]
        self.n = len(self.tasks)
        self.parts, self.own = self.requests()
        folders = [study.folder(job.set, job.seed, task) for task in self.tasks]
        self.model = lora_to_moe(copy.deepcopy(study.base), folders, top_k=1, mixing="projection").eval()
        self.model.config.output_router_logits = False
        self.layers: list[Any] = routed_layers(self.model)
        self.routers = [layer.router for layer in self.layers]
        self.known: dict[tuple[str, int, int], Any] = {}
        self.scope: Any = None

    def requests(self) -> tuple[dict[str, Dataset], dict[str, list[int]]]:
        """By kind: tokenized requests, and the task that each is of."""
        study, job = self.study, self.job
        rows = [(i, row) for i, task in enumerate(self.tasks) for row in study.held_out(job.set, job.seed, task)]
        draw = random.Random(f"others {job.seed}")
        others = []
        for i, _ in rows:
            of_other, other = draw.choice(rows)
            while of_other == i:
                of_other, other = draw.choice(rows)
            others.append(other)
        texts: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (*KINDS, "two, other")}
        for at, ((_, row), before) in enumerate(zip(rows, others, strict=True)):
            answer, about = row["completion"], {"domain": "x"}
            texts["one"].append({"prompt": row["prompt"], "completion": answer, **about})
            system = {"role": "system", "content": SYSTEMS[at % len(SYSTEMS)]}
            texts["system"].append({"prompt": [system, *row["prompt"]], "completion": answer, **about})
            turn = [*before["prompt"], *before["completion"]]
            texts["switch"].append({"prompt": [*turn, *row["prompt"]], "completion": answer, **about})
            both = f"{row['prompt'][0]['content']}\n{before['prompt'][0]['content']}"
            prompt = [{"role": "user", "content": both}]
            texts["two"].append({"prompt": prompt, "completion": answer, **about})
            texts["two, other"].append({"prompt": prompt, "completion": before["completion"], **about})
        parts = {}
        for kind, of_kind in texts.items():
            parts[kind], self.collator = tokenized(
                Dataset.from_list(of_kind), study.tokenizer, preparation(4 * LONGEST)
            )
            assert len(parts[kind]) == len(rows)
        none = [
            {"input_ids": row["input_ids"], "domain": "none",
             "labels": [-100] * (len(row["input_ids"]) - row["answer"]) + row["input_ids"][-row["answer"] :]}
            for row in study.none
        ]  # fmt: skip
        # As TRL's rows are, whose collator makes labels of the completion's mask where there are none.
        names = [name for name in parts["one"].column_names if name in ("completion_mask", "labels")]
        for row in none:
            row |= {"completion_mask": [int(label != -100) for label in row["labels"]]}
            for name in {"completion_mask", "labels"} - set(names):
                del row[name]
        parts["none"] = Dataset.from_list(none)
        self.texts = {kind: [row["prompt"] for row in of_kind] for kind, of_kind in texts.items()}
        self.texts["none"] = [[{"role": "user", "content": row["text"]}] for row in study.none]
        own = [i for i, _ in rows]
        return parts, dict.fromkeys(texts, own)

    def only(self, *kinds: str) -> None:
        """Leave out all other requests."""
        for parts in (self.parts, self.own, self.texts):
            for kind in parts.keys() - set(kinds):
                del parts[kind]

    def all_ways(self) -> None:
        n, study, job = self.n, self.study, self.job
        if job.set == "many":
            self.only("one", "system", "none")
        self.note("base", 0, self.forced({kind: [n] * len(part) for kind, part in self.parts.items()}))
        self.note("own", 0, self.forced(self.own))
        with uniform_gates(self.model, "projection"):
            self.note("mean", 0, self.free())
        reader = RequestReader(study.tokenizer, chat=True)
        base = self.model.get_base_model()
        for rows in (FEW, study.most_rows):
            train = {task: study.train_rows(job.set, job.seed, task)[:rows] for task in self.tasks}
            prompts = self.both_gates(train, rows)
            if job.set == "many" or job.seed not in SCOPED:
                continue
            deep = RequestGate(base, reader, {}, layers=len(self.layers))
            vectors = [deep.read(of_task) for of_task in (*prompts.values(), first_general_texts())]
            weight_LND = ridge(vectors, penalty=0.1)
            turn = study.tokenizer("<|im_start|>user")["input_ids"]
            for kind in ("so far", "half-life", "by turn") if rows > FEW else ("so far",):
                self.scope = Scope(kind, n, turn)
                self.put(weight_LND, self.scope)
                self.note(kind, rows, self.free())

    def both_gates(self, train: dict[str, list[dict[str, Any]]], rows: int, kind: str = "") -> dict[str, list[Any]]:
        """Note what is picked, and what tokens choose, by gates of these rows; the rows' prompts."""
        prompts = {task: [row["prompt"] for row in of_task] for task, of_task in train.items()}
        self.scope = None
        self.note_picked(rows, RequestGate.fit(self.study.base, prompts, tokenizer=self.study.tokenizer), kind)
        self.put(self.token_gates(train), TokenScope(self.n))
        self.note(f"token{kind}", rows, self.free())
        return prompts

    def controls(self) -> None:
        """Requests alone, with gates of rows whose labels were shuffled, and with LoRAs of noise."""
        study, job, most = self.study, self.job, self.study.most_rows
        self.only("one")
        self.note("own, control", 0, self.forced(self.own))
        with uniform_gates(self.model, "projection"):
            self.note("mean, control", 0, self.free())
        train = {task: study.train_rows(job.set, job.seed, task) for task in self.tasks}
        self.both_gates(train, most, ", control")
        rows = [row for of_task in train.values() for row in of_task]
        random.Random(f"labels {job.seed}").shuffle(rows)
        dealt = iter(rows)
        self.both_gates({task: [next(dealt) for _ in of] for task, of in train.items()}, most, ", shuffled, control")
        self.known.clear()
        draw = torch.Generator(DEVICE).manual_seed(job.seed)
        for layer in self.layers:
            for B in layer.module.expert_parameters(layer.adapter)[1].values():
                noise = torch.randn(B.shape, generator=draw, device=DEVICE)
                with torch.no_grad():
                    B.copy_(noise / noise.norm(dim=(1, 2), keepdim=True) * B.norm(dim=(1, 2), keepdim=True))
        self.use_own_routers()
        self.note("own, noise, control", 0, self.forced(self.own))

    def joint(self, way: str) -> None:
        folder = self.study.folder(self.job.set, self.job.seed, way)
        model = PeftModel.from_pretrained(copy.deepcopy(self.study.base), folder).eval()
        self.note(way, 0, {kind: answers(model, part, self.collator) for kind, part in self.parts.items()})

    def token_gates(self, train: dict[str, list[dict[str, Any]]]) -> torch.Tensor:
        """Ridge gates of all tokens, [L, n + 1, d], those of the general texts last; as `mix` has them."""
        rows = [{"prompt": r["prompt"], "completion": r["completion"], "expert": i}
                for i, of_task in enumerate(train.values()) for r in of_task]  # fmt: skip
        empty = [{"role": "assistant", "content": ""}]
        rows += [{"prompt": [{"role": "user", "content": text}], "completion": empty, "expert": self.n}
                 for text in first_general_texts()]  # fmt: skip
        batches = calibration_batches(
            Dataset.from_list(rows), self.study.tokenizer, len(rows), max_length=LONGEST, columns=["expert"]
        )
        # A stand-in with one expert more, whose gates are taken.
        folders = [self.study.folder(self.job.set, self.job.seed, task) for task in self.tasks]
        model = lora_to_moe(
            copy.deepcopy(self.study.base), folders, top_k=1, mixing="projection", base_expert=True
        )  # fmt: skip
        init_gates(model, "ridge", batches)
        return torch.stack([layer.router.weight.detach().double() for layer in routed_layers(model)])  # type: ignore[union-attr]

    def put(self, weight_LND: torch.Tensor, scope: Scope | TokenScope) -> None:
        for i, (layer, weight_ND) in enumerate(zip(self.layers, weight_LND, strict=True)):
            router = ScopedRouter(weight_ND.shape[1], len(weight_ND)).requires_grad_(False).to(DEVICE)
            router.weight.copy_(weight_ND)
            router.scope, router.layer = scope, i
            layer.module.moe_lora_router[layer.adapter] = router.eval()

    # --- answers -----------------------------------------------------------------------------------------------------

    def collate(self, rows: list[dict[str, Any]]) -> Any:
        batch = self.collator(rows)
        if self.scope is not None:
            self.scope.ids_BS = batch["input_ids"]
        return batch

    def free(self) -> dict[str, list[Any]]:
        return {kind: answers(self.model, part, self.collate) for kind, part in self.parts.items()}

    def forced(self, chosen: dict[str, list[int]]) -> dict[str, list[Any]]:
        """Answers where each row has one expert, or (n) the base."""
        found = {}
        for kind, experts in chosen.items():
            for expert in sorted(set(experts)):
                missing = [i for i, e in enumerate(experts) if e == expert and (kind, i, e) not in self.known]
                if not missing:
                    continue
                steered: Any = self.model.disable_adapter() if expert == self.n else force_experts(self.model, expert)
                with steered:
                    of_part = answers(self.model, self.parts[kind].select(missing), self.collator)
                self.known |= {(kind, i, expert): answer for i, answer in zip(missing, of_part, strict=True)}
            found[kind] = [self.known[kind, i, expert] for i, expert in enumerate(experts)]
        return found

    def note_picked(self, rows: int, gate: RequestGate, kind: str) -> None:
        index = {name: i for i, name in enumerate([*self.tasks, None])}
        chosen = {kind: [index[name] for name in gate.pick(texts)] for kind, texts in self.texts.items()}
        self.use_own_routers()
        own = {
            kind: _mean(a == b for a, b in zip(chosen[kind], self.own[kind], strict=True))
            for kind in KINDS
            if kind in chosen
        }
        if "none" in chosen:
            own["none"] = _mean(i == self.n for i in chosen["none"])
        self.note(f"picked{kind}", rows, self.forced(chosen), chosen=own)

    def use_own_routers(self) -> None:
        """Give back the routers that experts can be forced in."""
        for layer, router in zip(self.layers, self.routers, strict=True):
            layer.module.moe_lora_router[layer.adapter] = router

    def note(self, way: str, rows: int, found: dict[str, list[Any]], **more: Any) -> None:
        none = found.get("none")
        record: dict[str, Any] = {"set": self.job.set, "seed": self.job.seed, "way": way, "rows": rows, **more}
        if "one" in found:
            right = {kind: [a.is_match for a in of_kind] for kind, of_kind in found.items() if kind != "none"}
            if other := right.pop("two, other", None):
                right["two"] = [a or b for a, b in zip(right["two"], other, strict=True)]
            record["right"] = {kind: "".join("01"[is_right] for is_right in of) for kind, of in right.items()}
            record["loss"] = -sum(a.log_prob for a in found["one"]) / sum(a.tokens for a in found["one"])
        if none:
            record["none"] = _mean(answer.is_match for answer in none)
            record["none_loss"] = -sum(answer.log_prob for answer in none) / sum(answer.tokens for answer in none)
        note = f"{record['right']['one'].count('1') / len(record['right']['one']):.1%}"
        self.study.ledger.add(record, f"{note}, none {record.get('none', 0):.0%}")


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


# --- tasks -----------------------------------------------------------------------------------------------------------


def all_tasks(source: Path) -> dict[str, dict[str, dict[str, list[dict[str, Any]]]]]:
    """Set → task → "train" and "test" → rows."""
    short = {task: short_tasks.TASKS[task](source) for task in ("banking", "kitchen", "logic", "slots")}
    data = json.loads((source / "clinc150/data_full.json").read_text())
    domains = json.loads((source / "clinc150/domains.json").read_text())

    def clinc(domain: str) -> short_tasks.Pairs:
        intents = set(domains[domain])
        return short_tasks.Pairs(*(
            [(text, intent.replace("_", " ")) for text, intent in data[name] if intent in intents]
            for name in ("train", "test")
        ))  # fmt: skip

    files = [list(csv.DictReader((source / f"banking77/{name}.csv").open())) for name in ("train", "test")]
    categories = sorted({row["category"] for row in files[0]})

    def bank(part: int) -> short_tasks.Pairs:
        intents = set(categories[15 * part : 15 * part + 15])
        return short_tasks.Pairs(*(
            [(row["text"], row["category"].lower().replace("_", " ")) for row in rows if row["category"] in intents]
            for rows in files
        ))  # fmt: skip

    intents = ("AddToPlaylist", "BookRestaurant", "GetWeather", "PlayMusic", "RateBook", "SearchCreativeWork",
               "SearchScreeningEvent")  # fmt: skip
    many = {f"clinc {name}": clinc(name) for name in domains}
    many |= {f"bank {part}": bank(part) for part in range(5)}
    many |= {f"snips {intent}": slots_of(source, intent) for intent in intents}
    many |= {"sql": short_tasks.sql(source), "arithmetic": short_tasks.arithmetic(source)}
    pairs = {"short": short, "domains": {task: clinc(task) for task in DOMAINS}, "many": many}
    return {name: {task: _rows(of_task) for task, of_task in tasks.items()} for name, tasks in pairs.items()}


def drawn(rows: list[dict[str, Any]], most: int, seed: int, task: str) -> list[dict[str, Any]]:
    """A task's rows of a seed."""
    return random.Random(f"{seed} {task}").sample(rows, min(len(rows), most))


def slots_of(source: Path, intent: str) -> short_tasks.Pairs:
    """Requests of an intent of Snips → their slots as JSON."""

    def read(name: str) -> list[tuple[str, str]]:
        requests = json.loads((source / f"snips/{name.format(intent)}.json").read_bytes().decode("utf-8", "replace"))
        return [
            ("".join(part["text"] for part in r["data"]).strip(),
             json.dumps({part["entity"]: part["text"].strip() for part in r["data"] if "entity" in part}))
            for r in requests[intent]
        ]  # fmt: skip

    return short_tasks.Pairs(read("train_{}_full"), read("validate_{}"))


def _rows(pairs: short_tasks.Pairs) -> dict[str, list[dict[str, Any]]]:
    """Chats of short texts, without held-out questions among the training ones; at most 1,000 and 200."""
    rows: dict[str, list[dict[str, Any]]] = {}
    seen: set[str] = set()
    for name, of_name, most in (("train", pairs.train, 1000), ("test", pairs.held_out, 200)):
        unique = [pair for pair in dict.fromkeys(of_name) if pair[0] not in seen and len("".join(pair)) <= 200]
        seen |= {question for question, _ in unique}
        drawn = random.Random(0).sample(unique, min(len(unique), most))
        rows[name] = [
            {
                "prompt": [{"role": "user", "content": question}],
                "completion": [{"role": "assistant", "content": answer}],
            }
            for question, answer in drawn
        ]
    return rows


# --- report ----------------------------------------------------------------------------------------------------------

CONTRASTS = (
    ("picked", "own"), ("picked", "token"), ("so far", "token"), ("so far", "picked"), ("half-life", "picked"),
    ("by turn", "picked"), ("by turn", "token"), ("joint", "picked"), ("joint, replay", "picked"),
    ("joint, replay", "own"),
)  # fmt: skip


def report(ledger: Ledger) -> str:
    """The page of the runs that there are."""
    # Of a run that was stopped and made again, the last one counts.
    runs = [*{(r["set"], r["seed"], r["way"], r["rows"]): r for r in ledger.records() if "right" in r}.values()]
    lines = [
        "# What reaches a service",
        "",
        "`python -m studies.requests report` writes this page; the script's head says what was fixed before its first"
        " run. SmolLM2-135M-Instruct; right answers in per cent, means over seeds and rows. *None*: general requests"
        " that are answered as by the base; *harm*: the loss per token of those answers above the base's; *chosen*:"
        " requests picked for their own adapter (of *one*, behind *system* prompts), and general ones for the base.",
        "",
        THEN,
    ]
    controls = [run for run in runs if run["way"].endswith("control")]
    for name in SEEDS:
        of_set = [run for run in runs if run["set"] == name and run not in controls]
        if not of_set:
            continue
        head = f"| way | rows | seeds | {' | '.join(KINDS)} | loss of one | none | harm | chosen |"
        lines += ["", f"## {name}", "", head, f"|{'---|' * 11}"]
        base = {run["seed"]: run["none_loss"] for run in of_set if run["way"] == "base"}
        for way, rows in dict.fromkeys((run["way"], run["rows"]) for run in of_set):
            of_way = [run for run in of_set if (run["way"], run["rows"]) == (way, rows)]
            cells = [way, {0: "", FEW: str(FEW)}.get(rows, "all"), str(len(of_way))]
            kinds = [kind for kind in KINDS if kind in of_way[0]["right"]]
            cells += [f"{100 * float(_matches(of_way, kind).mean()):.1f}" if kind in kinds else "" for kind in KINDS]
            cells += [f"{_mean(run['loss'] for run in of_way):.3f}"]
            has = [run for run in of_way if "none" in run]
            cells += [f"{100 * _mean(run['none'] for run in has):.0f}" if has else ""]
            cells += [f"{_mean(run['none_loss'] - base[run['seed']] for run in has):.3f}" if has else ""]
            chosen = [run["chosen"] for run in of_way if "chosen" in run]
            cells += [", ".join(f"{100 * _mean(c[key] for c in chosen):.1f}" for key in ("one", "system", "none"))
                      if chosen else ""]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", f"| A − B, points, 95 % over rows | {' | '.join(KINDS)} |", f"|{'---|' * 5}"]
        most = max(run["rows"] for run in of_set)
        for a, b in CONTRASTS:
            of_a, of_b = ([r for r in of_set if r["way"] == way and r["rows"] in (0, most)] for way in (a, b))
            if of_a and of_b:
                kinds = [*of_a[0]["right"].keys() & of_b[0]["right"].keys()]
                cells = [_difference(of_a, of_b, kind) if kind in kinds else "" for kind in KINDS]
                lines.append(f"| {a} − {b} | {' | '.join(cells)} |")
    if not controls:
        return "\n".join(lines) + "\n"
    sets = [name for name in SEEDS if any(run["set"] == name for run in controls)]
    made = {name: sorted({run["seed"] for run in controls if run["set"] == name}) for name in sets}
    head = " | ".join(f"{name}, seeds {', '.join(map(str, seeds))}" for name, seeds in made.items())
    lines += ["", "## Controls", "", f"| right, *one* | {head} |", f"|{'---|' * (1 + len(sets))}"]
    for way in dict.fromkeys(run["way"] for run in controls):
        of_sets = [[run for run in controls if (run["way"], run["set"]) == (way, name)] for name in sets]
        cells = [f"{100 * _mean(float(_matches([run], 'one').mean()) for run in of_set):.1f}" for of_set in of_sets]
        lines.append(f"| {way.removesuffix(', control')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _matches(runs: list[dict[str, Any]], kind: str) -> torch.Tensor:
    """[runs, rows]"""
    return torch.tensor([[int(x) for x in run["right"][kind]] for run in runs]).double()


def _difference(a: list[dict[str, Any]], b: list[dict[str, Any]], kind: str) -> str:
    """Rows of all seeds, which draw them anew, are taken as independent."""
    seeds = sorted({run["seed"] for run in a} & {run["seed"] for run in b})
    pair = [_matches([next(run for run in runs if run["seed"] == seed) for seed in seeds], kind) for runs in (a, b)]
    return over_rows((pair[0] - pair[1]).flatten())


def command(
    name: str, description: str | None, study: type[Requests], report: Callable[[Ledger], str],
    shrink: Callable[[], None],
) -> None:  # fmt: skip
    """
    A study of these requests as a command.

    Args:
        name: of the module, the ledger and the page.
        shrink: leaves out most of it, to test the script.
    """
    options = parser(description, workers=True)
    options.add_argument("--source", type=Path, default=Path("data"))
    options.add_argument("--small", action="store_true", help="few steps, rows and tasks, to test the script")
    args = options.parse_args()
    ledger = Ledger((args.work / "small.jsonl") if args.small else RESULTS / f"{name}.jsonl")
    if args.command == "report":
        page = report(ledger)
        if not args.small:
            (RESULTS / f"{name}.md").write_text(page)
        return print(page)
    if args.worker is None:
        more = ["--small"] if args.small else []
        raise SystemExit(start_workers(name, args, "--source", str(args.source), *more))
    score_answers_only()
    made = study(args.source, args.work / name, ledger, *((2, 26) if args.small else ()))
    if args.small:
        HELD_OUT.update(dict.fromkeys(HELD_OUT, 3))
        made.none = made.none[:5]
        shrink()
    work(made)


def main() -> None:
    few = {"short": range(1), "domains": range(0), "many": range(0)}
    command("requests", __doc__, Requests, report, partial(SEEDS.update, few))


if __name__ == "__main__":
    main()
