"""
What balances the experts of a deep pretrained model: the scope and the coefficient of the balancing loss.

    python -m studies.balancing run      # resumes where the ledger ends; about six minutes of a core a run
    python -m studies.balancing report   # the table of the ledger, in studies/results

SmolLM2-135M-Instruct (30 layers) learns the demo's four kinds of requests with 8 LoRA experts, 2 of them active, in
each setting for 100 steps from the same initial values. Before and after, held-out rows measure every layer's load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from moe_peft.demo.smollm2 import smollm2_folder
from moe_peft.demo.tasks import make_rows
from moe_peft.upit.evaluate import evaluate

from .runs import Ledger, arguments, parser

RESULTS = Path(__file__).parent / "results"
SETTINGS = (("layer", 0.0), ("layer", 0.1), ("global", 0.01), ("layer", 0.01))  # scope, coefficient
SEEDS, STEPS = (0, 1, 2), 100


def run(scope: str, coefficient: float, seed: int, work: Path) -> dict[str, Any]:
    """Load before and after, and the held-out loss, of one setting."""
    train, test = (Dataset.from_list(rows) for rows in make_rows(300, 20))
    base, tokenizer = (kind.from_pretrained(smollm2_folder()) for kind in (AutoModelForCausalLM, AutoTokenizer))
    set_seed(seed)
    model = get_peft_model(base, MoELoraConfig(num_experts=8, top_k=2, r=8, lora_alpha=16, task_type="CAUSAL_LM"))
    args = arguments(
        MoESFTConfig, work, max_steps=STEPS, learning_rate=1e-3, max_length=256, logging_steps=STEPS, seed=seed,
        router_balancing=scope, router_aux_loss_coef=coefficient,
    )  # fmt: skip
    trainer = MoESFTTrainer(model=model, args=args, train_dataset=train, processing_class=tokenizer)
    record: dict[str, Any] = {"scope": scope, "coefficient": coefficient, "seed": seed}
    for when in ("before", "after"):
        if when == "after":
            trainer.train()
        measured = evaluate(model, test, args, tokenizer, "domain")
        assert measured.health is not None
        record[when] = [measured.health.variation, measured.health.monopolies, measured.health.dead]
    return {**record, "loss": measured.losses["adapted"]["mean"]}


def report(ledger: Ledger) -> str:
    """The page of the runs that there are."""
    lines = [
        "# What balances the load",
        "",
        "`python -m studies.balancing report` writes this page. SmolLM2-135M-Instruct, 8 LoRA experts of rank 8, 2 "
        f"active, {STEPS} steps of 8 rows of the demo's requests, learning rate 1e-3. CV: the load's coefficient of "
        "variation, mean of 30 layers; monopolies: layers; dead: of 240 experts; loss: on held-out answers, per token; "
        "means of the seeds.",
        "",
        "| scope | coefficient | seeds | CV before | monopolies | dead | CV after | monopolies | dead | loss |",
        f"|{'---|' * 10}",
    ]
    for scope, coefficient in SETTINGS:
        if runs := ledger.records(scope=scope, coefficient=coefficient):
            loads = [f"{number:.2f}" for when in ("before", "after") for number in np.mean([r[when] for r in runs], 0)]
            loss = f"{np.mean([run['loss'] for run in runs]):.3f}"
            cells = [scope if coefficient else "none", f"{coefficient:g}", str(len(runs)), *loads, loss]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parser(__doc__).parse_args()
    ledger = Ledger(RESULTS / "balancing.jsonl")
    if args.command == "run":
        for seed in SEEDS:
            for scope, coefficient in SETTINGS:
                if not ledger.records(scope=scope, coefficient=coefficient, seed=seed):
                    record = run(scope, coefficient, seed, args.work / "balancing")
                    ledger.add(record, f"CV {record['after'][0]:.2f}")
        return
    (RESULTS / "balancing.md").write_text(report(ledger))
    print(report(ledger))


if __name__ == "__main__":
    main()
