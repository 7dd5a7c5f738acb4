"""
What balances the experts of a deep pretrained model: the scope and the coefficient of the balancing loss.

    python -m studies.balancing run [--workers 2]   # resumes where the ledger ends
    python -m studies.balancing report              # the table of the ledger, in studies/results

SmolLM2-135M-Instruct (30 layers) learns the demo's four kinds of requests with 8 LoRA experts, 2 of them active, in 100
steps of 4 rows at a rate of 1e-3, with each setting and three seeds (initial values, order and rows). Before and after,
the load of every layer is measured on held-out rows.

The predictions were written before these runs, after an earlier table of one seed.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.smollm2 import smollm2_folder
from examples.demo.tasks import make_rows
from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from moe_peft.upit.evaluate import evaluate

from .differences import paired_difference
from .runs import Ledger, parser, score_answers_only, start_workers, work
from .upit import RESULTS

NONE = ("layer", 0.0)
SETTINGS = (NONE, ("layer", 0.01), ("layer", 0.1), ("global", 0.01))
SEEDS, STEPS = range(3), 100
PREDICTIONS = (
    "by layer at 0.01, no expert is dead in any seed, and the CV is less than two thirds of that without a loss",
    "over all layers, the CV is at least nine tenths of that without a loss, and as many experts are dead",
    "no setting's loss differs from that without balancing",
)
COUNTED = ("variation", "monopolies", "dead")


class Job(NamedTuple):
    """A run to be made."""

    scope: str
    coefficient: float
    seed: int


def measured(scope: str, coefficient: float, seed: int) -> dict[str, Any]:
    """The load before and after training, and the loss per held-out answer token."""
    train, test = (Dataset.from_list(rows) for rows in make_rows(300, 20, seed))
    base, tokenizer = (kind.from_pretrained(smollm2_folder()) for kind in (AutoModelForCausalLM, AutoTokenizer))
    torch.manual_seed(seed)
    model = get_peft_model(base, MoELoraConfig(num_experts=8, top_k=2, r=8, lora_alpha=16, task_type="CAUSAL_LM"))
    with tempfile.TemporaryDirectory() as folder:
        args = MoESFTConfig(
            folder, max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-3, bf16=False, max_length=256,
            gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=STEPS, seed=seed,
            router_balancing=scope, router_aux_loss_coef=coefficient,
        )  # fmt: skip
        trainer = MoESFTTrainer(model=model, args=args, train_dataset=train, processing_class=tokenizer)
        before = evaluate(model, test, args, tokenizer, "domain")
        trainer.train()
        after = evaluate(model, test, args, tokenizer, "domain")
    record: dict[str, Any] = {"loss": after.losses["adapted"]["mean"]}
    for name, evaluation in (("before", before), ("after", after)):
        assert evaluation.health is not None
        record[name] = {count: getattr(evaluation.health, count) for count in COUNTED}
    return record


def report(ledger: Ledger) -> str:
    """The page, of all runs."""
    runs: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for record in sorted(ledger.records(), key=lambda record: record["seed"]):
        runs[record["scope"], record["coefficient"]].append(record)

    def variation(setting: tuple[str, float], when: str = "after") -> float:
        return mean(run[when]["variation"] for run in runs[setting])

    def dead(setting: tuple[str, float], when: str = "after") -> list[int]:
        return [run[when]["dead"] for run in runs[setting]]

    def load(setting: tuple[str, float], when: str) -> str:
        monopolies, by_seed = mean(run[when]["monopolies"] for run in runs[setting]), dead(setting, when)
        cells = f"{variation(setting, when):.2f} | {monopolies:.1f} | {mean(by_seed):.1f}"
        return f"{cells} ({', '.join(map(str, by_seed))})"

    losses = {setting: [run["loss"] for run in runs[setting]] for setting in SETTINGS}
    differences = {setting: paired_difference(losses[setting], losses[NONE]) for setting in SETTINGS[1:]}
    lines = [
        "# What balances the experts", "", "`python -m studies.balancing report` writes this page.", "",
        f"SmolLM2-135M-Instruct, 8 LoRA experts of rank 8, 2 active, {STEPS} steps of 4 rows of the demo's requests at "
        f"a rate of 1e-3; means of {len(SEEDS)} seeds. CV: the load's coefficient of variation, averaged over 30 "
        "layers; monopolies: layers; dead: of 240 experts, in brackets by seed; loss: per held-out answer token; "
        "difference: from the loss without balancing, with a 95 % t interval.", "",
        "| scope | coefficient | CV | monopolies | dead | loss | difference |", "|" + "---|" * 7,
        f"| untrained | | {load(NONE, 'before')} | | |",
        f"| none | 0 | {load(NONE, 'after')} | {mean(losses[NONE]):.4f} | |",
    ]  # fmt: skip
    for (scope, coefficient), difference in differences.items():
        setting = scope, coefficient
        cells = f"{load(setting, 'after')} | {mean(losses[setting]):.4f} | {' '.join(difference.cells())}"
        lines.append(f"| {scope} | {coefficient:g} | {cells} |")
    layer, pooled = ("layer", 0.01), ("global", 0.01)
    held = (
        not any(dead(layer)) and variation(layer) < 2 / 3 * variation(NONE),
        variation(pooled) >= 0.9 * variation(NONE) and sum(dead(pooled)) >= sum(dead(NONE)),
        not any(difference.excludes_zero() for difference in differences.values()),
    )
    lines += ["", "| predicted | held |", "|---|---|"]
    lines += [f"| {words} | {'yes' if as_said else 'no'} |" for words, as_said in zip(PREDICTIONS, held, strict=True)]
    return "\n".join(lines) + "\n"


class Study:
    """
    Args:
        work: a folder for locks.
        ledger: of the runs.
    """

    def __init__(self, work: Path, ledger: Ledger) -> None:
        self.work, self.ledger = work / "balancing", ledger
        self.work.mkdir(parents=True, exist_ok=True)

    def jobs(self) -> Iterator[Job]:
        """Runs that are missing."""
        for seed in SEEDS:
            for setting in SETTINGS:
                if not self.ledger.records(**(job := Job(*setting, seed))._asdict()):
                    yield job

    def run(self, job: Job) -> None:
        record = measured(*job)
        self.ledger.add({**job._asdict(), **record}, f"{record['loss']:.4f}")


def main() -> None:
    args = parser(__doc__, workers=True).parse_args()
    if args.command == "run" and args.worker is None:
        raise SystemExit(start_workers("balancing", args))
    ledger = Ledger(RESULTS / "balancing.jsonl")
    if args.command == "report":
        (RESULTS / "balancing.md").write_text(report(ledger))
        return print(report(ledger))
    score_answers_only()
    work(Study(args.work, ledger))


if __name__ == "__main__":
    main()
