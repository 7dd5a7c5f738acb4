"""
One model from LoRAs on the modules that published ones have: SmolLM2-135M-Instruct, four of the short tasks.

    python -m studies.short_tasks --source FOLDER --output .cache/short_tasks
    python -m studies.lora_kinds run [--workers 2]   # resumes where the ledger ends
    python -m studies.lora_kinds report    # table of the ledger, in studies/results

Fixed before the first run. For each of three kinds (LoRAs of rank 8 on all linears, on q_proj and v_proj, on the FFN)
and each of three seeds: a LoRA of each task, 60 steps of 8 rows, and mixtures of the four, whose gates are calibrated
on 24 training rows of each task. The seed is that of the training and of the draw of these rows. Measured on 100
held-out rows of each task, as a mean over tasks.

Contrasts, as differences of the loss per answer token within a seed, and what is expected of them:

1. LoRAs on all linears, `ridge`, one expert per token: attention *routed*, *mean* and *dropped*. Expected: routed is
   better than the mean by less than 0.05, dropping is worse than it by more than 0.1. `mean` becomes the default of
   `moe-peft mix` if it is worse by less than 0.05, as it makes the mixture exportable and servable.
2. One adapter *picked by its prompt* (by the gates of `ridge`) and `ridge` by token. Expected: equal within 0.05, as
   the tasks are easily told apart.
3. One expert per token and two. Expected: one is better with `ridge` and `arrow`, two are better with `prompts`.
4. PEFT's `ties` (density 0.5, weights 1) and `dare_linear` (density 0.5, weights 1/4), and the mean. Expected: `ties`
   is better than the mean, `dare_linear` is worse; both are worse than `ridge` with one expert.
5. LoRAs on the FFN, with training on rows of all four tasks after it: one *joint* LoRA of rank 8 for the sum of the
   adapters' steps (240), their mean trained on for 100 steps (as one LoRA of rank 32), and the mixture of `ridge` gates
   trained on for 100 steps, each at half of the adapters' rate but the joint one. Expected: the mixture is better than
   the mean and no worse than 0.05 above the joint LoRA.

Three seeds give no intervals: a difference counts where all three have its sign.

Added after the first results, with LoRAs on the FFN: gates from 64 and from 150 rows of each task (logic has no more).

    python -m studies.lora_kinds run --base FOLDER   # and report: another base, with a ledger and a page of its own

On another base LoRAs on the FFN are measured. Expected before its first run, in each of three trainings: `ridge` from
150 rows has at most half of the mean's loss; picking by the prompt from 150 rows has at least as many right answers as
it; `arrow` with one expert lies between it and the mean; trained on, the mixture is better than the mean and not as
good as one LoRA on all rows.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from examples.demo.smollm2 import NAME, smollm2_folder
from moe_peft import MoESFTConfig, MoESFTTrainer, force_experts, init_gates, lora_to_moe
from moe_peft.adapter.layers import MoELoraLinear
from moe_peft.analysis.figures import plot_bars
from moe_peft.models.gates import uniform_gates
from moe_peft.models.layer import routed_layers
from moe_peft.training.preparation import calibration_batches, preparation, tokenized

from .exact_match import Answer, answers, by_task, picked_experts
from .runs import DEVICE, Ledger, arguments, parser, score_answers_only, start_workers, work

RESULTS = Path(__file__).parent / "results"

FFN, ATTENTION = ["gate_proj", "up_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = {"all linears": [*ATTENTION, *FFN], "q and v": ["q_proj", "v_proj"], "FFN": FFN}
TASKS = ("banking", "kitchen", "logic", "slots")
SEEDS = (0, 1, 2)
STEPS, RANK, LEARNING_RATE, LONGEST = 60, 8, 1e-3, 64
TRAINED_ON = 100  # steps of what is made of the adapters
HELD_OUT, CALIBRATION = 100, 24  # rows of each task
GATES = ("ridge", "prompts", "arrow")
# Experts per token of each gate that are measured; with attention "mean", as its table's best is expected.
EXPERTS = {
    "route": {"ridge": (1, 2), "prompts": (1, 2), "arrow": (1, 2)},
    "mean": {"ridge": (1, 2), "prompts": (2,), "arrow": (1,)},
    "dropped": {"ridge": (1,)},
}
MERGES: dict[str, dict[str, Any]] = {
    "ties": {"weights": [1.0] * 4, "density": 0.5},
    "dare_linear": {"weights": [0.25] * 4, "density": 0.5},
    "cat": {"weights": [0.25] * 4},  # the exact mean
}


def lora(kind: str) -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=KINDS[kind], task_type="CAUSAL_LM")


class Job(NamedTuple):
    """A run to be made: `what` is a training (of a task's LoRA, or of all tasks), or "measure"."""

    kind: str
    seed: int
    what: str


JOINT = ("joint LoRA", "mean, trained on", "ridge, trained on")
MORE_TEXTS = (64, 150)


class LoraKinds:
    """
    Args:
        data: folder of the short tasks.
        work: folder for the adapters.
        base: a folder or name; None: SmolLM2's.
    """

    def __init__(self, data: Path, work: Path, ledger: Ledger, base: str | None = None) -> None:
        self.work, self.ledger = work, ledger
        self.work.mkdir(parents=True, exist_ok=True)
        self.base, self.kinds = base or smollm2_folder(), ["FFN"] if base else list(KINDS)
        self.tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.train_rows = {task: self._rows(data / "train.jsonl", task) for task in TASKS}
        self.parts = {}
        for task in TASKS:
            held_out = self._rows(data / "test.jsonl", task)[:HELD_OUT]
            self.parts[task], self.collator = tokenized(
                Dataset.from_list(held_out), self.tokenizer, preparation(LONGEST)
            )

    @staticmethod
    def _rows(path: Path, task: str) -> list[dict[str, Any]]:
        rows = map(json.loads, path.read_text().splitlines())
        return [row for row in rows if row["domain"] == task]

    def jobs(self) -> Iterator[Job]:
        """Runs that are missing and can be made now."""
        done = {(run["kind"], run["seed"], run["way"]) for run in self.ledger.records()}
        for seed in SEEDS:
            for kind in self.kinds:
                trainings = [Job(kind, seed, f"train {task}") for task in TASKS]
                missing = [job for job in trainings if job not in done]
                yield from missing
                if not missing and (kind, seed, "measured") not in done:
                    yield Job(kind, seed, "measure")
                if not missing and kind == "FFN" and (kind, seed, f"ridge, {MORE_TEXTS[-1]} rows") not in done:
                    yield Job(kind, seed, "more texts")
                if not missing and kind == "FFN":
                    yield from (job for what in JOINT if (job := Job(kind, seed, what)) not in done)

    def run(self, job: Job) -> None:
        kind, seed, what = job
        if what == "measure":
            self.measure(kind, seed)
            self.ledger.add({"kind": kind, "seed": seed, "way": "measured"}, "all ways")
        elif what == "more texts":
            self.measure_more_texts(kind, seed)
        elif what in JOINT:
            self.train_jointly(kind, seed, what)
        else:
            self.train(kind, what.removeprefix("train "), seed)

    def folder(self, kind: str, task: str, seed: int) -> Path:
        return self.work / f"{kind.replace(' ', '-')}-{task}-{seed}"

    def load(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).to(DEVICE)

    def train(self, kind: str, task: str, seed: int) -> None:
        started = time.monotonic()
        set_seed(seed)
        model = get_peft_model(self.load(), lora(kind))
        loss = self._fit(model, self.train_rows[task], seed, STEPS, LEARNING_RATE)
        model.save_pretrained(str(self.folder(kind, task, seed)))
        self._add(kind, seed, f"train {task}", {"loss": loss}, started)

    def train_jointly(self, kind: str, seed: int, way: str) -> None:
        """Train one adapter on all tasks, from nothing or from what is made of the tasks' adapters, and measure it."""
        started, folders = time.monotonic(), [self.folder(kind, task, seed) for task in TASKS]
        set_seed(seed)
        steps, rate = TRAINED_ON, LEARNING_RATE / 2
        if way == "joint LoRA":
            model, steps, rate = get_peft_model(self.load(), lora(kind)), len(TASKS) * STEPS, LEARNING_RATE
        elif way == "mean, trained on":
            model = self._merged(folders, "cat")
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(".merged." in name)
        else:
            model = lora_to_moe(self.load(), folders, top_k=1)
            self._set_gates(model, "ridge", seed)
        self._fit(model, [row for rows in self.train_rows.values() for row in rows], seed, steps, rate)
        self._add(kind, seed, way, by_task(self._answers(model.eval())), started)

    def _fit(self, model: Any, rows: list[dict[str, Any]], seed: int, steps: int, rate: float) -> float:
        routed = bool(routed_layers(model))
        config, trainer = (MoESFTConfig, MoESFTTrainer) if routed else (SFTConfig, SFTTrainer)
        args = arguments(
            config, self.work / "state", max_steps=steps, learning_rate=rate, lr_scheduler_type="cosine",
            max_length=LONGEST, logging_steps=steps, seed=seed,
        )  # fmt: skip
        rows_of = Dataset.from_list(rows)
        return trainer(model, args, train_dataset=rows_of, processing_class=self.tokenizer).train().training_loss

    def _answers(self, model: Any) -> list[Answer]:
        return [answer for rows in self.parts.values() for answer in answers(model, rows, self.collator)]

    # --- ways to use four adapters as one --------------------------------------------------------------------------

    def measure(self, kind: str, seed: int) -> None:
        folders = [self.folder(kind, task, seed) for task in TASKS]
        if kind == "FFN":
            self._score(kind, seed, "base", lambda: self.load())
        for merge in ("ties", "dare_linear"):
            self._score(kind, seed, merge, lambda merge=merge: self._merged(folders, merge))
        # "dropped" zeroes the mean, and "arrow" replaces the routers, so both come last.
        for attention in ("route", "mean", "dropped") if kind == "all linears" else ("route",):
            model = lora_to_moe(self.load(), folders, attention="route" if attention == "route" else "mean").eval()
            if attention == "dropped":
                for layer in model.modules():
                    if isinstance(layer, MoELoraLinear):
                        layer.expert_parameters("default")[1]["weight"].data.zero_()
            if attention == "route":
                self._score(kind, seed, "mean of the adapters", lambda m=model: m, uniform_gates(model, "projection"))
                self._add_answers(kind, seed, "own", lambda m=model: self._by_row(m, lambda i, rows: [i] * len(rows)))
            for gates, active_experts in EXPERTS[attention].items():
                suffix = f", attention {attention}" if kind == "all linears" else ""
                of_k = {f"{gates}, k = {k}{suffix}": k for k in active_experts}
                picked = "picked by its prompt" if (attention, gates) == ("route", "ridge") else None
                if all(self.ledger.records(kind=kind, seed=seed, way=way) for way in [*of_k, picked] if way):
                    continue
                self._set_gates(model, gates, seed)
                for way, k in of_k.items():
                    self._score(kind, seed, way, lambda m=model: m, active(model, k))
                if picked:
                    self._add_answers(kind, seed, picked, lambda m=model: self._by_row(m, self._pick(m)))

    def measure_more_texts(self, kind: str, seed: int) -> None:
        for task in TASKS:
            if not self.folder(kind, task, seed).exists():  # the ledger may come from another machine
                self.train(kind, task, seed)
        model = lora_to_moe(self.load(), [self.folder(kind, task, seed) for task in TASKS], top_k=1).eval()
        for rows in MORE_TEXTS:
            self._set_gates(model, "ridge", seed, rows)
            self._add_answers(kind, seed, f"picked, {rows} rows", lambda: self._by_row(model, self._pick(model)))
            self._add_answers(kind, seed, f"ridge, {rows} rows", lambda: self._answers(model))

    def _merged(self, folders: list[Path], merge: str) -> Any:
        set_seed(0)  # dare_linear drops at random
        model = PeftModel.from_pretrained(self.load(), folders[0], adapter_name=TASKS[0])
        for task, folder in zip(TASKS[1:], folders[1:], strict=True):
            model.load_adapter(folder, task)
        model.add_weighted_adapter(list(TASKS), adapter_name="merged", combination_type=merge, **MERGES[merge])
        model.set_adapter("merged")
        return model.eval()

    def _set_gates(self, model: Any, gates: str, seed: int, count: int = CALIBRATION) -> None:
        """Calibrate with the training rows that the seed draws of each task."""
        texts = [
            {**row, "expert": i}
            for i, rows in enumerate(self.train_rows.values())
            for row in random.Random(seed).sample(rows, count)
        ]
        batches = calibration_batches(
            Dataset.from_list(texts), self.tokenizer, len(texts), max_length=LONGEST, columns=["expert"]
        )
        init_gates(model, gates, batches)

    def _pick(self, model: Any) -> Any:
        return lambda i, rows: picked_experts(model, rows, self.collator, 25)

    def _by_row(self, model: Any, choose: Any) -> list[Any]:
        """Answers where each row has one expert, which `choose` says for the rows of a task's index."""
        found = []
        for i, rows in enumerate(self.parts.values()):
            chosen = choose(i, rows)
            for expert in sorted(set(chosen)):
                own = rows.select([j for j, other in enumerate(chosen) if other == expert])
                with force_experts(model, torch.tensor([expert])):
                    found += answers(model, own, self.collator)
        return found

    def _score(self, kind: str, seed: int, way: str, model: Any, context: AbstractContextManager | None = None) -> None:
        def found() -> list[Answer]:
            with context or nullcontext():
                return self._answers(model())

        self._add_answers(kind, seed, way, found)

    def _add_answers(self, kind: str, seed: int, way: str, found: Any) -> None:
        if not self.ledger.records(kind=kind, seed=seed, way=way):
            started = time.monotonic()
            self._add(kind, seed, way, by_task(found()), started)

    def _add(self, kind: str, seed: int, way: str, result: dict[str, Any], started: float) -> None:
        note = f"loss {result['loss']:.3f} in {time.monotonic() - started:.0f} s"
        self.ledger.add({"kind": kind, "seed": seed, "way": way, **result}, note)


@contextmanager
def active(model: Any, k: int) -> Iterator[None]:
    """`k` experts for each token."""
    layers = [(layer.module, layer.adapter) for layer in routed_layers(model)]
    before = [layer.moe_lora_spec[name] for layer, name in layers]
    for layer, name in layers:
        layer.moe_lora_spec[name] = replace(layer.moe_lora_spec[name], top_k=k)
    yield
    for (layer, name), spec in zip(layers, before, strict=True):
        layer.moe_lora_spec[name] = spec


# --- report ----------------------------------------------------------------------------------------------------------

CONTRASTS = (
    ("all linears", "ridge, k = 1, attention mean", "ridge, k = 1, attention route"),
    ("all linears", "ridge, k = 1, attention dropped", "ridge, k = 1, attention mean"),
    ("all linears", "ridge, k = 2, attention mean", "ridge, k = 1, attention mean"),
    ("all linears", "picked by its prompt", "ridge, k = 1, attention route"),
    ("all linears", "picked by its prompt", "ridge, k = 1, attention mean"),
    *(
        contrast
        for kind in ("q and v", "FFN")
        for contrast in (
            (kind, "picked by its prompt", "ridge, k = 1"),
            *((kind, f"{gates}, k = 2", f"{gates}, k = 1") for gates in GATES),
        )
    ),
    *((kind, merge, "mean of the adapters") for kind in KINDS for merge in ("ties", "dare_linear")),
    *(("FFN", "ridge, trained on", other) for other in ("mean, trained on", "joint LoRA", "own")),
)


BARS = {
    "mean of the adapters": "mean of the LoRAs", "ridge, 150 rows": "mixture, ridge gates",
    "picked, 150 rows": "picked by its prompt", "own": "each its own LoRA", "joint LoRA": "one LoRA on all rows",
}  # fmt: skip


def report(ledger: Ledger, base: str = NAME) -> None:
    """The page of a base in `results`, and the figure of SmolLM2."""
    runs = [run for run in ledger.records() if "tasks" in run]
    kinds = [kind for kind in KINDS if any(run["kind"] == kind for run in runs)]
    lines = [HEAD.format(base=base, ledger=ledger.path.name)]
    for kind in kinds:
        lines += [
            f"## LoRAs on {kind}",
            "",
            f"| way | {' | '.join(TASKS)} | mean loss | exact answers | seeds |",
            f"|---|{'---|' * (len(TASKS) + 3)}",
        ]
        for way in dict.fromkeys(run["way"] for run in runs if run["kind"] == kind):
            of_way = [run for run in runs if (run["kind"], run["way"]) == (kind, way)]
            cells = [f"{_mean([run['tasks'][task][0] for run in of_way]):.3f}" for task in TASKS]
            losses = [run["loss"] for run in of_way]
            exact = f"{_mean([run['exact'] for run in of_way]):.0%}"
            cells += [f"{_mean(losses):.3f} ({min(losses):.3f}–{max(losses):.3f})", exact, str(len(of_way))]
            lines.append(f"| {way} | {' | '.join(cells)} |")
        lines.append("")
    lines += ["## Differences within a seed", "", "| LoRAs on | A | B | loss of A − B |", "|---|---|---|---|"]
    for kind, a, b in CONTRASTS:
        of = {(run["seed"], run["way"]): run["loss"] for run in runs if run["kind"] == kind}
        differences = [of[seed, a] - of[seed, b] for seed in SEEDS if (seed, a) in of and (seed, b) in of]
        if differences:
            cells = ", ".join(f"{difference:+.3f}" for difference in differences)
            lines.append(f"| {kind} | {a} | {b} | {cells} |")
    RESULTS.joinpath(f"{ledger.path.stem}.md").write_text("\n".join(lines) + "\n")
    if base != NAME:
        return
    bars = {
        label: {"": 100 * _mean([run["exact"] for run in of_way])}
        for way, label in BARS.items()
        if (of_way := [run for run in runs if (run["kind"], run["way"]) == ("FFN", way)])
    }
    plot_bars(bars, RESULTS / "lora_kinds.png", "Right answers to four tasks, SmolLM2-135M", form="{:.0f} %")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


HEAD = f"""# One model from several LoRAs

{{base}}, four short tasks, LoRAs of rank {RANK} ({STEPS} steps of 8 rows each), {HELD_OUT} held-out
rows of each task; three seeds of the training and of the {CALIBRATION} rows of each task that calibrate the gates.
Loss per answer token and share of answers that greedy decoding gives exactly; means over seeds, in brackets the range.
*own*: each task its own adapter; *picked by its prompt*: one adapter for a row, by the mean of `ridge`'s gates over its
prompt. The contrasts and what was expected of them are in the head of `studies/lora_kinds.py`; all runs are in
`{{ledger}}`.
"""


def main() -> None:
    options = parser(__doc__, workers=True)
    options.add_argument("--base", help="a folder or a name; SmolLM2 by default")
    args = options.parse_args()
    base = Path(args.base).name if args.base else NAME
    name = f"lora_kinds_{base}" if args.base else "lora_kinds"
    ledger = Ledger(RESULTS / f"{name}.jsonl")
    if args.command == "report":
        return report(ledger, base)
    if args.worker is None:
        raise SystemExit(start_workers("lora_kinds", args, *(["--base", args.base] if args.base else [])))
    score_answers_only()
    work(LoraKinds(args.data, args.work / name, ledger, args.base))


if __name__ == "__main__":
    main()
