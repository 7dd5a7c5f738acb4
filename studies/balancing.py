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

from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from moe_peft.demo.smollm2 import smollm2_folder
from moe_peft.demo.tasks import make_rows
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
    """The table of the settings that have runs."""
    lines = [
        "# What balances the experts", "", "`python -m studies.balancing report` writes this page.", "",
        f"SmolLM2-135M-Instruct, 8 LoRA experts of rank 8, 2 active, {STEPS} steps of 4 rows of the demo's requests at "
        f"a rate of 1e-3; means of seeds, {len(SEEDS)} if nothing else is said. CV: the load's coefficient of "
        "variation, averaged over 30 layers; monopolies: layers; dead: of 240 experts, in brackets by seed; loss: per "
        "held-out answer token; difference: from the loss without balancing, with a 95 % t interval over seeds.", "",
        "| scope | coefficient | CV | monopolies | dead | loss | difference |", "|" + "---|" * 7,
    ]  # fmt: skip
    runs: dict[tuple[str, float], dict[int, dict[str, Any]]] = defaultdict(dict)
    for record in ledger.records():
        runs[record["scope"], record["coefficient"]][record["seed"]] = record

    def load(setting: tuple[str, float], when: str) -> tuple[float, list[int], str]:
        """The CV, the dead experts by seed, and three cells."""
        loads = [run[when] for _, run in sorted(runs[setting].items())]
        variation, monopolies = (mean(one[count] for one in loads) for count in ("variation", "monopolies"))
        dead = [one["dead"] for one in loads]
        return variation, dead, f"{variation:.2f} | {monopolies:.1f} | {mean(dead):.1f} ({', '.join(map(str, dead))})"

    differences = {}
    for setting in filter(runs.get, SETTINGS):
        of, without = runs[setting], runs[NONE]
        both = sorted(of.keys() & without.keys())
        if setting == NONE:
            lines.append(f"| untrained | | {load(setting, 'before')[2]} | | |")
        elif len(both) > 1:
            differences[setting] = paired_difference([of[i]["loss"] for i in both], [without[i]["loss"] for i in both])
        name = ("none" if setting == NONE else setting[0]) + (f" ({len(of)} seeds)" if len(of) < len(SEEDS) else "")
        difference = " ".join(differences[setting].cells()) if setting in differences else ""
        loss = f"{mean(run['loss'] for run in of.values()):.4f}"
        lines.append(f"| {name} | {setting[1]:g} | {load(setting, 'after')[2]} | {loss} | {difference} |")
    if all(len(runs[setting]) == len(SEEDS) for setting in SETTINGS):
        none, layer, pooled = (load(setting, "after") for setting in (NONE, ("layer", 0.01), ("global", 0.01)))
        held = (
            not any(layer[1]) and layer[0] < 2 / 3 * none[0],
            pooled[0] >= 0.9 * none[0] and sum(pooled[1]) >= sum(none[1]),
            not any(difference.excludes_zero() for difference in differences.values()),
        )
        lines += ["", "| predicted | held |", "|---|---|"]
        lines += [
            f"| {words} | {'yes' if as_said else 'no'} |" for words, as_said in zip(PREDICTIONS, held, strict=True)
        ]
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
