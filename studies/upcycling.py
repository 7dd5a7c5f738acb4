"""
Which initial experts does upcycling need? SmolLM2-135M-Instruct as a Mixtral of 4 experts, 2 active.

    python -m studies.short_tasks --source FOLDER --output .cache/short_tasks
    python -m studies.upcycling run       # resumes where the ledger ends; needs 8 GiB
    python -m studies.upcycling report    # table and figure of the ledger, in studies/results

Fixed before the first run: a quarter of the short tasks' rows, three passes with all weights trained, measured on
held-out rows before and after each. `dense` trains the model as it is, `copy` and `drop` (rate 0.5) the Mixtral.
`checkpoints` trains the dense model for one pass on each half of the tasks, which is one pass over all rows, makes a
Mixtral of the two, and trains that for two. Rates of 5e-5 and 1e-4, one seed: no intervals, so no verdict on small
differences.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import MoESFTConfig, MoESFTTrainer
from moe_peft.analysis.figures import plot_curves
from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.training.preparation import preparation, tokenized

from .exact_match import measure
from .runs import Ledger, parser, score_answers_only
from .upit import RESULTS, Study

HALVES = (("arithmetic", "logic", "sql"), ("banking", "kitchen", "slots"))
INITS = ("dense", "copy", "drop", "checkpoints")
RATES = (5e-5, 1e-4)
PASSES = 3


class Upcycling:
    """
    Args:
        data: the short tasks.
        ledger: of the losses after each pass.
    """

    def __init__(self, data: Study, ledger: Ledger) -> None:
        self.work, self.ledger, self.digest = data.work / "upcycling", ledger, data.digest
        self.base, self.tokenizer = smollm2_folder(), AutoTokenizer.from_pretrained(smollm2_folder())
        self.train, self.test = Dataset.from_list(data.rows("quarter", 0)), Dataset.from_list(data.test)

    def run(self, init: str, rate: float) -> None:
        """Three passes from one start."""
        shutil.rmtree(self.work, ignore_errors=True)  # of a run that was stopped
        folders, first = [self.base], 0
        if init == "checkpoints":
            folders, first = [self._finetuned(half, rate) for half in HALVES], 1
        if init == "dense":
            model = AutoModelForCausalLM.from_pretrained(self.base)
        else:
            upcycle(folders, self.work / "moe", UpcycleConfig(num_experts=4, top_k=2, init=init))
            model = AutoModelForCausalLM.from_pretrained(self.work / "moe")
        records = [self._measured(model)]
        for seed in range(first, PASSES):
            self._train(model, self.train, rate, seed)
            records.append(self._measured(model))
        for number, record in enumerate(records, start=first):  # all of them, or none
            key = {"init": init, "rate": rate, "passes": number, "data": self.digest}
            self.ledger.add({**key, **record}, f"{record['loss']:.4f}")

    def _finetuned(self, tasks: tuple[str, ...], rate: float) -> Path:
        """The folder of a dense model after a pass over these tasks."""
        model = AutoModelForCausalLM.from_pretrained(self.base)
        rows = self.train.filter(lambda row: row["domain"] in tasks)
        self._train(model, rows, rate, 0)
        folder = self.work / "-".join(tasks)
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder

    def _train(self, model: Any, rows: Dataset, rate: float, seed: int) -> None:
        """One pass."""
        dense = not hasattr(model.config, "num_local_experts")
        arguments, trainer = (SFTConfig, SFTTrainer) if dense else (MoESFTConfig, MoESFTTrainer)
        args = arguments(
            str(self.work / "state"), num_train_epochs=1, per_device_train_batch_size=8, max_length=None,
            padding_free=True, bf16=False, use_cpu=True, gradient_checkpointing=False, learning_rate=rate,
            lr_scheduler_type="constant", save_strategy="no", report_to="none", disable_tqdm=True, seed=seed,
            **({} if dense else {"router_balancing": "layer"}),
        )  # fmt: skip
        trainer(model, args, train_dataset=rows, processing_class=self.tokenizer).train()

    def _measured(self, model: Any) -> dict[str, Any]:
        return measure(model, *tokenized(self.test, self.tokenizer, preparation(max_length=64)))


def report(records: list[dict[str, Any]]) -> None:
    """Write the table and the figure of the runs that there are, and print the table."""
    passes = range(PASSES + 1)
    lines = [
        "# Upcycling SmolLM2-135M-Instruct", "", "`python -m studies.upcycling report` writes this page.", "",
        f"| experts | rate | {' | '.join(f'loss after {n}' for n in passes)} | exact |", f"|{'---|' * (PASSES + 4)}",
    ]  # fmt: skip
    curves = {}
    for init in INITS:
        runs = {rate: {r["passes"]: r for r in records if (r["init"], r["rate"]) == (init, rate)} for rate in RATES}
        for rate, of in runs.items():
            if of:
                losses = [f"{of[n]['loss']:.4f}" if n in of else "" for n in passes]
                lines.append(f"| {init} | {rate:g} | {' | '.join(losses)} | {of[PASSES]['exact']:.3f} |")
        best = min((of for of in runs.values() if of), key=lambda of: of[PASSES]["loss"], default={})
        if best:
            curves[init] = [(n, run["loss"]) for n, run in sorted(best.items())]
    if curves:
        plot_curves(curves, RESULTS / "upcycling.svg", "passes over the rows", "held-out loss")
        lines += ["", "![Held-out loss, the better rate of each](upcycling.svg)"]
    (RESULTS / "upcycling.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    args = parser(__doc__).parse_args()
    ledger = Ledger(RESULTS / "upcycling.jsonl")
    study = Upcycling(Study(args.data, args.work, Ledger(RESULTS / "upit.jsonl")), ledger)
    if args.command == "report":
        return report(ledger.records(data=study.digest))
    score_answers_only()
    for rate in RATES:
        for init in INITS:
            if not ledger.records(init=init, rate=rate, data=study.digest):
                study.run(init, rate)


if __name__ == "__main__":
    main()
